"""One engine's view: a HIT is a hold with one owner, and only its owner ends it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tiers.doubles import FakeClock, ScriptedTier, key, keys, make_manager, pattern
from tiers.base import LookupResult, ReqContext, ScheduleEndContext
from tiers.ledger import MOST_NOTES, NO_ROWS, RowArray
from tiers.manager import TieringOffloadingManager
from tiers.primary import CPULoadStoreSpec
from tiers.session import MISS, PENDING, Session
from tiers.slots import SlotState


class Pool:
    """A shared pool with sessions `a` and `b`, and the laws checked when told."""

    def __init__(self, rows: int = 8, tiers: int = 0) -> None:
        self.clock = FakeClock()
        self.manager: TieringOffloadingManager
        self.tiers: list[ScriptedTier]
        self.manager, self.tiers = make_manager(rows, tiers)
        self.hub = self.manager.share(clock=self.clock)
        self.a, self.b = self.manager.session("a"), self.manager.session("b")
        self.rows = self.hub.rows

    def fill(self, *numbers: int) -> RowArray:
        """Chunks that a request of `b`, which has ended, has stored."""
        self.b.begin("fill")
        answer = self.b.offer(keys(*numbers), "fill", 1)
        assert answer is not None
        self.b.complete_offer("fill", 1, answer.rows, True)
        self.b.finish("fill")
        return self.rows.find(keys(*numbers))

    def offer(self, view: Session, *numbers: int, request: str = "r", attempt: int = 1) -> RowArray:
        answer = view.offer(keys(*numbers), request, attempt)
        assert answer is not None
        return answer.rows

    def readers(self, number: int) -> int:
        return int(self.rows.slots.ref_cnt[self.rows.find(keys(number))[0]])


@pytest.fixture
def pool() -> Pool:
    made = Pool()
    made.a.begin("r")
    made.b.begin("r")
    return made


def look(view: Session, *numbers: int, request: str = "r", attempt: int = 1) -> list[int]:
    return [int(a) for a in view.lookup_many(keys(*numbers), request, attempt)]


def at(*rows: int) -> RowArray:
    return np.array(rows, dtype=np.int32)


def test_a_hit_is_a_hold_once_per_request_however_often_it_is_asked(pool: Pool) -> None:
    rows = pool.fill(1, 2).tolist()
    for _ in range(3):
        assert look(pool.a, 1, 2, 1) == [*rows, rows[0]]
    assert (pool.readers(1), pool.readers(2), pool.a.rows.distinct) == (1, 1, 2)
    look(pool.b, 1)
    assert (pool.readers(1), pool.b.rows.distinct) == (2, 1)
    pool.hub.check()


def test_two_requests_of_a_session_claim_a_row_once_for_it(pool: Pool) -> None:
    pool.fill(1)
    pool.a.begin("s")
    look(pool.a, 1)
    look(pool.a, 1, request="s")
    assert (pool.readers(1), pool.a.rows.distinct) == (2, 1)
    pool.a.finish("s")
    assert (pool.readers(1), pool.a.rows.distinct) == (1, 1)
    pool.a.finish("r")
    assert (pool.readers(1), pool.a.rows.distinct) == (0, 0)


def test_take_hands_over_what_is_asked_and_ends_the_rest(pool: Pool) -> None:
    rows = pool.fill(1, 2, 3)
    look(pool.a, 1, 2, 3)
    assert pool.a.take("r", 1, rows[:2]).tolist() == []
    assert [pool.readers(n) for n in (1, 2, 3)] == [1, 1, 0]
    claims = pool.a.requests["r"].attempts[1]
    assert (claims.held.tolist(), sorted(claims.loading.tolist())) == ([], rows[:2].tolist())
    pool.hub.check()


def test_take_in_parts_keeps_the_rest(pool: Pool) -> None:
    rows = pool.fill(1, 2, 3)
    look(pool.a, 1, 2, 3)
    pool.a.take("r", 1, rows[:1], more=True)
    assert pool.readers(3) == 1
    pool.a.take("r", 1, rows[1:2])
    assert [pool.readers(n) for n in (1, 2, 3)] == [1, 1, 0]


def test_what_is_not_held_cannot_be_taken(pool: Pool) -> None:
    rows = pool.fill(1, 2)
    look(pool.a, 1)
    look(pool.b, 2)
    assert pool.a.take("r", 1, rows, more=True).tolist() == [rows[1]]
    assert pool.hub.refused == 1
    assert pool.a.take("r", 2, rows).tolist() == rows.tolist()  # no such attempt yet
    assert pool.a.take("nobody", 1, rows).tolist() == rows.tolist()
    assert pool.hub.refused == 5
    assert (pool.readers(1), pool.readers(2)) == (1, 1)


def test_a_row_taken_again_while_it_is_read_is_one_claim(pool: Pool) -> None:
    rows = pool.fill(1)
    for _ in range(2):
        look(pool.a, 1)
        assert len(pool.a.take("r", 1, rows)) == 0
    assert pool.readers(1) == 1
    assert len(pool.a.complete_rows("r", 1, rows)) == 0
    assert pool.readers(1) == 0
    pool.hub.check()


def test_a_double_completion_takes_nobodys_hold(pool: Pool) -> None:
    rows = pool.fill(1)
    for view in (pool.a, pool.b):
        look(view, 1)
        view.take("r", 1, rows)
    assert pool.a.complete_rows("r", 1, np.concatenate((rows, rows))).tolist() == []
    assert pool.a.complete_rows("r", 1, rows).tolist() == rows.tolist()
    assert pool.hub.refused == 1
    assert pool.readers(1) == 1
    assert pool.a.complete_rows("nobody", 1, rows).tolist() == rows.tolist()
    assert pool.hub.refused == 2


def test_what_did_not_verify_is_found_by_nobody_but_stays_for_those_who_read_it(
    pool: Pool,
) -> None:
    rows = pool.fill(1, 2)
    for view in (pool.a, pool.b):
        look(view, 1, 2)
        view.take("r", 1, rows)
    assert len(pool.a.complete_rows("r", 1, rows[1:], failed=rows[:1])) == 0
    pool.a.begin("late")
    assert look(pool.a, 1, request="late") == [MISS]
    assert pool.rows.slots.state(int(rows[0])) is SlotState.QUARANTINED
    pool.hub.check()
    assert len(pool.b.complete_rows("r", 1, rows[1:], failed=rows[:1])) == 0
    assert pool.rows.slots.state(int(rows[0])) is SlotState.FREE
    pool.hub.check()


@pytest.mark.parametrize("success", [True, False])
def test_a_store_is_ended_by_its_owner_once(pool: Pool, success: bool) -> None:
    rows = pool.offer(pool.a, 1, 2)
    assert pool.b.complete_offer("r", 1, rows, True).tolist() == rows.tolist()
    assert look(pool.b, 1) == [PENDING]
    assert pool.a.complete_offer("r", 1, np.concatenate((rows, rows)), success).tolist() == []
    assert pool.a.complete_offer("r", 1, rows, True).tolist() == rows.tolist()
    assert pool.hub.refused == 4
    pool.b.begin("late")
    assert look(pool.b, 1, request="late") == ([rows[0]] if success else [MISS])
    pool.hub.check()


def test_an_offer_says_what_is_there_and_what_is_being_written(pool: Pool) -> None:
    pool.fill(1)
    pool.offer(pool.b, 2)
    answer = pool.a.offer(keys(3, 1, 2, 3, 4), "r", 1)
    assert answer is not None
    assert (answer.accepted, answer.present, answer.writing) == ([0, 4], [1], [2])
    assert answer.rows.tolist() == pool.rows.find(keys(3, 4)).tolist()
    pool.hub.check()


def test_cancel_frees_unused_holds_and_sets_apart_what_moves(pool: Pool) -> None:
    rows = pool.fill(1, 2)
    look(pool.a, 1, 2)
    pool.a.take("r", 1, rows[:1], more=True)
    stored = pool.offer(pool.a, 3)
    pool.a.cancel("r", 1)
    pool.a.cancel("r", 1)
    assert (pool.readers(1), pool.readers(2)) == (1, 0)
    assert pool.rows.slots.state(int(stored[0])) is SlotState.QUARANTINED
    assert look(pool.b, 3) == [MISS]
    pool.hub.check()
    # late completions of the old attempt end just what is its own
    assert len(pool.a.complete_offer("r", 1, stored, True)) == 0
    assert pool.rows.slots.state(int(stored[0])) is SlotState.FREE
    assert len(pool.a.complete_rows("r", 1, rows[:1])) == 0
    assert pool.readers(1) == 0
    pool.hub.check()


def test_an_old_attempt_cannot_end_what_a_newer_one_owns(pool: Pool) -> None:
    first = pool.offer(pool.a, 1)
    rows = pool.fill(2)
    look(pool.a, 2, attempt=2)  # cancels attempt 1
    second = pool.offer(pool.a, 1, attempt=2)
    assert second.tolist() != first.tolist()
    pool.a.take("r", 2, rows)
    assert pool.a.complete_offer("r", 1, second, True).tolist() == second.tolist()
    assert pool.a.complete_rows("r", 1, rows).tolist() == rows.tolist()
    assert look(pool.b, 1) == [PENDING]
    assert len(pool.a.complete_offer("r", 1, first, True)) == 0
    assert look(pool.b, 1) == [PENDING]
    assert len(pool.a.complete_offer("r", 2, second, True)) == 0
    pool.b.begin("late")
    assert look(pool.b, 1, request="late") == second.tolist()
    pool.hub.check()


def test_calls_of_an_attempt_that_is_over_get_nothing(pool: Pool) -> None:
    pool.fill(1)
    look(pool.a, 1, attempt=2)
    assert look(pool.a, 1) == [MISS]
    assert pool.a.offer(keys(3), "r", 1) is None
    start, answers = pool.a.lookup_window(keys(1), "r", 1, 1, 1)
    assert (start, answers.tolist()) == (0, [MISS])
    assert look(pool.a, 1, request="nobody") == [MISS]
    assert not pool.manager._processed_jobs_this_step
    assert pool.readers(1) == 1


def test_finish_ends_holds_and_leaves_transfers_to_their_completion(pool: Pool) -> None:
    rows = pool.fill(1, 2)
    look(pool.a, 1, 2)
    pool.a.take("r", 1, rows[:1], more=True)
    stored = pool.offer(pool.a, 3)
    pool.a.finish("r")
    assert (pool.readers(1), pool.readers(2)) == (1, 0)
    assert look(pool.a, 1) == [MISS]
    assert pool.a.offer(keys(4), "r", 1) is None
    assert len(pool.a.complete_rows("r", 1, rows[:1])) == 0
    assert "r" in pool.a.requests
    assert len(pool.a.complete_offer("r", 1, stored, True)) == 0
    assert "r" not in pool.a.requests
    assert look(pool.b, 3) == stored.tolist()  # good: its owner had not given it up
    pool.hub.check()


def test_release_ends_holds_of_the_current_attempt_only(pool: Pool) -> None:
    rows = pool.fill(1)
    look(pool.a, 1)
    pool.a.release("r", 2)
    assert pool.readers(1) == 1
    pool.a.release("r", 1)
    assert pool.readers(1) == 0
    assert look(pool.a, 1) == rows.tolist()


def test_request_ids_belong_to_their_session_and_may_be_used_again(pool: Pool) -> None:
    rows = pool.fill(1)
    look(pool.a, 1)
    look(pool.b, 1)
    pool.a.finish("r")
    assert pool.readers(1) == 1
    pool.b.begin("r")  # the old one is cancelled
    assert pool.readers(1) == 0
    assert look(pool.b, 1) == rows.tolist()
    pool.hub.check()


def test_a_name_used_again_while_its_old_store_runs_is_told_to_tiers_last() -> None:
    pool = Pool(tiers=1)
    pool.a.begin("r")
    old = pool.offer(pool.a, 1)
    pool.a.begin("r", attempt=2)
    new = pool.offer(pool.a, 2, attempt=2)
    assert len(pool.a.complete_offer("r", 1, old, True)) == 0
    (tier,) = pool.tiers
    pool.a.finish("r")
    assert tier.begun == [*tier.ended, "a/r"] == ["a/r", "a/r"]
    assert len(pool.a.complete_offer("r", 2, new, True)) == 0
    assert [list(job.keys) for job in tier.stores] == [keys(2)]
    assert tier.ended == ["a/r", "a/r"]
    assert not pool.manager._req_state
    pool.hub.check()


def test_positions_reach_the_policy_also_for_what_was_waited_for() -> None:
    pool = Pool(rows=4, tiers=1)
    pool.a.begin("r")
    pool.fill(1)
    pool.tiers[0].chunks = {k: pattern(k) for k in keys(2, 3)}
    positions = np.array([16, 32, 48])
    answers = pool.a.lookup_many(keys(1, 2, 3), "r", 1, positions)
    assert answers.tolist()[1:] == [PENDING, PENDING]
    pool.tiers[0].end_all()
    pool.manager.transfers.collect(pool.tiers)
    pool.a.take("r", 1, pool.rows.find(keys(3, 1, 2)))
    pool.a.complete_rows("r", 1, pool.rows.find(keys(1, 2, 3)))
    ctx = pool.a.requests["r"].ctx
    assert [ctx.get_offload_key_position(k) for k in keys(1, 2, 3)] == [16, 32, 48]
    pool.a.finish("r")
    pool.a.begin("s")
    victims = []
    for number in (11, 12, 13):
        before = set(pool.rows.keys_of(pool.rows.resident()))
        pool.offer(pool.a, number, request="s")
        victims += sorted(before - set(pool.rows.keys_of(pool.rows.resident())))
    assert victims == keys(3, 2)


def test_a_request_that_asks_for_ever_keeps_no_more_than_it_needs(pool: Pool) -> None:
    rows = pool.fill(1, 2)
    for turn in range(MOST_NOTES * 3):
        asked = keys(1, 9) if turn else keys(1, 2)  # 2 was asked about long ago
        pool.a.lookup_many(asked, "r", 1, np.array([turn, 20]))
    assert len(pool.a.requests["r"].seen) <= MOST_NOTES
    pool.a.take("r", 1, rows)
    ctx = pool.a.requests["r"].ctx
    assert ctx.get_offload_key_position(key(1)) == MOST_NOTES * 3 - 1
    assert ctx.get_offload_key_position(key(2)) == 20
    assert not pool.a.requests["r"].seen


def test_an_orphans_claims_stay_until_nobody_can_touch_the_rows(pool: Pool) -> None:
    rows = pool.fill(1, 2)
    look(pool.a, 1, 2)
    pool.a.take("r", 1, rows[:1], more=True)
    stored = pool.offer(pool.a, 3)
    pool.a.orphan()
    assert not pool.a.requests
    assert (pool.readers(1), pool.readers(2)) == (1, 1)
    assert pool.rows.slots.state(int(stored[0])) is SlotState.QUARANTINED
    assert look(pool.b, 3) == [MISS]
    assert pool.a.complete_offer("r", 1, stored, True).tolist() == stored.tolist()
    pool.hub.check()
    pool.a.close()
    assert pool.rows.num_busy == 0
    assert "a" not in pool.hub.views
    pool.hub.check()
    assert pool.manager.session("a") is not pool.a


def test_by_the_public_contract_a_session_is_a_manager(pool: Pool) -> None:
    ctx = ReqContext("p")
    pool.a.on_new_request(ctx)
    assert ctx.req_id == "p"
    assert pool.a.lookup(key(1), ctx) is LookupResult.MISS
    output = pool.a.prepare_store(keys(1, 2), ctx)
    assert output is not None
    assert (output.keys_to_store, output.evicted_keys) == (keys(1, 2), [])
    assert pool.a.lookup(key(1), ctx) is LookupResult.HIT_PENDING
    pool.a.complete_store(keys(1, 2), ctx)
    assert pool.a.lookup(key(2), ctx) is LookupResult.HIT
    assert pool.a.lookup(key(1), ctx) is LookupResult.HIT
    spec = pool.a.prepare_load(keys(2, 1), ctx)
    assert isinstance(spec, CPULoadStoreSpec)
    assert spec.chunk_ids.tolist() == pool.rows.find(keys(2, 1)).tolist()
    pool.a.complete_load(keys(1, 2), ctx)
    with pytest.raises(AssertionError, match="not held"):
        pool.a.prepare_load(keys(1), ctx)
    known = pool.a.prepare_store(keys(1, 2), ctx)
    assert known is not None
    assert known.keys_to_store == []
    assert pool.a.prepare_store(keys(*range(10, 20)), ctx) is not None  # the head that fits
    assert pool.a.prepare_store(keys(30), ctx) is None
    pool.a.on_schedule_end(ScheduleEndContext((), ()))
    assert not pool.a.has_pending_work()
    assert pool.a.lock is pool.manager.lock
    pool.a.on_request_finished(ctx)
    with pytest.raises(KeyError, match="no request q"):
        pool.a.lookup(key(1), ReqContext("q"))
    pool.hub.check()


def test_nothing_owned_is_nothing_to_end(pool: Pool) -> None:
    assert pool.a.take("r", 1, NO_ROWS).tolist() == []
    assert pool.a.complete_rows("r", 1, at(7)).tolist() == [7]
    pool.a.finish("nobody")
    pool.a.cancel("nobody", 3)
    pool.a.cancel("r", -1)
    pool.a.release("nobody", 1)
    assert pool.a.requests["r"].attempt == 1


def test_tiers_hear_that_an_orphans_requests_have_ended() -> None:
    pool = Pool(tiers=1)
    pool.a.begin("r")
    pool.offer(pool.a, 1)
    pool.a.orphan()
    assert pool.tiers[0].ended == ["a/r"]
    assert not pool.manager._req_state


def test_an_offer_uses_rows_that_tiers_have_just_let_go() -> None:
    pool = Pool(rows=2, tiers=1)
    pool.fill(1, 2)
    pool.a.begin("r")
    assert len(pool.offer(pool.a, 3)) == 0
    pool.tiers[0].end_all()
    assert len(pool.offer(pool.a, 3)) == 1
