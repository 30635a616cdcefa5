"""What is counted, once, under which names; and the container it travels in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.doubles import FakeClock, ScriptedTier, key, keys
from tiers.backpressure import DropStorePolicy, EMABackpressureDetector
from tiers.base import (
    JobResult,
    LookupResult,
    OffloadingHistogramMetadata,
    ReqContext,
    TransferJob,
)
from tiers.base import TieringOffloadingMetrics as M
from tiers.metrics import (
    PRIMARY_TIER_LABEL,
    OffloadingConnectorStats,
    TieringMetricsTracker,
    add_own_names,
    own_name,
    tiering_metric_definitions,
)

ROW = 4096
ONE = ("1:fs",)
TWO = ("2:p2p",)
CTX = ReqContext("r")


@dataclass
class Job:
    transfer_job: TransferJob
    tier_idx: int = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr("tiers.metrics.time.monotonic", fake)
    return fake


@pytest.fixture
def tracker(clock: FakeClock) -> TieringMetricsTracker:
    made = TieringMetricsTracker(["fs", "p2p"], 100, ROW)
    made.on_new_request(CTX)
    return made


def job(count: int, promotion: bool, tier_idx: int = 0, submit_time: float = 0.0) -> Job:
    rows = np.arange(count, dtype=np.int32)
    transfer = TransferJob(7, keys(*range(count)), rows, promotion, CTX, submit_time)
    return Job(transfer, tier_idx)


def taken(tracker: TieringMetricsTracker) -> dict[str, dict[tuple[str, ...], object]]:
    stats = tracker.take_stats()
    assert stats is not None
    values: dict[str, dict[tuple[str, ...], object]] = stats.data["data"]
    return values


def test_labels_number_the_tiers(tracker: TieringMetricsTracker) -> None:
    assert tracker.primary_tier_label == PRIMARY_TIER_LABEL == ("0:primary",)
    assert [tracker.tier_label(i) for i in range(3)] == [PRIMARY_TIER_LABEL, ONE, TWO]


def test_nothing_happened_gives_none(tracker: TieringMetricsTracker) -> None:
    assert tracker.take_stats() is None
    tracker.on_promotion_allocation_failure()
    assert taken(tracker)[M.PROMOTION_ALLOCATION_FAILURES] == {(): 1}
    assert tracker.take_stats() is None


def test_a_lookup_counts_once_per_request_tier_and_key(tracker: TieringMetricsTracker) -> None:
    for _ in range(3):
        tracker.on_lookup(CTX, key(1), PRIMARY_TIER_LABEL, LookupResult.MISS, 0.1)
        tracker.on_lookup(CTX, key(1), ONE, LookupResult.HIT, 0.2)
        tracker.on_lookup(CTX, key(2), ONE, LookupResult.MISS, 0.3)
    tracker.on_lookup(CTX, key(1), PRIMARY_TIER_LABEL, LookupResult.HIT, 0.1)  # was a miss first
    values = taken(tracker)
    assert values[M.CHUNK_QUERIES] == {PRIMARY_TIER_LABEL: 1, ONE: 2}
    assert values[M.CHUNK_HITS] == {ONE: 1}
    assert values[M.LOOKUP_SYNC_DELAY] == {PRIMARY_TIER_LABEL: [0.1], ONE: [0.2, 0.3]}
    assert M.LOOKUP_ASYNC_DELAY not in values


def test_retry_starts_a_clock_that_the_answer_stops(
    tracker: TieringMetricsTracker, clock: FakeClock
) -> None:
    tracker.on_lookup(CTX, key(1), ONE, LookupResult.RETRY, 0.1)
    clock.advance(2.0)
    tracker.on_lookup(CTX, key(1), ONE, LookupResult.RETRY, 0.1)
    clock.advance(3.0)
    tracker.on_lookup(CTX, key(1), ONE, LookupResult.HIT, 0.1)
    tracker.on_lookup(CTX, key(1), ONE, LookupResult.RETRY, 0.1)
    tracker.on_lookup(CTX, key(1), ONE, LookupResult.MISS, 0.1)
    values = taken(tracker)
    assert values[M.LOOKUP_ASYNC_DELAY] == {ONE: [5.0]}
    assert values[M.CHUNK_QUERIES] == values[M.CHUNK_HITS] == {ONE: 1}
    assert M.LOOKUP_SYNC_DELAY not in values


def test_pending_is_no_answer(tracker: TieringMetricsTracker) -> None:
    tracker.on_lookup(CTX, key(1), PRIMARY_TIER_LABEL, LookupResult.HIT_PENDING, 0.1)
    assert tracker.take_stats() is None
    tracker.on_lookup(CTX, key(1), PRIMARY_TIER_LABEL, LookupResult.HIT, 0.2)
    assert taken(tracker)[M.LOOKUP_SYNC_DELAY] == {PRIMARY_TIER_LABEL: [0.2]}


def test_lookups_after_allocation_or_of_strangers_do_not_count(
    tracker: TieringMetricsTracker,
) -> None:
    tracker.on_lookup(ReqContext("stranger"), key(1), ONE, LookupResult.HIT, 0.1)
    tracker.on_request_allocated(ReqContext("stranger"))
    tracker.on_request_allocated(CTX)
    tracker.on_new_request(CTX)
    tracker.on_lookup(CTX, key(1), ONE, LookupResult.HIT, 0.1)
    tracker.on_lookup_batch(CTX, ONE, 5, 5, 0.1)
    assert tracker.take_stats() is None
    tracker.on_request_finished(CTX)
    tracker.on_request_finished(CTX)
    tracker.on_new_request(CTX)
    tracker.on_lookup(CTX, key(1), ONE, LookupResult.HIT, 0.1)
    assert taken(tracker)[M.CHUNK_HITS] == {ONE: 1}


def test_a_batch_counts_keys_and_one_sample(tracker: TieringMetricsTracker) -> None:
    tracker.on_lookup_batch(CTX, PRIMARY_TIER_LABEL, 1000, 900, 0.5)
    tracker.on_lookup_batch(CTX, PRIMARY_TIER_LABEL, 10, 0, 0.25)
    tracker.on_lookup_batch(CTX, PRIMARY_TIER_LABEL, 0, 0, 0.25)
    values = taken(tracker)
    assert values[M.CHUNK_QUERIES] == {PRIMARY_TIER_LABEL: 1010}
    assert values[M.CHUNK_HITS] == {PRIMARY_TIER_LABEL: 900}
    assert values[M.LOOKUP_SYNC_DELAY] == {PRIMARY_TIER_LABEL: [0.5, 0.25]}


def test_jobs_in_flight_show_as_gauges(tracker: TieringMetricsTracker) -> None:
    promotion, cascade = job(20, True), job(5, False, tier_idx=1)
    tracker.on_job_registered(promotion)
    tracker.on_job_registered(cascade)
    values = taken(tracker)
    assert values[M.ACTIVE_PROMOTION_JOBS] == {ONE: 1, TWO: 0}
    assert values[M.ACTIVE_CASCADE_JOBS] == {ONE: 0, TWO: 1}
    assert values[M.PRIMARY_WRITE_USAGE_PERC] == {ONE: 0.2, TWO: 0.0}
    assert values[M.PRIMARY_READ_USAGE_PERC] == {ONE: 0.0, TWO: 0.05}
    with pytest.raises(AssertionError, match="1:fs"):
        tracker.assert_idle()
    tracker.on_job_finished(promotion, JobResult(7, True))
    with pytest.raises(AssertionError, match="2:p2p"):
        tracker.assert_idle()
    tracker.on_job_finished(cascade, JobResult(7, False))
    tracker.assert_idle()
    assert taken(tracker)[M.ACTIVE_CASCADE_JOBS] == {ONE: 0, TWO: 0}


@pytest.mark.parametrize("promotion", [True, False])
def test_a_good_job_counts_its_bytes_and_time(
    tracker: TieringMetricsTracker, promotion: bool
) -> None:
    done = job(4, promotion)
    tracker.on_job_registered(done)
    tracker.on_job_finished(done, JobResult(7, True, transfer_time=0.5, transfer_bytes=1))
    values = taken(tracker)
    names = (M.READ_BYTES, M.READ_TIME) if promotion else (M.WRITE_BYTES, M.WRITE_TIME)
    assert values[names[0]] == {ONE: 4 * ROW}
    assert values[names[1]] == {ONE: 0.5}
    assert M.PROMOTION_JOB_FAILURES not in values
    assert M.CASCADE_JOB_FAILURES not in values


def test_a_partial_promotion_counts_what_arrived_and_one_failure(
    tracker: TieringMetricsTracker,
) -> None:
    done = job(4, True)
    tracker.on_job_registered(done)
    tracker.on_job_finished(done, JobResult(7, False, keys(0, 1, 2)))
    values = taken(tracker)
    assert values[M.READ_BYTES] == {ONE: 3 * ROW}
    assert values[M.PROMOTION_JOB_FAILURES] == {ONE: 1}
    assert M.READ_TIME not in values


@pytest.mark.parametrize("promotion", [True, False])
def test_a_failed_job_moved_nothing(tracker: TieringMetricsTracker, promotion: bool) -> None:
    done = job(4, promotion)
    tracker.on_job_registered(done)
    tracker.on_job_finished(done, JobResult(7, False, transfer_time=0.5))
    values = taken(tracker)
    failures = M.PROMOTION_JOB_FAILURES if promotion else M.CASCADE_JOB_FAILURES
    assert values[failures] == {ONE: 1}
    assert not {M.READ_BYTES, M.READ_TIME, M.WRITE_BYTES, M.WRITE_TIME} & values.keys()


def test_promotion_latency_runs_from_creation_and_includes_failures(
    tracker: TieringMetricsTracker, clock: FakeClock
) -> None:
    start = clock.now
    good, bad = job(1, True, submit_time=start), job(1, True, submit_time=start)
    cascade = job(1, False, submit_time=start)
    for each in (good, bad, cascade):
        tracker.on_job_registered(each)
    clock.advance(1.0)
    tracker.on_job_finished(good, JobResult(7, True))
    tracker.on_job_finished(cascade, JobResult(7, True))
    clock.advance(1.0)
    tracker.on_job_finished(bad, JobResult(7, False))
    assert taken(tracker)[M.PROMOTION_LATENCY] == {
        ("1:fs", "success"): [1.0],
        ("1:fs", "failure"): [2.0],
    }


def test_backpressure_is_taken_from_the_detectors(tracker: TieringMetricsTracker) -> None:
    view = memoryview(bytearray(2 * ROW)).cast("B", (2, ROW))
    detector = EMABackpressureDetector(0.01, 0.002, failure_threshold=1, policy=DropStorePolicy())
    tiers = [ScriptedTier(view), ScriptedTier(view, backpressure_detector=detector)]
    detector.on_store_failed()
    assert not detector.should_store(8)
    tracker.record_backpressure(list(tiers))
    values = taken(tracker)
    assert values[M.BACKPRESSURE_STORE_LATENCY_EMA] == {TWO: pytest.approx(0.04)}
    assert values[M.BACKPRESSURE_STORES_DROPPED] == {TWO: 1}
    assert values[M.BACKPRESSURE_BLOCKS_DROPPED] == {TWO: 8}
    tracker.record_backpressure(list(tiers))
    assert M.BACKPRESSURE_STORES_DROPPED not in taken(tracker)


def test_every_public_series_has_an_own_twin(tracker: TieringMetricsTracker) -> None:
    tracker.on_lookup(CTX, key(1), ONE, LookupResult.HIT, 0.1)
    tracker.count("kvquay:rows_quarantined", 2)
    tracker.gauge("kvquay:sessions", 3, ("pool0",))
    stats = tracker.take_stats()
    assert stats is not None
    types, values = stats.data["types"], stats.data["data"]
    public = {name for name in values if name.startswith("vllm:")}
    assert public
    for name in public:
        assert values[own_name(name)] == values[name]
        assert types[own_name(name)] == types[name]
    assert values["kvquay:rows_quarantined"] == {(): 2}
    assert values["kvquay:sessions"] == {("pool0",): 3}


def test_own_series_must_be_named_so(tracker: TieringMetricsTracker) -> None:
    with pytest.raises(ValueError, match="kvquay:"):
        tracker.count("rows")
    with pytest.raises(ValueError, match="kvquay:"):
        tracker.gauge(M.CHUNK_HITS, 1)


def test_own_names_can_be_added_again_after_a_merge() -> None:
    total, other = OffloadingConnectorStats(), OffloadingConnectorStats()
    for stats in (total, other):
        stats.increase_counter("vllm:c", 2)
        stats.observe_histogram("vllm:h", 1.0)
    add_own_names(total)
    add_own_names(total.aggregate(other))
    assert total.data["data"]["kvquay:c"] == {(): 4}
    assert total.data["data"]["kvquay:h"] == {(): [1.0, 1.0]}
    total.observe_histogram("vllm:h", 2.0)
    assert total.data["data"]["kvquay:h"] == {(): [1.0, 1.0]}


def test_definitions_cover_all_that_the_tracker_emits() -> None:
    definitions = tiering_metric_definitions()
    names = {value for name, value in vars(M).items() if name.isupper()}
    assert names <= definitions.keys()
    for name, metadata in definitions.items():
        assert metadata.documentation
        assert definitions[own_name(name)] is metadata
        if isinstance(metadata, OffloadingHistogramMetadata):
            assert metadata.buckets == tuple(sorted(set(metadata.buckets or ())))
    assert definitions[M.PROMOTION_LATENCY].labelnames == ("tier", "result")
    size = definitions["vllm:kv_offload_cpu_allocation_size"]
    assert isinstance(size, OffloadingHistogramMetadata)
    assert size.buckets is not None
    assert (size.buckets[0], size.buckets[-1]) == (1, 262144)


# ---- the container -------------------------------------------------------------------------


def test_container_has_the_agreed_shape() -> None:
    stats = OffloadingConnectorStats()
    assert stats.data == {"types": {}, "data": {}, "info": None}
    assert stats.is_empty()
    stats.increase_counter("c")
    stats.increase_counter("c", 4, ("x",))
    stats.set_gauge("g", 0.5)
    stats.observe_histogram("h", 1.0)
    stats.observe_histogram("h", 2.0)
    assert stats.data == {
        "types": {"c": "counter", "g": "gauge", "h": "histogram"},
        "data": {"c": {(): 1, ("x",): 4}, "g": {(): 0.5}, "h": {(): [1.0, 2.0]}},
        "info": None,
    }
    assert not stats.is_empty()
    again = OffloadingConnectorStats(data=stats.data)
    assert again == stats
    stats.reset()
    assert stats.is_empty()
    assert not again.is_empty()


def test_reduce_names_labels_counts_and_sums() -> None:
    stats = OffloadingConnectorStats()
    stats.increase_counter("c", 3)
    stats.set_gauge("g", 1, ("1:fs",))
    stats.observe_histogram("h", 1.0, ("1:fs", "success"))
    stats.observe_histogram("h", 2.0, ("1:fs", "success"))
    assert stats.reduce() == {
        "c": 3,
        "g:('1:fs',)": 1,
        "h_count:('1:fs', 'success')": 2,
        "h_sum:('1:fs', 'success')": 3.0,
    }


def test_info_counts_and_survives_a_merge() -> None:
    stats, other = OffloadingConnectorStats(), OffloadingConnectorStats()
    other.set_info([{"tier": "0:primary", "cpu_num_chunks": 5}])
    assert not other.is_empty()
    stats.aggregate(other)
    assert stats.data["info"] == [{"tier": "0:primary", "cpu_num_chunks": 5}]
    stats.aggregate(OffloadingConnectorStats())
    assert stats.data["info"] == [{"tier": "0:primary", "cpu_num_chunks": 5}]


def test_a_series_has_one_type_and_counters_do_not_fall() -> None:
    stats, other = OffloadingConnectorStats(), OffloadingConnectorStats()
    stats.increase_counter("c")
    with pytest.raises(ValueError, match="counter"):
        stats.set_gauge("c", 1)
    other.set_gauge("c", 1)
    with pytest.raises(ValueError, match="counter"):
        stats.aggregate(other)
    with pytest.raises(ValueError, match="-1"):
        stats.increase_counter("c", -1)


SAMPLES = st.lists(
    st.tuples(st.sampled_from("cgh"), st.sampled_from([(), ("x",), ("y",)]), st.integers(0, 9)),
    max_size=30,
)


def filled(samples: list[tuple[str, tuple[str, ...], int]]) -> OffloadingConnectorStats:
    stats = OffloadingConnectorStats()
    for kind, labels, value in samples:
        if kind == "c":
            stats.increase_counter(kind, value, labels)
        elif kind == "g":
            stats.set_gauge(kind, value, labels)
        else:
            stats.observe_histogram(kind, value, labels)
    return stats


@given(SAMPLES, SAMPLES)
def test_merging_equals_counting_in_one(
    first: list[tuple[str, tuple[str, ...], int]], second: list[tuple[str, tuple[str, ...], int]]
) -> None:
    other = filled(second)
    merged = filled(first).aggregate(other)
    assert merged == filled(first + second)
    merged.observe_histogram("h", 1.0, ("x",))
    assert other == filled(second)
