"""What many engines on one pool share: room, deadlines, waiters, and events by who stored.

One `Sessions` per manager. A `Session` (see `tiers.session`) is one engine's view; this module
holds what goes beyond one engine and the conservation laws over all of them. `now` is given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tiers.base import LookupResult, Medium, OffloadingEvent, OffloadKey
from tiers.ledger import each_attempt
from tiers.slots import Rows, SlotState

if TYPE_CHECKING:
    from tiers.manager import TieringOffloadingManager
    from tiers.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Largest parts of a pool that may be busy (held, reserved or quarantined) at once.

    `total` by all owners, within it `tiers` by jobs of tiers and `peers` by other hosts. Of N
    sessions each is sure of min(`sure`, `sure` / N) and may borrow what the sum leaves.
    """

    total: float = 0.75
    tiers: float = 0.15
    peers: float = 0.10
    sure: float = 0.5


UNLIMITED = Shares(total=1.0, tiers=1.0, peers=1.0, sure=0.0)
"""First come, first served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds after which a wait ends as a MISS: on a store or promotion, on a tier that does not
    know yet, and all waits of one request together."""

    pending_s: float = 2.0
    retry_s: float = 0.5
    request_s: float = 3.0


class Sessions:
    """All sessions of one pool. Guarded by the manager's lock."""

    def __init__(
        self,
        manager: TieringOffloadingManager,
        *,
        shares: Shares = UNLIMITED,
        deadlines: Deadlines = Deadlines(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        self.rows = manager.primary_tier.rows
        self.shares = shares
        self.deadlines = deadlines
        self.clock = clock
        self.views: dict[str, Session] = {}
        self.deadline: NDArray[np.float64] = np.full(self.rows.num_rows, np.inf)
        """When a reserved row is overdue: lookups then answer MISS until it is done."""
        self._stored_by: NDArray[np.int32] = np.full(self.rows.num_rows, -1, dtype=np.int32)
        self._numbers: dict[int, Session] = {}
        self._next_number = 0
        self._waiters: dict[OffloadKey, set[tuple[Session, str]]] = {}
        self.waiting: set[tuple[Session, str]] = set()
        """Requests with something to wait for."""
        self.noticed: set[Session] = set()
        """Sessions that have notices to take."""
        self.has_events = False
        """Whether a session has events to take."""
        self.refused = 0
        """Completions and releases of things not owned: old attempts, doubles, foreign rows."""
        self._inner_event = self.rows.on_event
        self.rows.on_event = self._on_event
        self.rows.on_resolved = self._on_resolved
        manager.transfers.may_take = self._tiers_may_take

    def open(self, session_id: str) -> Session:
        """The view of this id, new or known."""
        from tiers.session import Session

        view = self.views.get(session_id)
        if view is None:
            number, self._next_number = self._next_number, self._next_number + 1
            view = self.views[session_id] = Session(self, session_id, number)
            self._numbers[number] = view
        return view

    def refuse_reset(self) -> None:
        """RuntimeError while sessions are open."""
        if self.views:
            raise RuntimeError(
                f"sessions {', '.join(sorted(self.views))} are open; reset or close each"
            )

    def drop(self, view: Session) -> None:
        """The session has ended and owns nothing."""
        self.noticed.discard(view)
        del self.views[view.session_id]
        del self._numbers[view.number]

    # ---- room --------------------------------------------------------------------------------

    def room_for_all(self) -> int:
        """Rows that any session may make busy, however many it has: at most `room_for`, and known
        without asking every session."""
        total, shares = self.rows.num_rows, self.shares
        return int(total * shares.total) - math.ceil(total * shares.sure) - self.rows.num_busy

    def room_for(self, view: Session) -> int:
        """Rows that a session may make busy beyond those that are busy now, for anyone."""
        total, busy = self.rows.num_rows, self.rows.num_busy
        room = int(total * self.shares.total) - busy - self._kept_for(view)
        return max(room, 0, min(self._sure() - view.rows.distinct, total - busy))

    def _sure(self) -> int:
        return int(self.rows.num_rows * self.shares.sure / max(1, len(self.views)))

    def _kept_for(self, but: Session | None) -> int:
        """Rows that sessions, but for one, are sure of and do not use yet."""
        sure = self._sure()
        views = self.views.values()
        return sum(max(0, sure - view.rows.distinct) for view in views if view is not but)

    def _tiers_may_take(self, rows: int, idle: int) -> bool:
        """Whether jobs of tiers may take `rows` more, of which `idle` are not busy yet: within the
        share of tiers, and within the sum together with what sessions are sure of."""
        total, shares = self.rows.num_rows, self.shares
        jobs = self.manager.transfers.jobs.values()
        taken = sum(len(job.transfer_job.chunk_ids) for job in jobs)
        taken += sum(len(p.chunk_ids) for p in self.manager.transfers.pending.values())
        if taken + rows > int(total * shares.tiers):
            return False
        kept = min(self._kept_for(None), int(total * max(0.0, shares.total - shares.tiers)))
        return self.rows.num_busy + idle + kept <= int(total * shares.total)

    # ---- reservations, waiters, notices ------------------------------------------------------

    def reserved(self, rows: Rows, deadline: float, view: Session | None) -> None:
        """Rows were given out: until when their readers wait, and who stores."""
        self.deadline[rows] = deadline
        self._stored_by[rows] = -1 if view is None else view.number

    def wait(self, key: OffloadKey, view: Session, request: str) -> None:
        """The request is to be told when `key` is resolved."""
        self._waiters.setdefault(key, set()).add((view, request))

    def unwait(self, keys: Iterable[OffloadKey], view: Session, request: str) -> None:
        """The request does not wait for these keys any more."""
        for key in keys:
            waiting = self._waiters.get(key)
            if waiting is not None:
                waiting.discard((view, request))
                if not waiting:
                    del self._waiters[key]

    def _on_resolved(self, keys: Sequence[OffloadKey]) -> None:
        if not self._waiters:
            return
        for key in keys:
            for view, request in self._waiters.pop(key, ()):
                view.resolve(request, key)

    def tick(self) -> None:
        """End waits whose time is up and ask tiers again that did not know. Cheap when idle."""
        now = self.clock()
        for view, request in list(self.waiting):
            if (view, request) in self.waiting:
                view.tick(request, now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to end at the earliest; None if nobody waits."""
        ends = (view.requests[request].waits.values() for view, request in self.waiting)
        return min((min(times) for times in ends), default=None)

    def has_retries(self) -> bool:
        """Whether a request waits for a tier that does not know yet."""
        return any(view.requests[request].retries for view, request in self.waiting)

    def ask_tiers(self, key: OffloadKey, view: Session, request: str) -> LookupResult:
        """Look the chunk up again for a waiting request, in memory and in the tiers. The step gate
        is the default session's, and stays as it was."""
        ctx = view.requests[request].ctx
        gate = self.manager._processed_jobs_this_step
        result = self.manager.lookup(key, ctx)
        self.manager._processed_jobs_this_step = gate
        if result is LookupResult.HIT_PENDING:
            row = self.rows.find([key])
            if np.isinf(self.deadline[row[0]]):
                self.reserved(row, self.clock() + self.deadlines.pending_s, None)
        return result

    # ---- events ------------------------------------------------------------------------------

    def _on_event(
        self, keys: Sequence[OffloadKey], rows: Rows | list[int], removed: bool, meta: bool
    ) -> None:
        self._inner_event(keys, rows, removed, meta)
        index = np.asarray(rows)
        if removed or meta:
            self.deadline[index] = np.inf
        if meta or not self._numbers:
            return
        owners = self._stored_by[index]
        for number in np.unique(owners).tolist():
            view = self._numbers.get(number)
            if view is not None and view.events is not None:
                mine = np.flatnonzero(owners == number).tolist()
                self.has_events = True
                view.events.append(
                    OffloadingEvent([keys[i] for i in mine], Medium.CPU, removed=removed)
                )
        if not removed:
            self.deadline[index] = np.inf

    # ---- laws --------------------------------------------------------------------------------

    def check(self, *, keys: bool = True) -> None:
        """V1, V2 and owners; nothing may be claimed by the default session. AssertionError.

        `keys`: also that every key leads to its row, which takes a second per million rows.
        """
        self.rows.check(keys=keys)
        readers = np.zeros(self.rows.num_rows, dtype=np.int64)
        writers = np.zeros(self.rows.num_rows, dtype=np.int64)
        for view in self.views.values():
            own = np.zeros(self.rows.num_rows, dtype=np.int64)
            for claims in [*each_attempt(view.requests), *view.lost]:
                np.add.at(readers, claims.held, 1)
                np.add.at(readers, claims.loading, 1)
                np.add.at(writers, claims.storing, 1)
                for part in (claims.held, claims.loading, claims.storing):
                    np.add.at(own, part, 1)
            if not np.array_equal(own, view.rows.counts()):
                raise AssertionError(f"session {view.session_id}: claims by row do not add up")
            if int(np.count_nonzero(own)) != view.rows.distinct:
                raise AssertionError(
                    f"session {view.session_id}: {view.rows.distinct} rows, not "
                    f"{int(np.count_nonzero(own))}"
                )
        transfers = self.manager.transfers
        for metadata in transfers.jobs.values():
            target = writers if metadata.transfer_job.is_promotion else readers
            np.add.at(target, metadata.transfer_job.chunk_ids, 1)
        for pending in transfers.pending.values():
            np.add.at(writers, pending.chunk_ids, 1)
        slots = self.rows.slots
        ready, reserved = slots.in_state(SlotState.READY), slots.in_state(SlotState.RESERVED)
        quarantined = slots.in_state(SlotState.QUARANTINED)
        should_read = np.where(ready, slots.ref_cnt, 0)
        should_claim = np.where(quarantined, self.rows.quarantine_claims(), 0)
        wrong = np.where(
            quarantined,
            readers + writers != should_claim,
            (readers != should_read) | (writers != reserved),
        )
        for row in np.flatnonzero(wrong).tolist():
            raise AssertionError(
                f"row {row} is {slots.state(row).name} with count {int(slots.ref_cnt[row])}, but "
                f"{int(readers[row])} readers and {int(writers[row])} writers claim it"
            )
