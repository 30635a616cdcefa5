"""One engine under test, its broker, and everybody who may interfere; nothing moves by itself.

Real client, worker and session code over an in-memory transport and a fake clock. What the broker
sends stays in the transport until the event `reply` lets it through; a client call that waits runs
the next events of the schedule meanwhile, so that a call can be overtaken by anything.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from broker import wire
from broker.members import Counters, Member
from broker.pool import Pool
from broker.session import EngineSession
from engine_adapter.answers import Answer, GroupQuery, Refs
from engine_adapter.client import SchedulerClient
from engine_adapter.link import LinkState
from engine_adapter.worker import WorkerClient
from tests.broker.harness import MemfdMemory
from tests.tiers.doubles import FakeClock
from tiers.base import make_offload_key

ROWS = 8
ROW = 4096
KEY = 36
CALL_TIMEOUT_S = 0.02
FROM_OUTSIDE = frozenset(
    (
        *("reply", "timeout", "ready", "fail", "evict", "patience"),
        *("engine_death", "worker_death", "broker_death"),
    )
)
"""Events that can overtake a call of the engine; all others are calls of the engine itself."""


def wire_key(number: int) -> bytes:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def bytes_of(chunk: bytes) -> np.ndarray:
    return np.frombuffer((chunk[:KEY] * 2)[:64], dtype=np.uint8)


class Pipe:
    """A connection: bytes to the broker arrive at once, bytes from it when they are let through."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.held: deque[bytes] = deque()
        self.arrived: deque[bytes] = deque()
        self.fds: list[int] = []
        self.is_open = True
        self.reader = wire.FrameReader()
        self.engine: EngineSession | None = None
        self.member: Member | None = None
        self.queued_bytes = 0

    # the broker's end
    def send_to_client(self, message: wire.Message, fds: Iterable[int] = ()) -> None:
        self.fds += fds
        self.held.append(wire.encode(message))

    # the client's end
    def send(self, data: bytes) -> bool:
        if not self.is_open:
            return False
        self.reader.feed(data)
        while (message := self.reader.next()) is not None:
            self.world.broker_hears(self, message)
        return True

    def receive(self) -> tuple[bytes, list[int]] | None:
        if self.arrived:
            data = b"".join(self.arrived)
            self.arrived.clear()
            fds, self.fds = self.fds, []
            return data, fds
        return (b"", []) if self.is_open else None

    def wait(self, timeout_s: float) -> None:
        if self.arrived or not self.is_open:
            return
        schedule = self.world.schedule
        if schedule and schedule[0] in FROM_OUTSIDE:
            self.world.run_next_event()
        else:  # what the engine itself does next must wait for this call: the answer comes
            self.let_through()
            if not self.arrived:
                self.world.clock.advance(timeout_s)

    def close(self) -> None:
        self.is_open = False

    def let_through(self) -> None:
        self.arrived.extend(self.held)
        self.held.clear()


