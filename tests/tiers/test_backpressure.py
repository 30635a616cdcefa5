"""Detectors and policies, on a clock that the test moves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.doubles import FakeClock
from tiers.backpressure import (
    BackpressureDetector,
    DropStorePolicy,
    EMABackpressureDetector,
    ThrottledDropPolicy,
)

MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr("tiers.backpressure.time.monotonic", fake)
    return fake


def detector(**options: object) -> EMABackpressureDetector:
    arguments: dict[str, object] = {"high_water_s": 0.010, "low_water_s": 0.002, "alpha": 1.0}
    arguments |= {"warmup_completions": 0, **options}
    return EMABackpressureDetector(**arguments)  # type: ignore[arg-type]


def test_average_is_per_mib_and_weighted(clock: FakeClock) -> None:
    det = detector(alpha=0.25)
    det.store_latency_ema = 0.008
    det.on_store_completed(0.008, 2 * MIB)
    assert det.store_latency_ema == pytest.approx(0.25 * 0.004 + 0.75 * 0.008)


def test_update_measures_from_submission(clock: FakeClock) -> None:
    det = detector()
    submitted = clock.now
    clock.advance(0.5)
    det.update(submitted, MIB)
    assert det.store_latency_ema == pytest.approx(0.5)


def test_stores_of_no_bytes_say_nothing(clock: FakeClock) -> None:
    det = detector(failure_threshold=3)
    det.on_store_failed()
    det.on_store_completed(9.0, 0)
    det.on_store_completed(9.0, -1)
    assert det.stats == {"store_latency_ema": 0.0, "consecutive_store_failures": 1.0}
    assert not det.is_under_pressure()


def test_warmup_seeds_the_average_with_its_mean(clock: FakeClock) -> None:
    det = detector(warmup_completions=4, alpha=0.1)
    for sample in (1.0, 2.0, 3.0):
        det.on_store_completed(sample, MIB)
        assert not det.is_under_pressure()
    det.on_store_completed(4.0, MIB)
    assert det.store_latency_ema == pytest.approx(2.5)
    assert det.is_under_pressure()


def test_pressure_has_hysteresis(clock: FakeClock) -> None:
    det = detector()
    det.on_store_completed(0.005, MIB)
    assert not det.is_under_pressure()
    det.on_store_completed(0.011, MIB)
    assert det.is_under_pressure()
    det.on_store_completed(0.005, MIB)
    assert det.is_under_pressure()
    det.on_store_completed(0.001, MIB)
    assert not det.is_under_pressure()


def test_idle_time_halves_the_average_until_pressure_lifts(clock: FakeClock) -> None:
    det = detector(decay_half_life_s=2.0)
    det.on_store_completed(0.016, MIB)
    clock.advance(2.0)
    assert det.is_under_pressure()
    assert det.store_latency_ema == pytest.approx(0.008)
    assert det.is_under_pressure()  # asked again at the same time, nothing decays twice
    assert det.store_latency_ema == pytest.approx(0.008)
    clock.advance(4.0 + 1e-6)
    assert not det.is_under_pressure()


def test_without_pressure_nothing_decays(clock: FakeClock) -> None:
    det = detector()
    det.on_store_completed(0.005, MIB)
    clock.advance(100.0)
    assert not det.is_under_pressure()
    assert det.store_latency_ema == pytest.approx(0.005)


def test_every_second_store_is_dropped_in_the_cooldown(clock: FakeClock) -> None:
    det = detector(cooldown_s=1.0)
    det.on_store_completed(0.020, MIB)
    det.on_store_completed(0.001, MIB)
    assert [det.should_store(3) for _ in range(6)] == [True, False] * 3
    assert det.policy.pop_stores_dropped() == (3, 9)
    clock.advance(1.0)
    assert all(det.should_store(3) for _ in range(6))


def test_cooldown_follows_idle_decay_too(clock: FakeClock) -> None:
    det = detector(decay_half_life_s=0.1)
    det.on_store_completed(0.020, MIB)
    clock.advance(10.0)
    assert [det.should_store(1) for _ in range(4)] == [True, False, True, False]


def test_new_pressure_ends_the_cooldown(clock: FakeClock) -> None:
    det = detector()
    det.on_store_completed(0.020, MIB)
    det.on_store_completed(0.001, MIB)
    det.on_store_completed(0.0101, MIB)  # so little over the mark that hardly any is dropped
    assert [det.should_store(1) for _ in range(4)] == [True] * 4


def test_fast_failures_are_pressure_also_before_warmup(clock: FakeClock) -> None:
    det = detector(warmup_completions=10, failure_threshold=3)
    det.on_store_failed()
    det.on_store_failed()
    assert not det.is_under_pressure()
    det.on_store_failed()
    assert det.is_under_pressure()
    assert det.store_latency_ema == pytest.approx(0.040)


def test_a_success_starts_the_count_of_failures_anew(clock: FakeClock) -> None:
    det = detector(failure_threshold=3)
    for _ in range(5):
        det.on_store_failed()
        det.on_store_failed()
        assert not det.is_under_pressure()
        det.on_store_completed(0.001, MIB)


def test_a_failed_tier_is_tried_again_and_trips_at_the_first_new_failure(
    clock: FakeClock,
) -> None:
    det = detector(warmup_completions=10, failure_threshold=3, decay_half_life_s=2.0)
    for _ in range(3):
        det.on_store_failed()
    clock.advance(2 * math.log2(20) - 0.01)
    assert det.is_under_pressure()
    clock.advance(0.02)
    assert not det.is_under_pressure()
    assert det.should_store(1)
    det.on_store_failed()
    assert det.is_under_pressure()


def test_without_threshold_failures_are_not_pressure(clock: FakeClock) -> None:
    det = detector()
    for _ in range(100):
        det.on_store_failed()
    assert not det.is_under_pressure()
    assert det.stats["consecutive_store_failures"] == 100


def test_a_healthy_tier_is_not_left_to_the_policy(clock: FakeClock) -> None:
    class Never(DropStorePolicy):
        def should_store(self, detector: BackpressureDetector) -> bool:
            return False

    det = detector(policy=Never())
    for _ in range(9):
        det.on_store_completed(0.001, MIB)
    assert not det.is_healthy()
    assert not det.should_store(1)
    det.on_store_completed(0.001, MIB)
    assert det.is_healthy()
    assert det.should_store(1)
    det.on_store_completed(0.005, MIB)  # neither fast nor slow breaks the row
    assert not det.is_healthy()


@pytest.mark.parametrize(
    ("overshoot", "dropped"), [(0.0, 0), (0.5, 25), (1.0, 50), (2.0, 100), (9.0, 100)]
)
def test_throttle_drops_in_proportion_to_the_overshoot(
    clock: FakeClock, overshoot: float, dropped: int
) -> None:
    det = detector(high_water_s=1.0, low_water_s=0.5)
    det.on_store_completed(2.0, MIB)
    det.store_latency_ema = 1.0 + overshoot
    answers = [det.should_store(2) for _ in range(100)]
    assert answers.count(False) == dropped
    assert det.policy.pop_stores_dropped() == (dropped, 2 * dropped)
    assert det.policy.pop_stores_dropped() == (0, 0)


def test_throttle_spreads_its_drops(clock: FakeClock) -> None:
    det = detector(high_water_s=1.0, low_water_s=0.5, policy=ThrottledDropPolicy(4.0))
    det.on_store_completed(2.0, MIB)
    assert [det.should_store(1) for _ in range(8)] == [True, True, True, False] * 2
    det.store_latency_ema = 4.0  # three of four
    assert [det.should_store(1) for _ in range(8)] == [True, False, False, False] * 2


def test_throttle_lets_all_through_without_pressure(clock: FakeClock) -> None:
    det = detector(warmup_completions=10)
    det.store_latency_ema = 9.0
    assert all(det.should_store(1) for _ in range(8))


def test_throttle_without_a_mark_drops_all_and_refuses_other_detectors(clock: FakeClock) -> None:
    class Always(BackpressureDetector):
        def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
            pass

        def is_under_pressure(self) -> bool:
            return True

        def reset(self) -> None:
            pass

    det = detector(high_water_s=0.0, low_water_s=0.0)
    det.on_store_completed(1.0, MIB)
    assert not det.should_store(1)
    with pytest.raises(TypeError, match="Always"):
        Always(ThrottledDropPolicy()).should_store(1)
    assert not Always().should_store(1)
    assert Always.default_config("fs") is None
    assert Always().stats == {}


def test_reset_forgets_detector_and_policy(clock: FakeClock) -> None:
    det = detector(failure_threshold=1)
    det.on_store_failed()
    assert not det.should_store(7)
    det.reset()
    assert det.should_store(7)
    assert det.stats == {"store_latency_ema": 0.0, "consecutive_store_failures": 0.0}
    assert det.policy.pop_stores_dropped() == (0, 0)


def test_defaults_follow_distance_and_kind() -> None:
    config = EMABackpressureDetector.default_config
    assert config("example") == {"high_water_s": 0.010, "low_water_s": 0.002}
    assert config("fs")["failure_threshold"] == 3
    assert config("disk")["failure_threshold"] == 3
    assert config("obj") == {"high_water_s": 0.05, "low_water_s": 0.01, "failure_threshold": 3}
    assert config("fs", locality="REMOTE")["high_water_s"] == 0.05
    assert config("fs", locality="LOCAL")["high_water_s"] == 0.01
    assert isinstance(EMABackpressureDetector(**config("fs")).policy, ThrottledDropPolicy)


@pytest.mark.parametrize(
    "wrong",
    [
        {"low_water_s": 0.011},
        {"alpha": 0.0},
        {"alpha": 1.1},
        {"decay_half_life_s": 0.0},
        {"failure_threshold": 0},
    ],
)
def test_values_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        detector(**wrong)
    with pytest.raises(ValueError, match="ramp_factor"):
        ThrottledDropPolicy(0.0)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40))
def test_the_average_stays_between_its_samples(samples: list[float]) -> None:
    det = EMABackpressureDetector(0.01, 0.002, warmup_completions=1)
    for sample in samples:
        det.on_store_completed(sample, MIB)
        assert min(samples) - 1e-9 <= det.store_latency_ema <= max(samples) + 1e-9
