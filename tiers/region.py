"""Memory of a primary tier when no broker provides it.

`MemoryRegion` is anonymous shared memory for one process; `NoDataRegion` has rows that can be
numbered but not used, for simulation. The broker brings its own (`broker.memory`). A region gives
one view of shape (num_chunks, row bytes) and ends with `cleanup()`.
"""

from __future__ import annotations

import mmap
from typing import Protocol

PAGE_BYTES = 4096
_MAP_NORESERVE = 0x4000  # Linux; the mmap module of 3.11 does not name it


class Region(Protocol):
    """What a primary tier needs of its memory."""

    def create_kv_memoryview(self) -> memoryview:
        """The rows, shape (num_chunks, row bytes), format 'B', without a copy."""

    def cleanup(self) -> None:
        """Give the memory back. No view is used afterwards; more than one call is fine."""


def _check(num_chunks: int, row_bytes: int) -> None:
    if num_chunks < 1 or row_bytes < 1:
        raise ValueError(f"{num_chunks} rows of {row_bytes} bytes: both must be positive")


class MemoryRegion:
    """Rows in anonymous memory of this process, page-aligned; pages come when first touched."""

    def __init__(self, num_chunks: int, row_bytes: int) -> None:
        _check(num_chunks, row_bytes)
        self.num_chunks = num_chunks
        self.row_bytes = -(-row_bytes // PAGE_BYTES) * PAGE_BYTES
        self._mmap = mmap.mmap(-1, num_chunks * self.row_bytes)

    def create_kv_memoryview(self) -> memoryview:
        """The rows, shape (num_chunks, row_bytes rounded up to a page)."""
        return memoryview(self._mmap).cast("B", (self.num_chunks, self.row_bytes))

    def cleanup(self) -> None:
        """Unmap; BufferError while a view is still alive."""
        self._mmap.close()


class NoDataRegion:
    """Rows without bytes behind them: all of them are the same page. For simulation only."""

    def __init__(self, num_chunks: int, row_bytes: int = PAGE_BYTES) -> None:
        _check(num_chunks, row_bytes)
        self.num_chunks = num_chunks
        self.row_bytes = row_bytes

    def create_kv_memoryview(self) -> memoryview:
        """A view of the right shape over reserved, never populated address space."""
        space = mmap.mmap(
            -1,
            self.num_chunks * self.row_bytes,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            prot=mmap.PROT_READ,
        )
        return memoryview(space).cast("B", (self.num_chunks, self.row_bytes))

    def cleanup(self) -> None:
        """The address space goes with the last view."""
