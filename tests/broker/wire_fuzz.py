"""Seeded frames for every message type: whole, half-valid and broken."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import msgpack

from broker import wire
from tests.broker.wire_examples import EXAMPLES

TO_BROKER = tuple(m for m in EXAMPLES if wire.MESSAGE_CODES[type(m)][0] < 64)
VALID_SHARE = 0.4


def frame(body: bytes) -> bytes:
    """A body with its length."""
    return struct.pack(">I", len(body)) + body


def _other(chance: random.Random, value: Any) -> Any:
    """A value near another one: often of the right type, sometimes of a wrong one."""
    strange: list[Any] = [None, True, -1, 2**64 - 1, 2**31, "", "x" * 300, b"", b"\0" * 9, [], {}]
    strange += [1.5, "r1", [[[]]], {"a": {"b": []}}, chance.randbytes(chance.randrange(64))]
    if type(value) is int and chance.random() < 0.5:
        return chance.choice([0, 1, 2, 255, 256, 2**32 - 1, value + 1])
    if type(value) is bytes and chance.random() < 0.5:
        cut = chance.randrange(len(value) + 1)
        return value[:cut] + chance.randbytes(chance.randrange(9))
    return chance.choice(strange)


def valid(chance: random.Random) -> bytes:
    """A message that decodes: an example with other names, numbers and attempts."""
    message = chance.choice(TO_BROKER)
    changes: dict[str, Any] = {}
    for item in fields(message):
        if item.name == "request":
            changes["request"] = f"r{chance.randrange(4)}"
        elif item.name in ("attempt", "seq", "epoch"):
            changes[item.name] = chance.choice([0, 1, 2, 3, 2**32 - 1])
    return wire.encode(replace(message, **changes))


def half_valid(chance: random.Random) -> bytes:
    """A known type whose fields are off: other values, too many, too few."""
    message = chance.choice(TO_BROKER)
    values = msgpack.unpackb(wire.encode(message)[4:])
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(1, len(values) + 1)
        if at == len(values):
            values.append(_other(chance, None))
        elif chance.random() < 0.2:
            del values[at]
        else:
            values[at] = _other(chance, values[at])
        if len(values) == 1:
            break
    return frame(msgpack.packb(values))


def broken(chance: random.Random) -> bytes:
    """No message at all: noise, cut frames, bombs, foreign formats."""
    whole = valid(chance)
    return chance.choice(
        [
            frame(chance.randbytes(chance.randrange(200))),
            whole[: chance.randrange(len(whole))],
            struct.pack(">I", chance.choice([2**32 - 1, wire.MAX_FRAME_BYTES + 1])) + b"x" * 20,
            frame(b"\x91" * 2000),  # nested arrays
            frame(b"\xdd\xff\xff\xff\xff"),  # an array of four billion
            frame(b"\xc6\xff\xff\xff\xff"),  # four billion bytes
            frame(msgpack.packb([chance.randrange(17, 300)])),
            frame(b""),
            frame(b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x\x94."),  # a pickle
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        ]
    )


def stream(seed: int, frames: int) -> Iterator[bytes]:
    """Frames of all kinds; the same for the same seed."""
    chance = random.Random(seed)
    for _ in range(frames):
        draw = chance.random()
        if draw < VALID_SHARE:
            yield valid(chance)
        else:
            yield half_valid(chance) if draw < 0.8 else broken(chance)
