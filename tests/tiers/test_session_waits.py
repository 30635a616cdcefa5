"""Waiting: who waits is told once, hold first, and nobody waits longer than the deadlines say."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tiers.doubles import FakeClock, ScriptedTier, key, keys, make_manager, pattern
from tiers.base import ReqContext, ScheduleEndContext
from tiers.ledger import RowArray
from tiers.session import MISS, PENDING, RETRY, Session
from tiers.slots import SlotState


class Waiters:
    """Sessions `a` and `b`, each with a request `r`, over one scripted tier."""

    def __init__(self, rows: int = 8) -> None:
        self.clock = FakeClock()
        self.manager, tiers = make_manager(rows, 1)
        (self.tier,) = tiers
        self.hub = self.manager.share(clock=self.clock)
        self.a, self.b = self.manager.session("a"), self.manager.session("b")
        for view in (self.a, self.b):
            view.begin("r")

    def store(self, *numbers: int, view: Session | None = None) -> RowArray:
        answer = (view or self.b).offer(keys(*numbers), "r", 1)
        assert answer is not None
        return answer.rows

    def arrive(self) -> None:
        self.tier.end_all()
        self.manager.transfers.collect([self.tier])

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.hub.tick()

    def told(self, view: Session, attempt: int = 1) -> dict[bytes, int]:
        notices = view.take_notices()
        assert set(notices) <= {("r", attempt)}
        return {bytes(k): int(row) for k, row in notices.get(("r", attempt), {}).items()}


@pytest.fixture
def pool() -> Waiters:
    return Waiters()


def look(view: Session, *numbers: int, attempt: int = 1, request: str = "r") -> list[int]:
    return [int(a) for a in view.lookup_many(keys(*numbers), request, attempt)]


def test_a_waiter_is_told_with_the_hold_in_its_hand(pool: Waiters) -> None:
    rows = pool.store(1, 2)
    for _ in range(2):
        assert look(pool.a, 1, 2) == [PENDING, PENDING]
    assert pool.hub.noticed == set()
    pool.b.complete_offer("r", 1, rows[:1], True)
    pool.b.complete_offer("r", 1, rows[1:], False)
    assert pool.hub.noticed == {pool.a}
    claims = pool.a.requests["r"]
    assert claims.attempts[1].held.tolist() == rows[:1].tolist()
    assert pool.told(pool.a) == {key(1): rows[0], key(2): MISS}
    assert pool.told(pool.a) == {}
    assert not claims.waits
    assert not pool.hub._waiters
    assert look(pool.a, 1, 2) == [rows[0], MISS]
    pool.hub.check()


def test_a_notice_is_the_state_now_and_not_a_list_of_what_happened(pool: Waiters) -> None:
    first = pool.store(1)
    look(pool.a, 1)
    pool.b.complete_offer("r", 1, first, False)
    second = pool.store(1)
    assert look(pool.a, 1) == [PENDING]
    pool.b.complete_offer("r", 1, second, True)
    assert pool.told(pool.a) == {key(1): second[0]}


def test_every_waiter_of_a_chunk_gets_its_own_hold(pool: Waiters) -> None:
    rows = pool.store(1)
    pool.a.begin("s")
    assert look(pool.a, 1) == look(pool.a, 1, request="s") == look(pool.b, 1) == [PENDING]
    pool.b.complete_offer("r", 1, rows, True)
    assert int(pool.hub.rows.slots.ref_cnt[rows[0]]) == 3 + len(pool.tier.stores)
    assert set(pool.a.take_notices()) == {("r", 1), ("s", 1)}
    assert pool.a.rows.distinct == 1
    pool.hub.check()


def test_who_cancelled_released_or_finished_is_not_told(pool: Waiters) -> None:
    rows = pool.store(1)
    for name in ("cancelled", "released", "finished", "newer"):
        pool.a.begin(name)
        assert look(pool.a, 1, request=name) == [PENDING]
    pool.a.cancel("cancelled", 1)
    pool.a.release("released", 1)
    pool.a.finish("finished")
    assert look(pool.a, 9, request="newer", attempt=2) == [MISS]
    pool.b.complete_offer("r", 1, rows, True)
    assert pool.a.take_notices() == {}
    assert not pool.hub.waiting
    assert pool.hub.rows.num_busy == len(pool.tier.running)
    pool.hub.check()


def test_notices_of_an_attempt_that_is_over_are_dropped(pool: Waiters) -> None:
    rows = pool.store(1)
    look(pool.a, 1)
    pool.b.complete_offer("r", 1, rows, True)
    pool.a.cancel("r", 1)
    assert pool.a.take_notices() == {}
    pool.arrive()
    assert pool.hub.rows.num_busy == 0


def test_an_overdue_store_is_a_miss_at_once_until_it_ends_and_good_if_it_ends_late(
    pool: Waiters,
) -> None:
    rows = pool.store(1)
    assert look(pool.a, 1) == [PENDING]
    pool.pass_time(1.99)
    assert pool.told(pool.a) == {}
    assert look(pool.a, 1) == [PENDING]
    pool.pass_time(0.02)
    assert pool.told(pool.a) == {key(1): MISS}
    pool.a.begin("fresh")
    assert look(pool.a, 1) == look(pool.a, 1, request="fresh") == [MISS]
    assert not pool.hub._waiters
    assert not pool.a.requests["r"].waits
    pool.b.complete_offer("r", 1, rows, True)
    assert pool.told(pool.a) == {}
    assert look(pool.a, 1) == rows.tolist()
    pool.hub.check()


def test_the_next_store_of_an_overdue_key_has_time_of_its_own(pool: Waiters) -> None:
    rows = pool.store(1)
    pool.pass_time(2.5)
    assert look(pool.a, 1) == [MISS]
    pool.b.complete_offer("r", 1, rows, False)
    pool.store(1)
    assert look(pool.a, 1) == [PENDING]


def test_all_waits_of_a_request_together_last_no_longer_than_its_patience(
    pool: Waiters,
) -> None:
    begun = pool.clock.now
    pool.store(1)
    assert look(pool.a, 1) == [PENDING]
    pool.pass_time(2.0)
    assert pool.told(pool.a) == {key(1): MISS}
    pool.pass_time(50.0)  # time in which it does not wait costs it nothing
    waited = pool.clock.now
    rows = pool.store(2)
    assert look(pool.a, 2) == [PENDING]
    pool.pass_time(0.99)
    assert pool.told(pool.a) == {}
    pool.pass_time(0.02)
    assert pool.told(pool.a) == {key(2): MISS}
    assert pool.clock.now - waited < 1.02
    pool.store(3)
    assert look(pool.a, 3) == [MISS]
    pool.b.complete_offer("r", 1, rows, True)
    assert look(pool.a, 2) == rows.tolist()
    assert pool.clock.now > begun


def test_a_hundred_requests_in_a_row_wait_for_a_stuck_key_but_once(pool: Waiters) -> None:
    pool.store(1)  # never ends
    begun = pool.clock.now
    for number in range(100):
        request = f"q{number}"
        pool.a.begin(request)
        answer = look(pool.a, 1, request=request)
        while answer == [PENDING]:
            pool.pass_time(0.05)
            notices = pool.a.take_notices()
            if (request, 1) in notices:
                answer = [notices[request, 1][key(1)]]
        assert answer == [MISS]
        pool.a.finish(request)
    assert pool.clock.now - begun < 3.0


def test_a_promotion_that_lags_is_a_miss_and_good_when_it_comes(pool: Waiters) -> None:
    pool.tier.chunks[key(1)] = pattern(key(1))
    assert look(pool.a, 1) == [PENDING]
    pool.pass_time(2.01)
    assert pool.told(pool.a) == {key(1): MISS}
    assert look(pool.b, 1) == [MISS]
    assert len(pool.tier.loads) == 1
    pool.arrive()
    assert look(pool.b, 1) == [int(pool.hub.rows.find(keys(1))[0])]


def test_what_a_tier_does_not_know_is_asked_again_and_then_told(pool: Waiters) -> None:
    pool.tier.unsure = set(keys(1, 2, 3))
    pool.tier.chunks = {k: pattern(k) for k in keys(1)}
    assert look(pool.a, 1, 2, 3) == [RETRY] * 3
    assert pool.hub.has_retries()
    pool.pass_time(0.1)
    assert not pool.manager._processed_jobs_this_step  # the next lookup polls
    assert pool.told(pool.a) == {}
    pool.tier.unsure = set(keys(3))
    pool.pass_time(0.1)
    assert pool.told(pool.a) == {key(2): MISS}
    (load,) = pool.tier.loads  # submitted without another lookup
    assert list(load.keys) == keys(1)
    pool.arrive()
    assert pool.told(pool.a) == {key(1): int(pool.hub.rows.find(keys(1))[0])}
    pool.pass_time(0.29)
    assert pool.told(pool.a) == {}
    pool.pass_time(0.02)
    assert pool.told(pool.a) == {key(3): MISS}
    assert not pool.hub.has_retries()
    pool.hub.check()


def test_a_promotion_that_a_retry_started_has_as_long_as_any_other(pool: Waiters) -> None:
    pool.tier.unsure = set(keys(1))
    pool.tier.chunks = {k: pattern(k) for k in keys(1)}
    look(pool.a, 1)
    pool.clock.advance(0.4)
    pool.tier.unsure.clear()
    pool.hub.tick()
    pool.pass_time(1.9)
    assert pool.told(pool.a) == {}
    assert pool.hub.next_deadline() == pytest.approx(1002.4)
    pool.arrive()
    assert pool.told(pool.a) == {key(1): int(pool.hub.rows.find(keys(1))[0])}


def test_a_retry_finds_what_came_into_memory_meanwhile(pool: Waiters) -> None:
    pool.tier.unsure = set(keys(1))
    look(pool.a, 1)
    rows = pool.store(1)
    pool.b.complete_offer("r", 1, rows, True)
    assert pool.told(pool.a) == {key(1): rows[0]}
    assert not pool.hub.has_retries()
    pool.pass_time(1.0)
    assert pool.told(pool.a) == {}


def test_asking_again_for_what_a_tier_does_not_know_does_not_move_the_end(pool: Waiters) -> None:
    pool.tier.unsure = set(keys(1))
    for _ in range(4):
        assert look(pool.a, 1) == [RETRY]
        pool.pass_time(0.12)
    assert pool.told(pool.a) == {}
    pool.pass_time(0.03)
    assert pool.told(pool.a) == {key(1): MISS}


def test_the_next_end_of_a_wait_is_known(pool: Waiters) -> None:
    assert pool.hub.next_deadline() is None
    pool.store(1)
    pool.clock.advance(0.5)
    pool.store(2)
    look(pool.a, 2)
    assert pool.hub.next_deadline() == pytest.approx(1002.5)
    look(pool.a, 1)
    assert pool.hub.next_deadline() == pytest.approx(1002.0)
    pool.a.finish("r")
    assert pool.hub.next_deadline() is None


def test_a_lost_writer_ends_the_wait_and_another_can_write_at_once(pool: Waiters) -> None:
    old = pool.store(1)
    assert look(pool.a, 1) == [PENDING]
    pool.b.orphan()
    assert pool.told(pool.a) == {key(1): MISS}
    new = pool.store(1, view=pool.a)
    assert new.tolist() != old.tolist()
    pool.a.complete_offer("r", 1, new, True)
    assert look(pool.a, 1) == new.tolist()
    pool.b.settle()
    pool.hub.check()


def test_an_orphan_waits_for_nothing(pool: Waiters) -> None:
    rows = pool.store(1)
    look(pool.a, 1)
    pool.a.orphan()
    assert not pool.hub.waiting
    assert not pool.hub._waiters
    pool.b.complete_offer("r", 1, rows, True)
    assert pool.a.take_notices() == {}
    pool.a.close()
    pool.hub.check()


def test_a_chunk_that_the_default_session_promotes_is_waited_for(pool: Waiters) -> None:
    pool.tier.chunks[key(1)] = pattern(key(1))
    ctx = ReqContext("in-process")
    pool.manager.on_new_request(ctx)
    pool.manager.lookup(key(1), ctx)
    assert look(pool.a, 1) == [PENDING]
    assert not pool.tier.loads  # it is another's to submit
    pool.manager.on_schedule_end(ScheduleEndContext((), ()))
    pool.arrive()
    assert list(pool.told(pool.a)) == [key(1)]


def test_ready_and_pending_chunks_mix_in_one_answer(pool: Waiters) -> None:
    ready = pool.store(1, 3)
    pool.b.complete_offer("r", 1, ready, True)
    pool.store(2)
    pool.tier.chunks[key(4)] = pattern(key(4))
    answers = look(pool.a, 1, 2, 3, 4, 1, 5, 6)
    assert answers == [ready[0], PENDING, ready[1], PENDING, ready[0], MISS]
    assert pool.a.requests["r"].attempts[1].held.tolist() == ready.tolist()
    assert isinstance(pool.tier, ScriptedTier)
    assert pool.hub.rows.slots.count(SlotState.RESERVED) == 2
    assert np.isinf(pool.hub.deadline[ready]).all()
    pool.hub.check()


def test_a_row_that_was_overdue_is_not_so_for_its_next_owner() -> None:
    pool = Waiters(rows=1)
    rows = pool.store(1)
    pool.pass_time(2.5)
    pool.b.complete_offer("r", 1, rows, False)
    pool.tier.chunks[key(2)] = pattern(key(2))
    ctx = ReqContext("in-process")
    pool.manager.on_new_request(ctx)
    pool.manager.lookup(key(2), ctx)
    assert look(pool.a, 2) == [PENDING]


def test_asking_again_does_not_put_off_the_end_of_anothers_store(pool: Waiters) -> None:
    pool.tier.unsure = set(keys(1))
    look(pool.a, 1)
    rows = pool.store(1)
    pool.pass_time(0.4)
    assert pool.hub.deadline[rows].tolist() == [1002.0]
    assert pool.hub.next_deadline() == pytest.approx(1002.0)
