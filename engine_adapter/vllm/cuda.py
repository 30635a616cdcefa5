"""vLLM's worker side where KV is on a GPU: vLLM's own CPU-offload worker over the broker's rows.

vLLM's worker does the copies and, by its own rule, the registration of the memory for them. Here it
is given the broker's mapping in the place of its own, and generations are checked around it.
"""

from __future__ import annotations

import inspect
import logging
import mmap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.host_register import host_unregister

from engine_adapter.answers import Refs, Transfer
from engine_adapter.vllm.copying import place_load, place_store, tensor_offsets
from engine_adapter.vllm.rows import RowLayout, RowsLoadStoreSpec
from engine_adapter.vllm.worker import Reporting, hold, step
from engine_adapter.worker import Memory, WorkerClient

log = logging.getLogger("vllm.kvquay")


class SharedRows:
    """The rows of one mapping in the form of vLLM's SharedOffloadRegion: whole rows only, from the
    first on, so that no registration and no copy touches what else is in the mapping."""

    def __init__(self, memory: Memory, layout: RowLayout) -> None:
        """ValueError if the rows are of another size than the layout's, or not whole pages."""
        self.page_size = mmap.PAGESIZE
        if memory.row_bytes != layout.row_bytes or memory.row_bytes % self.page_size:
            raise ValueError(
                f"the broker's rows have {memory.row_bytes} bytes, not {layout.row_bytes} in pages "
                f"of {self.page_size}"
            )
        self.rank = 0 if layout.replicated else layout.rank
        self.cpu_page_size = layout.worker_bytes
        self.num_chunks = memory.num_rows
        self.total_size_bytes = memory.num_rows * memory.row_bytes
        self.is_pinned = False
        self.pinned_addresses: list[int] = []
        self._row_stride = memory.row_bytes
        flat = memory.rows.reshape(-1)
        self._base: torch.Tensor | None = torch.from_numpy(flat).view(torch.int8)
        self._next_offset = layout.cell_offset
        self._cell_end = layout.cell_offset + layout.worker_bytes
        self._next_canonical = 0

    def iter_worker_slot_ranges(self) -> Iterator[tuple[int, int]]:
        """Offset and length, in bytes and whole pages, of this worker's cell in each row."""
        for row in range(self.num_chunks):
            start = row * self._row_stride + self.rank * self.cpu_page_size
            first = start - start % self.page_size
            end = -(-(start + self.cpu_page_size) // self.page_size) * self.page_size
            yield first, end - first

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next tensor's part of this worker's cell in every row, `tensor_page_size` bytes per
        chunk: int8, shape (rows, tensor_page_size). ValueError if the cell is full."""
        self._next_offset += tensor_page_size
        return self._view(self._next_offset - tensor_page_size, tensor_page_size, self._cell_end)

    def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next tensor's part of what all workers share, from the beginning of the row."""
        self._next_canonical += tensor_page_size
        at = self._next_canonical - tensor_page_size
        return self._view(at, tensor_page_size, self._row_stride)

    def _view(self, offset: int, width: int, limit: int) -> torch.Tensor:
        if self._base is None or offset + width > limit:
            raise ValueError(f"{width} bytes at {offset} of a row end behind {limit}, or all ended")
        return torch.as_strided(
            self._base, (self.num_chunks, width), (self._row_stride, 1), storage_offset=offset
        )

    def cleanup(self) -> None:
        """Undo the registration. The mapping itself goes with its last user."""
        if self._base is not None and self.is_pinned:
            for address in reversed(self.pinned_addresses or [self._base.data_ptr()]):
                host_unregister(address)
        self.pinned_addresses.clear()
        self.is_pinned = False
        self._base = None


@dataclass(frozen=True, slots=True)
class _Copier:
    """vLLM's worker for one mapping; `worker` is None where it could not be built."""

    memory: Memory
    worker: OffloadingWorker | None


@dataclass(frozen=True, slots=True)
class _Job:
    kind: Transfer
    refs: Refs
    good: NDArray[np.bool_]
    memory: Memory
    held: ExitStack


class CudaRowWorker(Reporting):
    """As RowWorker, with the same promises, but a store copies nothing if one of its rows is not
    this engine's any more.

    vLLM's worker is for one mapping. When the broker comes back with another, the next worker is
    built on a thread of its own (registering memory takes seconds); until then all rows fail.
    """

    def __init__(
        self,
        client: WorkerClient,
        kv_caches: CanonicalKVCaches,
        layout: RowLayout,
        *,
        partial_chunks: bool = False,
        build: Callable[..., OffloadingWorker] = CPUOffloadingWorker,
    ) -> None:
        """See RowWorker. Waits for the registration if the client is attached already. `build` is
        called with tensors, blocks per chunk, number of rows and `mmap_region`."""
        super().__init__(client, layout, partial_chunks)
        tensor_offsets(kv_caches, layout)
        self._kv_caches = kv_caches
        self._build = build
        self._jobs: dict[int, _Job] = {}
        self._builder = ThreadPoolExecutor(1, "kvquay-register")
        self._next: Future[_Copier | None] | None = None
        self._closed = False
        self._copier = self._exchange(None, client.memory)

    def get_finished(self) -> list[TransferResult]:
        """See RowWorker."""
        self._collect()
        self._renew()
        return self._take_results()

    def wait(self, job_ids: Iterable[int]) -> None:
        """See RowWorker."""
        mine = {job_id for job_id in job_ids if job_id in self._jobs}
        if mine and self._copier is not None and self._copier.worker is not None:
            self._copier.worker.wait(mine)
        self._collect()

    def shutdown(self) -> None:
        """Returns when no copy runs any more and the memory is no longer registered."""
        if self._closed:
            return
        self._closed = True
        self._builder.shutdown(wait=True)
        if self._next is not None:
            self._copier = self._next.result()
        self._retire(self._copier)
        self._copier = None
        for job_id in list(self._jobs):
            job = self._jobs.pop(job_id)
            job.held.close()
            self._fail(job.kind, job_id, job.refs)

    def _submit(
        self,
        kind: Transfer,
        job_id: int,
        blocks: GPULoadStoreSpec,
        rows: RowsLoadStoreSpec,
        expedited: bool,
    ) -> None:
        self._renew()
        with ExitStack() as held:
            try:
                good = self._begin(held, kind, job_id, blocks, rows, expedited)
            except Exception as error:  # noqa: BLE001  the engine goes on
                self._failures.warn(kind, job_id, error)
                good = None
            if good is None or self._copier is None:
                self._fail(kind, job_id, rows.refs)
            else:
                memory = self._copier.memory
                self._jobs[job_id] = _Job(kind, rows.refs, good, memory, held.pop_all())

    def _begin(
        self,
        held: ExitStack,
        kind: Transfer,
        job_id: int,
        blocks: GPULoadStoreSpec,
        rows: RowsLoadStoreSpec,
        expedited: bool,
    ) -> NDArray[np.bool_] | None:
        """Which rows are good so far; None if nothing was begun."""
        copier, refs = self._copier, rows.refs
        if copier is None or copier.worker is None:
            return None
        memory = held.enter_context(hold(self._client, copier.memory))
        if memory is None:
            return None
        good = memory.are_current(refs)
        per_chunk = self._layout.blocks_per_chunk
        if kind is Transfer.STORE:
            placing = place_store(blocks, len(refs), per_chunk, partial=self._partial_chunks)
            # vLLM's worker takes all rows of a job or none.
            if placing.refused.any() or not good.all():
                return None
            begun = copier.worker.submit_store(job_id, blocks, rows)
        else:
            place_load(blocks, len(refs), per_chunk)
            if (refs["row"] >= memory.num_rows).any():
                return None
            load = copier.worker.submit_load
            knows = "expedited" in inspect.signature(load).parameters  # vLLM from 0.33 on
            begun = load(job_id, rows, blocks, *([expedited] if knows else []))
        return good if begun else None

    def _fail(self, kind: Transfer, job_id: int, refs: Refs) -> None:
        self._failures.add(kind, job_id, refs, np.zeros(len(refs), dtype=bool))
        self._results.append(TransferResult(job_id, True, 0, 0.0))

    def _collect(self) -> None:
        """Take the outcome of ended jobs."""
        if self._copier is not None and self._copier.worker is not None:
            for result in self._copier.worker.get_finished():
                job = self._jobs.pop(result.job_id)
                good = job.good & job.memory.are_current(job.refs)
                job.held.close()
                if not result.success:
                    good[:] = False
                    result.success = True
                self._failures.add(job.kind, result.job_id, job.refs, good)
                self._results.append(result)

    def _renew(self) -> None:
        """Let the client read and attach; give up a mapping that it has left, and begin with the
        one that it has."""
        step(self._client)
        if self._next is not None and self._next.done():
            self._copier, self._next = self._next.result(), None
        if self._closed or self._next is not None:
            return
        memory = self._client.memory
        current = None if self._copier is None else self._copier.memory
        if memory is not current and not self._jobs:
            self._next = self._builder.submit(self._exchange, self._copier, memory)
            self._copier = None

    def _exchange(self, old: _Copier | None, memory: Memory | None) -> _Copier | None:
        """Give up `old` and begin with `memory`. On the builder's thread, but for the first."""
        self._retire(old)
        if memory is None:
            return None
        region = None
        try:
            device = self._kv_caches.tensors[0].tensor.device
            if device.type != "cpu" and device.index is not None:
                torch.accelerator.set_device_index(device.index)  # of this thread
            region = SharedRows(memory, self._layout)
            per_chunk, num_rows = self._layout.blocks_per_chunk, memory.num_rows
            worker = self._build(self._kv_caches, per_chunk, num_rows, mmap_region=region)
        except Exception:  # the engine goes on without the cache
            log.warning("can't copy KV between the GPU and the broker's memory", exc_info=True)
            if region is not None:
                region.cleanup()
            return _Copier(memory, None)
        if not region.is_pinned:
            log.warning(
                "the broker's memory could not be registered with the GPU: copies work, but slower"
            )
        return _Copier(memory, worker)

    def _retire(self, old: _Copier | None) -> None:
        if old is None or old.worker is None:
            return
        try:
            old.worker.shutdown()
        except Exception:  # what can't be given back goes with the process
            log.warning("can't give the broker's old memory back", exc_info=True)
