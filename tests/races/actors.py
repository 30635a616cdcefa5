"""One engine of the host: real clients of a scheduler and a worker, and copies that take time.

A copy is begun and ended in two steps, as a copy engine does it, so that anything may happen in
between: half of the bytes move at each. What the engine is told to do comes from `model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from engine_adapter.answers import Answer, GroupQuery, Refs
from engine_adapter.client import SchedulerClient
from engine_adapter.link import LinkState
from engine_adapter.worker import Memory, WorkerClient
from tests.races.host import KEY, PATTERN, ROW, HostMemory, Mapped, Process
from tests.races.transport import Channel
from tests.tiers.doubles import FakeClock, pattern
from tiers.base import OffloadKey

CALL_TIMEOUT_S = 0.02
NAMESPACE = b"n" * 16


class BrokerGone(OSError):
    """Nobody listens on the socket."""


class Killed(BaseException):
    """The engine died inside a call of its client."""


@dataclass(slots=True, eq=False)
class Copy:
    """What the scheduler has told the worker to do. `good` once it is done."""

    kind: str
    request: str
    keys: list[bytes]
    refs: Refs
    sources: list[bytes]
    """What a store writes, one per key."""
    spaces: frozenset[bytes] = frozenset()
    """Namespaces whose chunks a load may find."""
    state: str = "told"
    data: list[NDArray[np.uint8]] = field(default_factory=list)
    good: NDArray[np.bool_] | None = None
    owned: bool = True
    """Whether the broker still knew of its claim when it began. Without one, a load may find its
    row given away under its hands, and must not call it good; a store must not even begin."""
    open: AbstractContextManager[Memory] | None = None
    memory: Memory | None = None


class Engine:
    """See the module. Its scheduler and its worker are two processes."""

    def __init__(
        self,
        name: str,
        pids: tuple[int, int],
        memory: HostMemory,
        clock: FakeClock,
        connect: Callable[[Engine, str, Process], Channel],
    ) -> None:
        self.name = name
        self.scheduler = Process(pids[0])
        self.worker_process = Process(pids[1])
        self.channels: dict[str, Channel] = {}
        self.clock = clock
        common: dict[str, Any] = {"engine_id": name, "row_bytes": ROW, "key_bytes": KEY}
        self.client = SchedulerClient(
            "",
            namespace=NAMESPACE,
            call_timeout_s=CALL_TIMEOUT_S,
            clock=clock,
            connect=lambda: connect(self, "scheduler", self.scheduler),
            **common,
        )
        self.worker = WorkerClient(
            "",
            populate=False,
            clock=clock,
            connect=lambda: connect(self, "worker", self.worker_process),
            map_memory=lambda fd, attached: _mapped(fd, memory),
            **common,
        )
        self.answer: Answer | None = None
        self.copies: list[Copy] = []
        self.reset_done = False
        """Whether a reset of its own was obeyed: nothing older may be found."""
        self.reset_asked = False
        self.judged: list[str] = []
        """Faults that the engine itself has seen."""

    # ---- the scheduler's calls ------------------------------------------------------------------

    def timed(self, call: Callable[[], Any]) -> Any:
        """A call that blocks, which may take the call time-out and no longer."""
        began = self.clock.now
        result = call()
        took = self.clock.now - began
        if took > CALL_TIMEOUT_S + 1e-6:
            self.judged.append(f"a call took {took:.3f} s")
        return result

    def lookup(self, request: str, keys: Sequence[bytes]) -> Answer:
        """As the client's, of one prefix."""
        query = GroupQuery(group=0, keys=keys, positions=range(16, 16 * len(keys) + 1, 16))
        answer = cast(Answer, self.timed(lambda: self.client.lookup(request, [query])))
        self.answer = answer
        return answer

    def take(self, request: str, keys: Sequence[bytes], spaces: frozenset[bytes]) -> None:
        """prepare_load of all that the last answer promises, for the worker to copy."""
        answer, self.answer = self.answer, None
        if answer is None or answer.pending:
            return
        there = list(keys[: answer.groups[0].count])
        refs = self.client.prepare_load(request, there) if there else None
        if refs is not None:
            self.copies.append(Copy("load", request, there, refs.copy(), [], spaces))

    def offer(
        self, request: str, keys: Sequence[bytes], source: Callable[[int, bytes], bytes]
    ) -> None:
        """prepare_store; `source(row, key)` are the bytes of a chunk."""
        positions = range(16, 16 * len(keys) + 1, 16)
        offer = self.timed(lambda: self.client.prepare_store(request, keys, positions))
        if len(offer.accepted):
            accepted = [keys[index] for index in offer.accepted]
            sources = [
                source(row, key)
                for row, key in zip(offer.refs["row"].tolist(), accepted, strict=True)
            ]
            self.copies.append(Copy("store", request, accepted, offer.refs.copy(), sources))

    def complete(self, request: str) -> None:
        """Tell the broker of every copy of a request that has ended, or that never will."""
        for copy in [copy for copy in self.copies if copy.request == request]:
            if copy.state != "done" and self.worker_process.alive:
                continue
            self.copies.remove(copy)
            good = np.zeros(len(copy.keys), dtype=bool)
            if copy.state == "done" and copy.good is not None:
                good = copy.good
            if copy.kind == "load":
                failed = [key for key, is_good in zip(copy.keys, good, strict=True) if not is_good]
                self.client.complete_load(request, copy.keys, failed)
            else:
                self.client.complete_store(request, copy.keys, success=bool(good.all()))

    # ---- the worker -----------------------------------------------------------------------------

    def next_copy(self, request: str | None = None) -> Copy | None:
        """The copy that the worker is at, or begins next; of one request, or of any."""
        if not self.worker_process.alive:
            return None
        for copy in self.copies:
            if copy.state != "done" and request in (None, copy.request):
                return copy
        return None

    def move(self, copy: Copy) -> None:
        """Begin or end it."""
        if copy.state == "told":
            self._begin(copy)
        else:
            self._end(copy)

    def _begin(self, copy: Copy) -> None:
        copy.good = np.zeros(len(copy.keys), dtype=bool)
        if self.worker.memory is None:
            copy.state = "done"
            return
        copy.open = self.worker.transfer()
        copy.memory = copy.open.__enter__()
        copy.good = copy.memory.are_current(copy.refs)
        copy.data = [np.zeros(PATTERN, dtype=np.uint8) for _ in copy.keys]
        copy.state = "moving"
        self._bytes(copy, slice(0, PATTERN // 2))

    def _end(self, copy: Copy) -> None:
        assert copy.open is not None
        assert copy.memory is not None
        assert copy.good is not None
        self._bytes(copy, slice(PATTERN // 2, PATTERN))
        copy.good = copy.good & copy.memory.are_current(copy.refs)
        copy.open.__exit__(None, None, None)
        copy.state = "done"
        if copy.kind == "load":
            for key, is_good, data in zip(copy.keys, copy.good.tolist(), copy.data, strict=True):
                wanted = {pattern(OffloadKey(space + key)) for space in copy.spaces}
                if is_good and data.tobytes() not in wanted:
                    self.judged.append(f"a load judged good has other bytes than {key[:32].hex()}")

    def _bytes(self, copy: Copy, part: slice) -> None:
        assert copy.memory is not None
        assert copy.good is not None
        for at in np.flatnonzero(copy.good).tolist():
            row = copy.memory.rows[copy.refs["row"][at]]
            if copy.kind == "load":
                copy.data[at][part] = row[part]
            else:
                row[part] = np.frombuffer(copy.sources[at], dtype=np.uint8)[part]

    def moving(self) -> list[tuple[str, int, int]]:
        """(kind, row, generation) of what the worker touches at this moment."""
        return [
            (copy.kind, int(ref["row"]), int(ref["generation"]))
            for copy in self.copies
            if copy.state == "moving" and copy.good is not None
            if copy.owned or copy.kind == "store"
            for ref, is_good in zip(copy.refs, copy.good.tolist(), strict=True)
            if is_good
        ]

    # ---- the rest -------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether both are attached and can be served."""
        return self.client.state is LinkState.UP and self.client.is_ready

    def close(self) -> None:
        """End the clients."""
        for copy in self.copies:
            if copy.state == "moving" and copy.open is not None:
                copy.open.__exit__(None, None, None)
        self.client.close()
        self.worker.close()


def _mapped(fd: int, memory: HostMemory) -> Memory:
    import os

    os.close(fd)
    return cast(Memory, Mapped(memory))
