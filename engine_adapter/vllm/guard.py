"""No exception of ours may reach vLLM's scheduler: it would end the engine.

Knows neither what is guarded nor what goes wrong; counts of it are the owner's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

WARN_EVERY_S = 60.0


class Guarded(Protocol):
    """Whose methods are guarded."""

    def faulted(self, where: str) -> None:
        """An exception was caught in the method `where`; called where it is handled."""


_Self = TypeVar("_Self", bound=Guarded)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def or_else(
    fallback: Callable[[], _T],
) -> Callable[[Callable[Concatenate[_Self, _P], _T]], Callable[Concatenate[_Self, _P], _T]]:
    """What a method answers instead of raising: the cache then goes without."""

    def decorate(
        method: Callable[Concatenate[_Self, _P], _T],
    ) -> Callable[Concatenate[_Self, _P], _T]:
        @functools.wraps(method)
        def guarded(self: _Self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001  an engine without a cache is better than none
                self.faulted(method.__name__)
                return fallback()

        return cast("Callable[Concatenate[_Self, _P], _T]", guarded)

    return decorate


class Faults:
    """Logs the exception that is being handled, at most once a minute."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._told_at = float("-inf")

    def tell(self, where: str) -> None:
        """It was caught in `where`."""
        now = self._clock()
        if now - self._told_at >= WARN_EVERY_S:
            self._told_at = now
            self._logger.exception(
                "kvquay: %s failed; this engine goes on without the cache", where
            )
