"""When a slow or failing tier is spared stores, and how many of them.

A *detector* judges one tier from the stores that ended; its *policy* decides which of the next
ones are dropped. Only stores are throttled, never lookups or loads. No thread and no lock: both
are called under the manager's lock. Building them from configuration is `tiers.factory`'s.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Final

_MIB: Final = 1 << 20


class BackpressurePolicy(ABC):
    """Which stores a tier is spared, and how many it has been spared."""

    @abstractmethod
    def should_store(self, detector: BackpressureDetector) -> bool:
        """Whether the next store may go to the tier that `detector` watches."""

    @abstractmethod
    def on_store_skipped(self, num_blocks: int) -> None:
        """A store of `num_blocks` chunks was dropped."""

    @abstractmethod
    def pop_stores_dropped(self) -> tuple[int, int]:
        """(stores, chunks) dropped since the last call, which hands them over."""

    @abstractmethod
    def reset(self) -> None:
        """Start anew."""


class DropAccountingPolicy(BackpressurePolicy):
    """Counts what was dropped; which stores are is for the subclass to say."""

    def __init__(self) -> None:
        self._stores_dropped = 0
        self._blocks_dropped = 0

    def on_store_skipped(self, num_blocks: int) -> None:
        """Count one store and its chunks."""
        self._stores_dropped += 1
        self._blocks_dropped += num_blocks

    def pop_stores_dropped(self) -> tuple[int, int]:
        """(stores, chunks) dropped since the last call."""
        dropped = self._stores_dropped, self._blocks_dropped
        self._stores_dropped = self._blocks_dropped = 0
        return dropped

    def reset(self) -> None:
        """Forget what was counted."""
        self._stores_dropped = self._blocks_dropped = 0


class DropStorePolicy(DropAccountingPolicy):
    """Drops every store while the tier is under pressure."""

    def should_store(self, detector: BackpressureDetector) -> bool:
        """True while there is no pressure."""
        return not detector.is_under_pressure()


class ThrottledDropPolicy(DropAccountingPolicy):
    """Drops a share of the stores that grows with the overshoot over the high-water mark.

    The share is 0 at the mark and 1 at (1 + ramp_factor) times the mark. Fractions add up, so that
    the drops are spread evenly. Works with `EMABackpressureDetector` only.
    """

    def __init__(self, ramp_factor: float = 2.0) -> None:
        if ramp_factor <= 0:
            raise ValueError(f"ramp_factor must be positive, got {ramp_factor}")
        super().__init__()
        self._drop_accumulator = 0.0
        self._ramp_factor = ramp_factor

    def should_store(self, detector: BackpressureDetector) -> bool:
        """Whether this store is one of those let through; TypeError for another detector."""
        if not isinstance(detector, EMABackpressureDetector):
            raise TypeError(
                f"{type(self).__name__} needs an EMABackpressureDetector, not a "
                f"{type(detector).__name__}; use DropStorePolicy with it"
            )
        if not detector.is_under_pressure():
            return True
        high = detector.high_water_s
        if high <= 0:  # no mark to measure the overshoot by
            return False
        overshoot = max(0.0, detector.store_latency_ema - high) / high
        self._drop_accumulator += min(1.0, overshoot / self._ramp_factor)
        if self._drop_accumulator < 1.0:
            return True
        self._drop_accumulator -= 1.0
        return False

    def reset(self) -> None:
        """Forget counts and the fraction that has added up."""
        super().reset()
        self._drop_accumulator = 0.0


class BackpressureDetector(ABC):
    """Judges one tier by the stores that ended. Without a policy, pressure drops every store."""

    def __init__(self, policy: BackpressurePolicy | None = None) -> None:
        self._policy = DropStorePolicy() if policy is None else policy

    @property
    def policy(self) -> BackpressurePolicy:
        """Decides which stores are dropped."""
        return self._policy

    @abstractmethod
    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """A store of `num_bytes` succeeded `elapsed_s` after its submission."""

    def on_store_failed(self) -> None:  # noqa: B027  a detector may look at latency alone
        """A store failed."""

    @abstractmethod
    def is_under_pressure(self) -> bool:
        """Whether the tier can't keep up now."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything seen."""

    def update(self, submit_time: float, num_bytes: int) -> None:
        """A store that was submitted at `submit_time` (monotonic seconds) has succeeded."""
        self.on_store_completed(time.monotonic() - submit_time, num_bytes)

    def should_store(self, num_blocks: int) -> bool:
        """Whether a store of `num_blocks` chunks may be submitted; a refusal is counted."""
        if self._policy.should_store(self):
            return True
        self._policy.on_store_skipped(num_blocks)
        return False

    @classmethod
    def default_config(
        cls, tier_type: str, *, locality: str | None = None
    ) -> dict[str, Any] | None:
        """Constructor arguments for a tier of this type that configuration leaves open."""
        return None

    @property
    def stats(self) -> dict[str, float]:
        """Figures for logs and metrics, by name."""
        return {}


