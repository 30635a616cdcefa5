"""What the scheduler's side remembers of each request of vLLM. Knows no broker."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from engine_adapter.vllm.rows import RowKey


@dataclass(slots=True)
class Asked:
    """The last question of a request and what vLLM may be told of it."""

    computed: int
    lengths: tuple[int, ...]
    results: dict[OffloadKey, LookupResult]


@dataclass(slots=True)
class Request:
    """A request that vLLM has begun; kept until its transfers have ended too."""

    is_cached: bool = True
    asked: Asked | None = None
    refusals: int = 0
    refused_at: float = float("-inf")
    timed_out: int = 0
    failed_loads: int = 0
    hole: int | None = None
    """End token of the first chunk that found no room: later ones are of no use to anybody."""
    loading: dict[OffloadKey, RowKey] = field(default_factory=dict)
    storing: dict[OffloadKey, RowKey] = field(default_factory=dict)
    finished: bool = False
