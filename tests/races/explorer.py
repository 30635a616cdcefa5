"""Depth-first over every choice of a run, each branch replayed from its beginning.

A run asks `choose` at each point where more than one thing may happen next. States seen before are
not explored again. Knows nothing of what is run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field


class Seen(BaseException):
    """This state was reached before: whatever follows has been tried. Not an error of the run."""


@dataclass(slots=True)
class Chooser:
    """Follows a given prefix of choices, then always takes the first one and notes what there was.

    With `names` it follows a written schedule instead, and explores nothing.
    """

    prefix: list[int] = field(default_factory=list)
    visited: set[Hashable] = field(default_factory=set)
    taken: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    names: list[str] | None = None

    def choose(self, options: Sequence[str], state: Callable[[], Hashable]) -> str:
        """One of `options`, which must not be empty. `state` is called where it is needed."""
        if self.names is not None:
            return self._by_name(options)
        at = len(self.taken)
        if at < len(self.prefix):
            index = self.prefix[at]
        else:
            fingerprint = state()
            if fingerprint in self.visited:
                raise Seen
            self.visited.add(fingerprint)
            index = 0
        self.taken.append(index)
        self.widths.append(len(options))
        self.trace.append(options[index])
        return options[index]

    def _by_name(self, options: Sequence[str]) -> str:
        assert self.names is not None
        wanted = self.names.pop(0) if self.names else options[0]
        assert wanted in options, f"{wanted} is not possible after {self.trace}, only {options}"
        self.trace.append(wanted)
        return wanted


@dataclass(frozen=True, slots=True)
class Explored:
    """How much was tried."""

    runs: int
    states: int


def explore(run: Callable[[Chooser], None], limit: int | None = None) -> Explored:
    """Call `run` until every choice was taken from every state, at most `limit` times.

    An exception of `run` gets the choices that led to it as a note.
    """
    visited: set[Hashable] = set()
    prefix: list[int] | None = []
    runs = 0
    while prefix is not None:
        if limit is not None and runs >= limit:
            raise AssertionError(f"more than {limit} runs, {len(visited)} states so far")
        chooser = Chooser(prefix, visited)
        runs += 1
        try:
            run(chooser)
        except Seen:
            pass
        except BaseException as error:
            error.add_note(f"run {runs}, choices: {chooser.trace}")
            raise
        prefix = _next(chooser.taken, chooser.widths)
    return Explored(runs, len(visited))


def _next(taken: list[int], widths: list[int]) -> list[int] | None:
    for at in range(len(taken) - 1, -1, -1):
        if taken[at] + 1 < widths[at]:
            return [*taken[:at], taken[at] + 1]
    return None
