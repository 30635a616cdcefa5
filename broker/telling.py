"""What the broker tells an engine by itself, cut into messages of the size that the wire allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from broker import wire
from broker.pool import Pool
from broker.refs import pack_answers
from tiers.base import OffloadingEvent, OffloadKey

EVENTS_PER_MESSAGE = 256


def notice_messages(
    notices: Mapping[tuple[str, int], Mapping[OffloadKey, int]], pool: Pool
) -> Iterator[wire.Notice]:
    """Current answers, by request and attempt; at most 1,024 keys in each message."""
    for (request, attempt), told in notices.items():
        answers = iter(told.items())
        while part := list(islice(answers, wire.MAX_KEYS)):
            rows = np.fromiter((row for _, row in part), dtype=np.int32, count=len(part))
            yield wire.Notice(
                request=request,
                attempt=attempt,
                keys=_without_namespace([key for key, _ in part]),
                refs=pack_answers(rows, pool),
            )


def event_messages(events: Iterable[OffloadingEvent]) -> Iterator[wire.Events]:
    """Stored and removed chunks in their order, as many to a message as surely fit."""
    batch: list[wire.Event] = []
    size = 0
    for event in events:
        for at in range(0, len(event.keys), wire.MAX_KEYS):
            keys = _without_namespace(event.keys[at : at + wire.MAX_KEYS])
            full = size + len(keys) > wire.MAX_FRAME_BYTES // 2
            if batch and (full or len(batch) >= EVENTS_PER_MESSAGE):
                yield wire.Events(events=tuple(batch))
                batch, size = [], 0
            batch.append(wire.Event(removed=event.removed, medium=event.medium.value, keys=keys))
            size += len(keys)
    if batch:
        yield wire.Events(events=tuple(batch))


def _without_namespace(keys: Sequence[OffloadKey]) -> bytes:
    return b"".join(key[wire.NAMESPACE_BYTES :] for key in keys)
