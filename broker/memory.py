"""The region of shared memory: a sealed memfd, its header, and the pools laid out in it.

The supervisor creates and reserves it, the broker lays pools out, engines map it by descriptor.
There is no name in any file system, so nothing is left behind however its processes end. Nothing
here touches payload, but for `PoolMemory.map_rows`, which is for tiers.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from broker.errors import MIB, ConfigError, MemoryTooLarge
from broker.limits import HUGE_PAGE_BYTES, PAGE_BYTES, MemoryLimits, read_limits

MAGIC: Final = b"KVQUAY\x00\x01"
HEADER_BYTES: Final = PAGE_BYTES
LAYOUT_VERSION: Final = 1
PIECE_BYTES: Final = 64 * MIB
GENERATION_BYTES: Final = 4
_HEADER: Final = struct.Struct("<8sIIQ")  # magic, layout version, state, incarnation
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_SEAL = 1033, 2, 4, 1
_MFD_HUGETLB: Final = 4


class Region:
    """One memfd. Whoever made or opened the object closes it."""

    def __init__(self, fd: int, size_bytes: int, huge_pages: str) -> None:
        """Use `create` or `open`."""
        self.fd = fd
        self.size_bytes = size_bytes
        self.huge_pages = huge_pages
        """What was really got: "2MiB", "transparent" or "none"."""
        self.reserved_bytes = 0

    @classmethod
    def create(
        cls, size_bytes: int, *, huge_pages: bool = False, limits: MemoryLimits | None = None
    ) -> Self:
        """A sealed region of `size_bytes`, not reserved yet. MemoryTooLarge if it can't fit."""
        if size_bytes < HEADER_BYTES + 2 * PAGE_BYTES:
            raise ConfigError("memory", size_bytes, "too small for a single row")
        limits = read_limits() if limits is None else limits
        unit = HUGE_PAGE_BYTES if huge_pages else PAGE_BYTES
        size_bytes = size_bytes // unit * unit
        got = "transparent" if limits.transparent_huge else "none"
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if huge_pages:
            try:
                limits.check(size_bytes, huge=True)
                fd = os.memfd_create("kvquay", flags | _MFD_HUGETLB)
                got = "2MiB"
            except (MemoryTooLarge, OSError):
                limits.check(size_bytes)
                fd = os.memfd_create("kvquay", flags)
        else:
            limits.check(size_bytes)
            fd = os.memfd_create("kvquay", flags)
        try:
            os.ftruncate(fd, size_bytes)
            # Nobody, not even an engine, can make another's access run past the end.
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size_bytes, got)

    @classmethod
    def open(cls, fd: int, huge_pages: str = "none") -> Self:
        """The region behind a descriptor, which is the object's from now on."""
        region = cls(fd, os.fstat(fd).st_size, huge_pages)
        region.reserved_bytes = region.size_bytes
        return region

    def reserve(
        self,
        progress: Callable[[int], None] = lambda _: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Take every page now, in pieces, so that no access ever fails later; False if stopped.

        `progress` is told the bytes reserved so far. MemoryTooLarge if the machine runs out.
        """
        while self.reserved_bytes < self.size_bytes:
            if stopping():
                return False
            piece = min(PIECE_BYTES, self.size_bytes - self.reserved_bytes)
            try:
                os.posix_fallocate(self.fd, self.reserved_bytes, piece)
            except OSError as error:
                raise MemoryTooLarge(
                    asked_bytes=self.size_bytes,
                    available_bytes=self.reserved_bytes,
                    where=f"reserving failed: {error.strerror}",
                    advice="lower --memory or free memory",
                ) from error
            self.reserved_bytes += piece
            progress(self.reserved_bytes)
        return True

    def write_header(self, incarnation: int, state: int) -> None:
        """Say whose region this is; engines may check it."""
        os.pwrite(self.fd, _HEADER.pack(MAGIC, LAYOUT_VERSION, state, incarnation), 0)

    def read_header(self) -> tuple[int, int]:
        """(incarnation, state). ConfigError if the region is not one of this layout."""
        magic, version, state, incarnation = _HEADER.unpack(os.pread(self.fd, _HEADER.size, 0))
        if magic != MAGIC or version != LAYOUT_VERSION:
            raise ConfigError(
                "region", (magic, version), f"not a region of layout {LAYOUT_VERSION}"
            )
        return incarnation, state

    def close(self) -> None:
        """Close the descriptor; mappings keep their memory. More than once is fine."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PoolMemory:
    """A piece of a region, laid out for rows of one size: generations first, then the rows."""

    def __init__(self, region: Region, offset: int, size_bytes: int, row_bytes: int) -> None:
        """ConfigError if not a single row fits. `offset` is a multiple of a page."""
        if row_bytes <= 0 or row_bytes % PAGE_BYTES:
            raise ConfigError("row_bytes", row_bytes, f"must be a multiple of {PAGE_BYTES}")
        rows = size_bytes // row_bytes
        while rows > 0 and _up(rows * GENERATION_BYTES) + rows * row_bytes > size_bytes:
            rows -= max(1, (_up(rows * GENERATION_BYTES)) // row_bytes // 2)
        if rows < 1:
            raise ConfigError(
                "memory", size_bytes, f"not one row of {row_bytes} bytes fits; raise --memory"
            )
        self._region = region
        self.rows = rows
        self.row_bytes = row_bytes
        self.generation_offset = offset
        self.rows_offset = offset + _up(rows * GENERATION_BYTES)
        self._generation_map = mmap.mmap(region.fd, _up(rows * GENERATION_BYTES), offset=offset)
        self.generation: NDArray[np.uint32] = np.frombuffer(
            self._generation_map, dtype=np.uint32, count=rows
        )
        """Generation of each row, in the region, for all to see."""
        self._rows_map: mmap.mmap | None = None

    @property
    def memory_bytes(self) -> int:
        """Size of the whole region, which is what engines map."""
        return self._region.size_bytes

    @property
    def fd(self) -> int:
        """Descriptor of the region."""
        return self._region.fd

    def map_rows(self) -> memoryview:
        """The rows, shape (rows, row_bytes), for tiers. Pages are not touched."""
        size = self.rows * self.row_bytes
        self._rows_map = mmap.mmap(self._region.fd, size, offset=self.rows_offset)
        return memoryview(self._rows_map).cast("B", (self.rows, self.row_bytes))

    def zero(self, row: int) -> None:
        """Overwrite a row with zeros, for those who mind what a later engine could read."""
        zeros = bytes(min(self.row_bytes, MIB))
        start = self.rows_offset + row * self.row_bytes
        for at in range(0, self.row_bytes, len(zeros)):
            os.pwrite(self._region.fd, zeros[: self.row_bytes - at], start + at)

    def close(self) -> None:
        """Mappings go with their last view."""
        self._rows_map = None


def split(size_bytes: int, parts: tuple[int, ...]) -> list[tuple[int, int]]:
    """(offset, size) of each pool in a region: `parts` as given, or one pool of everything.

    ConfigError if they do not fit.
    """
    if not parts:
        return [(HEADER_BYTES, size_bytes - HEADER_BYTES)]
    places = []
    offset = HEADER_BYTES
    for part in parts:
        size = part // PAGE_BYTES * PAGE_BYTES
        places.append((offset, size))
        offset += size
    if offset > size_bytes:
        raise ConfigError(
            "pool",
            sum(parts),
            f"pools and a header of {HEADER_BYTES} bytes need {offset} bytes, --memory is "
            f"{size_bytes}",
        )
    return places


def _up(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
