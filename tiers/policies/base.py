"""The contract of an eviction policy, and the faster one that our own LRU also keeps.

A policy remembers which key lies in which row and which unread chunk to give up next. It never
moves a byte, frees a row or counts a reader; `tiers.primary` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from tiers.base import OffloadKey, ReqContext
from tiers.slots import ChunkStatus, Rows, SlotTable

__all__ = ["CachePolicy", "ChunkStatus", "RowPolicy", "keeps_batch_form", "order_request_keys"]


def order_request_keys(
    key_groups: Sequence[Sequence[OffloadKey]], req_context: ReqContext
) -> list[OffloadKey]:
    """Keys of all groups in prefix order: by token position where every key has one, else as is."""
    keys = [key for group in key_groups for key in group]
    positions = {key: req_context.get_offload_key_position(key) for key in keys}
    if all(position is not None for position in positions.values()):
        keys.sort(key=lambda key: positions[key] or 0)
    return keys


class CachePolicy(ABC):
    """Which chunk goes next. Called under the manager's lock.

    A chunk is *evictable* while its `ref_cnt` is 0. The primary tier says so by `mark_evictable`
    and takes it back by `mark_non_evictable`; a policy may also look at `ref_cnt` itself.
    """

    def __init__(self, cache_capacity: int) -> None:
        """`cache_capacity` is the number of rows of the pool."""
        self.cache_capacity = cache_capacity

    @abstractmethod
    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """The chunk of `key`, ready or not; None if it is not resident."""

    @abstractmethod
    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext) -> None:
        """A row was reserved for a key that is not resident."""

    @abstractmethod
    def remove(self, key: OffloadKey) -> None:
        """Forget a resident key that was not chosen by `evict`."""

    @abstractmethod
    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """`keys`, in prefix order, were used now; heads are to stay longer than tails."""

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Keys offered for a store are not resident; once per key and request, before evict."""
        self.touch(keys, req_context)

    def on_request_access(  # noqa: B027
        self, keys: Iterable[OffloadKey], req_context: ReqContext
    ) -> None:
        """A running request uses `keys`; its use is committed by on_request_finished."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """A request ends; its keys by KV group, each group in prefix order."""
        for group in key_groups:
            self.touch(group, req_context)

    @abstractmethod
    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Give up exactly `n` evictable chunks outside `protected`, or None and change nothing."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    def mark_evictable(self, key: OffloadKey) -> None:  # noqa: B027
        """The last reader of a ready chunk has gone, or a chunk has become ready."""

    def mark_non_evictable(self, key: OffloadKey) -> None:  # noqa: B027
        """An evictable chunk got its first reader."""


class RowPolicy(CachePolicy):
    """A policy that can also be driven by row numbers, a batch at a time.

    `rows` maps every resident key to its row and is the only index of the pool. The policy looks
    at `table.ref_cnt` when it evicts, so nobody need tell it of readers that come and go, but for
    one case: `evict` may have set rows with readers aside, and then `on_rows_unread` must be told.
    """

    rows: dict[OffloadKey, int]

    @abstractmethod
    def bind(self, table: SlotTable) -> None:
        """Use this table's reader counts. Called once, before the first insert."""

    @abstractmethod
    def insert_rows(self, keys: Sequence[OffloadKey], rows: Rows, req_context: ReqContext) -> None:
        """As insert for each key and its row; the rows are the bound table's and not ready."""

    @abstractmethod
    def touch_rows(self, rows: Rows) -> None:
        """As touch, for resident rows in prefix order (head first)."""

    @abstractmethod
    def access_rows(self, rows: Rows, positions: Rows, req_context: ReqContext) -> None:
        """As on_request_access; `positions` are end tokens in the request, parallel to `rows`."""

    @abstractmethod
    def on_rows_unread(self, rows: Rows) -> None:
        """A reader of these rows has gone, of some the last, or their writer has completed them."""


def keeps_batch_form(policy: CachePolicy, row_method: str, *key_methods: str) -> bool:
    """Whether the policy has this batch method, and no subclass has since changed one of the key
    methods that it stands for."""
    if not isinstance(policy, RowPolicy):
        return False
    mro = type(policy).__mro__

    def definer(name: str) -> int:
        return next(i for i, cls in enumerate(mro) if name in vars(cls))

    return all(definer(name) >= definer(row_method) for name in key_methods)
