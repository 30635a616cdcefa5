"""The contract of a tier, and every public name of the tiering core's interface.

Names and signatures follow the public tiering interface of vLLM 0.33, so that tiers, policies and
callers written for it run here after changing the import path. Words are in `tiers.vocabulary`,
the scheduler's side in `tiers.contract`, the worker's in `tiers.worker`. No policy, no state of a
manager.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tiers.contract import OffloadingManager
from tiers.vocabulary import (
    BlockIDsLoadStoreSpec,
    CacheHitSource,
    ConfigInfo,
    ConfigInfoMapping,
    GPULoadStoreSpec,
    KvHintAction,
    KvHintsEnvelope,
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingKVEventsConfig,
    OffloadingMetricMetadata,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from tiers.worker import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)

if TYPE_CHECKING:
    from tiers.backpressure import BackpressureDetector
    from tiers.metrics import OffloadingConnectorStats

__all__ = [
    "TIER_LABEL",
    "BlockIDsLoadStoreSpec",
    "CacheHitSource",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "CanonicalPageMapping",
    "ConfigInfo",
    "ConfigInfoMapping",
    "CopyRun",
    "GPULoadStoreSpec",
    "JobId",
    "JobResult",
    "KvHintAction",
    "KvHintsEnvelope",
    "LoadStoreSpec",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingKVEventsConfig",
    "OffloadingManager",
    "OffloadingMetricMetadata",
    "OffloadingSpec",
    "OffloadingWorker",
    "ParentManager",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SecondaryTierManager",
    "TierFilter",
    "TierMatcher",
    "TieringOffloadingMetrics",
    "TransferJob",
    "TransferResult",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
]

JobId = int

TIER_LABEL = "tier"
"""Label of metrics that are kept per tier."""


class TieringOffloadingMetrics:
    """Public names of the tiering metrics; `tiers.metrics` has the project's own prefix too."""

    LOOKUP_SYNC_DELAY = "vllm:kv_offload_tiering_lookup_sync_delay_seconds"
    LOOKUP_ASYNC_DELAY = "vllm:kv_offload_tiering_lookup_async_delay_seconds"
    READ_BYTES = "vllm:kv_offload_tiering_read_bytes"
    READ_TIME = "vllm:kv_offload_tiering_read_time"
    WRITE_BYTES = "vllm:kv_offload_tiering_write_bytes"
    WRITE_TIME = "vllm:kv_offload_tiering_write_time"
    PROMOTION_JOB_FAILURES = "vllm:kv_offload_tiering_promotion_job_failures"
    CASCADE_JOB_FAILURES = "vllm:kv_offload_tiering_cascade_job_failures"
    CHUNK_QUERIES = "vllm:kv_offload_tiering_chunk_queries"
    CHUNK_HITS = "vllm:kv_offload_tiering_chunk_hits"
    PRIMARY_WRITE_USAGE_PERC = "vllm:kv_offload_tiering_primary_write_usage_perc"
    PRIMARY_READ_USAGE_PERC = "vllm:kv_offload_tiering_primary_read_usage_perc"
    PROMOTION_ALLOCATION_FAILURES = "vllm:kv_offload_tiering_promotion_allocation_failures"
    ACTIVE_PROMOTION_JOBS = "vllm:kv_offload_tiering_active_promotion_jobs"
    ACTIVE_CASCADE_JOBS = "vllm:kv_offload_tiering_active_cascade_jobs"
    BACKPRESSURE_STORE_LATENCY_EMA = "vllm:kv_offload_tiering_backpressure_store_latency_ema"
    BACKPRESSURE_STORES_DROPPED = "vllm:kv_offload_tiering_backpressure_stores_dropped"
    BACKPRESSURE_BLOCKS_DROPPED = "vllm:kv_offload_tiering_backpressure_blocks_dropped"
    PROMOTION_LATENCY = "vllm:kv_offload_tiering_promotion_latency_seconds"


