"""A connection in memory whose messages move only when told, one at a time, in each direction.

Covers frames, descriptors and the end of the stream as a Unix socket shows them: what was sent
before the end still arrives. Knows neither clients nor the broker; `on_wait` is told when the
client blocks, and decides what happens meanwhile.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from broker import wire


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the client's end, as the kernel tells the broker."""

    pid: int
    pidfd: int | None


class Channel:
    """One connection. A None in a queue is the end of the stream in that direction."""

    def __init__(self, name: str, peer: Peer, on_wait: Callable[[Channel, float], None]) -> None:
        self.name = name
        self.peer = peer
        self.on_wait = on_wait
        self.to_broker: deque[bytes | None] = deque()
        self.to_client: deque[tuple[bytes, list[int]] | None] = deque()
        self.arrived: deque[tuple[bytes, list[int]]] = deque()
        self.client_open = True
        self.broker_open = True
        self.ended = False
        """Whether the client can see the end of the stream."""
        self.resets_read = 0
        """Reset notices that the client has taken from the stream."""
        self._reader = wire.FrameReader()

    # ---- the client's end: engine_adapter.link.Transport ---------------------------------------

    def send(self, data: bytes) -> bool:
        """Queue a frame for the broker."""
        if not self.client_open or self.ended:
            return False
        self.to_broker.append(data)
        return True

    def receive(self) -> tuple[bytes, list[int]] | None:
        """What has been delivered; None at the end of the stream."""
        if not self.arrived:
            return None if self.ended or not self.client_open else (b"", [])
        data, fds = b"", []
        while self.arrived:
            frame, more = self.arrived.popleft()
            self.resets_read += isinstance(wire.decode(frame[4:]), wire.ResetNotice)
            data += frame
            fds += more
        return data, fds

    def wait(self, timeout_s: float) -> None:
        """The client blocks: somebody else's turn."""
        if not self.arrived and not self.ended:
            self.on_wait(self, timeout_s)

    def close(self) -> None:
        """The client is done (or dead); what it sent before still arrives at the broker."""
        if self.client_open:
            self.client_open = False
            self.to_broker.append(None)
            self.drop_descriptors()

    # ---- the broker's end: broker.members.Port --------------------------------------------------

    queued_bytes = 0

    def tell(self, message: wire.Message, fds: list[int] | None = None) -> None:
        """Queue a message for the client; `fds` become the client's."""
        if self.broker_open:
            self.to_client.append((wire.encode(message), fds or []))

    def hang_up(self) -> None:
        """The broker closes its end, or is dead; what it said before still arrives."""
        if self.broker_open:
            self.broker_open = False
            self.to_broker.clear()
            self.to_client.append(None)

    # ---- delivery -------------------------------------------------------------------------------

    def next_for_broker(self) -> list[wire.Message] | None:
        """Deliver the next frame: the messages it completes; None for the end of the stream."""
        data = self.to_broker.popleft()
        if data is None:
            return None
        self._reader.feed(data)
        messages = []
        while (message := self._reader.next()) is not None:
            messages.append(message)
        return messages

    def deliver_to_client(self) -> None:
        """Let the next message, or the end, through to where the client's next read finds it."""
        item = self.to_client.popleft()
        if item is None:
            self.ended = True
        elif self.client_open:
            self.arrived.append(item)
        else:
            for fd in item[1]:
                os.close(fd)

    def drop_descriptors(self) -> None:
        """Close what nobody will receive."""
        for item in (*self.to_client, *self.arrived):
            while item is not None and item[1]:
                os.close(item[1].pop())

    @property
    def is_over(self) -> bool:
        """Whether nothing can move any more."""
        return not (self.to_broker and self.broker_open) and not self.to_client


class BrokerEnd:
    """The broker's side of a channel, as sessions and the registry see a connection."""

    queued_bytes = 0

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.peer = channel.peer

    def send(self, message: wire.Message) -> None:
        """As `Channel.tell`."""
        self.channel.tell(message)
