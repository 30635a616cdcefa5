"""Test doubles for the tiering core: a clock, and a tier whose answers the test controls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tiers.base import (
    JobResult,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    SecondaryTierManager,
    TransferJob,
    make_offload_key,
)
from tiers.manager import TieringOffloadingManager
from tiers.primary import CPUPrimaryTierOffloadingManager
from tiers.region import MemoryRegion

ROW_BYTES = 4096


class FakeClock:
    """Monotonic seconds that move when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class ScriptedTier(SecondaryTierManager):
    """Keeps real bytes; every job waits until the test ends it, and lookups say what it is told."""

    medium = Medium.STORAGE

    def __init__(self, view: memoryview, tier_type: str = "scripted", **kwargs: Any) -> None:
        super().__init__(None, view, tier_type, **kwargs)
        self.chunks: dict[OffloadKey, bytes] = {}
        self.unsure: set[OffloadKey] = set()
        self.running: dict[int, TransferJob] = {}
        self.finished: list[JobResult] = []
        self.loads: list[TransferJob] = []
        self.stores: list[TransferJob] = []
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.wanted = RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if key in self.unsure:
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.chunks else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.stores.append(job_metadata)
        self.running[job_metadata.job_id] = job_metadata

    def submit_load(self, job_metadata: TransferJob) -> None:
        self.loads.append(job_metadata)
        self.running[job_metadata.job_id] = job_metadata

    def end(
        self,
        job_id: int,
        good: Iterable[OffloadKey] | None = None,
        transfer_bytes: int | None = None,
    ) -> None:
        """End a job: all its keys succeed, or just those in `good`."""
        job = self.running.pop(job_id)
        keys = list(job.keys)
        kept = keys if good is None else [key for key in keys if key in set(good)]
        for key, row in zip(keys, job.chunk_ids.tolist(), strict=True):
            if key not in kept:
                continue
            if job.is_promotion:
                offset = row * self.block_size_bytes
                flat = self._primary_kv_view.cast("B")
                flat[offset : offset + len(self.chunks[key])] = self.chunks[key]
            else:
                offset = row * self.block_size_bytes
                flat = self._primary_kv_view.cast("B")
                self.chunks[key] = bytes(flat[offset : offset + 64])
        success = len(kept) == len(keys)
        partial = kept if job.is_promotion and not success and kept else None
        self.finished.append(
            JobResult(job_id, success, partial, transfer_time=0.001, transfer_bytes=transfer_bytes)
        )

    def end_all(self) -> None:
        """End every job successfully."""
        for job_id in list(self.running):
            self.end(job_id)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        done, self.finished = self.finished, []
        return done

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.begun.append(req_context.req_id)
        return self.wanted

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.ended.append(req_context.req_id)

    def drain_jobs(self) -> None:
        self.end_all()


def key(number: int, group: int = 0) -> OffloadKey:
    """A key of 36 bytes that names `number`."""
    return make_offload_key(number.to_bytes(32, "big"), group)


def keys(*numbers: int) -> list[OffloadKey]:
    """Keys of these numbers."""
    return [key(number) for number in numbers]


def pattern(chunk: OffloadKey) -> bytes:
    """64 bytes that belong to this key."""
    return (chunk * 2)[:64]


def make_manager(
    num_chunks: int, tiers: int = 0, **primary_options: Any
) -> tuple[TieringOffloadingManager, list[ScriptedTier]]:
    """A manager over real memory with scripted tiers, without a poll thread."""
    primary = CPUPrimaryTierOffloadingManager(
        num_chunks, MemoryRegion(num_chunks, ROW_BYTES), **primary_options
    )
    view = primary.get_kv_memoryview()
    scripted = [ScriptedTier(view, f"scripted{index}") for index in range(tiers)]
    return TieringOffloadingManager(primary, list(scripted), tier_poll_interval_s=0), scripted


def write(manager: TieringOffloadingManager, row: int, chunk: OffloadKey) -> None:
    """Put the pattern of `chunk` into a row, as a worker would."""
    flat = manager.primary_tier.get_kv_memoryview().cast("B")
    flat[row * ROW_BYTES : row * ROW_BYTES + 64] = pattern(chunk)


def read(manager: TieringOffloadingManager, row: int) -> bytes:
    """First 64 bytes of a row, as a worker would read them."""
    flat = manager.primary_tier.get_kv_memoryview().cast("B")
    return bytes(flat[row * ROW_BYTES : row * ROW_BYTES + 64])
