"""What must hold after every event, and what must be so once all have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_adapter.link import LinkState
from tests.races.host import PATTERN, ROWS
from tests.tiers.doubles import pattern
from tiers.slots import SlotState

if TYPE_CHECKING:
    from tests.races.actors import Engine
    from tests.races.model import Model

WAIT_S = 3.0
"""All waits of one request together."""


def check(model: Model) -> None:
    """V1, V2, owners; V3 of every readable row; nobody else's row is touched."""
    pool = model.broker.pool
    pool.hub.check()
    assert not (pool.frozen and pool.hub.rows.num_busy), "a frozen pool gives rows out"
    _check_contents(model)
    _check_copies(model)
    for engine in (model.engine, model.other):
        assert not engine.judged, f"engine {engine.name}: {engine.judged}"


def _check_contents(model: Model) -> None:
    rows = model.broker.pool.hub.rows
    for row in range(ROWS):
        if rows.slots.ref_cnt[row] >= 0:
            chunk = rows.key_of(row)
            assert chunk is not None
            found = model.memory.data[row, :PATTERN].tobytes()
            assert found == pattern(chunk), f"V3: row {row} has other bytes than its key's"


def _check_copies(model: Model) -> None:
    pool = model.broker.pool
    writers: dict[int, str] = {}
    for engine in (model.engine, model.other):
        if not engine.worker_process.alive:
            continue
        for kind, row, generation in engine.moving():
            if kind == "store":
                assert row not in writers, f"row {row} is written by {writers[row]} and another"
                writers[row] = engine.name
            if pool.frozen:
                continue  # nothing is given out, whatever the state of a row
            state = pool.hub.rows.slots.state(row)
            if state is SlotState.QUARANTINED:
                continue
            same = int(model.memory.generation[row]) == generation
            assert same, f"engine {engine.name} is at row {row}, which was given to another"
            assert state is not SlotState.FREE, f"row {row} is free while {engine.name} uses it"
            if kind == "store":
                assert state is not SlotState.READY, f"row {row} is readable and being written"


def check_the_end(model: Model) -> None:
    """The engine waits no longer than it may; and after all have ended nothing is left."""
    engine, other = model.engine, model.other
    with model.at_once():
        _settle(model)
        if engine.scheduler.alive and engine.answer is not None and engine.answer.pending:
            _check_wait(model)
        check(model)
        _end_everything(model)
    hub = model.broker.pool.hub
    check(model)
    assert hub.rows.num_busy == 0, f"{hub.rows.num_busy} rows are claimed, though all have ended"
    assert not hub.waiting
    assert not hub._waiters
    for view in hub.views.values():
        assert not view.requests, f"session {view.session_id} keeps {list(view.requests)}"
        assert not view.lost
    for each in (engine, other):
        if each.scheduler.alive:
            assert not each.client._requests, f"client {each.name}: {list(each.client._requests)}"
    with model.at_once():
        _still_works(model, other)
        if engine.scheduler.alive and engine.worker_process.alive:
            _still_works(model, engine)
            is_old = _space(model, engine) == _space(model, other)
            assert not (engine.reset_asked and is_old), "a reset is forgotten: old chunks are found"
    check(model)


def _settle(model: Model) -> None:
    for engine in (model.engine, model.other):
        model.settle(engine)


def _check_wait(model: Model) -> None:
    """V4, though what is waited for never ends."""
    began = model.clock.now
    while model.clock.now - began < WAIT_S + 0.1:
        model.clock.advance(0.25)
        model.broker.collect()
        _settle(model)
        check(model)
        if not model.engine.lookup("r", model.keys).pending:
            return
    raise AssertionError(f"V4: the lookup is pending after {model.clock.now - began:.2f} s")


def _end_everything(model: Model) -> None:
    engine, other = model.engine, model.other
    for process in list(model.unnoticed):
        model.unnoticed.remove(process)
        model.broker.process_died(process)
    for turn in range(4):
        for each in (engine, other):
            while (copy := each.next_copy()) is not None:
                each.move(copy)
            if each.scheduler.alive:
                each.complete("r" if each is engine else "writing")
                if turn == 0:
                    for request in list(each.client._requests):
                        each.client.finish(request)
        _settle(model)
        while model.broker.tier.running:
            model.broker.end_job(True)
        model.clock.advance(1.1)
        model.broker.collect()
        _settle(model)
        check(model)


def _still_works(model: Model, engine: Engine) -> None:
    assert engine.client.state is LinkState.UP, engine.client._link.last_error
    assert engine.client.is_ready, f"engine {engine.name} is attached, but not ready"
    key = engine.name.encode() * 32 + b"\0\0\0\0"
    for call in ("store", "load"):
        if call == "store":
            engine.offer("last", [key], model.source)
        elif not engine.lookup("last", [key]).pending:
            engine.take("last", [key], frozenset({_space(model, engine)}))
        assert engine.copies, f"engine {engine.name} cannot {call} any more"
        while (copy := engine.next_copy()) is not None:
            engine.move(copy)
        good = engine.copies[0].good
        assert good is not None
        assert good.all(), f"the {call} of engine {engine.name} fails"
        engine.complete("last")
        model.settle(engine)
    engine.client.finish("last")
    model.settle(engine)


def _space(model: Model, engine: Engine) -> bytes:
    return model.broker.registry.engines[engine.name].namespace
