"""Latency of lookups through the real client and a real broker, beside the bare server.

Fresh random keys and a new request each call; half of the calls have their first missing key
somewhere in the last quarter, where the bare server stops too. Holds are released inside the
measured loop. Prints medians, 99th percentiles and their ratios, and how the median grows with the
number of resident chunks beside a bare dict probe of the same keys.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.synchronize
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker import wire
from engine_adapter.answers import GroupQuery
from engine_adapter.bench.bare import PREFIX, BareClient, make_keys
from engine_adapter.bench.servers import ServerFailed, bare_server, broker
from engine_adapter.client import SchedulerClient
from engine_adapter.worker import WorkerClient

KEY_BYTES = 36
ROW_BYTES = 4096
CHUNK_TOKENS = 16
FILL_KEYS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Microseconds per call at one number of keys: ours, the bare server's, a bare probe's."""

    keys: int
    clients: int
    ours: NDArray[np.float64]
    bare: NDArray[np.float64]
    probe_p50: float


class Asker:
    """One engine that looks up random prompts."""

    def __init__(self, socket: Path, bare: Path, keys: list[bytes], seed: int, name: str) -> None:
        self._keys = keys
        self._random = random.Random(seed)
        self._name = name
        self._bare = BareClient(str(bare))
        self.client = SchedulerClient(
            str(socket),
            engine_id=name,
            namespace=wire.namespace_digest({"bench": "lookup"}),
            row_bytes=ROW_BYTES,
            key_bytes=KEY_BYTES,
            world=0,
            call_timeout_s=5.0,
        )
        if not self.client.wait_ready(30):
            raise ServerFailed("the broker does not let the benchmark attach")
        self._number = 0

    def prompt(self, keys: int, miss: bool) -> tuple[list[bytes], int]:
        """Keys and how many leading ones are there."""
        chosen = self._random.choices(self._keys, k=keys)
        if not miss:
            return chosen, keys
        at = self._random.randrange(keys - keys // 4, keys)
        chosen[at] = self._random.randbytes(KEY_BYTES)
        return chosen, at

    def ask_ours(self, prompt: list[bytes], there: int, positions: Any) -> float:
        """Seconds of one lookup and the release of what it held."""
        self._number += 1
        request = f"r{self._number}"
        query = GroupQuery(group=0, keys=prompt, positions=positions)
        start = time.perf_counter()
        answer = self.client.lookup(request, [query])
        self.client.finish(request)
        took = time.perf_counter() - start
        if answer.groups[0].count != there:
            raise ServerFailed(f"{answer.groups[0].count} chunks found, {there} are there")
        return took

    def ask_bare(self, prompt: list[bytes], there: int) -> float:
        """Seconds of one lookup at the bare server."""
        self._number += 1
        start = time.perf_counter()
        found = self._bare.lookup(self._number, prompt)
        took = time.perf_counter() - start
        if found != there:
            raise ServerFailed(f"the bare server found {found} chunks, {there} are there")
        return took

    def measure(self, keys: int, calls: int) -> tuple[list[float], list[float]]:
        """Microseconds of `calls` calls each, in turns of 50."""
        positions = np.arange(1, keys + 1, dtype="<u4") * CHUNK_TOKENS
        ours: list[float] = []
        bare: list[float] = []
        while len(ours) < calls:
            turn = [self.prompt(keys, number % 2 == 1) for number in range(50)]
            ours += [self.ask_ours(prompt, there, positions) * 1e6 for prompt, there in turn]
            turn = [self.prompt(keys, number % 2 == 1) for number in range(50)]
            bare += [self.ask_bare(prompt, there) * 1e6 for prompt, there in turn]
        return ours, bare

    def close(self) -> None:
        """End."""
        self.client.close()
        self._bare.close()


def fill(socket: Path, keys: list[bytes]) -> None:
    """Make every key resident, through the real client; no byte is written."""
    options = {"engine_id": "filler", "row_bytes": ROW_BYTES, "key_bytes": KEY_BYTES}
    client = SchedulerClient(
        str(socket),
        namespace=wire.namespace_digest({"bench": "lookup"}),
        call_timeout_s=30.0,
        **options,  # type: ignore[arg-type]
    )
    worker = WorkerClient(str(socket), populate=False, **options)  # type: ignore[arg-type]
    if not worker.wait_attached(60) or not client.wait_ready(60):
        raise ServerFailed("the broker does not let the benchmark attach")
    for at in range(0, len(keys), FILL_KEYS):
        batch = keys[at : at + FILL_KEYS]
        request = f"fill{at}"
        offer = client.prepare_store(request, batch, range(at + 1, at + 1 + len(batch)))
        if len(offer.accepted) != len(batch):
            raise ServerFailed(f"only {len(offer.accepted)} of {len(batch)} chunks found room")
        client.complete_store(request, batch)
        client.finish(request)
        if at // FILL_KEYS % 100 == 0:
            print(f"\r{at:,} of {len(keys):,} chunks", end="", file=sys.stderr, flush=True)
    print(f"\r{len(keys):,} chunks resident      ", file=sys.stderr)
    client.close()
    worker.close()


def probe_p50(keys: list[bytes], count: int, calls: int) -> float:
    """Median microseconds of looking `count` of the keys up in a dict, nothing else."""
    index = {PREFIX + key: row for row, key in enumerate(keys)}
    chooser = random.Random(7)
    times = []
    for _ in range(calls):
        packed = b"".join(chooser.choices(keys, k=count))
        get = index.get
        start = time.perf_counter()
        for at in range(0, len(packed), KEY_BYTES):
            get(PREFIX + packed[at : at + KEY_BYTES])
        times.append((time.perf_counter() - start) * 1e6)
    return float(np.median(times))


def _one_client(
    socket: Path,
    bare: Path,
    chunks: int,
    seed: int,
    number: int,
    keys: int,
    calls: int,
    start: multiprocessing.synchronize.Barrier,
    results: Any,
) -> None:
    asker = Asker(socket, bare, make_keys(chunks, seed, KEY_BYTES), number, f"asker{number}")
    start.wait()
    results.put(asker.measure(keys, calls))
    asker.close()


def measure(
    socket: Path, bare: Path, keys: list[bytes], seed: int, count: int, clients: int, calls: int
) -> Figures:
    """Figures at one number of keys with one or several clients at once."""
    if clients == 1:
        asker = Asker(socket, bare, keys, 1, "asker")
        ours, unburdened = asker.measure(count, calls)
        asker.close()
    else:
        context = multiprocessing.get_context("spawn")
        barrier, results = context.Barrier(clients), context.Queue()
        processes = [
            context.Process(
                target=_one_client,
                args=(socket, bare, len(keys), seed, n, count, calls // clients, barrier, results),
            )
            for n in range(clients)
        ]
        for process in processes:
            process.start()
        parts = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
        ours = [value for part, _ in parts for value in part]
        unburdened = [value for _, part in parts for value in part]
    return Figures(
        keys=count,
        clients=clients,
        ours=np.array(ours),
        bare=np.array(unburdened),
        probe_p50=probe_p50(keys, count, 200),
    )


def run(chunks: int, calls: int, counts: Sequence[int], clients: Sequence[int]) -> list[Figures]:
    """All figures at one number of resident chunks."""
    seed = 11
    keys = make_keys(chunks, seed, KEY_BYTES)
    figures = []
    memory = (chunks * 5 // 4 + 4096) * (ROW_BYTES + 64)
    with tempfile.TemporaryDirectory(prefix="kvquay-bench-") as folder:
        socket, bare = Path(folder, "broker.sock"), Path(folder, "bare.sock")
        tier = json.dumps({"type": "memory", "max_chunks": 1})
        with (
            broker(socket, "--memory", str(memory), "--tier", tier),
            bare_server(bare, chunks, seed, KEY_BYTES),
        ):
            fill(socket, keys)
            for number in clients:
                figures += [
                    measure(socket, bare, keys, seed, count, number, calls) for count in counts
                ]
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """`kvquay bench lookup`."""
    parser = argparse.ArgumentParser(prog="kvquay bench lookup", description=__doc__)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--small", type=int, default=10_000, help="chunks of the growth comparison")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--keys", default="64,1024")
    parser.add_argument("--clients", default="1,4")
    arguments = parser.parse_args(argv)
    counts = [int(part) for part in arguments.keys.split(",")]
    clients = [int(part) for part in arguments.clients.split(",")]
    small = run(arguments.small, arguments.calls, counts, [1])
    large = run(arguments.chunks, arguments.calls, counts, clients)
    print(
        f"{'chunks':>10} {'clients':>7} {'keys':>5} {'p50 us':>8} {'bare':>8} {'ratio':>6} "
        f"{'p99 us':>8} {'bare':>8} {'ratio':>6}"
    )
    for chunks, figures in ((arguments.small, small), (arguments.chunks, large)):
        for f in figures:
            p50, p99 = np.percentile(f.ours, [50, 99])
            bare50, bare99 = np.percentile(f.bare, [50, 99])
            print(
                f"{chunks:>10,} {f.clients:>7} {f.keys:>5} {p50:>8.0f} {bare50:>8.0f} "
                f"{p50 / bare50:>6.2f} {p99:>8.0f} {bare99:>8.0f} {p99 / bare99:>6.2f}"
            )
    for few, many in zip(small, [f for f in large if f.clients == 1], strict=True):
        grown = float(np.median(many.ours)) - float(np.median(few.ours))
        probe = many.probe_p50 - few.probe_p50
        print(
            f"growth of p50 at {few.keys} keys: {grown:.0f} us; of a bare dict probe: "
            f"{probe:.0f} us"
        )
    return 0
