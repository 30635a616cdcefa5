"""A watch over somebody else's tier: its calls run under the lock that every engine waits for.

Each call is timed. Slow ones are counted; a tier that is very slow several times is disabled: it
has nothing and takes nothing any more, and what it still runs may end. Nothing is cut off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from tiers.base import (
    JobResult,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ParentManager,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
)
from tiers.metrics import OffloadingConnectorStats

logger = logging.getLogger(__name__)

SLOW_S = 0.005
VERY_SLOW_S = 1.0
VERY_SLOW_CALLS = 3

_T = TypeVar("_T")


class GuardedTier(SecondaryTierManager):
    """The tier inside, timed. `slow_calls` took over SLOW_S; `is_disabled` after VERY_SLOW_CALLS
    over VERY_SLOW_S."""

    def __init__(
        self, inner: SecondaryTierManager, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(None, inner._primary_kv_view, inner.tier_type, inner.bp_detector)
        self.inner = inner
        self._clock = clock
        self.locality = inner.locality
        # Class attributes of other tiers; here each guard has those of what it guards.
        for name in ("medium", "cache_hit_source", "serves_external_requests"):
            setattr(self, name, getattr(inner, name))
        self.slow_calls = 0
        self.very_slow_calls = 0
        self.is_disabled = False
        self._refused: list[JobResult] = []

    def _timed(self, call: Callable[..., _T], *arguments: Any) -> _T:
        start = self._clock()
        try:
            return call(*arguments)
        finally:
            took = self._clock() - start
            if took > SLOW_S:
                self.slow_calls += 1
            if took > VERY_SLOW_S:
                self._very_slow(getattr(call, "__name__", "a call"), took)

    def _very_slow(self, name: str, took: float) -> None:
        self.very_slow_calls += 1
        if self.very_slow_calls >= VERY_SLOW_CALLS and not self.is_disabled:
            self.is_disabled = True
            logger.error(
                "tier %s is disabled: %s blocked everybody for %.1f s, the %d. time; its methods "
                "must not block",
                self.tier_type,
                name,
                took,
                self.very_slow_calls,
            )

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """MISS once disabled."""
        if self.is_disabled:
            return LookupResult.MISS
        return self._timed(self.inner.lookup, key, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Fails once disabled."""
        self._submit(self.inner.submit_store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Fails once disabled."""
        self._submit(self.inner.submit_load, job_metadata)

    def _submit(self, call: Callable[[TransferJob], None], job: TransferJob) -> None:
        if self.is_disabled:
            self._refused.append(JobResult(job.job_id, False))
        else:
            self._timed(call, job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Also once disabled: what was submitted before must end."""
        refused, self._refused = self._refused, []
        return [*refused, *self._timed(lambda: list(self.inner.get_finished_jobs()))]

    def has_pending_work(self) -> bool:
        """As the tier says."""
        return bool(self._refused) or self._timed(self.inner.has_pending_work)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """As the tier says."""
        return self._timed(lambda: list(self.inner.take_events()))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Not once disabled."""
        if not self.is_disabled:
            self._timed(self.inner.touch, keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunk level once disabled."""
        if self.is_disabled:
            return RequestOffloadingContext()
        return self._timed(self.inner.on_new_request, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Also once disabled: it may know the request."""
        self._timed(self.inner.on_request_finished, req_context)

    def serve_external_requests(self, parent: ParentManager) -> None:
        """Not once disabled."""
        if not self.is_disabled:
            self._timed(self.inner.serve_external_requests, parent)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Not once disabled."""
        if not self.is_disabled:
            self._timed(self.inner.on_schedule_end, context)

    def drain_jobs(self) -> None:
        """May block, by its contract; not timed."""
        self.inner.drain_jobs()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """As the tier says."""
        return self._timed(self.inner.get_stats)

    def shutdown(self) -> None:
        """May block, by its contract; not timed."""
        self.inner.shutdown()
