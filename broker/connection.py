"""One accepted socket: bytes in, messages out, and a bounded queue the other way.

Knows frames, not what messages mean. Never blocks. Used by the main loop; `send` only appends, so
the control plane may make the main loop send by ringing its bell.
"""

from __future__ import annotations

import socket
from collections import deque

from broker import wire
from broker.processes import Peer, send_fds

RECEIVE_BYTES = 256 << 10


class Connection:
    """A non-blocking stream socket with whoever is at the other end."""

    def __init__(self, sock: socket.socket, peer: Peer, outbound_limit_bytes: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.peer = peer
        self.reader = wire.FrameReader()
        self._limit = outbound_limit_bytes
        self._queue: deque[tuple[bytes, int | None]] = deque()
        self._queued = 0
        self.overflowed = False
        """The other end does not read: its queue is full and the connection is to be given up."""
        self.closed = False

    @property
    def queued_bytes(self) -> int:
        """Bytes that the other end has not taken yet."""
        return self._queued

    def receive(self) -> bool:
        """Read once into the frame reader; False at the end of the stream."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:  # reset by the other end: the same as its end
            return False
        if not data:
            return False
        self.reader.feed(data)
        return True

    def send(self, message: wire.Message) -> None:
        """Queue a message and try to send it; a full queue sets `overflowed`."""
        self._send(wire.encode(message), None)

    def send_with_fd(self, message: wire.Message, fd: int) -> None:
        """As `send`; a copy of `fd` travels with the first byte. The caller keeps `fd` open."""
        self._send(wire.encode(message), fd)

    def _send(self, frame: bytes, fd: int | None) -> None:
        if self.closed or self.overflowed:
            return
        if self._queued + len(frame) > self._limit:
            self.overflowed = True
            return
        self._queue.append((frame, fd))
        self._queued += len(frame)
        if len(self._queue) == 1:
            self.flush()

    def flush(self) -> None:
        """Send what the kernel takes now. A dead connection drops its queue; EOF tells of it."""
        while self._queue:
            frame, fd = self._queue[0]
            try:
                taken = (
                    self.sock.send(frame, socket.MSG_NOSIGNAL)
                    if fd is None
                    else send_fds(self.sock, frame, [fd])
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._queue.clear()
                self._queued = 0
                return
            self._queued -= taken
            if taken < len(frame):
                self._queue[0] = (frame[taken:], None)
                return
            self._queue.popleft()

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits for the socket to take more."""
        return bool(self._queue)

    def close(self) -> None:
        """Close the socket; more than once is fine."""
        if not self.closed:
            self.closed = True
            self._queue.clear()
            self._queued = 0
            self.sock.close()
