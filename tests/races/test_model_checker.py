"""Every order in which an engine's messages, its calls and what happens around them can go.

The default run tries one fault and a call time-out for one chunk, in every order. With --all also
two chunks and chunks on their way; then two faults and time that passes, by seeded random walks.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import pytest

from tests.races import model as model_module
from tests.races.explorer import Chooser, explore
from tests.races.host import PATTERN
from tests.races.model import Model, Scenario, run_model

LOAD = ("lookup", "take", "complete", "finish")
WAIT = ("lookup", "lookup", "take", "complete", "finish")
STORE = ("offer", "complete", "finish")
BOTH = ("lookup", "take", "offer", "complete", "finish")

FAULTS = (
    *("evict", "preempt", "end", "again", "reset", "reset v2", "admin reset"),
    *("scheduler dies", "worker dies", "worker cut", "broker dies"),
)
ONE_CHUNK = {
    "load": Scenario(ready=(0,), program=LOAD),
    "store": Scenario(program=STORE),
}
ON_ITS_WAY = {
    "promotion": Scenario(in_tier=(0,), program=WAIT),
    "others-store": Scenario(writing=(0,), program=WAIT, may=("other good",)),
    "two-keys": Scenario(keys=2, ready=(0,), in_tier=(1,), program=WAIT),
    "load-and-store": Scenario(keys=2, ready=(0,), program=BOTH),
}
EVERY = {**ONE_CHUNK, **ON_ITS_WAY}
WALKS = 40


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A client says that its broker is gone, thousands of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class RandomChooser(Chooser):
    """A walk without memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def choose(self, options: Sequence[str], state: Callable[[], Hashable]) -> str:
        name = self._random.choice(options)
        self.trace.append(name)
        return name


def try_all(scenario: Scenario, *events: str) -> None:
    scenario = replace(scenario, may=(*scenario.may, *events))
    explored = explore(lambda chooser: run_model(scenario, chooser))
    assert explored.states > 50


def walk(scenario: Scenario, events: Sequence[str], walks: int) -> None:
    scenario = replace(scenario, may=(*scenario.may, *events))
    for seed in range(walks):
        chooser = RandomChooser(seed)
        try:
            run_model(scenario, chooser)
        except BaseException as error:
            error.add_note(f"seed {seed}, choices: {chooser.trace}")
            raise


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("situation", ONE_CHUNK)
def test_every_order_of_a_fault_and_a_timeout(situation: str, fault: str) -> None:
    try_all(ONE_CHUNK[situation], "timeout", fault)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("situation", ON_ITS_WAY)
def test_many_orders_around_what_is_on_its_way(situation: str, fault: str) -> None:
    walk(ON_ITS_WAY[situation], ("timeout", "pause", "patience", fault), WALKS)


@pytest.mark.all_combinations
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("situation", ON_ITS_WAY)
def test_every_order_around_what_is_on_its_way(situation: str, fault: str) -> None:
    try_all(ON_ITS_WAY[situation], "timeout", fault)


@pytest.mark.all_combinations
@pytest.mark.parametrize("faults", list(itertools.combinations(FAULTS, 2)), ids="-".join)
@pytest.mark.parametrize("situation", EVERY)
def test_many_orders_of_two_faults(situation: str, faults: tuple[str, str]) -> None:
    scenario = EVERY[situation]
    walk(scenario, ("timeout", "timeout", "pause", "patience", *faults), 10 * WALKS)


class Corrupted(Model):
    """A host on which somebody overwrites a byte of every row."""

    def follow(self) -> None:
        self.memory.data[:, PATTERN - 1] ^= 0xFF
        super().follow()


def test_the_checker_sees_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "Model", Corrupted)
    with pytest.raises(AssertionError, match="other bytes"):
        try_all(ONE_CHUNK["load"], "timeout")
