"""Bells, pidfds, descriptors that travel, and children that end with their parent."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading

import pytest

from broker.errors import DescriptorsLost
from broker.processes import (
    EventFd,
    PeerSource,
    close_all,
    peer_identity,
    pidfd_exited,
    recv_fds,
    send_fds,
)


def is_readable(fd: int, timeout_ms: int = 0) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_ms))


def test_any_number_of_rings_is_one() -> None:
    bell = EventFd()
    assert not bell.drain()
    for _ in range(3):
        bell.ring()
    assert is_readable(bell.fileno())
    assert bell.drain()
    assert not bell.drain()
    bell.close()


def test_a_closed_bell_is_never_rung_into_another_file() -> None:
    for _ in range(200):
        bell = EventFd()
        ringing = threading.Thread(target=bell.ring)
        ringing.start()
        bell.close()
        reader, writer = os.pipe()
        ringing.join()
        bell.ring()
        assert not is_readable(reader)
        os.close(reader)
        os.close(writer)
    assert bell.fileno() == -1


def test_descriptors_travel_and_are_close_on_exec() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader, writer = os.pipe()
    assert send_fds(ours, b"take", [reader, writer]) == 4
    got = recv_fds(theirs, 100)
    assert got.data == b"take"
    assert len(got.fds) == 2
    assert not any(os.get_inheritable(fd) for fd in got.fds)
    os.write(got.fds[1], b"x")
    assert os.read(reader, 1) == b"x"
    close_all([*got.fds, reader, writer])
    ours.close()
    assert recv_fds(theirs, 100).data == b""
    theirs.close()


def test_a_cut_message_keeps_nothing_open() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = len(os.listdir("/proc/self/fd"))
    send_fds(ours, b"x" * 50, [ours.fileno()] * 3)
    with pytest.raises(DescriptorsLost):
        recv_fds(theirs, 10, max_fds=1)
    assert len(os.listdir("/proc/self/fd")) == before
    ours.close()
    theirs.close()


def test_the_other_end_is_named_by_a_pidfd() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    peer = peer_identity(ours)
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    assert peer.source in (PeerSource.SOCKET, PeerSource.PID)
    assert peer.pidfd is not None
    assert not pidfd_exited(peer.pidfd)
    os.close(peer.pidfd)
    ours.close()
    theirs.close()


def test_a_pidfd_tells_of_the_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(child.pid)
    assert not pidfd_exited(pidfd)
    child.kill()
    assert is_readable(pidfd, 10_000)
    assert pidfd_exited(pidfd)
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    os.close(pidfd)


def test_a_child_ends_when_its_parent_is_gone() -> None:
    reader, writer = os.pipe()
    code = (
        "import sys; from broker.processes import exit_with_parent;"
        "exit_with_parent(int(sys.argv[1]), 7); print('up', flush=True);"
        "import threading; threading.Event().wait()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(reader)],
        pass_fds=[reader],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "."},
    )
    os.close(reader)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    os.close(writer)
    assert child.wait(10) == 7
    child.stdout.close()
