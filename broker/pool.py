"""One pool: rows of one size, their manager, its tiers and the sessions on them.

Built when the first engine says how large a row is. Knows no socket; memory comes from
`broker.memory`, tiers by name from `tiers.factory`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tiers.factory import SecondaryTierFactory
from tiers.guard import GuardedTier
from tiers.manager import TieringOffloadingManager
from tiers.metrics import OWN_PREFIX
from tiers.primary import CPUPrimaryTierOffloadingManager
from tiers.sessions import Deadlines, Shares

SWEEP_ROWS = 4096
"""Rows looked at in one step of a namespace's sweep."""


class PoolMemory(Protocol):
    """Rows of a pool in the shared region, laid out for one row size."""

    @property
    def rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def generation(self) -> NDArray[np.uint32]: ...
    def map_rows(self) -> memoryview: ...
    def zero(self, row: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContext:
    """What a tier in the broker gets where an engine would pass its offloading spec."""

    row_bytes: int
    tier_config: Mapping[str, Any]
    extra_config: Mapping[str, Any]


class _SharedRegion:
    """The pool's memory as the primary tier wants it."""

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory

    def create_kv_memoryview(self) -> memoryview:
        return self._memory.map_rows()

    def cleanup(self) -> None:
        self._memory.close()


class Pool:
    """See the module. Its manager's lock is the one lock of all pools."""

    def __init__(
        self,
        memory: PoolMemory,
        *,
        lock: threading.Lock,
        clock: Callable[[], float],
        policy: str = "lru",
        shares: Shares = Shares(),  # noqa: B008  frozen
        deadlines: Deadlines = Deadlines(),  # noqa: B008  frozen
        tiers: Sequence[Mapping[str, Any]] = (),
        backpressure: Mapping[str, Any] | None = None,
        zero_on_reuse: bool = False,
    ) -> None:
        self.memory = memory
        self.row_bytes = memory.row_bytes
        primary = CPUPrimaryTierOffloadingManager(
            memory.rows, _SharedRegion(memory), policy, generation=memory.generation
        )
        view = primary.get_kv_memoryview()
        built: list[GuardedTier] = []
        try:
            for config in tiers:
                merged = _with_backpressure(config, backpressure)
                context = TierContext(
                    row_bytes=memory.row_bytes, tier_config=merged, extra_config={}
                )
                tier = SecondaryTierFactory.create_secondary_tier(merged, view, context)
                built.append(GuardedTier(tier))
            self.manager = TieringOffloadingManager(primary, list(built), 0, lock=lock)
        except BaseException:
            for guarded in built:
                guarded.shutdown()
            view.release()
            primary.shutdown()
            raise
        self.hub = self.manager.share(shares=shares, deadlines=deadlines, clock=clock)
        if zero_on_reuse:
            self.hub.rows.before_reuse = memory.zero
        self.tiers = built
        self._frozen = False
        self._sweeps: list[tuple[bytes, int]] = []
        self.totals: dict[str, int | float] = {}
        """Metrics since the start under the project's names: counters and sums added up, gauges
        as they are now."""

    @property
    def frozen(self) -> bool:
        """True while old mappers may still touch rows: nothing is given out."""
        return self._frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        if self._frozen and not frozen:
            # Whoever was told of a row by an earlier broker, and has not begun, must find it
            # changed: the row may be given to somebody else from now on.
            self.memory.generation[:] += np.uint32(1)
        self._frozen = frozen

    @property
    def num_rows(self) -> int:
        """Rows of the pool."""
        return self.memory.rows

    def discard_namespace(self, namespace: bytes) -> None:
        """Give the rows of this namespace back, piece by piece (`sweep`); no key leads there."""
        self._sweeps.append((namespace, 0))

    def has_work(self) -> bool:
        """Whether a sweep is under way, jobs run, or a tier has something of its own."""
        return (
            bool(self._sweeps)
            or bool(self.manager.transfers.jobs)
            or any(tier.has_pending_work() for tier in self.manager.secondary_tiers)
        )

    def sweep(self) -> bool:
        """One step of discarding; whether there is more."""
        if self._sweeps:
            namespace, start = self._sweeps[0]
            rows = self.hub.rows
            end = min(start + SWEEP_ROWS, rows.num_rows)
            mine = []
            for row in range(start, end):
                key = rows.key_of(row)
                if key is not None and key.startswith(namespace) and rows.slots.ref_cnt[row] == 0:
                    mine.append(row)
            rows.forget(np.array(mine, dtype=np.int32))
            if end == rows.num_rows:
                self._sweeps.pop(0)
            else:
                self._sweeps[0] = (namespace, end)
        return bool(self._sweeps)

    def collect_metrics(self) -> None:
        """Add what the manager has measured to `totals`; often enough, samples do not pile up."""
        stats = self.manager.get_stats()
        if stats is None:
            return
        types = stats.data["types"]
        for name, value in stats.reduce().items():
            if name.startswith(OWN_PREFIX):
                gauge = types.get(name.split(":(")[0]) == "gauge"
                self.totals[name] = value if gauge else self.totals.get(name, 0) + value

    def shutdown(self) -> None:
        """End the tiers, then let the memory go. Called without the lock."""
        self.manager.shutdown()


def _with_backpressure(
    config: Mapping[str, Any], default: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A tier's configuration, its back-pressure settings over the common ones."""
    merged = dict(config)
    if default is not None:
        merged["backpressure"] = {**default, **merged.get("backpressure", {})}
    return merged
