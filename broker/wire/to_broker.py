"""Messages that an engine or an admin sends, numbers 1 to 63. Meaning: docs/wire.md."""

from __future__ import annotations

from collections.abc import Sequence
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
    at_most,
    blob,
    boolean,
    keys_fit,
    list_of,
    namespace_id,
    one_of,
    optional,
    pair,
    params,
    record,
    sequence,
)
from broker.wire.registry import Message, message
from broker.wire.vocabulary import (
    MAX_GROUPS,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_WORLD,
    MIN_KEY_BYTES,
    PROTOCOL_VERSION,
    ROW_REF,
    LookupMode,
    Malformed,
    Role,
    TooLarge,
)

_WORD_BYTES = 4


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


def _check_attach(attach: Attach) -> None:
    if attach.role is not Role.ADMIN and attach.key_bytes < MIN_KEY_BYTES:
        raise Malformed(
            f"key_bytes is {attach.key_bytes}, not {MIN_KEY_BYTES} to {MAX_KEY_BYTES}: a block "
            "hash and the 4 bytes of its group"
        )


def _check_lookup(lookup: Lookup) -> None:
    count = sum(len(group.positions) for group in lookup.groups) // _WORD_BYTES
    if count > MAX_KEYS:
        raise TooLarge(f"groups have {count} keys together, at most {MAX_KEYS} fit a message")
    for group in lookup.groups:
        keys_fit(group.keys, len(group.positions) // _WORD_BYTES, "groups")
        if group.mode is LookupMode.WINDOW and not group.window:
            raise Malformed("groups: a window of 0 chunks; it is 1 at least, or use a prefix")


def _check_offer(offer: PrepareStore) -> None:
    keys_fit(offer.keys, len(offer.positions) // _WORD_BYTES, "keys")


def _check_stored(stored: CompleteStore) -> None:
    if stored.digests and len(stored.digests) != len(stored.refs):
        raise Malformed(
            f"digests are {len(stored.digests) // 8} for {len(stored.refs) // ROW_REF.itemsize} "
            "rows: one for each, or none"
        )


@message(
    1,
    _check_attach,
    protocol=U32,
    client=NAME,
    engine_id=NAME,
    role=one_of(Role),
    rank=U32,
    world=at_most(MAX_WORLD),
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


def attach_head(values: Sequence[Any]) -> Attach | None:
    """What every version can read of an Attach (`values`: type, fields) of another version; None
    if it is of this one. Nothing but protocol, client and engine_id means anything in it: enough
    to refuse it by name.
    """
    if len(values) < 4:
        raise Malformed(f"Attach begins with protocol, client, engine_id; {len(values) - 1} came")
    protocol = U32(values[1], "protocol")
    if protocol == PROTOCOL_VERSION:
        return None
    return Attach(
        protocol=protocol,
        client=NAME(values[2], "client"),
        engine_id=NAME(values[3], "engine_id"),
        role=Role.SCHEDULER,
        rank=0,
        world=0,
        row_bytes=0,
        key_bytes=0,
        pid=0,
        namespace=b"",
        weights_version=None,
        events=False,
    )


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


@message(
    3, _check_lookup, seq=sequence, request=NAME, attempt=U32, groups=list_of(_GROUP, MAX_GROUPS)
)
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


@message(7, _check_offer, seq=sequence, request=NAME, attempt=U32, positions=WORDS, keys=KEYS)
@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareStore(Message):
    """Offer of chunks to store; answered by StoreReply. `positions`: end token of each, u32 LE."""

    seq: int
    request: str
    attempt: int
    positions: bytes
    keys: bytes


@message(
    8,
    _check_stored,
    request=NAME,
    attempt=U32,
    refs=REFS,
    success=boolean,
    digests=blob(8, MAX_KEYS),
)
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


@message(12, seq=sequence, weights_version=optional(NAME))
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


@message(14, seq=sequence)
@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Message):
    """Are you there; answered by Pong."""

    seq: int


@message(15, seq=sequence, verify=boolean)
@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Message):
    """An admin asks for status; answered by StatusReply. `verify`: check the laws first."""

    seq: int
    verify: bool


@message(16, seq=sequence, namespace=NAME, weights_version=optional(NAME))
@dataclass(frozen=True, slots=True, kw_only=True)
class ResetNamespace(Message):
    """An admin moves all sessions of a namespace (hex, or its beginning) to a new epoch;
    answered by ResetReply or Error.
    """

    seq: int
    namespace: str
    weights_version: str | None
