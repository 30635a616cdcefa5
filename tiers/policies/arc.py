"""Adaptive replacement: recency and frequency share the pool, and misses move the border.

Covers four lists: T1 (used by one request), T2 (used again), and the keys lately evicted from
each, B1 and B2. A miss that B1 remembers makes T1's share grow, one that B2 remembers makes it
shrink. Reader counts are looked at when evicting; the policy keeps none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from tiers.policies.base import CachePolicy, ChunkStatus, order_request_keys
from tiers.vocabulary import OffloadKey, ReqContext

Victim = tuple[OffloadKey, ChunkStatus]


class ARCCachePolicy(CachePolicy):
    """Resists scans: chunks used by several requests outlive those used by one.

    `t1` and `t2` map resident keys to chunks, `b1` and `b2` hold evicted keys, at most
    `cache_capacity` each; all four have the next to go first. `target_t1_size` (chunks) is how
    large T1 should be. Guarded by the manager's lock.
    """

    def __init__(self, cache_capacity: int) -> None:
        """`cache_capacity` is the number of rows of the pool."""
        super().__init__(cache_capacity)
        self.t1: OrderedDict[OffloadKey, ChunkStatus] = OrderedDict()
        self.t2: OrderedDict[OffloadKey, ChunkStatus] = OrderedDict()
        self.b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self.b2: OrderedDict[OffloadKey, None] = OrderedDict()
        self.target_t1_size = 0.0

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """The chunk of `key`, ready or not; None if it is not resident."""
        chunk = self.t1.get(key)
        return self.t2.get(key) if chunk is None else chunk

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext) -> None:
        """A new chunk starts in T1, whatever its past; `on_store_miss` has learnt from that."""
        self.t1[key] = chunk
        self.b1.pop(key, None)
        self.b2.pop(key, None)

    def remove(self, key: OffloadKey) -> None:
        """Forget a resident key, without a ghost; KeyError if it is not resident."""
        if self.t1.pop(key, None) is None:
            del self.t2[key]

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """A use of each key: resident ones go to T2, absent ones move the target."""
        for key in reversed(list(keys)):
            chunk = self.t1.get(key)
            if chunk is not None and not chunk.is_ready:
                # Its own store still runs: no second use can have come yet.
                self.t1.move_to_end(key)
            elif not self._promote(key):
                self._adapt(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Learn from keys that were evicted, before `insert` forgets their ghosts."""
        for key in reversed(list(keys)):
            self._adapt(key)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Commit the request: what it only inserted is renewed where it is, what it reused goes
        to T2, and what it merely waited for stays."""
        for key in reversed(order_request_keys(key_groups, req_context)):
            if key in reused_keys:
                self._promote(key)
            elif key in insertion_only_keys:
                for resident in (self.t1, self.t2):
                    if key in resident:
                        resident.move_to_end(key)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[Victim] | None:
        """Give up exactly `n` chunks without readers, outside `protected`; None: not so many.

        Each comes from T1 while T1 has reached its target, else from T2, and from the other list
        where that one has none to give. Looks at each pinned chunk at most once a call.
        """
        from_t1, from_t2 = self._evictable(self.t1, protected), self._evictable(self.t2, protected)
        next_t1, next_t2 = next(from_t1, None), next(from_t2, None)
        t1_size = len(self.t1)
        victims: list[tuple[Victim, bool]] = []
        while len(victims) < n:
            t1_is_full = t1_size >= int(self.target_t1_size)
            if next_t1 is not None and (t1_is_full or next_t2 is None):
                victims.append((next_t1, True))
                next_t1 = next(from_t1, None)
                t1_size -= 1
            elif next_t2 is not None:
                victims.append((next_t2, False))
                next_t2 = next(from_t2, None)
            else:
                return None
        for (key, _), is_t1 in victims:
            resident, ghosts = (self.t1, self.b1) if is_t1 else (self.t2, self.b2)
            del resident[key]
            ghosts[key] = None
        for ghosts in (self.b1, self.b2):
            while len(ghosts) > self.cache_capacity:
                ghosts.popitem(last=False)
        return [victim for victim, _ in victims]

    def clear(self) -> None:
        """Forget everything, ghosts and target too."""
        for keys in (self.t1, self.t2, self.b1, self.b2):
            keys.clear()
        self.target_t1_size = 0.0

    def _promote(self, key: OffloadKey) -> bool:
        """Make a resident key T2's newest; False if it is not resident."""
        if key in self.t2:
            self.t2.move_to_end(key)
        elif key in self.t1:
            self.t2[key] = self.t1.pop(key)
        else:
            return False
        return True

    def _adapt(self, key: OffloadKey) -> None:
        """Move the target towards the list that would have kept `key`."""
        if key in self.b1:
            step = max(1.0, len(self.b2) / len(self.b1))
            self.target_t1_size = min(self.target_t1_size + step, float(self.cache_capacity))
            self.b1.move_to_end(key)
        elif key in self.b2:
            step = max(1.0, len(self.b1) / len(self.b2))
            self.target_t1_size = max(self.target_t1_size - step, 0.0)
            self.b2.move_to_end(key)

    @staticmethod
    def _evictable(
        resident: OrderedDict[OffloadKey, ChunkStatus], protected: set[OffloadKey]
    ) -> Iterator[Victim]:
        return (
            (key, chunk)
            for key, chunk in resident.items()
            if chunk.ref_cnt == 0 and key not in protected
        )
