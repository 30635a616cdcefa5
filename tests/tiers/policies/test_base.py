"""What the contract of policies does by itself."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tiers.policies.arc import ARCCachePolicy
from tiers.policies.base import CachePolicy, ChunkStatus, RowPolicy, order_request_keys
from tiers.policies.lru import LRUCachePolicy
from tiers.vocabulary import OffloadKey, ReqContext


def keys_of(names: str) -> list[OffloadKey]:
    return [OffloadKey(name.encode() + bytes(4)) for name in names]


class Recorder(CachePolicy):
    """Notes its touches; everything else as the contract has it by default."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.touched: list[list[OffloadKey]] = []

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return None

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext) -> None:
        raise AssertionError("not called here")

    def remove(self, key: OffloadKey) -> None:
        raise AssertionError("not called here")

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self.touched.append(list(keys))

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        return None

    def clear(self) -> None:
        self.touched.clear()


def test_request_keys_go_by_position_across_groups() -> None:
    ctx = ReqContext("A")
    a, b, c, d = keys_of("abcd")
    for key, position in ((a, 16), (b, 48), (c, 32), (d, 48)):
        ctx.set_offload_key_position(key, position)
    assert order_request_keys([[b, a], [d, c]], ctx) == [a, c, b, d]


def test_request_keys_stay_as_they_are_if_one_position_is_unknown() -> None:
    ctx = ReqContext("A")
    a, b, c = keys_of("abc")
    ctx.set_offload_key_position(a, 16)
    ctx.set_offload_key_position(c, 8)
    assert order_request_keys([[b, a], [c]], ctx) == [b, a, c]


def test_a_store_miss_is_a_touch_by_default() -> None:
    policy, ctx = Recorder(4), ReqContext("A")
    policy.on_store_miss(keys_of("ab"), ctx)
    assert policy.touched == [keys_of("ab")]


def test_a_finish_is_one_touch_per_group_by_default() -> None:
    policy, ctx = Recorder(4), ReqContext("A")
    policy.on_request_finished([keys_of("ab"), keys_of("c")], set(), set(), ctx)
    assert policy.touched == [keys_of("ab"), keys_of("c")]


def test_an_access_and_the_marks_change_nothing_by_default() -> None:
    policy, (key,) = Recorder(4), keys_of("a")
    policy.on_request_access([key], ReqContext("A"))
    policy.mark_evictable(key)
    policy.mark_non_evictable(key)
    assert policy.touched == []


@pytest.mark.parametrize("policy_cls", [LRUCachePolicy, ARCCachePolicy])
def test_both_policies_keep_the_contract(policy_cls: type[CachePolicy]) -> None:
    policy, ctx = policy_cls(4), ReqContext("A")
    assert policy.cache_capacity == 4
    chunks = {}
    for row, key in enumerate(keys_of("abcd")):
        chunks[key] = ChunkStatus(row)
        policy.insert(key, chunks[key], ctx)
        assert policy.get(key) == chunks[key]
    assert policy.evict(1, set()) is None
    for key, chunk in chunks.items():
        chunk.ref_cnt = 0
        policy.mark_evictable(key)
    a, b, c, d = chunks
    chunks[b].ref_cnt = 1
    policy.mark_non_evictable(b)
    assert policy.evict(3, {c}) is None
    victims = policy.evict(2, {c})
    assert victims is not None
    assert {key for key, _ in victims} == {a, d}
    assert all(policy.get(key) is None for key in (a, d))
    policy.remove(b)
    policy.clear()
    assert policy.get(c) is None


def test_only_lru_takes_rows() -> None:
    assert issubclass(LRUCachePolicy, RowPolicy)
    assert not issubclass(ARCCachePolicy, RowPolicy)
