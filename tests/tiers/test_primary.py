"""The primary tier by its public contract: reservation, pins, events, reuse filter, figures."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.tiers.doubles import ROW_BYTES, key, keys
from tiers.base import CacheHitSource, LookupResult, Medium, OffloadKey, ReqContext
from tiers.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from tiers.primary import (
    CPULoadStoreSpec,
    CPUOffloadingInfo,
    CPUOffloadingManager,
    CPUOffloadingMetrics,
    CPUPrimaryTierOffloadingManager,
)
from tiers.region import MemoryRegion
from tiers.slots import SlotState

HIT, PENDING, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS
POLICIES = pytest.mark.parametrize("policy", ["lru", "arc"])


def reserve(
    tier: CPUOffloadingManager, numbers: list[int], ctx: ReqContext | None = None
) -> tuple[list[OffloadKey], list[int], list[OffloadKey]] | None:
    output = tier.prepare_store(keys(*numbers), ctx or ReqContext("r"))
    if output is None:
        return None
    assert isinstance(output.store_spec, CPULoadStoreSpec)
    return output.keys_to_store, output.store_spec.chunk_ids.tolist(), output.evicted_keys


def store(tier: CPUOffloadingManager, *numbers: int, ctx: ReqContext | None = None) -> list[int]:
    ctx = ctx or ReqContext(f"store{numbers}")
    reserved = reserve(tier, list(numbers), ctx)
    assert reserved is not None
    tier.complete_store(reserved[0], ctx)
    return reserved[1]


def states(tier: CPUOffloadingManager, *numbers: int) -> list[LookupResult]:
    return [tier.lookup(k, ReqContext("look")) for k in keys(*numbers)]


@POLICIES
def test_what_is_reserved_is_pending_then_readable(policy: str) -> None:
    tier = CPUOffloadingManager(4, policy)
    assert reserve(tier, [1, 2]) == (keys(1, 2), [0, 1], [])
    assert states(tier, 1, 2, 3) == [PENDING, PENDING, MISS]
    tier.complete_store(keys(1), ReqContext("r"))
    assert states(tier, 1, 2, 3) == [HIT, PENDING, MISS]


@POLICIES
def test_an_offer_is_all_or_nothing_and_keeps_what_it_names(policy: str) -> None:
    tier = CPUOffloadingManager(4, policy)
    store(tier, 1)
    store(tier, 2)
    store(tier, 3)
    # 1 is the oldest, but the offer names it: it is neither stored again nor evicted
    assert reserve(tier, [1, 4, 5]) == (keys(4, 5), [3, 1], keys(2))
    assert reserve(tier, [6, 7, 8]) is None
    assert states(tier, 1, 3, 4, 5) == [HIT, HIT, PENDING, PENDING]  # nothing was evicted for it
    assert reserve(tier, [1, 3]) == ([], [], [])


@POLICIES
def test_protected_chunks_can_make_room_impossible(policy: str) -> None:
    tier = CPUOffloadingManager(2, policy)
    store(tier, 1, 2)
    assert reserve(tier, [1, 3, 4]) is None
    assert states(tier, 1, 2) == [HIT, HIT]
    assert reserve(tier, [1, 3]) == (keys(3), [1], keys(2))


@POLICIES
def test_an_offer_that_repeats_a_key_reserves_it_once(policy: str) -> None:
    tier = CPUOffloadingManager(4, policy)
    assert reserve(tier, [1, 1, 2, 1]) == (keys(1, 2), [0, 1], [])
    tier.complete_store(keys(1, 1, 2), ReqContext("r"))
    assert states(tier, 1, 2) == [HIT, HIT]
    tier.rows.check()


@POLICIES
def test_a_failed_store_frees_its_rows_and_the_last_freed_is_used_first(policy: str) -> None:
    tier = CPUOffloadingManager(4, policy)
    reserve(tier, [1, 2])
    tier.complete_store(keys(2), ReqContext("r"), success=False)
    assert states(tier, 1, 2) == [PENDING, MISS]
    reserved = reserve(tier, [3])
    assert reserved is not None
    assert reserved[1] in ([1], [2])
    tier.rows.check()


@POLICIES
@pytest.mark.parametrize("success", [True, False])
def test_completing_a_whole_offer_leaves_alone_what_was_there(policy: str, success: bool) -> None:
    tier = CPUOffloadingManager(4, policy, enable_events=True)
    store(tier, 1)
    assert list(tier.take_events())
    reserve(tier, [1, 2])
    tier.complete_store(keys(1, 2, 9), ReqContext("r"), success)  # 9 was never offered
    assert states(tier, 1, 2, 9) == [HIT, HIT if success else MISS, MISS]
    events = list(tier.take_events())
    assert [(e.keys, e.removed) for e in events] == [(keys(2), not success)]
    tier.rows.check()


@POLICIES
def test_pinned_chunks_are_not_evicted_and_each_pin_counts(policy: str) -> None:
    tier = CPUOffloadingManager(2, policy)
    store(tier, 1, 2)
    ctx = ReqContext("reader")
    for _ in range(2):
        spec = tier.prepare_load(keys(2, 1), ctx)
        assert isinstance(spec, CPULoadStoreSpec)
        assert spec.chunk_ids.tolist() == [1, 0]  # parallel to the keys
        assert spec.chunk_ids.dtype == np.int32
    tier.complete_load(keys(1, 2), ctx)
    assert reserve(tier, [3]) is None
    tier.complete_load(keys(1), ctx)
    assert reserve(tier, [3]) == (keys(3), [0], keys(1))
    assert reserve(tier, [4]) is None


def test_a_key_pinned_twice_in_one_call_is_unpinned_twice() -> None:
    tier = CPUOffloadingManager(1)
    store(tier, 1)
    ctx = ReqContext("reader")
    tier.prepare_load(keys(1, 1), ctx)
    tier.complete_load(keys(1), ctx)
    assert reserve(tier, [2]) is None
    tier.complete_load(keys(1), ctx)
    assert reserve(tier, [2]) is not None


@pytest.mark.parametrize("resident", [False, True])
def test_only_readable_chunks_can_be_pinned(resident: bool) -> None:
    tier = CPUOffloadingManager(2)
    if resident:
        reserve(tier, [1])
    with pytest.raises(AssertionError):
        tier.prepare_load(keys(1), ReqContext("reader"))
    tier.rows.check()


def test_a_copy_to_a_tier_pins_but_is_not_a_use() -> None:
    for used, victim in ((False, 1), (True, 2)):
        tier = CPUPrimaryTierOffloadingManager(2, MemoryRegion(2, ROW_BYTES), "lru")
        store(tier, 1)
        store(tier, 2)
        ctx = ReqContext("reader")
        (tier.prepare_load if used else tier.prepare_read)(keys(1), ctx)
        assert reserve(tier, [3, 4]) is None
        tier.complete_read(keys(1), ctx)
        tier.on_request_finished(ctx)
        reserved = reserve(tier, [3])
        assert reserved is not None
        assert reserved[2] == keys(victim)


def test_reads_and_writes_of_tiers_have_names_of_their_own() -> None:
    tier = CPUPrimaryTierOffloadingManager(num_chunks=2, mmap_region=MemoryRegion(2, ROW_BYTES))
    ctx = ReqContext("r")
    assert tier.prepare_write(keys(1), ctx) is not None
    assert tier._get_num_free_chunks() == 1
    tier.complete_write(keys(1), ctx, True)
    tier.prepare_read(keys(1), ctx)
    tier.complete_read(keys(1), ctx)
    assert states(tier, 1) == [HIT]
    assert tier._num_allocated_chunks == 1
    assert tier.get_load_source(key(1), ctx) is CacheHitSource.HOST


def test_events_tell_what_came_and_went_and_are_handed_over() -> None:
    tier = CPUOffloadingManager(2, enable_events=True)
    reserve(tier, [1, 2])
    assert list(tier.take_events()) == []
    tier.complete_store(keys(1, 2), ReqContext("r"))
    reserve(tier, [3])
    stored, removed = tier.take_events()
    assert (stored.keys, stored.removed, stored.medium) == (keys(1, 2), False, Medium.CPU)
    assert (removed.removed, removed.metadata_only) == (True, False)
    assert list(tier.take_events()) == []


def test_a_failed_reservation_is_told_only_while_its_key_is_absent() -> None:
    tier = CPUOffloadingManager(2, enable_events=True)
    reserve(tier, [1, 2])
    tier.complete_store(keys(1, 2), ReqContext("r"), success=False)
    reserve(tier, [2])
    (event,) = tier.take_events()
    assert (event.keys, event.metadata_only) == (keys(1), True)
    tier.complete_store(keys(2), ReqContext("r"), success=False)
    reserve(tier, [2])
    assert list(tier.take_events()) == []


def test_without_events_nothing_is_kept() -> None:
    tier = CPUOffloadingManager(2)
    store(tier, 1)
    assert tier.events is None
    assert list(tier.take_events()) == []


def test_a_chunk_is_stored_once_it_was_offered_often_enough() -> None:
    tier = CPUOffloadingManager(4, store_threshold=2)
    assert reserve(tier, [1, 2]) == ([], [], [])
    assert reserve(tier, [2, 3]) == (keys(2), [0], [])
    stats = tier.get_stats()
    assert stats is not None
    assert stats.reduce()[CPUOffloadingMetrics.STORES_SKIPPED] == 3
    stats = tier.get_stats()
    assert stats is not None
    assert stats.reduce()[CPUOffloadingMetrics.STORES_SKIPPED] == 0


def test_the_filter_forgets_the_keys_seen_longest_ago_but_none_of_this_offer() -> None:
    tier = CPUOffloadingManager(8, store_threshold=2, max_tracker_size=2)
    reserve(tier, [1, 2])
    reserve(tier, [3])  # 1 is forgotten
    assert reserve(tier, [1]) == ([], [], [])
    assert reserve(tier, [3, 4, 5]) == (keys(3), [0], [])
    assert list(tier.counts) == keys(3, 4, 5)


def test_figures_are_fractions_of_chunks_pinned() -> None:
    tier = CPUOffloadingManager(4)
    store(tier, 1, 2)
    tier.prepare_load(keys(1), ReqContext("reader"))
    reserve(tier, [3])
    stats = tier.get_stats()
    assert stats is not None
    figures = stats.reduce()
    assert figures[CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC] == 0.5
    assert figures[CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC] == 0.25
    assert figures[CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC] == 0.25
    assert figures[f"{CPUOffloadingMetrics.CPU_ALLOCATION_SIZE}_count"] == 2
    assert figures[f"{CPUOffloadingMetrics.CPU_ALLOCATION_SIZE}_sum"] == 3
    assert CPUOffloadingMetrics.STORES_SKIPPED not in figures


def test_a_reset_forgets_everything_and_sets_apart_what_moves() -> None:
    tier = CPUOffloadingManager(4, "lru", enable_events=True)
    ctx = ReqContext("r")
    store(tier, 1, 2)
    tier.prepare_load(keys(1), ctx)
    tier.prepare_load(keys(1), ctx)
    reserve(tier, [3])
    tier.reset_cache()
    assert states(tier, 1, 2, 3) == [MISS] * 3
    assert list(tier.take_events()) == []
    assert tier.rows.slots.count(SlotState.QUARANTINED) == 2
    # the same key again, while its old row is still read: completions of old ones come first
    reserve(tier, [1])
    tier.complete_load(keys(1), ctx)
    assert tier.rows.slots.count(SlotState.QUARANTINED) == 2
    tier.complete_load(keys(1), ctx)
    assert tier.rows.slots.count(SlotState.QUARANTINED) == 1
    assert states(tier, 1) == [PENDING]
    tier.complete_store(keys(3), ctx)
    assert tier.rows.slots.count(SlotState.QUARANTINED) == 0
    assert states(tier, 3) == [MISS]
    tier.rows.check()


def test_once_flushed_nothing_stays_apart() -> None:
    tier = CPUOffloadingManager(2)
    store(tier, 1)
    for _ in range(2):
        tier.prepare_load(keys(1), ReqContext("r"))
    reserve(tier, [2])
    tier.reset_cache()
    tier.on_reset_flushed()
    assert tier.rows.num_busy == 0
    assert reserve(tier, [3, 4]) is not None
    tier.rows.check()


@POLICIES
def test_the_tail_of_a_prompt_goes_before_its_head(policy: str) -> None:
    tier = CPUOffloadingManager(4, policy)
    ctx = ReqContext("r")
    for position, k in enumerate(keys(1, 2, 3, 4)):
        ctx.set_offload_key_position(k, position)
    store(tier, 1, 2, 3, 4, ctx=ctx)
    tier.on_request_finished(ctx)
    victims = []
    for number in (11, 12):
        reserved = reserve(tier, [number], ReqContext(f"n{number}"))
        assert reserved is not None
        victims += reserved[2]
    order = [keys(1, 2, 3, 4).index(k) for k in victims]
    assert all(a > b for a, b in pairwise(order))
    assert order[0] == 3


def test_a_lock_of_its_own_guards_a_primary_tier_that_stands_alone() -> None:
    tier = CPUOffloadingManager(2)
    with tier.lock:
        assert not tier.lock.acquire(blocking=False)
    assert tier.lock.acquire(blocking=False)
    tier.lock.release()


def config(*tokens_per_block: int) -> OffloadingConfig:
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(tokens, ("layer",), group)
            for group, tokens in enumerate(tokens_per_block)
        ),
        worker_kv_bytes_per_block=100,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(16, 2),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )


@pytest.mark.parametrize(("blocks", "tokens"), [((16,), 320), ((16, 16), 320), ((16, 32), None)])
def test_sizes_are_told_in_tokens_where_blocks_have_one_size(
    blocks: tuple[int, ...], tokens: int | None
) -> None:
    info = CPUOffloadingInfo.from_config(config(*blocks), 10, 200)
    assert (info.cpu_num_chunks, info.cpu_kv_cache_size_bytes) == (10, 2000)
    assert info.cpu_kv_cache_size_tokens == tokens
    tier = CPUOffloadingManager(10, info=info)
    assert tier.config_info() == [info.as_config_info()]
    assert CPUOffloadingManager(10).config_info() == []
