"""Regions give one view of the right shape and end when told."""

from __future__ import annotations

import numpy as np
import pytest

from tiers.primary import CPUPrimaryTierOffloadingManager
from tiers.region import PAGE_BYTES, MemoryRegion, NoDataRegion


def test_rows_of_a_memory_region_are_whole_pages_that_keep_what_is_written() -> None:
    region = MemoryRegion(3, PAGE_BYTES + 1)
    view = region.create_kv_memoryview()
    assert (view.shape, view.strides) == ((3, 2 * PAGE_BYTES), (2 * PAGE_BYTES, 1))
    rows = np.asarray(view)
    rows[1] = 7
    assert np.asarray(region.create_kv_memoryview())[:, 0].tolist() == [0, 7, 0]


def test_memory_is_not_unmapped_under_a_view_that_lives() -> None:
    region = MemoryRegion(2, PAGE_BYTES)
    view = region.create_kv_memoryview()
    with pytest.raises(BufferError):
        region.cleanup()
    view.release()
    region.cleanup()
    region.cleanup()


def test_a_region_without_data_can_be_large_and_is_not_written() -> None:
    region = NoDataRegion(1 << 20, 1 << 20)  # a terabyte of names
    view = region.create_kv_memoryview()
    assert view.shape == (1 << 20, 1 << 20)
    assert view.readonly
    view.release()
    region.cleanup()
    region.cleanup()


@pytest.mark.parametrize("kind", [MemoryRegion, NoDataRegion])
@pytest.mark.parametrize(("rows", "row_bytes"), [(0, 4096), (1, 0), (-1, 4096)])
def test_sizes_must_be_positive(
    kind: type[MemoryRegion] | type[NoDataRegion], rows: int, row_bytes: int
) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows of {row_bytes} bytes"):
        kind(rows, row_bytes)


def test_the_primary_tier_releases_its_view_then_the_memory_once() -> None:
    order: list[str] = []

    class Watched(MemoryRegion):
        def cleanup(self) -> None:
            order.append("memory")
            super().cleanup()

    tier = CPUPrimaryTierOffloadingManager(2, Watched(2, PAGE_BYTES))
    view = tier.get_kv_memoryview()
    tier.shutdown()
    assert order == ["memory"]
    with pytest.raises(ValueError, match="released"):
        view.tolist()
    with pytest.raises(RuntimeError, match="shut down"):
        tier.get_kv_memoryview()
    tier.shutdown()
    assert order == ["memory"]
