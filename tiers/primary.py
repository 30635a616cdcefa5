"""The primary tier by key: the public contract, for one engine in-process and for tiers.

What rows do underneath is in `tiers.rows`, which sessions use directly. Knows no tier, job, session
or clock, and touches no payload byte.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tiers.base import (
    BlockIDsLoadStoreSpec,
    CacheHitSource,
    ConfigInfo,
    ConfigInfoMapping,
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from tiers.config import OffloadingConfig
from tiers.metrics import OffloadingConnectorStats
from tiers.policies.factory import CachePolicyFactory
from tiers.region import Region
from tiers.rows import ABSENT, PrimaryRows, distinct_batches
from tiers.slots import NOT_READY, Rows, SlotState


class CPUOffloadingMetrics:
    """Public names of the primary tier's metrics; fractions are of chunks pinned, not occupied."""

    STORES_SKIPPED = "vllm:kv_offload_stores_skipped"
    CPU_CACHE_USAGE_PERC = "vllm:kv_offload_cpu_cache_usage_perc"
    CPU_ALLOCATION_SIZE = "vllm:kv_offload_cpu_allocation_size"
    CPU_CACHE_WRITE_USAGE_PERC = "vllm:kv_offload_cpu_cache_write_usage_perc"
    CPU_CACHE_READ_USAGE_PERC = "vllm:kv_offload_cpu_cache_read_usage_perc"


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Rows of the primary tier."""

    @property
    def chunk_ids(self) -> NDArray[np.int32]:
        """Row numbers, int32, shape (n,)."""
        return self.block_ids


@dataclass(frozen=True)
class CPUOffloadingInfo(ConfigInfo):
    """Size of the primary tier; tokens only where all groups have blocks of one size."""

    cpu_num_chunks: int
    cpu_blocks_per_chunk: int
    cpu_kv_cache_size_bytes: int
    cpu_kv_cache_size_tokens: int | None

    @classmethod
    def from_config(
        cls, config: OffloadingConfig, num_chunks: int, kv_bytes_per_chunk: int
    ) -> CPUOffloadingInfo:
        """Sizes of a tier of `num_chunks` rows of `kv_bytes_per_chunk` bytes."""
        sizes = {group.tokens_per_block for group in config.groups}
        chunk_blocks = config.cache.blocks_per_chunk
        tokens = num_chunks * chunk_blocks * sizes.pop() if len(sizes) == 1 else None
        return cls(num_chunks, chunk_blocks, num_chunks * kv_bytes_per_chunk, tokens)


class CPUOffloadingManager(OffloadingManager):
    """Rows of one pool and the keys in them. Guarded by whoever calls (see OffloadingManager)."""

    def __init__(
        self,
        num_chunks: int,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
        info: CPUOffloadingInfo | None = None,
        *,
        generation: NDArray[np.uint32] | None = None,
    ) -> None:
        """`generation`: where the rows' generations are kept (uint32, one per row), if shared.

        With `store_threshold` >= 2 only keys offered that often are stored, of the last
        `max_tracker_size` keys seen.
        """
        self.medium = Medium.CPU
        policy_cls = CachePolicyFactory.get_cache_policy_cls(cache_policy, cache_policy_module_path)
        self._policy = policy_cls(num_chunks)
        self.events: list[OffloadingEvent] | None = [] if enable_events else None
        self.rows = PrimaryRows(num_chunks, self._policy, self._keep_event, generation)
        self._num_chunks = num_chunks
        self._config_info = info
        self._fenced: dict[OffloadKey, list[int]] = {}  # rows that moved when the cache was reset
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self.counts: OrderedDict[OffloadKey, int] = OrderedDict()
        self.stores_skipped_in_current_batch = 0
        self.allocation_sizes_in_current_batch: list[int] = []
        self._lock = threading.Lock()

    @property
    def lock(self) -> threading.Lock:
        """For callers on several threads, where this manager stands alone."""
        return self._lock

    # ---- by key: the public contract ---------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing to prepare."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT, HIT_PENDING (reserved, not ready) or MISS."""
        chunk = self._policy.get(key)
        if chunk is None:
            return LookupResult.MISS
        return LookupResult.HIT if chunk.is_ready else LookupResult.HIT_PENDING

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Host memory."""
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin ready chunks and count them as used. AssertionError if one is not ready."""
        return self._pin(keys, req_context, record_access=True)

    def _pin(
        self, keys: Collection[OffloadKey], ctx: ReqContext, *, record_access: bool
    ) -> CPULoadStoreSpec:
        keys = list(keys)
        rows = self._rows_of(keys)
        for distinct in distinct_batches(rows):
            self.rows.hold(distinct)
        if record_access:
            self.rows.access(keys, rows, ctx)
        return CPULoadStoreSpec(rows)

    def _rows_of(self, keys: Sequence[OffloadKey]) -> NDArray[np.int32]:
        rows = self.rows.find(keys)
        if len(rows) and rows.min() < 0:
            raise AssertionError(f"chunk {keys[int(np.argmin(rows))].hex()} is not in memory")
        return rows

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count chunks as used now; `keys` in prefix order."""
        self._policy.touch(keys, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin; chunks whose cache was reset meanwhile leave quarantine."""
        for distinct in distinct_batches(self._rows_of(self._settle_fenced(keys))):
            if self.rows.slots.ref_cnt[distinct].min() < 1:
                raise AssertionError(f"{req_context.req_id} unpins chunks it has not pinned")
            self.rows.unhold(distinct)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve rows for the keys that are absent; None if they don't fit."""
        offered = list(dict.fromkeys(keys))
        rows = self.rows.find(offered)
        if self.store_threshold >= 2:
            offered, rows = self._reuse_filter(offered, rows)
        absent = rows == ABSENT
        new = [key for key, missing in zip(offered, absent.tolist(), strict=True) if missing]
        known = [key for key, missing in zip(offered, absent.tolist(), strict=True) if not missing]
        if new:
            self.rows.store_misses(new, req_context)
        if known:
            self.rows.access(known, rows[~absent], req_context)
        if not new:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        reserved, evicted = self.rows.reserve(new, req_context, set(offered))
        if reserved is None:
            return None
        self.allocation_sizes_in_current_batch.append(len(new))
        self.rows.access(new, reserved, req_context, inserted=True)
        return PrepareStoreOutput(new, CPULoadStoreSpec(reserved), evicted)

    def _reuse_filter(
        self, offered: list[OffloadKey], rows: NDArray[np.int32]
    ) -> tuple[list[OffloadKey], NDArray[np.int32]]:
        """Count each offer; keep resident keys and those offered often enough."""
        for key in offered:
            self.counts[key] = self.counts.pop(key, 0) + 1
        while len(self.counts) > max(self.max_tracker_size, len(offered)):
            self.counts.popitem(last=False)
        keep = [
            row != ABSENT or self.counts[key] >= self.store_threshold
            for key, row in zip(offered, rows.tolist(), strict=True)
        ]
        self.stores_skipped_in_current_batch += keep.count(False)
        return [key for key, kept in zip(offered, keep, strict=True) if kept], rows[keep]

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make reserved chunks readable, or free them; keys that are not reserved stay as they are,
        since callers may name a whole offer of which a part was there already."""
        rows = self.rows.find(list(dict.fromkeys(self._settle_fenced(keys))))
        rows = rows[rows != ABSENT]
        rows = rows[self.rows.slots.ref_cnt[rows] == NOT_READY]
        if success:
            self.rows.complete(rows)
        else:
            self.rows.fail(rows)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Commit what the request used."""
        self.rows.finish(req_context)

    def reset_cache(self) -> None:
        """Forget every chunk. Rows that move now stay quarantined until their transfer ends."""
        resident = self.rows.resident()
        idle = self.rows.slots.ref_cnt[resident] == 0
        self.rows.forget(resident[idle])
        for row in resident[~idle].tolist():
            key, one = cast(OffloadKey, self.rows.key_of(row)), np.array([row], dtype=np.int32)
            claims = self.rows.forget(one)
            if claims:
                self._fenced.setdefault(key, []).extend([row] * claims)
        self.rows.clear()
        self.counts.clear()
        if self.events is not None:
            self.events.clear()

    def _settle_fenced(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """End transfers that ran across a reset; give back the keys that are not of that kind."""
        if not self._fenced:
            return list(keys)
        others = []
        for key in keys:
            rows = self._fenced.get(key)
            if rows is None:
                others.append(key)
                continue
            self.rows.settle(np.array([rows.pop()], dtype=np.int32))
            if not rows:
                del self._fenced[key]
        return others

    def on_reset_flushed(self) -> None:
        """No transfer from before the reset runs any more."""
        for rows in self._fenced.values():
            for row in rows:
                self.rows.settle(np.array([row], dtype=np.int32))
        self._fenced = {}

    def _keep_event(
        self, keys: Sequence[OffloadKey], rows: Rows | list[int], removed: bool, meta: bool
    ) -> None:
        if self.events is not None and keys:
            self.events.append(
                OffloadingEvent(list(keys), self.medium, removed, metadata_only=meta)
            )

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the last call; a failed reservation is told only for keys still absent."""
        if not self.events:
            return []
        batch, self.events = self.events, []
        kept = []
        for event in batch:
            if event.metadata_only:
                event.keys = [key for key in event.keys if self._policy.get(key) is None]
                if not event.keys:
                    continue
            kept.append(event)
        return kept

    def config_info(self) -> list[ConfigInfoMapping]:
        """Size of the tier, where it was told."""
        return [] if self._config_info is None else [self._config_info.as_config_info()]

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Fractions of chunks pinned, sizes of allocations and skipped stores."""
        stats = OffloadingConnectorStats()
        writing = self.rows.slots.count(SlotState.RESERVED)
        reading = self.rows.slots.count(SlotState.READY) - self.rows.num_evictable
        for name, number in (
            (CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, writing + reading),
            (CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing),
            (CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, reading),
        ):
            stats.set_gauge(name, number / self._num_chunks)
        for size in self.allocation_sizes_in_current_batch:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        self.allocation_sizes_in_current_batch = []
        if self.store_threshold >= 2:
            stats.increase_counter(
                CPUOffloadingMetrics.STORES_SKIPPED, self.stores_skipped_in_current_batch
            )
        self.stores_skipped_in_current_batch = 0
        return stats


class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """The primary tier with its memory. store and load name engine transfers, write and read those
    of secondary tiers; a read pins like a load but does not count as a use."""

    def __init__(
        self,
        num_chunks: int,
        mmap_region: Region,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        info: CPUOffloadingInfo | None = None,
        *,
        generation: NDArray[np.uint32] | None = None,
    ) -> None:
        super().__init__(
            num_chunks,
            cache_policy,
            cache_policy_module_path,
            enable_events,
            info=info,
            generation=generation,
        )
        self._mmap_region: Region | None = mmap_region
        self._kv_memoryview: memoryview | None = mmap_region.create_kv_memoryview()
        self.prepare_write = self.prepare_store
        self.complete_write = self.complete_store
        self.complete_read = self.complete_load

    def _get_num_free_chunks(self) -> int:
        return self.rows.slots.num_free

    @property
    def _num_allocated_chunks(self) -> int:
        return self.rows.num_rows - self.rows.slots.num_free

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin ready chunks for a copy to a tier; recency stays as it is."""
        return self._pin(keys, req_context, record_access=False)

    def get_kv_memoryview(self) -> memoryview:
        """The rows, shape (num_chunks, row bytes)."""
        if self._kv_memoryview is None:
            raise RuntimeError("the primary tier was shut down; its memory is gone")
        return self._kv_memoryview

    def shutdown(self) -> None:
        """Release the view, then the memory. A second call does nothing."""
        if self._kv_memoryview is not None:
            self._kv_memoryview.release()
            self._kv_memoryview = None
        if self._mmap_region is not None:
            self._mmap_region.cleanup()
            self._mmap_region = None
