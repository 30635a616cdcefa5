"""`lookup_many` answers as the loop of `lookup` does, up to the first MISS."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from tests.tiers.doubles import FakeClock, ScriptedTier, key, make_manager, pattern
from tiers.base import LookupResult, OffloadKey, ReqContext
from tiers.manager import TieringOffloadingManager
from tiers.session import MISS, PENDING, RETRY
from tiers.sessions import Shares

ROWS = 6
PROMPTS = st.lists(st.integers(0, 11), min_size=1, max_size=8)
HAVE = st.sets(st.integers(0, 11))
_ANSWERS = {MISS: LookupResult.MISS, PENDING: LookupResult.HIT_PENDING, RETRY: LookupResult.RETRY}


def make(
    policy: str, resident: list[int], writing: list[int], tier: set[int], unsure: set[int]
) -> TieringOffloadingManager:
    """A manager with some chunks in memory, some being written, and a tier with some more."""
    manager, (scripted,) = make_manager(ROWS, tiers=1, cache_policy=policy)
    ctx = ReqContext("setup")
    for numbers, complete in ((resident[: ROWS - 2], True), (writing[:2], False)):
        for number in dict.fromkeys(numbers):
            output = manager.primary_tier.prepare_store([key(number)], ctx)
            if complete and output is not None and output.keys_to_store:
                manager.primary_tier.complete_store([key(number)], ctx)
    scripted.chunks = {key(number): pattern(key(number)) for number in tier}
    scripted.unsure = {key(number) for number in unsure}
    return manager


def loop(manager: TieringOffloadingManager, prompt: list[OffloadKey]) -> list[LookupResult]:
    answers = []
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    for chunk in prompt:
        answers.append(manager.lookup(chunk, ctx))
        if answers[-1] is LookupResult.MISS:
            break
    return answers


def counted(manager: TieringOffloadingManager) -> list[dict[tuple[str, ...], Any]]:
    """Queries and hits by tier."""
    stats = manager.get_stats()
    assert stats is not None
    names = [f"vllm:kv_offload_tiering_chunk_{what}" for what in ("queries", "hits")]
    tiers = stats.data["data"]
    return [{k: v for k, v in tiers.get(name, {}).items() if v} for name in names]


def submitted(manager: TieringOffloadingManager) -> list[tuple[list[OffloadKey], list[int]]]:
    """What is promoted, and whereto."""
    manager.transfers.submit_promotions()
    (tier,) = manager.secondary_tiers
    assert isinstance(tier, ScriptedTier)
    return [(list(job.keys), job.chunk_ids.tolist()) for job in tier.loads]


@given(
    policy=st.sampled_from(["lru", "arc"]),
    resident=st.lists(st.integers(0, 11), max_size=4),
    writing=st.lists(st.integers(0, 11), max_size=2),
    tier=HAVE,
    unsure=HAVE,
    prompt=PROMPTS,
)
def test_a_batch_is_answered_as_the_loop_is(
    policy: str,
    resident: list[int],
    writing: list[int],
    tier: set[int],
    unsure: set[int],
    prompt: list[int],
) -> None:
    keys = [key(number) for number in prompt]
    one, other = (make(policy, resident, writing, tier, unsure) for _ in range(2))
    ctx = ReqContext("r")
    other.on_new_request(ctx)
    assert other.lookup_many(keys, ctx) == loop(one, keys)
    for number in range(12):  # and leaves the same behind
        assert one.primary_tier.lookup(key(number), ctx) is other.primary_tier.lookup(
            key(number), ctx
        )
    if len(set(prompt)) == len(prompt):
        assert counted(one) == counted(other)
    assert submitted(one) == submitted(other)


@given(
    policy=st.sampled_from(["lru", "arc"]),
    resident=st.lists(st.integers(0, 11), max_size=4),
    writing=st.lists(st.integers(0, 11), max_size=2),
    tier=HAVE,
    unsure=HAVE,
    prompts=st.lists(PROMPTS, min_size=1, max_size=3),
    total=st.sampled_from([1.0, 0.7, 0.4]),
)
def test_a_session_answers_a_batch_as_its_loop(
    policy: str,
    resident: list[int],
    writing: list[int],
    tier: set[int],
    unsure: set[int],
    prompts: list[list[int]],
    total: float,
) -> None:
    batch, single = (make(policy, resident, writing, tier, unsure) for _ in range(2))
    shares = Shares(total=total, tiers=0.5, sure=0.0)
    for manager in (batch, single):
        manager.share(shares=shares, clock=FakeClock())
        manager.session("s").begin("r")
    ctx = ReqContext("r")
    for prompt in prompts:
        keys = [key(number) for number in prompt]
        answers = batch.session("s").lookup_many(keys, "r", 1, np.arange(len(keys)))
        found = [_ANSWERS.get(answer, LookupResult.HIT) for answer in answers.tolist()]
        expected = []
        for chunk in keys:
            expected.append(single.session("s").lookup(chunk, ctx))
            if expected[-1] is LookupResult.MISS:
                break
        assert found == expected
    one, other = batch.session("s"), single.session("s")
    assert set(one.requests["r"].current().held) == set(other.requests["r"].current().held)
    assert one.requests["r"].waits == other.requests["r"].waits
    if len(prompts) == 1 and len(set(prompts[0])) == len(prompts[0]) and total == 1.0:
        assert counted(batch) == counted(single)
    one.finish("r")  # its unfinished stores and promotions stay
    one.hub.rows.check()


def test_a_tier_with_a_hole_starts_just_the_promotions_that_help() -> None:
    manager, (tier,) = make_manager(128, tiers=1)
    assert isinstance(tier, ScriptedTier)
    has = [*range(10), *range(20, 100)]
    tier.chunks = {key(number): pattern(key(number)) for number in has}
    session = manager.session("s")
    session.begin("r")
    prompt = [key(number) for number in range(5, 100)]  # the engine has the first five
    answers = session.lookup_many(prompt, "r", 1)
    assert answers.tolist() == [PENDING] * 5 + [MISS]
    (load,) = tier.loads
    assert list(load.keys) == prompt[:5]
