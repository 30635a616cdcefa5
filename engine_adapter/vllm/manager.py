"""The scheduler's side of vLLM: its OffloadingManager, answered from one question per request.

vLLM asks key by key, again at every step, inside its scheduler; the connector asks the broker once
per request (`ask`), and what vLLM asks here is answered from that. Nothing here blocks longer than
a call's time-out, and no exception leaves it: without a broker, or after a fault of our own, every
lookup is a MISS and nothing is stored. What a broker is, `engine_adapter.client` knows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from broker import wire
from engine_adapter.answers import NO_REFS, GroupQuery, Refs
from engine_adapter.client import SchedulerClient
from engine_adapter.once_a_minute import OnceAMinute
from engine_adapter.vllm.adapters import Adapter, Adapters
from engine_adapter.vllm.figures import Figures
from engine_adapter.vllm.guard import or_else
from engine_adapter.vllm.requests import Asked, Request
from engine_adapter.vllm.rows import RowKey, RowsLoadStoreSpec, row_keys

logger = logging.getLogger("vllm.kvquay")

MOST_REFUSALS = 8
MOST_TIMED_OUT = 5
"""Lookups of one request. A broker that is stuck is not asked after three (the breaker); one that
is only busy, on a machine with more to do than processors, answers one of them."""
MOST_FAILED_LOADS = 3
"""Of one request; then it is computed. Bad rows are forgotten after the first, so whatever still
fails (a worker that can read no row, say) would fail for ever."""
REFUSED_AGAIN_S = 0.050
LOOK_AGAIN_S = 0.1
"""Whether a request has waited too long is asked this often."""
NOWHERE = np.iinfo(np.int32).max
"""A row that no pool has: a load from it fails at the worker, and vLLM computes anew."""


class BrokerManager(OffloadingManager):  # type: ignore[no-any-unimported,unused-ignore]
    """See the module. One thread, the scheduler's."""

    def __init__(self, *, events: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`events`: whether vLLM publishes KV events. Without `connect` nothing is cached."""
        self.client: SchedulerClient | None = None
        self.figures = Figures()
        self._events = events
        self._clock = clock
        self._adapters = Adapters()
        self._requests: dict[str, Request] = {}
        self._failed: set[RowKey] = set()
        self._expected: tuple[str, Adapter | None] = ("", None)
        self._telling = OnceAMinute(clock)
        self._timeouts_told = 0
        self.waiting: dict[str, int] = {}
        """Requests whose last answer is still on its way, and the tokens that they had computed
        then. To be looked at and not changed: vLLM asks of each thousands of times a second."""
        self._heard = 0
        self._look_again_at = 0.0

    def connect(self, client: SchedulerClient) -> None:
        """From now on there is a cache."""
        self.client = client

    def faulted(self, where: str) -> None:
        """An exception was caught in `where`."""
        self.figures.faults += 1
        if self._telling.is_due():
            logger.exception("kvquay: %s failed; this engine goes on without the cache", where)

    def _state(self, req_id: str) -> Request:
        state = self._requests.get(req_id)
        if state is None:
            state = self._requests[req_id] = Request()
        return state

    # ---- requests ----------------------------------------------------------------------------

    def expect(self, req_id: str, adapter: Adapter | None) -> None:
        """The request that begins next runs under an adapter (or none), which vLLM does not tell
        `on_new_request`. Its files decide who can share with it; until they have been read, nobody.
        """
        self._expected = (req_id, adapter)

    @or_else(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Only what the request says of itself is told; the rest its first question says."""
        req_id, expected = self._expected
        digest: bytes | None = b""
        if expected is not None and req_id == req_context.req_id:
            digest = self._adapters.digest(expected)
        self._requests[req_context.req_id] = Request(is_cached=digest is not None)
        params, tiers = req_context.kv_transfer_params, req_context.load_tier_filter.matchers
        restricted = [
            (
                None if matcher.medium is None else matcher.medium.value,
                None if matcher.locality is None else matcher.locality.value,
            )
            for matcher in tiers
        ]
        everything = restricted == [(None, None)]
        if self.client is not None and (params or digest or not everything):
            self.client.begin(
                req_context.req_id,
                adapter=digest or b"",
                kv_transfer_params=params or None,
                load_tiers=None if everything else restricted,
            )
        return RequestOffloadingContext()

    @or_else(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """No new call will come; completions may."""
        self.waiting.pop(req_context.req_id, None)
        state = self._requests.get(req_context.req_id)
        if self.client is not None:
            self.client.finish(req_context.req_id)
        if state is not None:
            state.finished = True
            self._forget_if_done(req_context.req_id, state)

    def _forget_if_done(self, req_id: str, state: Request) -> None:
        if state.finished and not state.loading and not state.storing:
            self._requests.pop(req_id, None)

    @or_else(lambda: None)
    def preempted(self, req_ids: Iterable[str]) -> None:
        """They start over; what they store meanwhile stays good."""
        for req_id in req_ids:
            state = self._requests.get(req_id)
            if state is not None:
                self._ask_anew(req_id, state)

    def _ask_anew(self, req_id: str, state: Request) -> None:
        state.asked = None
        self.waiting.pop(req_id, None)
        if self.client is not None:
            self.client.release(req_id)

    # ---- lookup and load ---------------------------------------------------------------------

    @or_else(lambda: True)
    def ask(self, req_id: str, computed: int, groups: Sequence[GroupQuery]) -> bool:
        """Ask the broker for all groups at once; what vLLM then looks up is answered from it.
        False if no answer came in time: it is to be asked again at the next step."""
        state = self._state(req_id)
        self.waiting.pop(req_id, None)
        lengths = tuple(len(group.keys) for group in groups)
        asked = state.asked
        if asked is not None and (asked.computed != computed or asked.lengths != lengths):
            self._ask_anew(req_id, state)
        results: dict[OffloadKey, LookupResult] = {}
        state.asked = Asked(computed, lengths, results)
        if self.client is None or not state.is_cached or state.failed_loads >= MOST_FAILED_LOADS:
            return True
        answer = self.client.lookup(req_id, groups)
        if answer.timed_out and state.timed_out < MOST_TIMED_OUT:
            state.timed_out += 1
            return False
        found = LookupResult.HIT_PENDING if answer.pending else LookupResult.HIT
        if answer.pending:
            self.waiting[req_id] = computed
        for group, part in zip(groups, answer.groups, strict=True):
            for key in group.keys[part.first : part.first + part.count]:
                results[OffloadKey(key)] = found
        if self.client.attached is None:
            self.figures.without_broker += 1
        return True

    @or_else(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """What the last question said of this key; what was not asked is a MISS."""
        state = self._requests.get(req_context.req_id)
        if state is None or state.asked is None:
            return LookupResult.MISS
        return state.asked.results.get(key, LookupResult.MISS)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """All that is loaded is loaded from the host's memory."""
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Rows to load from, by holds that the lookup took. If one of them is gone meanwhile (the
        broker died, say) the worker finds that out and vLLM computes those tokens."""
        wanted = list(keys)
        try:
            refs = self._take(wanted, req_context.req_id)
        except Exception:  # noqa: BLE001  as above; vLLM can take no refusal here
            self.faulted("prepare_load")
            refs = None
        if refs is None:
            self.figures.loads_lost += 1
            refs = np.zeros(len(wanted), dtype=wire.ROW_REF)
            refs["row"] = NOWHERE
        return RowsLoadStoreSpec(refs)

    def _take(self, keys: list[OffloadKey], req_id: str) -> Refs | None:
        state = self._state(req_id)
        state.asked = None
        refs = None if self.client is None else self.client.prepare_load(req_id, keys)
        if refs is not None:
            state.loading.update(zip(keys, row_keys(refs), strict=True))
        return refs

    @or_else(lambda: None)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Workers are done. What did not verify is forgotten by the broker before vLLM asks again,
        so that nobody loads it for ever."""
        state = self._requests.get(req_context.req_id)
        if state is None:
            return
        good, bad = self._sort_out(state.loading, keys)
        self.figures.loads_failed += len(bad)
        if self.client is not None and (good or bad):
            self.client.complete_load(req_context.req_id, [*good, *bad], failed=bad)
        self._forget_if_done(req_context.req_id, state)

    def note_failed(self, rows: Iterable[RowKey], req_ids: Iterable[str]) -> None:
        """Workers could not copy these rows (of loads or of stores), and so not load these
        requests, which vLLM looks up again."""
        self._failed.update(rows)
        for req_id in req_ids:
            self._state(req_id).failed_loads += 1

    def _sort_out(
        self, running: dict[OffloadKey, RowKey], keys: Collection[OffloadKey]
    ) -> tuple[list[OffloadKey], list[OffloadKey]]:
        good, bad = [], []
        for key in keys:
            row = running.pop(key, None)
            if row is None:
                continue
            if row in self._failed:
                self._failed.discard(row)
                bad.append(key)
            else:
                good.append(key)
        return good, bad

    # ---- store -------------------------------------------------------------------------------

    @or_else(lambda: None)
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Rows for what is absent and fits: a part of the offer, in its order. None asks vLLM to
        offer again, at most 8 times per request; an empty answer ends the matter."""
        state = self._state(req_context.req_id)
        offered = list(keys)
        positions = [req_context.get_offload_key_position(key) or 0 for key in offered]
        if state.hole is not None:
            before = [index for index, at in enumerate(positions) if at < state.hole]
            self.figures.holes += len(offered) - len(before)
            offered = [offered[index] for index in before]
            positions = [positions[index] for index in before]
        if not offered:
            return _nothing()
        client = self.client
        if client is None or client.attached is None or not state.is_cached:
            state.hole = min(positions)
            return _nothing()
        now = self._clock()
        if now - state.refused_at < REFUSED_AGAIN_S:
            return self._refuse(state)
        offer = client.prepare_store(req_context.req_id, offered, positions)
        if offer.timed_out:
            return self._refuse(state)
        known = len(offer.accepted) + len(offer.present) + len(offer.writing)
        if offer.declined or (known < len(offered) and not offer.accepted):
            state.refused_at = now
            return self._refuse(state)
        if known < len(offered):
            settled = {*offer.accepted, *offer.present, *offer.writing}
            state.hole = min(at for i, at in enumerate(positions) if i not in settled)
            self.figures.holes += len(offered) - known
        accepted = [offered[index] for index in offer.accepted]
        state.storing.update(zip(accepted, row_keys(offer.refs), strict=True))
        return PrepareStoreOutput(accepted, RowsLoadStoreSpec(offer.refs), [])

    def _refuse(self, state: Request) -> PrepareStoreOutput | None:
        self.figures.refusals += 1
        state.refusals += 1
        return None if state.refusals <= MOST_REFUSALS else _nothing()

    @or_else(lambda: None)
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Workers are done. What they could not write is never called stored."""
        state = self._requests.get(req_context.req_id)
        if state is None:
            return
        good, bad = self._sort_out(state.storing, keys)
        self.figures.stores_failed += len(bad)
        if self.client is not None:
            if good:
                self.client.complete_store(req_context.req_id, good, success)
            if bad:
                self.client.complete_store(req_context.req_id, bad, False)
        self._forget_if_done(req_context.req_id, state)

    # ---- the rest ----------------------------------------------------------------------------

    @or_else(lambda: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count chunks as used now."""
        if self.client is not None and keys:
            self.client.touch(req_context.req_id, list(keys))

    @or_else(lambda: None)
    def step(self) -> None:
        """Once per engine step, last: hear what the broker says, send what is to be said."""
        if self.client is None:
            return
        self.client.step()
        if self.waiting and (
            self.client.heard != self._heard or self._clock() >= self._look_again_at
        ):
            self._heard = self.client.heard
            self._look_again_at = self._clock() + LOOK_AGAIN_S
            for req_id in [r for r in self.waiting if not self.client.is_pending(r)]:
                del self.waiting[req_id]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Who was preempted starts over; the rest of the step's end is `step`."""
        self.preempted(context.preempted_req_ids)

    def has_pending_work(self) -> bool:
        """Never: an idle engine must not spin for work that is others'."""
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks that became readable or are gone, where vLLM publishes events."""
        if self.client is None or not self._events:
            return ()
        return [
            OffloadingEvent(
                keys=[OffloadKey(key) for key in event.keys],
                medium=Medium(event.medium),
                removed=event.removed,
            )
            for event in self.client.take_events()
        ]

    @or_else(lambda: None)
    def reset_cache(self) -> None:
        """Every chunk of this engine is stale. It shares with nobody until it is started anew or
        its namespace is moved to a version (`kvquay reset`)."""
        for state in self._requests.values():
            state.asked, state.hole = None, None
            state.loading.clear()
            state.storing.clear()
        for req_id in [name for name, state in self._requests.items() if state.finished]:
            del self._requests[req_id]
        self._failed.clear()
        self.waiting.clear()
        if self.client is not None:
            self.client.reset()

    def get_stats(self) -> Any:
        """Figures since the last call; None if there is nothing new."""
        if self.client is not None:
            timeouts = self.client.calls.timeouts
            self.figures.calls_timed_out += timeouts - self._timeouts_told
            self._timeouts_told = timeouts
        return self.figures.take()

    def shutdown(self) -> None:
        """The session ends."""
        self._adapters.close()
        if self.client is not None:
            self.client.close()


def _nothing() -> PrepareStoreOutput:
    return PrepareStoreOutput([], RowsLoadStoreSpec(NO_REFS), [])
