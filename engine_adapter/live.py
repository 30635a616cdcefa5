"""Replay, live: a real broker and N engine processes that store and load patterned chunks.

Requests start in the order of the trace, one in flight per engine; which engine gets a request is
drawn from the seed, as in simulation. Every loaded byte is checked. What one engine does with a
request is in `engine_adapter.live_engine`.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np

from engine_adapter.bench.servers import broker
from engine_adapter.live_engine import PAGE_BYTES, Outcome
from engine_adapter.live_engine import main as engine_main

GENERATION_BYTES = 4
HEADER_ROOM_BYTES = 64 << 10
START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """One request of the trace."""

    hash_ids: Sequence[int]
    input_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveResult:
    """What a replay came to. Rates are fractions; times in seconds, throughput in bytes/s."""

    requests: int
    block_hit_rate: float
    token_hit_rate: float
    wrong_chunks: int
    stored_blocks: int
    seconds: float
    load_bytes_per_s: float
    store_bytes_per_s: float
    lookup_p50_s: float
    lookup_p99_s: float


class WrongBytes(RuntimeError):
    """A chunk was loaded whose bytes are not those of its key."""


@dataclass(slots=True)
class _Engine:
    process: SpawnProcess
    pipe: Connection
    busy: bool = False


def memory_for(rows: int, chunk_bytes: int) -> int:
    """Bytes of `--memory` that give `rows` rows of this size, and a few more if they are small."""
    row = -(-chunk_bytes // PAGE_BYTES) * PAGE_BYTES
    header = -(-(HEADER_ROOM_BYTES + GENERATION_BYTES * rows) // PAGE_BYTES) * PAGE_BYTES
    return rows * row + header


@contextmanager
def _engines(
    sockets: Sequence[Path], chunk_bytes: int, most_blocks: int
) -> Iterator[list[_Engine]]:
    context = multiprocessing.get_context("spawn")
    engines = []
    for number, socket in enumerate(sockets):
        ours, theirs = context.Pipe()
        arguments = (theirs, str(socket), f"engine{number}", chunk_bytes, most_blocks)
        process = context.Process(target=engine_main, args=arguments)
        process.start()
        theirs.close()
        engines.append(_Engine(process, ours))
    try:
        for number, engine in enumerate(engines):
            if not engine.pipe.poll(START_S) or engine.pipe.recv() != "ready":
                raise RuntimeError(f"engine {number} did not start within {START_S:g} s")
        yield engines
    finally:
        for engine in engines:
            if engine.process.is_alive():
                try:
                    engine.pipe.send(None)
                except OSError:
                    engine.process.kill()
            engine.pipe.close()
            engine.process.join(10)
            if engine.process.is_alive():
                engine.process.kill()


def run_live(
    trace: Sequence[LiveRequest],
    *,
    engines: int,
    memory_blocks: int,
    layout: str,
    policy: str,
    seed: int,
    chunk_bytes: int,
    progress: bool = False,
) -> LiveResult:
    """Replay `trace`. WrongBytes if a single byte was wrong.

    `layout` shared: one broker with `memory_blocks` rows; private: one broker per engine, which
    share out the rows.
    """
    chooser = random.Random(seed)
    places = [chooser.randrange(engines) for _ in trace]
    most_blocks = max(len(request.hash_ids) for request in trace)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvquay-replay-")))
        sockets = []
        brokers = 1 if layout == "shared" else engines
        for number in range(brokers):
            rows = memory_blocks // brokers + (number < memory_blocks % brokers)
            socket = folder / f"broker{number}.sock"
            memory = memory_for(rows, chunk_bytes)
            options = (
                "--memory",
                str(memory),
                "--policy",
                policy,
                "--share-total",
                "1",
                "--share-sure",
                "1",
            )
            stack.enter_context(broker(socket, *options))
            sockets.append(socket)
        members = [sockets[number % brokers] for number in range(engines)]
        running = stack.enter_context(_engines(members, chunk_bytes, most_blocks))
        start = time.perf_counter()
        outcomes = list(_dispatch(trace, places, running, progress))
        seconds = time.perf_counter() - start
    return _sum_up(outcomes, seconds, chunk_bytes)


def _dispatch(
    trace: Sequence[LiveRequest], places: Sequence[int], engines: list[_Engine], progress: bool
) -> Iterator[Outcome]:
    """Start requests in order, each as soon as its engine is free and its forerunners started."""
    told = time.monotonic()
    for number, (request, place) in enumerate(zip(trace, places, strict=True)):
        engine = engines[place]
        while engine.busy:
            yield from _collect(engines)
        engine.pipe.send((request.hash_ids, request.input_length))
        engine.busy = True
        if progress and time.monotonic() - told > 0.5:
            told = time.monotonic()
            print(f"\r{number:,} of {len(trace):,} requests", end="", file=sys.stderr, flush=True)
    while any(engine.busy for engine in engines):
        yield from _collect(engines)
    if progress:
        print("\r" + " " * 40, end="\r", file=sys.stderr, flush=True)


def _collect(engines: list[_Engine]) -> Iterator[Outcome]:
    busy = {engine.pipe: engine for engine in engines if engine.busy}
    for pipe in wait(list(busy)):
        assert isinstance(pipe, Connection)
        try:
            outcome = pipe.recv()
        except EOFError:
            raise RuntimeError("an engine process has died; its own message is above") from None
        busy[pipe].busy = False
        yield outcome


def _sum_up(outcomes: list[Outcome], seconds: float, chunk_bytes: int) -> LiveResult:
    wrong = sum(outcome.wrong for outcome in outcomes)
    if wrong:
        raise WrongBytes(f"{wrong} chunks were loaded with wrong bytes")
    hits = sum(outcome.hit_blocks for outcome in outcomes)
    stored = sum(outcome.stored_blocks for outcome in outcomes)
    load_s = sum(outcome.load_s for outcome in outcomes if outcome.hit_blocks)
    store_s = sum(outcome.store_s for outcome in outcomes if outcome.stored_blocks)
    lookups = np.array([outcome.lookup_s for outcome in outcomes])
    return LiveResult(
        requests=len(outcomes),
        block_hit_rate=hits / sum(outcome.blocks for outcome in outcomes),
        token_hit_rate=sum(o.hit_tokens for o in outcomes) / sum(o.tokens for o in outcomes),
        wrong_chunks=wrong,
        stored_blocks=stored,
        seconds=seconds,
        load_bytes_per_s=hits * chunk_bytes / load_s if load_s else 0.0,
        store_bytes_per_s=stored * chunk_bytes / store_s if store_s else 0.0,
        lookup_p50_s=float(np.percentile(lookups, 50)),
        lookup_p99_s=float(np.percentile(lookups, 99)),
    )
