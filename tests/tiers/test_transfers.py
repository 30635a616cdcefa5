"""Jobs between memory and tiers: each ends once, by its tier, and what did not arrive is freed."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.tiers.doubles import ROW_BYTES, ScriptedTier, key, keys, make_manager, pattern, read
from tiers.backpressure import BackpressureDetector, EMABackpressureDetector
from tiers.base import (
    CacheHitSource,
    JobResult,
    LookupResult,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferJob,
)
from tiers.manager import TieringOffloadingManager
from tiers.slots import SlotState

HIT, PENDING, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS
CTX = ReqContext("r")


class Detector(BackpressureDetector):
    """Writes down what it is told, and is under pressure when the test says so."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.updates: list[tuple[float, int]] = []
        self.failures = 0
        self.resets = 0
        self.offers: list[int] = []
        self.pressure = False
        self.refuses = refuses

    def should_store(self, num_blocks: int) -> bool:
        self.offers.append(num_blocks)
        return not self.refuses

    def update(self, submit_time: float, num_bytes: int) -> None:
        self.updates.append((submit_time, num_bytes))
        self.pressure = not self.pressure

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        raise NotImplementedError

    def on_store_failed(self) -> None:
        self.failures += 1

    def is_under_pressure(self) -> bool:
        return self.pressure

    def reset(self) -> None:
        self.resets += 1


def make(tiers: int = 1, rows: int = 8) -> tuple[TieringOffloadingManager, list[ScriptedTier]]:
    manager, scripted = make_manager(rows, tiers)
    manager.on_new_request(CTX)
    return manager, scripted


def store(manager: TieringOffloadingManager, *numbers: int) -> None:
    output = manager.prepare_store(keys(*numbers), CTX)
    assert output is not None
    manager.complete_store(output.keys_to_store, CTX)


def promote(manager: TieringOffloadingManager, *numbers: int, ctx: ReqContext = CTX) -> None:
    assert [manager.lookup(k, ctx) for k in keys(*numbers)] == [PENDING] * len(numbers)
    step(manager)


def step(manager: TieringOffloadingManager) -> None:
    manager.on_schedule_end(ScheduleEndContext((), ()))


def test_ids_rise_and_are_never_used_again() -> None:
    manager, (tier,) = make()
    ids = []
    for number in range(4):
        store(manager, number)
        tier.end_all()
        manager._process_finished_jobs()
        ids.append(tier.stores[-1].job_id)
    assert ids == sorted(set(ids))
    assert not manager._transfer_jobs


def test_a_job_names_rows_parallel_to_its_keys() -> None:
    manager, (tier,) = make()
    store(manager, 5, 3, 4)
    job = tier.stores[0]
    assert job.chunk_ids.tolist() == manager.primary_tier.rows.find(list(job.keys)).tolist()
    assert job.chunk_ids.dtype == np.int32
    assert not job.is_promotion
    assert manager._transfer_jobs[job.job_id].transfer_job is job


def test_what_is_promoted_arrives_byte_for_byte() -> None:
    manager, (tier,) = make()
    tier.chunks = {k: pattern(k) for k in keys(1, 2)}
    promote(manager, 2, 1)
    tier.end_all()
    assert [manager.lookup(k, CTX) for k in keys(1, 2)] == [HIT, HIT]
    for chunk in keys(1, 2):
        assert read(manager, int(manager.primary_tier.rows.find([chunk])[0])) == pattern(chunk)


@pytest.mark.parametrize("good", [[], [0], [2], [0, 1, 3], [1, 3]])
def test_what_did_not_arrive_is_freed_and_its_source_forgotten(good: list[int]) -> None:
    manager, (tier,) = make()
    tier.chunks = {k: pattern(k) for k in keys(*range(4))}
    promote(manager, *range(4))
    tier.end(tier.loads[0].job_id, keys(*good))
    tier.chunks.clear()
    expected = [HIT if number in good else MISS for number in range(4)]
    assert [manager.lookup(key(n), CTX) for n in range(4)] == expected
    sources = [manager.get_load_source(key(n), CTX) for n in range(4)]
    disk, host = CacheHitSource.DISK, CacheHitSource.HOST
    assert sources == [disk if number in good else host for number in range(4)]
    assert manager.primary_tier.rows.num_busy == 0
    manager.primary_tier.rows.check()


