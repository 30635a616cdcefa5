"""Who claims which rows: every hold and every reservation of a session has one owner.

Covers the claims of one session by (request, attempt), and how many distinct rows that makes. It
changes no row and no reader count (`tiers.rows`), and decides nothing (`tiers.session`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiers.base import OffloadKey, ReqContext

RowArray = NDArray[np.int32]
NO_ROWS: RowArray = np.empty(0, dtype=np.int32)
MOST_NOTES = 32


@dataclass(slots=True)
class AttemptClaims:
    """What one attempt of a request owns. A row is at most once in each of the three.

    `held`: readers that no worker uses yet; `loading`: readers that a worker may be using;
    `storing`: reservations that a worker may be writing to.
    """

    held: RowArray = field(default_factory=lambda: NO_ROWS)
    loading: RowArray = field(default_factory=lambda: NO_ROWS)
    storing: RowArray = field(default_factory=lambda: NO_ROWS)

    def is_empty(self) -> bool:
        """Whether nothing is owned."""
        return not (len(self.held) or len(self.loading) or len(self.storing))


@dataclass(slots=True)
class RequestClaims:
    """A live request of one session, or one whose transfers have not all ended.

    `waits` maps each key that the current attempt waits for to the time (monotonic seconds) at
    which the wait ends as a MISS. `wait_left_s` is what remains of the request's patience, which
    runs since `waiting_since` while there is something to wait for.
    """

    request: str
    ctx: ReqContext
    attempt: int
    wait_left_s: float
    waiting_since: float | None = None
    finished: bool = False
    attempts: dict[int, AttemptClaims] = field(default_factory=dict)
    waits: dict[OffloadKey, float] = field(default_factory=dict)
    retries: set[OffloadKey] = field(default_factory=set)
    seen: list[tuple[RowArray, NDArray[np.integer]]] = field(default_factory=list)

    def note_seen(self, answers: RowArray, positions: NDArray[np.integer]) -> None:
        """Remember at which token positions (parallel to `answers`, or longer) rows were found.

        A request may look up again for as long as it waits, so old notes are merged at times.
        """
        self.seen.append((answers, positions[: len(answers)]))
        if len(self.seen) > MOST_NOTES:
            rows = np.concatenate([rows for rows, _ in self.seen])[::-1]
            where = np.concatenate([positions for _, positions in self.seen])[::-1]
            last = np.unique(rows, return_index=True)[1]
            self.seen = [(rows[last], where[last])]

    def current(self) -> AttemptClaims:
        """Claims of the attempt that is under way."""
        claims = self.attempts.get(self.attempt)
        if claims is None:
            claims = self.attempts[self.attempt] = AttemptClaims()
        return claims

    def prune(self) -> bool:
        """Forget attempts that own nothing; whether none is left."""
        for number in [n for n, claims in self.attempts.items() if claims.is_empty()]:
            del self.attempts[number]
        return not self.attempts


class SessionRows:
    """How often each row is claimed by one session, and how many distinct rows that is."""

    def __init__(self, num_rows: int) -> None:
        self._claims: NDArray[np.int32] = np.zeros(num_rows, dtype=np.int32)
        self.distinct = 0

    def claim(self, rows: RowArray) -> None:
        """One more claim on each of these distinct rows."""
        counts = self._claims[rows]
        self.distinct += len(rows) - int(np.count_nonzero(counts))
        self._claims[rows] = counts + 1

    def unclaim(self, rows: RowArray) -> None:
        """One claim less on each of these distinct rows."""
        counts = self._claims[rows] - 1
        if len(rows) and counts.min() < 0:
            raise AssertionError(f"row {int(rows[np.argmin(counts)])} is not claimed")
        self._claims[rows] = counts
        self.distinct -= len(rows) - int(np.count_nonzero(counts))

    def counts(self) -> NDArray[np.int32]:
        """Claims per row."""
        return self._claims


def once(rows: RowArray) -> RowArray:
    """`rows` without repetition, in order of first appearance."""
    first: RowArray = rows[np.sort(np.unique(rows, return_index=True)[1])]
    return first


def without(rows: RowArray, gone: RowArray) -> RowArray:
    """`rows` less `gone`, in order."""
    if not len(gone):
        return rows
    kept: RowArray = rows[~np.isin(rows, gone)]
    return kept


def each_attempt(requests: dict[str, RequestClaims]) -> Iterator[AttemptClaims]:
    """Claims of every attempt of every request."""
    for request in requests.values():
        yield from request.attempts.values()
