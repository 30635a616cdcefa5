"""The manager by its public contract: stores cascade, lookups promote, requests and steps end."""

from __future__ import annotations

import pytest

from tests.tiers.doubles import ScriptedTier, key, keys, make_manager, pattern
from tiers.base import (
    CacheHitSource,
    Locality,
    LookupResult,
    Medium,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
)
from tiers.manager import TieringOffloadingManager

HIT, PENDING, MISS, RETRY = (
    LookupResult.HIT,
    LookupResult.HIT_PENDING,
    LookupResult.MISS,
    LookupResult.RETRY,
)


def step(manager: TieringOffloadingManager, *new: str) -> None:
    manager.on_schedule_end(ScheduleEndContext(new_req_ids=new, preempted_req_ids=()))


def begin(manager: TieringOffloadingManager, name: str = "r") -> ReqContext:
    ctx = ReqContext(name)
    manager.on_new_request(ctx)
    return ctx


def store(manager: TieringOffloadingManager, ctx: ReqContext, *numbers: int) -> None:
    output = manager.prepare_store(keys(*numbers), ctx)
    assert output is not None
    manager.complete_store(output.keys_to_store, ctx)


def test_a_store_is_readable_when_complete_and_cascades_to_every_tier() -> None:
    manager, (first, second) = make_manager(4, tiers=2)
    ctx = begin(manager)
    output = manager.prepare_store(keys(1, 2), ctx)
    assert output is not None
    assert manager.lookup(key(1), ctx) is PENDING
    assert not first.stores
    manager.complete_store(keys(1, 2), ctx)
    assert manager.lookup(key(1), ctx) is HIT
    assert [list(tier.stores[0].keys) for tier in (first, second)] == [keys(1, 2)] * 2
    assert manager.has_pending_work()
    # both copies pin the rows: nothing can be evicted until both have ended
    assert manager.prepare_store(keys(3, 4, 5), ctx) is None
    first.end_all()
    assert manager.prepare_store(keys(3, 4, 5), ctx) is None
    second.end_all()
    assert manager.prepare_store(keys(3, 4, 5), ctx) is not None


def test_a_failed_store_is_freed_and_not_cascaded() -> None:
    manager, (tier,) = make_manager(4, tiers=1, enable_events=True)
    ctx = begin(manager)
    manager.prepare_store(keys(1), ctx)
    manager.complete_store(keys(1), ctx, success=False)
    assert manager.lookup(key(1), ctx) is MISS
    assert not tier.stores
    (event,) = manager.take_events()
    assert (event.removed, event.metadata_only) == (True, True)


def test_a_promotion_is_reserved_at_lookup_and_submitted_once_at_step_end() -> None:
    manager, (tier,) = make_manager(4, tiers=1)
    tier.chunks = {k: pattern(k) for k in keys(1, 2)}
    a, b = begin(manager, "a"), begin(manager, "b")
    assert [manager.lookup(k, a) for k in keys(1, 2, 3)] == [PENDING, PENDING, MISS]
    assert manager.lookup(key(1), b) is PENDING  # somebody else's, not a second one
    assert not tier.loads
    step(manager)
    (load,) = tier.loads
    assert (list(load.keys), load.is_promotion) == (keys(1, 2), True)
    assert manager.get_load_source(key(1), a) is CacheHitSource.DISK
    tier.end(load.job_id, keys(1))
    assert [manager.lookup(k, a) for k in keys(1, 2)] == [HIT, PENDING]  # the tier has 2 still
    assert manager.get_load_source(key(1), b) is CacheHitSource.HOST


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        (TierFilter.ALL, PENDING),
        (TierFilter(), MISS),
        (TierFilter((TierMatcher(Medium.STORAGE),)), PENDING),
        (TierFilter((TierMatcher(Medium.CPU),)), MISS),
        (TierFilter((TierMatcher(None, Locality.REMOTE),)), PENDING),  # the tier says nothing of it
    ],
)
def test_a_request_chooses_the_tiers_it_loads_from(
    wanted: TierFilter, answer: LookupResult
) -> None:
    manager, (tier,) = make_manager(4, tiers=1)
    tier.chunks[key(1)] = pattern(key(1))
    ctx = ReqContext("r", load_tier_filter=wanted)
    manager.on_new_request(ctx)
    assert manager.lookup(key(1), ctx) is answer


def test_a_later_hit_wins_over_an_earlier_dont_know() -> None:
    manager, (first, second) = make_manager(4, tiers=2)
    first.unsure = {key(1), key(2)}
    second.chunks[key(1)] = pattern(key(1))
    ctx = begin(manager)
    assert [manager.lookup(k, ctx) for k in keys(1, 2, 3)] == [PENDING, RETRY, MISS]


