"""vLLM's OffloadingSpec: makes the scheduler's manager in one process and the worker in others.

Both attach to the broker by themselves, in either order; what they agree on is vLLM's engine_id.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from broker import wire
from engine_adapter.client import SchedulerClient
from engine_adapter.vllm import figures, neighbours
from engine_adapter.vllm.cuda import CudaRowWorker
from engine_adapter.vllm.manager import BrokerManager
from engine_adapter.vllm.rows import RowLayout
from engine_adapter.vllm.worker import RowWorker
from engine_adapter.worker import WorkerClient

logger = logging.getLogger("vllm.kvquay")

ATTACH_S = 2.0
"""How long the start of an engine waits for the broker."""


class BrokerOffloadingSpec(OffloadingSpec):  # type: ignore[no-any-unimported,unused-ignore]
    """See the module. `key_bytes` is to be set before a worker is made."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """The adapter's counters."""
        return figures.definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        """ValueError, with what to do, where the options or vLLM's layout can't work."""
        super().__init__(config)
        self.layout = RowLayout.of(config)
        self.replicated_layout = self.layout.replicated
        self.socket = wire.absolute_socket_path(config.extra_config.get("socket"))
        self.key_bytes = 0
        self._manager: BrokerManager | None = None
        self._worker: OffloadingWorker | None = None
        self._worker_client: WorkerClient | None = None

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side, without a cache until `connect`."""
        if self._manager is None:
            self._manager = BrokerManager(events=self.config.enable_kv_cache_events)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """A worker's side; it attaches on this thread, which is the one that uses it."""
        if self._worker is None:
            client = self._worker_client = WorkerClient(
                self.socket,
                engine_id=self.config.engine_id,
                row_bytes=self.layout.row_bytes,
                key_bytes=self.key_bytes,
                rank=self.layout.rank,
                world=self.layout.world,
            )
            if os.path.exists(self.socket):
                client.wait_attached(ATTACH_S)
            else:
                client.step()  # says once that there is no broker
            if current_platform.is_cuda_alike() or current_platform.is_xpu():
                self._worker = CudaRowWorker(client, kv_caches, self.layout)
            else:
                self._worker = RowWorker(client, kv_caches, self.layout)
        return self._worker

    def close(self) -> None:
        """The worker's connection ends; its copies have."""
        if self._worker_client is not None:
            self._worker_client.close()


def scheduler_client(config: OffloadingConfig, namespace: bytes, key_bytes: int) -> SchedulerClient:
    """The scheduler's client, attached if there is a broker; else it attaches later by itself.
    `namespace` says who can share."""
    socket = wire.absolute_socket_path(config.extra_config.get("socket"))
    version = config.extra_config.get("weights_version")
    layout = RowLayout.of(config)
    client = SchedulerClient(
        socket,
        engine_id=config.engine_id,
        namespace=namespace,
        row_bytes=layout.row_bytes,
        key_bytes=key_bytes,
        world=layout.world,
        weights_version=None if version is None else str(version),
        events=config.enable_kv_cache_events,
    )
    if os.path.exists(socket):
        if client.wait_ready(ATTACH_S):
            neighbours.tell(socket, config.engine_id)
        else:
            logger.warning("kvquay: this engine starts without the cache and attaches later")
    return client
