"""Who may attach: checks of an Attach message against what is there, and the session it joins.

Every refusal names both sides' values. Knows no selector; the server hands connections over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from broker import wire
from broker.connection import Connection
from broker.limits import PAGE_BYTES
from broker.members import Counters, Member
from broker.pool import Pool
from broker.session import EngineSession

log = logging.getLogger(__name__)


class Refusal(Exception):
    """The attach is refused; becomes a Refused message."""

    def __init__(self, code: wire.RefusalCode, text: str, *, ours: str, theirs: str) -> None:
        super().__init__(text)
        self.message = wire.Refused(code=code, text=text, ours=ours, theirs=theirs)


def process_identity(pidfd: int | None) -> int | None:
    """A number that is a process's own for ever: the inode of its pidfd (Linux 6.9 and newer)."""
    return None if pidfd is None else os.fstat(pidfd).st_ino


@dataclass(slots=True)
class Registry:
    """Engines and the pools they are on. `pool_for(row_bytes)` gives the pool, or refuses."""

    pool_for: Callable[[int], Pool]
    counters: Counters = field(default_factory=Counters)
    engines: dict[str, EngineSession] = field(default_factory=dict)

    def attach(self, message: wire.Attach, connection: Connection) -> tuple[EngineSession, Member]:
        """Join the connection's process to its engine's session. Refusal if it may not."""
        _check_version(message)
        _check_geometry(message)
        engine = self.engines.get(message.engine_id)
        if engine is None:
            pool = self.pool_for(message.row_bytes)
            engine = EngineSession(
                message.engine_id,
                pool,
                world=message.world,
                key_bytes=message.key_bytes,
                counters=self.counters,
                on_idle=self._forget,
                on_left=self._namespace_left,
            )
            self.engines[message.engine_id] = engine
        self._check_place(engine, message)
        is_scheduler = message.role == wire.Role.SCHEDULER
        member = Member(
            rank=-1 if is_scheduler else message.rank,
            port=connection,
            pid=connection.peer.pid,
            maps=not is_scheduler,
            process=process_identity(connection.peer.pidfd),
        )
        if is_scheduler:
            engine.declare(message.namespace, message.weights_version, message.events)
        return engine, member

    def _check_place(self, engine: EngineSession, message: wire.Attach) -> None:
        pool = engine.pool
        for what, ours, theirs in (
            ("row size in bytes", pool.row_bytes, message.row_bytes),
            ("number of workers", engine.world, message.world),
            ("key size in bytes", engine.key_bytes, message.key_bytes),
        ):
            if ours != theirs:
                raise Refusal(
                    wire.RefusalCode.GEOMETRY,
                    f"engine {message.engine_id} is attached with another {what}: {ours} here, "
                    f"{theirs} asked; give each engine its own engine_id",
                    ours=str(ours),
                    theirs=str(theirs),
                )
        if message.role == wire.Role.SCHEDULER:
            holder = engine.scheduler
            place = "scheduler"
        else:
            holder = engine.workers.get(message.rank)
            place = f"worker {message.rank}"
        if holder is not None:
            raise Refusal(
                wire.RefusalCode.TAKEN,
                f"the {place} of engine {message.engine_id} is process {holder.pid} and alive; "
                "end it first, or use another engine_id",
                ours=str(holder.pid),
                theirs=str(message.pid),
            )

    def _forget(self, engine: EngineSession) -> None:
        if self.engines.get(engine.engine_id) is engine:
            del self.engines[engine.engine_id]
            log.info("engine %s has left", engine.engine_id)

    def _namespace_left(self, pool: Pool, namespace: bytes) -> None:
        """Give a namespace's rows back once no engine is in it any more."""
        if not any(e.namespace == namespace for e in self.engines.values() if e.pool is pool):
            pool.discard_namespace(namespace)

    def in_namespace(self, prefix: str) -> Sequence[EngineSession]:
        """Engines whose namespace, in hex, begins with `prefix`."""
        return [e for e in self.engines.values() if e.namespace.hex().startswith(prefix)]


def _check_version(message: wire.Attach) -> None:
    if message.protocol != wire.PROTOCOL_VERSION:
        raise Refusal(
            wire.RefusalCode.VERSION,
            f"protocol {message.protocol} of {message.client} is not spoken here, only "
            f"{wire.PROTOCOL_VERSION}; install the same kvquay in the engine and the broker",
            ours=str(wire.PROTOCOL_VERSION),
            theirs=str(message.protocol),
        )


def _check_geometry(message: wire.Attach) -> None:
    if message.row_bytes % PAGE_BYTES or message.row_bytes <= 0:
        raise Refusal(
            wire.RefusalCode.GEOMETRY,
            f"rows of {message.row_bytes} bytes: must be a positive multiple of {PAGE_BYTES}",
            ours=str(PAGE_BYTES),
            theirs=str(message.row_bytes),
        )
    if message.role == wire.Role.WORKER and not 0 <= message.rank < message.world:
        raise Refusal(
            wire.RefusalCode.GEOMETRY,
            f"worker rank {message.rank} of {message.world}: ranks are 0 to world - 1",
            ours=f"0..{message.world - 1}",
            theirs=str(message.rank),
        )
    if message.role == wire.Role.SCHEDULER and len(message.namespace) != wire.NAMESPACE_BYTES:
        raise Refusal(
            wire.RefusalCode.NAMESPACE,
            f"the scheduler must declare a namespace of {wire.NAMESPACE_BYTES} bytes, got "
            f"{len(message.namespace)}",
            ours=str(wire.NAMESPACE_BYTES),
            theirs=str(len(message.namespace)),
        )
