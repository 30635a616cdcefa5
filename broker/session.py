"""One engine at the broker: its scheduler, its workers, what its messages do, and its death.

Takes decoded messages and answers through ports; knows no socket, selector or thread, so that the
model checker of the tests runs this very code. Every method is called under the pool's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from broker import wire
from broker.members import Counters, Epoch, Member, effective_namespace, nonce_for
from broker.pool import Pool
from broker.refs import (
    pack_answers,
    pack_indexes,
    read_positions,
    split_keys,
    tier_filter,
    unpack_rows,
)
from broker.telling import event_messages, notice_messages
from tiers.base import ReqContext
from tiers.ledger import NO_ROWS, RowArray
from tiers.session import MISS, Session, StoreAnswer

log = logging.getLogger(__name__)


class EngineSession:
    """See the module."""

    def __init__(
        self,
        engine_id: str,
        pool: Pool,
        *,
        world: int,
        key_bytes: int,
        counters: Counters,
        on_idle: Callable[[EngineSession], None],
        on_left: Callable[[Pool, bytes], None],
    ) -> None:
        """`on_idle` is called once nothing of the engine is left and the session may be forgotten,
        `on_left` when it has left a namespace, which others may still be in."""
        self.engine_id = engine_id
        self.pool = pool
        self.world = world
        self.key_bytes = key_bytes
        self.counters = counters
        self._on_idle = on_idle
        self._on_left = on_left
        self.view: Session = pool.manager.session(engine_id)
        self.scheduler: Member | None = None
        self.workers: dict[int, Member] = {}
        self.former: list[Member] = []
        """Members that are detached but may still touch rows."""
        self.declared = b""
        self.epoch = Epoch()
        self.namespace = b""
        self._closed = False
        self.fence = 0
        """Grows whenever claims are orphaned; workers say up to which one theirs have ended."""

    # ---- members -----------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the scheduler and every worker are there: stores and loads are possible."""
        return (
            self.scheduler is not None
            and len(self.workers) == self.world
            and not self.pool.frozen
            and bool(self.namespace)
        )

    def missing_workers(self) -> list[int]:
        """Ranks that are not attached."""
        return [rank for rank in range(self.world) if rank not in self.workers]

    def join(self, member: Member) -> None:
        """A scheduler (rank -1) or worker attaches; its place was found free. A process that
        attaches says with it that its transfers over an earlier connection have ended."""
        member.ended_fence = self.fence
        if member.process is not None:
            self.former = [m for m in self.former if m.process != member.process]
        if member.rank < 0:
            self.scheduler = member
        else:
            self.workers[member.rank] = member
        self.announce()
        self._settle_if_safe()  # this may have been the last one who could touch old rows

    def declare(self, namespace: bytes, weights_version: str | None, events: bool) -> None:
        """The scheduler says what its KV is."""
        if namespace != self.declared or weights_version != self.epoch.weights_version:
            self.declared = namespace
            self.epoch.weights_version = weights_version
        self._rename()
        self.view.events = [] if events else None

    def _rename(self) -> None:
        self.namespace = effective_namespace(
            self.declared, self.epoch.weights_version, self.epoch.nonce
        )

    def announce(self) -> None:
        """Tell the scheduler whether the session is ready."""
        self._send(wire.SessionState(ready=self.is_ready, missing=tuple(self.missing_workers())))

    def _send(self, message: wire.Message) -> None:
        if self.scheduler is not None and self.scheduler.port is not None:
            self.scheduler.port.send(message)

    def member_detached(self, member: Member) -> None:
        """Its connection has ended (EOF, or given up)."""
        member.port = None
        self._leave(member)

    def member_exited(self, member: Member) -> None:
        """Its process is dead (pidfd). A forked child may still hold the connection open."""
        member.exited = True
        self._leave(member)

    def _leave(self, member: Member) -> None:
        if self.scheduler is member:
            self.scheduler = None
            self.former.append(member)
            self._raise_fence()
        elif self.workers.get(member.rank) is member:
            del self.workers[member.rank]
            self.former.append(member)
            self._raise_fence()
            self.announce()
            # Its waits and holds have ended with all others: it asks anew, and is told MISS.
            self._send(wire.ResetNotice(epoch=self.fence))
        self._settle_if_safe()

    def _raise_fence(self) -> None:
        """Nobody speaks for the claims there are; live workers are asked when theirs have ended."""
        self.view.orphan()
        for owned in self.view.lost:
            # A worker told to write that has not begun must find the row changed: it says that
            # nothing older runs, and then the row is given to somebody else.
            self.pool.hub.rows.slots.generation[owned.storing] += np.uint32(1)
        self.fence += 1
        for worker in self.workers.values():
            if worker.port is not None:
                worker.port.send(wire.ResetNotice(epoch=self.fence))

    def _settle_if_safe(self) -> None:
        """Free what is quarantined once nobody can touch it any more."""
        self.former = [m for m in self.former if m.may_touch(self.fence)]
        if not self.former and not any(m.may_touch(self.fence) for m in self.workers.values()):
            self.view.settle()
        nobody = self.scheduler is None and not self.workers and not self.former
        if nobody and not self._closed:
            # Its last member is told of twice: by its pidfd and by the end of its connection.
            self._closed = True
            self.view.close()
            self._on_idle(self)

    def transfers_ended(self, member: Member, fence: int) -> None:
        """A worker says that no transfer from before this fence runs any more."""
        member.ended_fence = max(member.ended_fence, min(fence, self.fence))
        self._settle_if_safe()

    # ---- invalidation ------------------------------------------------------------------------

    def move_to(self, weights_version: str | None, nonce: bytes) -> None:
        """A new epoch: old keys are unreachable from now on, moving rows stay apart until every
        worker has said that its older transfers ended."""
        old = self.namespace
        self._raise_fence()
        self.epoch = Epoch(self.epoch.number + 1, weights_version, nonce)
        self._rename()
        self._on_left(self.pool, old)
        self._send(wire.ResetNotice(epoch=self.fence))
        self._settle_if_safe()

    def reset(self, message: wire.Reset) -> None:
        """This engine alone: to a version it names, or to a private nonce."""
        self.move_to(message.weights_version, nonce_for(message.weights_version))
        self._send(wire.ResetReply(seq=message.seq, epoch=self.epoch.number, sessions=1))

    # ---- messages of the scheduler -----------------------------------------------------------

    def handle(self, member: Member, message: wire.Message) -> None:
        """Do what an attached member asks. Malformed: the member is in the wrong."""
        if member is not self.scheduler:
            if isinstance(message, wire.TransfersEnded):
                self.transfers_ended(member, message.epoch)
                return
            raise wire.Malformed(f"a worker may not send {type(message).__name__}")
        handler = _HANDLERS.get(type(message))
        if handler is None:
            raise wire.Malformed(f"a scheduler may not send {type(message).__name__}")
        handler(self, message)

    def _namespace_of(self, request: str) -> bytes:
        claims = self.view.requests.get(request)
        own = None if claims is None else claims.ctx.get_state(_RequestNamespace)
        return self.namespace if own is None else own.namespace

    def begin(self, message: wire.Begin) -> None:
        """A request begins with parameters of its own."""
        ctx = ReqContext(
            message.request,
            kv_transfer_params=message.kv_transfer_params,
            load_tier_filter=tier_filter(message.load_tiers),
        )
        if message.namespace:
            ctx.set_state(
                _RequestNamespace(
                    effective_namespace(
                        self.namespace + message.namespace,
                        self.epoch.weights_version,
                        self.epoch.nonce,
                    )
                )
            )
        old = self.view.requests.get(message.request)
        self.view.begin(message.request, ctx, 1 if old is None else old.attempt + 1)

    def lookup(self, message: wire.Lookup) -> None:
        """Answer for each group, as far as it goes; HITs are held from now on."""
        results: list[wire.GroupResult] = []
        request, attempt = message.request, message.attempt
        if self.is_ready and self._ensure(request, attempt):
            namespace = self._namespace_of(request)
            for group in message.groups:
                keys = split_keys(group.keys, self.key_bytes, namespace)
                positions = read_positions(group.positions, len(keys))
                first = 0
                if group.mode == wire.LookupMode.PREFIX:
                    answers = self.view.lookup_many(keys, request, attempt, positions)
                else:
                    first, answers = self.view.lookup_window(
                        keys, request, attempt, group.window, group.first_window, positions
                    )
                results.append(wire.GroupResult(first=first, refs=self._refs(answers)))
        else:
            results = [
                wire.GroupResult(first=0, refs=self._refs(np.array([MISS], dtype=np.int32)))
                for _ in message.groups
            ]
        self._send(
            wire.LookupReply(
                seq=message.seq, request=request, attempt=attempt, results=tuple(results)
            )
        )

    def _ensure(self, request: str, attempt: int) -> bool:
        """Begin the request if its first message does; whether the attempt is live."""
        claims = self.view.requests.get(request)
        if claims is None or (claims.finished and attempt > claims.attempt):
            self.view.begin(request, attempt=attempt)
            return True
        if claims.finished:
            return False
        return attempt >= self.view.requests[request].attempt

    def _refs(self, answers: RowArray) -> bytes:
        return pack_answers(answers, self.pool)

    def _rows_of(self, packed: bytes) -> RowArray:
        return unpack_rows(packed, self.pool, self.counters)

    def take(self, message: wire.TakeHolds) -> None:
        """prepare_load: workers will read these rows; other holds of the request end."""
        refused = self.view.take(
            message.request, message.attempt, self._rows_of(message.refs), more=message.more
        )
        self.counters.refuse("take of rows not held", len(refused))

    def complete_load(self, message: wire.CompleteLoad) -> None:
        """Workers have read the rows; failed ones are quarantined and found by nobody again."""
        refused = self.view.complete_rows(
            message.request,
            message.attempt,
            self._rows_of(message.refs),
            self._rows_of(message.failed),
        )
        self.counters.refuse("completion of a load not running", len(refused))

    def release(self, message: wire.Release) -> None:
        """Unused holds and waits of the attempt end."""
        self.view.release(message.request, message.attempt)

    def prepare_store(self, message: wire.PrepareStore) -> None:
        """Reserve rows for what is absent and fits."""
        request, attempt = message.request, message.attempt
        answer = None
        if self.is_ready and self._ensure(request, attempt):
            keys = split_keys(message.keys, self.key_bytes, self._namespace_of(request))
            positions = read_positions(message.positions, len(keys))
            answer = self.view.offer(keys, request, attempt, positions)
        status = wire.StoreStatus.DECLINED
        if answer is None:
            answer = StoreAnswer(accepted=[], rows=NO_ROWS, present=[], writing=[])
        else:
            known = len(answer.accepted) + len(answer.present) + len(answer.writing)
            complete = known == len(message.keys) // self.key_bytes
            fits = complete or answer.accepted
            status = wire.StoreStatus.OK if fits else wire.StoreStatus.BUSY
        self._send(
            wire.StoreReply(
                seq=message.seq,
                request=request,
                attempt=attempt,
                status=status,
                accepted=pack_indexes(answer.accepted),
                refs=self._refs(answer.rows),
                present=pack_indexes(answer.present),
                writing=pack_indexes(answer.writing),
            )
        )

    def complete_store(self, message: wire.CompleteStore) -> None:
        """Workers have written the rows, or failed to."""
        refused = self.view.complete_offer(
            message.request, message.attempt, self._rows_of(message.refs), message.success
        )
        self.counters.refuse("completion of a store not running", len(refused))

    def touch(self, message: wire.Touch) -> None:
        """Count chunks as used now."""
        claims = self.view.requests.get(message.request)
        if claims is not None:
            keys = split_keys(message.keys, self.key_bytes, self._namespace_of(message.request))
            self.pool.manager.touch(keys, claims.ctx)

    def finish(self, message: wire.Finish) -> None:
        """No new call will come for the request."""
        self.view.finish(message.request)

    def cancel(self, message: wire.Cancel) -> None:
        """Attempts up to this one are over."""
        self.view.cancel(message.request, message.attempt)

    # ---- what the broker tells by itself -------------------------------------------------------

    def tell(self, notice_limit_bytes: int) -> None:
        """Send notices and events that have come up. Past the limit: "resync" instead."""
        notices, events = self.view.take_notices(), self.view.take_events()
        port = None if self.scheduler is None else self.scheduler.port
        if port is None:
            return
        if notices and port.queued_bytes > notice_limit_bytes:
            port.send(wire.Resync())
        else:
            for notice in notice_messages(notices, self.pool):
                port.send(notice)
        for message in event_messages(events):
            port.send(message)


@dataclass(frozen=True, slots=True)
class _RequestNamespace:
    """Kept in a request's context: it runs under an adapter."""

    namespace: bytes


_HANDLERS: dict[type, Callable[[EngineSession, Any], None]] = {
    wire.Begin: EngineSession.begin,
    wire.Lookup: EngineSession.lookup,
    wire.TakeHolds: EngineSession.take,
    wire.CompleteLoad: EngineSession.complete_load,
    wire.Release: EngineSession.release,
    wire.PrepareStore: EngineSession.prepare_store,
    wire.CompleteStore: EngineSession.complete_store,
    wire.Touch: EngineSession.touch,
    wire.Finish: EngineSession.finish,
    wire.Cancel: EngineSession.cancel,
    wire.Reset: EngineSession.reset,
    wire.Ping: lambda engine, message: engine._send(wire.Pong(seq=message.seq)),
}
