"""Orders of events that the checker found to go wrong once, by what they must not do."""

from __future__ import annotations

from tests.races.explorer import Chooser
from tests.races.model import Scenario, run_model

LOAD = ("lookup", "take", "complete", "finish")
WAIT = ("lookup", "lookup", "take", "complete", "finish")
STORE = ("offer", "complete", "finish")
ASKED = ("next", "up scheduler", "down scheduler")
"""A call that blocks, and its answer."""


def follow(scenario: Scenario, *names: str) -> None:
    """Run the events of these names, then the first one possible until all is said and done."""
    run_model(scenario, Chooser(names=list(names)))


def test_a_worker_told_to_write_before_a_reset_finds_the_row_changed_after_it() -> None:
    scenario = Scenario(program=STORE, may=("admin reset", "evict"))
    told = (*ASKED, "admin reset", "down scheduler", "step", "down worker", "up worker")
    follow(scenario, *told, "copy", "evict", "copy")


def test_a_worker_told_to_write_finds_the_row_changed_after_the_scheduler_died() -> None:
    scenario = Scenario(program=STORE, may=("scheduler dies", "evict"))
    died = (*ASKED, "scheduler dies", "up scheduler", "down worker", "up worker")
    follow(scenario, *died, "copy", "evict", "copy")


def test_a_worker_told_to_write_finds_the_row_changed_at_the_next_broker() -> None:
    scenario = Scenario(program=STORE, may=("broker dies", "pause", "evict"))
    back = ("down worker", "pause", "up worker", "down worker")
    follow(scenario, *ASKED, "broker dies", *back, "copy", "evict", "copy")


def test_a_chunk_loaded_twice_by_one_request_is_given_back_twice() -> None:
    scenario = Scenario(ready=(0,), program=LOAD, may=("preempt",))
    follow(scenario, *ASKED, "next", "up scheduler", "copy", "preempt", *ASKED[:1], "up scheduler")


def test_a_request_name_used_again_while_it_loads_leaves_no_hold() -> None:
    scenario = Scenario(ready=(0,), program=LOAD, may=("again",))
    follow(scenario, *ASKED, "next", "up scheduler", "copy", "copy", "again")


def test_a_wait_ends_when_a_worker_dies() -> None:
    scenario = Scenario(writing=(0,), program=("lookup",), may=("worker dies",))
    follow(scenario, "next", "up scheduler", "worker dies", "up worker", "down scheduler")


def test_a_reset_outlives_the_broker_that_obeyed_it() -> None:
    scenario = Scenario(
        in_tier=(0,), program=WAIT, may=("reset v2", "broker dies", "pause", "job good")
    )
    obeyed = ("reset v2", "up scheduler", "down scheduler", "down scheduler")
    follow(scenario, *obeyed, "broker dies", "down scheduler", "step", "down worker", "pause")


def test_rows_of_a_worker_that_attaches_again_are_given_back() -> None:
    scenario = Scenario(program=("offer", "finish"), may=("worker cut", "pause"))
    cut = ("worker cut", "down worker", "pause")
    follow(scenario, *ASKED, "copy", "copy", *cut)
