"""The control-plane thread: jobs that ended, deadlines, requests from outside, sweeps.

Works in rounds of at most ROUND_S seconds under the pools' lock, gives it back between them, and
sleeps on a bell that completions ring, with a slow poll as a fallback. It never touches a socket of
an engine: what it finds out is queued in the sessions, and the main loop is rung to send it.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from broker.pool import Pool
from broker.processes import EventFd
from tiers.base import ScheduleEndContext

log = logging.getLogger(__name__)

ROUND_S = 100e-6
FALLBACK_POLL_S = 0.25
BUSY_POLL_S = 0.001
"""While jobs run or a tier has work: tiers without a bell of their own are asked this often."""


_NO_STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class ControlPlane:
    """Owns the thread. `pools` is read under `lock`."""

    def __init__(
        self,
        lock: threading.Lock,
        pools: Sequence[Pool],
        clock: Callable[[], float],
        wake_main_loop: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure` is called on this thread if it must end: the broker is not healthy then."""
        self._lock = lock
        self._pools = pools
        self._clock = clock
        self._wake_main_loop = wake_main_loop
        self._on_failure = on_failure
        self.bell = EventFd()
        self._stopping = False
        self.rounds = 0
        self._thread = threading.Thread(target=self._run, name="kvquay-control", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the thread; whether it has ended in time."""
        self._stopping = True
        self.bell.ring()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self.bell.close()
            return True
        return False

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.bell.fileno(), selectors.EVENT_READ)
        try:
            while not self._stopping:
                selector.select(self._sleep_s())
                self.bell.drain()
                self._work()
        except BaseException as error:  # the thread must not die unnoticed
            log.exception("the control-plane thread has failed")
            self._on_failure(error)
        finally:
            selector.close()

    def _sleep_s(self) -> float:
        with self._lock:
            if any(pool.has_work() for pool in self._pools):
                return BUSY_POLL_S
            ends = [pool.hub.next_deadline() for pool in self._pools]
            asking = any(pool.hub.has_retries() for pool in self._pools)
        if asking:
            return BUSY_POLL_S
        first = min((end for end in ends if end is not None), default=None)
        if first is None:
            return FALLBACK_POLL_S
        return min(FALLBACK_POLL_S, max(0.0, first - self._clock()))

    def _work(self) -> None:
        """All that is to do now, in rounds."""
        steps: Iterator[None] | None = None
        more = True
        while more and not self._stopping:
            with self._lock:
                self.rounds += 1
                steps = self._steps() if steps is None else steps
                end = time.perf_counter() + ROUND_S
                more = False
                for _ in steps:
                    if time.perf_counter() >= end:
                        more = True
                        break
                noticed = any(pool.hub.noticed for pool in self._pools)
            if noticed:
                self._wake_main_loop()
            time.sleep(0)  # Python locks are not fair: let the main loop have its turn

    def _steps(self) -> Iterator[None]:
        """One pass over all duties; a pause is possible at every yield."""
        for pool in list(self._pools):
            manager = pool.manager
            for tier in manager.secondary_tiers:
                manager.transfers.collect([tier])
                yield
            manager.poll_tiers()
            manager.transfers.submit_promotions()
            manager._flush_pending_cascades()
            for tier in manager.secondary_tiers:
                tier.on_schedule_end(_NO_STEP)
            yield
            pool.hub.tick()
            yield
            while pool.sweep():
                yield
