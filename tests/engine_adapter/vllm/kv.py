"""KV tensors with random bytes, a broker's memory, and clients that have it, for these tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Never

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from broker import wire
from engine_adapter.answers import Refs
from engine_adapter.vllm.rows import RowLayout, RowsLoadStoreSpec
from engine_adapter.worker import Memory, WorkerClient
from tests.broker.harness import MemfdMemory
from tests.engine_adapter.fake_broker import KEY

Group = Sequence[tuple[int, int]]
"""Tensor and used bytes of its pages, of each layer of a group."""


def layout_of(
    page_bytes: Sequence[int],
    blocks_per_chunk: int = 2,
    rank: int = 0,
    world: int = 1,
    replicated: bool = False,
) -> RowLayout:
    worker_bytes = sum(page_bytes) * blocks_per_chunk
    used = worker_bytes * (1 if replicated else world)
    return RowLayout(
        row_bytes=-(-used // 4096) * 4096,
        worker_bytes=worker_bytes,
        blocks_per_chunk=blocks_per_chunk,
        rank=rank,
        world=world,
        replicated=replicated,
    )


def caches_of(
    page_bytes: Sequence[int], groups: Sequence[Group], num_blocks: int = 16, seed: int = 0
) -> CanonicalKVCaches:
    random = np.random.default_rng(seed)
    tensors = []
    for size in page_bytes:
        data = random.integers(-128, 128, (num_blocks, size), dtype=np.int8)
        tensors.append(CanonicalKVCacheTensor(torch.from_numpy(data), size))
    refs = [[CanonicalKVCacheRef(tensor, used) for tensor, used in group] for group in groups]
    return CanonicalKVCaches(tensors, refs)


def bytes_of(caches: CanonicalKVCaches) -> list[NDArray[np.int8]]:
    """A copy of every tensor, int8, shape (num_blocks, page bytes)."""
    return [entry.tensor.numpy().copy() for entry in caches.tensors]


def refs_of(*pairs: tuple[int, int]) -> Refs:
    return np.array(list(pairs), dtype=wire.ROW_REF)


class Host:
    """Memory of a broker that is not there to answer."""

    def __init__(self, row_bytes: int, rows: int = 16) -> None:
        self.memfd = MemfdMemory(rows, row_bytes)
        self.generation = self.memfd.generation
        self.generation[:] = np.arange(rows) + 1

    def memory(self) -> Memory:
        """One more mapping."""
        attached = wire.Attached(
            protocol=wire.PROTOCOL_VERSION,
            broker="test",
            incarnation=1,
            rows=self.memfd.rows,
            row_bytes=self.memfd.row_bytes,
            rows_offset=self.memfd.rows_offset,
            generation_offset=0,
            memory_bytes=self.memfd.size,
            epoch=0,
        )
        return Memory(os.dup(self.memfd.fd), attached)

    def client(self) -> WorkerClient:
        """A client that has the memory and can't reach its broker."""
        client = WorkerClient(
            "",
            engine_id="e",
            row_bytes=self.memfd.row_bytes,
            key_bytes=KEY,
            clock=lambda: 0.0,
            connect=_nobody,
        )
        client.memory = self.memory()
        return client

    @property
    def rows(self) -> NDArray[np.uint8]:
        """Shape (rows, row bytes)."""
        return np.asarray(self.memfd.map_rows())

    def spec(self, *rows: int) -> RowsLoadStoreSpec:
        """Rows as they are now."""
        return RowsLoadStoreSpec(refs_of(*((row, int(self.generation[row])) for row in rows)))


def _nobody() -> Never:
    raise FileNotFoundError("nobody listens")


def blocks_of(*groups: tuple[int, Sequence[int]]) -> GPULoadStoreSpec:
    """Blocks of a job: of each group the position of its first block, and its block ids."""
    return GPULoadStoreSpec(
        [block for _, blocks in groups for block in blocks],
        group_sizes=[len(blocks) for _, blocks in groups],
        block_indices=[first for first, _ in groups],
    )
