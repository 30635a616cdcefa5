"""A slow tier is counted, a very slow one is disabled; what it runs still ends."""

from __future__ import annotations

import pytest

from tests.tiers.doubles import FakeClock, ScriptedTier, key, keys, make_manager, pattern
from tiers.base import LookupResult, Medium, OffloadKey, ReqContext
from tiers.guard import GuardedTier
from tiers.manager import TieringOffloadingManager


class SlowTier(ScriptedTier):
    """Takes as long for a lookup as it is told."""

    clock: FakeClock
    takes_s = 0.0

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self.clock.advance(self.takes_s)
        return super().lookup(key, req_context)


@pytest.fixture
def guarded() -> tuple[TieringOffloadingManager, GuardedTier, SlowTier]:
    base, _ = make_manager(8)
    inner = SlowTier(base.primary_tier.get_kv_memoryview())
    inner.clock = FakeClock()
    inner.chunks = {k: pattern(k) for k in keys(1, 2, 3, 4)}
    guard = GuardedTier(inner, inner.clock)
    return TieringOffloadingManager(base.primary_tier, [guard], 0), guard, inner


def test_a_guard_looks_like_what_it_guards(
    guarded: tuple[TieringOffloadingManager, GuardedTier, SlowTier],
) -> None:
    _, guard, inner = guarded
    assert guard.medium is Medium.STORAGE
    for name in ("tier_type", "locality", "cache_hit_source", "block_size_bytes", "bp_detector"):
        assert getattr(guard, name) == getattr(inner, name)


@pytest.mark.parametrize(("takes_s", "slow", "very"), [(0.004, 0, 0), (0.006, 1, 0), (1.1, 1, 1)])
def test_slow_calls_are_counted(
    guarded: tuple[TieringOffloadingManager, GuardedTier, SlowTier],
    takes_s: float,
    slow: int,
    very: int,
) -> None:
    manager, guard, inner = guarded
    inner.takes_s = takes_s
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    manager.lookup(key(9), ctx)
    assert (guard.slow_calls, guard.very_slow_calls, guard.is_disabled) == (slow, very, False)


def test_three_very_slow_calls_disable_the_tier_and_running_jobs_end(
    guarded: tuple[TieringOffloadingManager, GuardedTier, SlowTier],
) -> None:
    manager, guard, inner = guarded
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    assert manager.lookup(key(1), ctx) is LookupResult.HIT_PENDING
    manager.transfers.submit_promotions()
    inner.takes_s = 2.0
    for number in (7, 8, 9):
        manager.lookup(key(number), ctx)
    assert guard.is_disabled
    before = inner.clock.now
    assert manager.lookup(key(2), ctx) is LookupResult.MISS
    assert inner.clock.now == before  # it is not asked any more
    inner.end_all()
    manager.transfers.collect([guard])
    assert manager.lookup(key(1), ctx) is LookupResult.HIT
    output = manager.prepare_store(keys(5), ctx)
    assert output is not None
    manager.complete_store(keys(5), ctx)
    assert not inner.stores
    manager.transfers.collect([guard])
    assert not manager.transfers.jobs
