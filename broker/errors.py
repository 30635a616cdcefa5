"""Every error the broker raises on purpose, in one tree.

A message says what failed, the numbers, and what to do next. Bugs (an illegal transition, say) are
not in this tree and are not caught.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import ClassVar

MIB = 1 << 20


class BrokerError(Exception):
    """Something the broker expects to go wrong. `retryable`: the same call may succeed later."""

    retryable: ClassVar[bool] = False


class ConfigError(BrokerError):
    """A value that somebody configured can't be used; `field` names it as the user wrote it."""

    def __init__(self, field: str, got: object, text: str) -> None:
        super().__init__(f"{field} = {got!r}: {text}")
        self.field = field
        self.got = got
        self.text = text


class MemoryTooLarge(BrokerError):
    """The region does not fit what `where` has to give; nothing was reserved, or it was let go."""

    def __init__(self, *, asked_bytes: int, available_bytes: int, where: str, advice: str) -> None:
        super().__init__(
            f"{asked_bytes / MIB:,.1f} MiB of memory asked, {available_bytes / MIB:,.1f} MiB "
            f"available ({where}); {advice}"
        )
        self.asked_bytes = asked_bytes
        self.available_bytes = available_bytes
        self.where = where


class SocketInUse(BrokerError):
    """Another live process listens on the socket; `pid` is None where the kernel hides it."""

    def __init__(self, path: str | PathLike[str], pid: int | None) -> None:
        who = "another process" if pid is None else f"process {pid}"
        super().__init__(
            f"{path} is served by {who}; stop it, or give this broker its own --socket"
        )
        self.path = path
        self.pid = pid


class CrashLoop(BrokerError):
    """The broker process died too often; restarting it again would only hide why."""

    def __init__(self, *, deaths: int, window_s: float, endings: Sequence[str]) -> None:
        super().__init__(
            f"the broker died {deaths} times within {window_s:g} s (last: {', '.join(endings)}); "
            "it is not started again; see its messages above, then start kvquay anew"
        )
        self.deaths = deaths


class DescriptorsLost(BrokerError):
    """A message came without all its file descriptors or bytes; those that came were closed."""


class SupervisorLost(BrokerError):
    """The supervisor is gone or does not answer; the broker must end."""


class LinkProtocolError(BrokerError):
    """Supervisor and broker do not speak the same language; both must be of one installation."""
