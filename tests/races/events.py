"""What each named event of the model does. Whether it is possible, `model` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from broker.members import effective_namespace
from tests.races.actors import NAMESPACE
from tests.races.host import ROWS, Process
from tiers.ledger import each_attempt

if TYPE_CHECKING:
    from tests.races.model import Model

PAUSE_S = 0.6
PATIENCE_S = 3.1
REQUEST = "r"


def go_on(model: Model) -> None:
    """The engine's next call."""
    engine, keys = model.engine, model.keys
    call = model.scenario.program[model.position]
    model.position += 1
    if call == "lookup":
        engine.lookup(REQUEST, keys)
    elif call == "take":
        engine.take(REQUEST, keys, _findable(model))
    elif call == "complete":
        engine.complete(REQUEST)
    elif call == "offer":
        engine.offer(REQUEST, keys, model.source)
    elif call == "finish":
        engine.client.finish(REQUEST)
    else:
        raise AssertionError(f"an engine has no call {call}")


def _findable(model: Model) -> frozenset[bytes]:
    """Namespaces whose chunks the engine may load now: once it knows of a reset, only the newest"""
    session = model.broker.registry.engines.get("a")
    knows = model.heard_before + model.engine.channels["scheduler"].resets_read > model.excused
    if session is None or not (knows or model.engine.reset_done):
        return frozenset(model.spaces)
    return frozenset({session.namespace})


def preempt(model: Model) -> None:
    """The request starts over."""
    model.engine.client.preempted(REQUEST)
    model.engine.answer = None
    model.position = 0


def end(model: Model) -> None:
    """The request is aborted; what the worker copies goes on."""
    model.engine.client.finish(REQUEST)
    model.engine.answer = None


def again(model: Model) -> None:
    """The request is aborted and its name used anew at once."""
    end(model)
    model.position = 0


def reset(model: Model, version: str | None = None) -> None:
    """All that the engine knows is stale."""
    engine = model.engine
    engine.answer = None
    engine.reset_asked = True
    space = effective_namespace(NAMESPACE, version, b"x" * 16 if version is None else b"")
    model.spaces.add(space)
    if engine.timed(lambda: engine.client.reset(version)):
        engine.reset_done = True


def admin_reset(model: Model) -> None:
    """An administrator moves the engine to a namespace of its own."""
    session = model.broker.registry.engines.get("a")
    if session is not None:
        session.move_to(None, b"y" * 16)
        model.spaces.add(session.namespace)
        model.broker.tell()


def evict(model: Model) -> None:
    """The other engine stores as much as there is room for."""
    from tests.races.model import wire_key

    model.crowds += 1
    crowd = [wire_key(100 * model.crowds + number) for number in range(ROWS)]
    model.other_stores(f"crowd {model.crowds}", crowd)


def other_ends(model: Model, success: bool) -> None:
    """The other engine's store of a chunk that this one may wait for ends."""
    with model.at_once():
        other = model.other
        while (copy := other.next_copy()) is not None:
            other.move(copy)
        for copy in other.copies:
            if not success and copy.good is not None:
                copy.good[:] = False
        other.complete("writing")
        other.client.finish("writing")


def pause(model: Model, seconds: float = PAUSE_S) -> None:
    """Time passes."""
    model.clock.advance(seconds)
    model.broker.collect()
    model.worker_steps()


def scheduler_dies(model: Model) -> None:
    """SIGKILL; the worker lives on."""
    _kill(model, model.engine.scheduler, "scheduler")


def worker_dies(model: Model) -> None:
    """SIGKILL, in the middle of a copy maybe."""
    _kill(model, model.engine.worker_process, "worker")


def worker_cut(model: Model) -> None:
    """The broker gives the worker's connection up; the process lives and attaches again."""
    model.broker.detach(model.engine.channels["worker"])
    model.broker.tell()


def _kill(model: Model, process: Process, role: str) -> None:
    process.alive = False
    model.engine.channels[role].close()
    model.unnoticed.append(process)


def broker_dies(model: Model) -> None:
    """SIGKILL; its successor is there at once, on the same memory."""
    model.broker.die()
    model.excused = model.heard_before + model.engine.channels["scheduler"].resets_read
    mappers = {
        engine.worker_process.pid: engine.worker_process
        for engine in (model.engine, model.other)
        if engine.worker_process.alive
    }
    for engine in (model.engine, model.other):
        for channel in engine.channels.values():
            channel.hang_up()
    model.unnoticed.clear()  # the new one never knew them
    model.broker.pool.shutdown()
    model.broker = model.new_broker(mappers)
    model.other.copies.clear()


EVENTS: dict[str, Callable[[Model], None]] = {
    "next": go_on,
    "step": lambda model: model.engine.client.step(),
    "copy": lambda model: move_copy(model),
    "job good": lambda model: model.broker.end_job(True),
    "job fails": lambda model: model.broker.end_job(False),
    "preempt": preempt,
    "end": end,
    "again": again,
    "reset": reset,
    "reset v2": lambda model: reset(model, "v2"),
    "admin reset": admin_reset,
    "evict": evict,
    "other good": lambda model: other_ends(model, True),
    "other fails": lambda model: other_ends(model, False),
    "pause": pause,
    "patience": lambda model: pause(model, PATIENCE_S),
    "scheduler dies": scheduler_dies,
    "worker dies": worker_dies,
    "worker cut": worker_cut,
    "broker dies": broker_dies,
}


def move_copy(model: Model) -> None:
    """The worker begins or ends a copy."""
    copy = model.engine.next_copy()
    assert copy is not None
    if copy.state == "told":
        copy.owned = _claims(model, {int(row) for row in copy.refs["row"]})
    model.engine.move(copy)
    model.worker_steps()


def _claims(model: Model, rows: set[int]) -> bool:
    session = model.broker.registry.engines.get("a")
    if session is None:
        return False
    claims = list(each_attempt(session.view.requests))
    return rows <= {
        row for owned in claims for row in (*owned.loading, *owned.held, *owned.storing)
    }
