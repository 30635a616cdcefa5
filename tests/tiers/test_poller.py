"""The poll thread: serves between steps, never inside one, and gives up loudly."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import pytest

import tiers.poller as poller
from tests.tiers.doubles import ScriptedTier, key, make_manager
from tiers import teardown
from tiers.base import JobResult, LookupResult, ParentManager, ReqContext, ScheduleEndContext
from tiers.manager import TieringOffloadingManager
from tiers.poller import TierPoller

WAIT_S = 10.0
INTERVAL_S = 0.0005


class ServingTier(ScriptedTier):
    """Counts how often, and by whom, it is polled and served."""

    serves_external_requests = True
    asks = False

    def __init__(self, view: memoryview, tier_type: str = "serving") -> None:
        super().__init__(view, tier_type)
        self.serves = 0
        self.polls = 0
        self.nested_polls = 0
        self.threads: set[int] = set()
        self.rounds = threading.Semaphore(0)
        self.ended_by_live_thread: bool | None = None
        self.thread: threading.Thread | None = None
        self._serving = False

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self.polls += 1
        self.nested_polls += self._serving
        return super().get_finished_jobs()

    def serve_external_requests(self, parent: ParentManager) -> None:
        self._serving = True
        self.serves += 1
        self.threads.add(threading.get_ident())
        if self.asks:
            ctx = ReqContext("peer")
            parent.on_new_request(ctx)
            assert parent.lookup(key(1), ctx) is LookupResult.MISS
            parent.on_request_finished(ctx)
        self._serving = False
        self.rounds.release()

    def shutdown(self) -> None:
        self.ended_by_live_thread = self.thread is not None and self.thread.is_alive()


class AskingTier(ServingTier):
    """Looks a key up for a peer whenever it is served."""

    asks = True


class QuietTier(ServingTier):
    """As the former, but it did not ask for service between steps."""

    serves_external_requests = False


def make(*kinds: type[ServingTier]) -> tuple[TieringOffloadingManager, list[ServingTier]]:
    base, _ = make_manager(4)
    view = base.primary_tier.get_kv_memoryview()
    made = [kind(view, f"t{i}") for i, kind in enumerate(kinds)]
    manager = TieringOffloadingManager(base.primary_tier, list(made), INTERVAL_S)
    for tier in made:
        tier.thread = manager._tier_poll_thread
    return manager, made


def rounds(tier: ServingTier, count: int) -> None:
    for _ in range(count):
        assert tier.rounds.acquire(timeout=WAIT_S)


def step(manager: TieringOffloadingManager) -> None:
    with manager.lock:
        manager.on_schedule_end(ScheduleEndContext((), ()))


def test_tiers_that_asked_are_served_between_steps_and_the_others_by_steps() -> None:
    manager, (serving, quiet) = make(ServingTier, QuietTier)
    rounds(serving, 3)
    assert threading.get_ident() not in serving.threads
    assert (quiet.serves, quiet.polls) == (0, 0)
    step(manager)
    assert (quiet.serves, quiet.polls) == (1, 1)
    manager.shutdown()


def test_a_held_lock_keeps_the_thread_out() -> None:
    manager, (serving,) = make(ServingTier)
    rounds(serving, 1)
    with manager.lock:
        before = serving.serves
        assert not threading.Event().wait(INTERVAL_S * 20)
        assert serving.serves == before
    rounds(serving, 2)
    manager.shutdown()


def test_a_lookup_for_a_peer_polls_nobody_and_leaves_the_step_its_poll() -> None:
    manager, (asking, quiet) = make(AskingTier, QuietTier)
    rounds(asking, 3)
    with manager.lock:
        assert not manager._processed_jobs_this_step
        assert (asking.nested_polls, quiet.polls) == (0, 0)
        manager.lookup(key(2), ReqContext("r"))
        assert quiet.polls == 1
        manager.poll_tiers()
        assert manager._processed_jobs_this_step  # put back as the step had it
        manager.lookup(key(2), ReqContext("r"))
        assert quiet.polls == 1
    manager.shutdown()


def test_no_thread_without_a_tier_that_asks_or_without_an_interval() -> None:
    manager, _ = make(QuietTier)
    assert manager._tier_poll_thread is None
    manager.shutdown()
    base, _ = make_manager(4)
    tier = ServingTier(base.primary_tier.get_kv_memoryview())
    stepped = TieringOffloadingManager(base.primary_tier, [tier], 0.0)
    assert stepped._tier_poll_thread is None
    step(stepped)
    assert tier.serves == 1
    stepped.shutdown()


def test_the_thread_ends_before_the_tiers_do() -> None:
    manager, (serving,) = make(ServingTier)
    rounds(serving, 1)
    thread = manager._tier_poll_thread
    assert thread is not None
    manager.shutdown()
    assert serving.ended_by_live_thread is False
    assert not thread.is_alive()


def test_a_failing_round_is_logged_now_and_then_and_the_next_one_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = threading.Semaphore(0)

    def poll() -> None:
        calls.release()
        raise OSError("unplugged")

    thread = TierPoller(threading.Lock(), poll, INTERVAL_S)
    for _ in range(5):
        assert calls.acquire(timeout=WAIT_S)
    assert thread.stop()
    failures = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert 1 <= len(failures) < 5
    assert "unplugged" in caplog.text


def test_it_gives_up_after_failures_without_a_success_between(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "GIVE_UP_AFTER_FAILURES", 3)
    monkeypatch.setattr(poller, "GIVE_UP_AFTER_S", 0.0)
    outcomes = iter([True, False, False, True, False, False, False])
    calls: list[bool] = []
    lock = threading.Lock()

    def poll() -> None:
        assert lock.locked()
        calls.append(next(outcomes))
        if not calls[-1]:
            raise OSError("unplugged")

    thread = TierPoller(lock, poll, INTERVAL_S)
    thread.thread.join(WAIT_S)
    assert not thread.thread.is_alive()
    assert len(calls) == 7
    assert "3 rounds in a row failed" in caplog.text
    assert not lock.locked()
    assert thread.stop()


def test_it_says_when_it_is_kept_out_for_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "LOCK_TIMEOUT_S", 0.001)
    monkeypatch.setattr(poller, "STALL_WARN_S", 0.005)
    lock = threading.Lock()
    warned = threading.Event()

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "have not been served" in record.getMessage():
                warned.set()

    handler = Listen()
    poller.logger.addHandler(handler)
    served = threading.Event()
    with lock:
        thread = TierPoller(lock, served.set, INTERVAL_S)
        assert warned.wait(WAIT_S)
        assert not served.is_set()
    assert served.wait(WAIT_S)
    assert thread.stop()
    poller.logger.removeHandler(handler)


def test_a_thread_that_hangs_with_the_lock_keeps_tiers_and_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poller, "JOIN_TIMEOUT_S", 0.01)
    monkeypatch.setattr(teardown, "JOIN_TIMEOUT_S", 0.01)
    manager, (serving,) = make(ServingTier)
    inside, free = threading.Event(), threading.Event()

    def hang(parent: ParentManager) -> None:
        inside.set()
        assert free.wait(WAIT_S)

    with manager.lock:
        serving.serve_external_requests = hang  # type: ignore[method-assign]
    assert inside.wait(WAIT_S)
    with pytest.raises(RuntimeError, match="hangs with the lock held"):
        manager.shutdown()
    assert serving.ended_by_live_thread is None
    assert manager.primary_tier.get_kv_memoryview() is not None
    free.set()
    thread = manager._tier_poll_thread
    assert thread is not None
    thread.join(WAIT_S)
    manager.shutdown()


def test_a_thread_that_hangs_outside_the_lock_is_kept_out_of_the_teardown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, (serving,) = make(ServingTier)
    rounds(serving, 1)
    held: list[bool] = []
    monkeypatch.setattr(manager._poller, "stop", lambda: False)
    monkeypatch.setattr(serving, "shutdown", lambda: held.append(manager.lock.locked()))
    manager.shutdown()
    assert held == [True]
    assert not manager.lock.locked()
    monkeypatch.undo()
    assert manager._poller is not None
    manager._poller.stop()
