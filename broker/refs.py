"""Packed fields of messages and what they stand for in a pool: keys, row references, filters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from broker import wire
from broker.members import Counters
from broker.pool import Pool
from tiers.base import Locality, Medium, OffloadKey, TierFilter, TierMatcher
from tiers.ledger import RowArray


def split_keys(packed: bytes, size: int, namespace: bytes) -> list[OffloadKey]:
    """Keys of `size` bytes each, with the namespace in front. Malformed if they do not divide."""
    if len(packed) % size:
        raise wire.Malformed(f"{len(packed)} bytes of keys are no multiple of {size}")
    return [OffloadKey(namespace + packed[at : at + size]) for at in range(0, len(packed), size)]


def read_positions(packed: bytes, keys: int) -> NDArray[np.uint32]:
    """End tokens, one per key. Malformed if there are more or fewer."""
    if len(packed) != 4 * keys:
        raise wire.Malformed(f"{len(packed)} bytes of positions for {keys} keys, 4 bytes each")
    return np.frombuffer(packed, dtype="<u4")


def pack_answers(answers: RowArray, pool: Pool) -> bytes:
    """Rows with their generations; what is not a row (negative) as the wire's special rows."""
    refs = np.empty((len(answers), 2), dtype=np.uint32)  # laid out as ROW_REF, and cheaper
    refs[:, 0] = answers.view(np.uint32)
    generation = pool.hub.rows.slots.generation
    if len(answers) and answers.min() >= 0:
        refs[:, 1] = generation[answers]
    else:
        rows = answers >= 0
        refs[:, 1] = 0
        refs[rows, 1] = generation[answers[rows]]
    return refs.astype("<u4", copy=False).tobytes()


def unpack_rows(packed: bytes, pool: Pool, counters: Counters) -> RowArray:
    """Rows of references that still mean what they meant; others are refused and counted."""
    refs = np.frombuffer(packed, dtype=wire.ROW_REF)
    inside = refs["row"] < pool.num_rows
    counters.refuse("row out of range", len(refs) - int(np.count_nonzero(inside)))
    refs = refs[inside]
    rows: NDArray[np.int32] = refs["row"].astype(np.int32)
    same = pool.hub.rows.slots.generation[rows] == refs["generation"]
    counters.refuse("old generation", len(rows) - int(np.count_nonzero(same)))
    current: RowArray = rows[same]
    return current


def pack_indexes(indexes: Sequence[int]) -> bytes:
    """Indexes into an offer."""
    return np.array(indexes, dtype="<u4").tobytes()


def tier_filter(wanted: Sequence[tuple[str | None, str | None]] | None) -> TierFilter:
    """Which tiers a request may load from; None: all."""
    if wanted is None:
        return TierFilter.ALL
    return TierFilter(
        tuple(
            TierMatcher(
                None if medium is None else Medium(medium),
                None if locality is None else Locality(locality),
            )
            for medium, locality in wanted
        )
    )
