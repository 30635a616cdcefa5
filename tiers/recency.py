"""What one request did with which chunks, so that a policy sees it as one use.

A key counts once per request, however often the request looks it up, loads or offers it; the use
is committed when the request ends, in prefix order. `KeyRecency` speaks to any policy, one key at
a time; `RowRecency` to a `RowPolicy`, a batch at a time, without a loop over keys. Both keep their
record in the request's context and begin anew when the cache was reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tiers.base import OffloadKey, ReqContext, get_offload_group_idx
from tiers.policies.base import CachePolicy, RowPolicy, keeps_batch_form
from tiers.slots import Rows, SlotTable

UNKNOWN_POSITION = -1


class Recency(Protocol):
    """How the primary tier reports use to its policy."""

    def store_misses(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Keys were offered for a store and are absent; told to the policy once per request."""

    def access(
        self, keys: Sequence[OffloadKey], rows: Rows, ctx: ReqContext, *, inserted: bool
    ) -> None:
        """The request uses resident `keys` (rows parallel to them), or has just inserted them."""

    def finish(self, ctx: ReqContext) -> None:
        """The request ends: commit its use."""

    def reset(self) -> None:
        """The cache was emptied: records made before mean nothing."""


def positions_of(keys: Sequence[OffloadKey], ctx: ReqContext) -> NDArray[np.int64]:
    """End tokens of `keys` in the request, -1 where unknown."""
    known = ctx._offload_key_positions
    return np.fromiter(
        (known.get(key, UNKNOWN_POSITION) for key in keys), dtype=np.int64, count=len(keys)
    )


@dataclass(slots=True)
class _KeyRecord:
    owner: object
    cache_generation: int
    key_groups: dict[int, list[OffloadKey]] = field(default_factory=dict)
    seen_keys: set[OffloadKey] = field(default_factory=set)
    inserted_keys: set[OffloadKey] = field(default_factory=set)
    reused_keys: set[OffloadKey] = field(default_factory=set)
    store_miss_keys: set[OffloadKey] = field(default_factory=set)
    finished: bool = False


class KeyRecency:
    """For any policy."""

    def __init__(self, policy: CachePolicy) -> None:
        self._policy = policy
        self._cache_generation = 0

    def _record(self, ctx: ReqContext) -> _KeyRecord:
        record = ctx.get_state(_KeyRecord)
        if (
            record is None
            or record.owner is not self
            or record.cache_generation != self._cache_generation
        ):
            record = _KeyRecord(self, self._cache_generation)
            ctx.set_state(record)
        return record

    def store_misses(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Tell the policy of absent keys, each once per request."""
        record = self._record(ctx)
        new = [key for key in keys if key not in record.store_miss_keys]
        if new:
            record.store_miss_keys.update(new)
            self._policy.on_store_miss(new, ctx)

    def access(
        self, keys: Sequence[OffloadKey], rows: Rows, ctx: ReqContext, *, inserted: bool
    ) -> None:
        """Note the use; a key that the request inserted itself is never reused by it."""
        record = self._record(ctx)
        new = [key for key in keys if key not in record.seen_keys]
        assert not (new and record.finished), f"request {ctx.req_id} has ended, yet uses new chunks"
        for key in new:
            record.seen_keys.add(key)
            record.key_groups.setdefault(get_offload_group_idx(key), []).append(key)
        if inserted:
            record.inserted_keys.update(keys)
        else:
            record.reused_keys.update(key for key in keys if key not in record.inserted_keys)
            self._policy.on_request_access(keys, ctx)

    def finish(self, ctx: ReqContext) -> None:
        """Hand the request's keys to the policy, each group by token position where known."""
        record = self._record(ctx)
        if record.finished:
            return
        record.finished = True
        groups = []
        for keys in record.key_groups.values():
            positions = positions_of(keys, ctx)
            if len(positions) and positions.min() != UNKNOWN_POSITION:
                keys = [keys[i] for i in np.argsort(positions, kind="stable")]
            groups.append(keys)
        if groups:
            self._policy.on_request_finished(
                groups, record.inserted_keys - record.reused_keys, record.reused_keys, ctx
            )

    def reset(self) -> None:
        """Records made before mean nothing."""
        self._cache_generation += 1


@dataclass(slots=True)
class _RowRecord:
    owner: object
    cache_generation: int
    rows: list[Rows] = field(default_factory=list)
    generations: list[NDArray[np.uint32]] = field(default_factory=list)
    positions: list[NDArray[np.int64]] = field(default_factory=list)
    finished: bool = False


class RowRecency:
    """For a policy that takes rows."""

    def __init__(self, policy: RowPolicy, slots: SlotTable) -> None:
        self._policy = policy
        self._slots = slots
        self._cache_generation = 0

    def _record(self, ctx: ReqContext) -> _RowRecord:
        record = ctx.get_state(_RowRecord)
        if (
            record is None
            or record.owner is not self
            or record.cache_generation != self._cache_generation
        ):
            record = _RowRecord(self, self._cache_generation)
            ctx.set_state(record)
        return record

    def store_misses(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Absent keys have no row, and no recency to learn from."""

    def access(
        self, keys: Sequence[OffloadKey], rows: Rows, ctx: ReqContext, *, inserted: bool
    ) -> None:
        """Note the use of rows; their generations tell later whether they still hold it."""
        if not len(rows):
            return
        record = self._record(ctx)
        assert not record.finished, f"request {ctx.req_id} has ended, yet uses new chunks"
        positions = positions_of(keys, ctx)
        record.rows.append(rows)
        record.generations.append(self._slots.generation[rows])
        record.positions.append(positions)
        if not inserted:
            self._policy.access_rows(rows, positions, ctx)

    def finish(self, ctx: ReqContext) -> None:
        """Touch what the request used and what is still there, in prefix order."""
        record = self._record(ctx)
        if record.finished or not record.rows:
            record.finished = True
            return
        record.finished = True
        rows = np.concatenate(record.rows)
        positions = np.concatenate(record.positions)
        live = self._slots.generation[rows] == np.concatenate(record.generations)
        live &= self._slots.is_resident(rows)
        rows, positions = rows[live], positions[live]
        once = np.sort(np.unique(rows, return_index=True)[1])
        rows, positions = rows[once], positions[once]
        if len(positions) and positions.min() != UNKNOWN_POSITION:
            rows = rows[np.argsort(positions, kind="stable")]
        if len(rows):
            self._policy.touch_rows(rows)
        record.rows, record.generations, record.positions = [], [], []

    def reset(self) -> None:
        """Records made before mean nothing."""
        self._cache_generation += 1


_KEY_METHODS = ("touch", "on_store_miss", "on_request_access", "on_request_finished")


def recency_for(policy: CachePolicy, slots: SlotTable) -> Recency:
    """The batch form if the policy has it and no subclass has since changed a key method."""
    if isinstance(policy, RowPolicy) and keeps_batch_form(policy, "touch_rows", *_KEY_METHODS):
        return RowRecency(policy, slots)
    return KeyRecency(policy)
