"""One engine stores, others load at the same time, and nobody can tell from the output."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import Baseline, Models
from tests.e2e.engines import BLOCK_TOKENS, PREFIX_TOKENS, VllmEngine, agree, prompt
from tests.faults.brokers import RealBroker, real_broker

SAME, TAIL = prompt(1, 1), prompt(1, 2)


@dataclass(frozen=True)
class Kind:
    """A kind of engine."""

    name: str
    model: str = "llama"
    blocks_per_chunk: int = 2
    processes: bool = False
    tp: int = 1
    dtype: str = "float32"
    llm: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """What decides the output."""
        how: dict[str, Any] = {"dtype": self.dtype, **self.llm}
        if self.tp > 1:
            how |= {
                "tensor_parallel_size": self.tp,
                "processes": True,
                "environment": {"VLLM_CPU_OMP_THREADS_BIND": "|".join("0" * self.tp)},
            }
        return how

    def engine(self, folder: Path, model: Path, socket: str) -> VllmEngine:
        """One that shares."""
        how = self.plain()
        how["processes"] = self.processes or self.tp > 1
        extra = {"blocks_per_chunk": self.blocks_per_chunk}
        return VllmEngine(folder, model, socket, extra=extra, **how)

    def reusable(self, tokens: int) -> int:
        """Of a prefix that two prompts share, in whole chunks."""
        chunk = self.blocks_per_chunk * BLOCK_TOKENS
        return tokens // chunk * chunk


LINES = [
    Kind("plain"),
    Kind("processes", processes=True),
    Kind("two workers", tp=2),
    Kind("bfloat16", dtype="bfloat16"),
    Kind("three groups", model="gemma"),
    Kind("one block a chunk", blocks_per_chunk=1),
    Kind("four blocks a chunk", blocks_per_chunk=4),
    Kind("cbor", llm={"prefix_caching_hash_algo": "sha256_cbor"}),
]
COMBINATIONS = [
    Kind(
        f"{model} {blocks} {dtype} {'processes' if processes else 'in process'} {hashing}",
        model=model,
        blocks_per_chunk=blocks,
        dtype=dtype,
        processes=processes,
        llm={"prefix_caching_hash_algo": hashing},
    )
    for model, blocks, dtype, processes, hashing in itertools.product(
        ("llama", "gemma"),
        (1, 2, 4),
        ("float32", "bfloat16"),
        (False, True),
        ("sha256", "sha256_cbor"),
    )
] + [
    Kind(f"{model} {blocks} two workers", model=model, blocks_per_chunk=blocks, tp=2)
    for model, blocks in itertools.product(("llama", "gemma"), (1, 4))
]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=kind.name) for kind in LINES]
    + [
        pytest.param(kind, id=kind.name, marks=pytest.mark.all_combinations)
        for kind in COMBINATIONS
    ],
)
def test_two_engines_load_at_once_what_a_third_has_stored(
    kind: Kind, model: Models, baseline: Baseline, broker: RealBroker, tmp_path: Path
) -> None:
    folder = model(kind.model)
    same, tail = baseline(folder, [SAME, TAIL], **kind.plain())
    with kind.engine(tmp_path, folder, broker.path) as a:
        (stored,) = a.store([SAME])
        assert stored.cached == 0
        assert agree(stored, same, kind.dtype)
    with (
        kind.engine(tmp_path, folder, broker.path) as b,
        kind.engine(tmp_path, folder, broker.path) as c,
    ):
        for engine, asked in ((b.ready(), SAME), (c.ready(), TAIL)):
            engine.tell("generate", prompts=[asked])
        (from_b,), (from_c,) = b.answers(), c.answers()
        assert from_b.cached == kind.reusable(len(SAME) - 1)
        assert from_c.cached == kind.reusable(PREFIX_TOKENS)
        assert agree(from_b, same, kind.dtype)
        assert agree(from_c, tail, kind.dtype)
        assert b.figure("vllm:external_prefix_cache_hits") == from_b.cached
        assert b.figure("vllm:kv_offload_load_bytes") > 0
    status = broker.status()
    assert status is not None
    assert status["healthy"]
    assert sum(pool["busy"] + pool["quarantined"] for pool in status["pools"]) == 0


def overwrite_rows(broker: RealBroker) -> None:
    """Put other bytes into every row, as a fault in the memory would."""
    pid = broker.child.pid
    (fd,) = {
        os.readlink(link): link
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if "memfd:kvquay" in os.readlink(link)
    }.values()
    status = broker.status()
    assert status is not None
    pool = status["pools"][0]
    size = pool["rows"] * pool["row_bytes"]
    noise = np.random.default_rng(3).normal(size=size // 4).astype(np.float32)
    with open(fd, "r+b") as memory:
        memory.seek(status["memory_bytes"] - size)
        memory.write(noise.tobytes())


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_rows_are_really_read_and_bad_ones_are_computed_again(
    name: str, model: Models, baseline: Baseline, broker: RealBroker, tmp_path: Path
) -> None:
    folder = model(name)
    (right,) = baseline(folder, [SAME])
    kind = Kind(name, model=name)
    whole = kind.reusable(len(SAME) - 1)
    with kind.engine(tmp_path, folder, broker.path) as a:
        a.store([SAME])
    with kind.engine(tmp_path, folder, broker.path) as b:
        b.ready().ask("spoil_loads")
        (recomputed,) = b.store([SAME])
        assert agree(recomputed, right)
        assert b.figure("kvquay:engine_loads_failed") == 1
        assert broker.wait_rows(busy=0, reserved=0)
    with kind.engine(tmp_path, folder, broker.path) as c:
        (loaded,) = c.generate([SAME])  # of what B computed and stored again, too
        assert loaded.cached == whole
        assert agree(loaded, right)
        c.ask("forget")
        overwrite_rows(broker)
        (wrong,) = c.generate([SAME])
        assert wrong.cached == whole
        assert not agree(wrong, right)


@pytest.fixture(scope="module")
def occupied(model: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """A broker, with room for rows of two sizes, in which an engine has stored `SAME`."""
    folder = tmp_path_factory.mktemp("occupied")
    with real_broker(folder, "--memory", "64MiB", "--pool", "24MiB", "--pool", "24MiB") as broker:
        with VllmEngine(folder, model(), broker.path) as a:
            a.store([SAME])
            a.ask("forget")
            (answer,) = a.generate([SAME])
            assert answer.cached == Kind("plain").reusable(len(SAME) - 1)
        yield broker


@pytest.mark.parametrize(
    "other",
    [
        "weights",
        "dtype",
        "layout",
        "blocks_per_chunk",
        "rope",
        "hash seed",
        "hash algorithm",
        "weights version",
    ],
)
def test_engines_that_differ_share_nothing(
    other: str, model: Models, occupied: RealBroker, tmp_path: Path
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "weights": {"model": model(seed=2)},
        "dtype": {"dtype": "bfloat16"},
        "layout": {"block_size": 64, "extra": {"blocks_per_chunk": 1}},
        "blocks_per_chunk": {"extra": {"blocks_per_chunk": 1}},
        "rope": {"model": model(rope_theta=5000.0)},
        "hash seed": {"environment": {"PYTHONHASHSEED": "1"}},
        "hash algorithm": {"prefix_caching_hash_algo": "sha256_cbor"},
        "weights version": {"extra": {"weights_version": "2"}},
    }
    how = kinds[other]
    with VllmEngine(tmp_path, how.pop("model", model()), occupied.path, **how) as b:
        (computed,) = b.store([SAME])
        assert computed.cached == 0
        b.ask("forget")
        (loaded,) = b.generate([SAME])  # its own, which are no more than its own
        assert loaded.cached >= 1408
        assert agree(loaded, computed, how.get("dtype", "float32"))
