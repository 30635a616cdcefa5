"""Checks of single fields: each takes a decoded value and its name and gives the value back.

Malformed for a wrong type or range, TooLarge beyond a limit. Knows no message.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgpack

from broker.wire.vocabulary import (
    MAX_FRAME_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_NAME_BYTES,
    MAX_NESTING,
    MAX_PARAMS_BYTES,
    MAX_TEXT_BYTES,
    MIN_KEY_BYTES,
    NAMESPACE_BYTES,
    ROW_REF,
    Malformed,
    TooLarge,
)

Check = Callable[[Any, str], Any]


def unsigned(bits: int) -> Check:
    limit = 1 << bits

    def check(value: Any, name: str) -> int:
        if type(value) is not int or not 0 <= value < limit:
            raise Malformed(f"{name} is {_short(value)}, not an unsigned {bits}-bit number")
        return value

    return check


def at_most(limit: int) -> Check:
    """A number from 0 to `limit`; more is TooLarge."""

    def check(value: Any, name: str) -> int:
        if type(value) is not int or value < 0:
            raise Malformed(f"{name} is {_short(value)}, not a number from 0 to {limit}")
        if value > limit:
            raise TooLarge(f"{name} is {value}, at most {limit} fit")
        return value

    return check


def sequence(value: Any, name: str) -> int:
    """Number of a call; 0 stands for no call."""
    if type(value) is not int or not 0 < value < 1 << 32:
        raise Malformed(f"{name} is {_short(value)}, not a number from 1 to {(1 << 32) - 1}")
    return value


def text_of(max_bytes: int) -> Check:
    def check(value: Any, name: str) -> str:
        if type(value) is not str:
            raise Malformed(f"{name} is {_short(value)}, not text")
        if len(value) > max_bytes or len(value.encode("utf-8", "replace")) > max_bytes:
            raise TooLarge(f"{name} has {len(value)} characters, at most {max_bytes} bytes fit")
        return value

    return check


def blob(unit: int, max_units: int) -> Check:
    def check(value: Any, name: str) -> bytes:
        if type(value) is not bytes:
            raise Malformed(f"{name} is {_short(value)}, not bytes")
        if len(value) % unit:
            raise Malformed(f"{name} has {len(value)} bytes, not a multiple of {unit}")
        if len(value) > unit * max_units:
            raise TooLarge(f"{name} has {len(value)} bytes, at most {unit * max_units} fit")
        return value

    return check


def boolean(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise Malformed(f"{name} is {_short(value)}, not true or false")
    return value


def optional(inner: Check) -> Check:
    return lambda value, name: None if value is None else inner(value, name)


def one_of(kind: type[IntEnum]) -> Check:
    known = {int(member): member for member in kind}

    def check(value: Any, name: str) -> IntEnum:
        if type(value) is not int or value not in known:
            raise Malformed(f"{name} is {_short(value)}, not one of {sorted(known)}")
        return known[value]

    return check


def namespace_id(value: Any, name: str) -> bytes:
    if type(value) is not bytes or len(value) not in (0, NAMESPACE_BYTES):
        raise Malformed(f"{name} is {_short(value)}, not 0 or {NAMESPACE_BYTES} bytes")
    return value


def list_of(inner: Check, max_items: int) -> Check:
    def check(value: Any, name: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise Malformed(f"{name} is {_short(value)}, not a list")
        if len(value) > max_items:
            raise TooLarge(f"{name} has {len(value)} entries, at most {max_items} fit")
        return tuple(inner(item, name) for item in value)

    return check


def pair(value: Any, name: str) -> tuple[str | None, str | None]:
    if type(value) is not list or len(value) != 2:
        raise Malformed(f"{name} holds {_short(value)}, not a pair of medium and locality")
    for part, allowed in zip(value, (("CPU", "STORAGE"), ("LOCAL", "REMOTE")), strict=True):
        if part is not None and part not in allowed:
            raise Malformed(f"{name} holds {_short(part)}, not one of {allowed}")
    return value[0], value[1]


def params(value: Any, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise Malformed(f"{name} is {_short(value)}, not a map with text keys")
    # Each value takes a byte at least, so this ends before it looks at more than may come.
    _check_free_form(value, name, MAX_PARAMS_BYTES)
    size = len(msgpack.packb(value))
    if size > MAX_PARAMS_BYTES:
        raise TooLarge(f"{name} packs to {size} bytes, at most {MAX_PARAMS_BYTES} fit")
    return value


def any_map(value: Any, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise Malformed(f"{name} is {_short(value)}, not a map")
    _check_free_form(value, name, MAX_FRAME_BYTES)
    return value


def _check_free_form(root: Any, name: str, most: int) -> None:
    """Text keys at every depth, MAX_NESTING levels, `most` values. One level after the other, so
    that no depth can exhaust the stack here, nor in whoever prints or packs the value later.
    """
    level, depth, seen = [root], 0, 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise TooLarge(f"{name} is nested more than {MAX_NESTING} levels deep")
        inner: list[Any] = []
        for value in level:
            if type(value) is dict:
                if not all(type(key) is str for key in value):
                    raise Malformed(f"{name} holds a map with a key that is not text")
                inner += value.values()
            else:
                inner += value
        seen += len(inner)
        if seen > most:
            raise TooLarge(f"{name} holds over {most} values")
        level = [value for value in inner if type(value) in (dict, list)]


def keys_fit(keys: bytes, count: int, name: str) -> None:
    """Malformed unless `keys` can be `count` keys of one permitted length."""
    if count == 0:
        if keys:
            raise Malformed(f"{name}: {len(keys)} bytes of keys, but nothing that goes with a key")
        return
    size, rest = divmod(len(keys), count)
    if rest or not MIN_KEY_BYTES <= size <= MAX_KEY_BYTES:
        raise Malformed(
            f"{name}: {len(keys)} bytes can't be {count} keys of one length, {MIN_KEY_BYTES} to "
            f"{MAX_KEY_BYTES} bytes each"
        )


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, (bytes, list, dict)) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."


U8, U32, U64 = unsigned(8), unsigned(32), unsigned(64)
NAME, TEXT = text_of(MAX_NAME_BYTES), text_of(MAX_TEXT_BYTES)
KEYS = blob(1, MAX_KEYS * MAX_KEY_BYTES)
REFS = blob(ROW_REF.itemsize, MAX_KEYS)
WORDS = blob(4, MAX_KEYS)


def record(kind: Callable[..., Any], **checks: Check) -> Check:
    names = tuple(checks)
    inner = tuple(checks.values())

    def check(value: Any, name: str) -> Any:
        if type(value) is not list or len(value) != len(names):
            raise Malformed(f"{name} holds {_short(value)}, not {len(names)} fields {names}")
        return kind(**{n: c(v, n) for n, c, v in zip(names, inner, value, strict=True)})

    return check
