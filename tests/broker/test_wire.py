"""The codec by itself: round trips, limits, streams cut anywhere, and noise."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from enum import Enum
from typing import Any

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given

from broker import wire
from tests.broker.wire_examples import EXAMPLES
from tests.broker.wire_fuzz import TO_BROKER, stream, valid


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


@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_is_a_message_or_a_wire_error(seed: int) -> None:
    for data in stream(seed, 2000, EXAMPLES):
        _, message = _kind_of(data)
        if message is not None:
            frame_again = wire.encode(message)
            assert _kind_of(frame_again) == ("valid", message)
            assert len(repr(message)) > 0  # deep values would exhaust the stack here


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_valid_frames_of_every_type_are_valid(message: wire.Message) -> None:
    chance = random.Random(type(message).__name__)
    for _ in range(100):
        kind, found = _kind_of(valid(chance, [message]))
        assert kind == "valid"
        assert type(found) is type(message)


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
        ([3, 0, "r", 1, []], wire.Malformed),
        ([3, 1, "r", 1, [[0, 1, 0, 1, 0, b"", b""]]], wire.Malformed),
        ([3, 1, "r", 1, [[0, 0, 0, 1, 0, b"", b"12345678"]]], wire.Malformed),
        ([3, 1, "r", 1, [[0, 0, 0, 1, 0, b"1234", b""]]], wire.Malformed),
        ([3, 1, "r", 1, [[0, 0, 0, 1, 0, b"1234", b"four"]]], wire.Malformed),
        ([3, 1, "r", 1, [[0, 0, 0, 1, 0, b"1234" * 2, b"x" * 17]]], wire.Malformed),
        ([3, 1, "r", 1, [[0, 0, 0, 1, 0, b"1234", b"x" * 256]]], wire.Malformed),
        ([3, 1, "r", 1, [[0, 0, 0, 1, 0, b"1234" * 513, b"x" * 5 * 513]] * 2], wire.TooLarge),
        ([7, 1, "r", 1, b"1234", b"x" * 300], wire.Malformed),
        ([7, 0, "r", 1, b"", b""], wire.Malformed),
        ([8, "r", 1, b"x" * 16, True, b"y" * 8], wire.Malformed),
        ([12, 0, None], wire.Malformed),
        ([14, 0], wire.Malformed),
        ([68, 1, "r", 1, 0, b"1234", b"", b"", b""], wire.Malformed),
        ([69, "r", 1, b"x" * 10, b"y" * 16], None),
        ([69, "r", 1, b"x" * 10, b""], wire.Malformed),
        ([69, "r", 1, b"x" * 9, b"y" * 16], wire.Malformed),
        ([200], wire.UnknownType),
        (["10", "r"], wire.Malformed),
        ([], wire.Malformed),
    ],
)
def test_what_breaks_a_rule_is_refused(fields: list[object], error: type[Exception] | None) -> None:
    body = msgpack.packb(fields)
    if error is None:
        assert wire.decode(body)
        return
    with pytest.raises(error):
        wire.decode(body)


def test_a_lookup_may_have_1024_keys_over_all_its_groups() -> None:
    group = [0, 0, 0, 1, 0, b"1234" * 512, b"x" * 5 * 512]
    message = wire.decode(msgpack.packb([3, 1, "r", 1, [group] * 2]))
    assert isinstance(message, wire.Lookup)
    assert sum(len(g.positions) for g in message.groups) == 4 * wire.MAX_KEYS


def test_a_frame_too_long_is_refused_by_its_length_alone() -> None:
    reader = wire.FrameReader()
    reader.feed(struct.pack(">I", wire.MAX_FRAME_BYTES + 1))
    with pytest.raises(wire.TooLarge, match=str(wire.MAX_FRAME_BYTES)):
        reader.next()
    with pytest.raises(wire.TooLarge):
        wire.encode(wire.StatusReply(seq=1, status={"x": b"y" * wire.MAX_FRAME_BYTES}))


EXTENSIONS = {
    "empty": b"\xc7\x00\x05",
    "one byte": b"\xc7\x01\x05x",
    "fixed": b"\xd4\x05x",
    "fixed 16": b"\xd8\x05" + b"x" * 16,
    "timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "empty timestamp": b"\xc7\x00\xff",
    "long": b"\xc9\x00\x00\x00\x04\x05xxxx",
}


@pytest.mark.parametrize("packed", EXTENSIONS.values(), ids=EXTENSIONS)
def test_extension_types_are_refused_wherever_they_hide(packed: bytes) -> None:
    for body in (b"\x92\x0a" + packed, in_params(packed), in_params(b"\x91" + packed)):
        with pytest.raises(wire.Malformed):
            wire.decode(body)


def in_params(packed: bytes) -> bytes:
    """A Begin whose kv_transfer_params are {"a": packed}."""
    return b"\x95\x02\xa1r\xc4\x00\x81\xa1a" + packed + b"\xc0"


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def test_free_form_fields_nest_so_deep_and_no_deeper() -> None:
    assert wire.decode(in_params(nested(wire.MAX_NESTING - 1)))
    for depth in (wire.MAX_NESTING, 400, 511, 512, 900, 1020, 2000):
        with pytest.raises(wire.WireError):
            wire.decode(in_params(nested(depth)))
    status = {"a": msgpack.unpackb(nested(wire.MAX_NESTING))}
    with pytest.raises(wire.TooLarge, match=str(wire.MAX_NESTING)):
        wire.decode(wire.encode(wire.StatusReply(seq=1, status=status))[4:])


@pytest.mark.parametrize(
    "packed",
    [b"\x81\x01\x02", b"\x91\x81\xc4\x01x\x02", b"\x81\xc0\x02", b"\x81\xca\0\0\0\0\x02"],
    ids=["number", "bytes", "nil", "float"],
)
def test_keys_of_free_form_maps_are_text_at_every_depth(packed: bytes) -> None:
    with pytest.raises(wire.Malformed):
        wire.decode(in_params(packed))


def test_a_container_of_a_million_entries_is_refused_before_it_is_built() -> None:
    many = 1_000_000
    for head, entry in ((b"\xdd", b"\x80"), (b"\xdf", b"\xa0\xc0")):
        count = many // len(entry)
        body = in_params(head + struct.pack(">I", count) + entry * count)
        with pytest.raises(wire.Malformed, match=str(wire.MAX_ENTRIES)):
            wire.decode(body)


def test_many_small_values_are_refused_before_they_are_packed_again() -> None:
    lists = [[None] * 4000] * 5
    assert wire.MAX_PARAMS_BYTES < 5 * 4000
    with pytest.raises(wire.TooLarge, match="values"):
        wire.decode(msgpack.packb([2, "r", b"", {"a": lists}, None]))


# ---- attach --------------------------------------------------------------------------------------

ATTACH = next(message for message in EXAMPLES if isinstance(message, wire.Attach))


@pytest.mark.parametrize("role", [wire.Role.SCHEDULER, wire.Role.WORKER])
@pytest.mark.parametrize("size", [0, 1, 4])
def test_keys_without_a_length_can_not_be_declared(role: wire.Role, size: int) -> None:
    message = replace(ATTACH, role=role, key_bytes=size)
    with pytest.raises(wire.Malformed, match=f"key_bytes is {size}, not {wire.MIN_KEY_BYTES} to"):
        wire.decode(wire.encode(message)[4:])


def test_an_admin_has_no_keys() -> None:
    message = replace(ATTACH, role=wire.Role.ADMIN, key_bytes=0, namespace=b"")
    assert wire.decode(wire.encode(message)[4:]) == message


def test_an_engine_has_no_more_workers_than_a_session_state_can_list() -> None:
    most = replace(ATTACH, world=wire.MAX_WORLD)
    assert wire.decode(wire.encode(most)[4:]) == most
    listing = wire.SessionState(ready=False, missing=tuple(range(wire.MAX_WORLD)))
    assert wire.decode(wire.encode(listing)[4:]) == listing
    for world in (wire.MAX_WORLD + 1, 2**32 - 1):
        with pytest.raises(wire.TooLarge, match=str(wire.MAX_WORLD)):
            wire.decode(wire.encode(replace(ATTACH, world=world))[4:])


FOREIGN: dict[str, list[Any]] = {
    "older, shorter": [1, 0, "old client", "e"],
    "newer, longer": [*msgpack.unpackb(wire.encode(replace(ATTACH, protocol=2))[4:]), 5, {}],
    "newer, other types": [1, 2, "new client", "e", {"role": "scheduler"}, None],
    "newer, same shape": msgpack.unpackb(wire.encode(replace(ATTACH, protocol=2))[4:]),
}


@pytest.mark.parametrize("fields", FOREIGN.values(), ids=FOREIGN)
def test_an_attach_of_another_version_is_understood_as_such(fields: list[Any]) -> None:
    message = wire.decode(msgpack.packb(fields))
    assert isinstance(message, wire.Attach)
    assert (message.protocol, message.client, message.engine_id) == tuple(fields[1:4])
    assert message.role is wire.Role.SCHEDULER


def test_an_attach_of_this_version_is_checked_in_full() -> None:
    with pytest.raises(wire.Malformed, match="12 fields, 4 came"):
        wire.decode(msgpack.packb([1, wire.PROTOCOL_VERSION, "c", "e", 0]))
    for fields in ([1], [1, "2", "c", "e"], [1, 2], [1, 2, "c"], [1, 2, "c", "x" * 257], [1, -1]):
        with pytest.raises(wire.WireError):
            wire.decode(msgpack.packb(fields))


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


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


class Number(int, Enum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({1: "x"}, r"\ba\b.*key 1 is a int"),
        ({None: "x"}, r"\ba\b.*key None is a NoneType"),
        ({b"k": "x"}, r"\ba\b.*key b'k' is a bytes"),
        ("\ud800", r"\ba\b.*not text"),
        ({"\ud800": 1}, r"\ba\b.*not text"),
        (10**5000, r"\ba\b.*integer"),
        (deep(5000), r"\ba\b.*nested"),
    ],
    ids=["number", "none", "bytes", "surrogate", "surrogate key", "huge", "deep"],
)
def test_what_has_no_encoding_of_its_own_is_refused_by_its_name(value: Any, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        wire.namespace_digest({"a": value})


def test_a_number_with_a_name_is_that_number() -> None:
    assert wire.namespace_digest({"a": Number.ONE}) == wire.namespace_digest({"a": 1})


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
