"""Where blocks belong, also when vLLM left some out, and that copies touch nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from engine_adapter.vllm import copying
from engine_adapter.vllm.copying import HostPages, MisplacedBlocks, Placing, place_load, place_store
from tests.engine_adapter.vllm.kv import blocks_of, bytes_of, caches_of, layout_of


def where(placing: Placing) -> dict[int, tuple[int, int, int]]:
    """Group, chunk and slot of every block."""
    return {
        int(block): (placement.group, int(chunk), int(slot))
        for placement in placing.groups
        for block, chunk, slot in zip(
            placement.blocks, placement.chunks, placement.slots, strict=True
        )
    }


def as_vllm_would(groups: Sequence[Sequence[Sequence[int]]]) -> GPULoadStoreSpec:
    """A store's blocks from chunks of blocks, 0 where one is gone: they are left out, and a group's
    position is that of its first one that is there."""
    parts = []
    for chunks in groups:
        flat = [block for chunk in chunks for block in chunk]
        there = [block for block in flat if block]
        parts.append((flat.index(there[0]) if there else 0, there))
    return blocks_of(*parts)


def test_a_load_may_begin_and_end_inside_of_chunks() -> None:
    placing = place_load(blocks_of((5, [10, 11, 12, 13]), (0, []), (4, [20])), 3, 4)
    assert where(placing) == {
        10: (0, 0, 1),
        11: (0, 0, 2),
        12: (0, 0, 3),
        13: (0, 1, 0),
        20: (2, 2, 0),
    }
    assert not placing.refused.any()


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_that_do_not_fit_the_blocks_are_told(rows: int) -> None:
    with pytest.raises(MisplacedBlocks, match=f"{rows} rows for blocks of 2 chunks"):
        place_load(blocks_of((0, [1, 2, 3])), rows, 2)


def test_blocks_gone_at_the_front_move_nothing() -> None:
    spec = as_vllm_would([[[0, 0, 3, 4], [5, 6, 7, 8]]])
    kept = place_store(spec, 2, 4, partial=True)
    assert not kept.refused.any()
    assert where(kept)[3] == (0, 0, 2)
    assert where(kept)[5] == (0, 1, 0)
    assert place_store(spec, 2, 4, partial=False).refused.tolist() == [True, False]


@pytest.mark.parametrize(
    "chunks",
    [
        [[1, 0, 3, 4]],
        [[1, 2, 3, 4], [0, 0, 7, 8]],
        [[0, 2, 3, 4], [5, 0, 7, 8]],
        [[0, 0, 0, 4], [0, 0, 0, 8]],
    ],
)
def test_blocks_gone_elsewhere_refuse_their_group_alone(chunks: list[list[int]]) -> None:
    other = [[21, 22, 23, 24]]
    placing = place_store(as_vllm_would([chunks, other]), len(chunks) + 1, 4, partial=True)
    assert placing.refused.tolist() == [True] * len(chunks) + [False]
    assert where(placing) == {21 + i: (1, len(chunks), i) for i in range(4)}


def test_a_single_block_is_where_it_is_said_to_be() -> None:
    """A request's partial tail: one block, not the last of its chunk."""
    placing = place_store(blocks_of((0, []), (6, [9])), 1, 4, partial=True)
    assert where(placing) == {9: (1, 0, 2)}
    assert not placing.refused.any()


@st.composite
def stores(draw: st.DrawFn) -> tuple[list[list[list[int]]], int]:
    """Groups of chunks of blocks, numbered, some gone, the last of a chunk never."""
    per_chunk = draw(st.integers(1, 4))
    number = iter(range(1, 1000))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        chunks = []
        for _ in range(draw(st.integers(0, 4))):
            gone = draw(st.lists(st.booleans(), min_size=per_chunk, max_size=per_chunk))
            blocks = [next(number) for _ in range(per_chunk)]
            chunks.append([0 if g else b for g, b in zip(gone[:-1], blocks[:-1], strict=True)])
            chunks[-1].append(blocks[-1])
        groups.append(chunks)
    return groups, per_chunk


