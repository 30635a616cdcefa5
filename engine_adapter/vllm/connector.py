"""vLLM's connector: one question to the broker per request, and failed loads told to vLLM.

A subclass of vLLM's OffloadingConnector, which schedules transfers; this adds what it does not do:
ask for a whole prompt at once, tell adapters apart, report rows that could not be copied so that
vLLM computes their tokens, and end each step with a word to the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from engine_adapter.answers import GroupQuery
from engine_adapter.vllm import namespace, plugin, spec, versions
from engine_adapter.vllm.manager import BrokerManager
from engine_adapter.vllm.rows import RowKey

logger = logging.getLogger("vllm.kvquay")


@dataclass
class WorkerReport(OffloadingWorkerMetadata):  # type: ignore[no-any-unimported,unused-ignore]
    """What one worker, or all of them, did since the last step. `failed_rows`: not copied."""

    failed_rows: set[RowKey] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """This and another worker's report as one."""
        both = super().aggregate(other)
        rows = self.failed_rows | getattr(other, "failed_rows", set())
        return WorkerReport(both.completed_jobs, both.transfer_stats, rows)


class KvquayConnector(OffloadingConnector):  # type: ignore[no-any-unimported,unused-ignore]
    """See the module."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """RuntimeError or ValueError, with what to do, where this vLLM or its options can't work;
        a missing broker is no error."""
        versions.check()
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        _name_spec(vllm_config)
        if extra.get("sync_load_budget_bytes"):
            raise ValueError(
                "kvquay: vLLM's synchronous loads can't be computed anew when one fails; remove "
                "sync_load_budget_bytes from kv_connector_extra_config"
            )
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError(
                'kvquay: set "kv_load_failure_policy":"recompute" in --kv-transfer-config (see '
                "`kvquay vllm-config`); otherwise a restart of the broker fails requests"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        self._failed_rows: set[RowKey] = set()
        key_bytes = namespace.key_bytes(vllm_config)
        if role == KVConnectorRole.WORKER:
            self._worker_spec.key_bytes = key_bytes
            return
        manager = self.scheduler.manager
        assert isinstance(manager, BrokerManager)
        self._manager = manager
        self._queries = _Queries(self.scheduler.config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        space = namespace.engine_namespace(vllm_config, kv_cache_config, config)
        for warning in space.warnings:
            logger.warning("kvquay: %s", warning)
        logger.info("kvquay: namespace %s", space.digest.hex())
        for name, value in sorted(space.described.items()):  # to be compared with another engine's
            logger.debug("kvquay: namespace of %s = %r", name, value)
        manager.connect(spec.scheduler_client(config, space.digest, key_bytes))

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any, **named: Any) -> Any:
        """As vLLM's, in its API server, where no connector is made: our figures are known there by
        the spec's name, and one that is not known ends the server."""
        _name_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *arguments, **named)

    @property
    def _worker_spec(self) -> spec.BrokerOffloadingSpec:
        assert self.connector_worker is not None
        made = self.connector_worker.spec
        assert isinstance(made, spec.BrokerOffloadingSpec)
        return made

    # ---- scheduler ---------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request begins."""
        self._manager.expect(request.request_id, getattr(request, "lora_request", None))
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can be loaded; None while the broker does not know yet."""
        if self._manager.waiting.get(request.request_id) == num_computed_tokens:
            return None, False
        if not request.skip_reading_prefix_cache:
            groups = self._queries.of(request, num_computed_tokens)
            if not self._manager.ask(request.request_id, num_computed_tokens, groups):
                return None, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's transfers; the last thing that vLLM asks in a step."""
        meta = super().build_connector_meta(scheduler_output)
        self._manager.step()
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers did, failures first."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerReport):
            self._manager.note_failed(meta.failed_rows, connector_output.failed_recving)
        super().update_connector_output(connector_output)
        for req_id in connector_output.failed_recving:
            state = self.scheduler._req_status.get(req_id)
            for group in () if state is None else state.group_states:
                # vLLM takes what it meant to load for stored; some of it is gone, and nobody else
                # would offer it as long as this engine has it.
                group.next_stored_chunk_idx = 0

    # ---- worker ------------------------------------------------------------------------------

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads ended, and those of them that must be computed instead."""
        assert self.connector_worker is not None
        loads = dict(self.connector_worker._load_jobs)
        results = super().get_transfer_results(finished_req_ids)
        rows, jobs = self.connector_worker.worker.take_failed()
        self._failed_rows |= rows
        # vLLM wants a failed request among those that have received, too.
        results.failed_recving |= {loads[job] for job in jobs if loads.get(job) is not None}
        results.finished_recving |= results.failed_recving
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """This worker's report since the last step."""
        meta = super().build_connector_worker_meta()
        if meta is None and not self._failed_rows:
            return None
        meta = OffloadingWorkerMetadata() if meta is None else meta
        rows, self._failed_rows = self._failed_rows, set()
        return WorkerReport(meta.completed_jobs, meta.transfer_stats, rows)

    def shutdown(self) -> None:
        """The session ends."""
        super().shutdown()
        if self.connector_worker is not None:
            self._worker_spec.close()


def _name_spec(vllm_config: VllmConfig) -> None:
    """So that users need not: the connector's name says it already."""
    vllm_config.kv_transfer_config.kv_connector_extra_config.setdefault("spec_name", plugin.SPEC)


class _Queries:
    """What to ask for a request, from its block hashes."""

    def __init__(self, config: Any) -> None:
        """`config`: vLLM's SchedulerOffloadConfig."""
        self._groups = config.kv_group_configs

    def of(self, request: Request, computed: int) -> Sequence[GroupQuery]:
        """Every group's chunks that the GPU does not have."""
        queries = []
        for group in self._groups:
            per_chunk, tokens = group.hashes_per_chunk, group.tokens_per_chunk
            start = computed // tokens
            hashes = request.block_hashes[start * per_chunk + per_chunk - 1 :: per_chunk]
            keys = [make_offload_key(each, group.group_idx) for each in hashes]
            window = group.sliding_window_size_in_chunks
            if window is not None and keys:
                end = (start + len(keys)) * tokens
                window = max(window, group.load_window_size_in_chunks(end))
            queries.append(
                GroupQuery(
                    group=group.group_idx,
                    keys=keys,
                    positions=np.arange(1, len(keys) + 1, dtype="<u4") * tokens + start * tokens,
                    start=start,
                    window=window,
                )
            )
        return queries
