"""Jobs between the primary tier and the secondary ones: promotions, cascades and their ends.

Every transfer has an id from one rising counter and ends exactly once, by the tier that runs it.
Which request wants what, and when a step ends, is the manager's matter.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from tiers.base import JobId, JobResult, OffloadKey, ReqContext, SecondaryTierManager, TransferJob
from tiers.jobs import JobMetadata, PendingPromotion
from tiers.metrics import TieringMetricsTracker
from tiers.primary import CPULoadStoreSpec, CPUPrimaryTierOffloadingManager
from tiers.rows import distinct_batches

logger = logging.getLogger(__name__)


class Transfers:
    """Jobs in flight of one pool. Guarded by the manager's lock."""

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        tiers: list[SecondaryTierManager],
        metrics: TieringMetricsTracker,
    ) -> None:
        self._primary = primary_tier
        self._rows = primary_tier.rows
        self._tiers = tiers
        self._metrics = metrics
        self._job_ids = itertools.count()
        self.jobs: dict[JobId, JobMetadata] = {}
        self.pending: dict[tuple[int, str], PendingPromotion] = {}
        self.load_sources: dict[str, dict[OffloadKey, int]] = {}  # by request: tier of origin
        self.may_take: Callable[[int, int], bool] = lambda rows, idle: True
        """Whether jobs may take this many rows more, so many of which nobody uses now; the broker
        bounds the share of tiers."""
        self.cascades_dropped = 0

    def next_job_id(self) -> JobId:
        """An id that no job of this pool has had."""
        return next(self._job_ids)

    def register(self, job: TransferJob, tier_idx: int) -> None:
        """A job begins."""
        metadata = JobMetadata(job, tier_idx)
        self.jobs[job.job_id] = metadata
        self._metrics.on_job_registered(metadata)

    def collect(self, tiers: Iterable[SecondaryTierManager]) -> None:
        """End the jobs that `tiers` report."""
        for tier in tiers:
            for result in tier.get_finished_jobs():
                self._finish_job(tier, result)

    def _finish_job(self, tier: SecondaryTierManager, result: JobResult) -> None:
        metadata = self.jobs.get(result.job_id)
        if metadata is None or self._tiers[metadata.tier_idx] is not tier:
            raise AssertionError(
                f"tier {tier.tier_type} reports job {result.job_id}, which is not its own"
            )
        job = metadata.transfer_job
        if result.successful_keys is not None and not set(result.successful_keys) <= set(job.keys):
            raise AssertionError(
                f"tier {tier.tier_type} reports keys that job {result.job_id} did not have"
            )
        del self.jobs[result.job_id]
        self._metrics.on_job_finished(metadata, result)
        if job.is_promotion:
            self._complete_promotion(metadata, result)
        else:
            for rows in distinct_batches(job.chunk_ids):
                self._rows.unhold(rows)
            self._update_backpressure(tier, metadata, result)

    def _complete_promotion(self, metadata: JobMetadata, result: JobResult) -> None:
        job = metadata.transfer_job
        keys = list(job.keys)
        if result.success:
            arrived = np.ones(len(keys), dtype=bool)
        else:
            good = set(result.successful_keys or ())
            arrived = np.fromiter((key in good for key in keys), dtype=bool, count=len(keys))
        sources = self.load_sources.get(job.req_context.req_id)
        if sources is not None:
            for key, there in zip(keys, arrived.tolist(), strict=True):
                if not there:
                    sources.pop(key, None)
        self._rows.end_write(job.chunk_ids[arrived], True)
        self._rows.end_write(job.chunk_ids[~arrived], False)

    def _update_backpressure(
        self, tier: SecondaryTierManager, metadata: JobMetadata, result: JobResult
    ) -> None:
        detector = tier.bp_detector
        if detector is None:
            return
        before = detector.is_under_pressure()
        job = metadata.transfer_job
        if result.success:
            size = result.transfer_bytes or len(job.keys) * tier.block_size_bytes
            detector.update(job.submit_time, size)
        else:
            detector.on_store_failed()
        after = detector.is_under_pressure()
        if before is not after:
            what = "is under pressure, stores to it are cut" if after else "has recovered"
            logger.info("tier %s %s: %s", tier.tier_type, what, detector.stats)

    def promote(self, tier_idx: int, key: OffloadKey, ctx: ReqContext) -> bool:
        """Reserve a row for a chunk that a tier has; False if there is no room."""
        output = self._primary.prepare_write([key], ctx) if self.may_take(1, 1) else None
        if output is None:
            self._metrics.on_promotion_allocation_failure()
            return False
        spec = output.store_spec
        assert isinstance(spec, CPULoadStoreSpec)
        pending = self.pending.setdefault((tier_idx, ctx.req_id), PendingPromotion(ctx))
        pending.keys.append(key)
        pending.chunk_ids.append(int(spec.chunk_ids[0]))
        self.load_sources.setdefault(ctx.req_id, {})[key] = tier_idx
        return True

    def submit_promotions(self, req_id: str | None = None) -> None:
        """Submit what lookups (of one request, or all) gathered: one load per (tier, request)."""
        for tier_idx, request in list(self.pending):
            if req_id is not None and request != req_id:
                continue
            pending = self.pending.pop((tier_idx, request))
            job = TransferJob(
                self.next_job_id(),
                pending.keys,
                np.array(pending.chunk_ids, dtype=np.int32),
                True,
                pending.req_context,
            )
            self.register(job, tier_idx)
            self._tiers[tier_idx].submit_load(job)

    def cascade(
        self, keys: Sequence[OffloadKey], ctx: ReqContext, tier_idxs: Iterable[int]
    ) -> None:
        """Copy ready chunks to tiers, as far as their back-pressure and share allow."""
        keys = list(dict.fromkeys(keys))
        rows = self._rows.find(keys)
        for idx in tier_idxs:
            tier = self._tiers[idx]
            if tier.bp_detector is not None and not tier.bp_detector.should_store(len(keys)):
                continue
            idle = int(np.count_nonzero(self._rows.slots.ref_cnt[rows] == 0))
            if not self.may_take(len(keys), idle):
                self.cascades_dropped += len(keys)
                continue
            tier.submit_store(self.create_store_job(keys, ctx, idx))

    def create_store_job(
        self, keys: Collection[OffloadKey], req_context: ReqContext, tier_idx: int
    ) -> TransferJob:
        """Pin ready chunks for a copy to a tier and register the job; the caller moves the data."""
        keys = list(keys)
        spec = self._primary.prepare_read(keys, req_context)
        assert isinstance(spec, CPULoadStoreSpec)
        job = TransferJob(self.next_job_id(), keys, spec.chunk_ids, False, req_context)
        self.register(job, tier_idx)
        return job

    def drop_pending(self) -> None:
        """Give up promotions that were not submitted yet."""
        for pending in self.pending.values():
            self._rows.end_write(np.array(pending.chunk_ids, dtype=np.int32), False)
        self.pending.clear()
        self.load_sources.clear()
