"""Secondary tiers, and their back-pressure, from configuration.

Covers names, dotted paths and the check of arguments. A default for all tiers' back-pressure is
merged into each tier's configuration by the caller.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar

from tiers.backpressure import BackpressureDetector, BackpressurePolicy
from tiers.base import SecondaryTierManager

_DEFAULT_PACKAGE: Final = "tiers.backpressure"
_GIVEN: Final = frozenset({"offloading_spec", "primary_kv_view", "tier_type"})
_NOT_ARGUMENTS: Final = frozenset({"type", "module_path", "backpressure"})

_C = TypeVar("_C")


def _load(module_path: str, class_name: str) -> type:
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        raise ValueError(f"no module {module_path} for class {class_name}: {error}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ValueError(f"module {module_path} has no class {class_name}")
    return found


def _import_class(name: str) -> type:
    """The class of that dotted path, or of that name in `tiers.backpressure`."""
    module_path, _, class_name = name.rpartition(".")
    return _load(module_path or _DEFAULT_PACKAGE, class_name)


def _subclass(found: type, base: type[_C], what: str) -> type[_C]:
    if not issubclass(found, base):
        raise TypeError(f"{what} is {found.__qualname__}, which is no {base.__name__}")
    return found


def _construct(
    what: str, cls: type[_C], given: Mapping[str, Any], arguments: Mapping[str, Any]
) -> _C:
    """`cls(**given, **arguments)`; TypeError names what `arguments` may and must hold."""
    parameters = inspect.signature(cls).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    reserved = _GIVEN | given.keys()
    ours = {
        name: p
        for name, p in parameters.items()
        if name not in reserved and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    accepted = sorted(ours.keys() - {"backpressure_detector", "policy"})
    unknown = arguments.keys() & reserved
    if not open_ended:
        unknown |= arguments.keys() - set(accepted)
    missing = {n for n, p in ours.items() if p.default is p.empty} - arguments.keys()
    refused = set() if open_ended else given.keys() - parameters.keys()
    if unknown or missing or refused:
        problems = []
        if refused:
            problems.append(f"does not work with {', '.join(sorted(refused))}")
        if unknown:
            problems.append(f"does not know {', '.join(sorted(map(str, unknown)))}")
        if missing:
            problems.append(f"needs {', '.join(sorted(missing))}")
        raise TypeError(
            f"{what} ({cls.__qualname__}) {' and '.join(problems)}; "
            f"it takes: {', '.join(accepted) or 'no arguments'}"
        )
    return cls(**given, **arguments)


def _create_detector(
    tier_type: str, config: Mapping[str, Any], locality: str | None
) -> BackpressureDetector:
    """The detector that a tier's `backpressure` dict describes.

    `policy_args` are arguments of `policy_cls`; all else goes to the detector, on top of its own
    defaults for the type of tier.
    """
    what = f"backpressure of tier {tier_type!r}"
    if not isinstance(config, Mapping):
        raise ValueError(f"{what} must be a mapping, or null for none; got {config!r}")
    arguments = dict(config)
    name = arguments.pop("backpressure_cls", None)
    if name is None:
        raise ValueError(
            f"{what} lacks backpressure_cls; name a detector, such as EMABackpressureDetector"
        )
    cls = _subclass(_import_class(name), BackpressureDetector, what)  # type: ignore[type-abstract]
    policy_name = arguments.pop("policy_cls", None)
    policy_arguments = arguments.pop("policy_args", None)
    given: dict[str, Any] = {}
    if policy_name is not None:
        policy_cls = _subclass(
            _import_class(policy_name),
            BackpressurePolicy,  # type: ignore[type-abstract]
            f"policy_cls in {what}",
        )
        given["policy"] = _construct(f"policy in {what}", policy_cls, {}, policy_arguments or {})
    elif policy_arguments:
        raise ValueError(f"{what} has policy_args but no policy_cls")
    defaults = cls.default_config(tier_type, locality=locality) or {}
    return _construct(what, cls, given, {**defaults, **arguments})


class SecondaryTierFactory:
    """Builds tiers by registered name, by class name and `module_path`, or by dotted path.

    A tier's configuration is {type, module_path?, backpressure?, ...arguments of the class}.
    """

    _registry: ClassVar[dict[str, Callable[[], type[SecondaryTierManager]]]] = {}

    @classmethod
    def register_tier(cls, tier_type: str, module_path: str, class_name: str) -> None:
        """Give a tier class a name; its module is imported when first used.

        ValueError if the name is taken.
        """
        if tier_type in cls._registry:
            raise ValueError(f"tier type {tier_type!r} is registered already")
        cls._registry[tier_type] = lambda: _load(module_path, class_name)

    @classmethod
    def get_tier_class(cls, tier_config: Mapping[str, Any]) -> type[SecondaryTierManager]:
        """The class that a configuration names; ValueError if there is none."""
        tier_type = tier_config.get("type")
        if not isinstance(tier_type, str) or not tier_type:
            raise ValueError(
                f"a secondary tier needs a type, got {tier_type!r}; known: {cls._known()}"
            )
        module_path = tier_config.get("module_path")
        found: type
        if tier_type in cls._registry:
            found = cls._registry[tier_type]()
        elif module_path is not None:
            found = _load(module_path, tier_type)
        elif "." in tier_type:
            found = _import_class(tier_type)
        else:
            raise ValueError(
                f"unknown secondary tier {tier_type!r}; known: {cls._known()}; for another class "
                "give module_path, or its dotted path as type"
            )
        base: type[SecondaryTierManager] = SecondaryTierManager  # type: ignore[type-abstract]
        return _subclass(found, base, f"tier type {tier_type!r}")

    @classmethod
    def create_secondary_tier(
        cls,
        tier_config: Mapping[str, Any],
        primary_kv_view: memoryview,
        offloading_spec: Any,
    ) -> SecondaryTierManager:
        """Build the tier; `tier_config` is left as it is.

        ValueError for a class that can't be found, TypeError for arguments it does not take.
        """
        tier_cls = cls.get_tier_class(tier_config)
        tier_type: str = tier_config["type"]
        given: dict[str, Any] = {
            "offloading_spec": offloading_spec,
            "primary_kv_view": primary_kv_view,
            "tier_type": tier_type,
        }
        backpressure = tier_config.get("backpressure")
        if backpressure is not None:
            given["backpressure_detector"] = _create_detector(
                tier_type, backpressure, tier_config.get("locality")
            )
        arguments = {k: v for k, v in tier_config.items() if k not in _NOT_ARGUMENTS}
        return _construct(f"secondary tier {tier_type!r}", tier_cls, given, arguments)

    @classmethod
    def _known(cls) -> str:
        return ", ".join(sorted(cls._registry))


for _name in ("example", "memory"):
    SecondaryTierFactory.register_tier(_name, "tiers.example", "ExampleSecondaryTierManager")