@given(stores(), st.booleans())
def test_no_block_ever_goes_to_another_place_than_its_own(
    store: tuple[list[list[list[int]]], int], partial: bool
) -> None:
    groups, per_chunk = store
    rows = sum(len(chunks) for chunks in groups)
    true, at = {}, 0
    for number, chunks in enumerate(groups):
        for chunk in chunks:
            true.update({block: (number, at, slot) for slot, block in enumerate(chunk)})
            at += 1
    true.pop(0, None)
    whole = all(block for chunks in groups for chunk in chunks for block in chunk)
    try:
        placing = place_store(as_vllm_would(groups), rows, per_chunk, partial=partial)
    except MisplacedBlocks:
        assert not whole
        return
    assert where(placing).items() <= true.items()
    written = {chunk for _, chunk, _ in where(placing).values()}
    assert written | set(np.flatnonzero(placing.refused).tolist()) == set(range(rows))
    if whole:
        assert not placing.refused.any()
        assert where(placing) == true


@pytest.mark.parametrize("batch_bytes", [1, 100, 1 << 20])
def test_copies_of_any_batch_are_the_same(
    batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "BATCH_BYTES", batch_bytes)
    caches = caches_of([40, 24], [[(0, 40), (1, 16)]])
    layout = layout_of([40, 24], blocks_per_chunk=2)
    pages = HostPages(caches, layout)
    rows = np.zeros((4, layout.row_bytes), dtype=np.uint8)
    placing = place_store(blocks_of((0, [7, 3, 9, 2])), 2, 2, partial=False)
    wanted, into = np.array([True, True]), np.array([3, 1])
    assert pages.store(placing.groups, wanted, into, rows) == 4 * (40 + 16)
    expected = np.zeros_like(rows)
    first, second = (entry.tensor.numpy().view(np.uint8) for entry in caches.tensors)
    for row, blocks in ((3, (7, 3)), (1, (9, 2))):
        for slot, block in enumerate(blocks):
            expected[row, slot * 40 :][:40] = first[block]
            expected[row, 80 + slot * 24 :][:16] = second[block, :16]
    assert np.array_equal(rows, expected)


def test_pages_with_gaps_between_them_are_copied_alone() -> None:
    storage = torch.arange(64, dtype=torch.int8)
    strided = storage.as_strided((4, 10), (16, 1))
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(strided, 10)], [[CanonicalKVCacheRef(0, 10)]]
    )
    pages = HostPages(caches, layout_of([10], 1))
    rows = np.full((2, 4096), 99, dtype=np.uint8)
    placing = place_load(blocks_of((0, [2])), 1, 1)
    assert pages.load(placing.groups, np.array([True]), np.array([1]), rows) == 10
    assert storage[32:42].tolist() == [99] * 10
    assert storage[:32].tolist() == list(range(32))
    assert storage[42:].tolist() == list(range(42, 64))


def test_layers_of_a_group_on_the_same_pages_are_copied_once() -> None:
    caches = caches_of([16], [[(0, 8), (0, 12)]])
    rows = np.zeros((1, 4096), dtype=np.uint8)
    placing = place_store(blocks_of((0, [5])), 1, 1, partial=False)
    pages = HostPages(caches, layout_of([16], 1))
    assert pages.store(placing.groups, np.array([True]), np.array([0]), rows) == 12
    assert np.array_equal(rows[0, :12].view(np.int8), bytes_of(caches)[0][5, :12])


def test_tensors_larger_than_the_cell_are_refused() -> None:
    with pytest.raises(ValueError, match="describes other tensors"):
        HostPages(caches_of([40, 24], [[(0, 40)]]), layout_of([40]))


def test_tensors_elsewhere_are_refused() -> None:
    tensor = torch.empty((4, 8), dtype=torch.int8, device="meta")
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 8)], [[CanonicalKVCacheRef(0, 8)]])
    with pytest.raises(ValueError, match="not in host memory"):
        HostPages(caches, layout_of([8]))
