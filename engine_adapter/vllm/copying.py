"""Which page of a KV tensor belongs where in which row, and the copies in host memory.

Knows no broker, generation or thread: rows are an array. Blocks are vLLM's, chunks are
`blocks_per_chunk` of them, a page is one block's bytes in one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec

from engine_adapter.vllm.rows import RowLayout

Numbers = NDArray[np.int64]
Chosen = NDArray[np.bool_]
Rows = NDArray[np.uint8]
"""Rows of the pool, uint8, shape (rows of the pool, row bytes)."""

BATCH_BYTES = 4 << 20
"""Of one gather and scatter. Each takes the interpreter lock a few times, which may cost 5 ms while
the engine computes in Python, so a copy per page (0.03 GB/s then) or smaller batches won't do;
larger ones leave the processor's cache (-20 %) and need the memory twice."""


class MisplacedBlocks(ValueError):
    """A job's blocks and rows do not fit together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Blocks of one group: block `blocks[i]` is the `slots[i]`-th of the chunk whose row is the
    `chunks[i]`-th of the job. int64, shape (n,) each."""

    group: int
    blocks: Numbers
    chunks: Numbers
    slots: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """What is to be copied, and which of the job's chunks (bool, shape (chunks,)) must not be."""

    groups: Sequence[Placement]
    refused: NDArray[np.bool_]


def place_load(spec: GPULoadStoreSpec, num_chunks: int, blocks_per_chunk: int) -> Placing:
    """Blocks of a load: each group's follow each other, the first may be inside of its chunk and so
    may the last. MisplacedBlocks if they need more or fewer than the job's `num_chunks`."""
    groups = _place(spec, num_chunks, blocks_per_chunk)
    return Placing(groups=groups, refused=np.zeros(num_chunks, dtype=bool))


def place_store(
    spec: GPULoadStoreSpec, num_chunks: int, blocks_per_chunk: int, *, partial: bool
) -> Placing:
    """Blocks of a store. As place_load, but vLLM leaves blocks out that are gone already (a sliding
    window's, a recurrent layer's) and tells only the position of each group's first that is there:

    - Left out at the front of the group's first chunk, the others are where they should be, but the
      chunk is `partial`: refused unless the caller knows that nobody will load what is missing.
    - Left out anywhere else, those behind are at unknown positions: the group is refused. It
      shows, because the last block of a chunk is never left out: the group ends inside of a chunk,
      or, a whole chunk's worth missing, the rows are too many (MisplacedBlocks). A single block is
      always where it is said to be.
    """
    refused = np.zeros(num_chunks, dtype=bool)
    groups = []
    for placement in _place(spec, num_chunks, blocks_per_chunk):
        chunks, slots = placement.chunks, placement.slots
        shifted = len(slots) > 1 and slots[-1] != blocks_per_chunk - 1
        if shifted:
            refused[chunks] = True
            continue
        if not partial and slots[0] != 0:
            refused[chunks[0]] = True
        groups.append(placement)
    return Placing(groups=groups, refused=refused)


def _place(spec: GPULoadStoreSpec, num_chunks: int, blocks_per_chunk: int) -> list[Placement]:
    placements = []
    blocks_at = chunks_at = 0
    blocks = np.asarray(spec.block_ids, dtype=np.int64)
    for group, (size, first) in enumerate(zip(spec.group_sizes, spec.block_indices, strict=True)):
        if not size:
            continue
        positions = first % blocks_per_chunk + np.arange(size, dtype=np.int64)
        chunks = chunks_at + positions // blocks_per_chunk
        placements.append(
            Placement(
                group=group,
                blocks=blocks[blocks_at : blocks_at + size],
                chunks=chunks,
                slots=positions % blocks_per_chunk,
            )
        )
        blocks_at += size
        chunks_at = int(chunks[-1]) + 1
    if chunks_at != num_chunks:
        raise MisplacedBlocks(
            f"{num_chunks} rows for blocks of {chunks_at} chunks: groups of "
            f"{list(spec.group_sizes)} blocks from {list(spec.block_indices)}, "
            f"{blocks_per_chunk} to a chunk"
        )
    return placements


