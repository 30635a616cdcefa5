"""What the manager counts: lookups, jobs, bytes and dropped stores, per tier.

Covers the tracker and re-exports the public container. The primary tier and each tier count their
own affairs; `TieringOffloadingManager.get_stats` puts all together. Called under the
manager's lock; every call on the way of a lookup or a job is O(1).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from tiers.base import (
    JobResult,
    LookupResult,
    OffloadKey,
    ReqContext,
    SecondaryTierManager,
    TieringOffloadingMetrics,
    TransferJob,
)
from tiers.metric_definitions import tiering_metric_definitions
from tiers.metric_stats import (
    OWN_PREFIX,
    PUBLIC_PREFIX,
    OffloadingConnectorStats,
    add_own_names,
    own_name,
)

__all__ = [
    "OWN_PREFIX",
    "PRIMARY_TIER_LABEL",
    "PUBLIC_PREFIX",
    "OffloadingConnectorStats",
    "TierLabel",
    "TieringMetricsTracker",
    "add_own_names",
    "merge_stats",
    "own_name",
    "tiering_metric_definitions",
]

TierLabel = tuple[str]
PRIMARY_TIER_LABEL: Final[TierLabel] = ("0:primary",)
_M = TieringOffloadingMetrics


class _JobMetadataLike(Protocol):
    @property
    def transfer_job(self) -> TransferJob: ...

    @property
    def tier_idx(self) -> int: ...


@dataclass(slots=True)
class _RequestMetricsState:
    """Lookups of one request: per tier and key, when a RETRY was first seen, or None if answered.

    No dict at all once the request is allocated: its later lookups are not counted.
    """

    observed_lookups: dict[TierLabel, dict[OffloadKey, float | None]] | None = field(
        default_factory=dict
    )


@dataclass
class _TierState:
    """Jobs of one tier in flight and the chunks of the primary tier in them."""

    active_promotion_count: int = 0
    active_cascade_count: int = 0
    primary_write_chunk_count: int = 0
    primary_read_chunk_count: int = 0


@dataclass(slots=True)
class _Batches:
    """Batches of lookups since the last `take_stats`: a broker counts thousands a second."""

    queries: int = 0
    hits: int = 0
    delays: list[float] = field(default_factory=list)


class TieringMetricsTracker:
    """Counts for one manager. Guarded by the manager's lock."""

    def __init__(
        self, tier_types: Sequence[str], num_primary_chunks: int, primary_chunk_size: int
    ) -> None:
        """`tier_types` in the manager's order; `primary_chunk_size` is the row size in bytes."""
        self._tier_types = list(tier_types)
        self._num_primary_chunks = num_primary_chunks
        self._primary_chunk_size = primary_chunk_size
        self._labels: list[TierLabel] = [PRIMARY_TIER_LABEL]
        self._labels += [(f"{place}:{name}",) for place, name in enumerate(tier_types, start=1)]
        self._request_states: dict[str, _RequestMetricsState] = {}
        self._tier_states = [_TierState() for _ in tier_types]
        self._stats = OffloadingConnectorStats()
        self._batches: dict[TierLabel, _Batches] = {}
        self._jobs_changed = False  # gauges of jobs have something new to say

    def tier_label(self, tier_idx: int) -> TierLabel:
        """Label of the tier at this place: 0 is the primary, i + 1 the i-th secondary tier."""
        return self._labels[tier_idx]

    @property
    def primary_tier_label(self) -> TierLabel:
        """Label of the primary tier."""
        return PRIMARY_TIER_LABEL

    # ---- requests and lookups ----------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> None:
        """Begin to observe a request's lookups; a known one goes on as it was."""
        self._request_states.setdefault(req_context.req_id, _RequestMetricsState())

    def on_request_allocated(self, req_context: ReqContext) -> None:
        """The request runs; further lookups are not counted."""
        state = self._request_states.get(req_context.req_id)
        if state is not None:
            state.observed_lookups = None

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request."""
        self._request_states.pop(req_context.req_id, None)

    def on_lookup(
        self,
        req_context: ReqContext,
        key: OffloadKey,
        tier_label: TierLabel,
        result: LookupResult,
        lookup_duration: float,
    ) -> None:
        """A tier answered in `lookup_duration` seconds; its first HIT or MISS for a key counts."""
        state = self._request_states.get(req_context.req_id)
        if state is None or state.observed_lookups is None:
            return
        seen = state.observed_lookups.setdefault(tier_label, {})
        if key in seen and seen[key] is None:
            return
        if result is LookupResult.RETRY:
            seen.setdefault(key, time.monotonic())
        elif result is not LookupResult.HIT_PENDING:
            async_start_time = seen.get(key)
            seen[key] = None
            self._observe_resolved_lookup(tier_label, result, lookup_duration, async_start_time)

    def on_lookup_batch(
        self,
        req_context: ReqContext,
        tier_label: TierLabel,
        queries: int,
        hits: int,
        duration_s: float,
    ) -> None:
        """A tier answered `queries` keys, `hits` of them HIT, in `duration_s` seconds in all.

        The caller sees to it that the request asks about these keys for the first time. One sample
        of delay is taken for the batch, at any size.
        """
        state = self._request_states.get(req_context.req_id)
        if queries <= 0 or (state is not None and state.observed_lookups is None):
            return
        batches = self._batches.get(tier_label)
        if batches is None:
            batches = self._batches[tier_label] = _Batches()
        batches.queries += queries
        batches.hits += hits
        batches.delays.append(duration_s)

    def _count_batches(self) -> None:
        for label, batches in self._batches.items():
            self._stats.increase_counter(_M.CHUNK_QUERIES, batches.queries, label)
            if batches.hits:
                self._stats.increase_counter(_M.CHUNK_HITS, batches.hits, label)
            for delay in batches.delays:
                self._stats.observe_histogram(_M.LOOKUP_SYNC_DELAY, delay, label)
        self._batches = {}

    def _observe_resolved_lookup(
        self,
        tier_label: TierLabel,
        result: LookupResult,
        lookup_duration: float,
        async_start_time: float | None,
    ) -> None:
        self._stats.increase_counter(_M.CHUNK_QUERIES, 1, tier_label)
        if result is LookupResult.HIT:
            self._stats.increase_counter(_M.CHUNK_HITS, 1, tier_label)
        if async_start_time is None:
            self._stats.observe_histogram(_M.LOOKUP_SYNC_DELAY, lookup_duration, tier_label)
        else:
            delay = time.monotonic() - async_start_time
            self._stats.observe_histogram(_M.LOOKUP_ASYNC_DELAY, delay, tier_label)

    # ---- jobs --------------------------------------------------------------------------------

    def on_job_registered(self, job_metadata: _JobMetadataLike) -> None:
        """A job begins."""
        self._count_job(job_metadata, 1)

    def on_job_finished(self, job_metadata: _JobMetadataLike, result: JobResult) -> None:
        """A job has ended."""
        self._decrement_tier_state(job_metadata)
        self._observe_finished_job_stats(job_metadata, result)
        if job_metadata.transfer_job.is_promotion:
            self._observe_promotion_latency(job_metadata, result)

    def on_promotion_allocation_failure(self) -> None:
        """A tier has a chunk for which the primary tier has no room."""
        self._stats.increase_counter(_M.PROMOTION_ALLOCATION_FAILURES)

    def _count_job(self, job_metadata: _JobMetadataLike, step: int) -> None:
        state = self._tier_states[job_metadata.tier_idx]
        chunks = step * len(job_metadata.transfer_job.keys)
        if job_metadata.transfer_job.is_promotion:
            state.active_promotion_count += step
            state.primary_write_chunk_count += chunks
        else:
            state.active_cascade_count += step
            state.primary_read_chunk_count += chunks
        self._jobs_changed = True

    def _decrement_tier_state(self, job_metadata: _JobMetadataLike) -> None:
        self._count_job(job_metadata, -1)

    def _observe_finished_job_stats(
        self, job_metadata: _JobMetadataLike, completed_job: JobResult
    ) -> None:
        job = job_metadata.transfer_job
        label = self.tier_label(job_metadata.tier_idx + 1)
        if job.is_promotion:
            names = _M.READ_BYTES, _M.READ_TIME, _M.PROMOTION_JOB_FAILURES
        else:
            names = _M.WRITE_BYTES, _M.WRITE_TIME, _M.CASCADE_JOB_FAILURES
        bytes_name, time_name, failures_name = names
        moved = len(job.keys) if completed_job.success else 0
        if not completed_job.success:
            self._stats.increase_counter(failures_name, 1, label)
            if job.is_promotion:  # a store is all or nothing
                moved = len(completed_job.successful_keys or ())
        if moved:
            self._stats.increase_counter(bytes_name, moved * self._primary_chunk_size, label)
            if completed_job.transfer_time is not None:
                self._stats.increase_counter(time_name, completed_job.transfer_time, label)

    def _observe_promotion_latency(self, job_metadata: _JobMetadataLike, result: JobResult) -> None:
        outcome = "success" if result.success else "failure"
        (tier,) = self.tier_label(job_metadata.tier_idx + 1)
        latency = time.monotonic() - job_metadata.transfer_job.submit_time
        self._stats.observe_histogram(_M.PROMOTION_LATENCY, latency, (tier, outcome))

    # ---- other figures -----------------------------------------------------------------------

    def record_backpressure(self, tiers: Sequence[SecondaryTierManager]) -> None:
        """Take over what the tiers' detectors have to say; call before `take_stats`."""
        for place, tier in enumerate(tiers, start=1):
            detector = tier.bp_detector
            if detector is None:
                continue
            label = self.tier_label(place)
            average = detector.stats.get("store_latency_ema")
            if average is not None:
                self._stats.set_gauge(_M.BACKPRESSURE_STORE_LATENCY_EMA, average, label)
            stores, chunks = detector.policy.pop_stores_dropped()
            if stores:
                self._stats.increase_counter(_M.BACKPRESSURE_STORES_DROPPED, stores, label)
                self._stats.increase_counter(_M.BACKPRESSURE_BLOCKS_DROPPED, chunks, label)

    def count(self, name: str, value: int | float = 1, labels: tuple[str, ...] = ()) -> None:
        """Add to a counter that only this project has; its name begins with `kvquay:`."""
        self._stats.increase_counter(_only_ours(name), value, labels)

    def gauge(self, name: str, value: int | float, labels: tuple[str, ...] = ()) -> None:
        """Set a gauge that only this project has; its name begins with `kvquay:`."""
        self._stats.set_gauge(_only_ours(name), value, labels)

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Hand over what was counted, under public and own names; None if nothing happened."""
        self._count_batches()
        if self._stats.is_empty() and not self._jobs_changed:
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        self._observe_active_transfer_stats(stats)
        self._jobs_changed = False
        return add_own_names(stats)

    def _observe_active_transfer_stats(self, stats: OffloadingConnectorStats) -> None:
        total = max(1, self._num_primary_chunks)
        for place, state in enumerate(self._tier_states, start=1):
            label = self.tier_label(place)
            stats.set_gauge(_M.ACTIVE_PROMOTION_JOBS, state.active_promotion_count, label)
            stats.set_gauge(_M.ACTIVE_CASCADE_JOBS, state.active_cascade_count, label)
            writing = state.primary_write_chunk_count / total
            reading = state.primary_read_chunk_count / total
            stats.set_gauge(_M.PRIMARY_WRITE_USAGE_PERC, writing, label)
            stats.set_gauge(_M.PRIMARY_READ_USAGE_PERC, reading, label)

    def assert_idle(self) -> None:
        """AssertionError, naming the tier, if a job is counted as in flight."""
        for place, state in enumerate(self._tier_states, start=1):
            if state != _TierState():
                raise AssertionError(f"tier {self.tier_label(place)[0]} is not idle: {state}")


def _only_ours(name: str) -> str:
    if not name.startswith(OWN_PREFIX):
        raise ValueError(f"series {name} must begin with {OWN_PREFIX!r}")
    return name


def merge_stats(
    parts: Sequence[OffloadingConnectorStats | None],
) -> OffloadingConnectorStats | None:
    """All that is not empty, as one, under public and own names; None if nothing is left."""
    full = [part for part in parts if part is not None and not part.is_empty()]
    if not full:
        return None
    for part in full[1:]:
        full[0].aggregate(part)
    return add_own_names(full[0])
