"""What a transfer of vLLM's names on our side: rows with generations, and the layout of one row.

Covers geometry and the message from scheduler to worker; knows no memory and no tensor.

A row is one chunk: |worker 0|worker 1|...|worker n-1|padding to 4 KiB|. A worker's cell is its
tensors one after the other, of each the chunk's blocks: |tensor 0: b pages|tensor 1: b pages|...|.
That is where vLLM's own CPU offloading puts them. Where all workers hold the same bytes (replicated
layout) there is one cell, which rank 0 writes and all read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from broker import wire
from engine_adapter.answers import Refs

ROW_ALIGNMENT = 4096

RowKey = tuple[int, int]
"""Row and generation: one chunk's stay in a row, as a key of dicts and sets."""


def row_keys(refs: Refs) -> list[RowKey]:
    """Of each reference (dtype `wire.ROW_REF`, shape (n,)), in order."""
    return list(zip(refs["row"].tolist(), refs["generation"].tolist(), strict=True))


class RowsLoadStoreSpec(BlockIDsLoadStoreSpec):
    """The rows of one job, one per chunk in vLLM's order: groups one after the other, each group's
    chunks ascending. `block_ids` are the row numbers, int32, shape (n,)."""

    def __init__(self, refs: Refs) -> None:
        """`refs`: dtype `wire.ROW_REF`, shape (n,). ValueError if one of them is not a row."""
        self._refs: Refs = np.ascontiguousarray(refs, dtype=wire.ROW_REF)
        rows = self._refs["row"]
        if len(rows) and int(rows.max()) > np.iinfo(np.int32).max:
            raise ValueError(
                f"{rows.max():#x} is an answer (miss, pending, retry) or beyond int32, not a row"
            )
        super().__init__(rows)

    @property
    def refs(self) -> Refs:
        """Rows and generations, dtype `wire.ROW_REF`, shape (n,)."""
        return self._refs

    def __reduce__(self) -> tuple[Callable[[bytes], RowsLoadStoreSpec], tuple[bytes]]:
        return _unpack, (self._refs.tobytes(),)  # 8 bytes a row: it goes to workers every step


def _unpack(packed: bytes) -> RowsLoadStoreSpec:
    return RowsLoadStoreSpec(np.frombuffer(packed, dtype=wire.ROW_REF))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where one worker's bytes are in a row. Sizes in bytes."""

    row_bytes: int
    worker_bytes: int
    blocks_per_chunk: int
    rank: int
    world: int
    replicated: bool

    @property
    def cell_offset(self) -> int:
        """Where this worker's cell begins in the row."""
        return 0 if self.replicated else self.rank * self.worker_bytes

    @property
    def writes(self) -> bool:
        """Whether this worker stores at all."""
        return not self.replicated or self.rank == 0

    @classmethod
    def of(cls, config: OffloadingConfig) -> Self:
        """The layout that vLLM's configuration asks for. ValueError for what we have none for."""
        if config.canonical_layout:
            raise ValueError(
                "kvquay keeps each worker's KV as the worker has it and can't do vLLM's canonical "
                "layout; remove canonical_layout from kv_connector_extra_config"
            )
        per_block, blocks = config.worker_kv_bytes_per_block, config.cache.blocks_per_chunk
        world = config.parallel.world_size
        if per_block <= 0 or blocks <= 0 or world <= 0:
            raise ValueError(
                f"vLLM says that a worker has {per_block} bytes of KV per block, {blocks} blocks "
                f"per chunk and {world} workers; each must be positive for anything to be cached"
            )
        worker_bytes = per_block * blocks
        replicated = bool(config.replicated_layout)
        used = worker_bytes if replicated else worker_bytes * world
        return cls(
            row_bytes=-(-used // ROW_ALIGNMENT) * ROW_ALIGNMENT,
            worker_bytes=worker_bytes,
            blocks_per_chunk=blocks,
            rank=config.parallel.rank,
            world=world,
            replicated=replicated,
        )