def test_the_source_is_the_tier_it_came_from_for_the_request_that_asked() -> None:
    manager, (first, second) = make(2)
    second.cache_hit_source = CacheHitSource.P2P  # type: ignore[misc]
    first.chunks[key(1)] = pattern(key(1))
    second.chunks[key(2)] = pattern(key(2))
    promote(manager, 1, 2)
    assert [job.keys for job in (first.loads + second.loads)] == [keys(1), keys(2)]
    other = ReqContext("other")
    assert manager.get_load_source(key(1), CTX) is CacheHitSource.DISK
    assert manager.get_load_source(key(2), CTX) is CacheHitSource.P2P
    assert manager.get_load_source(key(2), other) is CacheHitSource.HOST
    manager.on_request_finished(CTX)
    assert manager.get_load_source(key(2), CTX) is CacheHitSource.HOST
    assert not manager._request_load_sources


def test_each_request_and_tier_gets_a_load_of_its_own() -> None:
    manager, (first, second) = make(2)
    a, b = ReqContext("a"), ReqContext("b")
    first.chunks = {k: pattern(k) for k in keys(1, 2, 3)}
    second.chunks = {k: pattern(k) for k in keys(4)}
    for ctx, number in ((a, 1), (b, 2), (a, 3), (a, 4)):
        assert manager.lookup(key(number), ctx) is PENDING
    assert set(manager._pending_load_submissions) == {(0, "a"), (0, "b"), (1, "a")}
    step(manager)
    loads = [(list(job.keys), job.req_context.req_id) for job in first.loads]
    assert loads == [(keys(1, 3), "a"), (keys(2), "b")]
    assert [list(job.keys) for job in second.loads] == [keys(4)]
    assert not manager._pending_load_submissions


def test_a_job_is_ended_by_its_own_tier_and_once() -> None:
    manager, (first, second) = make(2)
    store(manager, 1)
    mine = first.stores[0].job_id
    second.finished.append(JobResult(mine, True))
    with pytest.raises(AssertionError, match=f"scripted1 reports job {mine}"):
        manager._process_finished_jobs()
    assert mine in manager._transfer_jobs
    first.end_all()
    manager._process_finished_jobs()
    first.finished.append(JobResult(mine, True))
    with pytest.raises(AssertionError, match="not its own"):
        manager._process_finished_jobs()


def test_keys_that_a_job_did_not_have_are_not_passed_over() -> None:
    manager, (tier,) = make()
    tier.chunks[key(1)] = pattern(key(1))
    promote(manager, 1)
    job_id = tier.loads[0].job_id
    tier.finished.append(JobResult(job_id, False, keys(1, 2)))
    with pytest.raises(AssertionError, match="did not have"):
        manager._process_finished_jobs()
    assert job_id in manager._transfer_jobs  # nothing was done by halves
    assert manager.primary_tier.lookup(key(1), CTX) is PENDING


def test_a_job_made_by_hand_ends_like_any_other() -> None:
    manager, (tier,) = make()
    output = manager.primary_tier.prepare_write(keys(1), CTX)
    assert output is not None
    rows = manager.primary_tier.rows.find(keys(1))
    job = TransferJob(manager._next_job_id(), keys(1), rows, True, CTX)
    manager._register_job(job, 0)
    tier.finished.append(JobResult(job.job_id, True))
    manager._process_finished_jobs()
    assert manager.lookup(key(1), CTX) is HIT


def test_a_copy_requested_with_repeated_keys_lets_go_of_every_pin() -> None:
    manager, (tier,) = make()
    store(manager, 1)
    job = manager.create_store_job(keys(1, 1), CTX, 0)
    assert list(job.keys) == keys(1, 1)
    tier.end_all()
    manager._process_finished_jobs()
    assert manager.primary_tier.rows.num_busy == 1
    tier.finished.append(JobResult(job.job_id, True))
    manager._process_finished_jobs()
    assert manager.primary_tier.rows.num_busy == 0
    manager.primary_tier.rows.check()


