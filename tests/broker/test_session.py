"""An engine's session at the broker: members that come and go, fences, namespaces."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from broker import wire
from broker.members import Counters, Member, effective_namespace
from broker.pool import Pool
from broker.session import EngineSession
from tests.broker.harness import MemfdMemory
from tests.tiers.doubles import FakeClock
from tiers.slots import SlotState

KEY_BYTES = 8


class FakePort:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[wire.Message] = []
        self.queued_bytes = 0

    def send(self, message: wire.Message) -> None:
        self.sent.append(message)

    def last(self, kind: type[wire.Message]) -> wire.Message:
        return next(m for m in reversed(self.sent) if isinstance(m, kind))


class World:
    """One pool and one engine with a scheduler and two workers."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.pool = Pool(MemfdMemory(8, 4096), lock=threading.Lock(), clock=self.clock)
        self.counters = Counters()
        self.idle: list[EngineSession] = []
        self.left: list[bytes] = []
        self.engine = EngineSession(
            "e",
            self.pool,
            world=2,
            key_bytes=KEY_BYTES,
            counters=self.counters,
            on_idle=self.idle.append,
            on_left=lambda pool, namespace: self.left.append(namespace),
        )
        self.scheduler = Member(rank=-1, port=FakePort(), pid=1, maps=False, process=1)
        self.workers = [
            Member(rank=rank, port=FakePort(), pid=2 + rank, maps=True, process=2 + rank)
            for rank in (0, 1)
        ]
        self.engine.declare(b"n" * 16, None, True)
        self.engine.join(self.scheduler)
        for worker in self.workers:
            self.engine.join(worker)

    def told(self, member: Member, kind: type[wire.Message]) -> wire.Message:
        assert isinstance(member.port, FakePort)
        return member.port.last(kind)

    def store(self, request: str, *numbers: int, attempt: int = 1) -> wire.StoreReply:
        keys = b"".join(n.to_bytes(4, "big") + b"\0\0\0\0" for n in numbers)
        positions = np.arange(1, len(numbers) + 1, dtype="<u4").tobytes()
        self.engine.handle(
            self.scheduler,
            wire.PrepareStore(
                seq=1, request=request, attempt=attempt, positions=positions, keys=keys
            ),
        )
        reply = self.told(self.scheduler, wire.StoreReply)
        assert isinstance(reply, wire.StoreReply)
        return reply

    def count(self, state: SlotState) -> int:
        self.pool.hub.check()
        return self.pool.hub.rows.slots.count(state)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.pool.shutdown()


def die(world: World, member: Member, order: str) -> None:
    steps = {
        "e": lambda: world.engine.member_detached(member),
        "p": lambda: world.engine.member_exited(member),
    }
    for step in order:
        steps[step]()


