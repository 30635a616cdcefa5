"""What sessions share: room by shares, events by who stored, and laws that see what is wrong."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tests.tiers.doubles import FakeClock, ScriptedTier, key, keys, make_manager, pattern
from tiers.base import LookupResult, Medium, OffloadingEvent
from tiers.ledger import RowArray
from tiers.session import MISS, PENDING, Session
from tiers.sessions import UNLIMITED, Deadlines, Sessions, Shares

SHARES = Shares()


def make(
    rows: int = 20, shares: Shares = SHARES, tiers: int = 1, names: str = "ab"
) -> tuple[Sessions, list[Session], list[ScriptedTier]]:
    """Sessions, each with a request `r`."""
    manager, scripted = make_manager(rows, tiers)
    hub = manager.share(shares=shares, clock=FakeClock())
    views = [manager.session(name) for name in names]
    for view in views:
        view.begin("r")
    return hub, views, scripted


def offer(view: Session, *numbers: int, positions: list[int] | None = None) -> Any:
    where = None if positions is None else np.array(positions)
    answer = view.offer(keys(*numbers), "r", 1, where)
    assert answer is not None
    return answer


def store(view: Session, *numbers: int) -> RowArray:
    rows: RowArray = offer(view, *numbers).rows
    view.complete_offer("r", 1, rows, True)
    return rows


def settle(hub: Sessions, tiers: list[ScriptedTier]) -> None:
    for tier in tiers:
        tier.end_all()
    hub.manager.transfers.collect(tiers)


def look(view: Session, *numbers: int) -> list[int]:
    return [int(a) for a in view.lookup_many(keys(*numbers), "r", 1)]


# ---- room ------------------------------------------------------------------------------------


def test_one_engine_may_use_what_the_sum_leaves_and_not_what_others_are_sure_of() -> None:
    hub, (a, b), _ = make(20)
    assert (hub.room_for(a), hub.room_for(b)) == (10, 10)  # 15 in all, 5 are sure for the other
    assert len(offer(a, *range(20)).accepted) == 10
    assert (hub.room_for(a), hub.room_for(b)) == (0, 5)
    assert len(offer(b, *range(20, 40)).accepted) == 5
    assert (hub.room_for(a), hub.room_for(b)) == (0, 0)
    hub.check()


def test_the_last_engine_gets_its_part_even_if_others_have_borrowed() -> None:
    hub, (a,), _ = make(20, names="a")
    assert len(offer(a, *range(20)).accepted) == 15
    late = hub.open("late")
    late.begin("r")
    assert hub.room_for(late) == 5
    assert hub.room_for(a) == 0
    assert len(offer(late, *range(20, 40)).accepted) == 5


@given(sessions=st.integers(1, 5), rows=st.integers(8, 64), moves=st.lists(st.integers(0, 499)))
def test_the_sum_keeps_its_bound_and_every_engine_its_part(
    sessions: int, rows: int, moves: list[int]
) -> None:
    hub, views, _ = make(rows, tiers=0, names="abcde"[:sessions])
    for move in moves:
        view = views[move % sessions]
        owned = view.requests["r"].current()
        if move % 3:
            offer(view, *range(move * 100, move * 100 + move % 7 + 1))
        elif len(owned.storing):
            view.complete_offer("r", 1, owned.storing[: move % 5], False)
        assert hub.rows.num_busy <= int(rows * 0.75)
        sure = int(rows * 0.5 / sessions)
        for other in views:
            assert hub.room_for(other) >= sure - other.rows.distinct
    hub.check()


def test_a_lookup_past_the_share_is_a_hit_for_the_head_and_a_miss_from_there() -> None:
    hub, (a, b), tiers = make(20)
    rows = store(b, *range(10)).tolist()
    settle(hub, tiers)
    hub.shares = Shares(total=0.2, sure=0.0)
    for _ in range(2):
        assert look(a, *range(10)) == [*rows[:4], MISS]
    assert (hub.rows.num_busy, a.rows.distinct) == (4, 4)
    # a row that is busy already costs the sum nothing
    assert look(b, *range(10)) == [*rows[:4], MISS]
    assert (hub.rows.num_busy, b.rows.distinct) == (4, 4)
    hub.check()


def test_the_head_is_the_head_of_the_prompt_wherever_its_rows_lie() -> None:
    hub, (a, b), tiers = make(20)
    store(b, *range(8))
    settle(hub, tiers)
    prompt = list(range(7, -1, -1))
    look(a, 7)
    hub.shares = Shares(total=0.2, sure=0.0)
    rows = hub.rows.find(keys(*prompt)).tolist()
    assert look(a, *prompt) == [*rows[:4], MISS]
    assert look(a, *prompt[:3], *prompt[:3], *prompt) == [*rows[:3], *rows[:3], *rows[:4], MISS]
    hub.check()


def test_a_waiter_without_room_is_told_a_miss() -> None:
    hub, (a, b), _ = make(20)
    rows = offer(b, 1).rows
    assert look(a, 1) == [PENDING]
    hub.shares = Shares(total=0.0, sure=0.0)
    b.complete_offer("r", 1, rows, True)
    assert a.take_notices() == {("r", 1): {key(1): MISS}}
    hub.check()


@pytest.mark.parametrize(
    ("room", "positions", "accepted"),
    [
        (6, [1, 2, 3, 1, 2, 3], [0, 1, 2, 3, 4, 5]),
        (5, [1, 2, 3, 1, 2, 3], [0, 1, 3, 4]),
        (4, [1, 2, 3, 1, 2, 3], [0, 1, 3, 4]),
        (3, [1, 2, 3, 1, 2, 3], [0, 3]),
        (1, [1, 2, 3, 1, 2, 3], []),
        (0, [1, 2, 3, 1, 2, 3], []),
        (3, [6, 5, 4, 3, 2, 1], [3, 4, 5]),
        (4, None, [0, 1, 2, 3]),
    ],
)
def test_a_store_that_fits_in_part_is_a_head_of_whole_positions(
    room: int, positions: list[int] | None, accepted: list[int]
) -> None:
    hub, (a,), _ = make(20, Shares(total=room / 20, sure=0.0), names="a")
    answer = offer(a, *range(6), positions=positions)
    assert (answer.accepted, answer.present, answer.writing) == (accepted, [], [])
    assert answer.rows.tolist() == hub.rows.find(keys(*accepted)).tolist()
    hub.check()


def test_an_offer_evicts_nothing_that_it_names() -> None:
    hub, (a,), tiers = make(4, UNLIMITED, names="a")
    store(a, 0, 1, 2, 3)
    settle(hub, tiers)
    answer = offer(a, 0, 1, 10, 11, 12)
    assert (answer.present, answer.accepted) == ([0, 1], [2, 3])
    hub.check()


def test_tiers_have_their_share_and_what_they_cannot_take_is_dropped_and_counted() -> None:
    hub, (a, _), (tier,) = make(20)
    store(a, 1, 2)
    store(a, 3, 4)
    assert [list(job.keys) for job in tier.stores] == [keys(1, 2)]
    assert hub.manager.transfers.cascades_dropped == 2
    tier.chunks = {k: pattern(k) for k in keys(11, 12)}
    assert look(a, 11, 12) == [PENDING, MISS]  # 3 of 20 rows, 2 of them by the copy
    settle(hub, [tier])
    tier.chunks = {k: pattern(k) for k in keys(13)}
    assert look(a, 13) == [PENDING]
    hub.check()


def test_tiers_take_nothing_beyond_the_sum() -> None:
    hub, (a,), (tier,) = make(20, Shares(total=0.5, tiers=0.25, sure=0.0), names="a")
    rows = offer(a, *range(9)).rows
    assert len(rows) == 9
    tier.chunks = {k: pattern(k) for k in keys(11, 12)}
    assert look(a, 11, 12) == [PENDING, MISS]
    assert hub.rows.num_busy == 10
    # rows that are busy anyway cost the sum nothing: a copy of what another request waits for
    assert look(a, 0) == [PENDING]
    a.complete_offer("r", 1, rows[:1], True)
    assert [list(job.keys) for job in tier.stores] == [keys(0)]
    hub.check()


def test_tiers_leave_what_engines_are_sure_of() -> None:
    hub, (one, _), (tier,) = make(20)
    tier.chunks = {k: pattern(k) for k in keys(*range(50, 55))}
    assert len(offer(one, *range(8)).accepted) == 8
    assert look(one, *range(50, 55)) == [PENDING, PENDING, MISS]  # 15 less 8 less 5
    hub, _, (tier,) = make(20, Shares(total=0.75, tiers=0.5, sure=0.5))
    tier.chunks = {k: pattern(k) for k in keys(*range(20))}
    hub.manager.session("b").close()
    (a,) = hub.views.values()
    # 15 in all; the engine is sure of 10, but tiers are sure of their own 10 as well
    assert look(a, *range(20)).count(PENDING) == 10
    hub.check()


def test_without_shares_the_first_gets_all() -> None:
    hub, (a, b), _ = make(20, UNLIMITED, tiers=0)
    assert hub.room_for(a) == hub.room_for(b) == 20
    assert len(offer(a, *range(30)).accepted) == 20
    assert hub.room_for(b) == 0


# ---- events ----------------------------------------------------------------------------------


def of(events: Any) -> list[tuple[list[bytes], bool]]:
    listed: list[OffloadingEvent] = list(events)
    assert all(event.medium is Medium.CPU for event in listed)
    return [(list(event.keys), event.removed) for event in listed]


def test_events_go_to_the_session_that_stored() -> None:
    hub, (a, b), tiers = make(4, UNLIMITED)
    a.events, b.events = [], []
    store(a, 1, 2)
    store(b, 3)
    settle(hub, tiers)
    assert hub.has_events
    assert of(a.take_events()) == [(keys(1, 2), False)]
    assert of(b.take_events()) == [(keys(3), False)]
    assert of(a.take_events()) == []
    offer(b, 11, 12, 13)  # evicts two chunks at least
    gone = {bytes(k) for told, removed in of(a.take_events()) for k in told if removed}
    gone |= {bytes(k) for told, removed in of(b.take_events()) for k in told if removed}
    assert gone == {bytes(k) for k in keys(1, 2, 3) if hub.rows.find([k])[0] < 0}
    assert len(gone) == 2


def test_nobody_is_told_of_what_came_from_a_tier_or_never_came() -> None:
    hub, (a, b), (tier,) = make(4, UNLIMITED)
    a.events, b.events = [], []
    a.complete_offer("r", 1, offer(a, 1).rows, False)
    tier.chunks[key(2)] = pattern(key(2))
    look(b, 2)
    settle(hub, [tier])
    assert of(a.take_events()) == of(b.take_events()) == []
    assert not hub.has_events


def test_the_row_of_another_is_not_the_old_ones_to_hear_of() -> None:
    hub, (a, b), tiers = make(1, UNLIMITED)
    a.events, b.events = [], None
    store(a, 1)
    settle(hub, tiers)
    store(b, 2)
    assert of(a.take_events()) == [(keys(1), False), (keys(1), True)]
    assert of(b.take_events()) == []


def test_events_of_a_session_that_is_gone_go_nowhere() -> None:
    hub, (a, b), tiers = make(1, UNLIMITED)
    a.events = []
    store(a, 1)
    settle(hub, tiers)
    a.take_events()
    a.close()
    store(b, 2)
    assert of(a.take_events()) == []


# ---- the hub itself --------------------------------------------------------------------------


def test_sessions_are_made_once() -> None:
    manager, _ = make_manager(4)
    view = manager.session("a")
    assert manager.session("a") is view
    with pytest.raises(RuntimeError, match="exist already"):
        manager.share(deadlines=Deadlines())


def test_a_reset_of_everything_is_refused_beside_open_sessions() -> None:
    hub, views, _ = make(tiers=0)
    store(views[0], 1)
    with pytest.raises(RuntimeError, match="sessions a, b are open"):
        hub.manager.reset_cache()
    assert hub.rows.num_busy == 0
    assert hub.rows.find(keys(1))[0] >= 0
    for view in views:
        view.close()
    hub.manager.reset_cache()


def test_two_engines_that_store_the_same_chunks_make_one_copy() -> None:
    hub, (a, b), (tier,) = make(20, UNLIMITED)
    first = offer(a, 1, 2)
    second = offer(b, 1, 2, 3)
    assert (second.accepted, second.writing) == ([2], [0, 1])
    a.complete_offer("r", 1, first.rows, True)
    b.complete_offer("r", 1, second.rows, True)
    assert [list(job.keys) for job in tier.stores] == [keys(1, 2), keys(3)]
    third = offer(b, 1, 2, 3)
    assert third.present == [0, 1, 2]
    hub.check()


def test_tiers_see_names_that_differ_between_sessions() -> None:
    _, _, (tier,) = make()
    assert tier.begun == ["a/r", "b/r"]


def test_a_tick_with_nobody_waiting_asks_nothing() -> None:
    hub, _, (tier,) = make()
    tier.lookup = lambda key, req_context: LookupResult.RETRY  # type: ignore[method-assign]
    hub.tick()
    assert hub.next_deadline() is None
    assert not hub.has_retries()


def test_the_laws_see_claims_that_do_not_add_up() -> None:
    hub, (a, _), _ = make(20, UNLIMITED, tiers=0)
    store(a, 1)
    look(a, 1)
    hub.check()
    owned = a.requests["r"].attempts[1]
    row = owned.held
    owned.held = row[:0]
    with pytest.raises(AssertionError, match="claims by row do not add up"):
        hub.check()
    a.rows.unclaim(row)
    with pytest.raises(AssertionError, match="row 0 is READY with count 1, but 0 readers"):
        hub.check()
    owned.held = row
    a.rows.claim(row)
    a.rows.distinct += 1
    with pytest.raises(AssertionError, match="2 rows, not 1"):
        hub.check()
    a.rows.distinct -= 1
    hub.check()
    with pytest.raises(AssertionError, match="row 5 is not claimed"):
        a.rows.unclaim(np.array([5], dtype=np.int32))
