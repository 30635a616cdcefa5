"""docs/wire.md holds the very bytes of every message, and they mean what it says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from broker import wire
from tests.broker.wire_examples import EXAMPLES

DOC = Path(__file__).parents[2] / "docs" / "wire.md"
SECTION = re.compile(r"^### (\w+) \((\d+)\).*?\n```\n([0-9a-f\s]+)```", re.MULTILINE | re.DOTALL)


def documented() -> dict[str, tuple[int, bytes]]:
    return {
        name: (int(number), bytes.fromhex(text))
        for name, number, text in SECTION.findall(DOC.read_text())
    }


def test_every_message_type_has_an_example() -> None:
    assert set(documented()) == {kind.__name__ for kind in wire.MESSAGE_CODES}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_the_documented_bytes_are_the_message(message: wire.Message) -> None:
    number, frame = documented()[type(message).__name__]
    assert wire.MESSAGE_CODES[type(message)][0] == number
    reader = wire.FrameReader()
    reader.feed(frame)
    assert reader.next() == message
    assert wire.encode(message) == frame


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_every_field_is_named_in_its_section(message: wire.Message) -> None:
    text = DOC.read_text()
    section = text[text.index(f"### {type(message).__name__} (") :]
    section = section[: section.index("```")]
    for item in fields(message):
        assert f"`{item.name}`" in section
