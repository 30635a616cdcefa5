"""A server in this process, over real sockets and a real memfd, without a supervisor."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker import wire
from broker.attach import Registry
from broker.members import Member
from broker.pool import Pool
from broker.server import Server
from broker.session import EngineSession
from tiers.sessions import Deadlines, Shares

PAGE = 4096


class MemfdMemory:
    """Rows of one pool in a memfd: generations first, rows from the next page on."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.rows = rows
        self.row_bytes = row_bytes
        self.rows_offset = -(-4 * rows // PAGE) * PAGE
        self.size = self.rows_offset + rows * row_bytes
        self.fd = os.memfd_create("kvquay-test", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size)
        self.generation: NDArray[np.uint32] = np.frombuffer(self._map, dtype=np.uint32, count=rows)

    def map_rows(self) -> memoryview:
        """Rows, shape (rows, row_bytes)."""
        flat = np.frombuffer(self._map, dtype=np.uint8, offset=self.rows_offset)
        return memoryview(flat.reshape(self.rows, self.row_bytes))  # type: ignore[arg-type]

    def zero(self, row: int) -> None:
        """Overwrite a row."""
        os.pwrite(self.fd, bytes(self.row_bytes), self.rows_offset + row * self.row_bytes)

    def close(self) -> None:
        """The mapping goes with the last view."""
        os.close(self.fd)


class TestBroker:
    """A running server; `lock` guards what tests look at."""

    __test__ = False

    def __init__(
        self,
        folder: Path,
        rows: int = 64,
        tiers: Sequence[Mapping[str, Any]] = (),
        shares: Shares = Shares(),  # noqa: B008  frozen
        deadlines: Deadlines = Deadlines(),  # noqa: B008  frozen
    ) -> None:
        import time

        self.path = str(folder / "broker.sock")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        listener.listen(16)
        self._listener = listener
        self.lock = threading.Lock()
        self.pools: list[Pool] = []
        self.mappers: list[tuple[int, dict[str, Any]]] = []

        def pool_for(row_bytes: int) -> Pool:
            for pool in self.pools:
                if pool.row_bytes == row_bytes:
                    return pool
            pool = Pool(
                MemfdMemory(rows, row_bytes),
                lock=self.lock,
                clock=time.monotonic,
                tiers=tiers,
                shares=shares,
                deadlines=deadlines,
            )
            self.pools.append(pool)
            return pool

        def attached(engine: EngineSession, member: Member) -> wire.Attached:
            memory = engine.pool.memory
            assert isinstance(memory, MemfdMemory)
            return wire.Attached(
                protocol=wire.PROTOCOL_VERSION,
                broker="test",
                incarnation=1,
                rows=memory.rows,
                row_bytes=memory.row_bytes,
                rows_offset=memory.rows_offset,
                generation_offset=0,
                memory_bytes=memory.size,
                epoch=engine.epoch.number,
            )

        def memory_fd(pool: Pool) -> int:
            assert isinstance(pool.memory, MemfdMemory)
            return pool.memory.fd

        self.registry = Registry(pool_for)
        self.server = Server(
            listener,
            self.registry,
            self.pools,
            self.lock,
            attached=attached,
            memory_fd=memory_fd,
            hand_over=lambda fd, info: self.mappers.append((fd, info)),
            about=lambda: {"version": "test"},
            outbound_limit_bytes=4 << 20,
            notice_limit_bytes=1 << 20,
        )
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """V1, V2 and owners."""
        with self.lock:
            for pool in self.pools:
                pool.hub.check()

    def close(self) -> None:
        """End it; AssertionError if it does not end."""
        self.server.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._listener.close()
        for pool in self.pools:
            pool.shutdown()


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[TestBroker]:
    """A broker for the length of a test."""
    broker = TestBroker(folder, **options)
    try:
        yield broker
    finally:
        broker.close()
