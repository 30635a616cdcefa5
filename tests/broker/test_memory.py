"""The region: sealed, reserved, laid out; and what does not fit is refused with numbers."""

from __future__ import annotations

import mmap
import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from broker.errors import ConfigError, MemoryTooLarge
from broker.limits import PAGE_BYTES, CgroupMemory, MemoryLimits
from broker.memory import HEADER_BYTES, PoolMemory, Region, split

MIB = 1 << 20
ROOMY = MemoryLimits(
    available_bytes=1 << 40,
    cgroup=None,
    memlock_bytes=None,
    huge_free_bytes=0,
    transparent_huge=False,
)


def test_a_region_can_neither_shrink_nor_grow() -> None:
    region = Region.create(4 * MIB, limits=ROOMY)
    for size in (MIB, 8 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    region.close()
    region.close()


def test_every_page_is_taken_with_progress() -> None:
    region = Region.create(130 * MIB, limits=ROOMY)
    told: list[int] = []
    assert region.reserve(told.append)
    assert told == [64 * MIB, 128 * MIB, 130 * MIB]
    assert os.fstat(region.fd).st_blocks * 512 == 130 * MIB
    region.close()


def test_reservation_stops_when_asked() -> None:
    region = Region.create(130 * MIB, limits=ROOMY)
    assert not region.reserve(stopping=lambda: region.reserved_bytes >= 64 * MIB)
    assert region.reserved_bytes == 64 * MIB
    region.close()


def test_too_much_for_the_machine_or_the_container_is_refused_with_numbers() -> None:
    small = MemoryLimits(
        available_bytes=500 * MIB,
        cgroup=None,
        memlock_bytes=None,
        huge_free_bytes=0,
        transparent_huge=False,
    )
    with pytest.raises(MemoryTooLarge, match=r"700\.0 MiB of memory asked, 500\.0 MiB available"):
        Region.create(400 * MIB, limits=small)
    from pathlib import Path

    caged = MemoryLimits(
        available_bytes=1 << 40,
        cgroup=CgroupMemory(
            path=Path("/cage"), limit_bytes=512 * MIB, used_bytes=MIB, reclaimable_bytes=0
        ),
        memlock_bytes=None,
        huge_free_bytes=0,
        transparent_huge=False,
    )
    with pytest.raises(MemoryTooLarge, match="cgroup /cage"):
        Region.create(300 * MIB, limits=caged)
    with pytest.raises(ConfigError):
        Region.create(100, limits=ROOMY)


def test_huge_pages_that_are_not_there_are_gone_without() -> None:
    region = Region.create(4 * MIB, huge_pages=True, limits=ROOMY)
    assert region.huge_pages == "none"
    region.close()


def test_the_header_says_whose_region_it_is() -> None:
    region = Region.create(MIB, limits=ROOMY)
    with pytest.raises(ConfigError, match="layout"):
        region.read_header()
    region.write_header(7, 1)
    assert region.read_header() == (7, 1)
    region.close()


@settings(max_examples=100)
@given(
    size=st.integers(3, 4000).map(lambda pages: pages * PAGE_BYTES),
    row=st.sampled_from([1, 2, 16, 512]).map(lambda pages: pages * PAGE_BYTES),
)
def test_a_layout_uses_its_piece_and_nothing_else(size: int, row: int) -> None:
    region = Region.create(size + HEADER_BYTES, limits=ROOMY)
    try:
        try:
            pool = PoolMemory(region, HEADER_BYTES, size, row)
        except ConfigError:
            assert size < row + PAGE_BYTES
            return
        end = pool.rows_offset + pool.rows * row
        assert pool.generation_offset == HEADER_BYTES
        assert pool.rows_offset >= HEADER_BYTES + 4 * pool.rows
        assert pool.rows_offset % PAGE_BYTES == 0
        assert end <= HEADER_BYTES + size
        assert HEADER_BYTES + size - end < 2 * row + 2 * PAGE_BYTES  # little is wasted
    finally:
        region.close()


def test_generations_and_rows_are_seen_through_another_mapping() -> None:
    region = Region.create(MIB, limits=ROOMY)
    pool = PoolMemory(region, HEADER_BYTES, MIB - HEADER_BYTES, 8192)
    pool.generation[3] = 77
    view = pool.map_rows()
    flat = view.cast("B")
    flat[3 * 8192 : 3 * 8192 + 5] = b"hello"
    seen = mmap.mmap(region.fd, MIB)
    generations = np.frombuffer(seen, dtype="<u4", offset=pool.generation_offset, count=pool.rows)
    assert generations[3] == 77
    assert seen[pool.rows_offset + 3 * 8192 :][:5] == b"hello"
    pool.zero(3)
    assert seen[pool.rows_offset + 3 * 8192 :][:5] == bytes(5)
    region.close()


@pytest.mark.parametrize("row", [0, -4096, 100, 4097])
def test_a_row_is_whole_pages(row: int) -> None:
    region = Region.create(MIB, limits=ROOMY)
    with pytest.raises(ConfigError, match="multiple"):
        PoolMemory(region, HEADER_BYTES, MIB - HEADER_BYTES, row)
    region.close()


def test_pools_lie_side_by_side() -> None:
    assert split(MIB, ()) == [(HEADER_BYTES, MIB - HEADER_BYTES)]
    assert split(MIB, (8192, 16384)) == [(HEADER_BYTES, 8192), (HEADER_BYTES + 8192, 16384)]
    with pytest.raises(ConfigError, match="pools and a header"):
        split(MIB, (MIB,))
