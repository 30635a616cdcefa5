"""The scheduler's side of an engine at its broker: lookups that hold, loads, stores, events.

A call that needs an answer takes at most the call time-out; every other call only sends. Without a
broker every lookup is a MISS and every store is declined, and the client attaches again by itself
while `step` or any other call is made. One thread; safe after fork (the child has no connection).
The workers' side, which touches the memory, is `engine_adapter.worker`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from broker import wire
from engine_adapter import asking
from engine_adapter.answers import (
    Answer,
    Event,
    GroupQuery,
    Offer,
    Refs,
    RequestState,
    Transfer,
    miss,
)
from engine_adapter.breaker import Breaker
from engine_adapter.calls import Calls
from engine_adapter.link import Link, LinkState, attach_message
from engine_adapter.transport import SocketTransport, Transport

__all__ = ["Answer", "Event", "GroupQuery", "Offer", "SchedulerClient"]

CALL_TIMEOUT_S = 0.020
MISS_AGAIN_S = 0.250
UNUSED_HOLDS_S = 2.0
SWEEP_EVERY_S = 0.5
WAIT_LIMIT_S = 5.0
"""Longer than all waits of one request at a broker that is well (3 s)."""


class SchedulerClient:
    """See the module. Keys are block hash and group, all of `key_bytes` bytes."""

    def __init__(
        self,
        socket_path: str,
        *,
        engine_id: str,
        namespace: bytes,
        row_bytes: int,
        key_bytes: int,
        world: int = 1,
        weights_version: str | None = None,
        events: bool = False,
        call_timeout_s: float = CALL_TIMEOUT_S,
        wait_limit_s: float = WAIT_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[[], Transport] | None = None,
    ) -> None:
        """Nothing is opened yet; the first call (or `wait_ready`) attaches.

        `namespace`: 16 bytes, `wire.namespace_digest` of all that the KV depends on. `world`:
        number of workers that will attach under this engine_id.
        """
        self.engine_id = engine_id
        self.key_bytes = key_bytes
        self._attach = attach_message(
            wire.Role.SCHEDULER,
            engine_id,
            row_bytes,
            key_bytes,
            world,
            namespace=namespace,
            weights_version=weights_version,
            events=events,
        )
        self._clock = clock
        self._link = Link(
            connect or (lambda: SocketTransport(socket_path, takes_fds=False)),
            lambda: self._attach,
            self._on_message,
            self._on_down,
            clock,
        )
        self.calls = Calls(self._link, Breaker(clock), call_timeout_s)
        self._wait_limit_s = wait_limit_s
        self._requests: dict[str, RequestState] = {}
        self._attempts = itertools.count(1)
        """Numbers of attempts grow over all requests, so that a request whose name is used again
        never takes the number of an attempt that still moves data."""
        self._events: list[Event] = []
        self._swept_at = clock()
        self.attached: wire.Attached | None = None
        self.is_ready = False
        """Whether the broker has all members of this engine: loads and stores are possible."""

    # ---- connection --------------------------------------------------------------------------

    @property
    def state(self) -> LinkState:
        """Whether the broker can be asked."""
        return self._link.state

    @property
    def heard(self) -> int:
        """Grows whenever something has come from the broker: else no answer has changed."""
        return self._link.heard

    def step(self) -> None:
        """Read what the broker has said; call once per step of the engine. Never blocks: a single
        non-blocking read when nothing is new."""
        self._link.check_thread()
        now = self._clock()
        if now - self._swept_at >= SWEEP_EVERY_S:
            self._swept_at = now
            self._release_unused(now)
        self._link.poll()  # last: it sends what was posted

    def wait_ready(self, timeout_s: float) -> bool:
        """Attach and wait until all workers are attached too; False if that did not happen."""
        self._link.check_thread()
        return self._link.wait_through(lambda: self.is_ready, timeout_s)

    def close(self) -> None:
        """End the session of this scheduler."""
        self._link.close()
        self.is_ready = False

    def _on_down(self) -> None:
        self.is_ready = False
        self.attached = None
        for request in list(self._requests.values()):
            request.forget_answers()
            request.transfers.clear()
            request.attempt = next(self._attempts)
            if request.finished:
                del self._requests[request.request]

    def _on_message(self, message: wire.Message, fds: list[int]) -> None:
        for fd in fds:  # a scheduler maps nothing
            os.close(fd)
        if isinstance(message, wire.Attached):
            self.attached = message
        elif isinstance(message, wire.SessionState):
            self.is_ready = message.ready
        elif isinstance(message, wire.Notice):
            self._on_notice(message)
        elif isinstance(message, wire.Events):
            self._events += [
                Event(removed=e.removed, medium=e.medium, keys=asking.split(e.keys, self.key_bytes))
                for e in message.events
            ]
        elif isinstance(message, (wire.Resync, wire.ResetNotice)):
            self._new_attempts()
        elif isinstance(message, wire.MemoryReplaced):
            self._link.reconnect("the broker has new memory")
        elif not self.calls.on_reply(message):
            self._on_late_reply(message)

    def _on_late_reply(self, message: wire.Message) -> None:
        """The call has timed out and its attempt was cancelled, which ends holds. Rows reserved for
        a store stay apart until their writer is done: no worker was told of these, so they are."""
        if isinstance(message, wire.StoreReply) and message.refs:
            self._link.send(asking.nothing_written(message))

    def _new_attempts(self) -> None:
        """Answers so far mean nothing, nor does the one that a call waits for: asked anew."""
        for request in self._requests.values():
            if request.answer is not None or request.request == self.calls.asking:
                self._give_up_attempt(request)

    def _give_up_attempt(self, request: RequestState) -> None:
        self._link.send(wire.Cancel(request=request.request, attempt=request.attempt))
        request.attempt = next(self._attempts)
        request.forget_answers()

    # ---- requests ----------------------------------------------------------------------------

    def begin(
        self,
        request: str,
        *,
        adapter: bytes = b"",
        kv_transfer_params: dict[str, Any] | None = None,
        load_tiers: Sequence[tuple[str | None, str | None]] | None = None,
    ) -> None:
        """A request begins. Needed only if it has an adapter (16-byte digest of its files) or
        parameters; otherwise its first lookup or store begins it."""
        request = self._link.enter(request)
        self._new_state(request)
        if adapter or kv_transfer_params is not None or load_tiers is not None:
            self._link.post(asking.begin(request, adapter, kv_transfer_params, load_tiers))

    def _new_state(self, request: str) -> RequestState:
        """A request begins; transfers of an earlier one of its name may still be running."""
        old = self._requests.get(request)
        state = self._requests[request] = RequestState(request, attempt=next(self._attempts))
        if old is not None:
            state.transfers = old.transfers
        return state

    def _state_of(self, request: str) -> RequestState:
        state = self._requests.get(request)
        return self._new_state(request) if state is None or state.finished else state

    def preempted(self, request: str) -> None:
        """The request starts over: earlier answers are void."""
        request = self._link.enter(request)
        state = self._requests.get(request)
        if state is not None:
            self._give_up_attempt(state)

    def finish(self, request: str) -> None:
        """No new call will come for the request; completions of its transfers may. The broker
        hears of it with the next message or `step`."""
        request = self._link.enter(request)
        state = self._requests.get(request)
        if state is None:
            return
        self._link.post(wire.Finish(request=request))
        if not state.transfers:
            del self._requests[request]
        else:
            state.finished = True
            state.forget_answers()

    def _release_unused(self, now: float) -> None:
        """Give back holds of requests that the engine has not looked up for long."""
        for state in self._requests.values():
            if state.answer is not None and now - state.used_at > UNUSED_HOLDS_S:
                self.release(state.request)

    # ---- lookup and load ---------------------------------------------------------------------

    def lookup(self, request: str, groups: Sequence[GroupQuery]) -> Answer:
        """Which chunks can be loaded. Asks once; later calls answer from what is known.

        A MISS is asked again after 250 ms at the earliest; a wait of `wait_limit_s` is a MISS.
        What is not pending is held until prepare_load, `finish`, or 2 s without a lookup.
        """
        request = self._link.enter(request)
        state = self._state_of(request)
        known = state.answer
        if known is not None:
            self._link.poll()
            known = state.answer
        now = self._clock()
        if known is not None:
            state.used_at = now
            if known.pending and now - known.asked_at > self._wait_limit_s:
                # A broker that is well ends waits earlier than this.
                self._give_up_attempt(state)
                state.answer = miss(groups, now)
                return state.answer
            if not known.is_miss or now - known.asked_at < MISS_AGAIN_S:
                return known
        return self._ask(state, groups, now)

    def is_pending(self, request: str) -> bool:
        """Whether the last lookup's answer is still on its way, as far as `step` has heard; asks
        nothing. False too once it has waited too long: the next lookup then is a MISS."""
        state = self._requests.get(self._link.enter(request))
        if state is None or state.answer is None or not state.answer.pending:
            return False
        state.used_at = self._clock()
        return state.used_at - state.answer.asked_at <= self._wait_limit_s

    def release(self, request: str) -> None:
        """Give back what the last lookup holds; the next one asks anew."""
        state = self._requests.get(self._link.enter(request))
        if state is not None and state.answer is not None:
            self._link.post(wire.Release(request=state.request, attempt=state.attempt))
            state.forget_answers()

    def _ask(self, state: RequestState, groups: Sequence[GroupQuery], now: float) -> Answer:
        timeouts = self.calls.timeouts
        try:
            return state.set_answer(asking.lookup(self.calls, state, groups), now)
        except asking.NoAnswer:
            state.early = None
            timed_out = self.calls.timeouts != timeouts  # else nothing was asked
            if timed_out:
                self._give_up_attempt(state)
        return miss(groups, now, timed_out=timed_out)

    def _on_notice(self, notice: wire.Notice) -> None:
        state = self._requests.get(notice.request)
        if state is not None and state.attempt == notice.attempt:
            state.notice(
                asking.split(notice.keys, self.key_bytes), np.frombuffer(notice.refs, wire.ROW_REF)
            )

    def prepare_load(self, request: str, keys: Sequence[bytes]) -> Refs | None:
        """Rows and generations (dtype `wire.ROW_REF`) for workers to load `keys` from.

        Answered from holds, without I/O; the broker is told. Every other hold of the request ends.
        None if one of the keys is not held any more (recompute then).
        """
        request = self._link.enter(request)
        state = self._requests.get(request)
        refs = None if state is None else state.refs_of(keys)
        if state is None or refs is None:
            return None
        for part, more in asking.parts(refs.tobytes()):
            self._link.send(
                wire.TakeHolds(request=request, attempt=state.attempt, refs=part, more=more)
            )
        state.began(Transfer.LOAD, keys, refs)
        state.forget_answers()
        return refs

    def complete_load(
        self, request: str, keys: Sequence[bytes], failed: Sequence[bytes] = ()
    ) -> None:
        """Workers are done with `keys`; the `failed` ones among them did not verify, and nobody
        will find them again."""
        request = self._link.enter(request)
        for attempt, done in self._ended(request, Transfer.LOAD, keys):
            self._link.send(asking.loaded(request, attempt, done, failed))

    def _ended(
        self, request: str, kind: Transfer, keys: Sequence[bytes]
    ) -> Sequence[tuple[int, list[tuple[bytes, np.void]]]]:
        """As `RequestState.ended`; a finished request is forgotten with its last transfer."""
        state = self._requests.get(request)
        if state is None:
            return []
        ended = state.ended(kind, keys)
        if state.finished and not state.transfers:
            del self._requests[request]
        return ended

    # ---- store -------------------------------------------------------------------------------

    def prepare_store(self, request: str, keys: Sequence[bytes], positions: Sequence[int]) -> Offer:
        """Offer chunks; `positions`: end token of each in the request."""
        request = self._link.enter(request)
        if not self.is_ready:
            self._link.poll()
            return Offer()
        state = self._state_of(request)
        timeouts = self.calls.timeouts
        try:
            offer = asking.offer(self.calls, state, keys, positions)
        except asking.NoAnswer as none:
            for reply in none.replies:
                self._on_late_reply(reply)
            timed_out = self.calls.timeouts != timeouts  # else nothing was asked
            if timed_out:
                self._give_up_attempt(state)
            return Offer(timed_out=timed_out)
        state.began(Transfer.STORE, [keys[index] for index in offer.accepted], offer.refs)
        return offer

    def complete_store(
        self,
        request: str,
        keys: Sequence[bytes],
        success: bool = True,
        digests: Sequence[int] = (),
    ) -> None:
        """Workers have written `keys`, or failed to. `digests`: xxh3-64 of each row, if known."""
        request = self._link.enter(request)
        known = dict(zip(keys, digests, strict=False))
        for attempt, done in self._ended(request, Transfer.STORE, keys):
            self._link.send(asking.stored(request, attempt, done, known, success))

    # ---- the rest ----------------------------------------------------------------------------

    def touch(self, request: str, keys: Sequence[bytes]) -> None:
        """Count chunks as used now; `keys` in prefix order."""
        request = self._link.enter(request)
        self._link.post(wire.Touch(request=request, keys=b"".join(keys)))

    def reset(self, weights_version: str | None = None) -> bool:
        """Every chunk of this engine is stale. With a version, engines that name the same one
        share again; without, this engine shares with nobody. Whether the broker has obeyed."""
        self._link.check_thread()
        # Also a broker that is started anew, and knows of no reset, must not lead to old chunks.
        version = f"private {os.urandom(16).hex()}" if weights_version is None else weights_version
        self._attach = replace(self._attach, weights_version=version)
        self._new_attempts()
        timeouts = self.calls.timeouts
        seq = self.calls.next_seq()
        reply = self.calls.call(wire.Reset(seq=seq, weights_version=weights_version), seq)
        connected = self._link.state in (LinkState.UP, LinkState.ATTACHING)
        if connected and reply is None and self.calls.timeouts == timeouts:  # it was not sent
            self._link.reconnect("a reset could not be asked for; attaching says it")
        return isinstance(reply, wire.ResetReply)

    def take_events(self) -> Sequence[Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events