class PipePort:
    """A Pipe as the session sees it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    @property
    def queued_bytes(self) -> int:
        return 0

    def send(self, message: wire.Message) -> None:
        self._pipe.send_to_client(message)


class World:
    """See the module. `schedule` names events; `run` runs them all and then lets things settle."""

    def __init__(self, keys: int, schedule: Iterable[str], *, warm: bool = False) -> None:
        """`keys` are the prompt's; all but the last are there, the last is being stored by somebody
        else. With `warm` all are there and have been looked up."""
        self.keys = [wire_key(n) for n in range(keys)]
        self.schedule = deque(schedule)
        self.clock = FakeClock()
        self.memory = MemfdMemory(ROWS, ROW)
        self.alive = True
        self.worker_alive = True
        self.pipes: list[Pipe] = []
        self.refs: Refs | None = None
        self.wrong: list[str] = []
        self._start_broker(frozen=False)
        self.client = SchedulerClient(
            "",
            engine_id="e",
            namespace=b"n" * 16,
            row_bytes=ROW,
            key_bytes=KEY,
            call_timeout_s=CALL_TIMEOUT_S,
            clock=self.clock,
            connect=self._connect,
        )
        self.worker = WorkerClient(
            "",
            engine_id="e",
            row_bytes=ROW,
            key_bytes=KEY,
            populate=False,
            clock=self.clock,
            connect=self._connect,
        )
        self._settle_connections()
        # somebody else is storing the last key; those before are there
        self.other = self.pool.manager.session("other")
        self._other_store([*self.keys[:-1]], "done", complete=True)
        self._other_store([self.keys[-1]], "running", complete=warm)
        self.answer: Answer | None = None
        self.offered: list[bytes] = []
        self.offer_refs: Refs | None = None
        self.lost = False
        """Whether the broker has forgotten what this engine owned: refusals are right then."""
        if warm:
            self.do_lookup()

    # ---- the broker ----------------------------------------------------------------------------

    def _start_broker(self, *, frozen: bool) -> None:
        self.pool = Pool(self.memory, lock=threading.Lock(), clock=self.clock)
        self.pool.frozen = frozen
        self.counters = Counters()
        self.engines: dict[str, EngineSession] = {}

    def _connect(self) -> Pipe:
        pipe = Pipe(self)
        self.pipes.append(pipe)
        return pipe

    def broker_hears(self, pipe: Pipe, message: wire.Message) -> None:
        if isinstance(message, wire.Attach):
            self._attach(pipe, message)
        elif pipe.engine is not None and pipe.member is not None:
            pipe.engine.handle(pipe.member, message)
            self.broker_tells()

    def _attach(self, pipe: Pipe, message: wire.Attach) -> None:
        engine = self.engines.get("e")
        if engine is None:
            engine = self.engines["e"] = EngineSession(
                "e",
                self.pool,
                world=1,
                key_bytes=KEY,
                counters=self.counters,
                on_idle=self._forget,
                on_left=lambda pool, namespace: pool.discard_namespace(namespace),
            )
        is_worker = message.role is wire.Role.WORKER
        member = Member(
            rank=0 if is_worker else -1,
            port=PipePort(pipe),
            pid=1,
            maps=is_worker,
            process=11 if is_worker else 10,
        )
        if not is_worker:
            engine.declare(message.namespace, message.weights_version, False)
        pipe.engine, pipe.member = engine, member
        attached = wire.Attached(
            protocol=wire.PROTOCOL_VERSION,
            broker="races",
            incarnation=1,
            rows=ROWS,
            row_bytes=ROW,
            rows_offset=self.memory.rows_offset,
            generation_offset=0,
            memory_bytes=self.memory.size,
            epoch=engine.epoch.number,
        )
        pipe.send_to_client(attached, [os.dup(self.memory.fd)] if is_worker else [])
        if is_worker:
            self.pool.frozen = False  # the only one who had mapped the memory before
        engine.join(member)

    def _forget(self, engine: EngineSession) -> None:
        self.engines.pop(engine.engine_id, None)

    def broker_tells(self) -> None:
        for engine in list(self.engines.values()):
            engine.tell(1 << 20)
        self.pool.hub.noticed.clear()

    def _settle_connections(self) -> None:
        for _ in range(6):
            self.client.step()
            self.worker.step()
            for pipe in self.pipes:
                pipe.let_through()

    # ---- others --------------------------------------------------------------------------------

    def _scoped(self, keys: Iterable[bytes]) -> list[Any]:
        from broker.members import effective_namespace

        space = effective_namespace(b"n" * 16, None, b"")
        return [space + chunk for chunk in keys]

    def _other_store(self, keys: list[bytes], request: str, *, complete: bool) -> None:
        self.other.begin(request)
        answer = self.other.offer(self._scoped(keys), request, 1)
        assert answer is not None
        view = np.frombuffer(self.memory._map, dtype=np.uint8, offset=self.memory.rows_offset)
        rows = view.reshape(ROWS, ROW)
        for index, row in zip(answer.accepted, answer.rows.tolist(), strict=True):
            rows[row, :64] = bytes_of(keys[index])
        if complete:
            self.other.complete_offer(request, 1, answer.rows, True)
            self.other.finish(request)

    # ---- events --------------------------------------------------------------------------------

    def run_next_event(self) -> bool:
        if not self.schedule:
            return False
        name = self.schedule.popleft()
        event: Callable[[], None] = getattr(self, f"do_{name}")
        event()
        self.broker_tells()
        self.pool.hub.check()
        return True

    def do_lookup(self) -> None:
        if self.alive:
            began = self.clock.now
            before = len(self.schedule)
            query = GroupQuery(
                group=0, keys=self.keys, positions=range(16, 16 * len(self.keys) + 1, 16)
            )
            self.answer = self.client.lookup("r", [query])
            if before == len(self.schedule):  # nothing else took time meanwhile
                assert self.clock.now - began <= CALL_TIMEOUT_S + 1e-9

    def do_reply(self) -> None:
        for pipe in self.pipes:
            pipe.let_through()

    def do_timeout(self) -> None:
        self.clock.advance(CALL_TIMEOUT_S + 0.001)

    def do_patience(self) -> None:
        self.clock.advance(2.1)
        self.pool.hub.tick()

    def do_ready(self) -> None:
        self._end_running(True)

    def do_fail(self) -> None:
        self._end_running(False)

    def _end_running(self, success: bool) -> None:
        claims = self.other.requests.get("running")
        if claims is not None:
            for owned in list(claims.attempts.values()):
                self.other.complete_offer("running", 1, owned.storing, success)
            self.other.finish("running")

    def do_evict(self) -> None:
        crowd = [wire_key(100 + n) for n in range(ROWS)]
        self._other_store(crowd, f"crowd{self.clock.now}", complete=True)

    def do_step(self) -> None:
        if self.alive:
            self.client.step()
        if self.worker_alive:
            self.worker.step()

    def do_take(self) -> None:
        """prepare_load of all that the answer promises."""
        if not self.alive or self.answer is None or self.answer.pending or self.refs is not None:
            return
        there = self.keys[: self.answer.groups[0].count] if self.answer.groups else []
        self.refs = self.client.prepare_load("r", there) if there else None

    def do_copy(self) -> None:
        """The worker copies what was taken; what it calls good must be right."""
        if self.refs is None or not self.worker_alive:
            return
        refs, self.refs = self.refs, None
        buffers = [np.zeros(64, dtype=np.uint8) for _ in refs]
        good = self.worker.load(refs, buffers)
        for chunk, is_good, buffer in zip(self.keys, good.tolist(), buffers, strict=False):
            if is_good and not np.array_equal(buffer, bytes_of(chunk)):
                self.wrong.append(chunk.hex())
        if self.alive:
            self.client.complete_load("r", self.keys[: len(refs)])

    def do_offer(self) -> None:
        """prepare_store of a chunk that nobody has."""
        if self.alive and self.offer_refs is None:
            offer = self.client.prepare_store("r", [wire_key(50)], [16])
            if len(offer.accepted):
                self.offered, self.offer_refs = [wire_key(50)], offer.refs

    def do_write(self) -> None:
        """The worker writes what was offered, and the scheduler says so."""
        if self.offer_refs is None or not self.worker_alive:
            return
        refs, self.offer_refs = self.offer_refs, None
        good = self.worker.store(refs, [bytes_of(chunk) for chunk in self.offered])
        if self.alive:
            self.client.complete_store("r", self.offered, success=bool(good.all()))

    def do_reattach(self) -> None:
        """Time for a new connection, and all of its messages."""
        for _ in range(3):
            self.clock.advance(0.6)
            self.do_step()
            self.do_reply()

    def do_end(self) -> None:
        if self.alive:
            self.client.finish("r")
            self.answer = None

    def do_preempt(self) -> None:
        if self.alive:
            self.client.preempted("r")
            self.answer = None

    def do_reset(self) -> None:
        if self.alive:
            self.lost = True
            self.client.reset("v2")
            self.answer = None

    def do_engine_death(self) -> None:
        self._kill(lambda member: True)
        self.alive = self.worker_alive = False

    def do_worker_death(self) -> None:
        self._kill(lambda member: member.rank >= 0)
        self.worker_alive = False

    def _kill(self, which: Callable[[Member], bool]) -> None:
        self.lost = True
        for pipe in self.pipes:
            if pipe.is_open and pipe.engine and pipe.member and which(pipe.member):
                pipe.is_open = False
                pipe.engine.member_exited(pipe.member)
                pipe.engine.member_detached(pipe.member)

    def do_broker_death(self) -> None:
        """All it knew is gone; the memory and who mapped it stay."""
        self.lost = True
        for pipe in self.pipes:
            pipe.is_open = False
            pipe.held.clear()
            pipe.engine = pipe.member = None
        self._start_broker(frozen=self.worker_alive)
        self.other = self.pool.manager.session("other")

    # ---- the end -------------------------------------------------------------------------------

    def run(self) -> None:
        """Everything of the schedule, then what must follow; then nothing may be left."""
        while self.run_next_event():
            continue
        if not self.lost:
            assert not self.counters.refused, self.counters.refused
        self._check_contents()
        self._end_running(False)
        for _ in range(8):
            self.do_step()
            self.do_reply()
            self.clock.advance(0.6)
            self.pool.hub.tick()
            self.broker_tells()
        self.do_copy()
        self.do_write()
        if self.alive and self.worker_alive:
            self._still_works()
        self._check_contents()
        self.do_end()
        for _ in range(3):
            self.do_step()
            self.do_reply()
        for request in list(self.other.requests):
            self.other.finish(request)
        self.pool.hub.check()
        assert not self.wrong, f"wrong bytes of {self.wrong}"
        assert self.pool.hub.rows.num_busy == 0, "rows are claimed, though everybody has ended"
        assert not self.pool.hub.waiting
        assert not self.pool.hub._waiters
        self.close()

    def _check_contents(self) -> None:
        """V3: every readable row holds the bytes of the key that leads to it."""
        rows = self.pool.hub.rows
        flat = np.frombuffer(self.memory._map, dtype=np.uint8, offset=self.memory.rows_offset)
        for row in range(ROWS):
            if rows.slots.ref_cnt[row] >= 0:
                chunk = rows.key_of(row)
                assert chunk is not None
                found = flat[row * ROW : row * ROW + 64]
                assert np.array_equal(found, bytes_of(chunk[16:])), f"row {row} has other bytes"

    def _still_works(self) -> None:
        """Whatever happened, the engine is attached again and can be served."""
        assert self.client.state is LinkState.UP
        assert self.client.is_ready
        offer = self.client.prepare_store("last", [wire_key(77)], [16])
        assert len(offer.accepted) == 1
        self.client.complete_store("last", [wire_key(77)], success=False)
        self.client.finish("last")

    def close(self) -> None:
        """Free the memory."""
        for pipe in self.pipes:
            for fd in pipe.fds:
                os.close(fd)
            pipe.fds = []
        self.client.close()
        self.worker.close()
        self.pool.shutdown()
