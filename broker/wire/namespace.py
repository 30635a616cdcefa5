"""The digest that says which engines may share: equal exactly if all that they declare is equal."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence

from broker.wire.vocabulary import NAMESPACE_BYTES

Scalar = str | bytes | int | float | bool | None
Field = Scalar | Sequence["Field"] | Mapping[str, "Field"]


def namespace_digest(declared: Mapping[str, Field]) -> bytes:
    """16 bytes that are equal exactly if everything declared is equal.

    The order of a mapping does not matter; None, "", (), 0, False, 0.0 and an absent field all
    differ. ValueError names a field whose value is not resolved (another type, NaN).
    """
    return hashlib.blake2b(_canonical(declared, ""), digest_size=NAMESPACE_BYTES).digest()


def _canonical(value: object, where: str) -> bytes:
    """A tag, the length and the bytes of a value, for one value one string."""
    if value is None:
        tag, body = b"N", b""
    elif isinstance(value, bool):
        tag, body = b"B", b"\1" if value else b"\0"
    elif isinstance(value, int):
        tag, body = b"I", str(value).encode()
    elif isinstance(value, float):
        if math.isnan(value):
            raise ValueError(f"{where or 'the namespace'} is NaN, which is equal to nothing")
        tag, body = b"F", struct.pack(">d", value)
    elif isinstance(value, str):
        tag, body = b"S", value.encode()
    elif isinstance(value, bytes):
        tag, body = b"Y", value
    elif isinstance(value, Mapping):
        tag = b"M"
        items = sorted((str(key).encode(), key) for key in value)
        body = b"".join(
            _canonical(str(key), where) + _canonical(value[key], f"{where}.{key}".lstrip("."))
            for _, key in items
        )
    elif isinstance(value, (list, tuple)):
        tag = b"L"
        body = b"".join(_canonical(v, f"{where}[{i}]") for i, v in enumerate(value))
    else:
        raise ValueError(
            f"{where or 'the namespace'} is a {type(value).__name__}: resolve it to text, numbers, "
            "bytes, a list or a mapping"
        )
    return tag + len(body).to_bytes(8, "big") + body
