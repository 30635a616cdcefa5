"""One engine's view of a shared manager: a HIT is a hold, and everything has one owner.

Covers loads, stores, invalidation and the end of a session, and the public contract
(`OffloadingManager`) on top of them; asking and waiting are in `tiers.session_lookup`. Row numbers
given out here are what the engine's workers use. Knows no socket and no process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiers.base import (
    CacheHitSource,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from tiers.ledger import NO_ROWS, RequestClaims, RowArray, without
from tiers.primary import CPULoadStoreSpec
from tiers.session_lookup import MISS, PENDING, RETRY, SessionLookups

__all__ = ["MISS", "PENDING", "RETRY", "Session", "StoreAnswer"]

_RESULTS = {
    MISS: LookupResult.MISS,
    PENDING: LookupResult.HIT_PENDING,
    RETRY: LookupResult.RETRY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    """Answer to an offer of keys; all are indexes into the offer, ascending, but `rows`.

    `accepted` keys got `rows` (parallel). `present` are readable, `writing` are being written by
    somebody. The rest found no room.
    """

    accepted: list[int]
    rows: RowArray
    present: list[int]
    writing: list[int]


class Session(SessionLookups, OffloadingManager):
    """See the module. Guarded by the manager's lock."""

    def _view(self) -> Session:
        return self

    # ---- loads -------------------------------------------------------------------------------

    def take(self, request: str, attempt: int, rows: RowArray, *, more: bool = False) -> RowArray:
        """A worker will read these held rows; every other hold of the attempt ends, unless `more`
        are to be taken.

        Returns the rows that are not held by this attempt: refused and counted.
        """
        claims = self.requests.get(request)
        owned = None if claims is None else claims.attempts.get(attempt)
        if claims is None or owned is None:
            self.hub.refused += len(rows)
            return rows
        rows = np.unique(rows).astype(np.int32)
        mine = np.isin(rows, owned.held)
        taken = rows[mine]
        self._note_use(claims, taken)
        owned.held = without(owned.held, taken)
        again = np.isin(taken, owned.loading)  # the claim that the worker has already is enough
        surplus = taken[again]
        self.rows.unclaim(surplus)
        self._pool.unhold(surplus)
        owned.loading = np.concatenate((owned.loading, taken[~again]))
        if not more:
            self._release_held(owned)
            claims.seen.clear()
        self.hub.refused += len(rows) - len(taken)
        return rows[~mine]

    def _note_use(self, claims: RequestClaims, rows: RowArray) -> None:
        """Recency: the request uses these rows, at the positions it looked them up with."""
        if claims.finished or not len(rows):
            return
        keys = self._pool.keys_of(rows)
        where: dict[int, int] = {}
        for seen, positions in claims.seen:
            where.update(zip(seen.tolist(), positions.tolist(), strict=False))
        for key, row in zip(keys, rows.tolist(), strict=True):
            position = where.get(row)
            if position is not None:
                claims.ctx.set_offload_key_position(key, position)
        resident = [key is not None for key in keys]
        self._pool.access([k for k in keys if k is not None], rows[resident], claims.ctx)

    def complete_rows(
        self, request: str, attempt: int, rows: RowArray, failed: RowArray = NO_ROWS
    ) -> RowArray:
        """A worker has read these rows; `failed` ones did not verify and are forgotten, so that
        no lookup finds them again. Returns rows that it was not reading: refused and counted."""
        claims = self.requests.get(request)
        owned = None if claims is None else claims.attempts.get(attempt)
        every = np.unique(np.concatenate((rows, failed))).astype(np.int32)
        if claims is None or owned is None:
            self.hub.refused += len(every)
            return every
        mine = np.isin(every, owned.loading)
        ended = every[mine]
        bad = ended[np.isin(ended, failed) & self._pool.slots.is_resident(ended)]
        self._pool.forget(bad)
        owned.loading = without(owned.loading, ended)
        self.rows.unclaim(ended)
        self._pool.unhold(ended)
        self.hub.refused += len(every) - len(ended)
        self._forget_if_done(claims)
        return every[~mine]

    # ---- stores ------------------------------------------------------------------------------

    def offer(
        self,
        keys: Sequence[OffloadKey],
        request: str,
        attempt: int,
        positions: NDArray[np.integer[Any]] | None = None,
    ) -> StoreAnswer | None:
        """Reserve rows for the keys that are absent, as many as there is room for.

        What fits in part is a head of the offer: all its keys up to one token position. None if
        the attempt is over.
        """
        claims = self._of(request, attempt)
        if claims is None:
            return None
        self.manager._process_finished_jobs()
        first: dict[OffloadKey, int] = {}
        for index, key in enumerate(keys):
            first.setdefault(key, index)
        if positions is not None:
            for key, index in first.items():
                claims.ctx.set_offload_key_position(key, int(positions[index]))
        rows = self._pool.find(keys)
        absent = [index for index in first.values() if rows[index] < 0]
        fitting = self._fitting(absent, positions, {k for k in first if rows[first[k]] >= 0})
        there = [index for index in first.values() if rows[index] >= 0]
        chosen = sorted(fitting + there)
        output = self.manager.primary_tier.prepare_store([keys[i] for i in chosen], claims.ctx)
        if output is None:  # the policy could not evict what was counted as evictable
            fitting, new_rows = [], NO_ROWS
        else:
            spec = output.store_spec
            assert isinstance(spec, CPULoadStoreSpec)
            new_rows = spec.chunk_ids
            fitting = [first[key] for key in output.keys_to_store]
        if len(new_rows):
            self._own_store(claims, new_rows)
        ready = self._pool.slots.ref_cnt
        return StoreAnswer(
            accepted=fitting,
            rows=new_rows,
            present=[index for index in there if ready[rows[index]] >= 0],
            writing=[index for index in there if ready[rows[index]] < 0],
        )

    def _own_store(self, claims: RequestClaims, rows: RowArray) -> None:
        owned = claims.current()
        owned.storing = np.concatenate((owned.storing, rows))
        self.rows.claim(rows)
        self.hub.reserved(rows, self.hub.clock() + self.hub.deadlines.pending_s, self)
        self.manager.count_pending_store(claims.ctx, len(rows))

    def _fitting(
        self,
        absent: list[int],
        positions: NDArray[np.integer[Any]] | None,
        offered: set[OffloadKey],
    ) -> list[int]:
        """The head of the absent keys that there is room for, whole token positions only."""
        protected = sum(
            1 for row in self._pool.find(list(offered)) if self._pool.slots.ref_cnt[row] == 0
        )
        space = self._pool.slots.num_free + self._pool.num_evictable - protected
        fits = max(0, min(len(absent), space, self.hub.room_for(self)))
        if positions is None or fits == len(absent):
            return absent[:fits]
        order = sorted(absent, key=lambda index: int(positions[index]))
        if fits:
            limit = int(positions[order[fits]])
            order = [index for index in order[:fits] if int(positions[index]) < limit]
        return sorted(order[:fits])

    def complete_offer(self, request: str, attempt: int, rows: RowArray, success: bool) -> RowArray:
        """A worker has written these rows, or failed to. What becomes readable is cascaded.

        Returns rows that it was not writing: refused and counted.
        """
        claims = self.requests.get(request)
        owned = None if claims is None else claims.attempts.get(attempt)
        rows = np.unique(rows).astype(np.int32)
        if claims is None or owned is None:
            self.hub.refused += len(rows)
            return rows
        mine = np.isin(rows, owned.storing)
        ended = rows[mine]
        owned.storing = without(owned.storing, ended)
        self.rows.unclaim(ended)
        live = self._pool.slots.is_resident(ended)
        stored = self._pool.keys_of(ended[live]) if success else []
        self._pool.end_write(ended, success)
        self.hub.refused += len(rows) - len(ended)
        if len(ended):
            self.manager._after_store(stored, claims.ctx, len(ended))
        self._forget_if_done(claims)
        return rows[~mine]

    # ---- invalidation and end ----------------------------------------------------------------

    def orphan(self) -> None:
        """Nobody speaks for the claims of this session any more, but its workers may still touch
        the rows: no request is live, and every claim stays until `settle`."""
        for claims in list(self.requests.values()):
            self._drop_waits(claims)
            if not claims.finished:
                claims.finished = True
                self.manager.on_request_finished(claims.ctx)
            for owned in claims.attempts.values():
                live = owned.storing[self._pool.slots.is_resident(owned.storing)]
                self._pool.forget(live)
                self.manager._after_store([], claims.ctx, len(owned.storing))
                self.lost.append(owned)
        self.requests.clear()
        self.notices.clear()

    def settle(self) -> None:
        """No process of the session can touch orphaned rows any more."""
        for owned in self.lost:
            for rows in (owned.held, owned.loading):
                self.rows.unclaim(rows)
                self._pool.unhold(rows)
            self.rows.unclaim(owned.storing)
            self._pool.end_write(owned.storing, False)
        self.lost.clear()

    def close(self) -> None:
        """The session and all its processes are gone."""
        self.orphan()
        self.settle()
        self.hub.drop(self)

    # ---- the public contract -----------------------------------------------------------------

    @property
    def lock(self) -> Any:
        """The manager's."""
        return self.manager.lock

    def _claims_of(self, ctx: ReqContext) -> RequestClaims:
        claims = self.requests.get(ctx.req_id)
        if claims is None:
            raise KeyError(f"session {self.session_id} has no request {ctx.req_id}")
        return claims

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request begins at attempt 1; `req_context` itself stays the caller's."""
        inner = ReqContext(
            req_context.req_id,
            req_context.kv_transfer_params,
            req_context.kv_hints,
            req_context.load_tier_filter,
        )
        inner._offload_key_positions = req_context._offload_key_positions
        self.begin(req_context.req_id, inner)
        return RequestOffloadingContext(self.manager.request_policy(inner))

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """As lookup_many for one key: a HIT is held."""
        claims = self._claims_of(req_context)
        answer = int(self.lookup_many([key], claims.request, claims.attempt)[0])
        return _RESULTS.get(answer, LookupResult.HIT)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """As the manager's."""
        return self.manager.get_load_source(key, self._claims_of(req_context).ctx)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Hand held chunks to a worker; every other hold of the request ends."""
        claims = self._claims_of(req_context)
        rows = self._pool.find(list(keys))
        refused = self.take(claims.request, claims.attempt, rows)
        if len(refused):
            raise AssertionError(f"{len(refused)} of {len(rows)} chunks to load are not held")
        return CPULoadStoreSpec(rows)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The worker has read the chunks."""
        claims = self._claims_of(req_context)
        self.complete_rows(claims.request, claims.attempt, self._pool.find(list(keys)))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count chunks as used now, in every tier."""
        self.manager.touch(keys, self._claims_of(req_context).ctx)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve rows for what fits; None if nothing does though something is absent."""
        claims = self._claims_of(req_context)
        offered = list(keys)
        answer = self.offer(offered, claims.request, claims.attempt)
        if answer is None:
            return None
        known = len(answer.present) + len(answer.writing)
        if not answer.accepted and known < len(set(offered)):
            return None
        return PrepareStoreOutput(
            [offered[index] for index in answer.accepted], CPULoadStoreSpec(answer.rows), []
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """The worker has written the chunks, or failed to."""
        claims = self._claims_of(req_context)
        rows = self._pool.find(list(keys))
        self.complete_offer(claims.request, claims.attempt, rows[rows >= 0], success)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No new call will come for the request."""
        self.finish(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """The engine's step has ended."""
        self.manager._process_finished_jobs()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events of chunks that this session stored."""
        if not self.events:
            return []
        events, self.events = self.events, []
        return events

    def has_pending_work(self) -> bool:
        """Never: no engine steps for another's work."""
        return False
