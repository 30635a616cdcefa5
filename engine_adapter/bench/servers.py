"""Starts what a benchmark measures, each in a process of its own, and ends it again."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_S = 60.0


class ServerFailed(RuntimeError):
    """A process that a benchmark needs did not start; its own message is above."""


@contextmanager
def broker(socket_path: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A real broker, as `kvquay serve` runs it."""
    command = [sys.executable, "-m", "broker", "serve", "--socket", str(socket_path), *options]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


def wait_listening(process: subprocess.Popen[bytes], socket_path: Path) -> None:
    """Return once a starting broker listens; ServerFailed if it has ended instead."""
    while not socket_path.exists():
        if process.poll() is not None:
            raise ServerFailed(f"the broker ended with {process.returncode}")
        select.select([], [], [], 0.001)


@contextmanager
def bare_server(
    socket_path: Path, chunks: int, seed: int, key_bytes: int
) -> Iterator[subprocess.Popen[bytes]]:
    """A bare server with the same keys."""
    module = "engine_adapter.bench.bare"
    arguments: Sequence[str] = (str(socket_path), str(chunks), str(seed), str(key_bytes))
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        if process.stdout.readline() != b"ready\n":
            raise ServerFailed(f"the bare server ended with {process.wait()}")
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()
