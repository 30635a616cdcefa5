"""Engines, workers and brokers that end, fill up or are reset while chunks move: the others go on,
and every answer is the one that an engine without a cache gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Baseline, Models
from tests.e2e.engines import Answer, Gate, VllmEngine, agree, prompt
from tests.faults.brokers import RealBroker, eventually, real_broker

SAME, OTHER = prompt(1, 1), prompt(2, 1)
Pair = tuple[VllmEngine, VllmEngine]
WHOLE = 1472  # of SAME, in chunks of 64 tokens; the last token is always computed


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Where copies can be made to wait."""
    return Gate(tmp_path / "gate")


@pytest.fixture
def pair(model: Models, broker: RealBroker, tmp_path: Path) -> Iterator[Pair]:
    """Two engines at one broker; they are still starting."""
    with (
        VllmEngine(tmp_path, model(), broker.path) as a,
        VllmEngine(tmp_path, model(), broker.path) as b,
    ):
        yield a, b


def has_all_of_a_prompt(broker: RealBroker) -> bool:
    """Whether the broker has as many chunks as one prompt has."""
    status = broker.status()
    return status is not None and status["pools"] and status["pools"][0]["ready"] >= 23


def loads_it_all(engine: VllmEngine, right: Answer, asked: list[int] = SAME) -> bool:
    """Whether an engine that has nothing itself loads all that it can; it says what is right."""
    engine.ask("forget")
    (loaded,) = engine.generate([asked])
    assert agree(loaded, right)
    return loaded.cached == WHOLE


def busy(broker: RealBroker, what: str) -> bool:
    """Whether some rows come to be held by loads ("busy") or stores ("reserved")."""

    def some() -> bool:
        status = broker.status()
        return status is not None and any(pool[what] > 0 for pool in status["pools"])

    return eventually(some)


def test_an_engine_killed_while_it_stores(
    model: Models, baseline: Baseline, broker: RealBroker, gate: Gate, pair: Pair
) -> None:
    (right,) = baseline(model(), [SAME])
    a, b = pair
    a.ready().ask("stall", kind="store", gate=gate.path)
    a.generate([SAME])
    assert busy(broker, "reserved")
    a.kill()
    assert broker.wait_rows(reserved=0, busy=0, quarantined=0, ready=0)
    (computed,) = b.store([SAME])
    assert computed.cached == 0
    assert agree(computed, right)
    assert loads_it_all(b, right)


def test_an_engine_killed_while_it_loads(
    model: Models, baseline: Baseline, broker: RealBroker, gate: Gate, pair: Pair
) -> None:
    (right,) = baseline(model(), [SAME])
    a, b = pair
    a.store([SAME])
    b.ready().ask("stall", kind="load", gate=gate.path)
    b.tell("generate", prompts=[SAME])
    assert busy(broker, "busy")
    b.kill()
    assert broker.wait_rows(reserved=0, busy=0, quarantined=0, ready=23)
    assert loads_it_all(a, right)


def test_a_worker_killed_while_it_stores(
    model: Models, baseline: Baseline, broker: RealBroker, tmp_path: Path
) -> None:
    (right,) = baseline(model(), [SAME])
    with (
        VllmEngine(tmp_path, model(), broker.path, processes=True) as a,
        VllmEngine(tmp_path, model(), broker.path) as b,
    ):
        a.ready().tell("generate", prompts=[prompt(number, 1) for number in range(10, 30)])
        assert busy(broker, "reserved")
        (worker,) = a.workers()
        worker.kill()
        b.store([SAME])
        assert loads_it_all(b, right)
        a.kill()
        assert broker.wait_rows(reserved=0, busy=0, quarantined=0)


def test_a_broker_killed_and_restarted_while_an_engine_loads(
    model: Models, baseline: Baseline, broker: RealBroker, gate: Gate, pair: Pair
) -> None:
    same, other = baseline(model(), [SAME, OTHER])
    a, b = pair
    a.store([SAME])
    b.ready().ask("stall", kind="load", gate=gate.path)
    b.tell("generate", prompts=[SAME])
    assert busy(broker, "busy")
    broker.child.kill()
    assert eventually(lambda: (broker.status() or {"incarnation": 1})["incarnation"] == 2)
    gate.open()
    (answer,) = b.answers()
    assert agree(answer, same)

    def stored_again() -> bool:
        a.ask("forget")
        assert agree(a.store([OTHER])[0], other)
        return has_all_of_a_prompt(broker)

    assert eventually(stored_again)

    assert eventually(lambda: loads_it_all(b, other, OTHER))


def test_more_than_the_memory_holds(model: Models, baseline: Baseline, tmp_path: Path) -> None:
    prompts = [prompt(number, 1) for number in range(30, 36)]
    right = baseline(model(), prompts)
    with (
        real_broker(tmp_path, "--memory", "2200KiB") as broker,  # 34 rows for 138 chunks
        VllmEngine(tmp_path, model(), broker.path) as a,
        VllmEngine(tmp_path, model(), broker.path) as b,
    ):
        for engine in (a.ready(), b.ready()):
            engine.tell("generate", prompts=prompts)
        for answers in (a.answers(), b.answers()):
            assert all(map(agree, answers, right))
        for engine in (a, b):
            engine.ask("forget")
            (answer,) = engine.store([prompts[0]])
            assert agree(answer, right[0])
        assert broker.wait_rows(reserved=0, busy=0)
        status = broker.status()
        assert status is not None
        assert status["pools"][0]["evictions"] > 0


def test_no_broker_when_an_engine_starts(model: Models, baseline: Baseline, tmp_path: Path) -> None:
    (right,) = baseline(model(), [SAME])
    with VllmEngine(tmp_path, model(), str(tmp_path / "b.sock")) as a:
        (alone,) = a.store([SAME])
        assert agree(alone, right)
        assert a.figure("kvquay:engine_without_broker") > 0
        with real_broker(tmp_path, "--memory", "64MiB") as broker:

            def attached() -> bool:
                a.ask("forget")
                assert agree(a.store([SAME])[0], right)
                return has_all_of_a_prompt(broker)

            assert eventually(attached)
            assert loads_it_all(a, right)
        a.ask("forget")
        (alone,) = a.store([SAME])
        assert alone.cached == 0
        assert agree(alone, right)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_reset_while_chunks_move(
    kind: str, model: Models, baseline: Baseline, broker: RealBroker, gate: Gate, pair: Pair
) -> None:
    same, other = baseline(model(), [SAME, OTHER])
    a, b = pair
    b.store([OTHER])
    if kind == "load":
        a.ready().store([SAME])
        a.ask("forget")
    a.ready().ask("stall", kind=kind, gate=gate.path)
    a.tell("generate", prompts=[SAME])
    assert busy(broker, "busy" if kind == "load" else "reserved")
    if kind == "load":
        gate.open()  # before its load has ended an engine of one process answers nothing
    assert agree(a.answers()[0], same)
    a.tell("reset")
    if kind == "store":
        gate.open()
    assert a.heard() is True
    (answer,) = a.store([SAME])
    assert answer.cached == 0  # all that it had stored is stale
    assert agree(answer, same)
    b.ask("forget")
    (answer,) = b.store([SAME])
    assert agree(answer, same)
    b.ask("forget")
    (answer,) = b.generate([OTHER])
    assert agree(answer, other)
    assert broker.wait_rows(reserved=0, busy=0, quarantined=0)
