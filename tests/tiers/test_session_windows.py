"""Lookup of a window: the last run of chunks that suffices, and no hold on anything else."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tests.tiers.doubles import FakeClock, key, keys, make_manager, pattern
from tiers.session import MISS, PENDING, Session


def make(there: list[int], writing: list[int] | None = None, rows: int = 16) -> Session:
    """A session with request `r` over a pool that has some chunks and gets some more."""
    manager, _ = make_manager(rows)
    hub = manager.share(clock=FakeClock())
    other = manager.session("other")
    other.begin("w")
    answer = other.offer(keys(*there), "w", 1)
    assert answer is not None
    other.complete_offer("w", 1, answer.rows, True)
    other.offer(keys(*(writing or [])), "w", 1)
    session = manager.session("s")
    session.begin("r")
    assert hub.refused == 0
    return session


def rows(session: Session, *numbers: int) -> list[int]:
    return [int(row) for row in session._pool.find(keys(*numbers))]


def window(session: Session, count: int, size: int, first: int) -> tuple[int, list[int]]:
    start, answers = session.lookup_window(keys(*range(count)), "r", 1, size, first)
    return start, answers.tolist()


def held(session: Session) -> list[int]:
    return sorted(session.requests["r"].current().held.tolist())


@pytest.mark.parametrize(
    ("there", "size", "first", "start", "run"),
    [
        ([0, 1, 2, 3, 4, 5], 2, 1, 4, [4, 5]),
        ([0, 1, 2, 3], 2, 1, 2, [2, 3]),  # 4 and 5 are not there
        ([0, 1, 2, 5], 2, 1, 1, [1, 2]),  # 5 alone does not suffice
        ([0, 3, 5], 2, 1, 0, [0]),  # nothing but the first key is left
        ([0, 1], 3, 2, 0, [0, 1]),
        ([0], 3, 2, 0, []),
        ([1, 3, 5], 2, 1, 0, []),
        ([], 2, 1, 0, []),
        ([0, 1, 2], 2, 5, 1, [1, 2]),  # at the first key, no more than a window is asked
    ],
)
def test_the_last_run_that_suffices_is_held_and_nothing_else(
    there: list[int], size: int, first: int, start: int, run: list[int]
) -> None:
    session = make(there)
    expected = rows(session, *run) if run else [MISS]
    assert window(session, 6, size, first) == (start, expected)
    assert held(session) == sorted(rows(session, *run))
    session.hub.check()


def test_what_is_being_written_counts_as_there() -> None:
    session = make([3], writing=[4])
    assert window(session, 5, 2, 1) == (3, [*rows(session, 3), PENDING])
    session.hub.check()


def test_a_promotion_starts_only_for_keys_that_were_reached() -> None:
    manager, (tier,) = make_manager(8, 1)
    manager.share(clock=FakeClock())
    tier.chunks = {key(n): pattern(key(n)) for n in range(6)}
    session = manager.session("s")
    session.begin("r")
    positions = np.arange(6) * 16
    start, answers = session.lookup_window(keys(*range(6)), "r", 1, 2, 1, positions)
    assert (start, answers.tolist()) == (4, [PENDING, PENDING])
    assert sorted(tier.loads[0].keys) == keys(4, 5)
    ctx = session.requests["r"].ctx
    assert [ctx.get_offload_key_position(k) for k in keys(3, 4, 5)] == [None, 64, 80]


def test_positions_of_a_run_belong_to_its_rows() -> None:
    session = make([2, 3])
    _, answers = session.lookup_window(keys(*range(5)), "r", 1, 2, 1, np.arange(5) * 16)
    session.take("r", 1, answers)
    ctx = session.requests["r"].ctx
    assert [ctx.get_offload_key_position(k) for k in keys(2, 3)] == [32, 48]


def test_a_search_does_not_end_holds_from_before_it() -> None:
    session = make([3, 5])
    session.lookup_many(keys(3), "r", 1)
    assert window(session, 6, 2, 2) == (0, [MISS])
    assert held(session) == rows(session, 3)
    session.hub.check()


@given(
    there=st.sets(st.integers(0, 7)),
    count=st.integers(1, 8),
    size=st.integers(1, 4),
    first=st.integers(1, 4),
)
def test_it_finds_what_a_plain_search_finds(
    there: set[int], count: int, size: int, first: int
) -> None:
    session = make(sorted(there))
    expected: list[int] = []
    for end in range(count, 0, -1):
        run = list(range(max(0, end - size), end))
        if end < size and len(run) < min(first, size):
            continue
        if set(run) <= there:
            expected = run
            break
    start, answers = window(session, count, size, first)
    assert answers == (rows(session, *expected) or [MISS])
    assert start == (expected[0] if expected else 0)
    assert held(session) == sorted(rows(session, *expected))
    session.hub.check()
