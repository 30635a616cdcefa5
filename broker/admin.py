"""What an administrator may ask of a running broker: status, a check of its laws, a reset.

Called on the main loop; takes the pools' lock for each answer. Knows no socket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from broker import wire
from broker.members import nonce_for
from broker.pool import Pool
from broker.session import EngineSession
from tiers.slots import SlotState

if TYPE_CHECKING:
    from broker.server import Server

log = logging.getLogger(__name__)


class Admin:
    """Answers of one server. `about` tells of the broker as a whole."""

    def __init__(self, server: Server, about: Callable[[], dict[str, Any]]) -> None:
        self._server = server
        self._about = about
        self.violations: list[str] = []

    def welcome(self) -> wire.Message:
        """Answer to an admin's attach."""
        return wire.Pong(seq=0)

    def answer(self, message: wire.Message) -> wire.Message:
        """Do what is asked. Malformed for messages that only engines send."""
        if isinstance(message, wire.Status):
            return wire.StatusReply(seq=message.seq, status=self.status(verify=message.verify))
        if isinstance(message, wire.ResetNamespace):
            return self._reset(message)
        if isinstance(message, wire.Ping):
            return wire.Pong(seq=message.seq)
        raise wire.Malformed(f"an admin may not send {type(message).__name__}")

    def status(self, *, verify: bool) -> dict[str, Any]:
        """Everything worth knowing, as plain values; with `verify`, the laws are checked first."""
        if verify:
            self.verify()
        with self._server.lock:
            for pool in self._server.pools:
                pool.collect_metrics()
            engines = [_describe_engine(e) for e in self._server.registry.engines.values()]
            pools = [_describe(pool) for pool in self._server.pools]
            refused = dict(self._server.registry.counters.refused)
        return {
            **self._about(),
            "healthy": self.is_healthy,
            "violations": list(self.violations),
            "verified": verify,
            "engines": engines,
            "pools": pools,
            "refused": refused,
            "longest_collection_s": round(self._server.longest_collection_s, 6),
            "control_plane_rounds": self._server.control_plane.rounds,
        }

    @property
    def is_healthy(self) -> bool:
        """V6: every thread lives; and no law was found broken."""
        return self._server.control_plane.is_alive and not self.violations

    def verify(self, *, keys: bool = True) -> list[str]:
        """Check V1, V2 and V6 now; what is broken is kept, shown and logged."""
        found = []
        with self._server.lock:
            for number, pool in enumerate(self._server.pools):
                try:
                    pool.hub.check(keys=keys)
                except AssertionError as error:
                    found.append(f"pool {number}: {error}")
                if not pool.hub.views and not pool.manager.transfers.jobs:
                    busy = pool.hub.rows.num_busy
                    if busy:
                        found.append(f"pool {number}: nobody lives, yet {busy} rows are claimed")
        if not self._server.control_plane.is_alive:
            found.append("the control-plane thread has ended")
        for text in found:
            if text not in self.violations:
                log.error("law broken: %s", text)
                self.violations.append(text)
        return found

    def check_when_idle(self) -> None:
        """The idle broker checks its laws itself, without what would hold the lock for long."""
        self.verify(keys=False)

    def _reset(self, message: wire.ResetNamespace) -> wire.Message:
        with self._server.lock:
            engines = self._server.registry.in_namespace(message.namespace)
            names = {engine.namespace for engine in engines}
            if len(names) != 1:
                which = ", ".join(sorted(name.hex() for name in names)) or "none"
                return wire.Error(
                    seq=message.seq,
                    code=wire.ErrorCode.UNKNOWN_NAMESPACE,
                    text=f"{message.namespace!r} names {len(names)} namespaces ({which}); give "
                    "enough of one, as `kvquay status` prints it",
                )
            nonce = nonce_for(message.weights_version)
            for engine in engines:
                engine.move_to(message.weights_version, nonce)
        return wire.ResetReply(seq=message.seq, epoch=0, sessions=len(engines))


def _describe_engine(engine: EngineSession) -> dict[str, Any]:
    return {
        "engine_id": engine.engine_id,
        "ready": engine.is_ready,
        "missing_workers": engine.missing_workers(),
        "scheduler_pid": None if engine.scheduler is None else engine.scheduler.pid,
        "worker_pids": {str(rank): m.pid for rank, m in sorted(engine.workers.items())},
        "former_members": len(engine.former),
        "namespace": engine.namespace.hex(),
        "epoch": engine.epoch.number,
        "requests": len(engine.view.requests),
        "rows_claimed": engine.view.rows.distinct,
        "row_bytes": engine.pool.row_bytes,
    }


def _describe(pool: Pool) -> dict[str, Any]:
    slots = pool.hub.rows.slots
    transfers = pool.manager.transfers
    return {
        "row_bytes": pool.row_bytes,
        "rows": pool.num_rows,
        **{state.name.lower(): slots.count(state) for state in SlotState},
        "busy": pool.hub.rows.num_busy,
        "evictions": pool.hub.rows.evictions,
        "jobs": len(transfers.jobs),
        "cascades_dropped": transfers.cascades_dropped,
        "tiers": [
            {"type": tier.tier_type, "slow_calls": tier.slow_calls, "disabled": tier.is_disabled}
            for tier in pool.tiers
        ],
        "frozen": pool.frozen,
        "refused_completions": pool.hub.refused,
        "metrics": dict(pool.totals),
    }
