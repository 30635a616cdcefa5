"""LRU by its contract: a plain model of ranks, named promises, and what eviction costs."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tiers.policies import age_order
from tiers.policies.base import order_request_keys
from tiers.policies.lru import MAX_POSITION, LRUCachePolicy
from tiers.slots import ChunkStatus, SlotTable
from tiers.vocabulary import OffloadKey, ReqContext


def key_of(name: str | int) -> OffloadKey:
    return OffloadKey(str(name).encode().rjust(8, b".") + bytes(4))


def context(req_id: str, positions: dict[OffloadKey, int] | None = None) -> ReqContext:
    ctx = ReqContext(req_id)
    for key, position in (positions or {}).items():
        ctx.set_offload_key_position(key, position)
    return ctx


class Pool:
    """A policy and the rows and counts that a primary tier would keep for it."""

    def __init__(self, num_rows: int, *, bound: bool = True) -> None:
        self.policy = LRUCachePolicy(num_rows)
        self.table = SlotTable(num_rows)
        if bound:
            self.policy.bind(self.table)
        self.free = list(range(num_rows))[::-1]

    def insert(self, names: Iterable[str | int], ctx: ReqContext, *, ready: bool = True) -> None:
        for name in names:
            chunk = ChunkStatus(self.free.pop())
            self.policy.insert(key_of(name), chunk, ctx)
            chunk.ref_cnt = 0 if ready else -1

    def set_readers(self, name: str | int, count: int) -> None:
        chunk = self.policy.get(key_of(name))
        assert chunk is not None
        chunk.ref_cnt = count
        if count == 0:
            self.policy.mark_evictable(key_of(name))

    def evict(self, n: int, protected: Iterable[str | int] = ()) -> list[str] | None:
        victims = self.policy.evict(n, {key_of(name) for name in protected})
        if victims is None:
            return None
        self.free.extend(chunk.chunk_id for _, chunk in victims)
        return [key[:-4].lstrip(b".").decode() for key, _ in victims]


def in_prefix_order(names: str) -> dict[OffloadKey, int]:
    return {key_of(name): 16 * (at + 1) for at, name in enumerate(names)}


def finish(pool: Pool, names: str, ctx: ReqContext) -> None:
    pool.policy.on_request_finished([[key_of(n) for n in names]], set(), set(), ctx)


class RankModel:
    """The contract in the plainest form: a tuple per key, the least goes first, ties by key."""

    def __init__(self) -> None:
        self.ranks: dict[OffloadKey, tuple[int, int]] = {}
        self.readers: dict[OffloadKey, int] = {}
        self.next_rank = 0
        self.request_ranks: dict[str, int] = {}

    def fresh(self) -> tuple[int, int]:
        self.next_rank += 1
        return self.next_rank, 0

    def rank_in(self, key: OffloadKey, ctx: ReqContext) -> tuple[int, int]:
        position = ctx.get_offload_key_position(key)
        if position is None:
            return self.fresh()
        if ctx.req_id not in self.request_ranks:
            self.request_ranks[ctx.req_id] = self.fresh()[0]
        return self.request_ranks[ctx.req_id], -position

    def insert(self, key: OffloadKey, ctx: ReqContext) -> None:
        self.ranks[key] = self.rank_in(key, ctx)
        self.readers[key] = -1

    def access(self, keys: list[OffloadKey], ctx: ReqContext) -> None:
        for key in keys:
            if key in self.ranks:
                self.ranks[key] = max(self.ranks[key], self.rank_in(key, ctx))

    def touch(self, keys: list[OffloadKey]) -> None:
        for key in reversed(keys):
            if key in self.ranks:
                self.ranks[key] = self.fresh()

    def evict(self, n: int, protected: set[OffloadKey]) -> list[OffloadKey] | None:
        order = sorted((rank, key) for key, rank in self.ranks.items())
        fit = [k for _, k in order if self.readers[k] == 0 and k not in protected][: max(n, 0)]
        if len(fit) < n:
            return None
        for key in fit:
            self.remove(key)
        return fit

    def remove(self, key: OffloadKey) -> None:
        del self.ranks[key], self.readers[key]

    def clear(self) -> None:
        self.ranks.clear()
        self.readers.clear()
        self.request_ranks.clear()


NUM_ROWS = 24
KEYS = [key_of(i) for i in range(32)]
key_lists = st.lists(st.sampled_from(KEYS), max_size=10)
requests = st.sampled_from("ABCD")


class LRUMachine(RuleBasedStateMachine):
    """Any sequence of calls gives the model's victims, in the model's order."""

    requests_seen: Bundle[str] = Bundle("requests_seen")

    @initialize(bound=st.booleans(), bucket_rows=st.sampled_from([1, 2, 3, 5, 512]))
    def begin(self, bound: bool, bucket_rows: int) -> None:
        self._patch = pytest.MonkeyPatch()
        # Small buckets, so that few rows reach every way of splitting and tidying them.
        self._patch.setattr(age_order, "BUCKET_ROWS", bucket_rows)
        self._patch.setattr(age_order, "_LOOK_AHEAD", min(bucket_rows, 2))
        self.policy = LRUCachePolicy(NUM_ROWS)
        self.cells = SlotTable(NUM_ROWS)
        if bound:
            self.policy.bind(self.cells)
        self.model = RankModel()
        self.free = list(range(NUM_ROWS))
        self.contexts = {name: ReqContext(name) for name in "ABCD"}

    def teardown(self) -> None:
        if hasattr(self, "_patch"):
            self._patch.undo()

    @rule(request=requests, first=st.integers(0, 31), count=st.integers(1, 8), step=st.booleans())
    def learn_positions(self, request: str, first: int, count: int, step: bool) -> None:
        # Without a step several keys end at one token, as chunks of several KV groups do.
        for at, key in enumerate(KEYS[first : first + count]):
            if self.contexts[request].get_offload_key_position(key) is None:
                end = (at if step else at // 2) + 1
                self.contexts[request].set_offload_key_position(key, end)

    @rule(request=requests, keys=key_lists, ready=st.booleans())
    def insert(self, request: str, keys: list[OffloadKey], ready: bool) -> None:
        for key in keys:
            if key in self.model.ranks or not self.free:
                continue
            chunk = ChunkStatus(self.free.pop())
            self.policy.insert(key, chunk, self.contexts[request])
            self.model.insert(key, self.contexts[request])
            if ready:
                self._set_readers(key, 0)

    def _set_readers(self, key: OffloadKey, count: int) -> None:
        chunk = self.policy.get(key)
        assert chunk is not None
        chunk.ref_cnt = count
        self.model.readers[key] = count
        if count == 0:
            self.policy.mark_evictable(key)

    @rule(request=requests, keys=key_lists)
    def access(self, request: str, keys: list[OffloadKey]) -> None:
        self.policy.on_request_access(keys, self.contexts[request])
        self.model.access(keys, self.contexts[request])

    @rule(keys=key_lists)
    def touch(self, keys: list[OffloadKey]) -> None:
        self.policy.touch(keys, self.contexts["A"])
        self.model.touch(keys)

    @rule(request=requests, groups=st.lists(key_lists, max_size=2))
    def finish(self, request: str, groups: list[list[OffloadKey]]) -> None:
        ctx = self.contexts[request]
        self.policy.on_request_finished(groups, set(), set(), ctx)
        self.model.touch(order_request_keys(groups, ctx))

    @rule(keys=st.sets(st.sampled_from(KEYS)), count=st.sampled_from([-1, 0, 0, 1, 2]))
    def change_readers(self, keys: set[OffloadKey], count: int) -> None:
        for key in sorted(keys & set(self.model.ranks)):
            self._set_readers(key, count)

    @rule(keys=st.sets(st.sampled_from(KEYS)))
    def unpin_by_row(self, keys: set[OffloadKey]) -> None:
        resident = sorted(keys & set(self.model.ranks))
        for key in resident:
            self.policy.chunks[key].ref_cnt = 0
            self.model.readers[key] = 0
        self.policy.on_rows_unread(np.array([self.policy.rows[k] for k in resident], np.int32))

    @rule(n=st.integers(0, 12), protected=st.sets(st.sampled_from(KEYS), max_size=6))
    def evict(self, n: int, protected: set[OffloadKey]) -> None:
        victims = self.policy.evict(n, protected)
        expected = self.model.evict(n, protected)
        if victims is None:
            assert expected is None
            return
        assert [key for key, _ in victims] == expected
        assert all(chunk.ref_cnt == 0 for _, chunk in victims)
        self.free.extend(chunk.chunk_id for _, chunk in victims)

    @precondition(lambda self: self.model.ranks)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.ranks)))
        self.free.append(self.policy.rows[key])
        self.policy.remove(key)
        self.model.remove(key)

    @rule(really=st.integers(0, 9))
    def clear(self, really: int) -> None:
        if really == 0:
            self.policy.clear()
            self.model.clear()
            self.free = list(range(NUM_ROWS))

    @invariant()
    def same_chunks(self) -> None:
        if hasattr(self, "model"):
            assert set(self.policy.rows) == set(self.model.ranks)
            assert len(set(self.policy.rows.values())) == len(self.policy.rows)

    @invariant()
    def entries_are_counted(self) -> None:
        if hasattr(self, "policy"):
            ages = self.policy._ages
            held = sum(map(len, ages._buckets)) + len(ages._front) - ages._cursor
            assert ages._entries == held
            assert ages._num_aside == np.count_nonzero(ages._aside)
            assert ages._starts == sorted(set(ages._starts))


LRUMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, database=None
)
TestLRUAgainstModel = LRUMachine.TestCase


def test_tails_go_before_heads_and_older_requests_first() -> None:
    pool = Pool(8)
    pool.insert("abc", context("A", in_prefix_order("abc")))
    pool.insert("de", context("B", in_prefix_order("de")))
    assert pool.evict(5) == list("cbaed")


def test_a_finish_counts_as_the_use_of_the_whole_request() -> None:
    pool = Pool(8)
    a = context("A", in_prefix_order("abc"))
    pool.insert("abc", a)
    pool.insert("de", context("B", in_prefix_order("de")))
    finish(pool, "abc", a)
    assert pool.evict(5) == list("edcba")


def test_batches_of_one_request_share_its_rank() -> None:
    pool = Pool(8)
    a = context("A", in_prefix_order("abcd"))
    pool.insert("ab", a)
    pool.insert("x", context("B", in_prefix_order("x")))
    pool.insert("cd", a)
    assert pool.evict(5) == list("dcbax")


def test_access_raises_but_never_lowers() -> None:
    pool = Pool(8)
    a = context("A", in_prefix_order("ab"))
    pool.insert("ab", a)
    pool.insert("c", context("B", in_prefix_order("c")))
    pool.policy.on_request_access([key_of("a")], context("C", in_prefix_order("a")))
    pool.policy.on_request_access([key_of("a"), key_of("b")], a)
    assert pool.evict(3) == list("bca")


def test_an_access_with_some_positions_unknown_takes_ranks_key_by_key() -> None:
    pool = Pool(8)
    pool.insert("cbax", context("A"))
    pool.policy.on_request_access([key_of(n) for n in "abc"], context("B", {key_of("b"): 16}))
    assert pool.evict(4) == list("xabc")


def test_chunks_of_unknown_position_are_newest_when_inserted() -> None:
    pool = Pool(8)
    pool.insert("ab", context("A"))
    pool.insert("c", context("B"))
    assert pool.evict(3) == list("abc")


def test_chunks_that_end_together_go_in_key_order() -> None:
    pool = Pool(8)
    pool.insert("zax", context("A", {key_of(n): 16 for n in "zax"}))
    assert pool.evict(3) == list("axz")


def test_positions_past_the_limit_still_precede_nearer_ones() -> None:
    pool = Pool(8)
    pool.insert("old", context("A", in_prefix_order("old")))
    far = {key_of("x"): 1, key_of("y"): MAX_POSITION * 9, key_of("z"): MAX_POSITION * 8}
    pool.insert("xyz", context("B", far))
    assert pool.evict(6) == list("dlo") + list("yzx")


def test_recency_changes_while_a_chunk_is_read_and_counts_afterwards() -> None:
    pool = Pool(8)
    pool.insert("abc", context("A"))
    pool.set_readers("a", 1)
    assert pool.evict(1) == ["b"]
    pool.policy.touch([key_of("a")], context("B"))
    pool.insert("d", context("C"))
    pool.set_readers("a", 0)
    assert pool.evict(3) == list("cad")


def test_a_chunk_set_aside_returns_to_its_own_rank() -> None:
    pool = Pool(8)
    pool.insert("abcd", context("A"))
    pool.set_readers("a", 2)
    assert pool.evict(2) == list("bc")
    pool.insert("e", context("B"))
    pool.set_readers("a", 0)
    assert pool.evict(3) == list("ade")


def test_chunks_not_ready_are_not_given_up() -> None:
    pool = Pool(4)
    pool.insert("a", context("A"), ready=False)
    pool.insert("b", context("A"))
    assert pool.evict(2) is None
    assert pool.evict(1) == ["b"]
    pool.set_readers("a", 0)
    assert pool.evict(1) == ["a"]


def test_an_eviction_that_cannot_be_met_changes_nothing() -> None:
    pool = Pool(8)
    pool.insert("abcd", context("A"))
    pool.set_readers("b", 1)
    assert pool.evict(3, protected="c") is None
    assert len(pool.policy.chunks) == 4
    pool.set_readers("b", 0)
    assert pool.evict(4) == list("abcd")


def test_evicting_none_gives_none_up() -> None:
    pool = Pool(2)
    assert pool.evict(0) == []
    assert pool.evict(1) is None


def test_a_row_is_reusable_for_another_key_after_removal() -> None:
    pool = Pool(2)
    ctx = context("A", in_prefix_order("abc"))
    pool.insert("ab", ctx)
    pool.policy.remove(key_of("a"))
    pool.free.append(0)
    pool.insert("c", ctx)
    assert pool.evict(2) == list("cb")


def test_the_callers_chunk_object_goes_on_counting() -> None:
    policy = LRUCachePolicy(2)
    chunk = ChunkStatus(1)
    policy.insert(key_of("a"), chunk, context("A"))
    assert policy.evict(1, set()) is None
    chunk.ref_cnt = 0
    policy.mark_evictable(key_of("a"))
    assert policy.get(key_of("a")) == chunk
    assert policy.evict(1, set()) == [(key_of("a"), chunk)]


def test_rows_past_the_capacity_grow_an_unbound_policy() -> None:
    policy = LRUCachePolicy(1)
    first, far = ChunkStatus(0), ChunkStatus(100)
    policy.insert(key_of("a"), first, context("A"))
    policy.insert(key_of("b"), far, context("A"))
    first.ref_cnt = far.ref_cnt = 0
    victims = policy.evict(2, set())
    assert victims == [(key_of("a"), first), (key_of("b"), far)]


@pytest.mark.parametrize("row", [-1, 2])
def test_rows_outside_a_bound_pool_are_refused(row: int) -> None:
    pool = Pool(2)
    with pytest.raises(ValueError, match="outside the pool of 2 rows"):
        pool.policy.insert(key_of("a"), ChunkStatus(row), context("A"))


def test_a_second_insert_of_a_key_or_row_is_refused() -> None:
    pool = Pool(4)
    pool.insert("a", context("A"))
    for name, row in (("a", 1), ("b", 0)):
        with pytest.raises(ValueError, match="remove it first"):
            pool.policy.insert(key_of(name), ChunkStatus(row), context("A"))
    assert list(pool.policy.rows) == [key_of("a")]


def test_binding_late_is_refused() -> None:
    pool = Pool(2, bound=False)
    pool.insert("a", context("A"))
    with pytest.raises(RuntimeError, match="before any insert"):
        pool.policy.bind(SlotTable(2))


def test_one_context_serves_two_policies_in_turn() -> None:
    first, second = Pool(4), Pool(4)
    ctx = context("A", in_prefix_order("ab"))
    first.insert("ab", ctx)
    second.insert("x", context("B", in_prefix_order("x")))
    second.insert("ab", ctx)
    assert first.evict(2) == list("ba")
    assert second.evict(3) == list("xba")


def test_a_request_takes_a_new_rank_after_clear() -> None:
    pool = Pool(4)
    a = context("A", in_prefix_order("ab"))
    pool.insert("a", a)
    pool.policy.clear()
    pool.free = [3, 2, 1, 0]
    pool.insert("x", context("B", in_prefix_order("x")))
    pool.insert("b", a)
    assert pool.evict(2) == list("xb")


def test_chunks_is_a_view_of_what_is_resident() -> None:
    pool = Pool(4)
    pool.insert("ab", context("A"))
    view = pool.policy.chunks
    assert set(view) == {key_of("a"), key_of("b")}
    assert view[key_of("b")].chunk_id == 1
    pool.evict(1)
    assert key_of("a") not in view
    assert len(view) == 1


def test_a_subclass_may_choose_its_own_victims() -> None:
    class Newest(LRUCachePolicy):
        def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
            return

    policy = Newest(4)
    for row, name in enumerate("ab"):
        chunk = ChunkStatus(row)
        policy.insert(key_of(name), chunk, context("A"))
        chunk.ref_cnt = 0
    policy.touch([key_of("a")], context("A"))
    victims = policy.evict(1, set())
    assert victims is not None
    assert victims[0][0] == key_of("a")


# What eviction costs, in bucket entries looked at.

MANY = 20_000


def test_pinned_rows_are_passed_over_once() -> None:
    pool = Pool(MANY)
    pool.insert(range(MANY), context("A"))
    for row in range(MANY - 2_000):
        pool.table.ref_cnt[row] = 1
    for i in range(2_000):
        assert pool.evict(1) == [str(MANY - 2_000 + i)]
    examined = pool.policy._ages.entries_examined
    # Each entry is sorted once and passed once; a victim costs at most the look-ahead on top.
    assert examined < 3 * MANY + 2_000 * age_order._LOOK_AHEAD


def test_eviction_looks_at_a_bounded_number_of_entries_while_pins_come_and_go() -> None:
    pool = Pool(MANY)
    pool.insert(range(MANY), context("A"))
    pool.table.ref_cnt[:] = 1
    assert pool.evict(1) is None
    before = pool.policy._ages.entries_examined
    rounds = 1_000
    for i in range(rounds):
        pool.set_readers((i * 7919) % MANY, 0)
        assert pool.evict(1) == [str((i * 7919) % MANY)]
    assert pool.policy._ages.entries_examined - before < rounds * 3 * age_order.BUCKET_ROWS


@pytest.mark.parametrize("batch", [1, 64, 3_000])
def test_stale_entries_do_not_pile_up(batch: int) -> None:
    pool = Pool(4_000)
    pool.insert(range(4_000), context("A"))
    rng = np.random.default_rng(1)
    for _ in range(200_000 // max(batch, 20)):
        pool.policy.touch_rows(rng.choice(4_000, batch, replace=False).astype(np.int32))
    ages = pool.policy._ages
    assert ages._entries <= 2 * 4_000 + 6 * age_order.BUCKET_ROWS + 2 * batch
    assert len(ages._buckets) <= 2 * ages._entries // age_order.BUCKET_ROWS + 4


def test_an_order_of_many_buckets_survives_touches_and_evictions() -> None:
    pool, model = Pool(MANY), RankModel()
    pool.insert(range(MANY), context("A"))
    for i in range(MANY):
        model.insert(key_of(i), context("A"))
        model.readers[key_of(i)] = 0
    rng = np.random.default_rng(2)
    for _ in range(20):
        names = rng.choice(MANY, 700, replace=False).tolist()
        pool.policy.touch([key_of(n) for n in names], context("B"))
        model.touch([key_of(n) for n in names])
        expected = model.evict(300, set())
        assert expected is not None
        victims = pool.policy.evict(300, set())
        assert victims is not None
        assert [key for key, _ in victims] == expected


def test_a_request_larger_than_the_pool_is_not_sorted_again_for_each_eviction() -> None:
    pool, rounds = Pool(MANY), 300
    ctx = context("A", {key_of(i): i + 1 for i in range(MANY + rounds)})
    pool.insert(range(MANY), ctx)
    for i in range(MANY, MANY + rounds):
        assert pool.evict(1) == [str(i - 1)]
        pool.insert([i], ctx)
    assert pool.policy._ages.entries_examined < 2 * MANY + rounds * 3 * age_order.BUCKET_ROWS
