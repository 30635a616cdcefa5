"""Questions of a scheduler that may take several messages: at most 1,024 keys fit into one.

Covers cutting them up and putting the answers together again. What the answers mean for a request
is in `engine_adapter.answers`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from broker import wire
from engine_adapter.answers import (
    NO_REFS,
    GroupQuery,
    GroupState,
    Offer,
    RequestState,
    pack,
    to_wire,
)
from engine_adapter.calls import Calls

log = logging.getLogger(__name__)


class NoAnswer(Exception):
    """The broker did not answer in time, or for another attempt. `replies` are the parts that did
    get an answer: rows that nobody will write."""

    def __init__(self, replies: Sequence[wire.Message] = ()) -> None:
        super().__init__()
        self.replies = replies


def begin(
    request: str,
    adapter: bytes,
    kv_transfer_params: dict[str, Any] | None,
    load_tiers: Sequence[tuple[str | None, str | None]] | None,
) -> wire.Begin:
    """The message that begins a request. Parameters that the wire does not take, which an engine's
    user may have chosen, are left out with a warning: they are no reason to lose the cache."""
    message = wire.Begin(
        request=request,
        namespace=adapter,
        kv_transfer_params=kv_transfer_params,
        load_tiers=None if load_tiers is None else tuple(load_tiers),
    )
    try:
        wire.decode(wire.encode(message)[4:])
    except (wire.WireError, TypeError, ValueError, OverflowError) as error:
        log.warning("request %s: its parameters are not sent: %s", request, error)
        message = replace(message, kv_transfer_params=None, load_tiers=None)
    return message


def split(packed: bytes, key_bytes: int) -> list[bytes]:
    """Keys that a message holds one behind the other."""
    return [packed[at : at + key_bytes] for at in range(0, len(packed), key_bytes)]


def lookup(calls: Calls, state: RequestState, groups: Sequence[GroupQuery]) -> list[GroupState]:
    """Answers for every group. NoAnswer if one message got none.

    A prefix is asked piece by piece until a piece ends with a MISS, so that nothing behind it is
    held or promoted; a window is searched in the last 1,024 keys.
    """
    state.early = []
    found = [GroupState(keys=group.keys, first=0, refs=NO_REFS) for group in groups]
    open_groups = list(range(len(groups)))
    while open_groups:
        pieces, room = [], wire.MAX_KEYS
        for number in open_groups[: wire.MAX_GROUPS]:
            if room <= 0:
                break
            piece, at = _next_piece(groups[number], len(found[number].refs), room)
            pieces.append((number, piece, at))
            room -= len(piece.keys)
        results = _ask(calls, state, [piece for _, piece, _ in pieces])
        for (number, piece, at), result in zip(pieces, results, strict=True):
            refs = np.frombuffer(result.refs, dtype=wire.ROW_REF)
            group = found[number]
            if piece.window is not None:
                group.first, group.refs = at + result.first, refs.copy()
                open_groups.remove(number)
                continue
            group.refs = np.concatenate((group.refs, refs)) if len(group.refs) else refs.copy()
            ended = not len(refs) or refs[-1]["row"] == wire.ROW_MISS
            if ended or len(group.refs) == len(group.keys):
                open_groups.remove(number)
    return found


def _next_piece(group: GroupQuery, done: int, room: int) -> tuple[GroupQuery, int]:
    """What to ask next of a group, and at which of its keys that begins."""
    if group.window is not None:
        at = max(0, len(group.keys) - room)
        first_window = group.first_window if at == 0 else group.window
    else:
        at, first_window = done, group.first_window
    if at == 0 and len(group.keys) <= room:
        return group, 0
    end = len(group.keys) if group.window is not None else at + room
    piece = replace(
        group,
        keys=group.keys[at:end],
        positions=group.positions[at:end],
        start=group.start + at,
        first_window=first_window,
    )
    return piece, at


def _ask(
    calls: Calls, state: RequestState, pieces: Sequence[GroupQuery]
) -> Sequence[wire.GroupResult]:
    seq = calls.next_seq()
    message = wire.Lookup(
        seq=seq,
        request=state.request,
        attempt=state.attempt,
        groups=tuple(to_wire(piece) for piece in pieces),
    )
    reply = calls.call(message, seq)
    if not isinstance(reply, wire.LookupReply) or reply.attempt != state.attempt:
        raise NoAnswer
    return reply.results


def offer(
    calls: Calls, state: RequestState, keys: Sequence[bytes], positions: Sequence[int]
) -> Offer:
    """Offer chunks to store. NoAnswer if a message got none; what it held ends with the attempt."""
    accepted: list[int] = []
    present: list[int] = []
    writing: list[int] = []
    refs = [NO_REFS]
    declined = False
    replies: list[wire.Message] = []
    for at in range(0, len(keys), wire.MAX_KEYS):
        end = at + wire.MAX_KEYS
        seq = calls.next_seq()
        message = wire.PrepareStore(
            seq=seq,
            request=state.request,
            attempt=state.attempt,
            positions=np.asarray(positions[at:end], dtype="<u4").tobytes(),
            keys=b"".join(keys[at:end]),
        )
        reply = calls.call(message, seq)
        if reply is not None:
            replies.append(reply)
        if not isinstance(reply, wire.StoreReply) or reply.attempt != state.attempt:
            raise NoAnswer(replies)
        for indexes, packed in (
            (accepted, reply.accepted),
            (present, reply.present),
            (writing, reply.writing),
        ):
            indexes.extend((np.frombuffer(packed, "<u4") + at).tolist())
        refs.append(np.frombuffer(reply.refs, wire.ROW_REF))
        declined = declined or reply.status is wire.StoreStatus.DECLINED
    return Offer(
        accepted=accepted,
        refs=np.concatenate(refs),
        present=present,
        writing=writing,
        declined=declined,
    )


def nothing_written(reply: wire.StoreReply) -> wire.CompleteStore:
    """Gives back the rows of an offer that no worker was told of."""
    return wire.CompleteStore(
        request=reply.request,
        attempt=reply.attempt,
        refs=reply.refs,
        success=False,
        digests=b"",
    )


def loaded(
    request: str, attempt: int, done: Sequence[tuple[bytes, np.void]], failed: Collection[bytes]
) -> wire.CompleteLoad:
    """Workers have read the rows of these keys; those of `failed` ones did not verify."""
    return wire.CompleteLoad(
        request=request,
        attempt=attempt,
        refs=pack([ref for key, ref in done if key not in failed]),
        failed=pack([ref for key, ref in done if key in failed]),
    )


def stored(
    request: str,
    attempt: int,
    done: Sequence[tuple[bytes, np.void]],
    digests: Mapping[bytes, int],
    success: bool,
) -> wire.CompleteStore:
    """Workers have written the rows of these keys, or failed to."""
    return wire.CompleteStore(
        request=request,
        attempt=attempt,
        refs=pack([ref for _, ref in done]),
        success=success,
        digests=np.array([digests[k] for k, _ in done if digests], dtype="<u8").tobytes(),
    )


def parts(packed: bytes) -> Iterator[tuple[bytes, bool]]:
    """Packed row references, 1,024 at a time, and whether more follow; one part if empty."""
    size = wire.MAX_KEYS * wire.ROW_REF.itemsize
    for at in range(0, max(1, len(packed)), size):
        yield packed[at : at + size], at + size < len(packed)