@dataclass
class TransferJob:
    """Chunks to move between the primary tier and a secondary one.

    `chunk_ids` (int32, shape (n,)) are rows of the primary view, parallel to `keys`.
    `submit_time` is monotonic seconds.
    """

    job_id: JobId
    keys: Collection[OffloadKey]
    chunk_ids: NDArray[np.int32]
    is_promotion: bool  # True: secondary to primary; False: primary to secondary
    req_context: ReqContext
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    """End of one job. `success` is True only if every key succeeded.

    `successful_keys` (promotions): which keys did arrive when not all did; None means that all
    share `success`. Time in seconds, both figures None if unknown.
    """

    job_id: JobId
    success: bool
    successful_keys: Collection[OffloadKey] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class ParentManager(ABC):
    """What a tier may ask of its manager while it serves requests from outside.

    Handed to `serve_external_requests` and valid only during that call; the manager's lock is held
    throughout and must not be released. For each foreign request: `on_new_request`, any number of
    `lookup`, `create_store_job`, and always `on_request_finished`, also if nothing was found.
    The calling tier itself is left out of all of it.
    """

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A foreign request begins."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """As OffloadingManager.lookup; may start a promotion from another tier."""

    @abstractmethod
    def create_store_job(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> TransferJob:
        """Pin chunks that lookup called HIT; the tier moves the data and reports the job."""

    @abstractmethod
    def on_request_finished(self, req_context: ReqContext) -> None:
        """The foreign request ends."""


_HIT_SOURCE_OF_MEDIUM = {Medium.CPU: CacheHitSource.HOST, Medium.STORAGE: CacheHitSource.DISK}


class SecondaryTierManager(ABC):
    """A place that chunks can be copied to from the primary tier, and back.

    Called under the manager's lock, so never entered twice at once, but possibly from two threads
    in turn. Every method is light and never blocks, except `drain_jobs` and `shutdown`. The
    manager keeps the rows of a submitted job pinned (or reserved) until the tier reports the job
    by `get_finished_jobs`, exactly once.
    """

    medium: ClassVar[Medium | None] = None
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED
    serves_external_requests: ClassVar[bool] = False
    """Whether the control-plane thread polls and serves this tier between steps.
    `tolerates_off_thread_polling` is the public interface's name for the same thing."""
    tolerates_off_thread_polling: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "cache_hit_source" not in own and cls.medium is not None:
            inherited = cls.cache_hit_source
            if inherited is CacheHitSource.EXTERNAL_UNSPECIFIED or "medium" in own:
                cls.cache_hit_source = _HIT_SOURCE_OF_MEDIUM[cls.medium]
        if "serves_external_requests" in own:
            cls.tolerates_off_thread_polling = cls.serves_external_requests
        elif "tolerates_off_thread_polling" in own:
            cls.serves_external_requests = cls.tolerates_off_thread_polling

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        """`primary_kv_view`: shape (num_chunks, row bytes); chunk c is `numpy.asarray(view)[c]`."""
        strides = primary_kv_view.strides
        if not strides:
            raise ValueError("primary_kv_view has no rows: it must have shape (num_chunks, bytes)")
        self._offloading_spec = offloading_spec
        self._primary_kv_view = primary_kv_view
        self._block_size_bytes: int = strides[0]
        self.tier_type = tier_type
        self.locality: Locality | None = None
        self._bp_detector = backpressure_detector

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one row of the primary tier."""
        return self._block_size_bytes

    @property
    def bp_detector(self) -> BackpressureDetector | None:
        """Decides which stores this tier is spared; None: it gets all."""
        return self._bp_detector

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT, MISS, or RETRY if the answer is not known yet."""

    @abstractmethod
    def submit_store(self, job_metadata: TransferJob) -> None:
        """Copy rows out of the primary tier; skip what is here already, evict to make room."""

    @abstractmethod
    def submit_load(self, job_metadata: TransferJob) -> None:
        """Copy chunks into the reserved rows of the primary tier."""

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended since the last call."""

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping for this tier's own work."""
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the last call, which hands them over."""
        return ()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """Count chunks as used now."""

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request begins; REQUEST_LEVEL asks for all its chunks, not only new ones."""

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """No further lookup or job will come for the request; jobs may still be running."""

    def serve_external_requests(self, parent: ParentManager) -> None:  # noqa: B027
        """Answer requests from outside through `parent`."""

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: B027
        """The engine's step (or the broker's message) has ended."""

    @abstractmethod
    def drain_jobs(self) -> None:
        """Block until every job has ended; get_finished_jobs then reports them all.

        A copy that is running is never cut off; queued jobs may be reported as failed.
        """

    def shutdown(self) -> None:  # noqa: B027
        """Stop and release everything. No call follows."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Metrics that this tier may report, by name."""
        return {}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Metrics since the last call, which hands them over; None if there are none."""
        return None

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Names of the static configuration values shown for this tier."""
        return ()

    def config_info(self) -> ConfigInfoMapping:
        """Static configuration values of this tier."""
        return {}
