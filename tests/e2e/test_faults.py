"""Engines, workers and brokers that end, fill up or are reset while chunks move: the others go on,
and every answer is the one that an engine without a cache gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Baseline, Models
from tests.e2e.engines import Gate, VllmEngine, agree, prompt
from tests.faults.brokers import RealBroker, eventually, real_broker

SAME, OTHER = prompt(1, 1), prompt(2, 1)
WHOLE = 1472  # of SAME, in chunks of 64 tokens; the last token is always computed


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Where copies can be made to wait."""
    return Gate(tmp_path / "gate")


def busy(broker: RealBroker, what: str) -> bool:
    """Whether some rows come to be held by loads ("busy") or stores ("reserved")."""

    def some() -> bool:
        status = broker.status()
        return status is not None and any(pool[what] > 0 for pool in status["pools"])

    return eventually(some)


def test_an_engine_killed_while_it_stores(
    model: Models, baseline: Baseline, broker: RealBroker, gate: Gate, tmp_path: Path
) -> None:
    (right,) = baseline(model(), [SAME])
    with (
        VllmEngine(tmp_path, model(), broker.path) as a,
        VllmEngine(tmp_path, model(), broker.path) as b,
    ):
        a.ready().ask("stall", kind="store", gate=gate.path)
        a.generate([SAME])
        assert busy(broker, "reserved")
        a.kill()
        assert broker.wait_rows(reserved=0, busy=0, quarantined=0, ready=0)
        (computed,) = b.store([SAME])
        assert computed.cached == 0
        b.ask("forget")
        (loaded,) = b.generate([SAME])
        assert loaded.cached == WHOLE
        assert agree(computed, right)
        assert agree(loaded, right)


def test_an_engine_killed_while_it_loads(
    model: Models, baseline: Baseline, broker: RealBroker, gate: Gate, tmp_path: Path
) -> None:
    (right,) = baseline(model(), [SAME])
    with (
        VllmEngine(tmp_path, model(), broker.path) as a,
        VllmEngine(tmp_path, model(), broker.path) as b,
    ):
        a.store([SAME])
        b.ready().ask("stall", kind="load", gate=gate.path)
        b.tell("generate", prompts=[SAME])
        assert busy(broker, "busy")
        b.kill()
        assert broker.wait_rows(reserved=0, busy=0, quarantined=0, ready=23)
        a.ask("forget")
        (loaded,) = a.generate([SAME])
        assert loaded.cached == WHOLE
        assert agree(loaded, right)


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
        b.ask("forget")
        (loaded,) = b.generate([SAME])
        assert loaded.cached == WHOLE
        assert agree(loaded, right)
        a.kill()
        assert broker.wait_rows(reserved=0, busy=0, quarantined=0)


def test_a_broker_killed_and_restarted_while_an_engine_loads(
    model: Models, baseline: Baseline, broker: RealBroker, gate: Gate, tmp_path: Path
) -> None:
    same, other = baseline(model(), [SAME, OTHER])
    with (
        VllmEngine(tmp_path, model(), broker.path) as a,
        VllmEngine(tmp_path, model(), broker.path) as b,
    ):
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
            status = broker.status()
            return status is not None and status["pools"] and status["pools"][0]["ready"] >= 23

        assert eventually(stored_again)

        def loaded_again() -> bool:
            b.ask("forget")
            (answer,) = b.generate([OTHER])
            assert agree(answer, other)
            return answer.cached == WHOLE

        assert eventually(loaded_again)


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
                status = broker.status()
                return status is not None and status["pools"] and status["pools"][0]["ready"] >= 23

            assert eventually(attached)
            a.ask("forget")
            (loaded,) = a.generate([SAME])
            assert loaded.cached == WHOLE
            assert agree(loaded, right)
        a.ask("forget")
        (alone,) = a.store([SAME])
        assert alone.cached == 0
        assert agree(alone, right)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_reset_while_chunks_move(
    kind: str, model: Models, baseline: Baseline, broker: RealBroker, gate: Gate, tmp_path: Path
) -> None:
    same, other = baseline(model(), [SAME, OTHER])
    with (
        VllmEngine(tmp_path, model(), broker.path) as a,
        VllmEngine(tmp_path, model(), broker.path) as b,
    ):
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
