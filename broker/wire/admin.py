"""A short-lived connection that asks a broker about itself, one question at a time."""

from __future__ import annotations

import os
import socket
from types import TracebackType
from typing import Any, Self

from broker.wire.codec import FrameReader, encode
from broker.wire.registry import Message
from broker.wire.to_broker import Attach, Status
from broker.wire.to_client import Error, Refused, StatusReply
from broker.wire.vocabulary import PROTOCOL_VERSION, Role


def admin_attach(client: str) -> Attach:
    """The first message of an admin's connection; `client` says which program asks."""
    return Attach(
        protocol=PROTOCOL_VERSION,
        client=client,
        engine_id="",
        role=Role.ADMIN,
        rank=0,
        world=0,
        row_bytes=0,
        key_bytes=0,
        pid=os.getpid(),
        namespace=b"",
        weights_version=None,
        events=False,
    )


class AdminConnection:
    """A blocking connection; a context manager."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """OSError if nobody listens there. `timeout_s`: how long to wait at each step."""
        self._reader = FrameReader()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise

    def ask(self, message: Message) -> Message:
        """Send one message, return its answer, whatever it is. OSError if none comes, WireError if
        what comes is no message."""
        self._socket.sendall(encode(message))
        while (answer := self._reader.next()) is None:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("it closed the connection")
            self._reader.feed(data)
        return answer

    def close(self) -> None:
        """End; more than once is fine."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def ask_status(path: str, program: str, deadline_s: float) -> dict[str, Any]:
    """A broker's status, for a `program`. OSError if none answers in `deadline_s` seconds at each
    step, or it refuses; WireError if it speaks otherwise."""
    with AdminConnection(path, deadline_s) as connection:
        for message in (admin_attach(program), Status(seq=1, verify=False)):
            answer = connection.ask(message)
            if isinstance(answer, (Error, Refused)):
                raise ConnectionError(answer.text)
    if not isinstance(answer, StatusReply):
        raise ConnectionError(f"it answers with {type(answer).__name__}")
    return answer.status
