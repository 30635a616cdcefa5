"""All of a model's state that what follows depends on, as one value to compare.

Looks into the private parts of what is checked: a part forgotten here would leave some order of
events untried, nothing worse.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from broker.session import EngineSession
from engine_adapter.client import SchedulerClient
from engine_adapter.worker import WorkerClient
from tests.races.actors import Engine
from tests.races.host import PATTERN, Broker
from tiers.ledger import AttemptClaims

if TYPE_CHECKING:
    from tests.races.model import Model


def fingerprint(model: Model) -> Hashable:
    """See the module."""
    parts = (
        model.position,
        sorted(model.left),
        model.in_call,
        model.clock.now,
        model.crowds,
        model.heard_before,
        model.excused,
        [process.pid for process in model.unnoticed],
        _engine(model.engine),
        _engine(model.other),
        _broker(model.broker),
        model.memory.data[:, :PATTERN].tobytes(),
        model.memory.generation.tobytes(),
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def _engine(engine: Engine) -> Any:
    return (
        engine.scheduler.alive,
        engine.worker_process.alive,
        (engine.reset_done, engine.reset_asked),
        engine.answer,
        [
            (
                c.kind,
                c.state,
                c.owned,
                c.keys,
                c.refs.tobytes(),
                c.good,
                [d.tobytes() for d in c.data],
            )
            for c in engine.copies
        ],
        [
            (
                role,
                list(c.to_broker),
                [item and item[0] for item in c.to_client],
                [item[0] for item in c.arrived],
                (c.client_open, c.broker_open, c.ended, c.resets_read),
            )
            for role, c in engine.channels.items()
        ],
        _client(engine.client),
        _worker(engine.worker),
    )


def _client(client: SchedulerClient) -> Any:
    breaker = client.calls.breaker
    return (
        client._link.state,
        client._link._retry_at,
        client.is_ready,
        client.calls._seq,
        client.calls._awaited,
        client._attach.weights_version,
        client._swept_at,
        (breaker._failures, breaker._open_until),
        repr(client._attempts),
        [
            (
                r.request,
                r.attempt,
                r.finished,
                r.answer,
                r.used_at,
                [(g.first, g.refs.tobytes()) for g in r.groups or ()],
                [
                    (key, [(attempt, ref.tobytes()) for attempt, ref in running])
                    for key, running in r.transfers.items()
                ],
            )
            for r in client._requests.values()
        ],
    )


def _worker(worker: WorkerClient) -> Any:
    state = (worker._fence, worker._owed, sorted(worker._running.items()))
    return (worker.state, worker._link._retry_at, worker.memory is None, state)


def _broker(broker: Broker) -> Any:
    hub = broker.pool.hub
    rows = hub.rows
    return (
        broker.incarnation,
        sorted(broker.old_mappers),
        broker.pool.frozen,
        rows.slots._state.tobytes(),
        rows.slots.ref_cnt.tobytes(),
        rows.slots._free,
        rows._keys,
        sorted(rows._claims.items()),
        hub.deadline.tobytes(),
        sorted((key, len(views)) for key, views in hub._waiters.items()),
        [(job, task.keys, task.is_promotion) for job, task in broker.tier.running.items()],
        len(broker.tier.finished),
        [_session(engine) for engine in broker.registry.engines.values()],
        len(broker.members),
    )


def _session(engine: EngineSession) -> Any:
    view = engine.view
    return (
        engine.engine_id,
        engine.scheduler is None,
        [(rank, m.ended_fence, m.exited) for rank, m in engine.workers.items()],
        [(m.rank, m.ended_fence, m.exited, m.port is None) for m in engine.former],
        engine.fence,
        (engine.epoch.number, engine.namespace, engine.epoch.nonce),
        [_claims(claims) for claims in view.lost],
        view.notices,
        [
            (
                r.request,
                r.attempt,
                r.finished,
                r.wait_left_s,
                r.waiting_since,
                r.waits,
                sorted(r.retries),
                [(number, _claims(claims)) for number, claims in r.attempts.items()],
            )
            for r in view.requests.values()
        ],
    )


def _claims(claims: AttemptClaims) -> Any:
    return (claims.held.tolist(), claims.loading.tolist(), claims.storing.tolist())
