"""Finding an eviction policy by the name that a configuration gives it.

Modules are imported when a policy is asked for, not before. What a policy does is its own matter.
"""

from __future__ import annotations

import importlib
from typing import ClassVar

from tiers.policies.base import CachePolicy


class CachePolicyFactory:
    """Names of policies, one register for the process."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_cache_policy(cls, name: str, module_path: str, class_name: str) -> None:
        """Make `class_name` of `module_path` known as `name`. ValueError if the name is taken."""
        if name in cls._registry:
            module, taken_by = cls._registry[name]
            raise ValueError(
                f"cache policy {name!r} is registered already, as {module}.{taken_by}; "
                "choose another name"
            )
        cls._registry[name] = (module_path, class_name)

    @classmethod
    def get_cache_policy_cls(cls, name: str, module_path: str | None = None) -> type[CachePolicy]:
        """The policy registered as `name`, the class `name` of `module_path`, or, with dots in
        it, `name` as "package.module.Class". ValueError if there is none or it is no policy.
        """
        if name in cls._registry:
            module_path, class_name = cls._registry[name]
        elif module_path is not None:
            class_name = name
        elif "." in name:
            module_path, _, class_name = name.rpartition(".")
        else:
            raise ValueError(
                f"unknown cache policy {name!r}: known are {cls._known()}; for another one give "
                "its module path too, or its full name as package.module.Class"
            )
        try:
            policy = getattr(importlib.import_module(module_path), class_name)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise ValueError(
                f"cannot load cache policy {name!r} as {class_name!r} of module {module_path!r}: "
                f"{error}; check the module path (registered policies: {cls._known()})"
            ) from error
        if not (isinstance(policy, type) and issubclass(policy, CachePolicy)):
            raise ValueError(
                f"{module_path}.{class_name} is {policy!r}, not a subclass of "
                f"tiers.policies.base.CachePolicy (registered policies: {cls._known()})"
            )
        return policy

    @classmethod
    def _known(cls) -> str:
        return ", ".join(sorted(cls._registry))


CachePolicyFactory.register_cache_policy("lru", "tiers.policies.lru", "LRUCachePolicy")
CachePolicyFactory.register_cache_policy("arc", "tiers.policies.arc", "ARCCachePolicy")
