"""vLLM's worker side where KV is in host memory: copies between its tensors and the broker's rows.

Nothing here may stop or end the engine, and vLLM takes a failed transfer as a reason to exit. So
every job ends as a success for vLLM, and what was not good is told apart (`take_failed`). While the
broker is absent, and for rows of an earlier one, jobs end at once with all rows failed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from engine_adapter.answers import Refs, Transfer
from engine_adapter.once_a_minute import OnceAMinute
from engine_adapter.vllm.copying import HostPages, place_load, place_store
from engine_adapter.vllm.rows import RowKey, RowLayout, RowsLoadStoreSpec, row_keys
from engine_adapter.worker import Memory, WorkerClient

log = logging.getLogger("vllm.kvquay")


class Failures:
    """Rows that were not good and loads that had some, until they are asked for. The engine's
    thread only, but `warn`."""

    def __init__(self) -> None:
        self._rows: set[RowKey] = set()
        self._loads: set[int] = set()
        self._warning = OnceAMinute(time.monotonic)

    def add(self, kind: Transfer, job_id: int, refs: Refs, good: NDArray[np.bool_]) -> None:
        """A job ended; `good`: which of its `refs` (both shape (n,))."""
        bad = refs[~good]
        if len(bad):
            self._rows.update(row_keys(bad))
            if kind is Transfer.LOAD:
                self._loads.add(job_id)

    def take(self) -> tuple[set[RowKey], set[int]]:
        """All since the last call."""
        taken = self._rows, self._loads
        self._rows, self._loads = set(), set()
        return taken

    def warn(self, kind: Transfer, job_id: int, why: Exception) -> None:
        """Say why a job failed, once a minute: whatever it is, it may be so for every job."""
        if self._warning.is_due():
            log.warning(
                "the %s of job %d failed, the engine computes instead: %s: %s",
                kind.value,
                job_id,
                type(why).__name__,
                why,
                exc_info=why,
            )


def step(client: WorkerClient) -> None:
    """Let the client read and attach. A fault there costs the cache, not the engine."""
    try:
        client.step()
    except Exception:  # the engine's thread: without the broker it computes everything itself
        log.warning("the connection to the KV-cache broker failed", exc_info=True)


@contextmanager
def hold(client: WorkerClient, expected: Memory | None) -> Iterator[Memory | None]:
    """A transfer for the length of the context; None unless the client still has the `expected`
    memory, that of when the job was submitted: the rows of a new broker may by chance have the
    generations that an old one's had."""
    with ExitStack() as held:
        memory = None
        with suppress(RuntimeError):  # there is none
            memory = held.enter_context(client.transfer())
        yield memory if memory is expected else None


@dataclass(frozen=True, slots=True)
class _Copied:
    good: NDArray[np.bool_]
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Job:
    kind: Transfer
    refs: Refs
    future: Future[_Copied]