def tensor_offsets(kv_caches: CanonicalKVCaches, layout: RowLayout) -> list[int]:
    """Where in a row each of this worker's tensors begins, bytes. ValueError if they are larger
    than the worker's cell."""
    offsets, at = [], layout.cell_offset
    for tensor in kv_caches.tensors:
        offsets.append(at)
        at += tensor.page_size_bytes * layout.blocks_per_chunk
    if at > layout.cell_offset + layout.worker_bytes:
        raise ValueError(
            f"the KV tensors have {at - layout.cell_offset} bytes per chunk and the worker's cell "
            f"of a row {layout.worker_bytes}; the engine's configuration describes other tensors"
        )
    return offsets


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of one tensor in one group: `blocks` are void items of the used size, shape (num_blocks
    of the engine,); in a row they begin at `offset`, one every `page_bytes`."""

    blocks: NDArray[np.void]
    offset: int
    page_bytes: int

    def cells(self, rows: Rows, blocks_per_chunk: int) -> NDArray[np.void]:
        """The same in the rows, shape (rows, blocks_per_chunk). A view."""
        cell = rows[:, self.offset : self.offset + blocks_per_chunk * self.page_bytes]
        return _items(cell, self.page_bytes, self.blocks.itemsize)


class HostPages:
    """One worker's KV tensors in host memory. Copies are single-threaded, and may run at the same
    time if they are of different rows and blocks."""

    def __init__(self, kv_caches: CanonicalKVCaches, layout: RowLayout) -> None:
        """ValueError if a tensor is not in host memory or they do not fit the worker's cell."""
        offsets = tensor_offsets(kv_caches, layout)
        self._blocks_per_chunk = layout.blocks_per_chunk
        bytes_of: list[tuple[NDArray[np.uint8], int]] = []
        for entry in kv_caches.tensors:
            page_bytes = entry.page_size_bytes
            tensor = entry.tensor
            if tensor.device.type != "cpu":
                raise ValueError(f"a KV tensor is on {tensor.device}, not in host memory")
            if tensor.ndim != 2 or tensor.shape[1] * tensor.element_size() != page_bytes:
                tensor = tensor.view(-1, page_bytes // tensor.element_size())
            bytes_of.append((tensor.numpy().view(np.uint8), page_bytes))
        self._groups: list[list[_Pages]] = []
        for refs in kv_caches.group_data_refs:
            used: dict[int, int] = {}  # layers of a group may lie on the same pages
            for ref in refs:
                used[ref.tensor_idx] = max(used.get(ref.tensor_idx, 0), ref.page_size_bytes)
            self._groups.append(
                [
                    _Pages(
                        _items(bytes_of[index][0], bytes_of[index][1], size)[:, 0],
                        offsets[index],
                        bytes_of[index][1],
                    )
                    for index, size in used.items()
                ]
            )

    def store(
        self, placements: Sequence[Placement], wanted: Chosen, into: Numbers, rows: Rows
    ) -> int:
        """Copy blocks to the rows `into[chunk]` of those chunks that are `wanted` (both shape
        (chunks,)). Returns bytes copied."""
        total = 0
        for pages, cells, blocks, at, slots in self._batches(placements, wanted, into, rows):
            cells[at, slots] = pages[blocks]
            total += len(blocks) * pages.itemsize
        return total

    def load(
        self,
        placements: Sequence[Placement],
        wanted: NDArray[np.bool_],
        source: Numbers,
        rows: Rows,
    ) -> int:
        """As store, from the rows to the blocks."""
        total = 0
        for pages, cells, blocks, at, slots in self._batches(placements, wanted, source, rows):
            pages[blocks] = cells[at, slots]
            total += len(blocks) * pages.itemsize
        return total

    def _batches(
        self,
        placements: Sequence[Placement],
        wanted: NDArray[np.bool_],
        row_of: Numbers,
        rows: Rows,
    ) -> Iterator[tuple[NDArray[np.void], NDArray[np.void], Numbers, Numbers, Numbers]]:
        """Views of pages and cells, and which items of them: block, row and slot."""
        for placement in placements:
            keep = wanted[placement.chunks]
            blocks, slots = placement.blocks[keep], placement.slots[keep]
            at = row_of[placement.chunks[keep]]
            for pages in self._groups[placement.group]:
                cells = pages.cells(rows, self._blocks_per_chunk)
                step = max(1, BATCH_BYTES // pages.blocks.itemsize)
                for start in range(0, len(blocks), step):
                    part = slice(start, start + step)
                    yield pages.blocks, cells, blocks[part], at[part], slots[part]


def _items(pages: NDArray[np.uint8], page_bytes: int, used_bytes: int) -> NDArray[np.void]:
    """The first `used_bytes` of every page as one item, so that numpy moves each at once; a view.
    `pages`: shape (n, k * page_bytes), the last axis without gaps."""
    used = np.dtype(
        {
            "names": ["kv"],
            "formats": [f"V{used_bytes}"],
            "offsets": [0],
            "itemsize": page_bytes,
        }
    )
    items: NDArray[np.void] = pages.view(used)["kv"]
    return items
