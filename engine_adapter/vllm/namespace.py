"""Who may share with whom: a digest of all that an engine's KV and its keys depend on.

vLLM's keys hold tokens, adapters' names and media, not the model, its weights, types or layouts;
engines with other ones would load each other's bytes and go wrong in silence. So everything that
vLLM has resolved is in, but for what `engine_adapter.vllm.harmless` lists. Which weights a model
has, `engine_adapter.vllm.weights` knows; which adapter a request has is no matter of an engine's.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

import torch
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.config import OffloadingConfig

from broker import wire
from engine_adapter.vllm import versions
from engine_adapter.vllm.harmless import PRESENCE_IS_HARMLESS, is_harmless, without_places
from engine_adapter.vllm.weights import fingerprint

GROUP_BYTES = 4
ROW_LAYOUT = 1
"""To be raised when this adapter lays out a row in another way: rows outlive engines."""

_HASH_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
_MOST_LEVELS = 24
_COMMIT = re.compile(r"[0-9a-f]{40}")


class SharingRefused(ValueError):
    """This engine's KV can't be told apart from others', so it may not be shared at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """`digest`: 16 bytes, equal exactly if engines may share. `described`: what it was made from,
    by dotted name. `key_bytes`: length of a key. `warnings`: what an operator must know once."""

    digest: bytes
    described: Mapping[str, Any]
    key_bytes: int
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
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    offloading_config: OffloadingConfig,
) -> Namespace:
    """The namespace of an engine whose configuration is resolved, in its scheduler's process.

    The option `weights_version`, the user's name of the weights, is not in it: it is the version of
    the namespace that the engine attaches with, and that `kvquay reset` moves engines to.
    SharingRefused, with the field and what to do, where something can't be put into words that mean
    the same in every process.
    """
    is_named = offloading_config.extra_config.get("weights_version") is not None
    described: dict[str, Any] = {
        "row_layout": ROW_LAYOUT,
        "v2_model_runner": bool(getattr(vllm_config, "use_v2_model_runner", False)),
        **versions.machine(),
    }
    described["placement"] = [
        _placement(one, kv_cache_config.num_blocks) for one in kv_cache_config.kv_cache_tensors
    ]
    _describe(vllm_config, "", described)
    _describe(kv_cache_config, "kv_cache", described)
    _describe(offloading_config, "offloading", described)
    _describe_variables(described)
    warnings = _identify_weights(vllm_config, described, is_named)
    warnings += _probe_keys(vllm_config, described)
    try:
        digest = wire.namespace_digest(described)
    except ValueError as error:  # not text, or a number beyond all bounds
        raise SharingRefused(f"{error}; remove the option, or report it") from None
    return Namespace(
        digest=digest, described=described, key_bytes=key_bytes(vllm_config), warnings=warnings
    )


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What keeps two engines apart, one line each, by what `Namespace.described` says of them."""
    absent = "(absent)"
    lines = []
    for name in sorted({*mine, *theirs}):
        one, other = mine.get(name, absent), theirs.get(name, absent)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            lines += [f"{name}.{line}" for line in differences(one, other)]
        elif type(one) is not type(other) or one != other:
            lines.append(f"{name}: {one!r} here, {other!r} there")
    return lines


def _describe_variables(into: dict[str, Any]) -> None:
    """vLLM's variables as it reads them: some choose a layout, and no field tells of it."""
    for name, read in envs.environment_variables.items():
        if not is_harmless("env", name):
            into[f"env.{name}"] = _plain(read(), f"env.{name}")


def _placement(tensor: Any, blocks: int) -> dict[str, Any]:
    """Where a block's layers lie, whatever the number of blocks: distances inside a block as they
    are, those between regions of all blocks per block."""

    def per_block(distance: int) -> list[int]:
        inside = distance < tensor.block_stride
        return [0, distance] if inside else [1, *divmod(distance, max(1, blocks))]

    return {"layer": per_block(tensor.layer_stride), "offset": per_block(tensor.offset)}


def _identify_weights(
    vllm_config: VllmConfig, into: dict[str, Any], is_named: bool
) -> tuple[str, ...]:
    """Weights of the model and of a draft; a warning if nothing says which they are, nor the user
    (`is_named`)."""
    models = {"weights": vllm_config.model_config}
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None and draft is not vllm_config.model_config:
        models["draft_weights"] = draft
    warnings = []
    for name, model in models.items():
        if name == "weights" and str(vllm_config.load_config.load_format) == "dummy":
            into[name] = {"dummy": True}  # made from shapes and types alone, which count
            continue
        into[name] = known = dict(fingerprint(model))
        into[f"{name}.code"] = _code(model)
        pinned = _COMMIT.fullmatch(str(known.get("commit") or known.get("revision") or ""))
        if "files" not in known and pinned is None and not is_named:
            known["unknown"] = os.urandom(16).hex()
            warnings.append(
                f"nothing says which weights {known.get('name')} has, so this engine shares with "
                "nobody: give --revision a commit, use a local folder, or set weights_version in "
                "kv_connector_extra_config"
            )
    return tuple(warnings)


