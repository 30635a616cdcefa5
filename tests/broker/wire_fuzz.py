"""Seeded frames for every message type: whole, half-valid and broken.

Made for a live broker (`TO_BROKER`), or with EXAMPLES for a client too. Keys are 8 bytes long, few
in number and shared by all requests, so that messages meet each other's chunks.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import msgpack

from broker import wire
from tests.broker.wire_examples import EXAMPLES, refs, words

TO_BROKER = tuple(m for m in EXAMPLES if wire.MESSAGE_CODES[type(m)][0] < 64)
VALID_SHARE = 0.4
GROUP = b"\0\0\0\0"


def frame(body: bytes) -> bytes:
    """A body with its length."""
    return struct.pack(">I", len(body)) + body


def _other(chance: random.Random, value: Any) -> Any:
    """A value near another one: often of the right type, sometimes of a wrong one."""
    strange: list[Any] = [None, True, -1, 2**64 - 1, 2**31, "", "x" * 300, b"", b"\0" * 9, [], {}]
    strange += [1.5, "r1", [[[]]], {"a": {"b": []}}, chance.randbytes(chance.randrange(64))]
    if type(value) is int and chance.random() < 0.5:
        return chance.choice([0, 1, 2, 255, 256, 2**32 - 1, min(value + 1, 2**64 - 1)])
    if type(value) is bytes and chance.random() < 0.5:
        cut = chance.randrange(len(value) + 1)
        return value[:cut] + chance.randbytes(chance.randrange(9))
    return chance.choice(strange)


def _keys(chance: random.Random, most: int) -> dict[str, bytes]:
    """`keys` and `positions` of a part of one prompt, often a long one."""
    count = chance.choice([0, 1, 2, 7, most])
    first = chance.randrange(8)
    names = range(first, first + count)
    return {
        "keys": b"".join(struct.pack(">I", name) + GROUP for name in names),
        "positions": words(*(16 * (name + 1) for name in names)),
    }


def _refs(chance: random.Random) -> bytes:
    """Row references, some of them out of range, special or twice the same."""
    rows = [*range(8), 31, 32, wire.ROW_MISS, wire.ROW_PENDING, wire.ROW_RETRY]
    return refs(
        *((chance.choice(rows), chance.randrange(4)) for _ in range(chance.choice([0, 1, 5, 40])))
    )


def _groups(chance: random.Random) -> tuple[wire.LookupGroup, ...]:
    count = chance.choice([0, 1, 1, 2, wire.MAX_GROUPS])
    return tuple(
        wire.LookupGroup(
            group=chance.randrange(3),
            mode=chance.choice(list(wire.LookupMode)),
            window=chance.choice([1, 2, 2**32 - 1]),
            first_window=chance.choice([0, 1, 2**32 - 1]),
            start=chance.choice([0, 5, 2**32 - 1]),
            **_keys(chance, wire.MAX_KEYS // count),
        )
        for _ in range(count)
    )


def _changes(chance: random.Random, message: wire.Message) -> dict[str, Any]:
    """Other values that this message may have."""
    changes: dict[str, Any] = {}
    for item in fields(message):
        if item.name == "request":
            changes["request"] = f"r{chance.randrange(4)}"
        elif item.name == "seq":
            changes["seq"] = chance.choice([1, 2, 3, 2**32 - 1])
        elif item.name in ("attempt", "epoch"):
            changes[item.name] = chance.choice([0, 1, 2, 3, 2**32 - 1])
    if isinstance(message, wire.Lookup):
        changes["groups"] = _groups(chance)
    elif isinstance(message, wire.PrepareStore):
        changes |= _keys(chance, wire.MAX_KEYS)
    elif isinstance(message, wire.Touch):
        changes["keys"] = _keys(chance, wire.MAX_KEYS)["keys"]
    elif isinstance(message, wire.TakeHolds):
        changes |= {"refs": _refs(chance), "more": chance.random() < 0.5}
    elif isinstance(message, wire.CompleteLoad):
        changes |= {"refs": _refs(chance), "failed": _refs(chance)}
    elif isinstance(message, wire.CompleteStore):
        rows = _refs(chance)
        digests = chance.choice([b"", chance.randbytes(len(rows))])
        changes |= {"refs": rows, "success": chance.random() < 0.5, "digests": digests}
    return changes


def valid(chance: random.Random, messages: Sequence[wire.Message] = TO_BROKER) -> bytes:
    """A message that decodes: an example with other names, numbers, keys and rows."""
    message = chance.choice(messages)
    return wire.encode(replace(message, **_changes(chance, message)))


def half_valid(chance: random.Random, messages: Sequence[wire.Message] = TO_BROKER) -> bytes:
    """A known type whose fields are off: other values, too many, too few."""
    message = chance.choice(messages)
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


def _in_params(packed: bytes) -> bytes:
    """A Begin with a field of free form that holds these bytes."""
    return frame(b"\x95\x02\xa2r1\xc4\x00\x81\xa1a" + packed + b"\xc0")


def broken(chance: random.Random, messages: Sequence[wire.Message] = TO_BROKER) -> bytes:
    """No message at all: noise, cut frames, bombs, foreign formats."""
    whole = valid(chance, messages)
    return chance.choice(
        [
            frame(chance.randbytes(chance.randrange(200))),
            whole[: chance.randrange(len(whole))],
            struct.pack(">I", chance.choice([2**32 - 1, wire.MAX_FRAME_BYTES + 1])) + b"x" * 20,
            frame(b"\x91" * 2000),  # nested arrays
            frame(b"\xdd\xff\xff\xff\xff"),  # an array of four billion
            frame(b"\xc6\xff\xff\xff\xff"),  # four billion bytes
            _in_params(b"\x91" * chance.choice([16, 511, 1020]) + b"\xc0"),
            _in_params(b"\xdd\x00\x01\x00\x00" + b"\x80" * 65536),  # many small objects
            _in_params(chance.choice([b"\xc7\x00\x05", b"\xd6\xff\0\0\0\1"])),  # extensions
            _in_params(b"\x81\x01\x02"),  # a key that is a number
            frame(msgpack.packb([chance.randrange(17, 64)])),
            frame(msgpack.packb([chance.randrange(80, 300)])),
            frame(b""),
            frame(b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x\x94."),  # a pickle
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        ]
    )


def stream(seed: int, frames: int, messages: Sequence[wire.Message] = TO_BROKER) -> Iterator[bytes]:
    """Frames of all kinds; the same for the same seed. `messages`: what they are made from."""
    chance = random.Random(seed)
    for _ in range(frames):
        draw = chance.random()
        if draw < VALID_SHARE:
            yield valid(chance, messages)
        else:
            yield half_valid(chance, messages) if draw < 0.8 else broken(chance, messages)
