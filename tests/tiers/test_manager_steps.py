"""The manager step by step: when tiers are polled, in which order a step ends, who is told what."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.tiers.doubles import ScriptedTier, key, keys, make_manager, pattern
from tiers.base import (
    ConfigInfoMapping,
    JobResult,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ParentManager,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferJob,
)
from tiers.manager import TieringOffloadingManager
from tiers.metrics import OffloadingConnectorStats

HIT, PENDING, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS


class Recorded(ScriptedTier):
    """Writes the calls of all tiers of its kind into one list."""

    log: list[str]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self.log.append(f"{self.tier_type}.poll")
        return super().get_finished_jobs()

    def serve_external_requests(self, parent: ParentManager) -> None:
        self.log.append(f"{self.tier_type}.serve")

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.log.append(f"{self.tier_type}.end")

    def submit_load(self, job_metadata: TransferJob) -> None:
        self.log.append(f"{self.tier_type}.load")
        super().submit_load(job_metadata)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.log.append(f"{self.tier_type}.store")
        super().submit_store(job_metadata)

    def drain_jobs(self) -> None:
        self.log.append(f"{self.tier_type}.drain")
        super().drain_jobs()

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self.log.append(f"{self.tier_type}.touch{len(list(keys))}")


def make(
    rows: int = 8, kind: type[ScriptedTier] = Recorded, tiers: int = 2
) -> tuple[TieringOffloadingManager, list[ScriptedTier], list[str]]:
    base, _ = make_manager(rows, enable_events=True)
    log: list[str] = []
    view = base.primary_tier.get_kv_memoryview()
    made = [kind(view, f"t{index}") for index in range(tiers)]
    for tier in made:
        tier.log = log  # type: ignore[attr-defined]
    return TieringOffloadingManager(base.primary_tier, list(made), 0), made, log


def begin(manager: TieringOffloadingManager, name: str = "r") -> ReqContext:
    ctx = ReqContext(name)
    manager.on_new_request(ctx)
    return ctx


def step(manager: TieringOffloadingManager, *new: str) -> None:
    manager.on_schedule_end(ScheduleEndContext(new, ()))


def test_lookups_poll_once_a_step_and_stores_always() -> None:
    manager, _, log = make()
    ctx = begin(manager)
    for number in range(3):
        manager.lookup(key(number), ctx)
    manager.lookup_many(keys(1, 2), ctx)
    assert log == ["t0.poll", "t1.poll"]
    manager.prepare_store(keys(1), ctx)
    manager.prepare_store(keys(2), ctx)
    assert log == ["t0.poll", "t1.poll"] * 3
    step(manager)
    log.clear()
    manager.lookup(key(1), ctx)
    assert log == ["t0.poll", "t1.poll"]


def test_a_step_polls_at_its_end_if_nothing_did_before() -> None:
    manager, _, log = make(tiers=1)
    step(manager)
    assert log == ["t0.poll", "t0.serve", "t0.end"]


def test_the_order_of_the_end_of_a_step() -> None:
    manager, (first, second), log = make()
    other = begin(manager, "other")
    manager.prepare_store(keys(1), other)
    first.wanted = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
    ctx = begin(manager)
    second.chunks[key(2)] = pattern(key(2))
    manager.lookup(key(2), ctx)
    manager.prepare_store(keys(1), ctx)  # parked: another request is writing it
    manager.primary_tier.complete_store(keys(1), other)
    log.clear()
    step(manager)
    assert log == [
        "t0.serve",
        "t1.serve",
        "t1.load",
        "t0.store",
        "t0.end",
        "t1.end",
    ]


def test_evictions_are_decided_with_what_tiers_have_just_let_go() -> None:
    manager, (first, second), _ = make(rows=2)
    ctx = begin(manager)
    manager.lookup(key(9), ctx)  # the step has polled
    output = manager.prepare_store(keys(1, 2), ctx)
    assert output is not None
    manager.complete_store(keys(1, 2), ctx)
    first.end_all()
    second.end_all()
    output = manager.prepare_store(keys(3), ctx)
    assert output is not None
    assert len(output.evicted_keys) == 1


def test_a_tier_asks_through_its_parent_without_being_asked_itself() -> None:
    got: list[object] = []

    class Asking(ScriptedTier):
        def serve_external_requests(self, parent: ParentManager) -> None:
            if self.tier_type == "t0":
                ctx = ReqContext("peer")
                got.append(parent.on_new_request(ctx).policy)
                got.extend(parent.lookup(k, ctx) for k in keys(1, 2, 3))
                job = parent.create_store_job(keys(1), ctx)
                got.append(list(job.keys))
                parent.on_request_finished(ctx)
                self.running[job.job_id] = job

    manager, (asking, other), _ = make(kind=Asking)
    ctx = begin(manager)
    manager.prepare_store(keys(1), ctx)
    manager.primary_tier.complete_store(keys(1), ctx)
    asking.wanted = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
    asking.chunks[key(2)] = pattern(key(2))
    other.chunks[key(3)] = pattern(key(3))
    step(manager)
    assert got == [OffloadPolicy.CHUNK_LEVEL, HIT, MISS, PENDING, keys(1)]
    assert (asking.begun, asking.ended) == (["r"], [])
    assert (other.begun, other.ended) == (["r", "peer"], ["peer"])
    assert [list(job.keys) for job in other.loads] == [keys(3)]
    assert len(manager._transfer_jobs) == 2
    asking.end_all()
    other.end_all()
    manager._process_finished_jobs()
    assert not manager._transfer_jobs
    assert manager.primary_tier.rows.num_busy == 0


def test_the_caller_of_a_store_job_moves_the_data() -> None:
    manager, (tier, _), log = make()
    ctx = begin(manager)
    manager.prepare_store(keys(1), ctx)
    manager.primary_tier.complete_store(keys(1), ctx)
    log.clear()
    job = manager.create_store_job(keys(1), ctx, 0)
    assert log == []
    assert not job.is_promotion
    assert manager.has_pending_work()
    tier.finished.append(JobResult(job.job_id, True))
    step(manager)
    assert not manager.has_pending_work()


def test_a_request_ends_for_tiers_after_every_store_of_it_has_ended() -> None:
    manager, (tier, _), _ = make()
    ctx = begin(manager)
    manager.prepare_store(keys(1), ctx)
    manager.prepare_store(keys(2), ctx)
    assert manager.prepare_store(keys(1, 2), ctx) is not None  # nothing new: nothing pending
    assert manager._req_state["r"].pending_primary_stores == 2
    manager.on_request_finished(ctx)
    manager.complete_store(keys(1), ctx)
    assert tier.ended == []
    manager.complete_store(keys(2), ctx, success=False)
    assert tier.ended == ["r"]
    assert not manager._req_state
    manager.on_request_finished(ctx)
    assert tier.ended == ["r"]


def test_a_name_used_again_ends_the_old_request_for_tiers() -> None:
    manager, (tier, _), _ = make()
    ctx = begin(manager)
    manager.prepare_store(keys(1), ctx)
    manager.on_request_finished(ctx)
    begin(manager)
    assert (tier.begun, tier.ended) == (["r", "r"], ["r"])


def test_a_store_that_does_not_fit_leaves_nothing_pending() -> None:
    manager, (tier, _), _ = make(rows=2)
    ctx = begin(manager)
    assert manager.prepare_store(keys(1, 2, 3), ctx) is None
    manager.on_request_finished(ctx)
    assert tier.ended == ["r"]


def test_parked_chunks_are_dropped_when_their_store_fails() -> None:
    manager, (tier, _), _ = make()
    other = begin(manager, "other")
    manager.prepare_store(keys(1, 2), other)
    tier.wanted = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
    ctx = begin(manager)
    manager.prepare_store(keys(1, 2, 2), ctx)
    manager.on_request_finished(ctx)
    assert manager.has_pending_work()
    step(manager)
    assert tier.ended == []
    manager.complete_store(keys(1), other, success=False)
    manager.complete_store(keys(2), other)
    step(manager)
    assert [list(j.keys) for j in tier.stores if j.req_context is ctx] == [keys(2)]
    assert tier.ended == ["r"]


def test_events_of_all_tiers_come_in_order_and_once() -> None:
    class Telling(ScriptedTier):
        def take_events(self) -> Iterable[OffloadingEvent]:
            return [OffloadingEvent(keys(9), Medium.STORAGE, False, ownership=self.tier_type)]

    manager, _, _ = make(kind=Telling)
    ctx = begin(manager)
    manager.prepare_store(keys(1), ctx)
    manager.complete_store(keys(1), ctx)
    events = list(manager.take_events())
    assert [(e.medium, e.ownership) for e in events] == [
        (Medium.CPU, None),
        (Medium.STORAGE, "t0"),
        (Medium.STORAGE, "t1"),
    ]
    assert [e.ownership for e in manager.take_events()] == ["t0", "t1"]


def test_a_use_is_told_to_every_tier() -> None:
    manager, _, log = make()
    ctx = begin(manager)
    manager.prepare_store(keys(1, 2), ctx)
    manager.complete_store(keys(1, 2), ctx)
    log.clear()
    manager.touch(keys(1, 2), ctx)
    assert log == ["t0.touch2", "t1.touch2"]


def test_a_tier_with_work_of_its_own_keeps_the_engine_stepping() -> None:
    class Busy(ScriptedTier):
        def has_pending_work(self) -> bool:
            return self.tier_type == "t1"

    manager, _, _ = make(kind=Busy)
    assert manager.has_pending_work()


def test_figures_are_merged_under_public_and_own_names() -> None:
    class Counting(ScriptedTier):
        def get_stats(self) -> OffloadingConnectorStats | None:
            stats = OffloadingConnectorStats()
            stats.increase_counter("served", 7, (self.tier_type,))
            return stats

    manager, _, _ = make(kind=Counting)
    ctx = begin(manager)
    manager.lookup(key(1), ctx)
    stats = manager.get_stats()
    assert stats is not None
    figures = stats.data["data"]
    assert figures["served"] == {("t0",): 7, ("t1",): 7}
    public = "vllm:kv_offload_tiering_chunk_queries"
    own = public.replace("vllm:", "kvquay:")
    assert figures[public] == {("0:primary",): 1, ("1:t0",): 1, ("2:t1",): 1}
    assert figures[own] == figures[public]
    assert "vllm:kv_offload_cpu_cache_usage_perc" in figures
    again = manager.get_stats()
    assert again is not None
    assert public not in again.data["data"]


def test_lookups_after_the_request_was_allocated_are_not_observed() -> None:
    manager, _, _ = make(tiers=1)
    for allocated, expected in ((False, 1), (True, 0)):
        ctx = begin(manager, f"r{allocated}")
        if allocated:
            step(manager, ctx.req_id)
        manager.get_stats()
        manager.lookup(key(1), ctx)
        stats = manager.get_stats()
        assert stats is not None
        queries = stats.data["data"].get("vllm:kv_offload_tiering_chunk_queries", {})
        assert queries.get(("1:t0",), 0) == expected


def test_configuration_is_told_by_tier() -> None:
    class Configured(ScriptedTier):
        def config_info(self) -> ConfigInfoMapping:
            return {"root": "/disk"} if self.tier_type == "t1" else {}

    manager, _, _ = make(kind=Configured)
    assert manager.config_info() == [{"tier": "2:t1", "root": "/disk"}]


def test_a_reset_drains_first_and_what_it_interrupted_ends_quietly() -> None:
    manager, (tier, _), log = make()
    ctx = begin(manager)
    manager.prepare_store(keys(1, 2), ctx)
    manager.complete_store(keys(1), ctx)
    ended = begin(manager, "ended")
    manager.prepare_store(keys(3), ended)
    manager.on_request_finished(ended)
    log.clear()
    manager.reset_cache()
    assert log == ["t0.drain", "t1.drain", "t0.poll", "t1.poll"]
    assert not manager._transfer_jobs
    assert tier.ended == ["ended"]
    assert set(manager._req_state) == {"r"}
    assert manager._req_state["r"].pending_primary_stores == 0
    stores = len(tier.stores)
    manager.complete_store(keys(2), ctx)  # written before the reset was known to the worker
    assert len(tier.stores) == stores
    assert manager.primary_tier.lookup(key(2), ctx) is MISS
    manager.on_reset_flushed()
    assert manager.primary_tier.rows.num_busy == 0
    manager.on_request_finished(ctx)
    assert not manager._req_state
    assert not manager._metrics._request_states


def test_completing_an_offer_of_which_a_part_was_there_is_fine() -> None:
    manager, (tier, _), _ = make()
    ctx = begin(manager)
    manager.prepare_store(keys(1), ctx)
    manager.complete_store(keys(1), ctx)
    manager.prepare_store(keys(1, 2), ctx)
    manager.complete_store(keys(1, 2), ctx)
    assert [list(job.keys) for job in tier.stores] == [keys(1), keys(1, 2)]
    assert [manager.lookup(k, ctx) for k in keys(1, 2)] == [HIT, HIT]


@pytest.mark.parametrize("excluded", [0, 1])
def test_a_tier_can_be_left_out_of_a_lookup(excluded: int) -> None:
    manager, tiers, _ = make()
    ctx = begin(manager)
    tiers[0].chunks[key(1)] = pattern(key(1))
    answer = manager.lookup(key(1), ctx, exclude_tier_idx=excluded)
    assert answer is (MISS if excluded == 0 else PENDING)


def test_managers_can_share_one_lock() -> None:
    first, _, _ = make()
    second = TieringOffloadingManager(first.primary_tier, [], 0, lock=first.lock)
    with second.lock:
        assert not first.lock.acquire(blocking=False)
    assert second._tier_poll_thread is None