def test_without_room_a_promotion_is_a_miss_at_once() -> None:
    manager, (tier,) = make_manager(2, tiers=1)
    ctx = begin(manager)
    assert manager.prepare_store(keys(1, 2), ctx) is not None
    tier.chunks[key(3)] = pattern(key(3))
    assert manager.lookup(key(3), ctx) is MISS


def test_a_report_of_an_unknown_job_is_not_passed_over() -> None:
    manager, (first, second) = make_manager(4, tiers=2)
    ctx = begin(manager)
    store(manager, ctx, 1)
    second.running[first.stores[0].job_id] = first.stores[0]
    second.end(first.stores[0].job_id)
    with pytest.raises(AssertionError, match="not its own"):
        manager.prepare_store(keys(2), ctx)


def test_tiers_hear_of_the_end_once_nothing_can_still_cascade() -> None:
    manager, (tier,) = make_manager(4, tiers=1)
    ctx = begin(manager)
    manager.prepare_store(keys(1), ctx)
    manager.on_request_finished(ctx)
    assert tier.ended == []
    manager.complete_store(keys(1), ctx)
    assert tier.ended == ["r"]


def test_a_request_level_tier_gets_what_was_there_and_what_is_being_written() -> None:
    manager, (tier,) = make_manager(6, tiers=1)
    other = begin(manager, "other")
    store(manager, other, 1)
    manager.prepare_store(keys(2), other)
    tier.stores.clear()
    tier.wanted = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
    ctx = ReqContext("r")
    assert manager.on_new_request(ctx).policy is OffloadPolicy.REQUEST_LEVEL
    output = manager.prepare_store(keys(1, 2, 3), ctx)
    assert output is not None
    assert output.keys_to_store == keys(3)
    assert [list(job.keys) for job in tier.stores] == [keys(1)]
    manager.on_request_finished(ctx)
    manager.complete_store(keys(3), ctx)
    step(manager)
    assert tier.ended == []  # chunk 2 is parked for it
    manager.complete_store(keys(2), other)
    step(manager)
    assert keys(2) in [list(job.keys) for job in tier.stores if job.req_context is ctx]
    assert tier.ended == ["r"]


def test_a_reset_empties_memory_keeps_tiers_and_holds_promotions() -> None:
    manager, (tier,) = make_manager(4, tiers=1)
    ctx = begin(manager)
    store(manager, ctx, 1, 2)
    tier.end_all()
    manager.reset_cache()
    assert manager.lookup(key(1), ctx) is MISS  # though the tier has it
    manager.on_reset_flushed()
    assert manager.lookup(key(1), ctx) is PENDING
    assert manager.prepare_store(keys(3, 4, 5), ctx) is not None


def test_rows_that_moved_at_a_reset_stay_apart_until_their_transfer_ends() -> None:
    manager, _ = make_manager(2)
    ctx = begin(manager)
    store(manager, ctx, 1)
    manager.prepare_load(keys(1), ctx)
    manager.prepare_store(keys(2), ctx)
    manager.reset_cache()
    assert manager.prepare_store(keys(3), ctx) is None
    manager.complete_load(keys(1), ctx)
    assert manager.prepare_store(keys(3), ctx) is not None
    manager.on_reset_flushed()
    assert manager.prepare_store(keys(4), ctx) is not None


def test_unpinning_what_is_not_pinned_is_an_error_and_takes_nobodys_pin() -> None:
    manager, _ = make_manager(1)
    a, b = begin(manager, "a"), begin(manager, "b")
    store(manager, a, 1)
    manager.prepare_load(keys(1), a)
    manager.complete_load(keys(1), a)
    with pytest.raises(AssertionError, match="has not pinned"):
        manager.complete_load(keys(1), a)
    manager.prepare_load(keys(1), b)
    assert manager.prepare_store(keys(2), b) is None


def test_a_tier_that_fails_to_end_keeps_the_memory_and_lets_others_end() -> None:
    ended = []

    class Failing(ScriptedTier):
        def shutdown(self) -> None:
            ended.append(self.tier_type)
            if self.tier_type == "scripted0":
                raise OSError("stuck")

    manager, _ = make_manager(2)
    view = manager.primary_tier.get_kv_memoryview()
    tiers = [Failing(view, "scripted0"), Failing(view, "scripted1")]
    tiered = TieringOffloadingManager(manager.primary_tier, list(tiers), tier_poll_interval_s=0)
    with pytest.raises(OSError, match="stuck"):
        tiered.shutdown()
    assert ended == ["scripted0", "scripted1"]
    assert tiered.primary_tier.get_kv_memoryview() is not None
