"""A seeded generator of chats in the trace format, for where the published trace is not at hand.

Chats begin at random times, most with a question of their own, some with a longer system prompt
that several share; each goes on with some probability after a pause, with everything said before as
its prefix. Every request begins with the same block, the service's own system prompt. The numbers
are fitted to the published trace (`kvquay trace stats` compares); nothing of it is copied.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from broker.replay.simulate import BadReplay
from broker.replay.trace import BLOCK_TOKENS, TraceRequest

CHATS_PER_SECOND: Final = 2.13
GOES_ON: Final = 0.31
GOES_ON_AGAIN: Final = 0.61
"""Most chats end after one answer; who has asked twice is likely to ask again."""
LONG_BLOCKS: Final = 24
LONG_FACTOR: Final = 0.8
"""Chats with a long prompt (a document, say) go on less often, by this factor."""
PAUSE_MEDIAN_S: Final = 123.0
PAUSE_SPREAD: Final = 0.95
PROMPT_MEDIAN_BLOCKS: Final = 10.2
PROMPT_SPREAD: Final = 1.17
MOST_BLOCKS: Final = 247
GROWTH_MEDIAN_BLOCKS: Final = 2.8
GROWTH_SPREAD: Final = 1.35
SYSTEM_PROMPTS: Final = 12
SYSTEM_PROMPT_BLOCKS: Final = (1, 6)
HAS_SYSTEM_PROMPT: Final = 0.02
SHORT_ANSWER: Final = 0.12
ANSWER_MEAN: Final = 382
ANSWER_SPREAD: Final = 185


@dataclass(slots=True)
class _Chat:
    blocks: list[int]
    tokens: int


def generate(requests: int, seed: int) -> Iterator[TraceRequest]:
    """`requests` requests in order of arrival; the same for the same arguments."""
    if requests < 1:
        raise BadReplay(f"{requests} requests: at least one is needed")
    chance = random.Random(seed)
    next_block = 1

    def fresh(count: int) -> list[int]:
        nonlocal next_block
        first, next_block = next_block, next_block + count
        return list(range(first, next_block))

    systems = [fresh(chance.randint(*SYSTEM_PROMPT_BLOCKS)) for _ in range(SYSTEM_PROMPTS)]
    turns: list[tuple[float, int, _Chat | None]] = [(0.0, 0, None)]
    order = 0
    for _ in range(requests):
        now, _, chat = heapq.heappop(turns)
        likely = GOES_ON if chat is None else GOES_ON_AGAIN
        if chat is None:  # a new chat, and the arrival of the next one
            order += 1
            heapq.heappush(turns, (now + chance.expovariate(CHATS_PER_SECOND), order, None))
            shared = [0]
            if chance.random() < HAS_SYSTEM_PROMPT:
                shared += chance.choice(systems)
            own = _blocks(chance, PROMPT_MEDIAN_BLOCKS, PROMPT_SPREAD)
            chat = _Chat(shared + fresh(own), 0)
        else:
            room = MOST_BLOCKS - len(chat.blocks)
            growth = min(room, _blocks(chance, GROWTH_MEDIAN_BLOCKS, GROWTH_SPREAD))
            # What the last block held is a prefix no more: its tokens go on into a new one.
            chat.blocks = chat.blocks[:-1] + fresh(max(1, growth))
        chat.tokens = len(chat.blocks) * BLOCK_TOKENS - chance.randrange(BLOCK_TOKENS)
        answer = _answer(chance)
        yield TraceRequest(
            timestamp=round(now * 1000),
            input_length=chat.tokens,
            output_length=answer,
            hash_ids=tuple(chat.blocks),
        )
        if len(chat.blocks) >= LONG_BLOCKS:
            likely *= LONG_FACTOR
        if chance.random() < likely and len(chat.blocks) < MOST_BLOCKS:
            order += 1
            pause = chance.lognormvariate(math.log(PAUSE_MEDIAN_S), PAUSE_SPREAD)
            heapq.heappush(turns, (now + pause, order, chat))


def _blocks(chance: random.Random, median: float, spread: float) -> int:
    return max(1, min(MOST_BLOCKS - 8, round(chance.lognormvariate(math.log(median), spread))))


def _answer(chance: random.Random) -> int:
    if chance.random() < SHORT_ANSWER:
        return chance.randint(1, 30)
    return max(1, min(2000, round(chance.gauss(ANSWER_MEAN, ANSWER_SPREAD))))
