"""Which vLLM this works with, by what it needs of it rather than by number alone.

Imports vLLM only when asked, so that a host without it can be told so.
"""

from __future__ import annotations

import importlib
import inspect
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

SUPPORTED = ("0.31", "0.32", "0.33")
COMPATIBLE: tuple[frozenset[str], ...] = ()
"""Sets of exact versions (such as 0.32.0) whose KV each other can read. A set belongs here once
engines of each have loaded what the others stored, on every platform and with equal outputs."""

_BASE = "vllm.v1.kv_offload.base"
_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
_OFFLOADING = f"{_CONNECTORS}.v1.offloading"


PACKAGES = ("torch", "transformers", "triton", "flash-attn", "flashinfer-python", "amd-aiter")
"""They decide which attention vLLM takes, and so how a page lies, where nothing is configured."""


class UnsupportedVersion(RuntimeError):
    """This vLLM lacks, or has changed, what the adapter needs."""


@dataclass(frozen=True, slots=True)
class Version:
    """A vLLM that works: its exact `number`, and of `SUPPORTED` the one that it belongs to."""

    number: str
    series: str


@dataclass(frozen=True, slots=True)
class Need:
    """A class or function, parameters that it must take by these names, in this order, and what it
    must have, or set on itself when it is made. `since`: earlier ones do without."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    since: str = SUPPORTED[0]


def _of(module: str, owner: str, **methods: str) -> list[Need]:
    return [Need(module, f"{owner}.{name}", tuple(of.split())) for name, of in methods.items()]


NEEDS: tuple[Need, ...] = (
    # What we are called by: the scheduler's side.
    *_of(
        _BASE,
        "OffloadingManager",
        lookup="key req_context",
        prepare_load="keys req_context",
        complete_load="keys req_context",
        prepare_store="keys req_context",
        complete_store="keys req_context success",
        touch="keys req_context",
        on_new_request="req_context",
        on_request_finished="req_context",
        on_schedule_end="context",
        has_pending_work="",
        take_events="",
        reset_cache="",
        get_stats="",
        shutdown="",
    ),
    Need(_BASE, "OffloadingManager.get_load_source", ("key", "req_context"), since="0.32"),
    *_of(_BASE, "OffloadingSpec", __init__="config", get_manager="", get_worker="kv_caches"),
    *_of(_BASE, "OffloadingSpec", build_metric_definitions="extra_config"),
    Need(_BASE, "LookupResult", attributes=("HIT", "HIT_PENDING", "MISS", "RETRY")),
    Need(_BASE, "RequestOffloadingContext"),
    Need(_BASE, "ReqContext", ("req_id",)),
    Need(_BASE, "PrepareStoreOutput", ("keys_to_store", "store_spec", "evicted_keys")),
    Need(_BASE, "OffloadingEvent", ("keys", "medium", "removed")),
    Need(_BASE, "ScheduleEndContext", ("new_req_ids", "preempted_req_ids")),
    Need(_BASE, "Medium"),
    Need(_BASE, "OffloadingCounterMetadata", ("documentation",)),
    Need(_BASE, "make_offload_key", ("block_hash", "group_idx")),
    Need("vllm.v1.metrics.cache_hit_source", "CacheHitSource"),
    # The worker's side.
    *_of(
        _BASE,
        "OffloadingWorker",
        submit_store="job_id src_spec dst_spec",
        submit_load="job_id src_spec dst_spec",
        get_finished="",
        wait="job_ids",
        shutdown="",
    ),
    Need(_BASE, "CanonicalKVCaches", ("tensors", "group_data_refs")),
    Need(_BASE, "CanonicalKVCacheTensor", ("tensor", "page_size_bytes")),
    Need(_BASE, "CanonicalKVCacheRef", ("tensor_idx", "page_size_bytes")),
    Need(_BASE, "GPULoadStoreSpec", ("block_ids", "group_sizes", "block_indices")),
    Need(_BASE, "BlockIDsLoadStoreSpec", ("block_ids",)),
    Need(_BASE, "TransferResult", ("job_id", "success")),
    Need("vllm.v1.kv_offload.cpu.gpu_worker", "CPUOffloadingWorker", ("kv_caches",)),
    Need("vllm.v1.kv_offload.cpu.host_register", "host_unregister"),
    # The connector.
    Need(f"{_OFFLOADING}_connector", "OffloadingConnector",
         ("vllm_config", "role", "kv_cache_config")),
    *_of(
        f"{_CONNECTORS}.v1.base",
        "KVConnectorBase_V1",
        get_transfer_results="finished_req_ids",
        get_num_new_matched_tokens="request num_computed_tokens",
        build_connector_meta="scheduler_output",
        update_connector_output="connector_output",
        build_connector_worker_meta="",
        on_new_request="request",
        shutdown="",
    ),
    Need(f"{_CONNECTORS}.v1.base", "KVConnectorTransferResults",
         ("finished_sending", "finished_recving", "failed_recving")),
    Need(f"{_OFFLOADING}.scheduler", "OffloadingConnectorScheduler",
         attributes=("config", "manager", "_req_status")),
    Need(f"{_OFFLOADING}.scheduler", "RequestGroupState",
         ("offload_keys", "block_ids", "next_stored_chunk_idx")),
    Need(f"{_OFFLOADING}.scheduler", "OffloadingConnectorScheduler.get_num_new_matched_tokens",
         ("request", "num_computed_tokens")),
    Need(f"{_OFFLOADING}.scheduler", "GroupOffloadConfig", ("group_idx", "tokens_per_block")),
    Need(f"{_OFFLOADING}.worker", "OffloadingConnectorWorker",
         attributes=("spec", "worker", "_load_jobs")),
    Need(f"{_OFFLOADING}.common", "OffloadingWorkerMetadata", ("completed_jobs", "transfer_stats")),
    Need(f"{_OFFLOADING}.metrics", "OffloadingConnectorStats.increase_counter"),
    Need(f"{_OFFLOADING}.config", "build_offloading_config", ("vllm_config", "kv_cache_config")),
    # How we are found.
    Need(f"{_CONNECTORS}.factory", "KVConnectorFactory.register_connector",
         ("name", "module_path", "class_name")),
    Need("vllm.v1.kv_offload.factory", "OffloadingSpecFactory.register_spec",
         ("name", "module_path", "class_name")),
    # The namespace.
    Need("vllm.v1.core.kv_cache_utils", "resolve_none_hash_seed", ("hash_fn",)),
    Need("vllm.v1.core.kv_cache_utils", "hash_block_tokens",
         ("hash_function", "parent_block_hash", "curr_block_token_ids", "extra_keys")),
    Need("vllm.utils.hashing", "get_hash_fn_by_name", ("hash_fn_name",)),
    Need("vllm.v1.kv_cache_interface", "KVCacheTensor",
         ("size", "layers", "layer_stride", "block_stride", "offset")),
    Need("vllm.envs", "environment_variables"),
)  # fmt: skip


def missing(needs: Sequence[Need] = NEEDS) -> list[str]:
    """What this vLLM lacks of what is needed, one line each; empty if nothing."""
    series = _series(installed() or "") or SUPPORTED[-1]
    return [
        line
        for need in needs
        if SUPPORTED.index(need.since) <= SUPPORTED.index(series)
        for line in _missing(need)
    ]


def _missing(need: Need) -> list[str]:
    where = f"{need.module}.{need.name}"
    try:
        found: Any = importlib.import_module(need.module)
        for part in need.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return [f"{where} is not there"]
    lines = []
    if need.parameters:
        names = tuple(name for name in inspect.signature(found).parameters if name != "self")
        if names[: len(need.parameters)] != need.parameters:
            lines.append(f"{where} takes {names}, not {need.parameters}")
    if need.attributes:
        made = getattr(getattr(found, "__init__", None), "__code__", None)
        set_when_made = () if made is None else made.co_names
        lines += [
            f"{where} has no {name}"
            for name in need.attributes
            if not hasattr(found, name) and name not in set_when_made
        ]
    return lines


def _series(number: str) -> str | None:
    return next((one for one in SUPPORTED if f"{number}.".startswith(f"{one}.")), None)


def installed() -> str | None:
    """The version of the vLLM here; None without one."""
    try:
        return str(importlib.import_module("vllm").__version__)
    except ImportError:
        return None


def check() -> Version:
    """The version. UnsupportedVersion, naming those that work, if this is none of them."""
    works = f"kvquay works with vLLM {', '.join(SUPPORTED)}"
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        raise UnsupportedVersion(f"it can't be imported: {error}; {works}") from error
    number = str(installed())
    series = _series(number)
    if series is None:
        raise UnsupportedVersion(f"this is vLLM {number}; {works}")
    lacking = missing()
    if lacking:
        raise UnsupportedVersion(
            f"this vLLM {number} differs from the released one ({'; '.join(lacking)}); {works}"
        )
    return Version(number=number, series=series)


def kv_family(number: str) -> str:
    """A name that is equal for versions whose KV each other can read."""
    return next((min(family) for family in COMPATIBLE if number in family), number)


def machine() -> dict[str, str | bool | None]:
    """What computes KV: two attentions may lay out the same page in two ways."""
    import torch
    from vllm.platforms import current_platform as current

    found: dict[str, str | bool | None] = {
        "vllm": kv_family(installed() or ""),
        "platform": str(current.device_type),
        "machine": platform.machine(),
    }
    for package in PACKAGES:
        try:
            found[f"package.{package}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[f"package.{package}"] = None
    if current.is_cpu():
        found["cpu"] = torch.backends.cpu.get_cpu_capability()
        found["cpu_tiles"] = bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
    elif current.is_cuda_alike():
        found["capability"] = str(current.get_device_capability())
    else:
        found["device"] = str(current.get_device_name())
    return found


def describe() -> list[str]:
    """What a check of the machine says of vLLM, one line each; never raises for a wrong one."""
    try:
        found = check()
    except UnsupportedVersion as error:
        return [f"vLLM: {error}"]
    lines = [f"vLLM {found.number}: all {len(NEEDS)} interfaces are as needed"]
    registered = any(
        point.value.startswith("engine_adapter.vllm.")
        for point in metadata.entry_points(group="vllm.general_plugins")
    )
    if not registered:
        lines.append("vLLM does not find kvquay: install it into vLLM's own environment")
    return lines


if (
    __name__ == "__main__"
):  # for `kvquay doctor`, which imports no engine: the last line is a verdict
    told = describe()
    print("\n".join(["", *told, "fit" if len(told) == 1 and "as needed" in told[0] else "unfit"]))