def test_a_cascade_names_each_chunk_once() -> None:
    manager, (tier,) = make()
    manager.prepare_store(keys(1, 2), CTX)
    manager.complete_store(keys(1, 2, 1), CTX)
    assert list(tier.stores[0].keys) == keys(1, 2)


@pytest.mark.parametrize(("reported", "counted"), [(77, 77), (None, 2 * 4096), (0, 2 * 4096)])
def test_back_pressure_hears_of_bytes_as_reported_or_by_rows(
    reported: int | None, counted: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert ROW_BYTES == 4096
    manager, (tier,) = make()
    detector = Detector()
    tier._bp_detector = detector
    caplog.set_level(logging.INFO)
    store(manager, 1, 2)
    (job,) = tier.stores
    tier.end(job.job_id, transfer_bytes=reported)
    manager._process_finished_jobs()
    assert detector.updates == [(job.submit_time, counted)]
    assert "under pressure" in caplog.text
    store(manager, 3)
    tier.end_all()
    manager._process_finished_jobs()
    assert "has recovered" in caplog.text


def test_back_pressure_hears_of_failures_and_says_nothing_without_a_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager, (tier,) = make()
    detector = Detector()
    tier._bp_detector = detector
    caplog.set_level(logging.INFO)
    store(manager, 1)
    tier.end(tier.stores[0].job_id, [])
    manager._process_finished_jobs()
    assert (detector.failures, detector.updates) == (1, [])
    assert manager.primary_tier.rows.num_busy == 0
    assert "pressure" not in caplog.text


def test_a_tier_under_pressure_is_left_out_and_the_others_are_not() -> None:
    manager, (first, second) = make(2)
    detector = Detector(refuses=True)
    first._bp_detector = detector
    store(manager, 1, 2)
    assert not first.stores
    assert len(second.stores) == 1
    assert detector.offers == [2]


def test_loads_are_not_subject_to_back_pressure() -> None:
    manager, (tier,) = make()
    detector = Detector(refuses=True)
    tier._bp_detector = detector
    tier.chunks[key(1)] = pattern(key(1))
    promote(manager, 1)
    tier.end_all()
    assert manager.lookup(key(1), CTX) is HIT
    assert detector.updates == []


def test_a_reset_gives_up_loads_that_were_not_submitted() -> None:
    manager, (tier,) = make()
    detector = Detector()
    tier._bp_detector = detector
    tier.chunks = {k: pattern(k) for k in keys(1, 2)}
    promote(manager, 1)
    manager.lookup(key(2), CTX)
    manager.reset_cache()
    step(manager)
    assert [list(job.keys) for job in tier.loads] == [keys(1)]
    assert not manager._request_load_sources
    assert manager.primary_tier.rows.slots.count(SlotState.FREE) == 8
    assert detector.resets == 1


def figures(manager: TieringOffloadingManager) -> dict[str, float]:
    stats = manager.get_stats()
    assert stats is not None
    return stats.reduce()


def test_figures_follow_the_jobs() -> None:
    manager, (tier,) = make(rows=2)
    tier._bp_detector = EMABackpressureDetector(1.0, 0.5)
    tier.chunks = {k: pattern(k) for k in keys(1, 2, 3)}
    assert [manager.lookup(k, CTX) for k in keys(1, 2, 3)] == [PENDING, PENDING, MISS]
    step(manager)
    name = "vllm:kv_offload_tiering_"
    told = figures(manager)
    assert told[f"{name}promotion_allocation_failures"] == 1
    assert told[f"{name}active_promotion_jobs:('1:scripted0',)"] == 1
    tier.end_all()
    manager._process_finished_jobs()
    told = figures(manager)
    assert told[f"{name}active_promotion_jobs:('1:scripted0',)"] == 0
    assert told[f"{name}read_bytes:('1:scripted0',)"] == 2 * ROW_BYTES
    assert f"{name}backpressure_store_latency_ema:('1:scripted0',)" in told


def test_a_reset_gives_up_copies_that_were_parked() -> None:
    manager, (tier,) = make()
    manager.prepare_store(keys(1), CTX)
    tier.wanted = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
    ctx = ReqContext("whole")
    manager.on_new_request(ctx)
    manager.prepare_store(keys(1), ctx)
    assert manager.has_pending_work()
    manager.reset_cache()
    assert not manager.has_pending_work()
