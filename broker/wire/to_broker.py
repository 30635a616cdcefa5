"""Messages that an engine or an admin sends, numbers 1 to 63. Meaning: docs/wire.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.wire.fields import (
    KEYS,
    NAME,
    REFS,
    U8,
    U32,
    U64,
    WORDS,
    blob,
    boolean,
    list_of,
    namespace_id,
    one_of,
    optional,
    pair,
    params,
    record,
)
from broker.wire.registry import Message, message
from broker.wire.vocabulary import (
    MAX_GROUPS,
    MAX_KEYS,
    LookupMode,
    Role,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupGroup:
    """Chunks of one KV group. `positions`: end token of each key in the request, u32 LE.

    PREFIX: from the first key to the first MISS. WINDOW: from the end, to the first run of `window`
    chunks, or of `first_window` if it reaches the first key. `start`: chunk index of the first key.
    """

    group: int
    mode: LookupMode
    window: int
    first_window: int
    start: int
    positions: bytes
    keys: bytes


_GROUP = record(
    LookupGroup,
    group=U32,
    mode=one_of(LookupMode),
    window=U32,
    first_window=U32,
    start=U32,
    positions=WORDS,
    keys=KEYS,
)


@message(
    1,
    protocol=U32,
    client=NAME,
    engine_id=NAME,
    role=one_of(Role),
    rank=U32,
    world=U32,
    row_bytes=U64,
    key_bytes=U8,
    pid=U32,
    namespace=namespace_id,
    weights_version=optional(NAME),
    events=boolean,
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(Message):
    """A process joins its engine's session. First message of a connection; answered by Attached
    or Refused. `namespace` (scheduler only) is `namespace_digest` of what its KV depends on.
    """

    protocol: int
    client: str
    engine_id: str
    role: Role
    rank: int
    world: int
    row_bytes: int
    key_bytes: int
    pid: int
    namespace: bytes
    weights_version: str | None
    events: bool


@message(
    2,
    request=NAME,
    namespace=namespace_id,
    kv_transfer_params=optional(params),
    load_tiers=optional(list_of(pair, 16)),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Message):
    """A request begins with parameters of its own; without it the first lookup begins it. One-way.
    `namespace`: digest of the adapter's files, or empty. `load_tiers`: pairs of medium and locality
    that loads may come from; None allows all.
    """

    request: str
    namespace: bytes
    kv_transfer_params: dict[str, Any] | None
    load_tiers: tuple[tuple[str | None, str | None], ...] | None


@message(3, seq=U32, request=NAME, attempt=U32, groups=list_of(_GROUP, MAX_GROUPS))
@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup(Message):
    """Which chunks are there; answered by LookupReply. Each HIT is a hold from then on."""

    seq: int
    request: str
    attempt: int
    groups: tuple[LookupGroup, ...]


@message(4, request=NAME, attempt=U32, refs=REFS, more=boolean)
@dataclass(frozen=True, slots=True, kw_only=True)
class TakeHolds(Message):
    """prepare_load: workers will read these held rows; other holds of the attempt end, unless
    `more` says that another part of the same list follows. One-way."""

    request: str
    attempt: int
    refs: bytes
    more: bool


@message(5, request=NAME, attempt=U32, refs=REFS, failed=REFS)
@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteLoad(Message):
    """Workers have read `refs`; `failed` ones did not verify and are forgotten. One-way."""

    request: str
    attempt: int
    refs: bytes
    failed: bytes


@message(6, request=NAME, attempt=U32)
@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Message):
    """Unused holds and waits of the attempt end; it may look up again. One-way."""

    request: str
    attempt: int


@message(7, seq=U32, request=NAME, attempt=U32, positions=WORDS, keys=KEYS)
@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareStore(Message):
    """Offer of chunks to store; answered by StoreReply. `positions`: end token of each, u32 LE."""

    seq: int
    request: str
    attempt: int
    positions: bytes
    keys: bytes


@message(8, request=NAME, attempt=U32, refs=REFS, success=boolean, digests=blob(8, MAX_KEYS))
@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteStore(Message):
    """Workers have written these rows, or failed to. `digests`: xxh3-64 of each row, u64 LE, or
    empty. One-way.
    """

    request: str
    attempt: int
    refs: bytes
    success: bool
    digests: bytes


@message(9, request=NAME, keys=KEYS)
@dataclass(frozen=True, slots=True, kw_only=True)
class Touch(Message):
    """Count chunks as used now; keys in prefix order. One-way."""

    request: str
    keys: bytes


@message(10, request=NAME)
@dataclass(frozen=True, slots=True, kw_only=True)
class Finish(Message):
    """No new call will come for the request; running transfers end by their completion. One-way."""

    request: str


@message(11, request=NAME, attempt=U32)
@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    """Attempts up to `attempt` are over: unused holds end, moving rows stay apart. One-way."""

    request: str
    attempt: int


@message(12, seq=U32, weights_version=optional(NAME))
@dataclass(frozen=True, slots=True, kw_only=True)
class Reset(Message):
    """Every chunk of this engine is stale; answered by ResetReply. None: a private epoch."""

    seq: int
    weights_version: str | None


@message(13, epoch=U32)
@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersEnded(Message):
    """A worker: no transfer from before ResetNotice `epoch` runs any more. One-way."""

    epoch: int


@message(14, seq=U32)
@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Message):
    """Are you there; answered by Pong."""

    seq: int


@message(15, seq=U32, verify=boolean)
@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Message):
    """An admin asks for status; answered by StatusReply. `verify`: check the laws first."""

    seq: int
    verify: bool


@message(16, seq=U32, namespace=NAME, weights_version=optional(NAME))
@dataclass(frozen=True, slots=True, kw_only=True)
class ResetNamespace(Message):
    """An admin moves all sessions of a namespace (hex, or its beginning) to a new epoch;
    answered by ResetReply or Error.
    """

    seq: int
    namespace: str
    weights_version: str | None
