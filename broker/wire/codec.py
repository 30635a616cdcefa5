"""Messages to frames and back. A frame is a length and one MessagePack array; see docs/wire.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgpack

from broker.wire.registry import MESSAGE_CODES, MESSAGE_TYPES, Message
from broker.wire.to_broker import Attach, LookupGroup, attach_head
from broker.wire.to_client import Event, GroupResult
from broker.wire.vocabulary import (
    LENGTH,
    MAX_ENTRIES,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Malformed,
    TooLarge,
    UnknownType,
)


def _getter(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """All fields of a value, in order, at one call."""
    names = [field.name for field in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    if names:
        only = attrgetter(names[0])
        return lambda value: (only(value),)
    return lambda value: ()


_PARTS = {kind: _getter(kind) for kind in (LookupGroup, GroupResult, Event)}
_MESSAGES = {kind: (code, _getter(kind)) for kind, (code, _) in MESSAGE_CODES.items()}


def _plain(value: Any) -> Any:
    """Parts inside a message as arrays; called by the packer for what it does not know."""
    values = _PARTS.get(type(value))
    if values is None:
        raise TypeError(f"a message cannot carry a {type(value).__name__}")
    return values(value)


def encode(message: Message) -> bytes:
    """The frame of a message, its length first. TooLarge if it exceeds MAX_FRAME_BYTES."""
    code, values = _MESSAGES[type(message)]
    body: bytes = msgpack.packb((code, *values(message)), default=_plain)
    if len(body) > MAX_FRAME_BYTES:
        raise TooLarge(f"{type(message).__name__} of {len(body)} bytes, at most {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def _no_extension(code: int, data: bytes) -> Any:
    """`max_ext_len` lets empty ones pass; this does not."""
    raise ValueError(f"extension type {code}")


def decode(body: bytes | memoryview) -> Message:
    """The message of a frame's body. WireError if it is none."""
    try:
        values = msgpack.unpackb(
            body,
            max_ext_len=0,
            ext_hook=_no_extension,
            max_array_len=MAX_ENTRIES,
            max_map_len=MAX_ENTRIES,
        )
    except Exception as error:  # noqa: BLE001  msgpack raises many kinds; all mean bad input
        raise Malformed(f"not MessagePack of ours: {type(error).__name__} {error}"[:200]) from None
    if type(values) is not list or not values or type(values[0]) is not int:
        raise Malformed("a frame must hold an array that begins with the message type")
    known = MESSAGE_TYPES.get(values[0])
    if known is None:
        raise UnknownType(f"message type {values[0]} is unknown to protocol {PROTOCOL_VERSION}")
    kind, names, checks, whole = known
    if kind is Attach and (head := attach_head(values)) is not None:
        return head
    if len(values) != len(names) + 1:
        raise Malformed(f"{kind.__name__} has {len(names)} fields, {len(values) - 1} came")
    del values[0]
    message = kind(**{n: check(v, n) for n, check, v in zip(names, checks, values, strict=True)})
    if whole is not None:
        whole(message)
    return message


class FrameReader:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._start = 0

    @property
    def buffered(self) -> int:
        """Bytes that are not part of a message given out yet."""
        return len(self._buffer) - self._start

    def feed(self, data: bytes) -> None:
        """Bytes that came."""
        if self._start and self._start == len(self._buffer):
            self._buffer.clear()
            self._start = 0
        self._buffer += data

    def next(self) -> Message | None:
        """The next whole message; None if there is none yet. WireError if it is none."""
        have = len(self._buffer) - self._start
        if have < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._buffer, self._start)
        if size > MAX_FRAME_BYTES:
            raise TooLarge(f"a frame of {size} bytes, at most {MAX_FRAME_BYTES} are read")
        end = self._start + LENGTH.size + size
        if end > len(self._buffer):
            if self._start > MAX_FRAME_BYTES:  # keep what is consumed from piling up
                del self._buffer[: self._start]
                self._start = 0
            return None
        body = bytes(memoryview(self._buffer)[self._start + LENGTH.size : end])
        self._start = end
        return decode(body)
