"""The stream between an engine and its broker: bytes, and descriptors that come with them.

What the bytes mean is in `broker.wire`, whether there is a stream at all in `engine_adapter.link`.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from typing import Protocol

from broker import wire

RECEIVE_BYTES = 256 << 10
_TIMEVAL = struct.Struct("@ll")


class Transport(Protocol):
    """A byte stream that never blocks, and descriptors that come with it."""

    def send(self, data: bytes) -> bool:
        """Queue everything; False if the stream has ended."""

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Bytes that are there now (may be empty) and descriptors; None if it has ended."""

    def wait(self, timeout_s: float) -> None:
        """Return once there is something to receive, or after `timeout_s` seconds."""

    def close(self) -> None:
        """End the stream; more than once is fine."""


class SocketTransport:
    """A Unix stream socket."""

    def __init__(self, path: str, *, takes_fds: bool = True) -> None:
        """Connect; OSError if nobody listens. Without `takes_fds` reading is cheaper."""
        self._takes_fds = takes_fds
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._patience_s = 0.0
        self._waited: bytes | None = None
        """What `wait` has received already; empty at the end of the stream."""
        self._unsent = b""

    def send(self, data: bytes) -> bool:
        data = self._unsent + data if self._unsent else data
        try:
            taken = self._socket.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            taken = 0
        except OSError:
            return False
        self._unsent = data[taken:]
        # A broker that takes nothing for a megabyte is as good as gone.
        return len(self._unsent) <= wire.MAX_FRAME_BYTES

    def receive(self) -> tuple[bytes, list[int]] | None:
        if self._unsent and not self.send(b""):
            return None
        if not self._takes_fds:
            plain, self._waited = self._waited, None
            if plain is None:
                plain = self._receive(socket.MSG_DONTWAIT)
            if plain is None:
                return b"", []
            return (plain, []) if plain else None
        try:
            data, ancillary, _, _ = self._socket.recvmsg(
                RECEIVE_BYTES,
                socket.CMSG_SPACE(4 * 4),
                socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT,
            )
        except BlockingIOError:
            return b"", []
        except OSError:
            return None
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if not data:
            for fd in fds:
                os.close(fd)
            return None
        return data, list(fds)

    def _receive(self, flags: int) -> bytes | None:
        """What there is; None if nothing, empty at the end of the stream."""
        try:
            return self._socket.recv(RECEIVE_BYTES, flags)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def wait(self, timeout_s: float) -> None:
        if self._takes_fds or self._unsent or timeout_s <= 0:
            self._poll.poll(max(0.0, timeout_s) * 1000)
        elif self._waited is None:
            # Waiting and receiving at one system call: an answer is mostly worth one.
            if timeout_s != self._patience_s:
                self._patience_s = timeout_s
                microseconds = max(1, int(timeout_s * 1e6))
                self._socket.setsockopt(
                    socket.SOL_SOCKET,
                    socket.SO_RCVTIMEO,
                    _TIMEVAL.pack(*divmod(microseconds, 1_000_000)),
                )
            self._waited = self._receive(0)

    def close(self) -> None:
        self._socket.close()
