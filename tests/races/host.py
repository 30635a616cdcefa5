"""One host: its memory, its processes, and one incarnation of the broker after another.

The broker here is the real registry, sessions, pool and tiers; only the socket loop is replaced, by
`Broker.hear`, which does for a channel what the main loop does for a socket. Nothing moves by
itself.
"""

from __future__ import annotations

import os
import threading
from typing import cast

import numpy as np
from numpy.typing import NDArray

from broker import wire
from broker.attach import Refusal, Registry
from broker.connection import Connection
from broker.members import Member
from broker.pool import Pool
from broker.session import EngineSession
from engine_adapter.worker import Memory
from tests.races.transport import BrokerEnd, Channel, Peer
from tests.tiers.doubles import FakeClock, ScriptedTier
from tiers.base import OffloadKey
from tiers.guard import GuardedTier
from tiers.sessions import Shares

ROWS = 4
ROW = 4096
KEY = 36
PATTERN = 64


class HostMemory:
    """Rows and generations in an array that every process of the host shares."""

    def __init__(self) -> None:
        self.rows = ROWS
        self.row_bytes = ROW
        self.data: NDArray[np.uint8] = np.zeros((ROWS, ROW), dtype=np.uint8)
        self.generation: NDArray[np.uint32] = np.zeros(ROWS, dtype=np.uint32)

    def map_rows(self) -> memoryview:
        """Rows, shape (rows, row bytes)."""
        return memoryview(self.data)  # type: ignore[arg-type]

    def zero(self, row: int) -> None:
        """Overwrite a row."""
        self.data[row] = 0

    def close(self) -> None:
        """The array goes with its last user."""


class Mapped:
    """A worker's mapping of the host's memory, in the form of `engine_adapter.worker.Memory`."""

    are_current = Memory.are_current

    def __init__(self, memory: HostMemory) -> None:
        self.num_rows = memory.rows
        self.row_bytes = memory.row_bytes
        self.rows = memory.data
        self._generation = memory.generation


class Process:
    """A process of an engine. Its pidfd is a descriptor with an inode of its own."""

    _pidfds: dict[int, int] = {}  # noqa: RUF012  reused by every world of this process

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.alive = True
        if pid not in self._pidfds:
            self._pidfds[pid] = os.memfd_create(f"kvquay-process-{pid}", os.MFD_CLOEXEC)
        self.peer = Peer(pid, self._pidfds[pid])


class Broker:
    """One incarnation: everything it knows dies with it, the memory does not."""

    def __init__(
        self,
        memory: HostMemory,
        clock: FakeClock,
        incarnation: int,
        old_mappers: dict[int, Process],
        stored: dict[OffloadKey, bytes],
        shares: Shares,
    ) -> None:
        """`old_mappers`: processes that mapped the memory before and have not attached since;
        `stored`: what the tier has kept on its disk."""
        self.memory = memory
        self.incarnation = incarnation
        self.old_mappers = old_mappers
        self.pool = Pool(
            memory,
            lock=threading.Lock(),
            clock=clock,
            shares=shares,
            tiers=[{"type": "ScriptedTier", "module_path": "tests.races.tier"}],
        )
        self.pool.frozen = bool(old_mappers)
        guarded = self.pool.tiers[0]
        assert isinstance(guarded, GuardedTier)
        self.tier = cast(ScriptedTier, guarded.inner)
        self.tier.chunks = stored
        self.registry = Registry(lambda row_bytes: self.pool)
        self.members: dict[Channel, tuple[EngineSession, Member]] = {}
        self.watched: dict[int, list[tuple[Channel, EngineSession, Member]]] = {}
        """By pid: whose end a pidfd tells, also after the end of the connection."""
        self.dead: set[int] = set()
        self.alive = True

    def hear(self, channel: Channel) -> None:
        """Deliver what the channel has for the broker next, and do what the main loop does."""
        messages = channel.next_for_broker()
        if messages is None:
            self.detach(channel)
        elif channel.broker_open:
            for message in messages:
                self._dispatch(channel, message)
        self.tell()

    def _dispatch(self, channel: Channel, message: wire.Message) -> None:
        known = self.members.get(channel)
        try:
            if known is not None:
                known[0].handle(known[1], message)
            elif isinstance(message, wire.Attach):
                self._attach(channel, message)
        except wire.WireError as error:
            channel.tell(wire.Error(seq=0, code=error.code, text=str(error)))
            self.detach(channel)

    def _attach(self, channel: Channel, message: wire.Attach) -> None:
        end = BrokerEnd(channel)
        try:
            engine, member = self.registry.attach(message, cast(Connection, end))
        except Refusal as refusal:
            channel.tell(refusal.message)
            channel.hang_up()
            return
        self.members[channel] = (engine, member)
        self.watched.setdefault(channel.peer.pid, []).append((channel, engine, member))
        if member.maps:
            self.mapper_done(channel.peer.pid)
        attached = wire.Attached(
            protocol=wire.PROTOCOL_VERSION,
            broker="races",
            incarnation=self.incarnation,
            rows=ROWS,
            row_bytes=ROW,
            rows_offset=0,
            generation_offset=0,
            memory_bytes=ROWS * ROW,
            epoch=engine.epoch.number,
        )
        fds = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)] if member.maps else []
        channel.tell(attached, fds)
        engine.join(member)
        if channel.peer.pid in self.dead:  # each connection has a pidfd, readable from the start
            self._ended(channel.peer.pid)

    def mapper_done(self, pid: int) -> None:
        """A process that mapped the memory under an earlier incarnation is dead or attached."""
        if self.old_mappers.pop(pid, None) is not None and not self.old_mappers:
            self.pool.frozen = False
            for engine in self.registry.engines.values():
                engine.announce()

    def detach(self, channel: Channel) -> None:
        """The connection has ended, or is given up."""
        channel.hang_up()
        known = self.members.pop(channel, None)
        if known is not None:
            known[0].member_detached(known[1])

    def process_died(self, process: Process) -> None:
        """Its pidfd fires. What it said before still counts, then its connection ends."""
        self.mapper_done(process.pid)
        self.dead.add(process.pid)
        self._ended(process.pid)
        self.tell()

    def _ended(self, pid: int) -> None:
        for channel, engine, member in self.watched.pop(pid, []):
            member.exited = True
            while channel in self.members and channel.to_broker:
                self.hear(channel)
            engine.member_exited(member)

    def tell(self) -> None:
        """Send the notices and events that have come up."""
        self.pool.hub.noticed.clear()
        for engine in list(self.registry.engines.values()):
            engine.tell(1 << 20)

    def end_job(self, success: bool) -> None:
        """The tier's oldest job ends."""
        job = next(iter(self.tier.running))
        self.tier.end(job, None if success else ())
        self.collect()

    def collect(self) -> None:
        """The control plane's round: finished jobs, waits whose time is up."""
        self.pool.manager.transfers.collect(self.pool.manager.secondary_tiers)
        self.pool.hub.tick()
        self.tell()

    def die(self) -> None:
        """Killed: every connection ends, all that was known is gone."""
        self.alive = False
        self.members.clear()
        self.watched.clear()
