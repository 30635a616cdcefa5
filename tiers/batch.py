"""Lookup of a whole prompt at once: the answers of one key after the other, without their price."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from tiers.base import LookupResult, OffloadKey, ReqContext
from tiers.metrics import TieringMetricsTracker
from tiers.rows import PrimaryRows


def lookup_in_turn(
    rows: PrimaryRows,
    metrics: TieringMetricsTracker,
    keys: Sequence[OffloadKey],
    ctx: ReqContext,
    ask_tiers: Callable[[OffloadKey], LookupResult],
) -> list[LookupResult]:
    """Answers for `keys` as far as the first MISS, which is the last.

    What the tiers are asked may start a promotion, which may evict a key further on; so the rows of
    the rest are found anew after each question.
    """
    results: list[LookupResult] = []
    while len(results) < len(keys):
        start = time.perf_counter()
        rest = keys[len(results) :]
        found = rows.find(rest)
        absent = np.flatnonzero(found < 0)
        known = int(absent[0]) if len(absent) else len(rest)
        ready = rows.slots.ref_cnt[found[:known]] >= 0
        results.extend(
            LookupResult.HIT if there else LookupResult.HIT_PENDING for there in ready.tolist()
        )
        hits = int(np.count_nonzero(ready))  # what is pending counts once it is known
        queries = hits + (known < len(rest))
        took = time.perf_counter() - start
        metrics.on_lookup_batch(ctx, metrics.primary_tier_label, queries, hits, took)
        if known < len(rest):
            result = ask_tiers(rest[known])
            results.append(result)
            if result is LookupResult.MISS:
                break
    return results
