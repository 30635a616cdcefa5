"""The worker's side of an engine: its KV tensors, its copies, and the spec that builds both sides.

`tiers.base` exports every name from here. The core itself needs none of it, and no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from tiers.config import OffloadingConfig
from tiers.contract import OffloadingManager
from tiers.vocabulary import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingKVEventsConfig,
    OffloadingMetricMetadata,
)


@dataclass
class CanonicalKVCacheTensor:
    """One KV tensor of a worker as int8, shape (num_blocks, page_size_bytes)."""

    tensor: Any  # torch.Tensor; the core needs no torch
    page_size_bytes: int


@dataclass(frozen=True)
class CopyRun:
    """Equal fragments that lie at regular strides in a worker's page and the canonical one."""

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True)
class CanonicalPageMapping:
    """How a worker's page lies in the page that all ranks share."""

    canonical_page_size_bytes: int
    local_page_size_bytes: int
    runs: tuple[CopyRun, ...]
    num_writers: int
    writer_index: int
    parallelism_agnostic: bool

    def is_writer(self, block_id: int) -> bool:
        """Whether this rank writes the block, of the ranks that hold the same bytes."""
        return block_id % self.num_writers == self.writer_index


@dataclass
class CanonicalKVCacheRef:
    """A group's data in one tensor; `page_size_bytes` without padding."""

    tensor_idx: int
    page_size_bytes: int
    mapping: CanonicalPageMapping | None = None


@dataclass
class CanonicalKVCaches:
    """All KV tensors of a worker and, per KV group, which of them the group uses."""

    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]


@dataclass
class TransferResult:
    """End of one worker transfer; size in bytes, time in seconds."""

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class OffloadingWorker(ABC):
    """Copies chunks between an engine's memory and the primary tier, in a worker process."""

    @abstractmethod
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start a copy out of the engine; does not block. False if it was refused."""

    @abstractmethod
    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Start a copy into the engine; does not block. False if it was refused."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Transfers that have ended since the last call."""

    @abstractmethod
    def wait(self, job_ids: set[int]) -> None:
        """Block until these transfers have ended; get_finished still reports them."""

    def shutdown(self) -> None:  # noqa: B027
        """Wait for running transfers and release everything."""


class OffloadingSpec(ABC):
    """Builds the two sides of offloading for one engine, from its configuration."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Metrics that the manager and tiers of this configuration may report, by name."""
        return {}

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Names of the static configuration values shown for this configuration."""
        return ()

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config
        self.extra_config = config.extra_config
        self.replicated_layout = config.replicated_layout
        self.kv_events_config = OffloadingKVEventsConfig(
            enable_kv_cache_events=config.enable_kv_cache_events,
            self_describing_kv_events=bool(
                config.extra_config.get("self_describing_kv_events", False)
            ),
        )
        self.offload_prompt_only = bool(config.extra_config.get("offload_prompt_only", True))
        self.tokens_per_block = tuple(group.tokens_per_block for group in config.groups)
        self.tokens_per_hash = config.cache.tokens_per_hash
        self.blocks_per_chunk = config.cache.blocks_per_chunk

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """The scheduler's side; called once, in the scheduler process."""

    @abstractmethod
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """A worker's side; called once in each worker process."""
