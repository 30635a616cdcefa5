"""docs/wire.md holds the very bytes of every message, and they mean what it says."""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import fields
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from broker import wire
from tests.broker.wire_examples import EXAMPLES, refs, words

DOC = Path(__file__).parents[2] / "docs" / "wire.md"
SECTION = re.compile(
    r"^### (\w+) \((\d+)\)((?:(?!^##).)*?)^```python\n(.*?)^```\n\n```\n([0-9a-f\s]+)^```$",
    re.MULTILINE | re.DOTALL,
)
HEX_LINE = re.compile(r"^(?: *[0-9a-f]{2})+$", re.MULTILINE)


class Section(NamedTuple):
    """What docs/wire.md has on one message."""

    name: str
    number: int
    prose: str
    message: wire.Message
    frame: bytes


def value_of(node: ast.expr) -> Any:
    """A value as the document writes it: a message, a part, an enum or a literal; nothing runs."""
    match node:
        case ast.Call(func=ast.Name(id="words" | "refs" as maker), args=given, keywords=[]):
            numbers = [value_of(item) for item in given]
            return words(*numbers) if maker == "words" else refs(*numbers)
        case ast.Call(func=ast.Name(id=name), args=[], keywords=given):
            return getattr(wire, name)(**{str(item.arg): value_of(item.value) for item in given})
        case ast.Attribute(value=ast.Name(id=kind), attr=member):
            enum = getattr(wire, kind)
            assert issubclass(enum, IntEnum)
            return enum[member]
        case ast.Name(id="ROW_MISS" | "ROW_PENDING" | "ROW_RETRY" as row):
            return getattr(wire, row)
        case ast.Tuple(elts=items):
            return tuple(value_of(item) for item in items)
    return ast.literal_eval(node)


SECTIONS = [
    Section(name, int(number), prose, value_of(ast.parse(shown, mode="eval").body),
            bytes.fromhex(packed))
    for name, number, prose, shown, packed in SECTION.findall(DOC.read_text())
]  # fmt: skip
each_section = pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)


def test_every_message_type_has_an_example() -> None:
    found = [section.name for section in SECTIONS]
    assert sorted(found) == sorted(kind.__name__ for kind in wire.MESSAGE_CODES)


def test_no_bytes_of_the_document_go_unchecked() -> None:
    checked = b"".join(section.frame for section in SECTIONS) + NAMESPACE_BODY
    shown = "".join(HEX_LINE.findall(DOC.read_text()))
    assert sorted(bytes.fromhex(shown)) == sorted(checked)


@each_section
def test_the_documented_bytes_are_the_documented_message(section: Section) -> None:
    assert type(section.message).__name__ == section.name
    assert wire.MESSAGE_CODES[type(section.message)][0] == section.number
    reader = wire.FrameReader()
    reader.feed(section.frame)
    assert reader.next() == section.message
    assert reader.buffered == 0
    assert wire.encode(section.message) == section.frame


@each_section
def test_the_documented_message_is_the_example_of_the_tests(section: Section) -> None:
    assert section.message in EXAMPLES


@each_section
def test_every_field_is_explained_in_its_section(section: Section) -> None:
    for item in fields(section.message):
        assert f"- `{item.name}`: " in section.prose


@each_section
def test_what_the_broker_takes_says_when_it_is_refused(section: Section) -> None:
    assert ("\nRefused" in section.prose) is (section.number < 64)


# ---- namespaces and limits -----------------------------------------------------------------------

NAMESPACE = re.search(
    r"`(\{[^`]*\})` is encoded as\n\n```namespace\n([0-9a-f\s]+)```\n\nand its digest is `(\w+)`",
    DOC.read_text(),
)
assert NAMESPACE is not None
NAMESPACE_BODY = bytes.fromhex(NAMESPACE[2])


def test_the_documented_namespace_has_the_documented_digest() -> None:
    assert NAMESPACE is not None
    declared = ast.literal_eval(NAMESPACE[1])
    assert wire.namespace_digest(declared).hex() == NAMESPACE[3]
    made = hashlib.blake2b(NAMESPACE_BODY, digest_size=wire.NAMESPACE_BYTES).hexdigest()
    assert made == NAMESPACE[3]


def section_of(title: str) -> str:
    _, _, rest = DOC.read_text().partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0]


LIMITS = {
    "body of a frame": wire.MAX_FRAME_BYTES,
    "keys or rows": wire.MAX_KEYS,
    "groups of a Lookup": wire.MAX_GROUPS,
    "length of a key": wire.MAX_KEY_BYTES,
    "name": wire.MAX_NAME_BYTES,
    "text": wire.MAX_TEXT_BYTES,
    "`kv_transfer_params`": wire.MAX_PARAMS_BYTES,
    "nesting": wire.MAX_NESTING,
    "entries": wire.MAX_ENTRIES,
    "workers": wire.MAX_WORLD,
}


@pytest.mark.parametrize("what", LIMITS)
def test_every_limit_is_in_the_document(what: str) -> None:
    (row,) = re.findall(rf"^\| {what}[^|]*\|([^|]*)\|$", section_of("Limits"), re.MULTILINE)
    assert re.search(rf"(?<![\d,]){LIMITS[what]:,}(?![\d,])", row)


def test_every_code_is_in_the_document() -> None:
    errors, _, refusals = section_of("Error codes").partition("Of Refused.")
    for text, kind in ((errors, wire.ErrorCode), (refusals, wire.RefusalCode)):
        found = re.findall(r"^\| (\d+) \| ([\w ]+) \|", text, re.MULTILINE)
        assert [(int(code), name.replace(" ", "_").upper()) for code, name in found] == [
            (member.value, member.name) for member in kind
        ]
