"""What engines on one host really reuse of each other's work, against the most they could."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.conftest import Models
from tests.e2e.engines import BLOCK_TOKENS, VllmEngine, prompt
from tests.e2e.models import VOCABULARY
from tests.faults.brokers import RealBroker, eventually

CHUNK = 2 * BLOCK_TOKENS
NUM_PROMPTS = 50


def conversations(seed: int) -> list[list[int]]:
    """Prompts of five conversations, each a prefix of 512 to 1,280 tokens, in random order."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(count)]

    prefixes = [tokens(rng.randrange(512, 1280)) for _ in range(5)]
    prompts = [prefixes[n % 5] + tokens(rng.randrange(50, 300)) for n in range(NUM_PROMPTS)]
    rng.shuffle(prompts)
    return prompts


def chunks(asked: Sequence[int]) -> list[tuple[int, ...]]:
    """Each chunk that can be loaded for a prompt, named by all tokens up to its end."""
    ends = range(CHUNK, len(asked), CHUNK)  # the last token is always computed
    return [tuple(asked[:end]) for end in ends]


@dataclass
class Ran:
    """A request that an engine has answered."""

    prompt: list[int]
    began: float
    ended: float
    cached: int


def run(engine: VllmEngine, asked: list[int]) -> Ran:
    """One request, on an engine that has nothing itself."""
    assert eventually(lambda: bool(engine.ask("forget")))
    began = time.monotonic()
    (answer,) = engine.generate([asked], max_tokens=2)
    return Ran(asked, began, time.monotonic(), answer.cached)


def reuse(requests: Sequence[Ran]) -> tuple[int, int, int]:
    """Tokens that were reused, that could have been, and that two engines computed at once."""
    ended: dict[tuple[int, ...], float] = {}
    ideal = simultaneous = 0
    for ran in sorted(requests, key=lambda ran: ran.began):
        for chunk in chunks(ran.prompt):
            if chunk not in ended:
                ended[chunk] = ran.ended
            elif ended[chunk] <= ran.began:
                ideal += CHUNK
            else:
                simultaneous += CHUNK
    return sum(ran.cached for ran in requests), ideal, simultaneous


def test_fifty_prompts_one_at_a_time(model: Models, broker: RealBroker, tmp_path: Path) -> None:
    with (
        VllmEngine(tmp_path, model(), broker.path, processes=True) as a,
        VllmEngine(tmp_path, model(), broker.path, processes=True) as b,
    ):
        both = (a.ready(), b.ready())
        ran = [run(both[n % 2], asked) for n, asked in enumerate(conversations(1))]
        print([engine.own_figures() for engine in both])
    reused, ideal, simultaneous = reuse(ran)
    print(f"reused {reused} of {ideal} tokens")
    assert simultaneous == 0
    assert ideal > 20_000
    assert reused >= 0.99 * ideal


def test_fifty_prompts_on_two_engines_at_once(
    model: Models, broker: RealBroker, tmp_path: Path
) -> None:
    prompts = conversations(2)
    with (
        VllmEngine(tmp_path, model(), broker.path, processes=True) as a,
        VllmEngine(tmp_path, model(), broker.path, processes=True) as b,
        ThreadPoolExecutor(2) as threads,
    ):
        a.ready()
        b.ready()
        halves = [
            threads.submit(lambda e, mine: [run(e, asked) for asked in mine], engine, prompts[n::2])
            for n, engine in enumerate((a, b))
        ]
        ran = [each for half in halves for each in half.result()]
        print([engine.own_figures() for engine in (a, b)])
    reused, ideal, simultaneous = reuse(ran)
    print(f"reused {reused} of {ideal} tokens; {simultaneous} were computed by both at once")
    assert ideal > 10_000
    assert reused >= 0.90 * ideal


def test_a_decode_engine_computes_nothing_that_a_prefill_engine_has(
    model: Models, broker: RealBroker, tmp_path: Path
) -> None:
    with (
        VllmEngine(tmp_path, model(), broker.path, processes=True) as prefill,
        VllmEngine(tmp_path, model(), broker.path, processes=True) as decode,
    ):
        prefill.ready()
        decode.ready()
        for number in range(20):
            asked = prompt(100 + number, 1)
            (first,) = prefill.generate([asked], max_tokens=1)
            (answer,) = decode.generate([asked], max_tokens=8)  # as soon as prefill answers
            assert answer.cached == len(chunks(asked)) * CHUNK
            assert answer.tokens[0] == first.tokens[0]
