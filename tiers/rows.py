"""Which key lies in which row: reservation, readers, quarantine and eviction, by row.

The caller knows who owns what (`tiers.ledger`); this module counts readers and keeps rows apart
that somebody may still touch. It knows no tier, job, session or clock, and touches no payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tiers.policies.base import CachePolicy, RowPolicy, keeps_batch_form
from tiers.recency import recency_for
from tiers.slots import Rows, SlotEvent, SlotState, SlotTable
from tiers.vocabulary import OffloadKey, ReqContext

ABSENT = -1
"""In an array of rows: no row holds this key."""

EventSink = Callable[[Sequence[OffloadKey], "Rows | list[int]", bool, bool], None]
"""Told of (keys, rows parallel to them, removed, metadata_only)."""

_RESIDENT = (SlotState.RESERVED, SlotState.READY)


def distinct_batches(rows: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """`rows` as batches without repetition; what is there twice is pinned, and unpinned, twice."""
    batches = []
    while len(rows):
        first = np.unique(rows, return_index=True)[1]
        batches.append(rows[first])
        rows = np.delete(rows, first)
    return batches


class PrimaryRows:
    """Rows of one pool and the keys in them. Guarded by the manager's lock.

    A *claim* is a party that may still touch a quarantined row; the last one frees it.
    """

    def __init__(
        self,
        num_rows: int,
        policy: CachePolicy,
        on_event: EventSink,
        generation: NDArray[np.uint32] | None = None,
    ) -> None:
        """`generation`: where the rows' generations are kept (uint32, one per row), if shared."""
        self.slots = SlotTable(num_rows, generation)
        self.policy = policy
        self.on_event = on_event
        self._row_policy = policy if isinstance(policy, RowPolicy) else None
        if self._row_policy is not None:
            self._row_policy.bind(self.slots)
        self._inserts_rows = keeps_batch_form(policy, "insert_rows", "insert")
        self._recency = recency_for(policy, self.slots)
        self.store_misses = self._recency.store_misses
        self.finish = self._recency.finish
        self._keys: list[OffloadKey | None] = [None] * num_rows
        self._num_evictable = 0
        self._claims: dict[int, int] = {}
        self.evictions = 0
        self.before_reuse: Callable[[int], None] | None = None
        """Called with each row that is about to be given out, where old bytes must not be seen."""
        self.on_resolved: Callable[[Sequence[OffloadKey]], None] | None = None
        """Told of keys whose reservation has ended, either way, after it has."""

    @property
    def num_rows(self) -> int:
        """Rows of the pool."""
        return self.slots.num_rows

    @property
    def num_busy(self) -> int:
        """Rows that can be neither given out nor evicted now: read, being written, quarantined."""
        return self.slots.num_rows - self.slots.num_free - self._num_evictable

    @property
    def num_evictable(self) -> int:
        """Ready rows without a reader."""
        return self._num_evictable

    def find(self, keys: Sequence[OffloadKey]) -> NDArray[np.int32]:
        """Rows of `keys`, int32, shape (n,); ABSENT where there is none."""
        if self._row_policy is not None:
            get = self._row_policy.rows.get
            return np.fromiter(map(get, keys, repeat(ABSENT)), dtype=np.int32, count=len(keys))
        chunks = map(self.policy.get, keys)
        return np.array([ABSENT if c is None else c.chunk_id for c in chunks], dtype=np.int32)

    def key_of(self, row: int) -> OffloadKey | None:
        """The key that leads to `row`; None if none does."""
        return self._keys[row]

    def keys_of(self, rows: Rows | Sequence[int]) -> list[OffloadKey]:
        """Keys of resident rows."""
        keys = self._keys
        return [cast(OffloadKey, keys[row]) for row in np.asarray(rows).tolist()]

    def hold(self, rows: Rows, counts: NDArray[np.int32] | None = None) -> None:
        """One more reader for each of these distinct, ready rows.

        `counts`: their readers now, where the caller has just looked and found them ready.
        """
        if counts is None:
            counts = self.slots.ref_cnt[rows]
            if len(rows) and counts.min() < 0:
                raise AssertionError(f"row {int(rows[np.argmin(counts)])} is not ready to be read")
        self.slots.ref_cnt[rows] = counts + 1
        self._num_evictable -= len(rows) - int(np.count_nonzero(counts))
        if self._row_policy is None:
            for key in self.keys_of(rows[counts == 0]):
                self.policy.mark_non_evictable(key)

    def unhold(self, rows: Rows) -> None:
        """One reader less for each of these distinct rows, which may have been quarantined."""
        if not len(rows):
            return
        counts = self.slots.ref_cnt[rows]
        if counts.min() < 1:
            gone = counts < 1
            self.settle(rows[gone])
            rows, counts = rows[~gone], counts[~gone]
        left = counts - 1
        self.slots.ref_cnt[rows] = left
        if self._row_policy is not None:
            self._num_evictable += len(rows) - int(np.count_nonzero(left))
            self._row_policy.on_rows_unread(rows)
        else:
            self._mark_unread(rows[left == 0])

    def _mark_unread(self, rows: Rows) -> None:
        self._num_evictable += len(rows)
        if self._row_policy is not None:
            if len(rows):
                self._row_policy.on_rows_unread(rows)
            return
        for key in self.keys_of(rows):
            self.policy.mark_evictable(key)

    def complete(self, rows: Rows) -> None:
        """The bytes of these reserved rows are there."""
        self.slots.move(rows, SlotEvent.COMPLETE)
        self._mark_unread(rows)
        keys = self.keys_of(rows)
        if keys:
            self.on_event(keys, rows, False, False)
            if self.on_resolved is not None:
                self.on_resolved(keys)

    def fail(self, rows: Rows) -> None:
        """The bytes of these reserved rows will not come, and nobody writes them any more."""
        self._drop(rows, SlotEvent.FAIL, metadata_only=True)

    def abandon(self, rows: Rows) -> None:
        """The writer of these reserved rows is lost but may still write: one claim stays."""
        self._drop(rows, SlotEvent.WRITER_LOST, metadata_only=True)
        for row in rows.tolist():
            self._claims[row] = 1

    def end_write(self, rows: Rows, success: bool) -> None:
        """The writer of these rows is done. Rows abandoned meanwhile only lose its claim."""
        reserved = self.slots.is_resident(rows)
        self.settle(rows[~reserved])
        if success:
            self.complete(rows[reserved])
        else:
            self.fail(rows[reserved])

    def forget(self, rows: Rows) -> int:
        """No key leads to these resident rows any more. Those that are read or written now stay
        quarantined, with one claim per reader or writer; the number of claims is returned."""
        counts = self.slots.ref_cnt[rows]
        written, unread = counts < 0, counts == 0
        self._num_evictable -= int(np.count_nonzero(unread))
        self.abandon(rows[written])
        read = counts > 0
        for row, count in zip(rows[read].tolist(), counts[read].tolist(), strict=True):
            self._claims[row] = count
        self._drop(rows[read], SlotEvent.FORGET_HELD)
        self._drop(rows[unread], SlotEvent.FORGET)
        return int(np.count_nonzero(written)) + int(counts[read].sum())

    def settle(self, rows: Rows) -> None:
        """One party less that may touch these quarantined rows; the last one frees them."""
        done = []
        for row in rows.tolist():
            claims = self._claims.get(row)
            if claims is None:
                raise AssertionError(f"row {row} is neither read nor quarantined")
            if claims > 1:
                self._claims[row] = claims - 1
            else:
                del self._claims[row]
                done.append(row)
        self.slots.move(done, SlotEvent.RELEASE)

    def _drop(self, rows: Rows, event: SlotEvent, *, metadata_only: bool = False) -> None:
        if not len(rows):
            return
        keys = self.keys_of(rows)
        for key, row in zip(keys, rows.tolist(), strict=True):
            self.policy.remove(key)
            self._keys[row] = None
        self.slots.move(rows, event)
        self.on_event(keys, rows, True, metadata_only)
        if self.on_resolved is not None:
            self.on_resolved(keys)

    def reserve(
        self, keys: Sequence[OffloadKey], ctx: ReqContext, protected: set[OffloadKey]
    ) -> tuple[NDArray[np.int32] | None, list[OffloadKey]]:
        """Rows for distinct absent keys and the keys evicted for them, exactly as many as needed.

        Chunks in `protected` are not evicted. None, and nothing evicted, if room can't be had.
        """
        evicted: list[OffloadKey] = []
        shortfall = len(keys) - self.slots.num_free
        if shortfall > 0:
            if shortfall > self._num_evictable:
                return None, evicted
            victims = self.policy.evict(shortfall, protected)
            if victims is None:
                return None, evicted
            rows_out = np.array([chunk.chunk_id for _, chunk in victims], dtype=np.int32)
            for row in rows_out.tolist():
                self._keys[row] = None
            self._num_evictable -= len(victims)
            self.evictions += len(victims)
            self.slots.move(rows_out, SlotEvent.EVICT)
            evicted = [key for key, _ in victims]
            self.on_event(evicted, rows_out, True, False)
        rows = self.slots.allocate(len(keys))
        if self.before_reuse is not None:
            for row in rows:
                self.before_reuse(row)
        index = np.array(rows, dtype=np.int32)
        if self._inserts_rows and self._row_policy is not None:
            self._row_policy.insert_rows(keys, index, ctx)
        else:
            for key, row in zip(keys, rows, strict=True):
                self.policy.insert(key, self.slots.status(row), ctx)
        for key, row in zip(keys, rows, strict=True):
            self._keys[row] = key
        return index, evicted

    def access(
        self, keys: Sequence[OffloadKey], rows: Rows, ctx: ReqContext, *, inserted: bool = False
    ) -> None:
        """Note that the request uses these resident keys."""
        self._recency.access(keys, rows, ctx, inserted=inserted)

    def quarantine_claims(self) -> NDArray[np.int64]:
        """Claims on each row that is quarantined, 0 elsewhere; shape (num_rows,)."""
        claims = np.zeros(self.num_rows, dtype=np.int64)
        claims[list(self._claims)] = list(self._claims.values())
        return claims

    def resident(self) -> NDArray[np.int32]:
        """All rows that a key leads to, in row order."""
        every = np.arange(self.num_rows, dtype=np.int32)
        return every[self.slots.is_resident(every)]

    def clear(self) -> None:
        """Start recency anew, once every key is forgotten."""
        self.policy.clear()
        self._recency.reset()

    def check(self, *, keys: bool = True) -> None:
        """V2 and the counts kept here. AssertionError names what does not agree.

        Without `keys` it takes milliseconds for a million rows; with them, a second.
        """
        self.slots.check()
        unread = int(np.count_nonzero(self.slots.ref_cnt == 0))
        if unread != self._num_evictable:
            raise AssertionError(f"{unread} rows are ready and unread, not {self._num_evictable}")
        quarantined = self.slots.count(SlotState.QUARANTINED)
        if quarantined != len(self._claims):
            raise AssertionError(f"{quarantined} rows quarantined, {len(self._claims)} claimed")
        if keys:
            self._check_keys()

    def _check_keys(self) -> None:
        for row in range(self.num_rows):
            key, resident = self._keys[row], self.slots.state(row) in _RESIDENT
            if (key is not None) != resident:
                raise AssertionError(f"row {row} is {self.slots.state(row).name}, its key {key!r}")
            if key is not None:
                chunk = self.policy.get(key)
                if chunk is None or chunk.chunk_id != row:
                    raise AssertionError(f"row {row} holds {key.hex()}, the policy says {chunk}")
