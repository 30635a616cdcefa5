"""The channel between supervisor and broker: small JSON messages, each with its descriptors.

Both ends are of one installation, so there is no version and no leniency. A datagram is a message.
"""

from __future__ import annotations

import json
import select
import socket
from typing import Any

from broker.errors import LinkProtocolError, SupervisorLost
from broker.processes import MAX_FDS, Received, recv_fds, send_fds

MAX_MESSAGE_BYTES = 1 << 20
ACK_DEADLINE_S = 5.0


def send(channel: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send one message. OSError if the other end is gone."""
    send_fds(channel, json.dumps(message).encode(), fds or [])


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors, which are the receiver's; None at the end."""
    got: Received = recv_fds(channel, MAX_MESSAGE_BYTES, MAX_FDS)
    if not got.data:
        return None
    message = json.loads(got.data)
    if not isinstance(message, dict):
        raise LinkProtocolError(f"a message is {type(message).__name__}, not a map")
    return message, list(got.fds)


class SupervisorLink:
    """The broker's end."""

    def __init__(self, fd: int) -> None:
        self._channel = socket.socket(fileno=fd)
        self._early: list[tuple[dict[str, Any], list[int]]] = []
        self._next = 0

    def fileno(self) -> int:
        """For a selector: readable when the supervisor has said something, or is gone."""
        return self._channel.fileno()

    def start(self) -> tuple[dict[str, Any], list[int]]:
        """What the supervisor says first: configuration, memory, listener, old mappers."""
        return self._expect("start")

    def ready(self) -> None:
        """The broker serves."""
        self.say({"ready": True})

    def say(self, message: dict[str, Any]) -> None:
        """Tell the supervisor something that needs no answer. SupervisorLost if it is gone."""
        try:
            send(self._channel, message)
        except OSError as error:
            raise SupervisorLost("the supervisor is gone; the broker ends") from error

    def hand_over(self, pidfd: int, info: dict[str, Any]) -> None:
        """Let the supervisor keep a mapper's pidfd; returns once it has it. SupervisorLost if it
        does not answer."""
        self._next += 1
        try:
            send(self._channel, {"mapper": self._next, "info": info}, [pidfd])
        except OSError as error:
            raise SupervisorLost("the supervisor is gone; the broker ends") from error
        self._expect("ack")

    def _expect(self, name: str) -> tuple[dict[str, Any], list[int]]:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while poller.poll(ACK_DEADLINE_S * 1000):
            got = receive(self._channel)
            if got is None:
                raise SupervisorLost("the supervisor is gone; the broker ends")
            if name in got[0]:
                return got
            self._early.append(got)
        raise SupervisorLost(f"no {name!r} from the supervisor within {ACK_DEADLINE_S:g} s")

    def take(self) -> tuple[dict[str, Any], list[int]] | None:
        """A message that the supervisor sent by itself; call when readable. SupervisorLost at its
        end."""
        if self._early:
            return self._early.pop(0)
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        if not poller.poll(0):
            return None
        got = receive(self._channel)
        if got is None:
            raise SupervisorLost("the supervisor is gone; the broker ends")
        return got
