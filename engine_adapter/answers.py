"""What a scheduler's client knows of its requests, so that a waiting engine need not ask again.

Covers the answers of one attempt of one request and their change by notices. Knows no connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from broker import wire

Refs = NDArray[np.void]
"""Rows and generations, dtype `wire.ROW_REF`, shape (n,)."""

NO_REFS: Refs = np.empty(0, dtype=wire.ROW_REF)
_NOT_ROWS = wire.ROW_RETRY  # this number and those above are answers, not rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuery:
    """Chunks of one KV group to look up.

    `keys`: block hash and group, all of one length; `positions`: end token of each in the request.
    `start`: chunk index of the first key. `window`: None searches a prefix, from the first key to
    the first MISS; a number searches from the end for that many chunks in a row, or for
    `first_window` of them if the run reaches the first key.
    """

    group: int
    keys: Sequence[bytes]
    positions: Sequence[int]
    start: int = 0
    window: int | None = None
    first_window: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """Chunks `first` to `first + count - 1` of the query can be loaded, once nothing is pending."""

    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to a lookup, one entry per group. `pending`: some of it is still on its way; ask again
    next step, which costs nothing. `asked_at`: monotonic seconds of the question. `timed_out`: no
    answer came in time; the broker may only be busy, and asking again may help."""

    groups: tuple[GroupAnswer, ...]
    pending: bool
    asked_at: float = 0.0
    timed_out: bool = False

    @property
    def is_miss(self) -> bool:
        """Whether nothing can be loaded."""
        return not self.pending and all(group.count == 0 for group in self.groups)


