"""ARC by its contract: lists, ghosts, the target, and a plain model of eviction."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tiers.policies.arc import ARCCachePolicy
from tiers.slots import ChunkStatus
from tiers.vocabulary import OffloadKey, ReqContext

CTX = ReqContext("A")


def key_of(name: str) -> OffloadKey:
    return OffloadKey(name.encode() + bytes(4))


def keys_of(names: Iterable[str]) -> list[OffloadKey]:
    return [key_of(name) for name in names]


def names_of(keys: Iterable[OffloadKey]) -> str:
    return "".join(key[:-4].decode() for key in keys)


def filled(names: str, capacity: int = 8) -> ARCCachePolicy:
    policy = ARCCachePolicy(capacity)
    for row, name in enumerate(names):
        insert(policy, name, row)
    return policy


def insert(policy: ARCCachePolicy, name: str, row: int = 0, ref_cnt: int = 0) -> ChunkStatus:
    chunk = ChunkStatus(row)
    chunk.ref_cnt = ref_cnt
    policy.insert(key_of(name), chunk, CTX)
    return chunk


def evict(policy: ARCCachePolicy, n: int, protected: str = "") -> str | None:
    victims = policy.evict(n, set(keys_of(protected)))
    return None if victims is None else names_of(key for key, _ in victims)


def finish(policy: ARCCachePolicy, names: str, *, inserted: str = "", reused: str = "") -> None:
    policy.on_request_finished(
        [keys_of(names)], set(keys_of(inserted)), set(keys_of(reused)), ReqContext("F")
    )


def test_new_chunks_enter_t1_and_lose_their_ghosts() -> None:
    policy = filled("abc")
    evict(policy, 2)
    insert(policy, "a")
    assert (names_of(policy.t1), names_of(policy.b1)) == ("ca", "b")


def test_touch_moves_chunks_to_t2_heads_newest() -> None:
    policy = filled("abc")
    policy.touch(keys_of("ab"), CTX)
    assert (names_of(policy.t1), names_of(policy.t2)) == ("c", "ba")
    policy.touch(keys_of("b"), CTX)
    assert names_of(policy.t2) == "ab"


def test_touch_leaves_a_chunk_that_is_not_ready_in_t1() -> None:
    policy = filled("b")
    insert(policy, "a", ref_cnt=-1)
    insert(policy, "c")
    policy.touch(keys_of("a"), CTX)
    assert (names_of(policy.t1), names_of(policy.t2)) == ("bca", "")


def test_finish_renews_the_inserted_promotes_the_reused_and_leaves_the_awaited() -> None:
    policy = filled("wabcd")
    finish(policy, "wabcd", inserted="ab", reused="cd")
    assert (names_of(policy.t1), names_of(policy.t2)) == ("wba", "dc")


def test_finish_renews_an_inserted_chunk_that_is_in_t2() -> None:
    policy = filled("ab")
    policy.touch(keys_of("ab"), CTX)
    finish(policy, "a", inserted="a")
    finish(policy, "b", inserted="b")
    assert names_of(policy.t2) == "ab"


def test_finish_forgets_what_was_evicted_meanwhile() -> None:
    policy = filled("ab")
    evict(policy, 1)
    finish(policy, "a", reused="a")
    assert policy.target_t1_size == 0
    assert names_of(policy.t1) == "b"


def test_a_store_miss_in_b1_grows_the_target() -> None:
    policy = filled("abcd")
    evict(policy, 2)
    policy.on_store_miss(keys_of("a"), CTX)
    assert policy.target_t1_size == 1.0
    assert names_of(policy.b1) == "ba"


def test_the_target_moves_by_the_ratio_of_the_ghost_lists() -> None:
    policy = ARCCachePolicy(100)
    policy.b1.update(dict.fromkeys(keys_of("ab")))
    policy.b2.update(dict.fromkeys(keys_of("vwxyz")))
    policy.on_store_miss(keys_of("a"), CTX)
    assert policy.target_t1_size == 2.5
    policy.on_store_miss(keys_of("z"), CTX)
    assert policy.target_t1_size == 1.5
    policy.touch(keys_of("b"), CTX)
    assert policy.target_t1_size == 4.0


def test_the_target_stays_between_nothing_and_the_capacity() -> None:
    policy = ARCCachePolicy(2)
    policy.b1.update(dict.fromkeys(keys_of("a")))
    policy.b2.update(dict.fromkeys(keys_of("wxyz")))
    policy.on_store_miss(keys_of("a"), CTX)
    assert policy.target_t1_size == 2.0
    for _ in range(3):
        policy.on_store_miss(keys_of("w"), CTX)
    assert policy.target_t1_size == 0.0


def test_store_misses_are_taken_tail_first() -> None:
    policy = filled("abc")
    evict(policy, 3)
    policy.on_store_miss(keys_of("ab"), CTX)
    assert names_of(policy.b1) == "cba"


def test_victims_come_from_t1_down_to_its_target_then_from_t2() -> None:
    policy = filled("abcdef")
    policy.touch(keys_of("ef"), CTX)
    policy.target_t1_size = 3.9
    assert evict(policy, 4) == "abfe"
    assert (names_of(policy.b1), names_of(policy.b2)) == ("ab", "fe")


def test_the_other_list_serves_where_one_has_nothing_to_give() -> None:
    policy = filled("abcd")
    policy.touch(keys_of("cd"), CTX)
    assert evict(policy, 2, protected="ab") == "dc"
    policy.target_t1_size = 8.0
    assert evict(policy, 2) == "ab"


def test_chunks_that_are_read_or_protected_stay() -> None:
    policy = filled("abc")
    policy.t1[key_of("a")].ref_cnt = 1
    assert evict(policy, 1, protected="b") == "c"


def test_an_eviction_that_cannot_be_met_changes_nothing() -> None:
    policy = filled("abc")
    policy.t1[key_of("b")].ref_cnt = -1
    assert evict(policy, 3) is None
    assert names_of(policy.t1) == "abc"
    assert not policy.b1


def test_ghosts_are_trimmed_oldest_first() -> None:
    policy = filled("abc", capacity=2)
    evict(policy, 3)
    assert names_of(policy.b1) == "bc"


def test_removal_leaves_no_ghost() -> None:
    policy = filled("ab")
    policy.touch(keys_of("a"), CTX)
    for name in "ab":
        policy.remove(key_of(name))
        assert policy.get(key_of(name)) is None
    assert not policy.b1
    assert not policy.b2
    with pytest.raises(KeyError):
        policy.remove(key_of("a"))


def test_clear_forgets_ghosts_and_target() -> None:
    policy = filled("abcd")
    policy.touch(keys_of("cd"), CTX)
    evict(policy, 3)
    policy.on_store_miss(keys_of("a"), CTX)
    policy.clear()
    assert not any((policy.t1, policy.t2, policy.b1, policy.b2))
    assert policy.target_t1_size == 0.0


def test_a_hot_set_survives_a_scan() -> None:
    policy = filled("ab", capacity=4)
    policy.touch(keys_of("ab"), CTX)
    for row, name in enumerate("qrstuvwxyz"):
        if row >= 2:
            assert evict(policy, 1) == "qrstuvwxyz"[row - 2]
        insert(policy, name)
    assert names_of(policy.t2) == "ba"


@settings(deadline=None, max_examples=300, database=None)
@given(
    counts=st.lists(st.tuples(st.booleans(), st.sampled_from([-1, 0, 0, 0, 1])), max_size=12),
    target=st.floats(0, 12),
    n=st.integers(0, 12),
    protected=st.sets(st.sampled_from("abcdefghijkl"), max_size=4),
)
def test_victims_are_those_of_a_plain_simulation(
    counts: list[tuple[bool, int]], target: float, n: int, protected: set[str]
) -> None:
    policy = ARCCachePolicy(12)
    t1: list[tuple[str, bool]] = []
    t2: list[tuple[str, bool]] = []
    for row, ((in_t2, ref_cnt), name) in enumerate(zip(counts, "abcdefghijkl", strict=False)):
        chunk = insert(policy, name, row)
        if in_t2:
            policy.touch(keys_of(name), CTX)
        chunk.ref_cnt = ref_cnt
        (t2 if in_t2 else t1).append((name, ref_cnt == 0 and name not in protected))
    policy.target_t1_size = target

    expected = ""
    for _ in range(n):
        first, second = (t1, t2) if len(t1) >= int(target) else (t2, t1)
        for names in (first, second):
            fit = next((entry for entry in names if entry[1]), None)
            if fit is not None:
                names.remove(fit)
                expected += fit[0]
                break
        else:
            assert evict(policy, n, "".join(protected)) is None
            return
    assert evict(policy, n, "".join(protected)) == expected
