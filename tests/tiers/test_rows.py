"""Rows and the keys in them: readers, quarantine, eviction and the counts that must agree."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tests.tiers.doubles import key, keys
from tiers.base import OffloadKey, ReqContext
from tiers.policies.arc import ARCCachePolicy
from tiers.policies.base import CachePolicy
from tiers.policies.lru import LRUCachePolicy
from tiers.rows import PrimaryRows, distinct_batches
from tiers.slots import IllegalTransition, Rows, SlotState

POLICIES = pytest.mark.parametrize("kind", [LRUCachePolicy, ARCCachePolicy])
Told = list[tuple[list[OffloadKey], bool, bool]]


def make(kind: type[CachePolicy], num_rows: int = 4) -> tuple[PrimaryRows, Told]:
    told: Told = []

    def note(k: Sequence[OffloadKey], rows: Rows | list[int], removed: bool, meta: bool) -> None:
        assert len(k) == len(rows)
        told.append((list(k), removed, meta))

    return PrimaryRows(num_rows, kind(num_rows), note), told


def at(*rows: int) -> Rows:
    return np.array(rows, dtype=np.int32)


def reserve(pool: PrimaryRows, *numbers: int) -> Rows:
    rows, _ = pool.reserve(keys(*numbers), ReqContext("r"), set())
    assert rows is not None
    return rows


def fill(pool: PrimaryRows, *numbers: int) -> Rows:
    rows = reserve(pool, *numbers)
    pool.complete(rows)
    return rows


@POLICIES
def test_keys_are_found_where_they_lie(kind: type[CachePolicy]) -> None:
    pool, told = make(kind)
    rows = fill(pool, 1, 2)
    assert pool.find(keys(2, 9, 1)).tolist() == [rows[1], -1, rows[0]]
    assert pool.find([]).tolist() == []
    assert pool.keys_of(rows) == keys(1, 2)
    assert (pool.key_of(int(rows[0])), pool.key_of(3)) == (key(1), None)
    assert pool.resident().tolist() == [0, 1]
    assert told == [(keys(1, 2), False, False)]
    pool.check()


@POLICIES
def test_just_the_deficit_is_evicted_and_nothing_if_it_cannot_be_met(
    kind: type[CachePolicy],
) -> None:
    pool, told = make(kind)
    rows = fill(pool, 1, 2, 3)
    pool.hold(rows[:2])
    told.clear()
    assert pool.reserve(keys(4, 5, 6), ReqContext("r"), set()) == (None, [])
    assert pool.reserve(keys(4, 5), ReqContext("r"), {key(3)}) == (None, [])
    assert told == []
    got, evicted = pool.reserve(keys(4, 5), ReqContext("r"), set())
    assert got is not None
    assert sorted(got.tolist()) == [2, 3]
    assert evicted == keys(3)
    assert told == [(keys(3), True, False)]
    assert pool.evictions == 1
    pool.check()


@POLICIES
def test_readers_are_counted_and_the_last_one_lets_go(kind: type[CachePolicy]) -> None:
    pool, _ = make(kind)
    rows = fill(pool, 1, 2)
    pool.hold(rows)
    pool.hold(rows[:1])
    assert (pool.num_evictable, pool.num_busy) == (0, 2)
    pool.unhold(rows)
    assert (pool.num_evictable, pool.num_busy) == (1, 1)
    pool.unhold(rows[:1])
    pool.unhold(at())
    assert (pool.num_evictable, pool.num_busy) == (2, 0)
    pool.check()


@POLICIES
def test_what_is_not_ready_cannot_be_held_nor_what_is_not_read_let_go(
    kind: type[CachePolicy],
) -> None:
    pool, _ = make(kind)
    ready, reserved = fill(pool, 1), reserve(pool, 2)
    for rows in (reserved, np.concatenate((ready, reserved)), at(3)):
        with pytest.raises(AssertionError, match="not ready"):
            pool.hold(rows)
    for rows in (reserved, ready, at(3)):
        with pytest.raises(AssertionError, match="neither read nor quarantined"):
            pool.unhold(rows)
    pool.check()


@POLICIES
def test_a_failed_write_frees_and_says_so(kind: type[CachePolicy]) -> None:
    pool, told = make(kind)
    ended: list[OffloadKey] = []
    pool.on_resolved = ended.extend
    rows = reserve(pool, 1, 2)
    pool.fail(rows[:1])
    pool.complete(rows[1:])
    assert told == [(keys(1), True, True), (keys(2), False, False)]
    assert ended == keys(1, 2)
    assert pool.slots.state(int(rows[0])) is SlotState.FREE
    with pytest.raises(IllegalTransition):
        pool.complete(rows[1:])
    pool.check()


@POLICIES
def test_rows_of_a_lost_writer_stay_apart_until_it_is_done(kind: type[CachePolicy]) -> None:
    pool, told = make(kind, 2)
    rows = reserve(pool, 1, 2)
    pool.abandon(rows[:1])
    assert pool.find(keys(1)).tolist() == [-1]
    assert told == [(keys(1), True, True)]
    assert pool.reserve(keys(3), ReqContext("r"), set()) == (None, [])
    assert pool.quarantine_claims().tolist() == [1, 0]
    pool.check()
    pool.end_write(rows, success=True)  # too late for the first, in time for the second
    assert pool.find(keys(1, 2)).tolist() == [-1, 1]
    assert pool.slots.state(int(rows[0])) is SlotState.FREE
    pool.check()


@POLICIES
def test_forgotten_rows_stay_apart_for_each_who_may_touch_them(kind: type[CachePolicy]) -> None:
    pool, told = make(kind)
    ready = fill(pool, 1, 2)
    reserved = reserve(pool, 3)
    pool.hold(ready[:1])
    pool.hold(ready[:1])
    told.clear()
    assert pool.forget(np.concatenate((ready, reserved))) == 3
    assert sorted(told) == sorted(
        [(keys(3), True, True), (keys(1), True, False), (keys(2), True, False)]
    )
    assert pool.find(keys(1, 2, 3)).tolist() == [-1] * 3
    assert [pool.slots.state(row).name for row in range(4)] == [
        "QUARANTINED",
        "FREE",
        "QUARANTINED",
        "FREE",
    ]
    pool.check()
    pool.unhold(ready[:1])
    assert pool.slots.state(0) is SlotState.QUARANTINED
    pool.unhold(ready[:1])
    assert pool.slots.state(0) is SlotState.FREE
    with pytest.raises(AssertionError, match="row 0"):
        pool.unhold(ready[:1])
    pool.settle(reserved)
    assert pool.slots.num_free == 4
    pool.check()


def test_a_mixed_batch_lets_go_of_ready_and_quarantined_rows() -> None:
    pool, _ = make(LRUCachePolicy)
    rows = fill(pool, 1, 2)
    pool.hold(rows)
    pool.forget(rows[:1])
    pool.unhold(rows)
    assert (pool.num_busy, pool.num_evictable, pool.slots.num_free) == (0, 1, 3)
    pool.check()


def test_rows_are_wiped_before_they_are_given_out_again() -> None:
    pool, _ = make(LRUCachePolicy, 2)
    wiped: list[int] = []
    pool.before_reuse = wiped.append
    fill(pool, 1, 2)
    reserve(pool, 3)
    assert wiped == [0, 1, int(pool.find(keys(3))[0])]


@POLICIES
def test_after_clear_the_order_of_use_begins_anew(kind: type[CachePolicy]) -> None:
    pool, _ = make(kind)
    pool.forget(fill(pool, 1, 2, 3))
    pool.clear()
    fill(pool, 2)
    fill(pool, 1, 3, 4)
    _, evicted = pool.reserve(keys(5), ReqContext("n"), set())
    assert evicted == keys(2)
    pool.check()


@POLICIES
def test_the_check_sees_counts_and_keys_that_are_wrong(kind: type[CachePolicy]) -> None:
    for spoil, message in (
        (lambda pool: setattr(pool, "_num_evictable", 3), "ready and unread, not 3"),
        (lambda pool: pool._claims.update({0: 1}), "0 rows quarantined, 1 claimed"),
        (lambda pool: pool._keys.__setitem__(0, None), "row 0 is READY, its key None"),
        (lambda pool: pool._keys.__setitem__(0, key(2)), "row 0 holds"),
    ):
        pool, _ = make(kind)
        fill(pool, 1, 2)
        pool.check()
        spoil(pool)
        with pytest.raises(AssertionError, match=message):
            pool.check()
    pool, _ = make(kind)
    fill(pool, 1)
    pool._keys[0] = None
    pool.check(keys=False)


@given(st.lists(st.integers(0, 5)))
def test_batches_are_without_repetition_and_lose_nothing(rows: list[int]) -> None:
    batches = distinct_batches(np.array(rows, dtype=np.int32))
    assert sorted(row for batch in batches for row in batch.tolist()) == sorted(rows)
    assert all(len(set(batch.tolist())) == len(batch) > 0 for batch in batches)
    assert len(batches) == max((rows.count(row) for row in rows), default=0)


@POLICIES
def test_what_was_passed_over_while_read_is_evicted_later(kind: type[CachePolicy]) -> None:
    pool, _ = make(kind, 3)
    oldest = fill(pool, 1)
    fill(pool, 2)
    fill(pool, 3)
    pool.hold(oldest)
    fill(pool, 4)
    assert pool.find(keys(1, 2))[0] == oldest[0]
    assert pool.find(keys(2)).tolist() == [-1]
    pool.unhold(oldest)
    _, evicted = pool.reserve(keys(5, 6, 7), ReqContext("n"), set())
    assert sorted(evicted) == keys(1, 3, 4)
    pool.check()