def miss(groups: Sequence[GroupQuery], now: float, *, timed_out: bool = False) -> Answer:
    """The answer where there is none."""
    nothing = tuple(GroupAnswer(first=0, count=0) for _ in groups)
    return Answer(groups=nothing, pending=False, asked_at=now, timed_out=timed_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Answer to prepare_store. `accepted` are indexes into the offered keys, ascending; `refs` are
    their rows and generations (dtype `wire.ROW_REF`), parallel. `present` and `writing` are indexes
    of keys that need no store, or that somebody else is storing now. `declined`: nothing was
    considered, because there is no broker, it did not answer, or the session is not ready.
    `timed_out`: as of an Answer."""

    accepted: Sequence[int] = ()
    refs: Refs = field(default_factory=lambda: NO_REFS)
    present: Sequence[int] = ()
    writing: Sequence[int] = ()
    declined: bool = True
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Chunks that this engine stored became readable (or are gone) in a medium."""

    removed: bool
    medium: str
    keys: Sequence[bytes]


@dataclass(slots=True)
class GroupState:
    """Row references of one group's answers, in query order from `first` on."""

    keys: Sequence[bytes]
    first: int
    refs: Refs

    def evaluate(self) -> tuple[GroupAnswer, bool]:
        """How far it goes to the first MISS, and whether something there is pending."""
        rows = self.refs["row"]
        if len(rows) and rows.max() < _NOT_ROWS:
            return GroupAnswer(first=self.first, count=len(rows)), False
        missing = np.flatnonzero(rows == wire.ROW_MISS)
        end = int(missing[0]) if len(missing) else len(rows)
        pending = bool((rows[:end] >= _NOT_ROWS).any())
        return GroupAnswer(first=self.first, count=end), pending


class Transfer(Enum):
    """What a worker does with a row."""

    LOAD = "load"
    STORE = "store"


@dataclass(slots=True)
class RequestState:
    """A request of this engine. `attempt` grows whenever earlier answers stop meaning anything;
    `finished`: only its transfers are still to end."""

    request: str
    attempt: int
    finished: bool = False
    groups: list[GroupState] | None = None
    answer: Answer | None = None
    early: list[tuple[Sequence[bytes], Refs]] | None = None
    """While a lookup is under way, what was noticed of it: a notice may be right behind the reply,
    in the same read, and be heard before the reply is put together."""
    used_at: float = 0.0
    index: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    transfers: dict[tuple[Transfer, bytes], list[tuple[int, np.void]]] = field(default_factory=dict)
    """Loads and stores that workers may be doing, by key: attempt and row reference of each, the
    oldest first. A request that starts over may load a chunk that it is loading still."""

    def began(self, kind: Transfer, keys: Iterable[bytes], refs: Refs) -> None:
        """Workers are told to transfer `keys`, whose rows are `refs`, in the current attempt."""
        for key, ref in zip(keys, refs, strict=True):
            self.transfers.setdefault((kind, key), []).append((self.attempt, ref))

    def ended(
        self, kind: Transfer, keys: Iterable[bytes]
    ) -> list[tuple[int, list[tuple[bytes, np.void]]]]:
        """Workers are done with `keys`: of each the oldest transfer, by the attempt that began it,
        and at most as many as one message takes."""
        by_attempt: dict[int, list[tuple[bytes, np.void]]] = {}
        for key in keys:
            running = self.transfers.get((kind, key))
            if running is None:
                continue
            attempt, ref = running.pop(0)
            if not running:
                del self.transfers[kind, key]
            by_attempt.setdefault(attempt, []).append((key, ref))
        return [
            (attempt, done[at : at + wire.MAX_KEYS])
            for attempt, done in by_attempt.items()
            for at in range(0, len(done), wire.MAX_KEYS)
        ]

    def set_answer(self, groups: list[GroupState], now: float) -> Answer:
        """A reply came."""
        early, self.early = self.early, None
        self.groups = groups
        self.used_at = now
        self.index = {}
        answer = self._evaluate(now)
        for keys, refs in early or ():
            answer = self.notice(keys, refs) or answer
        return answer

    def _evaluate(self, now: float) -> Answer:
        evaluated = [group.evaluate() for group in self.groups or ()]
        pending = any(part for _, part in evaluated)
        if pending and not self.index:
            self.index = self._places()
        self.answer = Answer(
            groups=tuple(answer for answer, _ in evaluated), pending=pending, asked_at=now
        )
        return self.answer

    def notice(self, keys: Sequence[bytes], refs: Refs) -> Answer | None:
        """The broker says what became of keys that were pending; the answer as it is now."""
        if self.early is not None:
            self.early.append((keys, refs))
            return None
        if self.groups is None or self.answer is None:
            return None
        for key, ref in zip(keys, refs, strict=True):
            place = self.index.get(key)
            if place is not None:
                self.groups[place[0]].refs[place[1]] = ref
        return self._evaluate(self.answer.asked_at)

    def _places(self) -> dict[bytes, tuple[int, int]]:
        """Group and offset of every key that was answered."""
        return {
            key: (number, offset)
            for number, group in enumerate(self.groups or ())
            for offset, key in enumerate(group.keys[group.first :][: len(group.refs)])
        }

    def refs_of(self, keys: Sequence[bytes]) -> Refs | None:
        """Rows and generations of chunks that are held; None if one of them is not."""
        places = self.index or self._places()
        refs = np.empty(len(keys), dtype=wire.ROW_REF)
        for number, key in enumerate(keys):
            place = places.get(key)
            if place is None or self.groups is None:
                return None
            refs[number] = self.groups[place[0]].refs[place[1]]
        return None if (refs["row"] >= _NOT_ROWS).any() else refs

    def forget_answers(self) -> None:
        """Earlier answers mean nothing any more."""
        self.groups, self.answer, self.early, self.index = None, None, None, {}


def to_wire(query: GroupQuery) -> wire.LookupGroup:
    return wire.LookupGroup(
        group=query.group,
        mode=wire.LookupMode.PREFIX if query.window is None else wire.LookupMode.WINDOW,
        window=query.window or 0,
        first_window=query.first_window,
        start=query.start,
        positions=np.asarray(query.positions, dtype="<u4").tobytes(),
        keys=b"".join(query.keys),
    )


def pack(refs: Sequence[np.void]) -> bytes:
    return b"".join(ref.tobytes() for ref in refs)
