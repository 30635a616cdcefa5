"""The breaker: opens after three failures in a row, for a second, then tries one call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.breaker import FAILURES, OPEN_S, Breaker
from tests.tiers.doubles import FakeClock


def failed(times: int) -> tuple[Breaker, FakeClock]:
    clock = FakeClock()
    breaker = Breaker(clock)
    for _ in range(times):
        breaker.failed()
    return breaker, clock


def test_it_opens_at_the_third_failure_in_a_row() -> None:
    assert failed(FAILURES - 1)[0].allows()
    assert not failed(FAILURES)[0].allows()


def test_it_stays_open_for_a_second() -> None:
    breaker, clock = failed(FAILURES)
    clock.advance(OPEN_S - 0.001)
    assert not breaker.allows()
    clock.advance(0.001)
    assert breaker.allows()


def test_the_call_after_that_opens_it_again_if_it_fails() -> None:
    breaker, clock = failed(FAILURES)
    clock.advance(OPEN_S)
    breaker.failed()
    assert not breaker.allows()


def test_an_answer_closes_it_and_starts_the_count_anew() -> None:
    breaker, clock = failed(FAILURES)
    clock.advance(OPEN_S)
    breaker.succeeded()
    for _ in range(FAILURES - 1):
        breaker.failed()
    assert breaker.allows()


@given(st.lists(st.booleans(), max_size=30))
def test_it_is_open_only_after_three_failures_in_a_row(outcomes: list[bool]) -> None:
    breaker, in_a_row = Breaker(FakeClock()), 0
    for good in outcomes:
        breaker.succeeded() if good else breaker.failed()
        in_a_row = 0 if good else in_a_row + 1
        assert breaker.allows() is (in_a_row < FAILURES)
