"""Whether to ask at all: after several calls in a row without an answer, not for a while."""

from __future__ import annotations

from collections.abc import Callable

FAILURES = 3
OPEN_S = 1.0


class Breaker:
    """Opens after FAILURES failures in a row, for OPEN_S seconds; then one call tries again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until = float("-inf")

    def allows(self) -> bool:
        """Whether a call may be made now."""
        return self._clock() >= self._open_until

    def failed(self) -> None:
        """A call got no answer."""
        self._failures += 1
        if self._failures >= FAILURES:
            self._open_until = self._clock() + OPEN_S

    def succeeded(self) -> None:
        """A call got its answer."""
        self._failures = 0
        self._open_until = float("-inf")
