"""The codec by itself: round trips, limits, streams cut anywhere, and noise."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given

from broker import wire
from tests.broker.wire_examples import EXAMPLES
from tests.broker.wire_fuzz import TO_BROKER, frame, stream, valid


@given(cuts=st.lists(st.integers(1, 400), max_size=60))
def test_a_stream_cut_anywhere_gives_the_same_messages(cuts: list[int]) -> None:
    data = b"".join(wire.encode(message) for message in EXAMPLES)
    reader, found, at = wire.FrameReader(), [], 0
    for size in [*cuts, len(data)]:
        reader.feed(data[at : at + size])
        at += size
        while (message := reader.next()) is not None:
            found.append(message)
    assert tuple(found) == EXAMPLES
    assert reader.buffered == 0


def _kind_of(data: bytes) -> tuple[str, wire.Message | None]:
    reader = wire.FrameReader()
    reader.feed(data)
    try:
        message = reader.next()
    except wire.WireError as error:
        return type(error).__name__, None
    return ("none" if message is None else "valid"), message


def test_at_least_three_in_ten_fuzzed_frames_are_structurally_valid() -> None:
    kinds: Counter[str] = Counter()
    types = set()
    for data in stream(1, 4000):
        kind, message = _kind_of(data)
        kinds[kind] += 1
        types.add(type(message))
    assert kinds["valid"] >= 0.3 * 4000
    assert {type(message) for message in TO_BROKER} <= types
    assert kinds["Malformed"] > 500
    assert kinds["TooLarge"] > 10
    assert kinds["UnknownType"] > 10


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ([10], wire.Malformed),
        ([10, "r", 1], wire.Malformed),
        ([10, 5], wire.Malformed),
        ([10, "x" * 257], wire.TooLarge),
        ([11, "r", -1], wire.Malformed),
        ([11, "r", 2**32], wire.Malformed),
        ([11, "r", True], wire.Malformed),
        ([6, "r", 1.0], wire.Malformed),
        ([4, "r", 1, b"1234567", False], wire.Malformed),
        ([4, "r", 1, b"12345678" * 1025, False], wire.TooLarge),
        ([2, "r", b"short", None, None], wire.Malformed),
        ([2, "r", b"", {"a": "x" * 17000}, None], wire.TooLarge),
        ([2, "r", b"", {1: 2}, None], wire.Malformed),
        ([2, "r", b"", None, [["TAPE", None]]], wire.Malformed),
        ([3, 1, "r", 1, [[0, 2, 0, 1, 0, b"", b""]]], wire.Malformed),
        ([3, 1, "r", 1, [[0, 0, 0, 1, 0, b""]]], wire.Malformed),
        ([3, 1, "r", 1, [[0, 0, 0, 1, 0, b"", b""]] * 65], wire.TooLarge),
        ([200], wire.UnknownType),
        (["10", "r"], wire.Malformed),
        ([], wire.Malformed),
    ],
)
def test_what_breaks_a_rule_is_refused(fields: list[object], error: type[Exception]) -> None:
    with pytest.raises(error):
        wire.decode(msgpack.packb(fields))


def test_a_frame_too_long_is_refused_by_its_length_alone() -> None:
    reader = wire.FrameReader()
    reader.feed(struct.pack(">I", wire.MAX_FRAME_BYTES + 1))
    with pytest.raises(wire.TooLarge, match=str(wire.MAX_FRAME_BYTES)):
        reader.next()
    with pytest.raises(wire.TooLarge):
        wire.encode(wire.StatusReply(seq=1, status={"x": b"y" * wire.MAX_FRAME_BYTES}))


def test_extension_types_are_refused() -> None:
    reader = wire.FrameReader()
    reader.feed(frame(msgpack.packb([10, msgpack.ExtType(5, b"x")])))
    with pytest.raises(wire.Malformed):
        reader.next()


def test_what_was_read_does_not_pile_up() -> None:
    reader = wire.FrameReader()
    one = valid(random.Random(1))
    for _ in range(20_000):
        reader.feed(one)
        assert reader.next() is not None
    assert reader.buffered == 0
    assert len(reader._buffer) < 4 * wire.MAX_FRAME_BYTES


# ---- namespaces ----------------------------------------------------------------------------------

EMPTIES: list[Any] = [
    {},
    {"a": None},
    {"a": ""},
    {"a": b""},
    {"a": ()},
    {"a": {}},
    {"a": 0},
    {"a": False},
]
EMPTIES += [{"a": 0.0}, {"a": -0.0}, {"a": "0"}, {"a": [0]}, {"a": [[0]]}, {"a": [None]}]
EMPTIES += [{"a": True}, {"a": 1}, {"a": "é"}, {"a": "e\u0301"}, {"b": 1}]


def test_what_looks_alike_is_told_apart() -> None:
    assert len({wire.namespace_digest(fields) for fields in EMPTIES}) == len(EMPTIES)
    assert wire.namespace_digest({"a": (1, 2)}) == wire.namespace_digest({"a": [1, 2]})
    assert wire.namespace_digest({"a": 1, "b": 2}) == wire.namespace_digest({"b": 2, "a": 1})


TEXTS = st.text(max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
MAPPINGS = st.dictionaries(TEXTS, VALUES, max_size=3)


def _tagged(value: object) -> object:
    """A value with its types, so that equality tells 1 from True."""
    if isinstance(value, dict):
        return ("map", frozenset((k, _tagged(v)) for k, v in value.items()))
    if isinstance(value, list):
        return ("list", tuple(_tagged(v) for v in value))
    return (type(value).__name__, value)


@given(a=MAPPINGS, b=MAPPINGS)
def test_digests_are_equal_exactly_if_the_values_are(a: Any, b: Any) -> None:
    same = _tagged(a) == _tagged(b)
    assert (wire.namespace_digest(a) == wire.namespace_digest(b)) is same


@pytest.mark.parametrize("value", [float("nan"), object(), {1}, 1j, lambda: None])
def test_what_is_not_resolved_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"deep\.er\[1\]"):
        wire.namespace_digest({"deep": {"er": [0, value]}})


def test_every_process_makes_the_same_digest() -> None:
    code = (
        "from broker import wire; from tests.broker.test_wire import EMPTIES; "
        "print([wire.namespace_digest(fields).hex() for fields in EMPTIES])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(1, 6)
    }
    assert len(found) == 1
