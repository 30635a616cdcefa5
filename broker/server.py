"""The broker's main loop: accepts, reads frames, hands messages to sessions, sends answers.

One thread; the only one that touches engines' sockets. It takes the pools' lock for each message,
never blocks, opens no file of a tier and touches no payload. What a message means is in
`broker.session`, who may attach in `broker.attach`, status and reset in `broker.admin`.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from broker import wire
from broker.admin import Admin
from broker.attach import Refusal, Registry
from broker.connection import Connection
from broker.control_plane import ControlPlane
from broker.members import Member
from broker.pool import Pool
from broker.processes import EventFd, peer_identity
from broker.session import EngineSession

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 16
"""Messages of one connection handled before the others get their turn."""
LINGER_S = 50e-6
COLLECT_EVERY_S = 1.0
IDLE_CHECK_S = 5.0
IDLE_AFTER_S = 1.0
ATTACH_DEADLINE_S = 10.0


class Client:
    """A connection and what it has become: nothing yet, a member of an engine, or an admin."""

    __slots__ = ("accepted_at", "connection", "engine", "is_admin", "is_writing", "member")

    def __init__(self, connection: Connection, now: float) -> None:
        self.connection = connection
        self.accepted_at = now
        self.engine: EngineSession | None = None
        self.member: Member | None = None
        self.is_admin = False
        self.is_writing = False


class Server:
    """See the module. `run` returns when `stop` was called, or the control plane has failed."""

    def __init__(
        self,
        listener: socket.socket,
        registry: Registry,
        pools: list[Pool],
        lock: threading.Lock,
        *,
        attached: Callable[[EngineSession, Member], wire.Attached],
        memory_fd: Callable[[Pool], int],
        hand_over: Callable[[int, dict[str, Any]], None],
        about: Callable[[], dict[str, Any]],
        outbound_limit_bytes: int,
        notice_limit_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        on_turn: Callable[[float], None] = lambda now: None,
    ) -> None:
        """`attached` makes the answer to an attach, `memory_fd` gives the memory to send with it,
        `hand_over(pidfd, info)` returns once the supervisor keeps the pidfd of a process that is
        about to map it, `about` tells of the broker for status, `on_turn(now)` is called at every
        turn, at least once a second."""
        self._listener = listener
        self.registry = registry
        self.pools = pools
        self.lock = lock
        self._attached = attached
        self._memory_fd = memory_fd
        self._hand_over = hand_over
        self._outbound_limit = outbound_limit_bytes
        self._notice_limit = notice_limit_bytes
        self._clock = clock
        self._on_turn = on_turn
        self._epoll = select.epoll()
        self._watched: dict[int, Client | Callable[[], None]] = {}
        """What each descriptor is: a connection, or something to call when it is readable."""
        self._bell = EventFd()
        self._backlog: list[Client] = []
        self._stopping = False
        self.failure: BaseException | None = None
        self.control_plane = ControlPlane(
            lock, pools, clock, self._bell.ring, self._control_plane_failed
        )
        self.admin = Admin(self, about)
        self._last_message = clock()
        self.longest_collection_s = 0.0
        """Of garbage, in the main loop: nobody is answered meanwhile."""
        self._last_check = clock()
        self._collected_at = clock()

    def _control_plane_failed(self, error: BaseException) -> None:
        self.failure = error
        self._bell.ring()

    def stop(self) -> None:
        """End `run` soon. From any thread or a signal handler."""
        self._stopping = True
        self._bell.ring()

    def _clients(self) -> list[Client]:
        return [watched for watched in self._watched.values() if isinstance(watched, Client)]

    def watch_fd(self, fd: int, action: Callable[[], None]) -> None:
        """Call `action` on the main loop while `fd` is readable."""
        self._watched[fd] = action
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch_fd(self, fd: int) -> None:
        """Undo watch_fd."""
        del self._watched[fd]
        self._epoll.unregister(fd)

    def run(self) -> None:
        """Serve until stopped."""
        self._listener.setblocking(False)
        self.watch_fd(self._listener.fileno(), self._accept)
        self.watch_fd(self._bell.fileno(), self._rung)
        self.control_plane.start()
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            while not self._stopping and self.failure is None:
                self._turn()
        finally:
            gc.enable()
            self._close()

    def _turn(self) -> None:
        for fd, mask in self._wait():
            watched = self._watched.get(fd)
            if watched is None:
                continue  # an earlier event of this turn has closed it
            if isinstance(watched, Client):
                if mask & select.EPOLLOUT:
                    watched.connection.flush()
                if mask & ~select.EPOLLOUT and not self._receive(watched):
                    continue
                self._after(watched)
            else:
                watched()
        backlog, self._backlog = self._backlog, []
        for client in backlog:
            if not client.connection.closed:
                self._handle_some(client)
                self._after(client)
        self._tell()
        now = self._clock()
        self._on_turn(now)
        if now - self._collected_at > COLLECT_EVERY_S:
            self._collected_at = now
            with self.lock:
                for pool in self.pools:
                    pool.collect_metrics()
        if now - self._last_message > IDLE_AFTER_S and now - self._last_check > IDLE_CHECK_S:
            self._idle(now)

    def _wait(self) -> list[tuple[int, int]]:
        """What is ready, at the latest after IDLE_AFTER_S. Going to sleep and being woken costs as
        much as answering, and where there was a message the next is often near."""
        if self._backlog:
            return self._epoll.poll(0.0)
        end = time.perf_counter() + LINGER_S
        while not (ready := self._epoll.poll(0.0)):
            if time.perf_counter() >= end:
                return self._epoll.poll(IDLE_AFTER_S)
        return ready

    def _idle(self, now: float) -> None:
        """Nobody asks for anything: collect garbage, check the laws, drop who never attached."""
        self._last_check = now
        began = time.perf_counter()
        gc.collect(1)
        gc.freeze()
        self.longest_collection_s = max(self.longest_collection_s, time.perf_counter() - began)
        self.admin.check_when_idle()
        for client in self._clients():
            unattached = client.member is None and not client.is_admin
            if unattached and now - client.accepted_at > ATTACH_DEADLINE_S:
                self._drop(client, "did not attach in time")

    def _rung(self) -> None:
        self._bell.drain()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors left, say: those who wait are served later
            log.warning("cannot accept a connection: %s; raise the limit of open files", error)
            return
        connection = Connection(sock, peer_identity(sock), self._outbound_limit)
        client = Client(connection, self._clock())
        self._watched[sock.fileno()] = client
        self._epoll.register(sock, select.EPOLLIN)

    def _receive(self, client: Client) -> bool:
        if not client.connection.receive():
            self._drop(client, None)
            return False
        self._handle_some(client)
        return not client.connection.closed

    def _handle_some(self, client: Client) -> None:
        self._last_message = self._clock()
        reader = client.connection.reader
        for _ in range(MESSAGES_PER_TURN):
            try:
                message = reader.next()
                if message is None:
                    return
                self._dispatch(client, message)
            except wire.WireError as error:
                client.connection.send(wire.Error(seq=0, code=error.code, text=str(error)))
                self._drop(client, f"bad message: {error}")
                return
            if client.connection.closed:
                return
        self._backlog.append(client)

    def _dispatch(self, client: Client, message: wire.Message) -> None:
        if client.engine is not None and client.member is not None:
            pool = client.engine.pool
            with self.lock:
                client.engine.handle(client.member, message)
                busy = pool.manager.transfers.jobs or pool.hub.waiting
            if busy:
                self.control_plane.bell.ring()
        elif client.is_admin:
            client.connection.send(self.admin.answer(message))
        elif isinstance(message, wire.Attach):
            self._attach(client, message)
        else:
            raise wire.Malformed(f"the first message must be Attach, not {type(message).__name__}")

    def _attach(self, client: Client, message: wire.Attach) -> None:
        if message.role == wire.Role.ADMIN:
            client.is_admin = True
            client.connection.send(self.admin.welcome())
            return
        connection = client.connection
        try:
            with self.lock:
                engine, member = self.registry.attach(message, connection)
        except Refusal as refusal:
            log.warning("attach of %s refused: %s", message.engine_id, refusal)
            connection.send(refusal.message)
            self._drop(client, None)
            return
        client.engine, client.member = engine, member
        if connection.peer.pidfd is not None:
            self.watch_fd(connection.peer.pidfd, lambda: self._exited(client))
        answer = self._attached(engine, member)
        if member.maps:
            # The supervisor must know the mapper before it can map: none is ever lost.
            if connection.peer.pidfd is not None:
                info = {"engine": engine.engine_id, "rank": member.rank, "process": member.process}
                self._hand_over(connection.peer.pidfd, info)
            connection.send_with_fd(answer, self._memory_fd(engine.pool))
        else:
            connection.send(answer)
        with self.lock:
            engine.join(member)
        log.info(
            "engine %s: %s attached (pid %s)",
            engine.engine_id,
            "scheduler" if member.rank < 0 else f"worker {member.rank}",
            member.pid,
        )

    def _exited(self, client: Client) -> None:
        """The process is dead, whoever else still holds its connection open."""
        pidfd = client.connection.peer.pidfd
        if pidfd is not None:
            self.unwatch_fd(pidfd)
        if client.engine is not None and client.member is not None:
            client.member.exited = True
            if client.connection.closed:
                with self.lock:
                    client.engine.member_exited(client.member)
                self._close_pidfd(client)
            else:
                self._drain(client)
                with self.lock:
                    client.engine.member_exited(client.member)

    def _drain(self, client: Client) -> None:
        """What a process said before it died still counts."""
        while not client.connection.closed:
            before = client.connection.reader.buffered
            if not self._receive(client) or client.connection.reader.buffered == before == 0:
                return

    def _after(self, client: Client) -> None:
        connection = client.connection
        if connection.closed:
            return
        if connection.overflowed:
            self._drop(client, "it does not read its answers")
            return
        if connection.wants_to_write is not client.is_writing:
            client.is_writing = connection.wants_to_write
            events = select.EPOLLIN | (select.EPOLLOUT if client.is_writing else 0)
            self._epoll.modify(connection.sock, events)

    def _drop(self, client: Client, why: str | None) -> None:
        connection = client.connection
        if connection.closed:
            return
        if why is not None:
            log.warning("connection of pid %s given up: %s", connection.peer.pid, why)
            connection.flush()
        self.unwatch_fd(connection.sock.fileno())
        connection.close()
        engine, member = client.engine, client.member
        if engine is not None and member is not None:
            with self.lock:
                engine.member_detached(member)
        if member is None or member.exited or not member.maps:
            self._close_pidfd(client)

    def _close_pidfd(self, client: Client) -> None:
        pidfd = client.connection.peer.pidfd
        if pidfd is None:
            return
        if client.member is not None and not client.member.exited:
            self.unwatch_fd(pidfd)
        os.close(pidfd)

    def _tell(self) -> None:
        """Send the notices and events that have come up since the last turn."""
        told = False
        for pool in self.pools:
            if not (pool.hub.noticed or pool.hub.has_events):
                continue
            told = True
            with self.lock:
                pool.hub.noticed.clear()
                pool.hub.has_events = False
                engines = [e for e in self.registry.engines.values() if e.pool is pool]
                for engine in engines:
                    if engine.view.notices or engine.view.events:
                        engine.tell(self._notice_limit)
        if told:
            for client in self._clients():
                self._after(client)

    def _close(self) -> None:
        self.control_plane.stop()
        for client in self._clients():
            client.connection.flush()
            client.connection.close()
        self._epoll.close()
        self._bell.close()
