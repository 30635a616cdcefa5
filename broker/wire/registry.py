"""Which message has which number, and how its fields are checked. Holds no message itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from broker.wire.fields import Check


@dataclass(frozen=True, slots=True)
class Message:
    """One message; its fields in wire order are those of the dataclass."""


MESSAGE_TYPES: dict[int, tuple[type[Message], tuple[str, ...], tuple[Check, ...]]] = {}
MESSAGE_CODES: dict[type[Message], tuple[int, tuple[str, ...]]] = {}


def message(number: int, /, **checks: Check) -> Callable[[type[Any]], type[Any]]:
    """Register a message type under `number`; `checks` are its fields, in wire order."""

    def register(kind: type[Any]) -> type[Any]:
        names = tuple(field.name for field in fields(kind))
        if names != tuple(checks):
            raise TypeError(f"{kind.__name__} has fields {names}, checks for {tuple(checks)}")
        MESSAGE_TYPES[number] = (kind, names, tuple(checks.values()))
        MESSAGE_CODES[kind] = (number, names)
        return kind

    return register