class Reporting(OffloadingWorker):
    """What both workers have in common: jobs in, results and failures out. All calls are on
    the engine's thread."""

    def __init__(self, client: WorkerClient, layout: RowLayout, partial_chunks: bool) -> None:
        self._client = client
        self._layout = layout
        self._partial_chunks = partial_chunks
        self._results: list[TransferResult] = []
        self._failures = Failures()

    def submit_store(self, job_id: int, src: GPULoadStoreSpec, dst: RowsLoadStoreSpec) -> bool:
        """Begin to copy blocks to rows. Always True."""
        if self._layout.writes:
            self._submit(Transfer.STORE, job_id, src, dst, False)
        else:  # rank 0 has the same bytes
            self._results.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def submit_load(
        self, job_id: int, src: RowsLoadStoreSpec, dst: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Begin to copy rows to blocks. Always True."""
        self._submit(Transfer.LOAD, job_id, dst, src, expedited)
        return True

    def take_failed(self) -> tuple[set[RowKey], set[int]]:
        """Since the last call: (row, generation) of the rows of ended loads and stores whose bytes
        were not copied or may be another key's, and the ids of loads with at least one such row."""
        return self._failures.take()

    def _take_results(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def _submit(
        self,
        kind: Transfer,
        job_id: int,
        blocks: GPULoadStoreSpec,
        rows: RowsLoadStoreSpec,
        expedited: bool,
    ) -> None:
        raise NotImplementedError


class RowWorker(Reporting):
    """Copies on two threads, loads and stores apart, so that a load that a request waits for is not
    behind stores; of each kind in the order submitted."""

    def __init__(
        self,
        client: WorkerClient,
        kv_caches: CanonicalKVCaches,
        layout: RowLayout,
        *,
        cpus: Sequence[int] = (),
        partial_chunks: bool = False,
    ) -> None:
        """`cpus`: where the copies run, by default anywhere. `partial_chunks`: store chunks whose
        first blocks vLLM has dropped already. Only for a vLLM that never loads what is missing
        then: 0.33 and later; before, it reads such holes as if they were filled.

        The client stays the caller's to close. ValueError if the tensors do not fit the layout.
        """
        super().__init__(client, layout, partial_chunks)
        self._pages = HostPages(kv_caches, layout)
        self._threads = {
            kind: ThreadPoolExecutor(1, f"kvquay-{kind.value}", _pin, (tuple(cpus),))
            for kind in Transfer
        }
        self._jobs: dict[int, _Job] = {}

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call, all of them as successes. Sizes in bytes really
        copied, times in seconds."""
        self._settle([job_id for job_id, job in self._jobs.items() if job.future.done()])
        step(self._client)  # afterwards: it may tell the broker that the transfers have ended
        return self._take_results()

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return once these have ended; get_finished tells of them all the same."""
        mine = [job_id for job_id in job_ids if job_id in self._jobs]
        wait([self._jobs[job_id].future for job_id in mine])
        self._settle(mine)
        step(self._client)

    def shutdown(self) -> None:
        """Returns when no copy runs any more; those not begun fail. More than once is fine."""
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        self._settle(list(self._jobs))

    def _submit(
        self,
        kind: Transfer,
        job_id: int,
        blocks: GPULoadStoreSpec,
        rows: RowsLoadStoreSpec,
        expedited: bool,
    ) -> None:
        step(self._client)
        refs, memory = rows.refs, self._client.memory
        future: Future[_Copied]
        try:
            future = self._threads[kind].submit(self._run, kind, job_id, blocks, refs, memory)
        except RuntimeError:  # after shutdown
            future = Future()
            future.set_result(_nothing(refs, 0.0))
        self._jobs[job_id] = _Job(kind, refs, future)

    def _settle(self, job_ids: Iterable[int]) -> None:
        """Take the outcome of ended jobs."""
        for job_id in job_ids:
            job = self._jobs.pop(job_id)
            copied = _nothing(job.refs, 0.0) if job.future.cancelled() else job.future.result()
            self._failures.add(job.kind, job_id, job.refs, copied.good)
            self._results.append(TransferResult(job_id, True, copied.size_bytes, copied.seconds))

    def _run(
        self,
        kind: Transfer,
        job_id: int,
        blocks: GPULoadStoreSpec,
        refs: Refs,
        memory: Memory | None,
    ) -> _Copied:
        """On a copy thread."""
        began = time.perf_counter()
        try:
            good, size_bytes = self._copy(kind, job_id, blocks, refs, memory)
        except Exception as error:  # noqa: BLE001  the engine goes on
            self._failures.warn(kind, job_id, error)
            return _nothing(refs, time.perf_counter() - began)
        return _Copied(good, size_bytes, time.perf_counter() - began)

    def _copy(
        self,
        kind: Transfer,
        job_id: int,
        blocks: GPULoadStoreSpec,
        refs: Refs,
        expected: Memory | None,
    ) -> tuple[NDArray[np.bool_], int]:
        """Which rows are good, and bytes copied."""
        count, per_chunk = len(refs), self._layout.blocks_per_chunk
        if kind is Transfer.STORE:
            placing = place_store(blocks, count, per_chunk, partial=self._partial_chunks)
        else:
            placing = place_load(blocks, count, per_chunk)
        with hold(self._client, expected) as memory:
            if memory is None:
                return np.zeros(count, dtype=bool), 0
            if memory.row_bytes != self._layout.row_bytes:
                raise ValueError(
                    f"the broker's rows have {memory.row_bytes} bytes, not {self._layout.row_bytes}"
                )
            good = memory.are_current(refs) & ~placing.refused
            copy = self._pages.store if kind is Transfer.STORE else self._pages.load
            size_bytes = copy(placing.groups, good, refs["row"].astype(np.int64), memory.rows)
            return good & memory.are_current(refs), size_bytes


def _nothing(refs: Refs, seconds: float) -> _Copied:
    return _Copied(np.zeros(len(refs), dtype=bool), 0, seconds)


def _pin(cpus: tuple[int, ...]) -> None:
    """Keep the calling thread on `cpus`."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError, OverflowError) as error:
        log.warning("copies of KV run on any processor: can't keep to %s: %s", list(cpus), error)
