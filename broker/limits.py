"""What this machine and its container can give: memory, cgroup limits, huge pages, memlock.

Reads only, each from files under a root path that tests replace; changes nothing. Knows no region:
`broker.memory` asks here before it reserves, `doctor` prints the same figures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker.errors import MIB, MemoryTooLarge

OVERHEAD_BYTES: Final = 300 * MIB
"""What the broker and its children need beside the region: index, buffers, interpreters."""
PAGE_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 * MIB
_PAGE_TABLE_ENTRY_BYTES: Final = 8
_V1_UNLIMITED: Final = 1 << 62  # version 1 says "no limit" as LONG_MAX rounded down to a page
_ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupMemory:
    """The tightest memory limit among this process's cgroup and its parents, in bytes."""

    path: Path
    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int  # file cache that the kernel drops before it kills anybody

    @property
    def room_bytes(self) -> int:
        """What can still be taken before the limit bites."""
        return max(0, self.limit_bytes - max(0, self.used_bytes - self.reclaimable_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """One reading of everything a region of memory has to fit into; sizes in bytes."""

    available_bytes: int
    cgroup: CgroupMemory | None
    memlock_bytes: int | None  # None: unlimited
    huge_free_bytes: int
    transparent_huge: bool  # whether reserving a memfd gives huge pages by itself

    def check(self, region_bytes: int, *, huge: bool = False) -> None:
        """Raise MemoryTooLarge if a region of `region_bytes` and the overhead do not fit.

        Preallocated huge pages (`huge`) were taken out of both accounts beforehand.
        """
        if huge:
            if region_bytes > self.huge_free_bytes:
                raise MemoryTooLarge(
                    asked_bytes=region_bytes,
                    available_bytes=self.huge_free_bytes,
                    where="free huge pages of 2 MiB",
                    advice="raise vm.nr_hugepages, lower --memory or drop --huge-pages",
                )
            region_bytes = 0
        asked = region_bytes + OVERHEAD_BYTES
        overhead = f"{OVERHEAD_BYTES // MIB} MiB of it for the broker itself"
        if asked > self.available_bytes:
            raise MemoryTooLarge(
                asked_bytes=asked,
                available_bytes=self.available_bytes,
                where=f"MemAvailable of this machine; {overhead}",
                advice="lower --memory or free memory",
            )
        if self.cgroup is not None and asked > self.cgroup.room_bytes:
            raise MemoryTooLarge(
                asked_bytes=asked,
                available_bytes=self.cgroup.room_bytes,
                where=f"cgroup {self.cgroup.path}: limit {self.cgroup.limit_bytes / MIB:,.1f} MiB, "
                f"{self.cgroup.used_bytes / MIB:,.1f} MiB in use; {overhead}",
                advice="lower --memory or raise the container's memory limit "
                "(docker run --memory, resources.limits.memory)",
            )


def read_limits(root: Path = _ROOT) -> MemoryLimits:
    """Read all figures of this process under `root` (`/` outside tests)."""
    meminfo = read_meminfo(root)
    huge_page_bytes = meminfo.get("Hugepagesize", 0)
    huge_pages = meminfo.get("HugePages_Free", 0) - meminfo.get("HugePages_Rsvd", 0)
    usable_huge = huge_page_bytes == HUGE_PAGE_BYTES
    return MemoryLimits(
        available_bytes=meminfo.get("MemAvailable", 0),
        cgroup=read_cgroup_memory(root),
        memlock_bytes=read_memlock(root),
        huge_free_bytes=max(0, huge_pages) * HUGE_PAGE_BYTES if usable_huge else 0,
        transparent_huge=read_transparent_huge(root),
    )


def page_table_bytes(region_bytes: int, processes: int = 1, *, huge: bool = False) -> int:
    """Page tables of `processes` that each map the whole region: 2 MiB per GiB with small pages."""
    page = HUGE_PAGE_BYTES if huge else PAGE_BYTES
    return -(-region_bytes // page) * _PAGE_TABLE_ENTRY_BYTES * processes


def read_meminfo(root: Path = _ROOT) -> dict[str, int]:
    """/proc/meminfo by name: bytes, or plain counts for lines without a unit."""
    found: dict[str, int] = {}
    for line in _lines(root / "proc/meminfo"):
        match = re.match(r"(\S+):\s+(\d+)( kB)?", line)
        if match:
            found[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return found


def read_memlock(root: Path = _ROOT) -> int | None:
    """Soft limit of locked memory of this process in bytes; None if unlimited or unknown."""
    for line in _lines(root / "proc/self/limits"):
        match = re.match(r"Max locked memory\s+(\d+|unlimited)", line)
        if match:
            return None if match[1] == "unlimited" else int(match[1])
    return None


def read_transparent_huge(root: Path = _ROOT) -> bool:
    """Whether the kernel gives huge pages to a memfd when its space is reserved.

    "advise" does not count: reserving has no mapping that could carry the advice.
    """
    base = root / "sys/kernel/mm/transparent_hugepage"
    chosen = _bracketed(base / "hugepages-2048kB/shmem_enabled")
    if chosen in (None, "inherit"):
        chosen = _bracketed(base / "shmem_enabled")
    return chosen in ("always", "within_size", "force")


def read_cgroup_memory(root: Path = _ROOT) -> CgroupMemory | None:
    """The tightest limit over this process; None if no cgroup limits memory.

    Parents count too: the nearest limit need not be the one with the least room. In a container
    the path may be the host's and absent here, then what exists of it is read.
    """
    tightest: CgroupMemory | None = None
    for mount, inside, names in _cgroup_places(root):
        for folder in (mount / inside, *(mount / inside).parents):
            here = _read_one(folder, names)
            if here is not None and (tightest is None or here.room_bytes < tightest.room_bytes):
                tightest = here
            if folder == mount:
                break
    return tightest


@dataclass(frozen=True, slots=True)
class _FileNames:
    limit: str
    used: str
    reclaimable: str  # a line of memory.stat


_V2: Final = _FileNames("memory.max", "memory.current", "inactive_file")
_V1: Final = _FileNames("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _cgroup_places(root: Path) -> list[tuple[Path, str, _FileNames]]:
    """(mount, path inside it, file names) of every hierarchy that may limit our memory."""
    places: list[tuple[Path, str, _FileNames]] = []
    base = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # A path that climbs out of the namespace ("/../x") can't be followed from here.
        inside = "" if ".." in path.split("/") else path.strip("/")
        if "memory" in controllers.split(","):
            places.append((base / "memory", inside, _V1))
        elif number == "0" and not controllers:
            places.append((base, inside, _V2))
    return places


def _read_one(folder: Path, names: _FileNames) -> CgroupMemory | None:
    limit = _number(folder / names.limit)
    if limit is None or limit >= _V1_UNLIMITED:
        return None
    reclaimable = 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == names.reclaimable and value.strip().isdigit():
            reclaimable = int(value)
    return CgroupMemory(
        path=folder,
        limit_bytes=limit,
        used_bytes=_number(folder / names.used) or 0,
        reclaimable_bytes=reclaimable,
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # absent on this kernel, or hidden in this container: the figure is unknown
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None  # "max" means no limit


def _bracketed(path: Path) -> str | None:
    match = re.search(r"\[(\w+)\]", "".join(_lines(path)))
    return match[1] if match else None
