"""What the adapter counts in vLLM's own metrics, under names that begin with `kvquay:`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata

PREFIX = "kvquay:engine_"
_DOCUMENTATION = {
    "faults": "Faults of the cache's own code; the engine went on without it.",
    "without_broker": "Requests looked up while there was no broker.",
    "calls_timed_out": "Questions to the broker that it did not answer in time.",
    "loads_lost": "Loads whose chunks were gone before the worker was told of them.",
    "loads_failed": "Chunks that workers could not load; vLLM computed their tokens.",
    "stores_failed": "Chunks that workers could not store.",
    "refusals": "Offers of chunks that the broker had no room for.",
    "holes": "Chunks not offered because an earlier one of their request found no room.",
}


@dataclass(slots=True)
class Figures:
    """Counts since they were taken last."""

    faults: int = 0
    without_broker: int = 0
    calls_timed_out: int = 0
    loads_lost: int = 0
    loads_failed: int = 0
    stores_failed: int = 0
    refusals: int = 0
    holes: int = 0

    def take(self) -> Any:
        """vLLM's statistics object, and begin anew; None if nothing was counted."""
        counted = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name)}
        if not counted:
            return None
        stats = OffloadingConnectorStats()
        for name, count in counted.items():
            stats.increase_counter(PREFIX + name, count)
            setattr(self, name, 0)
        return stats


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """What vLLM needs to know of each counter."""
    return {
        PREFIX + name: OffloadingCounterMetadata(documentation=text)
        for name, text in _DOCUMENTATION.items()
    }
