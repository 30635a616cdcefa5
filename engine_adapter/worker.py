"""A worker's side of an engine at its broker: the memory, and whether a row still is what it was.

The worker maps the broker's memory, copies chunks in and out, and says when older transfers have
ended. Which rows, the scheduler's client knows (`engine_adapter.client`). One thread for calls;
copies themselves may run on any. After fork the child has neither connection nor memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from broker import wire
from engine_adapter.answers import Refs
from engine_adapter.link import Link, LinkState, attach_message
from engine_adapter.transport import SocketTransport, Transport

_MADV_POPULATE_WRITE = 23
_MADV_DONTFORK = 10
_POPULATE_PIECE = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Memory:
    """The mapped region: rows of one pool and their generations."""

    def __init__(self, fd: int, attached: wire.Attached) -> None:
        """Maps `fd`, which is closed; nothing of the process's children sees the mapping."""
        try:
            self._map = mmap.mmap(fd, attached.memory_bytes)
        finally:
            os.close(fd)
        self.num_rows = attached.rows
        self.row_bytes = attached.row_bytes
        flat = np.frombuffer(self._map, dtype=np.uint8)
        self._address = flat.ctypes.data
        self._size = attached.memory_bytes
        _libc.madvise(self._address, self._size, _MADV_DONTFORK)
        end = attached.rows_offset + attached.rows * attached.row_bytes
        self.rows: NDArray[np.uint8] = flat[attached.rows_offset : end].reshape(
            attached.rows, attached.row_bytes
        )
        """Every row, uint8, shape (num_rows, row_bytes). Never written or read without a claim."""
        at = attached.generation_offset
        self._generation = flat[at : at + 4 * attached.rows].view("<u4")
        self._populated = threading.Thread(target=self._populate, daemon=True)

    def populate_in_background(self) -> None:
        """Fault all pages in, so that the first copies run at full speed."""
        self._populated.start()

    def wait_populated(self, timeout_s: float) -> bool:
        """Whether all pages are there, within `timeout_s` seconds."""
        self._populated.join(timeout_s)
        return not self._populated.is_alive()

    def _populate(self) -> None:
        for at in range(0, self._size, _POPULATE_PIECE):
            size = min(_POPULATE_PIECE, self._size - at)
            if _libc.madvise(self._address + at, size, _MADV_POPULATE_WRITE):
                return  # an older kernel: pages come when they are first touched

    def are_current(self, refs: Refs) -> NDArray[np.bool_]:
        """Which rows still have the generation that was handed out; checked before and after a
        copy, it tells whether the bytes are those of the key."""
        rows = refs["row"]
        inside = rows < self.num_rows
        current: NDArray[np.bool_] = np.zeros(len(refs), dtype=bool)
        current[inside] = self._generation[rows[inside]] == refs["generation"][inside]
        return current


