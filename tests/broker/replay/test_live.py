"""Live replay: real brokers and engine processes agree with the simulation, byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from broker.replay.generate import generate
from broker.replay.simulate import Setup, run
from engine_adapter.live import LiveRequest, WrongBytes, _sum_up, memory_for, run_live
from engine_adapter.live_engine import Outcome, pattern


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("shared", "lru"),
        pytest.param("private", "lru", marks=pytest.mark.all_combinations),
        pytest.param("shared", "arc", marks=pytest.mark.all_combinations),
    ],
)
def test_live_agrees_with_simulate(layout: str, policy: str) -> None:
    trace = list(generate(300, 4))
    setup = Setup(policy=policy, engines=2, layout=layout, memory_blocks=900, seed=3)
    simulated = run(trace, setup)
    live = run_live(
        [LiveRequest(hash_ids=r.hash_ids, input_length=r.input_length) for r in trace],
        engines=2,
        memory_blocks=900,
        layout=layout,
        policy=policy,
        seed=3,
        chunk_bytes=8192,
    )
    assert live.requests == simulated.requests
    assert live.block_hit_rate == pytest.approx(simulated.block_hit_rate, abs=0.01)
    assert live.token_hit_rate == pytest.approx(simulated.token_hit_rate, abs=0.01)
    assert live.block_hit_rate > 0


def test_a_single_wrong_chunk_ends_the_replay() -> None:
    outcome = Outcome(
        blocks=2,
        hit_blocks=2,
        tokens=1024,
        hit_tokens=1024,
        stored_blocks=0,
        wrong=1,
        lookup_s=0.1,
        load_s=0.1,
        store_s=0.0,
    )
    with pytest.raises(WrongBytes):
        _sum_up([outcome], 1.0, 8192)


def test_every_block_has_bytes_of_its_own() -> None:
    ramp = np.arange(64, dtype=np.uint64)
    seen = set()
    for block in range(1000):
        out = np.empty(64, dtype=np.uint64)
        pattern(block, ramp, out)
        seen.add(out.tobytes())
    assert len(seen) == 1000


def test_the_memory_asked_for_gives_the_rows_wanted(tmp_path: Path) -> None:
    from broker.memory import HEADER_BYTES, PoolMemory, Region

    for rows, chunk in ((100, 4096), (5000, 65536), (3, 2 << 20)):
        size = memory_for(rows, chunk)
        region = Region.create(size)
        pool = PoolMemory(region, HEADER_BYTES, size - HEADER_BYTES, chunk)
        assert rows <= pool.rows <= rows * 1.2 + 15
        region.close()
