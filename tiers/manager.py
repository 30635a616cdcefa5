"""The tiering manager: stores cascade to every tier, lookups promote from them.

Covers one pool: its primary tier, its secondary tiers, the jobs between them and the requests they
serve, as the public interface has it. What many engines need beyond that (owners, holds, attempts,
deadlines, shares) is in `tiers.session`, which `session(id)` gives out; calling the manager itself
is the default session, one engine in-process. No socket, no file, no payload byte.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

from tiers.aliases import ManagerAliases
from tiers.base import (
    CacheHitSource,
    ConfigInfoMapping,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
)
from tiers.batch import lookup_in_turn
from tiers.jobs import JobMetadata, PendingPromotion, RequestState
from tiers.metrics import OffloadingConnectorStats, TieringMetricsTracker, merge_stats
from tiers.parent import TierFacingParent
from tiers.poller import TierPoller
from tiers.primary import CPUPrimaryTierOffloadingManager
from tiers.session import Session
from tiers.sessions import Sessions
from tiers.teardown import shut_down
from tiers.transfers import Transfers

__all__ = [
    "DEFAULT_TIER_POLL_INTERVAL_S",
    "CPUPrimaryTierOffloadingManager",
    "JobMetadata",
    "PendingPromotion",
    "RequestState",
    "TieringOffloadingManager",
]

DEFAULT_TIER_POLL_INTERVAL_S = 0.001


class TieringOffloadingManager(ManagerAliases, OffloadingManager):
    """See the module; locking and meaning of each method: `OffloadingManager`."""

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: list[SecondaryTierManager] | None = None,
        tier_poll_interval_s: float = DEFAULT_TIER_POLL_INTERVAL_S,
        *,
        lock: threading.Lock | None = None,
    ) -> None:
        """An interval (seconds) of 0 or less leaves serving tiers to steps, or to a broker.

        `lock`: one that several managers share; by default each has its own.
        """
        self._lock = threading.Lock() if lock is None else lock
        self.primary_tier = primary_tier
        self.secondary_tiers = list(secondary_tiers or ())
        self._rows = primary_tier.rows
        self._promotions_held = False
        self._processed_jobs_this_step = False
        self._req_state: dict[str, RequestState] = {}
        strides = primary_tier.get_kv_memoryview().strides
        types = [tier.tier_type for tier in self.secondary_tiers]
        row_bytes = strides[0] if strides else 0
        self._metrics = TieringMetricsTracker(types, self._rows.num_rows, row_bytes)
        self.transfers = Transfers(primary_tier, self.secondary_tiers, self._metrics)
        self._tier_parents = [TierFacingParent(self, i) for i in range(len(self.secondary_tiers))]
        self._sessions: Sessions | None = None
        self._polled_tiers = [t for t in self.secondary_tiers if t.serves_external_requests]
        self._poller: TierPoller | None = None
        if self._polled_tiers and tier_poll_interval_s > 0:
            self._poller = TierPoller(self._lock, self.poll_tiers, tier_poll_interval_s)

    @property
    def lock(self) -> threading.Lock:
        """Guards the manager, every tier and their front ends."""
        return self._lock

    def share(self, **options: Any) -> Sessions:
        """Serve many engines; `options` are those of `Sessions`. Once, before the first session."""
        if self._sessions is not None:
            raise RuntimeError("the manager's sessions exist already")
        self._sessions = Sessions(self, **options)
        return self._sessions

    def session(self, session_id: str) -> Session:
        """One engine's own view, made at first use."""
        return (self._sessions or self.share()).open(session_id)

    def _maybe_process_finished_jobs(self) -> None:
        if not self._processed_jobs_this_step:
            self._processed_jobs_this_step = True
            self._process_finished_jobs()

    def poll_tiers(self) -> None:
        """Between steps: tiers that serve others report and answer; the step's gate stays."""
        gate, self._processed_jobs_this_step = self._processed_jobs_this_step, True
        try:
            self.transfers.collect(self._polled_tiers)
            for tier, parent in zip(self.secondary_tiers, self._tier_parents, strict=True):
                if tier.serves_external_requests:
                    tier.serve_external_requests(parent)
        finally:
            self._processed_jobs_this_step = gate

    # ---- lookup and promotion ----------------------------------------------------------------

    def lookup(
        self,
        key: OffloadKey,
        req_context: ReqContext,
        *,
        exclude_tier_idx: int | None = None,
    ) -> LookupResult:
        """Primary tier, then the other tiers in order; the first that has it starts a promotion."""
        self._maybe_process_finished_jobs()
        start = time.perf_counter()
        result = self.primary_tier.lookup(key, req_context)
        self._metrics.on_lookup(
            req_context,
            key,
            self._metrics.primary_tier_label,
            result,
            time.perf_counter() - start,
        )
        if result is not LookupResult.MISS:
            return result
        return self._lookup_tiers(key, req_context, exclude_tier_idx)

    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[LookupResult]:
        """Answers of `lookup` for each key in turn, as far as the first MISS, which is the last."""
        self._maybe_process_finished_jobs()
        ask = partial(self._lookup_tiers, ctx=req_context)
        return lookup_in_turn(self._rows, self._metrics, keys, req_context, ask)

    def _lookup_tiers(
        self, key: OffloadKey, ctx: ReqContext, exclude_tier_idx: int | None = None
    ) -> LookupResult:
        if self._promotions_held:
            return LookupResult.MISS
        retry = False
        for idx, tier in enumerate(self.secondary_tiers):
            allowed = ctx.load_tier_filter.allows(tier.medium, tier.locality)
            if idx == exclude_tier_idx or not allowed:
                continue
            start = time.perf_counter()
            result = tier.lookup(key, ctx)
            self._metrics.on_lookup(
                ctx, key, self._metrics.tier_label(idx + 1), result, time.perf_counter() - start
            )
            if result is LookupResult.HIT:
                promoted = self.transfers.promote(idx, key, ctx)
                return LookupResult.HIT_PENDING if promoted else LookupResult.MISS
            retry = retry or result is LookupResult.RETRY
        return LookupResult.RETRY if retry else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """The tier that the request promoted the chunk from, else the primary tier."""
        idx = self.transfers.load_sources.get(req_context.req_id, {}).get(key)
        if idx is None:
            return self.primary_tier.get_load_source(key, req_context)
        return self.secondary_tiers[idx].cache_hit_source

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin chunks that lookup called HIT."""
        return self.primary_tier.prepare_load(keys, req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count chunks as used now, in every tier."""
        self.primary_tier.touch(keys, req_context)
        for tier in self.secondary_tiers:
            tier.touch(keys, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin."""
        self.primary_tier.complete_load(keys, req_context)

    # ---- store and cascade -------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve room; for request-level tiers, cascade what the primary tier has already."""
        self._process_finished_jobs()
        keys = list(keys)
        output = self.primary_tier.prepare_store(keys, req_context)
        if output is None:
            return None
        state = self._req_state.get(req_context.req_id)
        if output.keys_to_store:
            self.count_pending_store(req_context)
            state = self._req_state[req_context.req_id]
        if state is not None and state.request_level_tiers:
            new = set(output.keys_to_store)
            self._cascade_existing_chunks_to_request_level_tiers(
                [key for key in keys if key not in new], req_context, state.request_level_tiers
            )
        return output

    def _cascade_existing_chunks_to_request_level_tiers(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, request_level_tiers: set[int]
    ) -> None:
        ready = []
        for key in keys:
            result = self.primary_tier.lookup(key, req_context)
            if result is LookupResult.RETRY:
                raise AssertionError("the primary tier knows what it has; it cannot say RETRY")
            if result is LookupResult.HIT:
                ready.append(key)
            elif result is LookupResult.HIT_PENDING:
                self._req_state[req_context.req_id].pending_cascade_keys.append(key)
        if ready:
            self.transfers.cascade(ready, req_context, sorted(request_level_tiers))

    def _flush_pending_cascades(self) -> None:
        for req_id, state in list(self._req_state.items()):
            if state.pending_cascade_keys:
                parked, state.pending_cascade_keys = state.pending_cascade_keys, []
                self._cascade_existing_chunks_to_request_level_tiers(
                    parked, state.req_context, state.request_level_tiers or set()
                )
                self._maybe_finalize_request(req_id)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make chunks readable and cascade them to every tier that may take them, or free them."""
        keys = list(keys)
        self.primary_tier.complete_store(keys, req_context, success)
        if success:  # after a reset, or for an old offer, not every key is there
            rows = self._rows.find(keys)
            ready = self._rows.slots.ref_cnt[rows] >= 0
            keys = [key for key, there in zip(keys, ready & (rows >= 0), strict=True) if there]
        self._after_store(keys if success else [], req_context)

    def count_pending_store(self, ctx: ReqContext, stores: int = 1) -> None:
        """Stores of the request have begun, each to be ended by `_after_store`."""
        state = self._req_state.setdefault(ctx.req_id, RequestState(ctx))
        state.pending_primary_stores += stores

    def request_policy(self, ctx: ReqContext) -> OffloadPolicy:
        """What the tiers want of a live request."""
        state = self._req_state.get(ctx.req_id)
        whole = state is not None and state.request_level_tiers
        return OffloadPolicy.REQUEST_LEVEL if whole else OffloadPolicy.CHUNK_LEVEL

    def _after_store(self, stored: list[OffloadKey], ctx: ReqContext, ended: int = 1) -> None:
        """Stores of the request have ended; `stored` are the chunks they made readable."""
        if stored:
            self.transfers.cascade(stored, ctx, range(len(self.secondary_tiers)))
        state = self._req_state.get(ctx.req_id)
        if state is not None and state.pending_primary_stores > 0:
            state.pending_primary_stores -= min(ended, state.pending_primary_stores)
            self._maybe_finalize_request(ctx.req_id)

    def create_store_job(
        self, keys: Collection[OffloadKey], req_context: ReqContext, tier_idx: int = 0
    ) -> TransferJob:
        """Pin ready chunks for a copy to a tier and register the job; the caller moves the data."""
        return self.transfers.create_store_job(keys, req_context, tier_idx)

    # ---- requests and steps ------------------------------------------------------------------

    def on_new_request(
        self, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> RequestOffloadingContext:
        """Tell every tier; REQUEST_LEVEL if one of them wants all chunks of the request."""
        self._metrics.on_new_request(req_context)
        self.primary_tier.on_new_request(req_context)
        wanting = {
            idx
            for idx, tier in enumerate(self.secondary_tiers)
            if idx != exclude_tier_idx
            and tier.on_new_request(req_context).policy is OffloadPolicy.REQUEST_LEVEL
        }
        old = self._req_state.get(req_context.req_id)
        if old is not None and old.is_finished:
            self._tell_finished(old, exclude_tier_idx)
        self._req_state[req_context.req_id] = RequestState(
            req_context, request_level_tiers=wanting or None
        )
        return RequestOffloadingContext(self.request_policy(req_context))

    def on_request_finished(
        self, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> None:
        """The primary tier hears it now, tiers once nothing can still cascade to them."""
        self.primary_tier.on_request_finished(req_context)
        self.transfers.load_sources.pop(req_context.req_id, None)
        self._metrics.on_request_finished(req_context)
        state = self._req_state.get(req_context.req_id)
        if state is not None:
            state.is_finished = True
            self._maybe_finalize_request(req_context.req_id, exclude_tier_idx)

    def _maybe_finalize_request(self, req_id: str, exclude_tier_idx: int | None = None) -> None:
        state = self._req_state[req_id]
        if not state.is_finished or state.pending_primary_stores or state.pending_cascade_keys:
            return
        del self._req_state[req_id]
        self._tell_finished(state, exclude_tier_idx)

    def _tell_finished(self, state: RequestState, exclude_tier_idx: int | None) -> None:
        for idx, tier in enumerate(self.secondary_tiers):
            if idx != exclude_tier_idx:
                tier.on_request_finished(state.req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End of a step, in the order that the public interface fixes."""
        self._maybe_process_finished_jobs()
        for tier, parent in zip(self.secondary_tiers, self._tier_parents, strict=True):
            tier.serve_external_requests(parent)
        self._processed_jobs_this_step = False
        self.transfers.submit_promotions()
        self._flush_pending_cascades()
        for tier in self.secondary_tiers:
            tier.on_schedule_end(context)
        for req_id in context.new_req_ids:
            state = self._req_state.get(req_id)
            if state is not None:
                self._metrics.on_request_allocated(state.req_context)

    def has_pending_work(self) -> bool:
        """Whether jobs, parked cascades or a tier need further steps."""
        return (
            bool(self.transfers.jobs)
            or any(state.pending_cascade_keys for state in self._req_state.values())
            or any(tier.has_pending_work() for tier in self.secondary_tiers)
        )

    def take_events(self) -> Iterable[OffloadingEvent]:
        """The primary tier's, then each tier's."""
        yield from self.primary_tier.take_events()
        for tier in self.secondary_tiers:
            yield from tier.take_events()

    def reset_cache(self) -> None:
        """Empty the primary tier; tiers keep theirs. Blocks until they are idle. RuntimeError
        beside open sessions, whose rows it would take."""
        if self._sessions is not None:
            self._sessions.refuse_reset()
        for tier in self.secondary_tiers:
            tier.drain_jobs()
        self._process_finished_jobs()
        self.transfers.drop_pending()
        for req_id, state in list(self._req_state.items()):
            state.pending_primary_stores = 0
            state.pending_cascade_keys = []
            self._maybe_finalize_request(req_id)
        self.primary_tier.reset_cache()
        self._processed_jobs_this_step = False
        for tier in self.secondary_tiers:
            if tier.bp_detector is not None:
                tier.bp_detector.reset()
        self._promotions_held = True

    def on_reset_flushed(self) -> None:
        """No transfer from before the reset runs any more: promotions may start again."""
        self.primary_tier.on_reset_flushed()
        self._promotions_held = False

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Figures of the primary tier, the tracker and every tier, merged."""
        self._metrics.record_backpressure(self.secondary_tiers)
        parts = [self.primary_tier.get_stats(), self._metrics.take_stats()]
        parts += [tier.get_stats() for tier in self.secondary_tiers]
        return merge_stats(parts)

    def config_info(self) -> Sequence[ConfigInfoMapping]:
        """The primary tier's and each tier's, labelled by tier."""
        label = self._metrics.tier_label
        infos = [{"tier": label(0)[0], **info} for info in self.primary_tier.config_info()]
        for idx, tier in enumerate(self.secondary_tiers, 1):
            if info := tier.config_info():
                infos.append({"tier": label(idx)[0], **info})
        return infos

    def shutdown(self) -> None:
        """Stop the thread, then every tier, then release the memory; without the lock. If a tier
        fails the others still end, the memory is kept, and the failure is raised."""
        shut_down(self._poller, self._lock, self.secondary_tiers, self.primary_tier)
