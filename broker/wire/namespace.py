"""The digest that says which engines may share: equal exactly if all that they declare is equal."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence

from broker.wire.vocabulary import NAMESPACE_BYTES

MAX_DEPTH = 64
MAX_INTEGER_BITS = 4096  # the interpreter refuses to write much longer ones in decimal

Scalar = str | bytes | int | float | bool | None
Field = Scalar | Sequence["Field"] | Mapping[str, "Field"]


def namespace_digest(declared: Mapping[str, Field]) -> bytes:
    """16 bytes that are equal exactly if everything declared is equal.

    The order of a mapping does not matter; None, "", (), 0, False, 0.0 and an absent field all
    differ. ValueError names a field whose value is not resolved (another type, NaN, a key that is
    not text, text that is not Unicode).
    """
    return hashlib.blake2b(_canonical(declared, ""), digest_size=NAMESPACE_BYTES).digest()


def _text(value: str, where: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise ValueError(f"{where or 'the namespace'} holds {value!r}, which is not text") from None


def _canonical(value: object, where: str, depth: int = 0) -> bytes:
    """A tag, the length and the bytes of a value, for one value one string."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where.split('[')[0]} is nested more than {MAX_DEPTH} levels deep")
    if value is None:
        tag, body = b"N", b""
    elif isinstance(value, bool):
        tag, body = b"B", b"\1" if value else b"\0"
    elif isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise ValueError(
                f"{where} is an integer of {value.bit_length()} bits, at most {MAX_INTEGER_BITS}"
            )
        # int() first: a subclass may print as a name, and differently in another Python.
        tag, body = b"I", str(int(value)).encode()
    elif isinstance(value, float):
        if math.isnan(value):
            raise ValueError(f"{where or 'the namespace'} is NaN, which is equal to nothing")
        tag, body = b"F", struct.pack(">d", value)
    elif isinstance(value, str):
        tag, body = b"S", _text(value, where)
    elif isinstance(value, bytes):
        tag, body = b"Y", value
    elif isinstance(value, Mapping):
        tag = b"M"
        for key in value:
            if not isinstance(key, str):  # as text, 1 and "1" would be one key
                raise ValueError(
                    f"{where or 'the namespace'}: key {key!r} is a {type(key).__name__}, not text"
                )
        body = b"".join(
            _canonical(key, where) + _canonical(value[key], f"{where}.{key}".lstrip("."), depth + 1)
            for _, key in sorted((_text(key, where), key) for key in value)
        )
    elif isinstance(value, (list, tuple)):
        tag = b"L"
        body = b"".join(_canonical(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value))
    else:
        raise ValueError(
            f"{where or 'the namespace'} is a {type(value).__name__}: resolve it to text, numbers, "
            "bytes, a list or a mapping"
        )
    return tag + len(body).to_bytes(8, "big") + body
