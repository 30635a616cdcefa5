"""Calls that need an answer: numbered, bounded in time, and not made while the breaker is open."""

from __future__ import annotations

from broker import wire
from engine_adapter.breaker import Breaker
from engine_adapter.link import Link, LinkState


class Calls:
    """One call at a time over a link."""

    def __init__(self, link: Link, breaker: Breaker, timeout_s: float) -> None:
        self._link = link
        self.breaker = breaker
        self._timeout_s = timeout_s
        self._seq = 0
        self._awaited = 0
        self._reply: wire.Message | None = None
        self.asking: str | None = None
        """The request for which a call waits now."""
        self.timeouts = 0
        """Calls that were sent and got no answer in time."""

    def next_seq(self) -> int:
        """Number of the next call."""
        self._seq = self._seq % 0xFFFFFFFF + 1
        return self._seq

    def call(self, message: wire.Message, seq: int) -> wire.Message | None:
        """Send and wait for the answer, at most the time-out; None if it did not come."""
        if not self.breaker.allows() or self._link.state is not LinkState.UP:
            self._link.poll()
            return None
        if not self._link.send(message):
            return None
        self._awaited, self._reply = seq, None
        self.asking = getattr(message, "request", None)
        self._link.wait_for(lambda: self._reply is not None, self._timeout_s)
        self._awaited, self.asking = 0, None
        reply, self._reply = self._reply, None
        if reply is not None:
            self.breaker.succeeded()
        elif self._link.state is LinkState.UP:
            self.timeouts += 1
            self.breaker.failed()
        return reply

    def on_reply(self, message: wire.Message) -> bool:
        """An answer came; False if nobody waits for it any more. A broker that answers late is
        busy, not stuck: it can be asked."""
        seq = getattr(message, "seq", 0)
        if seq == self._awaited != 0:
            self._reply = message
            return True
        if seq:
            self.breaker.succeeded()
        return False
