"""What may be so for every request is said once a minute, not every time."""

from __future__ import annotations

from collections.abc import Callable

WARN_EVERY_S = 60.0


class OnceAMinute:
    """Of one kind of message; what it says and how is the caller's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said_at = float("-inf")

    def is_due(self) -> bool:
        """Whether to say it now; it then counts as said."""
        now = self._clock()
        if now - self._said_at < WARN_EVERY_S:
            return False
        self._said_at = now
        return True

    def forget(self) -> None:
        """What was the matter is over: the next time is due at once."""
        self._said_at = float("-inf")
