"""Messages that the broker sends, numbers from 64 on. Meaning: docs/wire.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.wire.fields import (
    KEYS,
    NAME,
    REFS,
    TEXT,
    U32,
    U64,
    WORDS,
    any_map,
    blob,
    boolean,
    keys_fit,
    list_of,
    one_of,
    record,
)
from broker.wire.registry import Message, message
from broker.wire.vocabulary import (
    MAX_ENTRIES,
    MAX_FRAME_BYTES,
    MAX_GROUPS,
    MAX_WORLD,
    ROW_REF,
    ErrorCode,
    Malformed,
    RefusalCode,
    StoreStatus,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """Row references from key `first` of the group on; keys beyond them were not reached."""

    first: int
    refs: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Chunks became readable in a medium, or left it."""

    removed: bool
    medium: str
    keys: bytes


_RESULT = record(GroupResult, first=U32, refs=REFS)
_EVENT = record(Event, removed=boolean, medium=NAME, keys=blob(1, MAX_FRAME_BYTES))


def _check_store_reply(reply: StoreReply) -> None:
    accepted, rows = len(reply.accepted) // 4, len(reply.refs) // ROW_REF.itemsize
    if accepted != rows:
        raise Malformed(f"accepted has {accepted} indexes for {rows} rows in refs")


def _check_notice(notice: Notice) -> None:
    keys_fit(notice.keys, len(notice.refs) // ROW_REF.itemsize, "keys")


@message(
    64,
    protocol=U32,
    broker=NAME,
    incarnation=U64,
    rows=U32,
    row_bytes=U64,
    rows_offset=U64,
    generation_offset=U64,
    memory_bytes=U64,
    epoch=U32,
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Attached(Message):
    """The attach holds. For a worker the memory's descriptor travels with this frame: row r lies at
    `rows_offset + r * row_bytes`, its generation (u32) at `generation_offset + 4 * r`.
    """

    protocol: int
    broker: str
    incarnation: int
    rows: int
    row_bytes: int
    rows_offset: int
    generation_offset: int
    memory_bytes: int
    epoch: int


@message(65, code=one_of(RefusalCode), text=TEXT, ours=TEXT, theirs=TEXT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """The attach does not hold; the connection ends. Both sides' values are named."""

    code: RefusalCode
    text: str
    ours: str
    theirs: str


@message(66, ready=boolean, missing=list_of(U32, MAX_WORLD))
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState(Message):
    """Whether all members of the session are there; stores and loads work only then."""

    ready: bool
    missing: tuple[int, ...]


@message(67, seq=U32, request=NAME, attempt=U32, results=list_of(_RESULT, MAX_GROUPS))
@dataclass(frozen=True, slots=True, kw_only=True)
class LookupReply(Message):
    """Answers, one per group of the Lookup."""

    seq: int
    request: str
    attempt: int
    results: tuple[GroupResult, ...]


@message(
    68,
    _check_store_reply,
    seq=U32,
    request=NAME,
    attempt=U32,
    status=one_of(StoreStatus),
    accepted=WORDS,
    refs=REFS,
    present=WORDS,
    writing=WORDS,
)
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReply(Message):
    """Answer to an offer. `accepted`, `present` and `writing` are indexes into it, u32 LE,
    ascending; `refs` is parallel to `accepted`. Keys in none of them found no room.
    """

    seq: int
    request: str
    attempt: int
    status: StoreStatus
    accepted: bytes
    refs: bytes
    present: bytes
    writing: bytes


@message(69, _check_notice, request=NAME, attempt=U32, keys=KEYS, refs=REFS)
@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Message):
    """Current answer for keys that the attempt waits for; a row is held already."""

    request: str
    attempt: int
    keys: bytes
    refs: bytes


@message(70)
@dataclass(frozen=True, slots=True, kw_only=True)
class Resync(Message):
    """Notices were dropped: look up again whatever waits."""


@message(71, events=list_of(_EVENT, MAX_ENTRIES))
@dataclass(frozen=True, slots=True, kw_only=True)
class Events(Message):
    """Chunks that this engine stored became readable, or are gone."""

    events: tuple[Event, ...]


@message(72, epoch=U32)
@dataclass(frozen=True, slots=True, kw_only=True)
class ResetNotice(Message):
    """Older claims are void: tell by TransfersEnded once older transfers have ended."""

    epoch: int


@message(73)
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReplaced(Message):
    """The memory is another one now; attach again."""


@message(74, seq=U32, epoch=U32, sessions=U32)
@dataclass(frozen=True, slots=True, kw_only=True)
class ResetReply(Message):
    """The reset is in force for `sessions` sessions."""

    seq: int
    epoch: int
    sessions: int


@message(75, seq=U32)
@dataclass(frozen=True, slots=True, kw_only=True)
class Pong(Message):
    """Answer to Ping, and to an admin's Attach (seq 0)."""

    seq: int


@message(76, seq=U32, status=any_map)
@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReply(Message):
    """Status as a map of plain values."""

    seq: int
    status: dict[str, Any]


@message(77, seq=U32, code=one_of(ErrorCode), text=TEXT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Error(Message):
    """A message was not obeyed; seq 0: it could not be read, and the connection ends."""

    seq: int
    code: ErrorCode
    text: str
