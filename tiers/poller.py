"""The thread that serves tiers between an engine's steps, when no broker does.

Each round, under the manager's lock, calls `poll`; rounds never overlap with a step. It knows
nothing of what a round does. Ends itself when rounds keep failing; steps go on serving then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 1.0
STALL_WARN_S = 30.0
GIVE_UP_AFTER_FAILURES = 100
GIVE_UP_AFTER_S = 30.0
ERROR_LOG_INTERVAL_S = 1.0
JOIN_TIMEOUT_S = 5.0


class TierPoller:
    """Calls `poll` every `interval_s` seconds under `lock`, until stopped."""

    def __init__(self, lock: threading.Lock, poll: Callable[[], None], interval_s: float) -> None:
        self._lock = lock
        self._poll = poll
        self._interval_s = interval_s
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="kvquay_tier_poll", daemon=True)
        self.thread.start()

    def stop(self) -> bool:
        """Ask the thread to end; whether it has, within JOIN_TIMEOUT_S."""
        self._stop.set()
        self.thread.join(JOIN_TIMEOUT_S)
        return not self.thread.is_alive()

    def _run(self) -> None:
        last_entry = time.monotonic()
        failing_since: float | None = None
        failures = 0
        last_log = 0.0
        while not self._stop.wait(self._interval_s):
            if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
                out = time.monotonic() - last_entry
                if out > STALL_WARN_S:
                    logger.warning("tiers have not been served for %.0f s: the lock is held", out)
                    last_entry = time.monotonic()
                continue
            try:
                last_entry = now = time.monotonic()
                self._poll()
                failing_since, failures = None, 0
            except Exception:  # a failed round must not end the service; steps see it too
                failures += 1
                failing_since = now if failing_since is None else failing_since
                if now - last_log >= ERROR_LOG_INTERVAL_S:
                    last_log = now
                    logger.exception("a round of serving tiers failed (%d in a row)", failures)
                if failures >= GIVE_UP_AFTER_FAILURES and now - failing_since >= GIVE_UP_AFTER_S:
                    logger.error("%d rounds in a row failed; tiers are served by steps", failures)
                    return
            finally:
                self._lock.release()
            # Python locks are not fair: without a pause a step could wait for many rounds.
            self._stop.wait(0)