def _code(model: ModelConfig) -> str | None:
    """Over files beside the weights that decide what is computed, and are not in a configuration:
    quantisation's own, and code where it is trusted. None without a folder."""
    folder = Path(str(model.model))
    if not folder.is_dir():
        return None
    kinds = ["*quant*.json", "*.py"] if model.trust_remote_code else ["*quant*.json"]
    digest = hashlib.blake2b(digest_size=16, person=b"kvquay-code")
    for file in sorted({one for kind in kinds for one in folder.glob(kind) if one.is_file()}):
        for part in (file.name.encode(), file.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _probe_keys(vllm_config: VllmConfig, into: dict[str, Any]) -> tuple[str, ...]:
    """The key of a made-up block, as this process makes it.

    vLLM resolves its seed after it has made the connector, so get_none_hash_seed has nothing to
    tell yet; it is resolved here in the same way. A random one is told to nobody.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seeded = os.environ.get("PYTHONHASHSEED") is not None
    if "xxhash" in algorithm and not seeded:
        into["key_probe"] = os.urandom(16).hex()
        return (
            f"with {algorithm} and without PYTHONHASHSEED every process has keys of its own: this "
            "engine shares with nobody. Set PYTHONHASHSEED to one value on all engines, or use "
            "--prefix-caching-hash-algo sha256",
        )
    function = get_hash_fn_by_name(algorithm)
    parent = function(kv_cache_utils.resolve_none_hash_seed(function))
    block = kv_cache_utils.hash_block_tokens(function, parent, list(range(32)), ("kvquay", 1))
    into["key_probe"] = block.hex()
    warning = (
        "PYTHONHASHSEED is set: only engines with the same value share. Unless all have it, unset "
        "it; vLLM's sha256 needs none"
    )
    return (warning,) if seeded else ()


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Fields, and what was set beside them; not what was merely remembered of a property."""
    kind = type(value)
    names = {field.name: None for field in dataclasses.fields(value)}
    for name in (*names, *sorted(set(getattr(value, "__dict__", {})) - set(names))):
        if name in names or not isinstance(getattr(kind, name, None), functools.cached_property):
            yield name, getattr(value, name, None)


def _describe(value: Any, name: str, into: dict[str, Any], level: int = 0) -> None:
    """Every leaf of a configuration by its dotted name."""
    if level > _MOST_LEVELS:
        raise SharingRefused(f"{name} is nested more than {_MOST_LEVELS} levels deep")
    if not _is_part(value):
        into[name] = _plain(value, name)
        return
    kind = type(value)
    if not (name and f"VllmConfig.{name}" in PRESENCE_IS_HARMLESS):
        into[f"{name}()"] = kind.__name__
    for field, inner in _attributes(value):
        where = f"{name}.{field}".lstrip(".")
        if is_harmless(kind, field):
            continue
        if field == "calculate_kv_scales" and inner:
            raise SharingRefused(
                f"{where} makes each process scale its fp8 KV in its own way, so nobody could "
                "read it; use scales from the checkpoint, or another kv-cache-dtype"
            )
        if inner is None and f"{kind.__name__}.{field}" in PRESENCE_IS_HARMLESS:
            continue
        if isinstance(inner, Mapping):
            inner = {
                key: one for key, one in inner.items() if not is_harmless(kind, f"{field}.{key}")
            }
        if isinstance(inner, (list, tuple)) and inner and all(map(_is_part, inner)):
            into[f"{where}[]"] = len(inner)
            for at, one in enumerate(inner):
                _describe(one, f"{where}[{at}]", into, level + 1)
        else:
            _describe(inner, where, into, level + 1)


def _is_part(value: Any) -> bool:
    is_object = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_object and not hasattr(value, "to_dict")  # as a model's own configuration has


def _plain(value: Any, name: str, level: int = 0, *, open_objects: bool = False) -> Any:
    """The value in types that mean the same in every process. `open_objects`: what an object holds
    is all there is to it."""
    if level > _MOST_LEVELS:
        raise SharingRefused(f"{name} is nested more than {_MOST_LEVELS} levels deep")
    deeper = functools.partial(_plain, level=level + 1, open_objects=open_objects)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name or value.value}"
    if isinstance(value, float) and math.isnan(value):
        raise SharingRefused(f"{name} is not a number, which is equal to nothing; set it")
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (torch.dtype, torch.device, PurePath, Fraction)):
        return f"{type(value).__name__} {value}"
    if isinstance(value, re.Pattern):
        return ["pattern", value.pattern, value.flags]
    if isinstance(value, type):
        if value.__module__ == "__main__" or "<" in value.__qualname__:
            raise _unspeakable(value, name)
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):
        return without_places(deeper(value.to_dict(), name))
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: deeper(one, f"{name}.{key}") for key, one in value.items()}
        pairs = [[deeper(key, name), deeper(one, f"{name}.{key}")] for key, one in value.items()]
        return {"()": "pairs", "of": sorted(pairs, key=repr)}
    if isinstance(value, Set):
        return {"()": "set", "of": sorted((deeper(one, name) for one in value), key=repr)}
    if isinstance(value, Sequence):
        return [deeper(one, f"{name}[{at}]") for at, one in enumerate(value)]
    if dataclasses.is_dataclass(value):
        inner: dict[str, Any] = {}
        _describe(value, name, inner, level + 1)
        return inner
    if isinstance(value, QuantizationConfig) or (open_objects and not callable(value)):
        inside = functools.partial(_plain, level=level + 1, open_objects=True)
        if hasattr(value, "__dict__"):
            held = {key: inside(one, f"{name}.{key}") for key, one in vars(value).items()}
            return {"()": type(value).__qualname__, **held}
    raise _unspeakable(value, name)


def _unspeakable(value: Any, name: str) -> SharingRefused:
    return SharingRefused(
        f"{name} is a {type(value).__name__}, which kvquay can't compare between engines; remove "
        "the option, or report it"
    )
