"""The asking half of a session: requests and their attempts, lookups that hold, waits and notices.

Loads, stores and the end of a session are in `tiers.session`; room, deadlines and waiters across
sessions in `tiers.sessions`. Knows no socket and no process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tiers.base import LookupResult, OffloadingEvent, OffloadKey, ReqContext
from tiers.ledger import NO_ROWS, AttemptClaims, RequestClaims, RowArray, SessionRows, once, without

if TYPE_CHECKING:
    from tiers.session import Session
    from tiers.sessions import Sessions

MISS, PENDING, RETRY = -1, -2, -3
"""Answers of lookup_many that are not rows."""


class SessionLookups:
    """See the module. Guarded by the manager's lock."""

    def __init__(self, hub: Sessions, session_id: str, number: int) -> None:
        self.hub = hub
        self.session_id = session_id
        self.number = number
        self.manager = hub.manager
        self._pool = hub.rows
        self.rows = SessionRows(hub.rows.num_rows)
        self.requests: dict[str, RequestClaims] = {}
        self.lost: list[AttemptClaims] = []
        """Claims without a live owner, kept until nobody can touch their rows."""
        self.notices: dict[tuple[str, int], dict[OffloadKey, int]] = {}
        """Per (request, attempt): current answer for keys that were waited for."""
        self.events: list[OffloadingEvent] | None = None
        """Events of chunks that this session stored; None: not wanted."""

    def _view(self) -> Session:
        raise NotImplementedError

    # ---- requests ----------------------------------------------------------------------------

    def begin(self, request: str, ctx: ReqContext | None = None, attempt: int = 1) -> RequestClaims:
        """A request begins. One of the same id is cancelled first; what it still moves ends by its
        completion, under the attempt that began it.

        `ctx` is what tiers see; its req_id is replaced by one that is unique across sessions.
        """
        old = self.requests.get(request)
        if old is not None:
            self.cancel(request, old.attempt)
            self.finish(request)
        ctx = ReqContext("") if ctx is None else ctx
        ctx.req_id = f"{self.session_id}/{request}"
        claims = RequestClaims(request, ctx, attempt, self.hub.deadlines.request_s)
        if old is not None:
            claims.attempts = old.attempts  # what still moves ends by its own completion
        self.requests[request] = claims
        self.manager.on_new_request(ctx)
        moving = sum(len(owned.storing) for owned in claims.attempts.values())
        if moving:  # their completions are counted against this request, whose name they have
            self.manager.count_pending_store(ctx, moving)
        return claims

    def _of(self, request: str, attempt: int) -> RequestClaims | None:
        """The live request at this attempt, or None if the attempt is over."""
        claims = self.requests.get(request)
        if claims is None or claims.finished:
            return None
        if attempt > claims.attempt:
            self.cancel(request, attempt - 1)
        return claims if attempt == claims.attempt else None

    def finish(self, request: str) -> None:
        """No new call will come: waits and unused holds end, transfers end by their completion."""
        claims = self.requests.get(request)
        if claims is None or claims.finished:
            return
        claims.finished = True
        self._drop_waits(claims)
        for held in claims.attempts.values():
            self._release_held(held)
        self.manager.on_request_finished(claims.ctx)
        self._forget_if_done(claims)

    def cancel(self, request: str, attempt: int) -> None:
        """Attempts up to `attempt` are over. Unused holds end at once; rows that a worker may be
        touching stay apart until its completion comes, and what it stores is never readable."""
        claims = self.requests.get(request)
        if claims is None or attempt < 0:
            return
        if attempt >= claims.attempt:
            self._drop_waits(claims)
            claims.seen.clear()
            claims.attempt = attempt + 1
        for number, owned in claims.attempts.items():
            if number <= attempt:
                self._release_held(owned)
                live = owned.storing[self._pool.slots.is_resident(owned.storing)]
                self._pool.forget(live)
        self._forget_if_done(claims)

    def _forget_if_done(self, claims: RequestClaims) -> None:
        if claims.prune() and claims.finished:
            self.requests.pop(claims.request, None)

    def _release_held(self, owned: AttemptClaims) -> None:
        if len(owned.held):
            self.rows.unclaim(owned.held)
            self._pool.unhold(owned.held)
            owned.held = NO_ROWS

    def release(self, request: str, attempt: int) -> None:
        """The attempt's unused holds and waits end; it may look up again."""
        claims = self.requests.get(request)
        if claims is None or claims.attempt != attempt:
            return
        self._drop_waits(claims)
        owned = claims.attempts.get(attempt)
        if owned is not None:
            self._release_held(owned)
        claims.seen.clear()
        self._forget_if_done(claims)

    # ---- lookup ------------------------------------------------------------------------------

    def lookup_many(
        self,
        keys: Sequence[OffloadKey],
        request: str,
        attempt: int,
        positions: NDArray[np.integer[Any]] | None = None,
    ) -> RowArray:
        """Answers for `keys` in order, as far as the first MISS, which is the last.

        int32, shape (n,): a row, which is held from now on, or PENDING or RETRY, of which the
        request will be told (see `notices`), or MISS. Promotions that start are submitted.
        """
        self._collect()
        claims = self._of(request, attempt)
        if claims is None:
            return np.full(1, MISS, dtype=np.int32)
        answers = self._scan(keys, claims, positions)
        if positions is not None:
            claims.note_seen(answers, positions)
        self._submit(claims)
        return answers

    def lookup_window(
        self,
        keys: Sequence[OffloadKey],
        request: str,
        attempt: int,
        window: int,
        first_window: int,
        positions: NDArray[np.integer[Any]] | None = None,
    ) -> tuple[int, RowArray]:
        """Search from the end for the last run of `window` chunks that are there.

        A run of `first_window` suffices if it reaches the first key. Returns (index of the first
        answer, answers from there on to the end of the run); other keys take no hold.
        """
        self._collect()
        claims = self._of(request, attempt)
        if claims is None:
            return 0, np.full(1, MISS, dtype=np.int32)
        before = claims.current().held
        found: list[int] = []  # answers of the run, last key first
        end = len(keys)
        for index in range(len(keys) - 1, -1, -1):
            where = None if positions is None else positions[index : index + 1]
            answer = int(self._scan([keys[index]], claims, where)[0])
            if answer == MISS:
                self._unhold_rows(claims, found, before)
                found, end = [], index
                continue
            found.append(answer)
            if len(found) >= (window if index else min(window, first_window)):
                break
        else:
            if len(found) < first_window:
                self._unhold_rows(claims, found, before)
                found, end = [], 0
        start = end - len(found)
        answers = np.array(found[::-1] or [MISS], dtype=np.int32)
        if positions is not None and found:
            claims.note_seen(answers, positions[start:end])
        self._submit(claims)
        return start, answers

    def _collect(self) -> None:
        if self.manager.transfers.jobs:  # else no tier has anything to report
            self.manager._process_finished_jobs()

    def _unhold_rows(self, claims: RequestClaims, found: list[int], before: RowArray) -> None:
        """End the holds on `found` rows, but for those that the attempt had `before`."""
        rows = np.array([row for row in found if row >= 0], dtype=np.int32)
        gone = without(np.unique(rows), before)
        owned = claims.current()
        owned.held = without(owned.held, gone)
        self.rows.unclaim(gone)
        self._pool.unhold(gone)

    def _scan(
        self,
        keys: Sequence[OffloadKey],
        claims: RequestClaims,
        positions: NDArray[np.integer[Any]] | None,
    ) -> RowArray:
        parts: list[RowArray] = []
        done = 0
        while done < len(keys):
            start = time.perf_counter()
            rest = keys[done:] if done else keys
            rows = self._pool.find(rest)
            known = len(rows)
            if known and rows.min() < 0:
                known = int((rows < 0).argmax())
            answers = self._take(rest, rows[:known], claims)
            took = time.perf_counter() - start
            hits = int(np.count_nonzero(answers >= 0))  # what is pending counts once it is known
            reached = len(answers) == known < len(rest)
            metrics = self.manager._metrics
            label = metrics.primary_tier_label
            metrics.on_lookup_batch(claims.ctx, label, hits + reached, hits, took)
            parts.append(answers)
            at = done
            done += len(answers)
            if len(answers) and answers[-1] == MISS:
                break
            if positions is not None:  # of what is not a row yet, nothing else remembers it
                for index in np.flatnonzero(answers < 0).tolist():
                    claims.ctx.set_offload_key_position(rest[index], int(positions[at + index]))
            if done < len(keys):
                if positions is not None:
                    claims.ctx.set_offload_key_position(keys[done], int(positions[done]))
                answer = self._ask_tiers(keys[done], claims)
                parts.append(np.array([answer], dtype=np.int32))
                done += 1
                if answer == MISS:
                    break
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [NO_ROWS])

    def _take(self, keys: Sequence[OffloadKey], rows: RowArray, claims: RequestClaims) -> RowArray:
        """Hold what is ready of these resident rows; the answers may end early with a MISS."""
        readers = self._pool.slots.ref_cnt[rows]
        if len(rows) and readers.min() < 0:
            return self._take_mixed(keys, rows, claims)
        owned = claims.current()
        new = rows
        if len(owned.held) or len(set(keys[: len(rows)])) != len(rows):
            new = without(once(rows), owned.held)
            readers = self._pool.slots.ref_cnt[new]
        cut = len(rows)
        wanted = len(readers) - int(np.count_nonzero(readers))
        if wanted > self.hub.room_for_all() and wanted > (room := self.hub.room_for(self._view())):
            idle = new[readers == 0]
            refused = without(idle, idle[:room])
            cut = int(np.isin(rows, refused).argmax())
            new = without(once(rows[:cut]), owned.held)
            readers = self._pool.slots.ref_cnt[new]
        if len(new):
            self._pool.hold(new, readers)
            self.rows.claim(new)
            owned.held = np.concatenate((owned.held, new)) if len(owned.held) else new
        if cut < len(rows):
            return np.append(rows[:cut], np.int32(MISS))
        return rows

    def _take_mixed(
        self, keys: Sequence[OffloadKey], rows: RowArray, claims: RequestClaims
    ) -> RowArray:
        """As `_take` where some rows are not ready: the slow path, one key at a time."""
        now = self.hub.clock()
        answers: list[int] = []
        for key, row in zip(keys, rows.tolist(), strict=False):
            if self._pool.slots.ref_cnt[row] >= 0:
                one = self._take([key], np.array([row], dtype=np.int32), claims)
                answers.append(int(one[0]))
            else:
                answers.append(self._wait(key, claims, now, float(self.hub.deadline[row])))
            if answers[-1] == MISS:
                break
        return np.array(answers, dtype=np.int32)

    def _wait(
        self,
        key: OffloadKey,
        claims: RequestClaims,
        now: float,
        deadline: float,
        code: int = PENDING,
    ) -> int:
        """Make the request a waiter for `key`; MISS if its time, or the slot's, is up."""
        if claims.waiting_since is None:
            patience = claims.wait_left_s
        else:
            patience = claims.wait_left_s - (now - claims.waiting_since)
        if deadline <= now or patience <= 0:
            return MISS
        if claims.waiting_since is None:
            claims.waiting_since = now
            self.hub.waiting.add((self._view(), claims.request))
        if key not in claims.waits:
            claims.waits[key] = min(deadline, now + patience)
            self.hub.wait(key, self._view(), claims.request)
        return code

    def _ask_tiers(self, key: OffloadKey, claims: RequestClaims) -> int:
        now = self.hub.clock()
        result = self.manager._lookup_tiers(key, claims.ctx, None)
        if result is LookupResult.MISS:
            return MISS
        if result is LookupResult.RETRY:
            deadline = claims.waits.get(key, now + self.hub.deadlines.retry_s)
            answer = self._wait(key, claims, now, deadline, RETRY)
            if answer == RETRY:
                claims.retries.add(key)
            return answer
        deadline = now + self.hub.deadlines.pending_s
        self.hub.reserved(self._pool.find([key]), deadline, None)
        return self._wait(key, claims, now, deadline)

    def _submit(self, claims: RequestClaims) -> None:
        if self.manager.transfers.pending:
            self.manager.transfers.submit_promotions(claims.ctx.req_id)

    # ---- waits -------------------------------------------------------------------------------

    def resolve(self, request: str, key: OffloadKey) -> None:
        """A reservation has ended: hold the chunk if it is there, then tell the request."""
        claims = self.requests.get(request)
        if claims is None or key not in claims.waits:
            return
        self._end_wait(claims, key)
        rows = self._pool.find([key])
        answer = int(self._take([key], rows, claims)[0]) if rows[0] >= 0 else MISS
        self._tell(claims, key, answer)

    def _tell(self, claims: RequestClaims, key: OffloadKey, answer: int) -> None:
        self.notices.setdefault((claims.request, claims.attempt), {})[key] = answer
        self.hub.noticed.add(self._view())

    def _end_wait(self, claims: RequestClaims, key: OffloadKey) -> None:
        claims.waits.pop(key, None)
        claims.retries.discard(key)
        if not claims.waits and claims.waiting_since is not None:
            claims.wait_left_s -= self.hub.clock() - claims.waiting_since
            claims.waiting_since = None
            self.hub.waiting.discard((self._view(), claims.request))

    def _drop_waits(self, claims: RequestClaims) -> None:
        keys = list(claims.waits)
        self.hub.unwait(keys, self._view(), claims.request)
        for key in keys:
            self._end_wait(claims, key)
        self.notices.pop((claims.request, claims.attempt), None)

    def tick(self, request: str, now: float) -> None:
        """End the request's waits whose time is up; ask again where a tier did not know."""
        claims = self.requests[request]
        for key in [key for key, end in claims.waits.items() if end <= now]:
            self.hub.unwait([key], self._view(), request)
            self._end_wait(claims, key)
            self._tell(claims, key, MISS)
        for key in list(claims.retries):
            self._retry(claims, key)

    def _retry(self, claims: RequestClaims, key: OffloadKey) -> None:
        result = self.hub.ask_tiers(key, self._view(), claims.request)
        if result is LookupResult.RETRY:
            return
        claims.retries.discard(key)
        if result is LookupResult.HIT_PENDING:
            self._wait_for_row(key, claims)
            self._submit(claims)
            return
        self.hub.unwait([key], self._view(), claims.request)
        self.resolve(claims.request, key)

    def _wait_for_row(self, key: OffloadKey, claims: RequestClaims) -> None:
        """What a tier did not know is being written now: the wait is as long as for any such."""
        if key in claims.waits and claims.waiting_since is not None:
            end = claims.waiting_since + claims.wait_left_s
            claims.waits[key] = min(end, float(self.hub.deadline[self._pool.find([key])[0]]))

    def take_notices(self) -> dict[tuple[str, int], dict[OffloadKey, int]]:
        """Answers since the last call, by (request, attempt), for keys that were waited for."""
        notices, self.notices = self.notices, {}
        return notices
