"""Figures on their way from whoever counts to whoever shows them.

`OffloadingConnectorStats` is the public container; `add_own_names` gives each public series the
project's own name too. What is counted, and when, is `tiers.metrics`; how the series are described
is `tiers.metric_definitions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final

from tiers.base import ConfigInfoMapping

PUBLIC_PREFIX: Final = "vllm:"
OWN_PREFIX: Final = "kvquay:"

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"

Number = int | float
Labels = tuple[str, ...]


def own_name(name: str) -> str:
    """The project's own name of a series with a public name; other names are returned as is."""
    if name.startswith(PUBLIC_PREFIX):
        return OWN_PREFIX + name[len(PUBLIC_PREFIX) :]
    return name


@dataclass
class OffloadingConnectorStats:
    """Counters, gauges and samples since the last hand-over. Plain data, so that it serializes.

    `data` is {"types": {name: "counter" | "gauge" | "histogram"}, "data": {name: {label values:
    number, or list of samples}}, "info": None or a list of mappings}. Series without labels use
    the empty tuple.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"types": {}, "data": {}, "info": None}

    @property
    def _types(self) -> dict[str, str]:
        types: dict[str, str] = self.data["types"]
        return types

    @property
    def _values(self) -> dict[str, dict[Labels, Any]]:
        values: dict[str, dict[Labels, Any]] = self.data["data"]
        return values

    def metric_sections(self) -> tuple[dict[str, Any], ...]:
        """The parts of `data` that are keyed by series: types, values."""
        return self._types, self._values

    def is_empty(self) -> bool:
        """Whether there is nothing to hand over."""
        return not self._values and self.data.get("info") is None

    def _series(self, name: str, kind: str) -> dict[Labels, Any]:
        known = self._types.setdefault(name, kind)
        if known != kind:
            raise ValueError(f"series {name} is a {known}, it can't be used as a {kind}")
        return self._values.setdefault(name, {})

    def increase_counter(
        self, counter_name: str, counter_increase_value: Number = 1, labelvalues: Labels = ()
    ) -> None:
        """Add to a counter; ValueError if it would fall, or is of another type."""
        if counter_increase_value < 0:
            raise ValueError(f"counter {counter_name} can't grow by {counter_increase_value}")
        series = self._series(counter_name, COUNTER)
        series[labelvalues] = series.get(labelvalues, 0) + counter_increase_value

    def set_gauge(self, gauge_name: str, gauge_value: Number, labelvalues: Labels = ()) -> None:
        """Set a gauge; ValueError if the series is of another type."""
        self._series(gauge_name, GAUGE)[labelvalues] = gauge_value

    def observe_histogram(
        self, histogram_name: str, histogram_value: Number, labelvalues: Labels = ()
    ) -> None:
        """Add one sample; ValueError if the series is of another type."""
        series = self._series(histogram_name, HISTOGRAM)
        series.setdefault(labelvalues, []).append(histogram_value)

    def set_info(self, info: Sequence[ConfigInfoMapping]) -> None:
        """Static configuration, one mapping per tier."""
        self.data["info"] = [dict(mapping) for mapping in info]

    def aggregate(self, other: OffloadingConnectorStats) -> OffloadingConnectorStats:
        """Take in newer figures; `other` stays as it is. Returns self."""
        for name, kind in other._types.items():
            series = self._series(name, kind)
            for labels, value in other._values.get(name, {}).items():
                if kind == HISTOGRAM:
                    series.setdefault(labels, []).extend(value)
                elif kind == COUNTER:
                    series[labels] = series.get(labels, 0) + value
                else:
                    series[labels] = value
        if self.data.get("info") is None:
            self.data["info"] = copy(other.data.get("info"))
        return self

    def reduce(self) -> dict[str, Number]:
        """One number per line of a log: `name`, `name:('label',)`; samples as _count and _sum."""
        reduced: dict[str, Number] = {}
        for name, series in self._values.items():
            for labels, value in series.items():
                suffix = f":{labels}" if labels else ""
                if self._types[name] == HISTOGRAM:
                    reduced[f"{name}_count{suffix}"] = len(value)
                    reduced[f"{name}_sum{suffix}"] = sum(value)
                else:
                    reduced[f"{name}{suffix}"] = value
        return reduced


def add_own_names(stats: OffloadingConnectorStats) -> OffloadingConnectorStats:
    """Give every series with a public name the project's own name too. Returns `stats`.

    The copy is independent, and replaces an earlier one: doing it again after `aggregate` is right.
    """
    types, values = stats.metric_sections()
    for name in list(values):
        own = own_name(name)
        if own != name:
            types[own] = types[name]
            values[own] = {labels: copy(value) for labels, value in values[name].items()}
    return stats
