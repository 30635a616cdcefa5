"""Who may share with whom: a digest of all that an engine's KV and its keys depend on.

vLLM's keys hold tokens, adapters' names and media, not the model, its weights, types or layouts;
engines with other ones would load each other's bytes and go wrong in silence. So everything that
vLLM has resolved is in, but for what `engine_adapter.vllm.harmless` lists.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import platform
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.config import OffloadingConfig

from broker import wire
from engine_adapter.vllm.harmless import is_harmless
from engine_adapter.vllm.weights import fingerprint

GROUP_BYTES = 4
_HASH_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
_FORGOTTEN = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Of a model's configuration: its place and who wrote it. Its commit counts with the weights."""


class SharingRefused(ValueError):
    """This engine's KV can't be told apart from others', so it may not be shared at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """`digest`: 16 bytes, equal exactly if engines may share. `described`: what it was made from,
    by dotted name. `warnings`: what an operator must know at start."""

    digest: bytes
    described: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def key_bytes(vllm_config: VllmConfig) -> int:
    """Length of a key: vLLM's block hash and the group. SharingRefused for an unknown hash."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in _HASH_BYTES:
        raise SharingRefused(
            f"--prefix-caching-hash-algo {algorithm} is unknown to kvquay; use one of "
            f"{', '.join(sorted(_HASH_BYTES))}"
        )
    return _HASH_BYTES[algorithm] + GROUP_BYTES


def engine_namespace(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, offloading: OffloadingConfig
) -> Namespace:
    """The namespace of an engine whose configuration is resolved. SharingRefused, with the field
    and what to do, where something can't be put into words that mean the same in every process."""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise SharingRefused(
            "calculate_kv_scales makes each process scale its fp8 KV in its own way, so nobody "
            "could read it; use scales from the checkpoint, or another kv-cache-dtype"
        )
    described: dict[str, Any] = {}
    _describe(vllm_config, "", described)
    described["weights"] = fingerprint(vllm_config.model_config)
    described |= _layout(vllm_config, kv_cache_config, offloading)
    seed, warnings = _hash_seed(vllm_config)
    described["hash_seed"] = seed
    return Namespace(
        digest=wire.namespace_digest(described), described=described, warnings=warnings
    )


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What keeps two engines apart, one line each."""
    absent = "(absent)"
    return [
        f"{name}: {mine.get(name, absent)!r} here, {theirs.get(name, absent)!r} there"
        for name in sorted({*mine, *theirs})
        if mine.get(name, absent) != theirs.get(name, absent)
    ]


def _layout(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, offloading: OffloadingConfig
) -> dict[str, Any]:
    """How a chunk's bytes lie in a row, and on what machine they were computed."""
    described: dict[str, Any] = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "platform": str(current_platform.device_name or current_platform.device_type),
        "machine": platform.machine(),
        "kv_dtype": offloading.model.dtype,
        "kv_layout": offloading.kv_cache_layout,
        "bytes_per_block": offloading.worker_kv_bytes_per_block,
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "world": offloading.parallel.world_size,
        "replicated": offloading.replicated_layout,
        "options": {
            name: offloading.extra_config.get(name) for name in ("weights_version", "salt")
        },
    }
    if current_platform.is_cpu():
        described["cpu"] = torch.backends.cpu.get_cpu_capability()
    elif current_platform.is_cuda_alike():
        described["capability"] = str(current_platform.get_device_capability())
    for group in offloading.groups:
        own = kv_cache_config.kv_cache_groups[group.group_id]
        where = f"group{group.group_id}"
        described[f"{where}.tokens_per_block"] = group.tokens_per_block
        described[f"{where}.layers"] = list(group.layer_names)
        described[f"{where}.kind"] = type(own.kv_cache_spec).__name__
        _describe(own.kv_cache_spec, f"{where}.spec", described)
    return described


def _hash_seed(vllm_config: VllmConfig) -> tuple[str, tuple[str, ...]]:
    """vLLM's seed of block hashes, as it will resolve it in this process."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if "xxhash" in algorithm and os.environ.get("PYTHONHASHSEED") is None:
        return os.urandom(16).hex(), (
            f"with {algorithm} and without PYTHONHASHSEED every process has keys of its own: this "
            "engine shares with nobody. Set PYTHONHASHSEED to one value on all engines, or use "
            "--prefix-caching-hash-algo sha256",
        )
    resolved = kv_cache_utils.resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    return str(resolved), ()


def _describe(value: Any, name: str, into: dict[str, Any]) -> None:
    """Every leaf of a configuration by its dotted name."""
    if name and is_harmless(name):
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        into[f"{name}()"] = type(value).__name__
        for field in dataclasses.fields(value):
            _describe(getattr(value, field.name, None), f"{name}.{field.name}".lstrip("."), into)
    elif hasattr(value, "to_dict") and hasattr(value, "model_type"):  # of transformers
        into[name] = _plain(
            {key: one for key, one in value.to_dict().items() if key not in _FORGOTTEN}, name
        )
    else:
        into[name] = _plain(value, name)


def _plain(value: Any, name: str) -> Any:
    """The value in types that mean the same in every process."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (torch.dtype, torch.device, PurePath)):
        return str(value)
    if isinstance(value, type) or callable(value):
        return _name_of(value, name)
    if isinstance(value, Mapping):
        return {str(key): _plain(one, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, Set):
        return sorted(repr(_plain(one, name)) for one in value)
    if isinstance(value, Sequence):
        return [_plain(one, f"{name}[{at}]") for at, one in enumerate(value)]
    inner: dict[str, Any] = {}
    if dataclasses.is_dataclass(value):
        _describe(value, name, inner)
        return inner
    if hasattr(value, "__dict__"):  # a quantisation's configuration, for one
        return {
            "()": type(value).__qualname__,
            **{key: _plain(one, f"{name}.{key}") for key, one in sorted(vars(value).items())},
        }
    raise SharingRefused(
        f"{name} is a {type(value).__name__}, which kvquay can't compare between engines; remove "
        "the option, or report it"
    )


def _name_of(value: Any, name: str) -> str:
    qualified = getattr(value, "__qualname__", None)
    if qualified is None or "<" in qualified:  # a lambda or a bound object: another in each process
        raise SharingRefused(
            f"{name} is {type(value).__name__} without a name of its own, which kvquay can't "
            "compare between engines; name it in a module"
        )
    return f"{value.__module__}.{qualified}"
