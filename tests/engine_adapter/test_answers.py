"""What a client knows of a request: answers, notices, and transfers that are under way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import wire
from engine_adapter.answers import GroupState, Refs, RequestState, Transfer

KEYS = [bytes([n]) * 36 for n in range(1, 9)]
MISS, PENDING, RETRY = wire.ROW_MISS, wire.ROW_PENDING, wire.ROW_RETRY


def refs_of(*rows: int) -> Refs:
    return np.array([(row, row % 7) for row in rows], dtype=wire.ROW_REF)


def answered(*rows: int, first: int = 0) -> RequestState:
    state = RequestState("r", 1)
    state.set_answer([GroupState(keys=KEYS, first=first, refs=refs_of(*rows))], 10.0)
    return state


@pytest.mark.parametrize(
    ("rows", "count", "pending"),
    [
        ((3, 4, 5), 3, False),
        ((3, MISS), 1, False),
        ((MISS,), 0, False),
        ((3, PENDING, 5), 3, True),
        ((RETRY, 4), 2, True),
        ((3, MISS, PENDING), 1, False),
        ((PENDING, MISS), 1, True),
    ],
)
def test_an_answer_goes_to_the_first_miss(rows: Sequence[int], count: int, pending: bool) -> None:
    answer = answered(*rows).answer
    assert answer is not None
    assert (answer.groups[0].count, answer.pending) == (count, pending)
    assert answer.is_miss is (count == 0)


def test_a_notice_of_a_hit_ends_the_wait() -> None:
    state = answered(3, PENDING)
    state.notice([KEYS[1]], refs_of(6))
    assert state.answer is not None
    assert not state.answer.pending
    refs = state.refs_of(KEYS[:2])
    assert refs is not None
    assert refs["row"].tolist() == [3, 6]


def test_a_notice_of_a_miss_shortens_the_answer() -> None:
    state = answered(3, PENDING, 5)
    state.notice([KEYS[1]], refs_of(MISS))
    assert state.answer is not None
    assert state.answer.groups[0].count == 1
    assert not state.answer.pending


def test_a_notice_of_unknown_keys_or_without_a_question_changes_nothing() -> None:
    state = answered(3, PENDING)
    state.notice([KEYS[7]], refs_of(6))
    assert state.answer is not None
    assert state.answer.pending
    state.forget_answers()
    state.notice([KEYS[1]], refs_of(6))
    assert state.answer is None


@pytest.mark.parametrize("wanted", [KEYS[1:2], KEYS[:2], KEYS[5:6]])
def test_what_is_not_held_has_no_rows(wanted: list[bytes]) -> None:
    assert answered(3, PENDING).refs_of(wanted) is None


def test_rows_of_a_window_belong_to_keys_from_its_first_on() -> None:
    refs = answered(7, 8, first=4).refs_of([KEYS[5], KEYS[4]])
    assert refs is not None
    assert refs["row"].tolist() == [8, 7]


def test_the_oldest_transfer_of_a_key_ends_first() -> None:
    state = RequestState("r", 1)
    state.began(Transfer.LOAD, KEYS[:2], refs_of(3, 4))
    state.attempt = 2
    state.began(Transfer.LOAD, KEYS[:1], refs_of(5))
    for attempt, row in ((1, 3), (2, 5)):
        ended = state.ended(Transfer.LOAD, KEYS[:1])
        assert [(a, int(done[0][1]["row"])) for a, done in ended] == [(attempt, row)]
    assert state.ended(Transfer.LOAD, KEYS[:1]) == []
    assert list(state.transfers) == [(Transfer.LOAD, KEYS[1])]


def test_a_load_and_a_store_of_one_key_are_two() -> None:
    state = RequestState("r", 1)
    state.began(Transfer.STORE, KEYS[:1], refs_of(3))
    state.began(Transfer.LOAD, KEYS[:1], refs_of(4))
    assert int(state.ended(Transfer.LOAD, KEYS[:1])[0][1][0][1]["row"]) == 4
    assert int(state.ended(Transfer.STORE, KEYS[:1])[0][1][0][1]["row"]) == 3
    assert not state.transfers


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.sampled_from(Transfer))))
def test_every_transfer_ends_once(events: list[tuple[bool, int, Transfer]]) -> None:
    state, running, row = RequestState("r", 1), [], 0
    for begins, number, kind in events:
        if begins:
            row, state.attempt = row + 1, row + 1
            state.began(kind, [KEYS[number]], refs_of(row))
            running.append((kind, number, row))
        else:
            of_key = [r for k, n, r in running if (k, n) == (kind, number)]
            ended = state.ended(kind, [KEYS[number]])
            assert [int(done[0][1]["row"]) for _, done in ended] == of_key[:1]
            if of_key:
                running.remove((kind, number, of_key[0]))
    assert sum(len(each) for each in state.transfers.values()) == len(running)
