"""The model that is checked: one engine in slow motion, another one, a broker, and what may happen.

`Model.run` asks the chooser what happens next, at every point between two calls of the engine and
at every point at which one of its calls waits; the laws are checked after each. The other engine
acts at once: of what it does, only the order at the broker can matter to the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from unittest import mock

from broker.members import effective_namespace
from tests.races import events, laws
from tests.races.actors import NAMESPACE, BrokerGone, Engine, Killed
from tests.races.explorer import Chooser
from tests.races.fingerprint import fingerprint
from tests.races.host import KEY, Broker, HostMemory, Process
from tests.races.transport import Channel
from tests.tiers.doubles import FakeClock, pattern
from tiers.base import OffloadKey, make_offload_key
from tiers.sessions import Shares

SPACE = effective_namespace(NAMESPACE, None, b"")
REQUEST = "r"


def wire_key(number: int) -> bytes:
    """Key of a chunk as engines name it."""
    return make_offload_key(number.to_bytes(KEY - 4, "big"), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What there is, what the engine does, and what may come in between.

    Of the prompt's chunks `ready`, `in_tier` and `writing` (by the other engine) say where they
    are, by index. `may` names events; each happens at most as often as it is named.
    """

    keys: int = 1
    ready: tuple[int, ...] = ()
    in_tier: tuple[int, ...] = ()
    writing: tuple[int, ...] = ()
    program: tuple[str, ...]
    may: tuple[str, ...] = ()


