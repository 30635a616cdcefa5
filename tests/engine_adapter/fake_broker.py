"""The other end of a client's connection: what it was sent, and what it is answered.

`answer(message)` is called when the client blocks, with each message that came since; None leaves
it waiting, and its time passes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from broker import wire
from engine_adapter.client import SchedulerClient
from tests.races.transport import Channel, Peer
from tests.tiers.doubles import FakeClock

KEY = 36
ROW = 4096


def key(number: int) -> bytes:
    """A key of 36 bytes."""
    return number.to_bytes(32, "big") + b"\0\0\0\0"


class FakeBroker:
    """See the module. Attaches are answered at once, so is readiness; `is_there` may be False."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.is_there = True
        self.refuses = False
        self.is_ready = True
        self.channel: Channel | None = None
        self.connects = 0
        self.heard: list[wire.Message] = []
        self.answer: Callable[[wire.Message], wire.Message | None] = lambda message: None

    def new_client(self) -> SchedulerClient:
        """A scheduler's client of this broker, on its clock; nothing has been opened yet."""
        return SchedulerClient(
            "",
            engine_id="e",
            namespace=b"n" * 16,
            row_bytes=ROW,
            key_bytes=KEY,
            clock=self.clock,
            connect=self.connect,
        )

    def connect(self) -> Channel:
        """What a Link is given to connect with."""
        self.connects += 1
        if not self.is_there:
            raise FileNotFoundError("nobody listens")
        self.channel = Channel("fake", Peer(1, None), self._wait)
        return self.channel

    def hear(self) -> list[wire.Message]:
        """Take what the client has sent since; attaches are answered."""
        assert self.channel is not None
        new: list[wire.Message] = []
        while self.channel.to_broker and (messages := self.channel.next_for_broker()) is not None:
            for message in messages:
                new.append(message)
                if isinstance(message, wire.Attach):
                    self._attach()
        self.heard += new
        return new

    def _attach(self) -> None:
        if self.refuses:
            code = wire.RefusalCode.TAKEN
            self.say(wire.Refused(code=code, text="taken", ours="7", theirs="8"))
            return
        self.say(
            wire.Attached(
                protocol=wire.PROTOCOL_VERSION,
                broker="fake",
                incarnation=1,
                rows=8,
                row_bytes=ROW,
                rows_offset=0,
                generation_offset=0,
                memory_bytes=8 * ROW,
                epoch=0,
            )
        )
        self.say(wire.SessionState(ready=self.is_ready, missing=()))

    def say(self, message: wire.Message) -> None:
        """The client's next read finds it."""
        assert self.channel is not None
        self.channel.tell(message)
        self.channel.deliver_to_client()

    def die(self) -> None:
        """The stream ends."""
        assert self.channel is not None
        self.channel.hang_up()
        self.channel.deliver_to_client()

    def of(self, kind: type[wire.Message]) -> list[wire.Message]:
        """Messages of a kind that were heard, after hearing the newest."""
        self.hear()
        return [message for message in self.heard if isinstance(message, kind)]

    def _wait(self, channel: Channel, timeout_s: float) -> None:
        for message in self.hear():
            reply = self.answer(message)
            if reply is not None:
                self.say(reply)
        if not channel.arrived:
            self.clock.advance(timeout_s)


def hits(*rows: int) -> Callable[[wire.Message], wire.Message | None]:
    """Answers every lookup with these rows, generation 1."""

    def answer(message: wire.Message) -> wire.Message | None:
        if not isinstance(message, wire.Lookup):
            return None
        refs = np.array([(row, 1) for row in rows], dtype=wire.ROW_REF).tobytes()
        return wire.LookupReply(
            seq=message.seq,
            request=message.request,
            attempt=message.attempt,
            results=(wire.GroupResult(first=0, refs=refs),),
        )

    return answer
