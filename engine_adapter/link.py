"""One connection of an engine's process to its broker, which may be absent, die or come back.

Covers connecting, attaching, frames, the breaker, fork and threads. Never raises for a broker that
is missing or misbehaves: the link is then down, says so once a minute, and tries again by itself.
What the messages mean is in `engine_adapter.client` and `engine_adapter.worker`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from enum import Enum

from broker import wire
from engine_adapter.once_a_minute import OnceAMinute
from engine_adapter.transport import Transport

log = logging.getLogger(__name__)

CLIENT_NAME = "kvquay client 0.1.0"
POSTED_BYTES = 64 << 10
RETRY_S = 0.5
EAGER_RETRY_S = 0.005
ATTACH_TIMEOUT_S = 10.0


class WrongThread(RuntimeError):
    """A client belongs to the thread that first used it."""


def attach_message(
    role: wire.Role,
    engine_id: str,
    row_bytes: int,
    key_bytes: int,
    world: int,
    *,
    rank: int = 0,
    namespace: bytes = b"",
    weights_version: str | None = None,
    events: bool = False,
) -> wire.Attach:
    """The first message of a connection of this process. ValueError for a wrong namespace or key
    size."""
    if role is wire.Role.SCHEDULER and len(namespace) != wire.NAMESPACE_BYTES:
        raise ValueError(f"namespace has {len(namespace)} bytes, not {wire.NAMESPACE_BYTES}")
    if not wire.MIN_KEY_BYTES <= key_bytes <= wire.MAX_KEY_BYTES:
        raise ValueError(
            f"keys of {key_bytes} bytes; {wire.MIN_KEY_BYTES} to {wire.MAX_KEY_BYTES} can be"
        )
    return wire.Attach(
        protocol=wire.PROTOCOL_VERSION,
        client=CLIENT_NAME,
        engine_id=engine_id,
        role=role,
        rank=rank,
        world=world,
        row_bytes=row_bytes,
        key_bytes=key_bytes,
        pid=os.getpid(),
        namespace=namespace,
        weights_version=weights_version,
        events=events,
    )


class LinkState(Enum):
    """Whether the broker can be asked."""

    DOWN = "down"  # no connection; tried again now and then
    ATTACHING = "attaching"  # connected, the broker has not answered yet
    UP = "up"
    REFUSED = "refused"  # the broker does not want this engine; tried again, slowly
    CLOSED = "closed"


class Link:
    """See the module. `on_message` and `on_down` are called from `poll` and `wait_for` only."""

    def __init__(
        self,
        connect: Callable[[], Transport],
        attach: Callable[[], wire.Attach],
        on_message: Callable[[wire.Message, list[int]], None],
        on_down: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._attach = attach
        self._on_message = on_message
        self._on_down = on_down
        self._clock = clock
        self._transport: Transport | None = None
        self._reader = wire.FrameReader()
        self._posted = b""
        self._fds: list[int] = []
        self._retry_at = 0.0
        self._attach_by = 0.0
        self._warning = OnceAMinute(clock)
        self._thread: int | None = None
        self.state = LinkState.DOWN
        self.last_error = ""
        self.heard = 0
        """Grows with every message and every end of a connection."""
        _links.add(self)

    def check_thread(self) -> None:
        """WrongThread unless this is the thread that used the link first."""
        me = threading.get_ident()
        if self._thread is None:
            self._thread = me
        elif self._thread != me:
            raise WrongThread(
                "a kvquay client belongs to the thread that first used it; give each thread its "
                "own, or hand calls to the owner"
            )

    def enter(self, request: str) -> str:
        """Begin a call about a request: check the thread, and give the name it has on the wire. A
        name that does not fit, which an engine's user may have chosen, is known by its digest."""
        self.check_thread()
        name = request.encode("utf-8", "surrogatepass")
        if len(name) <= wire.MAX_NAME_BYTES and request.isprintable():
            return request
        return "sha256:" + hashlib.sha256(name).hexdigest()

    def post(self, message: wire.Message) -> None:
        """As `send`, but it may wait for the next message or `poll`: one system call and one turn
        of the broker less for what nobody is in a hurry about."""
        if self.state is LinkState.UP:
            self._posted += wire.encode(message)
            if len(self._posted) > POSTED_BYTES:
                self._flush()

    def send(self, message: wire.Message) -> bool:
        """Send if the link is up, after what was posted; whether it was taken."""
        if self.state is not LinkState.UP:
            return False
        self._posted += wire.encode(message)
        return self._flush()

    def _flush(self) -> bool:
        posted, self._posted = self._posted, b""
        if self._transport is None:
            return False
        if not self._transport.send(posted):
            self._down("the broker does not read, or has closed the connection")
            return False
        return True

    def poll(self) -> None:
        """Send what was posted, read what is there, connect again if it is time. One system call
        when nothing is new."""
        if self._transport is None:
            if self.state is not LinkState.CLOSED and self._clock() >= self._retry_at:
                self._open()
            return
        if self._posted and not self._flush():
            return
        self._read()
        if self.state is LinkState.ATTACHING and self._clock() > self._attach_by:
            self._down("the broker did not answer the attach")

    def wait_for(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Poll until `done`, at most `timeout_s` seconds; False if it did not come, or the link
        went down."""
        end = self._clock() + timeout_s
        left = timeout_s
        while not done():
            if left <= 0:
                return False
            if self._transport is not None:
                self._transport.wait(left)
            self.poll()
            if self._transport is None:
                return done()
            left = end - self._clock()
        return True

    def wait_through(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """As wait_for, also while there is no broker yet: it is looked for again and again."""
        end = self._clock() + timeout_s
        while not done():
            left = end - self._clock()
            if left <= 0 or self.state is LinkState.CLOSED:
                return False
            if self._transport is None:
                self._retry_at = min(self._retry_at, self._clock() + EAGER_RETRY_S)
                time.sleep(EAGER_RETRY_S)  # nobody listens, so there is nothing to wait on
                self.poll()
            else:
                self.wait_for(done, left)
        return True

    def _open(self) -> None:
        self._retry_at = self._clock() + RETRY_S
        try:
            transport = self._connect()
        except OSError as error:
            self._warn(f"no broker: {error}")
            return
        self._transport = transport
        self._reader = wire.FrameReader()
        self.state = LinkState.ATTACHING
        self._attach_by = self._clock() + ATTACH_TIMEOUT_S
        if not transport.send(wire.encode(self._attach())):
            self._down("the broker closed the connection at once")

    def _read(self) -> None:
        transport = self._transport
        received = None if transport is None else transport.receive()
        if received is None:
            self._down("the broker has closed the connection")
            return
        data, fds = received
        self._fds += fds
        if not data:
            return
        self._reader.feed(data)
        try:
            while self._transport is transport:
                message = self._reader.next()
                if message is None:
                    return
                self._dispatch(message)
        except wire.WireError as error:
            self._down(f"the broker does not speak this protocol: {error}")

    def _dispatch(self, message: wire.Message) -> None:
        self.heard += 1
        if isinstance(message, wire.Refused):
            self._down(
                f"refused: {message.text} (broker: {message.ours}, here: {message.theirs})",
                LinkState.REFUSED,
            )
            return
        if isinstance(message, wire.Error) and message.seq == 0:
            self._down(f"the broker rejects what this engine sends: {message.text}")
            return
        if isinstance(message, wire.Attached):
            self.state = LinkState.UP
            self._warning.forget()
            fds, self._fds = self._fds, []
            self._on_message(message, fds)
            return
        self._on_message(message, [])

    def _down(self, why: str, state: LinkState = LinkState.DOWN) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        self._posted = b""
        self.heard += 1
        self.state = state
        self._retry_at = self._clock() + RETRY_S
        self._warn(why)
        self._on_down()

    def _warn(self, why: str) -> None:
        self.last_error = why
        if self._warning.is_due():
            log.warning("running without the shared KV cache: %s; trying again by itself", why)

    def reconnect(self, why: str) -> None:
        """Give the connection up and attach anew at the next poll."""
        self._down(why)
        self._retry_at = self._clock()

    def close(self) -> None:
        """End for good, once what was posted is sent."""
        if self._transport is not None:
            if self._posted:
                self._transport.send(self._posted)
            self._transport.close()
            self._transport = None
        self.state = LinkState.CLOSED

    def forget_in_child(self) -> None:
        """After fork: this process has no connection; the parent's goes on."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self.state = LinkState.CLOSED
        self.last_error = "a forked child has no connection of its own; make a new client in it"


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for link in list(_links):
        link.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
