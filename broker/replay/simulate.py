"""Replay without data: the real manager answers the requests of a trace, nobody copies a byte.

The rule is that of the published figures: a request's hits are its blocks up to the first that is
absent; afterwards all its blocks count as used, heads newest.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from broker.errors import BrokerError
from broker.replay.trace import BLOCK_TOKENS, TraceRequest
from tiers.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from tiers.manager import TieringOffloadingManager
from tiers.policies.factory import CachePolicyFactory
from tiers.primary import CPUPrimaryTierOffloadingManager
from tiers.region import NoDataRegion

LAYOUTS = ("shared", "private")
_NO_STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class BadReplay(BrokerError):
    """The combination asked for cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One combination. `memory_blocks` is the total over all engines."""

    policy: str
    engines: int
    layout: str
    memory_blocks: int
    seed: int = 0

    def check(self) -> None:
        """BadReplay if it cannot be run."""
        if self.engines < 1:
            raise BadReplay(f"{self.engines} engines: at least one is needed")
        if self.layout not in LAYOUTS:
            raise BadReplay(f"layout {self.layout!r}: must be one of {', '.join(LAYOUTS)}")
        if self.memory_blocks < self.caches:
            raise BadReplay(
                f"{self.memory_blocks} blocks for {self.caches} caches: each needs at least one"
            )
        try:
            CachePolicyFactory.get_cache_policy_cls(self.policy)
        except ValueError as error:
            raise BadReplay(f"policy {self.policy!r}: {error}") from None

    @property
    def caches(self) -> int:
        """How many separate caches there are."""
        return 1 if self.layout == "shared" else self.engines

    @property
    def sizes(self) -> list[int]:
        """Blocks of each cache; the first ones take what does not divide evenly."""
        share, remainder = divmod(self.memory_blocks, self.caches)
        return [share + (number < remainder) for number in range(self.caches)]

    def places(self, requests: int) -> list[int]:
        """Which engine gets which request: at random, the same for the same seed."""
        chooser = random.Random(self.seed)
        return [chooser.randrange(self.engines) for _ in range(requests)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a replay came to. Rates are fractions of all blocks, or prompt tokens."""

    requests: int
    block_hit_rate: float
    token_hit_rate: float
    evictions: int
    seconds: float


def make_cache(rows: int, policy: str) -> TieringOffloadingManager:
    """A manager over rows without bytes."""
    primary = CPUPrimaryTierOffloadingManager(rows, NoDataRegion(rows), policy)
    return TieringOffloadingManager(primary, [], tier_poll_interval_s=0)


def run(
    trace: Sequence[TraceRequest],
    setup: Setup,
    progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Replay; `progress` is told how many requests are done."""
    setup.check()
    # Rows beyond all blocks of the trace stay empty, so they need not be made.
    most = sum(len(request.hash_ids) for request in trace)
    caches = [make_cache(min(size, max(1, most)), setup.policy) for size in setup.sizes]
    places = setup.places(len(trace))
    blocks = hit_blocks = tokens = hit_tokens = 0
    start = time.perf_counter()
    for number, (request, place) in enumerate(zip(trace, places, strict=True)):
        hits = play(caches[place % setup.caches], str(number), request)
        blocks += len(request.hash_ids)
        hit_blocks += hits
        tokens += request.input_length
        hit_tokens += request.tokens_in(hits)
        if number % 64 == 0:
            progress(number)
    seconds = time.perf_counter() - start
    evictions = sum(cache.primary_tier.rows.evictions for cache in caches)
    for cache in caches:
        cache.shutdown()
    return Result(
        requests=len(trace),
        block_hit_rate=hit_blocks / max(1, blocks),
        token_hit_rate=hit_tokens / max(1, tokens),
        evictions=evictions,
        seconds=seconds,
    )


def keys_of(request: TraceRequest) -> list[OffloadKey]:
    """A key for every block, in KV group 0."""
    return [make_offload_key(block.to_bytes(32, "big"), 0) for block in request.hash_ids]


def play(cache: TieringOffloadingManager, name: str, request: TraceRequest) -> int:
    """One request at one manager; how many leading blocks were there."""
    keys = keys_of(request)
    ctx = ReqContext(name)
    for index, key in enumerate(keys):
        ctx.set_offload_key_position(key, (index + 1) * BLOCK_TOKENS)
    cache.on_new_request(ctx)
    answers = cache.lookup_many(keys, ctx)
    hits = sum(1 for answer in answers if answer is LookupResult.HIT)
    if hits:
        cache.prepare_load(keys[:hits], ctx)
        cache.complete_load(keys[:hits], ctx)
    _store(cache, keys, ctx)
    cache.on_request_finished(ctx)
    cache.on_schedule_end(_NO_STEP)
    return hits


def _store(cache: TieringOffloadingManager, keys: list[OffloadKey], ctx: ReqContext) -> None:
    """Offer the whole prompt; where it is longer than the cache, the head that fits."""
    room = cache.primary_tier.rows.num_rows
    output = cache.prepare_store(keys[:room], ctx)
    if output is not None and output.keys_to_store:
        cache.complete_store(output.keys_to_store, ctx)
