"""Least recently used, with the use of one request counted as one.

Covers what rank a use gives a chunk; `age_order` keeps the ranks and finds the oldest. Chunks of
a running request share the request's rank, tails below heads; when it ends they are all renewed
together, again heads last. So a prefix loses its tail first and stays usable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiers.policies.age_order import AgeOrder
from tiers.policies.base import ChunkStatus, RowPolicy, order_request_keys
from tiers.slots import NOT_READY, Rows, SlotTable
from tiers.vocabulary import OffloadKey, ReqContext

MAX_POSITION: Final = (1 << 24) - 1
"""Tokens of a request told apart; chunks beyond count as ending here. A request takes as many
ranks, which leaves room for 5e11 requests in an int64."""

_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class _RequestRank:
    """Rank of a request's position 0, kept in its context. Good for one policy and generation."""

    owner: object
    cache_generation: int
    rank: int


class _Chunks(Mapping[OffloadKey, ChunkStatus]):
    def __init__(self, policy: LRUCachePolicy) -> None:
        self._policy = policy

    def __getitem__(self, key: OffloadKey) -> ChunkStatus:
        chunk = self._policy.get(key)
        if chunk is None:
            raise KeyError(key)
        return chunk

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._policy.rows)

    def __len__(self) -> int:
        return len(self._policy.rows)


