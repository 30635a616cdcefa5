"""The published trace format: one JSON object per line, one request each, in order of arrival.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, ...]}`,
where a block is 512 tokens of the prompt (the last one may be partly filled) and its id names the
whole prefix up to it. Traces with blocks of another size are refused: rates over them would be
wrong without a sign of it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from broker.errors import BrokerError

BLOCK_TOKENS: Final = 512
LIMIT: Final = 1 << 63
"""Every number lies below; so keys and arrays hold it."""


class BadTrace(BrokerError):
    """A line that is not a request of this format."""


class TraceFileError(BrokerError):
    """A file of a trace that cannot be read or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request. Lengths in tokens, timestamp in milliseconds."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def tokens_in(self, blocks: int) -> int:
        """Prompt tokens that lie in its first `blocks` blocks."""
        return min(self.input_length, blocks * BLOCK_TOKENS)

    def as_line(self) -> str:
        """The request in the format, without a line end."""
        return json.dumps(
            {
                "timestamp": self.timestamp,
                "input_length": self.input_length,
                "output_length": self.output_length,
                "hash_ids": list(self.hash_ids),
            }
        )


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """All requests of a file, or the first `limit`. BadTrace names the file and line."""
    try:
        # Bytes that are no text become a character JSON has in strings only: their line is named.
        with path.open(encoding="utf-8", errors="replace") as file:
            found = list(parse_lines(file, str(path), limit))
    except OSError as error:
        raise TraceFileError(f"{path} cannot be read: {error.strerror}") from None
    if not found:
        raise BadTrace(f"{path} holds no request")
    return found


def parse_lines(
    lines: Iterable[str], name: str, limit: int | None = None
) -> Iterator[TraceRequest]:
    """Requests of some lines; empty lines are passed over."""
    given = 0
    for number, line in enumerate(lines, 1):
        if limit is not None and given >= limit:
            return
        if line.strip():
            yield _parse(line, f"{name}, line {number}")
            given += 1


def _parse(line: str, where: str) -> TraceRequest:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadTrace(f"{where}: not JSON: {error.msg}") from None
    except ValueError:
        raise BadTrace(f"{where}: a number is too long") from None
    except RecursionError:
        raise BadTrace(f"{where}: lists are nested too deeply") from None
    if not isinstance(value, dict):
        raise BadTrace(f"{where}: not an object")
    ids = value.get("hash_ids")
    if not isinstance(ids, list) or not all(_is_count(item) for item in ids):
        raise BadTrace(f"{where}: hash_ids must be a list of numbers from 0 to 2^63 - 1")
    if not ids:
        raise BadTrace(f"{where}: hash_ids is empty")
    if len(set(ids)) != len(ids):
        raise BadTrace(f"{where}: hash_ids names a block twice")
    request = TraceRequest(
        timestamp=_count(value, "timestamp", where),
        input_length=_count(value, "input_length", where),
        output_length=_count(value, "output_length", where),
        hash_ids=tuple(ids),
    )
    needed = -(-request.input_length // BLOCK_TOKENS)
    if needed != len(ids):
        raise BadTrace(
            f"{where}: input_length {request.input_length} does not fit {len(ids)} hash_ids: it is "
            f"{needed} blocks of {BLOCK_TOKENS} tokens; only traces of such blocks can be used"
        )
    return request


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LIMIT


def _count(value: dict[str, Any], name: str, where: str) -> int:
    found = value.get(name)
    if not _is_count(found):
        raise BadTrace(f"{where}: {name} is {reprlib.repr(found)}, not a number from 0 to 2^63 - 1")
    assert isinstance(found, int)
    return found