class Model:
    """See the module."""

    def __init__(self, scenario: Scenario, chooser: Chooser) -> None:
        self.scenario = scenario
        self.chooser = chooser
        self.clock = FakeClock()
        self.memory = HostMemory()
        self.tier_chunks: dict[OffloadKey, bytes] = {}
        self.broker: Broker = self.new_broker({})
        self.keys = [wire_key(number) for number in range(scenario.keys)]
        self.left = list(scenario.may)
        self.position = 0
        self.in_call = False
        self.free_running = True
        self.crowds = 0
        self.unnoticed: list[Process] = []
        self.engine: Engine = Engine("a", (1, 2), self.memory, self.clock, self._connect)
        self.other: Engine = Engine("b", (3, 4), self.memory, self.clock, self._connect)
        self.spaces = {SPACE}
        self.heard_before = 0
        """Resets that the engine had read over earlier connections."""
        self.excused = 0
        """Of those, what says nothing about what may be found now: the broker has forgotten it."""
        self._prepare()
        self.free_running = False

    # ---- the host -------------------------------------------------------------------------------

    def new_broker(self, old_mappers: dict[int, Process]) -> Broker:
        incarnation = self.broker.incarnation + 1 if hasattr(self, "broker") else 1
        shares = Shares(total=1.0, tiers=0.5)
        return Broker(self.memory, self.clock, incarnation, old_mappers, self.tier_chunks, shares)

    def _connect(self, engine: Engine, role: str, process: Process) -> Channel:
        if not process.alive:
            raise BrokerGone("this process is dead")
        channel = Channel(f"{engine.name} {role}", process.peer, self._wait)
        if role == "scheduler" and role in engine.channels:
            self.heard_before += engine.channels[role].resets_read if engine is self.engine else 0
        old = engine.channels.get(role)
        if old is not None and not old.is_over:  # what was said on it is still to be heard
            name = f"old {role}"
            while name in engine.channels and not engine.channels[name].is_over:
                name = f"old {name}"
            engine.channels[name] = old
        engine.channels[role] = channel
        return channel

    def _prepare(self) -> None:
        for engine in (self.engine, self.other):
            self.settle(engine)
            assert engine.is_up
        scenario = self.scenario
        for index in scenario.in_tier:
            chunk = OffloadKey(SPACE + self.keys[index])
            self.tier_chunks[chunk] = pattern(chunk)
        ready = [self.keys[index] for index in scenario.ready]
        if ready:
            self.other_stores("before", ready)
        if scenario.writing:
            writing = [self.keys[index] for index in scenario.writing]
            self.other.offer("writing", writing, self.source)
            self.settle(self.other)

    def source(self, row: int, key: bytes) -> bytes:
        """The bytes that a store to this row has to write: those of the key that leads there."""
        chunk = self.broker.pool.hub.rows.key_of(row)
        return pattern(chunk if chunk is not None else OffloadKey(SPACE + key))

    def other_stores(self, request: str, keys: list[bytes]) -> None:
        with self.at_once():
            self.settle(self.other)
            self.other.offer(request, keys, self.source)
            while (copy := self.other.next_copy(request)) is not None:
                self.other.move(copy)
            self.other.complete(request)
            self.other.client.finish(request)
            self.settle(self.other)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Calls in here are answered at once."""
        before, self.free_running = self.free_running, True
        try:
            yield
        finally:
            self.free_running = before

    def settle(self, engine: Engine) -> None:
        """Deliver all of an engine's messages, and let it act on them, until nothing moves."""
        for _ in range(12):
            if engine.scheduler.alive:
                engine.client.step()
            if engine.worker_process.alive:
                engine.worker.step()
            channels = [c for c in engine.channels.values() if not c.is_over]
            if not channels:
                return
            for channel in channels:
                self._pump(channel)
        raise AssertionError(f"messages of engine {engine.name} never end")

    def _pump(self, channel: Channel) -> None:
        while channel.to_broker and channel.broker_open:
            self.broker.hear(channel)
        while channel.to_client:
            channel.deliver_to_client()

    # ---- what may happen next -------------------------------------------------------------------

    def _wait(self, channel: Channel, timeout_s: float) -> None:
        """A client blocks in a call."""
        if self.free_running:
            self._pump(channel)
            if not channel.arrived and not channel.ended:
                self.clock.advance(timeout_s + 1e-7)
            return
        self.in_call = True
        while not channel.arrived and not channel.ended:
            name = self._choose_in_call()
            if name == "timeout":
                self.clock.advance(timeout_s + 1e-7)
                break
            self.act(name)
            if not self.engine.scheduler.alive:
                raise Killed
        self.in_call = False

    def _choose_in_call(self) -> str:
        options = self.options()
        # While the answer may come, a time-out is an event; otherwise it must follow.
        if "timeout" in self.left or not options:
            options.append("timeout")
        name = self.chooser.choose(options, self.state)
        if name in self.left:
            self.left.remove(name)
        return name

    def state(self) -> Hashable:
        """All that what follows depends on."""
        return fingerprint(self)

    def options(self) -> list[str]:
        """Events that are possible now, what the engine itself does first."""
        engine, found = self.engine, []
        if not self.in_call and engine.scheduler.alive:
            if self._may_go_on():
                found.append("next")
            if self._has_news():
                found.append("step")
        for role, channel in engine.channels.items():
            if channel.to_broker and channel.broker_open:
                found.append(f"up {role}")
            if channel.to_client and channel.client_open:
                found.append(f"down {role}")
        if engine.next_copy() is not None:
            found.append("copy")
        found += [f"pidfd {process.pid}" for process in self.unnoticed]
        if self.broker.tier.running:
            found += ["job good", "job fails"]
        if not found:
            return found  # all is said and done: what else may happen meets nothing
        return found + [name for name in dict.fromkeys(self.left) if self._is_possible(name)]

    def _may_go_on(self) -> bool:
        if self.position >= len(self.scenario.program):
            return False
        engine = self.engine
        waits = self.scenario.program[self.position] == "complete" and engine.next_copy()
        return not waits

    def _has_news(self) -> bool:
        channel = self.engine.channels["scheduler"]
        if channel.client_open:
            return bool(channel.arrived) or channel.ended
        return self.clock.now >= self.engine.client._link._retry_at

    def _is_possible(self, name: str) -> bool:
        engine = self.engine
        if name == "timeout":
            return False  # offered where a call waits
        if name in ("preempt", "end", "again", "reset", "reset v2"):
            return engine.scheduler.alive and not self.in_call
        if name in ("pause", "patience"):
            return not self.in_call
        if name == "scheduler dies":
            return engine.scheduler.alive
        if name == "worker dies":
            return engine.worker_process.alive
        if name in ("other good", "other fails"):
            return bool(self.other.copies)
        return True

    # ---- and what it does -----------------------------------------------------------------------

    def act(self, name: str) -> None:
        """Let one event happen, then check the laws."""
        kind, _, rest = name.partition(" ")
        if kind == "up":
            self.broker.hear(self.engine.channels[rest])
        elif kind == "down":
            self.engine.channels[rest].deliver_to_client()
            if rest == "worker":
                self.worker_steps()
        elif kind == "pidfd":
            process = next(p for p in self.unnoticed if p.pid == int(rest))
            self.unnoticed.remove(process)
            self.broker.process_died(process)
        else:
            events.EVENTS[name](self)
        self.follow()

    def follow(self) -> None:
        """The other engine hears what concerns it; then the laws must hold."""
        with self.at_once():
            self.settle(self.other)
        laws.check(self)

    def worker_steps(self) -> None:
        """The engine's worker reads what has been delivered, and answers."""
        if self.engine.worker_process.alive:
            self.engine.worker.step()

    # ---- a run ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Until nothing is left to happen; then nothing may be left over."""
        try:
            while options := self.options():
                name = self.chooser.choose(options, self.state)
                if name in self.left:
                    self.left.remove(name)
                with contextlib.suppress(Killed):
                    self.act(name)
                self.in_call = False
            laws.check_the_end(self)
        finally:
            self.close()

    def close(self) -> None:
        """Give descriptors back."""
        for engine in (self.engine, self.other):
            engine.close()
            for channel in engine.channels.values():
                channel.drop_descriptors()
        self.broker.pool.shutdown()


def run_model(scenario: Scenario, chooser: Chooser) -> None:
    """One run; what is random in the product is not in here."""
    with mock.patch("os.urandom", lambda size: b"x" * size):
        Model(scenario, chooser).run()
