"""All interleavings of what can happen around a lookup, through real client and session code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.races.world import World

EVENTS = (
    *("reply", "timeout", "ready", "fail", "evict", "end", "preempt", "reset", "patience"),
    *("engine_death", "worker_death", "broker_death", "step", "take", "copy", "lookup"),
    *("offer", "write", "reattach"),
)
WARM = ("take", "copy", "broker_death", "reattach", "evict", "end", "preempt", "reset", "patience")
STORE = ("offer", "write", "preempt", "evict", "reset", "broker_death", "reattach", "end")
QUICK, DEEP = 3, 4


def schedules(length: int, first: str) -> Iterator[tuple[str, ...]]:
    """A lookup, then `first`, then every order of `length - 1` further events, each once."""
    rest = [event for event in EVENTS if event != first]
    for others in itertools.permutations(rest, length - 1):
        yield ("lookup", first, *others)


def run(keys: int, schedule: tuple[str, ...], *, warm: bool = False) -> None:
    world = World(keys, schedule, warm=warm)
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


@pytest.mark.parametrize("first", WARM)
def test_every_order_around_a_load(first: str) -> None:
    rest = [event for event in WARM if event != first]
    for others in itertools.permutations(rest, 4):
        run(2, (first, *others), warm=True)


@pytest.mark.parametrize("first", STORE)
def test_every_order_around_a_store(first: str) -> None:
    rest = [event for event in STORE if event != first]
    for others in itertools.permutations(rest, 4):
        run(1, (first, *others), warm=True)


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
    at = world.memory.rows_offset + row * 4096
    world.memory._map[at] ^= 0xFF
    world.do_copy()
    assert world.wrong
    world.memory._map[at] ^= 0xFF
    world.wrong.clear()
    world.run()
