"""Rows in order of age, for pools of a million rows: cheap to renew, and the oldest come out first.

Every row present has a *rank*, one int64; a lower rank is older. Covers ranks and the order in
which rows leave. It does not decide what a rank should be, and knows no request; keys serve only
to break ties, reader counts only to pass over rows that are in use.

Sorting is put off until eviction needs it. The ranks are cut into ranges, each with a *bucket* of
rows entered there, unsorted. Renewing a batch writes its ranks and appends its rows to the newest
bucket; what older buckets say about these rows becomes stale and is left until it is met: an
entry counts only while the row's rank lies in its bucket's range. The oldest bucket alone is
sorted (the *front*). A row met there that has readers is set aside and not looked at again until
it is renewed or `wake` is called for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Container, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiers.slots import Rows
from tiers.vocabulary import OffloadKey

ABSENT: Final = -1
BUCKET_ROWS: Final = 1024
"""About what one bucket holds: small enough to sort in microseconds, large enough that a million
rows need only about a thousand buckets."""

_END: Final = np.iinfo(np.int64).max
_LOOK_AHEAD: Final = 16  # numpy costs the same for 1 and for 16 rows
_NO_ROWS: Final[NDArray[np.int32]] = np.zeros(0, dtype=np.int32)

_Row = TypeVar("_Row", bound=np.integer[Any])


def _distinct(rows: NDArray[_Row]) -> NDArray[_Row]:
    # np.unique costs several times as much for arrays of this size.
    rows = np.sort(rows)
    first = np.ones(len(rows), dtype=np.bool_)
    np.not_equal(rows[1:], rows[:-1], out=first[1:])
    return rows[first]


class AgeOrder:
    """Ranks of `num_rows` rows. Not thread-safe; `keys[row]` names every row present.

    `entries_examined` counts bucket entries looked at by eviction and tidying, for tests of cost.
    """

    def __init__(self, num_rows: int, keys: Sequence[OffloadKey | None]) -> None:
        self.ranks: NDArray[np.int64] = np.full(num_rows, ABSENT, dtype=np.int64)
        self.entries_examined = 0
        self._aside: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        self._keys = keys
        self._newest = 0  # ranks up to this one were given out
        self.clear()

    def clear(self) -> None:
        """Take every row out. Ranks go on rising."""
        self.ranks.fill(ABSENT)
        self._aside.fill(False)
        self._num_aside = 0
        self._present = 0
        # Bucket i is for ranks from _starts[i] to below _starts[i + 1]; bucket 0 takes all below.
        self._starts = [self._newest + 1]
        self._buckets = [array("i")]
        self._front = _NO_ROWS  # bucket 0 but for what was entered since it was sorted
        self._cursor = 0
        self._entries = 0  # in all buckets and the rest of the front, stale ones too
        self._untidied = 0
        self._hand = 0

    def grow(self, num_rows: int) -> None:
        """Make room for rows up to `num_rows`."""
        more = num_rows - len(self.ranks)
        self.ranks = np.concatenate([self.ranks, np.full(more, ABSENT, dtype=np.int64)])
        self._aside = np.concatenate([self._aside, np.zeros(more, dtype=np.bool_)])

    def take_ranks(self, count: int) -> int:
        """Give out `count` ranks above all earlier ones; returns the last and highest."""
        if len(self._buckets[-1]) >= BUCKET_ROWS:
            self._starts.append(self._newest + 1)
            self._buckets.append(array("i"))
        self._newest += count
        return self._newest

    def add(self, row: int, rank: int) -> None:
        """Put in a row that is not there, at a rank given out before."""
        self.ranks[row] = rank
        self._present += 1
        self._buckets[self._bucket_of(rank)].append(row)
        self._entered(1)

    def add_rows(self, rows: Rows, ranks: NDArray[np.int64]) -> None:
        """Put in distinct rows that are not there, at ranks (parallel) given out before."""
        self.ranks[rows] = ranks
        self._present += len(rows)
        self._enter(rows, ranks)

    def remove(self, row: int) -> None:
        """Take out a row that is there."""
        self.ranks[row] = ABSENT
        self._present -= 1
        if self._num_aside and self._aside[row]:
            self._aside[row] = False
            self._num_aside -= 1

    def renew(self, rows: Rows) -> None:
        """Make rows that are there the newest, the last of them newest of all."""
        for at in range(0, len(rows), BUCKET_ROWS):
            piece = rows[at : at + BUCKET_ROWS]
            last = self.take_ranks(len(piece))
            # Of a row named twice the later rank stands, as in one assignment after the other.
            self.ranks[piece] = np.arange(last - len(piece) + 1, last + 1)
            self._buckets[-1].frombytes(piece.astype(np.int32).tobytes())
            self._unflag(piece)
            self._entered(len(piece))

    def set_ranks(self, rows: Rows, ranks: NDArray[np.int64]) -> None:
        """Move rows that are there to `ranks` (parallel to them, given out before)."""
        if len(rows):
            self.ranks[rows] = ranks
            self._unflag(rows)
            self._enter(rows, ranks)

    def wake(self, rows: Rows) -> None:
        """These rows may have no reader now: those set aside return to their place."""
        if self._num_aside:
            woken = self._unflag(rows)
            if len(woken):
                self._enter(woken, self.ranks[woken])

    def take_oldest(
        self, count: int, readers: NDArray[np.int32], protected: Container[OffloadKey]
    ) -> list[int] | None:
        """Take out the `count` oldest rows without readers whose keys are not protected.

        Oldest first. None if there are not so many; then nothing is taken out.
        """
        chosen: list[int] = []
        spared: list[int] = []
        while len(chosen) < count and self._open():
            window = max(count - len(chosen), _LOOK_AHEAD)
            rows = self._front[self._cursor : self._cursor + window]
            self.entries_examined += len(rows)
            current = self._current(rows, 0)
            unread = readers[rows] == 0
            self._num_aside += int(np.count_nonzero(held := current & ~unread))
            self._aside[rows[held]] = True
            passed = len(rows)
            for at, row in zip(
                np.flatnonzero(current & unread).tolist(),
                rows[current & unread].tolist(),
                strict=True,
            ):
                if len(chosen) == count:
                    passed = at
                    break
                (spared if self._keys[row] in protected else chosen).append(row)
                # A stale entry of the same row may wait in the next bucket, whose range takes in
                # this one's once this one is used up.
                self._aside[row] = True
            self._cursor += passed
            self._entries -= passed
        enough = len(chosen) == count
        back = np.array(spared if enough else spared + chosen, dtype=np.int32)
        self._aside[chosen] = False
        self._aside[back] = False
        if enough:
            self.ranks[chosen] = ABSENT
            self._present -= count
        if len(back):
            self._enter(back, self.ranks[back])
        return chosen if enough else None

    def _bucket_of(self, rank: int) -> int:
        return max(bisect_right(self._starts, rank) - 1, 0)

    def _end(self, index: int) -> int:
        return self._starts[index + 1] if index + 1 < len(self._starts) else _END

    def _current(self, rows: NDArray[np.int32], index: int) -> NDArray[np.bool_]:
        ranks = self.ranks.take(rows)
        low = self._starts[index] if index else 0
        current: NDArray[np.bool_] = (ranks >= low) & (ranks < self._end(index))
        if self._num_aside or index == 0:
            current &= ~self._aside.take(rows)
        return current

    def _unflag(self, rows: Rows) -> Rows:
        """Rows that were set aside and are so no more, each once."""
        if not self._num_aside:
            return _NO_ROWS
        woken = _distinct(rows[self._aside.take(rows)])
        self._aside[woken] = False
        self._num_aside -= len(woken)
        return woken

    def _enter(self, rows: Rows, ranks: NDArray[np.int64]) -> None:
        first, last = self._bucket_of(int(ranks.min())), self._bucket_of(int(ranks.max()))
        if first == last:
            self._buckets[first].frombytes(rows.astype(np.int32).tobytes())
        else:
            order = np.argsort(ranks, kind="stable")
            rows, ranks = rows[order], ranks[order]
            at = 0
            while at < len(rows):
                index = self._bucket_of(int(ranks[at]))
                to = int(np.searchsorted(ranks, self._end(index)))
                self._buckets[index].frombytes(rows[at:to].astype(np.int32).tobytes())
                at = to
        self._entered(len(rows))

    def _open(self) -> bool:
        """Have the oldest rows sorted in the front; False if no row is left."""
        while True:
            if self._buckets[0]:
                late = np.array(self._buckets[0], dtype=np.int32)
                self._buckets[0] = array("i")
                self._sort_front(np.concatenate([self._front[self._cursor :], late]))
            if self._cursor < len(self._front):
                return True
            self._front, self._cursor = _NO_ROWS, 0
            if len(self._buckets) == 1:
                return False
            del self._buckets[0], self._starts[0]

    def _sort_front(self, entries: NDArray[np.int32]) -> None:
        self.entries_examined += len(entries)
        rows = _distinct(entries)
        rows = rows[self._current(rows, 0)]
        self._entries -= len(entries) - len(rows)
        rows = rows[np.argsort(self.ranks[rows], kind="stable")]
        if len(rows) > 2 * BUCKET_ROWS:
            rows = self._split(rows)
        ranks = self.ranks[rows]
        if (ranks[1:] == ranks[:-1]).any():  # chunks of several KV groups that end together
            keys = self._keys
            named = [
                (rank, keys[row] or b"", row)
                for rank, row in zip(ranks.tolist(), rows.tolist(), strict=True)
            ]
            rows = np.array([row for _, _, row in sorted(named)], dtype=np.int32)
        self._front, self._cursor = rows, 0

    def _split(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Spread sorted rows over new buckets after the first, whose share is returned."""
        ranks = self.ranks[rows]
        # Equal ranks stay together: a cut moves down to the first of its like.
        cuts = np.unique(np.searchsorted(ranks, ranks[BUCKET_ROWS::BUCKET_ROWS]))
        cuts = cuts[cuts > 0]
        pieces = np.split(rows, cuts)
        self._starts[1:1] = ranks[cuts].tolist()
        self._buckets[1:1] = [array("i", piece.tobytes()) for piece in pieces[1:]]
        return pieces[0]

    def _entered(self, count: int) -> None:
        self._entries += count
        self._untidied += count
        if self._untidied >= BUCKET_ROWS:
            self._tidy()

    def _tidy(self) -> None:
        """Drop stale entries, twice as many looked at as were entered since the last time.

        So they never far outnumber the live ones, and no call pays for the whole pool.
        """
        budget, self._untidied = 2 * self._untidied, 0
        tolerated = 2 * self._present + 4 * BUCKET_ROWS
        while budget > 0 and self._entries > tolerated:
            index = self._hand = self._hand % len(self._buckets)
            bucket = self._buckets[index]
            rows = _distinct(np.array(bucket, dtype=np.int32))
            rows = rows[self._current(rows, index)]
            self.entries_examined += len(bucket)
            self._entries -= len(bucket) - len(rows)
            budget -= max(len(bucket), _LOOK_AHEAD)
            self._buckets[index] = array("i", rows.tobytes())
            if index > 1 and len(rows) + len(self._buckets[index - 1]) <= BUCKET_ROWS:
                self._buckets[index - 1].extend(self._buckets[index])
                del self._buckets[index], self._starts[index]
            else:
                self._hand += 1
