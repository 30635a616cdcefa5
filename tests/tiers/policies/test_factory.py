"""Policies by name, by module path and by full name."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tiers.policies.arc import ARCCachePolicy
from tiers.policies.factory import CachePolicyFactory
from tiers.policies.lru import LRUCachePolicy


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> str:
    """Module path of a third party's policies."""
    module = ModuleType("a_plugin")
    vars(module).update(Mine=type("Mine", (LRUCachePolicy,), {}), Foreign=int, value=3)
    monkeypatch.setitem(sys.modules, "a_plugin", module)
    return "a_plugin"


def test_registered_names() -> None:
    assert CachePolicyFactory.get_cache_policy_cls("lru") is LRUCachePolicy
    assert CachePolicyFactory.get_cache_policy_cls("arc") is ARCCachePolicy


def test_other_names_are_classes_of_the_module(plugin: str) -> None:
    assert CachePolicyFactory.get_cache_policy_cls("Mine", plugin).__name__ == "Mine"


def test_a_full_name_needs_no_module_path(plugin: str) -> None:
    assert CachePolicyFactory.get_cache_policy_cls(f"{plugin}.Mine").__name__ == "Mine"


def test_a_policy_can_be_registered_once(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachePolicyFactory, "_registry", dict(CachePolicyFactory._registry))
    CachePolicyFactory.register_cache_policy("mine", plugin, "Mine")
    assert CachePolicyFactory.get_cache_policy_cls("mine").__name__ == "Mine"
    with pytest.raises(ValueError, match=r"registered already, as a_plugin\.Mine"):
        CachePolicyFactory.register_cache_policy("mine", plugin, "Other")


def test_an_unknown_name_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown cache policy 'fifo': known are arc, lru"):
        CachePolicyFactory.get_cache_policy_cls("fifo")


@pytest.mark.parametrize(
    ("name", "module_path"),
    [
        ("Absent", "a_plugin"),
        ("a_plugin.Absent", None),
        ("Mine", "no_such_module_anywhere"),
        (".Mine", None),
        ("Mine", ""),
    ],
)
def test_what_cannot_be_loaded_is_named(plugin: str, name: str, module_path: str | None) -> None:
    with pytest.raises(ValueError, match=r"cannot load cache policy.*arc, lru"):
        CachePolicyFactory.get_cache_policy_cls(name, module_path)


@pytest.mark.parametrize("name", ["Foreign", "value"])
def test_what_is_no_policy_is_refused(plugin: str, name: str) -> None:
    with pytest.raises(ValueError, match="not a subclass of"):
        CachePolicyFactory.get_cache_policy_cls(name, plugin)
