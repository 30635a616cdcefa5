"""What the broker itself costs: time to the first attach, reservation, memory, idle processor time.

Reservation is measured beside bare fallocate of the same size in the same run. With `--chunks`,
what tables of so many cost in memory, too, and the longest pause for collecting garbage.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from broker.wire import ask_status
from engine_adapter.bench.lookup import KEY_BYTES, ROW_BYTES, fill
from engine_adapter.bench.servers import ServerFailed, broker, wait_listening
from engine_adapter.worker import WorkerClient

MIB = 1 << 20
IDLE_S = 10.0
READY_S = 120.0


def bare_fallocate(size_bytes: int) -> float:
    """Seconds to reserve that much in one call."""
    fd = os.memfd_create("kvquay-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        start = time.perf_counter()
        os.posix_fallocate(fd, 0, size_bytes)
        return time.perf_counter() - start
    finally:
        os.close(fd)


def our_reservation(size_bytes: int) -> float:
    """Seconds to reserve the same as the broker does."""
    from importlib import import_module

    region = import_module("broker.memory").Region.create(size_bytes)
    try:
        start = time.perf_counter()
        region.reserve()
        return time.perf_counter() - start
    finally:
        region.close()


def first_attach(socket: Path, memory: int) -> tuple[float, int, int, float]:
    """Seconds from start to attach; RssAnon and RssFile of the broker; idle share of a core."""
    start = time.perf_counter()
    with broker(socket, "--memory", str(memory), "--log-level", "warning") as process:
        wait_listening(process, socket)
        worker = WorkerClient(
            str(socket), engine_id="bench", row_bytes=65536, key_bytes=36, populate=False
        )
        if not worker.wait_attached(READY_S):
            raise ServerFailed("the broker does not let the benchmark attach")
        took = time.perf_counter() - start
        serving = _serving(process.pid)
        anonymous, file = _resident(serving[0].pid)
        before = sum(serving[0].cpu_times()[:2])
        began = time.perf_counter()
        select.select([], [], [], IDLE_S)
        share = (sum(serving[0].cpu_times()[:2]) - before) / (time.perf_counter() - began)
        worker.close()
    return took, anonymous, file, share


def tables(socket: Path, chunks: int) -> tuple[int, float, int]:
    """Bytes of anonymous memory that so many resident chunks take in a broker, seconds of its
    longest pause for collecting garbage since, and how many there are really."""
    memory = (chunks + chunks // 50 + 64) * (ROW_BYTES + 4)
    options = ("--memory", str(memory), "--log-level", "warning", "--policy", "lru")
    with broker(socket, *options) as process:
        wait_listening(process, socket)
        while not _status(socket)["memory_reserved"]:
            select.select([], [], [], 0.05)
        (serving,) = _serving(process.pid)
        before, _ = _resident(serving.pid)
        fill(socket, [number.to_bytes(KEY_BYTES, "big") for number in range(chunks)])
        select.select([], [], [], IDLE_S)  # it collects garbage when nobody asks
        after, _ = _resident(serving.pid)
        status = _status(socket)
    return after - before, status["longest_collection_s"], status["pools"][0]["ready"]


def _status(socket: Path) -> dict[str, Any]:
    return ask_status(str(socket), "kvquay bench", READY_S)


def _serving(pid: int) -> list[psutil.Process]:
    """The broker process under a supervisor."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "broker.main" in child.cmdline()]


def _resident(pid: int) -> tuple[int, int]:
    found = {"RssAnon": 0, "RssFile": 0}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) * 1024
    return found["RssAnon"], found["RssFile"]


def main(argv: Sequence[str] | None = None) -> int:
    """`kvquay bench broker`."""
    parser = argparse.ArgumentParser(prog="kvquay bench broker", description=__doc__)
    parser.add_argument("--memory", type=int, default=1024, help="MiB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=0, help="needs 4 KiB of memory for each")
    arguments = parser.parse_args(argv)
    memory = arguments.memory * MIB
    bare, ours = [], []
    for _ in range(arguments.runs):
        bare.append(bare_fallocate(memory))
        ours.append(our_reservation(memory))
    print(
        f"reservation of {arguments.memory} MiB: {statistics.median(ours):.3f} s, bare fallocate "
        f"{statistics.median(bare):.3f} s, speed ratio "
        f"{statistics.median(bare) / statistics.median(ours):.2f}"
    )
    with tempfile.TemporaryDirectory(prefix="kvquay-bench-") as folder:
        took, anonymous, file, share = first_attach(Path(folder, "broker.sock"), memory)
    print(f"start to first attach: {took:.3f} s")
    print(f"resident, anonymous + file: {(anonymous + file) / MIB:.1f} MiB")
    print(f"idle: {100 * share:.2f} % of a core")
    if arguments.chunks:
        with tempfile.TemporaryDirectory(prefix="kvquay-bench-") as folder:
            taken, pause, ready = tables(Path(folder, "broker.sock"), arguments.chunks)
        print(f"tables of {ready:,} chunks (LRU): {taken / MIB:.0f} MiB")
        print(f"longest pause for collecting garbage: {1000 * pause:.2f} ms")
    return 0
