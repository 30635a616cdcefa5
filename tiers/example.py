"""A tier in this process's own memory: instant, and the one to read before writing another.

It keeps real bytes, so it can also serve as a small tier for tests and demos. It copies on the
caller's thread, under the manager's lock; a tier for production would start the copy and report
it later. Nothing survives the process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tiers.base import (
    ConfigInfo,
    ConfigInfoMapping,
    JobResult,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    SecondaryTierManager,
    TransferJob,
)

if TYPE_CHECKING:
    from tiers.backpressure import BackpressureDetector

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExampleTierInfo(ConfigInfo):
    """Static configuration of the tier."""

    example_info: int


class ExampleSecondaryTierManager(SecondaryTierManager):
    """Chunks in a dict, least recently used first.

    `custom_param` has no effect but to show in the configuration. `max_chunks` bounds the tier
    (None: it grows with what is stored).
    """

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        custom_param: int = 0,
        backpressure_detector: BackpressureDetector | None = None,
        max_chunks: int | None = None,
    ) -> None:
        if max_chunks is not None and max_chunks < 1:
            raise ValueError(f"max_chunks must be 1 or more, or None for no bound: {max_chunks}")
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.custom_param = custom_param
        self.max_chunks = max_chunks
        self._config_info = ExampleTierInfo(example_info=custom_param)
        self.chunks: dict[OffloadKey, bytes] = {}
        self.completed_jobs: list[JobResult] = []
        self._chunk_size = self.block_size_bytes

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Names of the values of `config_info`."""
        return ExampleTierInfo.config_info_keys()

    def config_info(self) -> ConfigInfoMapping:
        """The custom parameter, as `example_info`."""
        return self._config_info.as_config_info()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS; never RETRY."""
        return LookupResult.HIT if key in self.chunks else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Keep these longest; of them the last one given."""
        for key in keys:
            if key in self.chunks:
                self.chunks[key] = self.chunks.pop(key)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Copy the rows of chunks that are not here yet; the job ends at once."""
        start = time.monotonic()
        rows = self._rows()
        success, copied = True, 0
        for key, row in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            if not self._has_row(rows, row, job_metadata):
                success = False
            elif key not in self.chunks:
                self._make_room()
                self.chunks[key] = rows[row].tobytes()
                copied += 1
        self._end(job_metadata, success, None, start, copied)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Fill the rows of chunks that are here; a chunk that is not fails, the others arrive."""
        start = time.monotonic()
        rows = self._rows()
        loaded: list[OffloadKey] = []
        for key, row in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            if key in self.chunks and self._has_row(rows, row, job_metadata):
                data = self.chunks[key] = self.chunks.pop(key)  # used last
                rows[row] = np.frombuffer(data, dtype=rows.dtype)
                loaded.append(key)
        success = len(loaded) == len(job_metadata.keys)
        self._end(job_metadata, success, None if success else loaded, start, len(loaded))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs since the last call."""
        done, self.completed_jobs = self.completed_jobs, []
        return done

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """New chunks are enough."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Nothing to wait for: jobs end when they are submitted."""

    def shutdown(self) -> None:
        """Give the memory back."""
        self.chunks.clear()

    def get_num_chunks(self) -> int:
        """Chunks kept."""
        return len(self.chunks)

    def _rows(self) -> NDArray[Any]:
        # Made per job and not kept: the primary tier can't release a view that is still in use.
        rows = np.asarray(self._primary_kv_view)
        return rows if rows.ndim > 1 else rows.reshape(-1, 1)

    def _has_row(self, rows: NDArray[Any], row: int, job: TransferJob) -> bool:
        if 0 <= row < len(rows):
            return True
        # Fails its key rather than the manager's call: the job must be reported in any case.
        logger.error("job %d names row %d, there are %d", job.job_id, row, len(rows))
        return False

    def _make_room(self) -> None:
        if self.max_chunks is not None and len(self.chunks) >= self.max_chunks:
            del self.chunks[next(iter(self.chunks))]

    def _end(
        self,
        job: TransferJob,
        success: bool,
        successful_keys: list[OffloadKey] | None,
        start: float,
        copied: int,
    ) -> None:
        self.completed_jobs.append(
            JobResult(
                job_id=job.job_id,
                success=success,
                successful_keys=successful_keys,
                transfer_time=time.monotonic() - start,
                transfer_bytes=copied * self._chunk_size,
            )
        )
