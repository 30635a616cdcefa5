"""What the series of the tiering core mean: documentation, labels and buckets. Counts nothing."""

from __future__ import annotations

from typing import Final

from tiers.base import (
    TIER_LABEL,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    TieringOffloadingMetrics,
)
from tiers.metric_stats import own_name

RESULT_LABEL: Final = "result"

_SYNC_DELAY_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0)
_ASYNC_DELAY_S = (1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_PROMOTION_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ALLOCATION_CHUNKS = tuple(float(4**power) for power in range(10))  # 1 to 262144


def _counter(text: str, *labels: str) -> OffloadingMetricMetadata:
    return OffloadingCounterMetadata(documentation=text, labelnames=labels)


def _gauge(text: str, *labels: str) -> OffloadingMetricMetadata:
    return OffloadingGaugeMetadata(documentation=text, labelnames=labels)


def _histogram(text: str, buckets: tuple[float, ...], *labels: str) -> OffloadingMetricMetadata:
    return OffloadingHistogramMetadata(documentation=text, labelnames=labels, buckets=buckets)


_M = TieringOffloadingMetrics
_T = TIER_LABEL
_PUBLIC: Final[dict[str, OffloadingMetricMetadata]] = {
    _M.LOOKUP_SYNC_DELAY: _histogram(
        "Seconds of a lookup that the tier answered at once.", _SYNC_DELAY_S, _T
    ),
    _M.LOOKUP_ASYNC_DELAY: _histogram(
        "Seconds from a lookup that had to be repeated to its answer.", _ASYNC_DELAY_S, _T
    ),
    _M.READ_BYTES: _counter("Bytes read from the tier into the primary tier.", _T),
    _M.READ_TIME: _counter("Seconds of transfers from the tier into the primary tier.", _T),
    _M.WRITE_BYTES: _counter("Bytes written from the primary tier to the tier.", _T),
    _M.WRITE_TIME: _counter("Seconds of transfers from the primary tier to the tier.", _T),
    _M.PROMOTION_JOB_FAILURES: _counter("Promotions of which a chunk did not arrive.", _T),
    _M.CASCADE_JOB_FAILURES: _counter("Stores to the tier that failed.", _T),
    _M.CHUNK_QUERIES: _counter("Chunks looked up, once per request and tier.", _T),
    _M.CHUNK_HITS: _counter("Chunks looked up and found, once per request and tier.", _T),
    _M.PRIMARY_WRITE_USAGE_PERC: _gauge(
        "Fraction of the primary tier's chunks that the tier is filling.", _T
    ),
    _M.PRIMARY_READ_USAGE_PERC: _gauge(
        "Fraction of the primary tier's chunks that the tier is reading.", _T
    ),
    _M.PROMOTION_ALLOCATION_FAILURES: _counter(
        "Chunks found in a tier for which the primary tier had no room."
    ),
    _M.ACTIVE_PROMOTION_JOBS: _gauge("Promotions in flight.", _T),
    _M.ACTIVE_CASCADE_JOBS: _gauge("Stores to the tier in flight.", _T),
    _M.PROMOTION_LATENCY: _histogram(
        "Seconds from the creation of a promotion to its observed end, failures included.",
        _PROMOTION_S,
        _T,
        RESULT_LABEL,
    ),
    _M.BACKPRESSURE_STORE_LATENCY_EMA: _gauge(
        "Moving average of store latency in seconds per MiB.", _T
    ),
    _M.BACKPRESSURE_STORES_DROPPED: _counter("Stores spared the tier for back-pressure.", _T),
    _M.BACKPRESSURE_BLOCKS_DROPPED: _counter("Chunks of stores spared the tier.", _T),
    "vllm:kv_offload_cpu_cache_usage_perc": _gauge(
        "Fraction of the primary tier's chunks in a transfer; not its occupancy."
    ),
    "vllm:kv_offload_cpu_cache_write_usage_perc": _gauge(
        "Fraction of the primary tier's chunks being written."
    ),
    "vllm:kv_offload_cpu_cache_read_usage_perc": _gauge(
        "Fraction of the primary tier's chunks being read."
    ),
    "vllm:kv_offload_cpu_allocation_size": _histogram(
        "Chunks reserved in the primary tier by one store.", _ALLOCATION_CHUNKS
    ),
    "vllm:kv_offload_stores_skipped": _counter("Chunks not stored because seen too seldom."),
}


def tiering_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every series of the tracker and the primary tier, under the public and our own name."""
    return _PUBLIC | {own_name(name): metadata for name, metadata in _PUBLIC.items()}
