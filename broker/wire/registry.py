"""Which message has which number, and how its fields are checked. Holds no message itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from broker.wire.fields import Check


@dataclass(frozen=True, slots=True)
class Message:
    """One message; its fields in wire order are those of the dataclass."""


Whole = Callable[[Any], None]
"""Checks what one field can't tell: how fields of a message fit each other."""

MESSAGE_TYPES: dict[
    int, tuple[type[Message], tuple[str, ...], tuple[Check, ...], Whole | None]
] = {}
MESSAGE_CODES: dict[type[Message], tuple[int, tuple[str, ...]]] = {}


def message(
    number: int, whole: Whole | None = None, /, **checks: Check
) -> Callable[[type[Any]], type[Any]]:
    """Register a message type under `number`; `checks` are its fields, in wire order. `whole` sees
    the message once each field is good by itself.
    """

    def register(kind: type[Any]) -> type[Any]:
        names = tuple(field.name for field in fields(kind))
        if names != tuple(checks):
            raise TypeError(f"{kind.__name__} has fields {names}, checks for {tuple(checks)}")
        MESSAGE_TYPES[number] = (kind, names, tuple(checks.values()), whole)
        MESSAGE_CODES[kind] = (number, names)
        return kind

    return register
