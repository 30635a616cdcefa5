"""No exception of ours may reach vLLM's scheduler: it would end the engine.

Knows neither what is guarded nor what goes wrong; counts of it are the owner's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast


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
