"""The toy engine: real outputs, with and without a broker, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine_adapter.simple import SimpleCache  # noqa: E402
from engine_adapter.toy.engine import OutOfBlocks, ToyEngine, block_keys, open_cache, row_bytes  # noqa: E402
from engine_adapter.toy.model import ToyConfig  # noqa: E402
from tests.broker.harness import TestBroker, running  # noqa: E402

pytestmark = pytest.mark.torch

CONFIG = ToyConfig()
TEXT = (Path(__file__).parents[3] / "docs" / "adapter-guide.md").read_bytes()
PREFIX = TEXT[:500]
TOKENS = 24


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    with running(tmp_path, rows=256) as test_broker:
        yield test_broker


def engine_at(broker: TestBroker, name: str) -> tuple[ToyEngine, SimpleCache]:
    cache = open_cache(broker.path, name, CONFIG)
    assert cache.wait_ready(5)
    return ToyEngine(CONFIG, cache), cache


def test_outputs_depend_on_the_whole_prompt() -> None:
    engine = ToyEngine(CONFIG)
    answer = engine.generate(PREFIX, TOKENS).tokens
    assert len(set(answer)) > 4  # no degenerate loop of one token
    changed = bytes([PREFIX[0] ^ 1]) + PREFIX[1:]
    assert engine.generate(changed, TOKENS).tokens != answer


@pytest.mark.parametrize("tail", [b"", b"?", b" and then?", TEXT[600:640]])
def test_the_second_engine_loads_and_says_the_same(broker: TestBroker, tail: bytes) -> None:
    plain = ToyEngine(CONFIG)
    (a, a_cache), (b, b_cache) = engine_at(broker, "a"), engine_at(broker, "b")
    first = a.generate(PREFIX, TOKENS)
    full = len(PREFIX) // CONFIG.block_tokens
    assert (first.loaded_blocks, first.stored_blocks) == (0, full)
    second = b.generate(PREFIX + tail, TOKENS)
    assert second.loaded_blocks == full
    assert first.tokens == plain.generate(PREFIX, TOKENS).tokens
    assert second.tokens == plain.generate(PREFIX + tail, TOKENS).tokens
    a_cache.close()
    b_cache.close()


def test_overwritten_rows_change_the_output(broker: TestBroker) -> None:
    (a, a_cache), (b, b_cache) = engine_at(broker, "a"), engine_at(broker, "b")
    answer = a.generate(PREFIX, TOKENS).tokens
    assert a_cache.worker.memory is not None
    a_cache.worker.memory.rows.view(np.float32)[:] = 0.25
    spoilt = b.generate(PREFIX, TOKENS)
    assert spoilt.loaded_blocks > 0
    assert spoilt.tokens != answer
    a_cache.close()
    b_cache.close()


def test_rows_that_were_given_away_are_computed_again(broker: TestBroker) -> None:
    (a, a_cache), (b, b_cache) = engine_at(broker, "a"), engine_at(broker, "b")
    answer = a.generate(PREFIX, TOKENS).tokens
    (pool,) = broker.pools
    with broker.lock:
        pool.hub.rows.slots.generation[3] += 1  # as if row 3 were another chunk's now
    # The broker's own answer names the new generation, so take the old one from the client's view.
    load = b_cache.worker.load
    b_cache.worker.load = lambda refs, into: load(_older(refs, row=3), into)  # type: ignore[method-assign]
    again = b.generate(PREFIX, TOKENS)
    assert again.loaded_blocks == 3
    assert again.tokens == answer
    a_cache.close()
    b_cache.close()


def _older(refs: np.ndarray, row: int) -> np.ndarray:
    refs = refs.copy()
    refs["generation"][refs["row"] == row] -= 1
    return refs


def test_another_model_shares_nothing(broker: TestBroker) -> None:
    a, a_cache = engine_at(broker, "a")
    a.generate(PREFIX, 1)
    other = ToyConfig(seed=8)
    cache = open_cache(broker.path, "b", other)
    assert cache.wait_ready(5)
    assert ToyEngine(other, cache).generate(PREFIX, 1).loaded_blocks == 0
    a_cache.close()
    cache.close()


def test_without_a_broker_everything_is_computed(tmp_path: Path) -> None:
    cache = open_cache(str(tmp_path / "none"), "a", CONFIG)
    answer = ToyEngine(CONFIG, cache).generate(PREFIX, TOKENS)
    assert answer.loaded_blocks == answer.stored_blocks == 0
    assert answer.tokens == ToyEngine(CONFIG).generate(PREFIX, TOKENS).tokens


def test_keys_chain() -> None:
    keys = block_keys(list(PREFIX), 16)
    assert len(keys) == len(PREFIX) // 16
    assert len(set(keys)) == len(keys)
    changed = block_keys([PREFIX[0] ^ 1, *PREFIX[1:]], 16)
    assert not set(keys) & set(changed)
    assert block_keys(list(PREFIX[:100]), 16) == keys[: 100 // 16]
    assert row_bytes(CONFIG) % 4096 == 0


def test_what_does_not_fit_is_refused() -> None:
    engine = ToyEngine(ToyConfig(num_blocks=4))
    with pytest.raises(OutOfBlocks, match="need 5 blocks"):
        engine.generate(b"x" * 64, 16)
    with pytest.raises(OutOfBlocks):
        engine.generate(b"", 1)
