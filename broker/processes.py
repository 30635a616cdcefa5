"""Other processes: who is there, is it alive, hand it a descriptor, wake it, end with it.

Identity is a pidfd, never a bare pid. Linux only. Knows no message, session or engine.
"""

from __future__ import annotations

import array
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NoReturn

from broker.errors import DescriptorsLost

log = logging.getLogger(__name__)

MAX_FDS: Final = 253
"""Descriptors that the kernel takes in one message."""
SO_PEERPIDFD: Final = 77
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid
_FD_BYTES: Final = array.array("i").itemsize


class PeerSource(Enum):
    """How a peer's process was found."""

    SOCKET = "socket"  # the kernel gave the pidfd of who connected; works across containers
    PID = "pid"  # opened by number right after the connect
    UNKNOWN = "unknown"  # its death can only be told from EOF


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who opened a connection. The receiver owns `pidfd` and closes it.

    `pid` is None across process namespaces; `pidfd` is None if the process can't be named.
    """

    pid: int | None
    uid: int
    gid: int
    pidfd: int | None
    source: PeerSource


def peer_identity(connection: socket.socket) -> Peer:
    """Name the process that connected `connection` (a Unix socket)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    known_pid = pid if pid > 0 else None
    pidfd = _peer_pidfd(connection)
    source = PeerSource.SOCKET
    if pidfd is None and known_pid is not None:
        pidfd, source = _open_pidfd(known_pid), PeerSource.PID
    if pidfd is None:
        source = PeerSource.UNKNOWN
        log.warning(
            "cannot name the process of a new connection (pid %s, uid %d): its death will be "
            "known from EOF only; run broker and engine in one process namespace, or on Linux "
            "6.5 or newer",
            known_pid,
            uid,
        )
    return Peer(pid=known_pid, uid=uid, gid=gid, pidfd=pidfd, source=source)


def pidfd_exited(pidfd: int) -> bool:
    """Whether the process has ended (it may still be unreaped). Never blocks."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def send_fds(connection: socket.socket, data: bytes, fds: Sequence[int]) -> int:
    """Send `data` (not empty) with copies of `fds`; returns the bytes taken, as `send` does.

    The descriptors go with the first byte, so the rest of a short write needs none.
    """
    if not data:
        raise ValueError("descriptors need at least one byte to travel with")
    if len(fds) > MAX_FDS:
        raise ValueError(f"{len(fds)} descriptors in one message, at most {MAX_FDS} fit")
    rights = array.array("i", fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
    return connection.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


@dataclass(frozen=True, slots=True)
class Received:
    """Bytes and the descriptors that came with them, close-on-exec; the receiver owns those.

    No data and no descriptors is the end of the stream.
    """

    data: bytes
    fds: tuple[int, ...]


def recv_fds(connection: socket.socket, max_bytes: int, max_fds: int = MAX_FDS) -> Received:
    """Receive once. DescriptorsLost if the message was cut; nothing that came stays open then."""
    data, ancillary, flags, _ = connection.recvmsg(
        max_bytes, socket.CMSG_SPACE(max_fds * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    rights = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            rights.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
    fds = tuple(rights)
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) > max_fds:
        close_all(fds)
        raise DescriptorsLost(
            f"a message was cut: {len(data)} bytes and {len(fds)} descriptors came, room was for "
            f"{max_bytes} and {max_fds}; check the sender, and the limit of open files here"
        )
    return Received(data, fds)


def close_all(fds: Sequence[int]) -> None:
    """Close every descriptor."""
    for fd in fds:
        os.close(fd)


class EventFd:
    """A bell between threads or processes: any number of rings before a drain are one. Thread-safe.

    `fileno` is readable while it has been rung.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Re-entrant, since a signal handler may ring while its own thread does. Guards `_fd`: once
        # closed, the number may be another file's, which must not be written to.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """Descriptor for a selector; -1 once closed."""
        return self._fd

    def ring(self) -> None:
        """Wake whoever waits. Never blocks; does nothing once closed."""
        with self._lock:
            if self._fd < 0:
                return
            try:
                os.eventfd_write(self._fd, 1)
            except BlockingIOError:
                return  # the counter is full: it has been rung, which is all that counts

    def drain(self) -> bool:
        """Silence the bell; returns whether it had been rung."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Give the descriptor back; a second close does nothing."""
        with self._lock:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)


def exit_with_parent(pipe_fd: int, exit_code: int = 1) -> threading.Thread:
    """End this process at once when the parent's end of the pipe closes, however the parent died.

    Only the parent may hold the write end (close-on-exec does that), and it never writes.
    """

    def watch() -> NoReturn:
        while os.read(pipe_fd, 1):
            continue
        os._exit(exit_code)  # no clean-up: whoever would wait for it is gone

    thread = threading.Thread(target=watch, name="exit-with-parent", daemon=True)
    thread.start()
    return thread


def _peer_pidfd(connection: socket.socket) -> int | None:
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:  # kernel before 6.5, or the peer has ended and was reaped
        return None
    os.set_inheritable(pidfd, False)
    return pidfd


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # gone already, or not visible from this namespace
        return None