class LRUCachePolicy(RowPolicy):
    """Gives up the chunk whose request used it longest ago, tails of a prefix before its head.

    Unless `bind` gives it a table, it keeps reader counts of its own for the chunks it is given.
    Guarded by the manager's lock.
    """

    def __init__(self, cache_capacity: int) -> None:
        """`cache_capacity` is the number of rows of the pool."""
        super().__init__(cache_capacity)
        self.rows: dict[OffloadKey, int] = {}
        self._keys: list[OffloadKey | None] = [None] * cache_capacity
        self._ages = AgeOrder(cache_capacity, self._keys)
        self._cells: NDArray[np.int32] | None = None  # made or bound when first needed
        self._bound = False
        self._cache_generation = 0

    @property
    def chunks(self) -> Mapping[OffloadKey, ChunkStatus]:
        """Resident chunks by key; a view."""
        return _Chunks(self)

    def bind(self, table: SlotTable) -> None:
        """Use this table's reader counts. RuntimeError after the first insert."""
        if self._cells is not None:
            raise RuntimeError("the policy keeps reader counts already; bind it before any insert")
        self._cells, self._bound = table.ref_cnt, True
        if table.num_rows > len(self._keys):
            self._grow(table.num_rows)

    def _counts(self) -> NDArray[np.int32]:
        if self._cells is None:
            self._cells = np.full(len(self._keys), NOT_READY, dtype=np.int32)
        return self._cells

    def _grow(self, num_rows: int) -> None:
        known = len(self._keys)
        self._keys.extend([None] * (num_rows - known))
        self._ages.grow(num_rows)
        if not self._bound and self._cells is not None:
            # In place: chunks given out before go on counting in this very array.
            self._cells.resize(num_rows, refcheck=False)
            self._cells[known:] = NOT_READY

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """The chunk of `key`, ready or not; None if it is not resident."""
        row = self.rows.get(key)
        return None if row is None else ChunkStatus(row, self._counts())

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext) -> None:
        """Rank a new chunk with its request, or as newest where its position is unknown.

        ValueError if the key is resident, or the row outside the pool or another key's.
        """
        row, counts = chunk.chunk_id, self._counts()
        if row < 0 or (self._bound and row >= len(counts)):
            raise ValueError(f"row {row} is outside the pool of {len(counts)} rows")
        if row >= len(self._keys):
            self._grow(max(row + 1, 2 * len(self._keys)))
        if key in self.rows or self._keys[row] is not None:
            raise ValueError(
                f"cannot put key {key.hex()} in row {row}: the key is in row "
                f"{self.rows.get(key)}, the row has {self._keys[row]!r}; remove it first"
            )
        chunk.move_to(counts)
        position = req_context.get_offload_key_position(key)
        if position is None:
            rank = self._ages.take_ranks(1)
        else:
            rank = self._request_rank(req_context) - min(position, MAX_POSITION)
        self.rows[key] = row
        self._keys[row] = key
        self._ages.add(row, rank)

    def insert_rows(self, keys: Sequence[OffloadKey], rows: Rows, req_context: ReqContext) -> None:
        """As insert for each key and its row, at one go where every position is known."""
        places = [req_context.get_offload_key_position(key) for key in keys]
        if None in places or not self._bound:
            for key, row in zip(keys, rows.tolist(), strict=True):
                self.insert(key, ChunkStatus(row, self._counts()), req_context)
            return
        self.rows.update(zip(keys, rows.tolist(), strict=True))
        for key, row in zip(keys, rows.tolist(), strict=True):
            self._keys[row] = key
        positions = np.minimum(np.array(places, dtype=np.int64), MAX_POSITION)
        self._ages.add_rows(rows, self._request_rank(req_context) - positions)

    def remove(self, key: OffloadKey) -> None:
        """Forget a resident key; KeyError if it is not."""
        row = self.rows.pop(key)
        self._keys[row] = None
        self._ages.remove(row)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Make resident `keys` (in prefix order) the newest, the first newest of all."""
        rows = self.rows
        self.touch_rows(np.array([rows[key] for key in keys if key in rows], dtype=np.int32))

    def touch_rows(self, rows: Rows) -> None:
        """As touch, for resident rows in prefix order."""
        self._ages.renew(rows[::-1])

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Raise resident keys to the rank of their place in the request; never lower one."""
        found = [key for key in keys if key in self.rows]
        places = map(req_context.get_offload_key_position, found)
        self.access_rows(
            np.array([self.rows[key] for key in found], dtype=np.int32),
            np.array([_UNKNOWN if at is None else at for at in places], dtype=np.int64),
            req_context,
        )

    def access_rows(self, rows: Rows, positions: Rows, req_context: ReqContext) -> None:
        """As on_request_access; a negative position is unknown and makes its row the newest."""
        known = positions >= 0
        if not known.all():
            # The request takes its rank with its first known position, as if one key came at a
            # time: what comes before is older than the request, what comes after is newer.
            start = int(np.argmax(known)) if known.any() else len(rows)
            self._ages.renew(rows[:start])
            later = rows[start:][~known[start:]]
            rows, positions = rows[known], positions[known]
        else:
            later = rows[:0]
        if len(rows):
            rank = self._request_rank(req_context)
            ranks = rank - np.minimum(positions, MAX_POSITION).astype(np.int64)
            higher = ranks > self._ages.ranks.take(rows)
            self._ages.set_ranks(rows[higher], ranks[higher])
        self._ages.renew(later)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Commit the request as one use, now."""
        self.touch(order_request_keys(key_groups, req_context), req_context)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Give up the `n` oldest unread chunks outside `protected`, or None and change nothing."""
        if n < 1:
            return []
        if n > len(self.rows):
            return None
        counts = self._counts()
        victims = self._ages.take_oldest(n, counts, protected)
        if victims is None:
            return None
        evicted = []
        for row in victims:
            key = self._keys[row]
            assert key is not None  # every row in the age order has its key here
            self._keys[row] = None
            del self.rows[key]
            evicted.append((key, ChunkStatus(row, counts)))
        return evicted

    def clear(self) -> None:
        """Forget everything; running requests take new ranks."""
        self.rows.clear()
        self._keys[:] = [None] * len(self._keys)
        self._ages.clear()
        self._cache_generation += 1

    def mark_evictable(self, key: OffloadKey) -> None:
        """The last reader of a ready chunk has gone: it may go at its own rank."""
        row = self.rows.get(key)
        if row is not None:
            self._ages.wake(np.array([row], dtype=np.int32))

    def on_rows_unread(self, rows: Rows) -> None:
        """The last reader of these rows has gone, or their bytes have come."""
        self._ages.wake(rows)

    def _request_rank(self, req_context: ReqContext) -> int:
        state = req_context.get_state(_RequestRank)
        if (
            state is None
            or state.owner is not self
            or state.cache_generation != self._cache_generation
        ):
            rank = self._ages.take_ranks(MAX_POSITION + 1)
            state = _RequestRank(self, self._cache_generation, rank)
            req_context.set_state(state)
        return state.rank
