"""What an engine says of itself when it builds its offloading manager and workers.

Values only, frozen; how they are read from an engine's own configuration is the adapter's matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OffloadingGroupConfig:
    """One KV group: layers that share a block table."""

    tokens_per_block: int
    layer_names: tuple[str, ...]
    group_id: int = 0
    sliding_window_size_in_chunks: int | None = None


@dataclass(frozen=True)
class OffloadingModelConfig:
    """The model; `max_model_len` in tokens, 0 if unknown."""

    name: str
    dtype: str
    max_model_len: int = 0


@dataclass(frozen=True)
class OffloadingCacheConfig:
    """Sizes of hashes (tokens) and chunks (blocks)."""

    tokens_per_hash: int
    blocks_per_chunk: int = 1


@dataclass(frozen=True)
class OffloadingParallelConfig:
    """Place of this process among the engine's ranks; the scheduler is rank 0."""

    rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    data_parallel_index: int = 0
    data_parallel_size: int = 1
    data_parallel_rank_local: int | None = None
    is_parallelism_agnostic: bool = False


@dataclass(frozen=True)
class OffloadingConfig:
    """All of it. `engine_id` is unique per data-parallel rank."""

    groups: tuple[OffloadingGroupConfig, ...]
    worker_kv_bytes_per_block: int
    enable_kv_cache_events: bool
    extra_config: dict[str, Any]
    engine_id: str
    model: OffloadingModelConfig
    cache: OffloadingCacheConfig
    parallel: OffloadingParallelConfig = field(default_factory=OffloadingParallelConfig)
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = None