@pytest.mark.parametrize("order", ["ep", "pe"], ids=["EOF first", "pidfd first"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_dead_engine_is_forgotten_once_however_it_is_told(
    world: World, order: str, first: int
) -> None:
    world.store("r", 1, 2)
    members = [world.scheduler, *world.workers]
    for member in members[first:] + members[:first]:
        die(world, member, order)
    assert world.idle == [world.engine]
    assert world.count(SlotState.FREE) == 8


def test_rows_of_a_dead_scheduler_stay_apart_until_every_worker_has_spoken(world: World) -> None:
    world.store("r", 1, 2)
    die(world, world.scheduler, "ep")
    assert world.count(SlotState.QUARANTINED) == 2
    for worker in world.workers:
        notice = world.told(worker, wire.ResetNotice)
        assert isinstance(notice, wire.ResetNotice)
        assert world.count(SlotState.QUARANTINED) == 2
        world.engine.handle(worker, wire.TransfersEnded(epoch=notice.epoch))
    assert world.count(SlotState.FREE) == 8


def test_an_exited_process_whose_connection_lives_on_may_still_write(world: World) -> None:
    # A forked child may hold both the connection and a mapping made before.
    world.store("r", 1)
    die(world, world.scheduler, "ep")
    die(world, world.workers[0], "ep")
    die(world, world.workers[1], "p")
    assert world.count(SlotState.QUARANTINED) == 1
    die(world, world.workers[1], "e")
    assert world.count(SlotState.FREE) == 8


def test_without_all_workers_nothing_is_stored(world: World) -> None:
    die(world, world.workers[1], "ep")
    assert not world.engine.is_ready
    assert world.store("r", 1).status is wire.StoreStatus.DECLINED
    state = world.told(world.scheduler, wire.SessionState)
    assert state == wire.SessionState(ready=False, missing=(1,))
    again = Member(rank=1, port=FakePort(), pid=9, maps=True, process=9)
    world.engine.join(again)
    assert world.store("r2", 1).status is wire.StoreStatus.OK


def test_a_process_that_attaches_again_has_ended_its_older_transfers(world: World) -> None:
    world.store("r", 1)
    die(world, world.workers[0], "e")  # the connection broke, the process lives
    assert world.count(SlotState.QUARANTINED) == 1
    world.engine.join(Member(rank=0, port=FakePort(), pid=2, maps=True, process=2))
    world.engine.handle(world.workers[1], wire.TransfersEnded(epoch=world.engine.fence))
    assert world.count(SlotState.FREE) == 8


def test_a_reset_makes_all_unreachable_and_frees_it_when_workers_have_spoken(
    world: World,
) -> None:
    before = world.engine.namespace
    world.store("r", 1)
    world.engine.handle(world.scheduler, wire.Reset(seq=5, weights_version="v2"))
    assert world.engine.namespace != before
    assert world.left == [before]
    assert world.count(SlotState.QUARANTINED) == 1
    for worker in world.workers:
        world.engine.handle(worker, wire.TransfersEnded(epoch=world.engine.fence))
    assert world.count(SlotState.FREE) == 8
    reply = world.told(world.scheduler, wire.ResetReply)
    assert reply == wire.ResetReply(seq=5, epoch=1, sessions=1)


def test_namespaces_differ_in_every_part() -> None:
    made = {
        effective_namespace(namespace, version, nonce)
        for namespace in (b"a" * 16, b"b" * 16)
        for version in (None, "", "v1", "-")
        for nonce in (b"", b"x" * 16)
    }
    assert len(made) == 16


@pytest.mark.parametrize(
    ("refs", "reason"),
    [
        ([(8, 1)], "row out of range"),
        ([(0xFFFFFFFF, 0)], "row out of range"),
        ([(0, 77)], "old generation"),
        ([(0, 1)], "completion of a load not running"),
    ],
)
def test_completions_of_what_is_not_owned_are_refused_and_counted(
    world: World, refs: list[tuple[int, int]], reason: str
) -> None:
    world.store("r", 1)
    packed = np.array(refs, dtype=wire.ROW_REF).tobytes()
    message = wire.CompleteLoad(request="r", attempt=1, refs=packed, failed=b"")
    world.engine.handle(world.scheduler, message)
    assert world.counters.refused == {reason: 1}
    assert world.count(SlotState.RESERVED) == 1


@pytest.mark.parametrize("message", [wire.Finish(request="r"), wire.Status(seq=1, verify=False)])
def test_a_worker_may_not_speak_for_the_scheduler(world: World, message: wire.Message) -> None:
    with pytest.raises(wire.Malformed):
        world.engine.handle(world.workers[0], message)
    with pytest.raises(wire.Malformed):
        world.engine.handle(world.scheduler, wire.Pong(seq=1))


def test_events_go_to_the_engine_that_stored(world: World) -> None:
    reply = world.store("r", 1)
    message = wire.CompleteStore(request="r", attempt=1, refs=reply.refs, success=True, digests=b"")
    world.engine.handle(world.scheduler, message)
    world.engine.tell(1 << 20)
    events = world.told(world.scheduler, wire.Events)
    assert isinstance(events, wire.Events)
    (event,) = events.events
    assert (event.removed, event.medium, event.keys) == (False, "CPU", b"\0\0\0\1\0\0\0\0")


def test_a_scheduler_that_does_not_read_is_told_to_resync(world: World) -> None:
    world.store("other", 1)
    keys = b"\0\0\0\1\0\0\0\0"
    group = wire.LookupGroup(
        group=0,
        mode=wire.LookupMode.PREFIX,
        window=0,
        first_window=1,
        start=0,
        positions=np.array([1], dtype="<u4").tobytes(),
        keys=keys,
    )
    lookup = wire.Lookup(seq=2, request="r", attempt=1, groups=(group,))
    world.engine.handle(world.scheduler, lookup)
    world.clock.advance(5)
    world.pool.hub.tick()
    port = world.scheduler.port
    assert isinstance(port, FakePort)
    port.queued_bytes = 2 << 20
    world.engine.tell(1 << 20)
    assert port.sent[-1] == wire.Resync()


@pytest.mark.parametrize("positions", [b"", b"\1\0\0\0", b"\1\0\0\0" * 3])
def test_every_key_has_one_position(world: World, positions: bytes) -> None:
    keys = b"\0\0\0\1\0\0\0\0" * 2
    group = wire.LookupGroup(
        group=0,
        mode=wire.LookupMode.PREFIX,
        window=0,
        first_window=1,
        start=0,
        positions=positions,
        keys=keys,
    )
    for message in (
        wire.Lookup(seq=1, request="r", attempt=1, groups=(group,)),
        wire.PrepareStore(seq=1, request="r", attempt=1, positions=positions, keys=keys),
    ):
        with pytest.raises(wire.Malformed, match="positions"):
            world.engine.handle(world.scheduler, message)