class EMABackpressureDetector(BackpressureDetector):
    """Watches a moving average of store latency per MiB, and failures in a row.

    Latency runs from submission, so that time spent in the tier's own queue counts. Over
    `high_water_s` (seconds per MiB) the tier is under pressure until the average falls below
    `low_water_s`. While it is, the average halves every `decay_half_life_s` without news, so that
    a tier that gets no stores is tried again. For `cooldown_s` after that, every second store is
    dropped. `failure_threshold` failures in a row (None: never) count as pressure too, also during
    warm-up, when latency does not.
    """

    _MIB = _MIB
    DEFAULT_ALPHA = 0.15
    DEFAULT_WARMUP_COMPLETIONS = 10
    DEFAULT_DECAY_HALF_LIFE_S = 2.0
    DEFAULT_COOLDOWN_S = 1.0
    _HEALTHY_THRESHOLD = 10  # fast stores in a row after which the policy is not asked
    DEFAULT_FAILURE_THRESHOLD = 3
    _FAILURE_EMA_FACTOR = 4.0  # failures raise the average to this many times high water
    LOCAL_HIGH_WATER_S = 0.010
    LOCAL_LOW_WATER_S = 0.002
    NETWORK_HIGH_WATER_S = 0.050
    NETWORK_LOW_WATER_S = 0.010
    _NETWORK_TIER_TYPES = frozenset({"obj"})
    _STORAGE_TIER_TYPES = frozenset({"disk", "fs", "obj"})

    @classmethod
    def default_config(cls, tier_type: str, *, locality: str | None = None) -> dict[str, Any]:
        """Water marks by distance, a failure threshold for tiers that can run out of order."""
        remote = locality is not None and locality.upper() == "REMOTE"
        network = remote or tier_type in cls._NETWORK_TIER_TYPES
        config: dict[str, Any] = {
            "high_water_s": cls.NETWORK_HIGH_WATER_S if network else cls.LOCAL_HIGH_WATER_S,
            "low_water_s": cls.NETWORK_LOW_WATER_S if network else cls.LOCAL_LOW_WATER_S,
        }
        if tier_type in cls._STORAGE_TIER_TYPES:
            config["failure_threshold"] = cls.DEFAULT_FAILURE_THRESHOLD
        return config

    def __init__(
        self,
        high_water_s: float,
        low_water_s: float,
        alpha: float = DEFAULT_ALPHA,
        warmup_completions: int = DEFAULT_WARMUP_COMPLETIONS,
        decay_half_life_s: float = DEFAULT_DECAY_HALF_LIFE_S,
        cooldown_s: float = DEFAULT_COOLDOWN_S,
        failure_threshold: int | None = None,
        policy: BackpressurePolicy | None = None,
    ) -> None:
        if low_water_s > high_water_s:
            raise ValueError(f"low_water_s {low_water_s} is over high_water_s {high_water_s}")
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha must be in (0, 1], got {alpha}")
        if decay_half_life_s <= 0:
            raise ValueError(f"decay_half_life_s must be positive, got {decay_half_life_s}")
        if failure_threshold is not None and failure_threshold < 1:
            raise ValueError(f"failure_threshold must be 1 or more, got {failure_threshold}")
        super().__init__(ThrottledDropPolicy() if policy is None else policy)
        self._alpha = alpha
        self._high = high_water_s
        self._low = low_water_s
        self._warmup_completions = warmup_completions
        self._decay_half_life_s = decay_half_life_s
        self._cooldown_s = cooldown_s
        self._failure_threshold = failure_threshold
        self._clear()

    def _clear(self) -> None:
        self._ema = 0.0
        self._under_pressure = False
        self._completions = 0
        self._warmup_samples: list[float] = []
        self._last_update = time.monotonic()
        self._healthy_streak = 0
        self._pressure_cleared_at: float | None = None
        self._cooldown_count = 0
        self._consecutive_failures = 0
        self._failure_tripped = False

    @property
    def high_water_s(self) -> float:
        """Seconds per MiB over which the tier is under pressure."""
        return self._high

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """Take one sample; a store of no bytes says nothing and is passed over."""
        if num_bytes <= 0:
            return
        sample = elapsed_s / (num_bytes / self._MIB)
        self._consecutive_failures = 0
        self._completions += 1
        if self._completions <= self._warmup_completions:
            # The average is seeded once, so that a cold first store does not mark it for long.
            self._warmup_samples.append(sample)
            if self._completions < self._warmup_completions:
                return
            self._ema = sum(self._warmup_samples) / len(self._warmup_samples)
            self._warmup_samples = []
        else:
            self._ema = self._alpha * sample + (1 - self._alpha) * self._ema
        self._last_update = time.monotonic()
        if self._ema > self._high:
            self._raise_pressure()
        elif self._ema < self._low:
            self._lift_pressure(self._last_update)
            self._healthy_streak += 1
        else:
            self._healthy_streak = 0

    def on_store_failed(self) -> None:
        """Count a failure; enough of them in a row are pressure, however fast they failed."""
        self._consecutive_failures += 1
        if self._failure_threshold is None or self._consecutive_failures < self._failure_threshold:
            return
        self._ema = max(self._ema, self._FAILURE_EMA_FACTOR * self._high)
        self._last_update = time.monotonic()
        self._failure_tripped = True
        self._raise_pressure()

    def _raise_pressure(self) -> None:
        self._under_pressure = True
        self._pressure_cleared_at = None
        self._healthy_streak = 0

    def _lift_pressure(self, now: float) -> None:
        if self._under_pressure:
            self._pressure_cleared_at = now
            self._cooldown_count = 0
        self._under_pressure = False
        self._failure_tripped = False

    def _apply_idle_decay(self) -> None:
        warm = self._completions >= self._warmup_completions
        if not self._under_pressure or not (warm or self._failure_tripped):
            return
        now = time.monotonic()
        self._ema *= 0.5 ** (max(0.0, now - self._last_update) / self._decay_half_life_s)
        self._last_update = now  # what has decayed is not to decay twice
        if self._ema < self._low:
            self._lift_pressure(now)

    def is_under_pressure(self) -> bool:
        """Whether the tier can't keep up, after what decayed since the last news."""
        self._apply_idle_decay()
        return self._under_pressure

    def is_healthy(self) -> bool:
        """No pressure, and enough fast stores in a row to skip the policy."""
        return not self.is_under_pressure() and self._healthy_streak >= self._HEALTHY_THRESHOLD

    def should_store(self, num_blocks: int) -> bool:
        """All stores while healthy, every second one in the cooldown, else the policy's choice."""
        if self.is_healthy():
            return True
        if self._pressure_cleared_at is not None:
            if time.monotonic() - self._pressure_cleared_at < self._cooldown_s:
                self._cooldown_count += 1
                if self._cooldown_count % 2 == 0:
                    self._policy.on_store_skipped(num_blocks)
                    return False
            else:
                self._pressure_cleared_at = None
        return super().should_store(num_blocks)

    def reset(self) -> None:
        """Forget everything seen, the policy's part too."""
        self._clear()
        self._policy.reset()

    @property
    def store_latency_ema(self) -> float:
        """Moving average of store latency in seconds per MiB; 0 until warm."""
        return self._ema

    @store_latency_ema.setter
    def store_latency_ema(self, value: float) -> None:
        self._ema = value

    @property
    def stats(self) -> dict[str, float]:
        """The average (s/MiB) and the failures in a row."""
        return {
            "store_latency_ema": self._ema,
            "consecutive_store_failures": float(self._consecutive_failures),
        }
