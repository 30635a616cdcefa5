"""Throughput of store and load through the client, beside memcpy of the same bytes in the same run.

Chunks in batches through a real broker's memory, populated beforehand; source and rows are several
times the last-level cache. A batch is everything an engine does for it: prepare, copy, complete, or
lookup, take, copy, complete; copies run on a worker thread, as in an engine, where scheduler and
workers are processes of their own. Prints medians and their ratios to memcpy.
"""

from __future__ import annotations

import argparse
import mmap
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from broker import wire
from engine_adapter.answers import GroupQuery
from engine_adapter.bench.servers import ServerFailed, broker
from engine_adapter.client import SchedulerClient
from engine_adapter.worker import WorkerClient

KEY_BYTES = 36
MIB = 1 << 20
READY_S = 120.0


class Copier:
    """One engine that stores and loads batches of chunks."""

    def __init__(self, socket: Path, chunk_bytes: int, chunks: int) -> None:
        self.worker = WorkerClient(
            str(socket), engine_id="bench", row_bytes=chunk_bytes, key_bytes=KEY_BYTES
        )
        self.client = SchedulerClient(
            str(socket),
            engine_id="bench",
            namespace=wire.namespace_digest({"bench": "transfer"}),
            row_bytes=chunk_bytes,
            key_bytes=KEY_BYTES,
            call_timeout_s=5.0,
        )
        if not self.worker.wait_attached(READY_S) or not self.client.wait_ready(READY_S):
            raise ServerFailed("the broker does not let the benchmark attach")
        memory = self.worker.memory
        if memory is None or not memory.wait_populated(READY_S):
            raise ServerFailed("the memory was not populated in time")
        self.source = np.random.default_rng(1).integers(
            0, 256, size=(chunks, chunk_bytes), dtype=np.uint8
        )
        self.target = np.empty_like(self.source)
        self.target[:] = 1
        self._number = 0
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="copy")

    def _keys(self, batch: int, at: int) -> list[bytes]:
        return [(at + i).to_bytes(32, "big") + b"\0\0\0\0" for i in range(batch)]

    def store_all(self, batch: int, salt: int) -> None:
        """Store the whole source in batches, under keys that are new for each `salt`. Copies run on
        a worker thread, so that the next batch is prepared while the last one is copied."""
        running: list[tuple[str, list[bytes], Future[bool]]] = []
        for at in range(0, len(self.source) - batch + 1, batch):
            self._number += 1
            request = f"s{self._number}"
            keys = self._keys(batch, at + salt)
            offer = self.client.prepare_store(request, keys, range(1, batch + 1))
            if len(offer.accepted) != batch:
                raise ServerFailed(f"room for {len(offer.accepted)} of {batch} chunks")
            parts = list(self.source[at : at + batch])
            copied = self._copies.submit(
                lambda r, p: bool(self.worker.store(r, p).all()), offer.refs, parts
            )
            running.append((request, keys, copied))
            if len(running) > 1:
                self._end_store(*running.pop(0))
        for last in running:
            self._end_store(*last)

    def _end_store(self, request: str, keys: list[bytes], copied: Future[bool]) -> None:
        if not copied.result():
            raise ServerFailed("a row was lost under a store")
        self.client.complete_store(request, keys)
        self.client.finish(request)

    def load_all(self, batch: int, salt: int) -> None:
        """Load it all again, in the same way."""
        running: list[tuple[str, list[bytes], Future[bool]]] = []
        for at in range(0, len(self.source) - batch + 1, batch):
            self._number += 1
            request = f"l{self._number}"
            keys = self._keys(batch, at + salt)
            query = GroupQuery(group=0, keys=keys, positions=range(1, batch + 1))
            self.client.lookup(request, [query])
            refs = self.client.prepare_load(request, keys)
            if refs is None:
                raise ServerFailed("chunks that were just stored are not there")
            parts = list(self.target[at : at + batch])
            copied = self._copies.submit(
                lambda r, p: bool(self.worker.load(r, p).all()), refs, parts
            )
            running.append((request, keys, copied))
            if len(running) > 1:
                self._end_load(*running.pop(0))
        for last in running:
            self._end_load(*last)

    def _end_load(self, request: str, keys: list[bytes], copied: Future[bool]) -> None:
        if not copied.result():
            raise ServerFailed("a row changed under a load")
        self.client.complete_load(request, keys)
        self.client.finish(request)

    def close(self) -> None:
        """Leave."""
        self._copies.shutdown()
        self.client.close()
        self.worker.close()


def measure(copier: Copier, batch: int, rounds: int, first_salt: int) -> dict[str, float]:
    """Median bytes per second of storing, loading and memcpy of the whole source, in turns."""
    chunks, chunk_bytes = copier.source.shape
    whole = chunks // batch * batch
    samples: dict[str, list[float]] = {"store": [], "load": [], "memcpy": []}
    # Shared memory like the rows: with ordinary memory the kernel may use huge pages on one side.
    shared = np.frombuffer(mmap.mmap(-1, copier.source.nbytes), dtype=np.uint8)
    scratch: NDArray[np.uint8] = shared.reshape(copier.source.shape)
    scratch[:] = 1

    def memcpy() -> None:
        for index in range(whole):
            np.copyto(scratch[index], copier.source[index])

    for number in range(rounds):
        salt = (first_salt + number) * chunks
        for name, run in (
            ("store", partial(copier.store_all, batch, salt)),
            ("load", partial(copier.load_all, batch, salt)),
            ("memcpy", memcpy),
        ):
            start = time.perf_counter()
            run()
            samples[name].append(time.perf_counter() - start)
    if not np.array_equal(copier.target[:whole], copier.source[:whole]):
        raise ServerFailed("what was loaded is not what was stored")
    return {name: whole * chunk_bytes / float(np.median(part)) for name, part in samples.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """`kvquay bench transfer`."""
    parser = argparse.ArgumentParser(prog="kvquay bench transfer", description=__doc__)
    parser.add_argument("--chunk-bytes", type=int, default=2 * MIB)
    parser.add_argument("--chunks", type=int, default=128, help="of the source")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args(argv)
    rows = 2 * arguments.chunks
    memory = rows * arguments.chunk_bytes + MIB
    print(f"{'batch':>6} {'':>7} {'GB/s':>7} {'memcpy':>7} {'ratio':>6}")
    with tempfile.TemporaryDirectory(prefix="kvquay-bench-") as folder:
        socket = Path(folder, "broker.sock")
        with broker(socket, "--memory", str(memory), "--log-level", "warning"):
            copier = Copier(socket, arguments.chunk_bytes, arguments.chunks)
            for number, text in enumerate(arguments.batches.split(",")):
                batch = int(text)
                speed = measure(copier, batch, arguments.rounds, 1 + number * arguments.rounds)
                for name in ("store", "load"):
                    print(
                        f"{batch:>6} {name:>7} {speed[name] / 1e9:>7.2f} "
                        f"{speed['memcpy'] / 1e9:>7.2f} {speed[name] / speed['memcpy']:>6.2f}"
                    )
            copier.close()
    return 0
