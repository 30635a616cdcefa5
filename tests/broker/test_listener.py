"""The listening socket: modes, lengths, stale files, and one broker per path."""

from __future__ import annotations

import grp
import os
import socket
import stat
from pathlib import Path

import pytest

from broker.errors import ConfigError, SocketInUse
from broker.listener import Listener


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o022])
def test_only_the_owner_may_connect_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        listener = Listener(tmp_path / "deep" / "b.sock")
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(listener.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(listener.path.parent).st_mode) & 0o077 == 0
    listener.close()


def test_a_group_may_be_let_in(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    listener = Listener(tmp_path / "g" / "b.sock", group)
    assert stat.S_IMODE(os.stat(listener.path).st_mode) == 0o660
    assert os.stat(listener.path).st_gid == os.getgid()
    listener.close()
    with pytest.raises(ConfigError, match="no group"):
        Listener(tmp_path / "b.sock", "no-such-group")


def test_a_path_too_long_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="107"):
        Listener(tmp_path / ("x" * 150))


def test_nothing_is_left_and_closing_twice_is_fine(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "b.sock")
    listener.close()
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_live_broker_is_respected_and_named(tmp_path: Path) -> None:
    first = Listener(tmp_path / "b.sock")
    with pytest.raises(SocketInUse, match=str(os.getpid())):
        Listener(tmp_path / "b.sock")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.connect(str(tmp_path / "b.sock"))
    probe.close()
    first.close()


def test_a_stranger_who_takes_no_lock_is_respected_too(tmp_path: Path) -> None:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.bind(str(tmp_path / "b.sock"))
    stranger.listen()
    with pytest.raises(SocketInUse):
        Listener(tmp_path / "b.sock")
    stranger.close()
    listener = Listener(tmp_path / "b.sock")  # now it is stale, and replaced
    listener.close()


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "b.sock").write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        Listener(tmp_path / "b.sock")
    assert (tmp_path / "b.sock").read_text() == "precious"
