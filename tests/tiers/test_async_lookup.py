"""Lookups by thread: shared verdicts, generations, and a tier that misbehaves or hangs."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator

import pytest

from tests.tiers.doubles import key, keys
from tiers.async_lookup import AsyncLookupManager, LookupPhase
from tiers.base import OffloadKey, ReqContext

DEADLINE_S = 10.0


class SteppedLookups(AsyncLookupManager):
    """Answers from `there`; each call of batch_lookup is reported, and waits while `gate` is shut.

    Verdicts are put by the thread after batch_lookup has returned, so `settle` waits for them.
    """

    def __init__(self, there: Iterable[OffloadKey] = (), join_timeout_s: float = 5.0) -> None:
        self.there = set(there)
        self.calls: queue.SimpleQueue[tuple[list[OffloadKey], str]] = queue.SimpleQueue()
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.extra: list[bool] = []
        super().__init__("stepped", join_timeout_s=join_timeout_s)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        self.calls.put((keys, req_context.req_id))
        assert self.gate.wait(DEADLINE_S)
        if self.fault is not None:
            raise self.fault
        return [*(key in self.there for key in keys), *self.extra]

    def settle(self) -> None:
        """Wait until the thread has answered one batch."""
        verdicts = self._pending_results.get(timeout=DEADLINE_S)
        self._pending_results.put(verdicts)


@pytest.fixture
def lookups() -> Iterator[SteppedLookups]:
    manager = SteppedLookups(keys(1, 2))
    yield manager
    manager.gate.set()
    manager.shutdown()
    assert not manager._thread.is_alive()


def ask(manager: SteppedLookups, number: int, req: str = "a") -> bool | None:
    return manager.lookup(key(number), ReqContext(req))


def resolve(manager: SteppedLookups) -> None:
    manager.flush()
    manager.settle()
    manager.flush()


def test_the_thread_is_a_daemon_named_after_its_tier(lookups: SteppedLookups) -> None:
    assert lookups._thread.daemon
    assert lookups._thread.name == "kvquay_lookup_stepped"


def test_an_answer_takes_one_step(lookups: SteppedLookups) -> None:
    assert [ask(lookups, n) for n in (1, 2, 3)] == [None, None, None]
    assert lookups.calls.empty()  # nothing is asked before the step ends
    lookups.flush()
    lookups.settle()
    assert [ask(lookups, n) for n in (1, 2, 3)] == [True, True, False]


def test_verdicts_change_only_between_steps(lookups: SteppedLookups) -> None:
    ask(lookups, 1)
    lookups.flush()
    lookups.drain_results()
    lookups._need_to_drain = False
    lookups.settle()
    assert ask(lookups, 1) is None
    lookups.flush()
    assert lookups._lookup_state[key(1)].phase is LookupPhase.RESOLVED
    assert ask(lookups, 1) is True


def test_a_step_is_one_item_and_one_call_per_request(lookups: SteppedLookups) -> None:
    ask(lookups, 1, "a")
    ask(lookups, 2, "b")
    ask(lookups, 3, "a")
    lookups.flush()
    lookups.settle()
    called = [lookups.calls.get_nowait(), lookups.calls.get_nowait()]
    assert called == [(keys(1, 3), "a"), (keys(2), "b")]
    assert lookups._pending_results.qsize() == 1


def test_requests_share_one_question(lookups: SteppedLookups) -> None:
    ask(lookups, 1, "a")
    ask(lookups, 1, "b")
    ask(lookups, 1, "a")
    resolve(lookups)
    assert ask(lookups, 1, "b") is True
    assert lookups.calls.qsize() == 1
    assert ask(lookups, 1, "c") is True
    lookups.flush()
    assert lookups.calls.qsize() == 1


def test_a_failed_load_turns_the_verdict(lookups: SteppedLookups) -> None:
    ask(lookups, 1)
    resolve(lookups)
    ask(lookups, 2)
    lookups.mark_miss(keys(1, 2, 9))
    assert ask(lookups, 1) is False
    assert ask(lookups, 2) is None
    resolve(lookups)
    assert ask(lookups, 2) is True  # was not answered yet when the load failed


def test_verdicts_go_with_the_last_request(lookups: SteppedLookups) -> None:
    ask(lookups, 1, "a")
    ask(lookups, 1, "b")
    resolve(lookups)
    lookups.cleanup("a")
    assert ask(lookups, 1, "b") is True
    lookups.cleanup("b")
    lookups.cleanup("never seen")
    assert lookups._lookup_state == {}
    assert lookups._req_keys == {}
    assert ask(lookups, 1, "c") is None


def test_a_question_whose_request_is_gone_is_not_asked(lookups: SteppedLookups) -> None:
    ask(lookups, 1, "a")
    lookups.cleanup("a")
    ask(lookups, 1, "b")  # a new question about the same key
    lookups.flush()
    lookups.settle()
    assert lookups.calls.get_nowait() == (keys(1), "b")
    assert lookups.calls.empty()


def test_a_new_request_shares_the_question_in_flight(lookups: SteppedLookups) -> None:
    lookups.gate.clear()
    ask(lookups, 1, "a")
    lookups.flush()
    lookups.cleanup("a")
    assert ask(lookups, 1, "b") is None
    assert lookups._lookup_state[key(1)].phase is LookupPhase.IN_FLIGHT
    lookups.gate.set()
    lookups.settle()
    lookups.flush()
    assert ask(lookups, 1, "b") is True
    assert lookups.calls.qsize() == 1


def test_a_verdict_that_nobody_waits_for_is_dropped(lookups: SteppedLookups) -> None:
    lookups.gate.clear()
    ask(lookups, 1)
    lookups.flush()
    lookups.cleanup("a")
    lookups.gate.set()
    lookups.settle()
    lookups.drain_results()
    assert lookups._lookup_state == {}


def test_an_old_generation_is_passed_over_and_a_second_answer_is_a_bug(
    lookups: SteppedLookups,
) -> None:
    ask(lookups, 1)
    generation = lookups._lookup_state[key(1)].generation
    lookups._pending_results.put([(key(1), generation - 1, True)])
    lookups.drain_results()
    assert ask(lookups, 1) is None
    lookups._pending_results.put([(key(1), generation, True)] * 2)
    with pytest.raises(AssertionError, match="twice"):
        lookups.drain_results()


def test_a_lookup_that_raises_counts_as_missing_and_the_thread_goes_on(
    lookups: SteppedLookups, caplog: pytest.LogCaptureFixture
) -> None:
    lookups.fault = OSError("gone")
    ask(lookups, 1)
    resolve(lookups)
    assert ask(lookups, 1) is False
    assert "failed to look up 1 keys" in caplog.text
    lookups.fault = None
    ask(lookups, 2)
    resolve(lookups)
    assert ask(lookups, 2) is True


def test_a_wrong_number_of_answers_counts_as_missing(
    lookups: SteppedLookups, caplog: pytest.LogCaptureFixture
) -> None:
    lookups.extra = [True]
    ask(lookups, 1)
    resolve(lookups)
    assert ask(lookups, 1) is False
    assert "2 answers for 1 keys" in caplog.text


def test_shutdown_leaves_a_hung_lookup_behind_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = SteppedLookups(join_timeout_s=0.0)
    manager.gate.clear()
    ask(manager, 1)
    manager.flush()
    manager.calls.get(timeout=DEADLINE_S)  # the thread is in batch_lookup now
    with caplog.at_level(logging.WARNING):
        manager.shutdown()
    assert "kvquay_lookup_stepped still hangs" in caplog.text
    assert ask(manager, 1) is False  # nobody waits for an answer that can't come
    manager.gate.set()
    manager._thread.join(DEADLINE_S)
    assert not manager._thread.is_alive()


def test_after_shutdown_nothing_is_asked(lookups: SteppedLookups) -> None:
    ask(lookups, 1)
    resolve(lookups)
    lookups.shutdown()
    lookups.shutdown()
    assert ask(lookups, 1) is True
    assert ask(lookups, 2) is False
    lookups.flush()
    assert lookups.calls.qsize() == 1