class WorkerClient:
    """See the module."""

    def __init__(
        self,
        socket_path: str,
        *,
        engine_id: str,
        row_bytes: int,
        key_bytes: int,
        rank: int = 0,
        world: int = 1,
        populate: bool = True,
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[[], Transport] | None = None,
        map_memory: Callable[[int, wire.Attached], Memory] = Memory,
    ) -> None:
        """Nothing is opened yet; `step` (or `wait_attached`) attaches."""
        self._populate = populate
        self._map_memory = map_memory
        self._attach = attach_message(
            wire.Role.WORKER, engine_id, row_bytes, key_bytes, world, rank=rank
        )
        self._link = Link(
            connect or (lambda: SocketTransport(socket_path)),
            lambda: self._attach,
            self._on_message,
            self._on_down,
            clock,
        )
        self._clock = clock
        self.memory: Memory | None = None
        self.attached: wire.Attached | None = None
        self._lock = threading.Lock()
        """Guards `_running` and `_fences`: copies may end on other threads. A leaf."""
        self._running: dict[int, int] = {}  # fence at its start -> transfers under way
        self._fence = 0
        self._owed: int | None = None
        _workers.add(self)

    @property
    def state(self) -> LinkState:
        """Whether the broker is there."""
        return self._link.state

    def step(self) -> None:
        """Read what the broker has said and answer it. Never blocks."""
        self._link.check_thread()
        if self._may_attach():
            self._link.poll()
        self._tell_if_ended()

    def wait_attached(self, timeout_s: float) -> bool:
        """Attach; False if that did not happen in time."""
        self._link.check_thread()
        return self._may_attach() and self._link.wait_through(
            lambda: self.memory is not None, timeout_s
        )

    def _may_attach(self) -> bool:
        """Attaching says that transfers over an earlier connection have ended: not before."""
        with self._lock:
            return self.memory is not None or not self._running

    def close(self) -> None:
        """End this worker's membership; the memory goes with the last reference to it."""
        self._link.close()
        self.memory = None

    @contextmanager
    def transfer(self) -> Iterator[Memory]:
        """While this is open rows may be touched: the broker is not told that transfers ended.

        RuntimeError if there is no memory now.
        """
        with self._lock:  # with the memory, so that no attach can say in between that all has ended
            memory = self.memory
            if memory is None:
                raise RuntimeError("not attached: there is no memory to copy from or to")
            fence = self._fence
            self._running[fence] = self._running.get(fence, 0) + 1
        try:
            yield memory
        finally:
            with self._lock:
                self._running[fence] -= 1
                if not self._running[fence]:
                    del self._running[fence]

    def load(self, refs: Refs, into: Sequence[NDArray[np.uint8]]) -> NDArray[np.bool_]:
        """Copy rows out, the first `into[i].nbytes` bytes of row i. Which of them are good: the
        others had been given to another key, and what was copied means nothing."""
        try:
            with self.transfer() as memory:
                good = memory.are_current(refs)
                for at in np.flatnonzero(good).tolist():
                    target = into[at]
                    np.copyto(target, memory.rows[refs["row"][at], : target.nbytes])
                return good & memory.are_current(refs)
        except RuntimeError:
            return np.zeros(len(refs), dtype=bool)

    def store(self, refs: Refs, sources: Sequence[NDArray[np.uint8]]) -> NDArray[np.bool_]:
        """Copy into rows; which of them were still this engine's to write."""
        try:
            with self.transfer() as memory:
                good = memory.are_current(refs)
                for at in np.flatnonzero(good).tolist():
                    source = sources[at]
                    np.copyto(memory.rows[refs["row"][at], : source.nbytes], source)
                return good & memory.are_current(refs)
        except RuntimeError:
            return np.zeros(len(refs), dtype=bool)

    def _on_message(self, message: wire.Message, fds: list[int]) -> None:
        if isinstance(message, wire.Attached):
            self.attached = message
            with self._lock:  # another broker counts from the beginning; nothing runs (see above)
                self._fence, self._owed = 0, None
            for fd in fds[1:]:
                os.close(fd)
            if fds:
                self.memory = self._map_memory(fds[0], message)
                if self._populate:
                    self.memory.populate_in_background()
        elif isinstance(message, wire.ResetNotice):
            with self._lock:
                self._fence = max(self._fence, message.epoch)
                self._owed = message.epoch
            self._tell_if_ended()
        elif isinstance(message, wire.MemoryReplaced):
            self._link.reconnect("the broker has new memory")

    def _tell_if_ended(self) -> None:
        with self._lock:
            owed = self._owed
            if owed is None or any(fence < owed for fence in self._running):
                return
            self._owed = None
        self._link.send(wire.TransfersEnded(epoch=owed))

    def _on_down(self) -> None:
        with self._lock:
            self.memory = None
        self.attached = None

    def forget_in_child(self) -> None:
        """After fork: the mapping is not here (MADV_DONTFORK), so nothing may point to it."""
        self.memory = None


_workers: weakref.WeakSet[WorkerClient] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for worker in list(_workers):
        worker.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
