"""The process that `kvquay serve` is: it owns what must outlive a broker, and starts brokers.

Owns the listening socket, the memory, a pidfd of every process that mapped the memory, and the
broker process. It does nothing else, so it does not crash; when it ends, however, its child ends
too (the control channel closes).
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from broker import link
from broker.config import ServeConfig
from broker.errors import BrokerError, ConfigError, CrashLoop, MemoryTooLarge, SocketInUse
from broker.listener import Listener
from broker.memory import Region
from broker.processes import EventFd, pidfd_exited
from broker.wire import default_socket_path

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_UNEXPECTED: Final = 1
EXIT_CONFIG: Final = 2
EXIT_CRASH_LOOP: Final = 3
EXIT_MEMORY: Final = 4
EXIT_SOCKET: Final = 5

MAX_DEATHS: Final = 5
DEATHS_WITHIN_S: Final = 60.0
READY_DEADLINE_S: Final = 30.0


def exit_code(error: BrokerError) -> int:
    """Exit status for an error that ends the program."""
    for kind, code in (
        (ConfigError, EXIT_CONFIG),
        (CrashLoop, EXIT_CRASH_LOOP),
        (MemoryTooLarge, EXIT_MEMORY),
        (SocketInUse, EXIT_SOCKET),
    ):
        if isinstance(error, kind):
            return code
    return EXIT_UNEXPECTED


@dataclass(frozen=True, slots=True)
class Mapper:
    """A process that was given the memory; the supervisor owns the pidfd."""

    pidfd: int
    info: dict[str, Any]


class Supervisor:
    """See the module. `run` returns the exit status of the program."""

    def __init__(
        self,
        config: ServeConfig,
        broker_argv: Sequence[str] = (sys.executable, "-m", "broker.main"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._argv = list(broker_argv)
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._bell = EventFd()
        self._signals: deque[int] = deque()
        self._mappers: list[Mapper] = []
        self._deaths: deque[float] = deque()
        self._endings: deque[str] = deque(maxlen=MAX_DEATHS)
        self._incarnation = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._child_pidfd = -1
        self._channel: socket.socket | None = None
        self._stopping = False
        self._kill_at: float | None = None
        self._ready_by: float | None = None
        self._reserve_error: BrokerError | None = None
        self._reserved = False
        self._told_reserved = False
        self._fresh: Region | None = None
        """Memory that is to take the place of what a stopped process may still write to."""
        self._fresh_is_ready = False
        self._fresh_thread: threading.Thread | None = None
        self._fresh_ends: deque[tuple[Region, bool]] = deque()
        """What the reserving thread came to; only the main thread acts on it."""

    def run(self) -> int:
        """Serve until a signal or an error ends it; BrokerError for errors worth a message."""
        path = Path(self._config.socket) if self._config.socket else default_socket_path()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._listener = Listener(path, self._config.socket_group)
        try:
            self._region = Region.create(self._config.memory, huge_pages=self._config.huge_pages)
            self._region.write_header(0, 0)
            reserver = threading.Thread(target=self._reserve, name="kvquay-reserve", daemon=True)
            reserver.start()
            self._selector.register(self._bell.fileno(), selectors.EVENT_READ)
            log.info(
                "serving %s with %.1f MiB of memory (huge pages: %s)",
                path,
                self._region.size_bytes / (1 << 20),
                self._region.huge_pages,
            )
            try:
                self._start_broker()
                while self._child is not None:
                    self._turn()
            finally:
                self._end_child_now()
                self._stopping = True
                reserver.join()
                self._end_fresh()
                self._region.close()
        finally:
            self._listener.close()
            for mapper in self._mappers:
                os.close(mapper.pidfd)
            self._selector.close()
            self._bell.close()
        if self._reserve_error is not None:
            raise self._reserve_error
        return EXIT_OK

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.append(number)
        self._bell.ring()

    def _reserve(self) -> None:
        told = self._clock()

        def progress(done: int) -> None:
            nonlocal told
            if self._clock() - told > 1.0:
                told = self._clock()
                log.info("reserved %.0f %% of the memory", 100 * done / self._region.size_bytes)

        try:
            self._reserved = self._region.reserve(progress, lambda: self._stopping)
        except BrokerError as error:
            self._reserve_error = error
        self._bell.ring()

    # ---- the child ---------------------------------------------------------------------------

    def _start_broker(self) -> None:
        self._incarnation += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._region.write_header(self._incarnation, 1)
        try:
            child = subprocess.Popen(
                [*self._argv, "--control-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # A terminal's Ctrl-C is ours to handle. Not a session of its own: Linux would
                # schedule that as a group against the engines', and engines that spin on
                # sched_yield then kept it waiting for more than a second.
                process_group=0,
            )
        finally:
            theirs.close()
        self._child, self._channel = child, ours
        self._child_pidfd = os.pidfd_open(child.pid)
        self._selector.register(self._child_pidfd, selectors.EVENT_READ)
        self._selector.register(ours, selectors.EVENT_READ)
        self._ready_by = self._clock() + READY_DEADLINE_S
        self._told_reserved = self._reserved
        self._mappers = self._living_mappers()
        fds = [self._region.fd, self._listener.socket.fileno()]
        fds += [mapper.pidfd for mapper in self._mappers]
        start = {
            "start": True,
            "config": self._config.as_json(),
            "incarnation": self._incarnation,
            "huge_pages": self._region.huge_pages,
            "reserved": self._reserved,
            "supervisor_pid": os.getpid(),
            "mappers": [mapper.info for mapper in self._mappers],
        }
        try:
            link.send(ours, start, fds)
        except OSError:
            return  # it died at once; its pidfd tells

    def _living_mappers(self) -> list[Mapper]:
        living = []
        for mapper in self._mappers:
            if pidfd_exited(mapper.pidfd):
                os.close(mapper.pidfd)
            else:
                living.append(mapper)
        return living

    def _turn(self) -> None:
        for ready, _ in self._selector.select(self._timeout()):
            if ready.fd == self._bell.fileno():
                self._bell.drain()
            elif self._channel is not None and ready.fd == self._channel.fileno():
                self._hear()
        while self._signals:
            self._obey(self._signals.popleft())
        if self._reserved and not self._told_reserved and self._channel is not None:
            self._told_reserved = True
            self._say({"reserved": True})
        while self._fresh_ends:
            self._take_fresh()
        if self._reserve_error is not None and not self._stopping:
            self._stop()
        now = self._clock()
        if self._ready_by is not None and now > self._ready_by and self._child is not None:
            log.error("the broker was not ready within %g s", READY_DEADLINE_S)
            self._ready_by = None
            self._child.kill()
        if self._kill_at is not None and now > self._kill_at and self._child is not None:
            log.warning("the broker did not end within %g s; killing it", self._config.grace)
            self._kill_at = None
            self._child.kill()
        self._reap()

    def _timeout(self) -> float | None:
        ends = [end for end in (self._ready_by, self._kill_at) if end is not None]
        return max(0.0, min(ends) - self._clock()) if ends else None

    def _say(self, message: dict[str, Any]) -> None:
        assert self._channel is not None
        try:
            link.send(self._channel, message)
        except OSError:
            return  # the child is dying; its pidfd tells

    def _hear(self) -> None:
        assert self._channel is not None
        try:
            got = link.receive(self._channel)
        except OSError:
            got = None
        if got is None:
            self._selector.unregister(self._channel)
            self._channel.close()
            self._channel = None
            return
        message, fds = got
        if "ready" in message:
            self._ready_by = None
        if "mapper" in message:
            self._mappers = self._living_mappers()
            self._mappers.append(Mapper(fds[0], message["info"]))
            self._say({"ack": message["mapper"]})
            fds = fds[1:]
        if "want_memory" in message:
            self._make_fresh()
        if "thawed" in message:
            self._drop_fresh()
        for fd in fds:
            os.close(fd)

    def _make_fresh(self) -> None:
        """Reserve memory in place of the present one, which stays with whoever still maps it."""
        try:
            region = Region.create(self._config.memory, huge_pages=self._config.huge_pages)
        except BrokerError as error:
            log.warning(
                "no fresh memory beside the old one, so no cache until it is free: %s", error
            )
            self._say({"no_memory": str(error)})
            return
        region.write_header(0, 0)
        self._fresh = region

        def reserve() -> None:
            done = False
            try:
                done = region.reserve(stopping=lambda: self._fresh is not region)
            except BrokerError as error:
                log.warning("no fresh memory beside the old one: %s", error)
            self._fresh_ends.append((region, done))
            self._bell.ring()

        self._fresh_thread = threading.Thread(target=reserve, name="kvquay-reserve", daemon=True)
        self._fresh_thread.start()

    def _take_fresh(self) -> None:
        """The reserving thread has ended: start anew on its memory, if it is still wanted."""
        region, done = self._fresh_ends.popleft()
        if region is not self._fresh or not done:
            region.close()
            self._fresh = None if region is self._fresh else self._fresh
        elif self._child is not None:
            log.info("fresh memory is reserved; the broker starts anew on it")
            self._fresh_is_ready = True
            self._child.terminate()

    def _drop_fresh(self) -> None:
        """It is not needed after all; whoever is told of its reservation closes it."""
        region, self._fresh = self._fresh, None
        if region is not None and self._fresh_is_ready:
            self._fresh_is_ready = False
            region.close()

    def _end_fresh(self) -> None:
        """Let no thread and no memory of it be left."""
        self._drop_fresh()
        if self._fresh_thread is not None:
            self._fresh_thread.join()
        while self._fresh_ends:
            self._fresh_ends.popleft()[0].close()

    def _obey(self, number: int) -> None:
        if number == signal.SIGHUP:
            log.warning("SIGHUP: configuration can't be reloaded yet; restart kvquay instead")
            return
        if self._stopping and self._child is not None:
            log.warning("asked twice to end: killing the broker")
            self._child.kill()
            return
        log.info("%s: ending", signal.Signals(number).name)
        self._stop()

    def _stop(self) -> None:
        self._stopping = True
        self._kill_at = self._clock() + self._config.grace
        if self._child is not None:
            self._child.terminate()

    def _reap(self) -> None:
        child = self._child
        if child is None or child.poll() is None:
            return
        self._forget_child()
        if self._stopping:
            return
        if self._fresh_is_ready and self._fresh is not None:
            self._fresh_is_ready = False
            self._region.close()
            self._region, self._fresh = self._fresh, None
            for mapper in self._mappers:
                os.close(mapper.pidfd)
            self._mappers = []
            self._start_broker()
            return
        status = child.returncode
        self._endings.append(
            f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        )
        if status == EXIT_CONFIG:
            self._stopping = True
            raise ConfigError("broker", status, "refused its configuration; see its message above")
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        log.error("the broker has died: %s%s; starting it again", self._endings[-1], hint)
        now = self._clock()
        self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > DEATHS_WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) >= MAX_DEATHS:
            raise CrashLoop(
                deaths=len(self._deaths), window_s=DEATHS_WITHIN_S, endings=list(self._endings)
            )
        self._start_broker()

    def _forget_child(self) -> None:
        self._selector.unregister(self._child_pidfd)
        os.close(self._child_pidfd)
        if self._channel is not None:
            while self._channel is not None and self._pending():
                self._hear()
            if self._channel is not None:
                self._selector.unregister(self._channel)
                self._channel.close()
                self._channel = None
        self._child = None
        self._ready_by = None

    def _pending(self) -> bool:
        """What the dead child said last still counts: mappers it handed over, say."""
        assert self._channel is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _end_child_now(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._forget_child()
