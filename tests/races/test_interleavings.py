"""All interleavings of what can happen around a lookup, through real client and session code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.races.world import World

EVENTS = (
    *("reply", "timeout", "ready", "fail", "evict", "end", "preempt", "reset", "patience"),
    *("engine_death", "worker_death", "broker_death", "step", "take", "copy", "lookup"),
)
QUICK, DEEP = 3, 4


def schedules(length: int, first: str) -> Iterator[tuple[str, ...]]:
    """A lookup, then `first`, then every order of `length - 1` further events, each once."""
    rest = [event for event in EVENTS if event != first]
    for others in itertools.permutations(rest, length - 1):
        yield ("lookup", first, *others)


def run(keys: int, schedule: tuple[str, ...]) -> None:
    world = World(keys, schedule)
    try:
        world.run()
    except BaseException as error:
        error.add_note(f"{keys} key(s), schedule {schedule}")
        raise


@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("first", EVENTS)
def test_every_order_of_three_events(first: str, keys: int) -> None:
    for schedule in schedules(QUICK, first):
        run(keys, schedule)


@pytest.mark.all_combinations
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("first", EVENTS)
def test_every_order_of_four_events(first: str, keys: int) -> None:
    for schedule in schedules(DEEP, first):
        run(keys, schedule)


def test_the_checker_sees_a_broken_promise() -> None:
    world = World(1, ["lookup", "reply", "ready", "reply", "step", "lookup", "take"])
    while world.run_next_event():
        continue
    assert world.refs is not None
    row = int(world.refs["row"][0])
    world.memory._map[world.memory.rows_offset + row * 4096] ^= 0xFF
    world.do_copy()
    assert world.wrong
    world.wrong.clear()
    world.run()
