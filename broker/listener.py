"""The listening socket: who may connect, one broker per path, nothing stale in the way.

A lock file beside the socket is held for life; its lock dies with its holder, so a stale socket is
known for certain and a live broker is never robbed of its own.
"""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import stat
from pathlib import Path

from broker.errors import ConfigError, SocketInUse

MAX_PATH_BYTES = 107
BACKLOG = 128


class Listener:
    """A bound, listening Unix socket and its lock."""

    def __init__(self, path: Path, group: str | None = None) -> None:
        """ConfigError for a path or group that can't be used, SocketInUse if another listens."""
        size = len(os.fsencode(path))
        if size > MAX_PATH_BYTES:
            raise ConfigError(
                "socket",
                str(path),
                f"has {size} bytes, a socket's path may have {MAX_PATH_BYTES}; give a shorter one",
            )
        self.path = path
        gid = _group_id(group)
        _make_folder(path.parent, gid)
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock = self._take_lock()
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
            self._remove_stale()
            self.socket = self._bind(gid)
        except BaseException:
            os.close(self._lock)
            raise
        self._inode = os.stat(path).st_ino

    def _take_lock(self) -> int:
        while True:
            try:
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ConfigError(
                    "socket", str(self.path), f"cannot be made: {error.strerror}"
                ) from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
                os.close(lock)
                raise SocketInUse(self.path, int(holder) if holder.isdigit() else None) from None
            try:
                if os.stat(self._lock_path).st_ino == os.fstat(lock).st_ino:
                    return lock
            except FileNotFoundError:
                pass
            os.close(lock)  # its last holder removed it while we waited: lock the new file

    def _remove_stale(self) -> None:
        """Nobody holds the lock, so a socket that is there is a dead broker's."""
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError("socket", str(self.path), "is there and is no socket; remove it")
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            probe.connect(str(self.path))
        except OSError:
            os.unlink(self.path)
        else:  # somebody listens who takes no lock: not ours to remove
            raise SocketInUse(self.path, None)
        finally:
            probe.close()

    def _bind(self, gid: int | None) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old = os.umask(0o177)  # never open to others, not for a moment
        try:
            listening.bind(str(self.path))
        except OSError as error:
            listening.close()
            raise ConfigError(
                "socket", str(self.path), f"cannot be made: {error.strerror}"
            ) from None
        finally:
            os.umask(old)
        if gid is not None:
            os.chown(self.path, -1, gid)
            os.chmod(self.path, 0o660)
        listening.listen(BACKLOG)
        return listening

    def close(self) -> None:
        """Stop listening and remove what was made. More than once is fine."""
        if self._lock < 0:
            return
        self.socket.close()
        try:
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        except FileNotFoundError:
            pass
        os.unlink(self._lock_path)
        os.close(self._lock)
        self._lock = -1


def _group_id(group: str | None) -> int | None:
    if group is None:
        return None
    try:
        return int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError("socket_group", group, "is no group of this machine") from None


def _make_folder(folder: Path, gid: int | None) -> None:
    """The socket's folder: made for the owner (and group), or found not to be somebody else's."""
    if not folder.exists():
        folder.mkdir(parents=True, mode=0o700)
        if gid is not None:
            os.chown(folder, -1, gid)
            os.chmod(folder, 0o750)
        return
    found = folder.stat()
    if folder.parent == Path("/tmp") and found.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            "socket", str(folder), f"belongs to user {found.st_uid}; give another --socket"
        )
