"""A request's use of chunks is one use: once per key, committed at its end, in prefix order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tests.tiers.doubles import key, keys
from tiers.base import OffloadKey, ReqContext
from tiers.policies.arc import ARCCachePolicy
from tiers.policies.base import CachePolicy
from tiers.policies.lru import LRUCachePolicy
from tiers.primary import CPUOffloadingManager
from tiers.recency import KeyRecency, RowRecency, recency_for
from tiers.slots import SlotTable


class Recorded(ARCCachePolicy):
    """ARC that writes down what it is told."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.told: list[tuple[str, list[OffloadKey]]] = []
        self.ended: list[tuple[list[list[OffloadKey]], set[OffloadKey], set[OffloadKey]]] = []

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self.told.append(("miss", list(keys)))

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self.told.append(("access", list(keys)))

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self.ended.append(([list(g) for g in key_groups], insertion_only_keys, reused_keys))


@pytest.fixture
def tier() -> CPUOffloadingManager:
    return CPUOffloadingManager(8, "Recorded", __name__)


def recorded(tier: CPUOffloadingManager) -> Recorded:
    # loaded anew by its module path, so it is another class of the same name
    policy = tier._policy
    assert type(policy).__name__ == "Recorded"
    return policy  # type: ignore[return-value]


def store(tier: CPUOffloadingManager, ctx: ReqContext, chunks: list[OffloadKey]) -> None:
    output = tier.prepare_store(chunks, ctx)
    assert output is not None
    tier.complete_store(output.keys_to_store, ctx)


def test_a_batch_policy_is_driven_by_rows_unless_a_subclass_changed_a_key_method() -> None:
    class Plain(LRUCachePolicy):
        pass

    class Own(LRUCachePolicy):
        def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
            super().touch(keys, req_context)

    kinds: list[tuple[type[CachePolicy], type]] = [
        (LRUCachePolicy, RowRecency),
        (Plain, RowRecency),
        (Own, KeyRecency),
        (ARCCachePolicy, KeyRecency),
    ]
    for policy, expected in kinds:
        assert isinstance(recency_for(policy(4), SlotTable(4)), expected)


def test_absent_keys_are_told_once_per_request(tier: CPUOffloadingManager) -> None:
    ctx = ReqContext("r")
    tier.prepare_store(keys(1, 2), ctx)
    tier.complete_store(keys(1, 2), ctx, success=False)
    tier.prepare_store(keys(2, 3), ctx)
    assert recorded(tier).told == [("miss", keys(1, 2)), ("miss", keys(3))]
    tier.prepare_store(keys(1), ReqContext("other"))
    assert recorded(tier).told[-1] == ("miss", keys(1))


def test_the_end_commits_each_key_once_with_what_was_reused(tier: CPUOffloadingManager) -> None:
    store(tier, ReqContext("earlier"), keys(1, 2))
    ctx = ReqContext("r")
    store(tier, ctx, keys(1, 3, 4))
    tier.prepare_load(keys(1, 3), ctx)  # 3 is its own, not a reuse
    tier.on_request_finished(ctx)
    tier.on_request_finished(ctx)
    ((groups, inserted, reused),) = recorded(tier).ended
    assert groups == [keys(1, 3, 4)]
    assert (inserted, reused) == (set(keys(3, 4)), set(keys(1)))


def test_groups_are_committed_apart_and_by_position_where_all_are_known(
    tier: CPUOffloadingManager,
) -> None:
    ctx = ReqContext("r")
    first = [key(n, 0) for n in (3, 1, 2)]
    second = [key(n, 1) for n in (6, 5)]
    for chunk, position in zip(first, (3, 1, 2), strict=True):
        ctx.set_offload_key_position(chunk, position)
    ctx.set_offload_key_position(second[0], 9)
    store(tier, ctx, [first[0], second[0], *first[1:], second[1]])
    tier.on_request_finished(ctx)
    ((groups, _, _),) = recorded(tier).ended
    assert groups == [[first[1], first[2], first[0]], second]


def test_a_request_that_used_nothing_commits_nothing(tier: CPUOffloadingManager) -> None:
    tier.on_request_finished(ReqContext("r"))
    assert recorded(tier).ended == []


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_an_ended_request_cannot_use_new_chunks(policy: str) -> None:
    tier = CPUOffloadingManager(4, policy)
    ctx = ReqContext("r")
    store(tier, ctx, keys(1))
    tier.on_request_finished(ctx)
    with pytest.raises(AssertionError, match="has ended"):
        tier.prepare_store(keys(2), ctx)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_records_from_before_a_reset_mean_nothing(policy: str) -> None:
    tier = CPUOffloadingManager(2, policy)
    old = ReqContext("old")
    store(tier, old, keys(1, 2))
    tier.reset_cache()
    store(tier, ReqContext("a"), keys(1))
    store(tier, ReqContext("b"), keys(2))
    tier.on_request_finished(old)  # would make 1 the newest
    output = tier.prepare_store(keys(3), ReqContext("c"))
    assert output is not None
    assert output.evicted_keys == keys(1)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_two_pools_keep_apart_what_one_request_does_in_them(policy: str) -> None:
    one, other = CPUOffloadingManager(2, policy), CPUOffloadingManager(2, policy)
    ctx = ReqContext("r")
    store(one, ctx, keys(1))
    one.on_request_finished(ctx)
    store(other, ctx, keys(2))  # not "has ended"
    other.on_request_finished(ctx)


def victims(tier: CPUOffloadingManager, count: int) -> list[OffloadKey]:
    output = tier.prepare_store([key(1000 + n) for n in range(count)], ReqContext("new"))
    assert output is not None
    return output.evicted_keys


def test_rows_that_changed_hands_meanwhile_are_not_touched() -> None:
    tier = CPUOffloadingManager(2, "lru")
    early = ReqContext("early")
    store(tier, early, keys(1))
    assert tier.prepare_store(keys(2), ReqContext("x")) is not None
    tier.complete_store(keys(2), ReqContext("x"))
    late = ReqContext("late")
    store(tier, late, keys(3))  # takes the row of 1
    assert tier.rows.find(keys(1)).tolist() == [-1]
    other = ReqContext("z")
    tier.prepare_load(keys(2), other)
    tier.complete_load(keys(2), other)
    tier.on_request_finished(other)
    tier.on_request_finished(early)  # must not make 3 newer than 2
    assert victims(tier, 1) == keys(3)


def test_the_whole_request_counts_as_used_when_it_ends() -> None:
    tier = CPUOffloadingManager(5, "lru")
    a, b = ReqContext("a"), ReqContext("b")
    for position, chunk in enumerate(keys(1, 2, 3)):
        a.set_offload_key_position(chunk, position)
    for position, chunk in enumerate(keys(4, 5)):
        b.set_offload_key_position(chunk, position)
    store(tier, a, keys(1, 2, 3))
    store(tier, b, keys(4, 5))
    tier.on_request_finished(a)
    assert victims(tier, 5) == keys(5, 4, 3, 2, 1)


def test_before_any_end_the_older_request_goes_first_from_its_tail() -> None:
    tier = CPUOffloadingManager(5, "lru")
    a, b = ReqContext("a"), ReqContext("b")
    for position, chunk in enumerate(keys(1, 2, 3)):
        a.set_offload_key_position(chunk, position)
    for position, chunk in enumerate(keys(4, 5)):
        b.set_offload_key_position(chunk, position)
    store(tier, a, keys(1, 2, 3))
    store(tier, b, keys(4, 5))
    assert victims(tier, 5) == keys(3, 2, 1, 5, 4)
