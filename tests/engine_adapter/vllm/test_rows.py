"""The message that names rows, and the layout that vLLM's configuration asks for."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from broker import wire
from engine_adapter.vllm.rows import RowLayout, RowsLoadStoreSpec
from tests.engine_adapter.vllm.kv import refs_of


def config(rank: int = 0, world: int = 1, **other: Any) -> OffloadingConfig:
    given = OffloadingConfig(
        groups=(OffloadingGroupConfig(32, ("layer",), 0),),
        worker_kv_bytes_per_block=1000,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig("m", "float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=3),
        parallel=OffloadingParallelConfig(
            rank=rank,
            world_size=world,
            tp_size=world,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )
    return replace(given, **other)


def test_rows_come_out_of_a_pickle_as_they_went_in() -> None:
    spec = RowsLoadStoreSpec(refs_of((3, 7), (0, 0xFFFFFFFF)))
    packed = pickle.dumps(spec)
    again = pickle.loads(packed)
    assert isinstance(again, BlockIDsLoadStoreSpec)
    assert again.block_ids.tolist() == [3, 0]
    assert again.block_ids.dtype == np.int32
    assert again.refs.dtype == wire.ROW_REF
    assert again.refs.tolist() == spec.refs.tolist() == [(3, 7), (0, 0xFFFFFFFF)]
    assert len(packed) < 150


def test_a_row_takes_eight_bytes_of_the_message() -> None:
    sizes = [
        len(pickle.dumps(RowsLoadStoreSpec(np.zeros(n, dtype=wire.ROW_REF)))) for n in (1000, 2000)
    ]
    assert sizes[1] - sizes[0] == 8000


@pytest.mark.parametrize("answer", [wire.ROW_MISS, wire.ROW_PENDING, wire.ROW_RETRY])
def test_an_answer_is_not_taken_for_a_row(answer: int) -> None:
    with pytest.raises(ValueError, match="not a row"):
        RowsLoadStoreSpec(refs_of((0, 1), (answer, 1)))


def test_no_rows_are_a_job_too() -> None:
    assert len(RowsLoadStoreSpec(refs_of()).block_ids) == 0


def test_one_worker_has_the_row_for_itself() -> None:
    layout = RowLayout.of(config())
    assert (layout.worker_bytes, layout.row_bytes, layout.cell_offset) == (3000, 4096, 0)
    assert layout.blocks_per_chunk == 3
    assert layout.writes


def test_cells_of_workers_follow_each_other_and_the_row_is_whole_pages() -> None:
    layouts = [RowLayout.of(config(rank, 3)) for rank in range(3)]
    assert [layout.cell_offset for layout in layouts] == [0, 3000, 6000]
    assert {layout.row_bytes for layout in layouts} == {12288}
    assert all(layout.writes for layout in layouts)


def test_a_replicated_row_has_one_cell_that_rank_0_writes() -> None:
    layouts = [RowLayout.of(config(rank, 2, replicated_layout=True)) for rank in range(2)]
    assert [layout.cell_offset for layout in layouts] == [0, 0]
    assert [layout.writes for layout in layouts] == [True, False]
    assert {layout.row_bytes for layout in layouts} == {4096}


def test_what_we_have_no_layout_for_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="remove canonical_layout"):
        RowLayout.of(config(canonical_layout=True))
    with pytest.raises(ValueError, match="must be positive"):
        RowLayout.of(config(worker_kv_bytes_per_block=0))
