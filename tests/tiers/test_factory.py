"""Tiers and their back-pressure from configuration, and what is said of mistakes in it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from tests.tiers.doubles import ScriptedTier
from tiers.backpressure import DropStorePolicy, EMABackpressureDetector, ThrottledDropPolicy
from tiers.base import SecondaryTierManager
from tiers.example import ExampleSecondaryTierManager
from tiers.factory import SecondaryTierFactory

VIEW = memoryview(bytearray(4 * 64)).cast("B", (4, 64))
SPEC = object()
EMA = {"backpressure_cls": "EMABackpressureDetector"}


class OpenTier(ScriptedTier):
    """Takes any argument."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **kwargs: Any
    ) -> None:
        super().__init__(primary_kv_view, tier_type)
        self.kwargs = kwargs


class PickyTier(ScriptedTier):
    """Needs an argument, and takes no detector."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, *, root: str
    ) -> None:
        super().__init__(primary_kv_view, tier_type)
        self.root = root


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecondaryTierFactory, "_registry", dict(SecondaryTierFactory._registry))


def create(**config: Any) -> SecondaryTierManager:
    return SecondaryTierFactory.create_secondary_tier(config, VIEW, SPEC)


@pytest.mark.parametrize("name", ["example", "memory"])
def test_registered_names(name: str) -> None:
    tier = create(type=name, custom_param=5)
    assert isinstance(tier, ExampleSecondaryTierManager)
    assert tier.tier_type == name
    assert tier.custom_param == 5
    assert tier._offloading_spec is SPEC
    assert tier._primary_kv_view is VIEW
    assert tier.bp_detector is None


def test_a_class_by_module_path_or_dotted_path() -> None:
    assert type(create(type="OpenTier", module_path=__name__)) is OpenTier
    assert type(create(type=f"{__name__}.OpenTier")) is OpenTier


def test_registered_classes_are_imported_when_used() -> None:
    SecondaryTierFactory.register_tier("mine", __name__, "OpenTier")
    SecondaryTierFactory.register_tier("broken", "no.such.module", "Tier")
    assert SecondaryTierFactory.get_tier_class({"type": "mine"}) is OpenTier
    with pytest.raises(ValueError, match=r"no\.such\.module"):
        SecondaryTierFactory.get_tier_class({"type": "broken"})
    with pytest.raises(ValueError, match="registered already"):
        SecondaryTierFactory.register_tier("mine", __name__, "OpenTier")


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({}, ValueError, "needs a type"),
        ({"type": "nope"}, ValueError, "'nope'.*example"),
        ({"type": "Nope", "module_path": "tiers.example"}, ValueError, "no class Nope"),
        ({"type": "logger", "module_path": "tiers.example"}, ValueError, "no class logger"),
        ({"type": "tiers.example.ExampleTierInfo"}, TypeError, "no SecondaryTierManager"),
    ],
)
def test_a_class_that_is_not_there(
    config: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        create(**config)


def test_unknown_arguments_name_the_tier_and_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"'example'.*does not know colour; .*custom_param"):
        create(type="example", colour="red")
    with pytest.raises(TypeError, match="does not know tier_type"):
        create(type="example", tier_type="other")
    with pytest.raises(TypeError, match="does not know primary_kv_view"):
        create(type=f"{__name__}.OpenTier", primary_kv_view=1)


def test_missing_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="needs root; it takes: root"):
        create(type=f"{__name__}.PickyTier")
    with pytest.raises(TypeError, match="does not work with backpressure_detector"):
        create(type=f"{__name__}.PickyTier", root="/", backpressure=EMA)


def test_open_ended_tiers_get_everything_but_what_is_the_factory_s() -> None:
    tier = create(type="OpenTier", module_path=__name__, colour="red", backpressure=None)
    assert isinstance(tier, OpenTier)
    assert tier.kwargs == {"colour": "red"}


def test_the_configuration_is_left_as_it_is() -> None:
    config = {"type": "example", "custom_param": 1, "backpressure": MappingProxyType(dict(EMA))}
    before = dict(config)
    SecondaryTierFactory.create_secondary_tier(MappingProxyType(config), VIEW, SPEC)
    assert config == before


def test_detector_gets_defaults_under_what_is_configured() -> None:
    SecondaryTierFactory.register_tier("fs", __name__, "OpenTier")
    detector = create(type="example", backpressure={**EMA, "high_water_s": 0.5}).bp_detector
    assert isinstance(detector, EMABackpressureDetector)
    assert (detector._high, detector._low, detector._failure_threshold) == (0.5, 0.002, None)
    assert isinstance(detector.policy, ThrottledDropPolicy)
    tier = create(type="fs", locality="REMOTE", backpressure=EMA)
    assert isinstance(tier, OpenTier)
    detector = tier.kwargs["backpressure_detector"]
    assert (detector._high, detector._low, detector._failure_threshold) == (0.05, 0.01, 3)
    assert tier.kwargs["locality"] == "REMOTE"


def test_policy_by_bare_or_dotted_name_with_arguments() -> None:
    detector = create(
        type="example", backpressure={**EMA, "policy_cls": "tiers.backpressure.DropStorePolicy"}
    ).bp_detector
    assert detector is not None
    assert isinstance(detector.policy, DropStorePolicy)
    throttle = {"policy_cls": "ThrottledDropPolicy", "policy_args": {"ramp_factor": 9.0}}
    detector = create(type="example", backpressure={**EMA, **throttle}).bp_detector
    assert detector is not None
    assert isinstance(detector.policy, ThrottledDropPolicy)
    assert detector.policy._ramp_factor == 9.0


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({}, ValueError, "lacks backpressure_cls"),
        (False, ValueError, "must be a mapping"),
        ({"backpressure_cls": "Nope"}, ValueError, "no class Nope"),
        ({"backpressure_cls": "DropStorePolicy"}, TypeError, "no BackpressureDetector"),
        ({**EMA, "policy_cls": "EMABackpressureDetector"}, TypeError, "no BackpressurePolicy"),
        ({**EMA, "policy_args": {"ramp_factor": 1.0}}, ValueError, "no policy_cls"),
        ({**EMA, "hi_water_s": 1.0}, TypeError, "know hi_water_s; .*high_water_s"),
    ],
)
def test_mistakes_in_backpressure(config: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        create(type="example", backpressure=config)
