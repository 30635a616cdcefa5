"""Which vLLM this works with, by what it needs of it rather than by number alone."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import vllm

SUPPORTED = ("0.31", "0.32", "0.33")
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"


class UnsupportedVersion(RuntimeError):
    """This vLLM lacks, or has changed, what the adapter needs."""


@dataclass(frozen=True, slots=True)
class Need:
    """A class or function, and parameters that it must take by these names, in this order."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()


NEEDS = (
    Need("vllm.v1.kv_offload.base", "OffloadingManager.lookup", ("key", "req_context")),
    Need("vllm.v1.kv_offload.base", "OffloadingManager.prepare_load", ("keys", "req_context")),
    Need("vllm.v1.kv_offload.base", "OffloadingManager.complete_load", ("keys", "req_context")),
    Need("vllm.v1.kv_offload.base", "OffloadingManager.prepare_store", ("keys", "req_context")),
    Need(
        "vllm.v1.kv_offload.base",
        "OffloadingManager.complete_store",
        ("keys", "req_context", "success"),
    ),
    Need("vllm.v1.kv_offload.base", "OffloadingManager.on_new_request", ("req_context",)),
    Need("vllm.v1.kv_offload.base", "OffloadingManager.on_request_finished", ("req_context",)),
    Need("vllm.v1.kv_offload.base", "OffloadingManager.on_schedule_end", ("context",)),
    Need("vllm.v1.kv_offload.base", "OffloadingSpec.get_manager"),
    Need("vllm.v1.kv_offload.base", "OffloadingSpec.get_worker", ("kv_caches",)),
    Need(
        "vllm.v1.kv_offload.base",
        "OffloadingWorker.submit_store",
        ("job_id", "src_spec", "dst_spec"),
    ),
    Need(
        "vllm.v1.kv_offload.base",
        "OffloadingWorker.submit_load",
        ("job_id", "src_spec", "dst_spec"),
    ),
    Need(
        "vllm.v1.kv_offload.base",
        "GPULoadStoreSpec",
        ("block_ids", "group_sizes", "block_indices"),
    ),
    Need("vllm.v1.kv_offload.base", "TransferResult", ("job_id", "success")),
    Need(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1.get_transfer_results",
        ("finished_req_ids",),
    ),
    Need(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorTransferResults",
        ("finished_sending", "finished_recving", "failed_recving"),
    ),
    Need(
        f"{_OFFLOADING}_connector",
        "OffloadingConnector",
        ("vllm_config", "role", "kv_cache_config"),
    ),
    Need(
        f"{_OFFLOADING}.scheduler",
        "OffloadingConnectorScheduler.get_num_new_matched_tokens",
        ("request", "num_computed_tokens"),
    ),
    Need(f"{_OFFLOADING}.scheduler", "GroupOffloadConfig", ("group_idx", "tokens_per_block")),
    Need(f"{_OFFLOADING}.common", "OffloadingWorkerMetadata", ("completed_jobs",)),
    Need(f"{_OFFLOADING}.config", "build_offloading_config", ("vllm_config", "kv_cache_config")),
)


def missing() -> list[str]:
    """What this vLLM lacks of what is needed, one line each; empty if nothing."""
    lacking = []
    for need in NEEDS:
        try:
            found: Any = importlib.import_module(need.module)
            for part in need.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            lacking.append(f"{need.module}.{need.name} is not there")
            continue
        names = [name for name in inspect.signature(found).parameters if name != "self"]
        if tuple(names[: len(need.parameters)]) != need.parameters:
            lacking.append(f"{need.module}.{need.name} takes {tuple(names)}, not {need.parameters}")
    return lacking


def check() -> str:
    """The version. UnsupportedVersion, naming those that work, if this is none of them."""
    version = str(vllm.__version__)
    works = f"kvquay works with vLLM {', '.join(SUPPORTED)}"
    if not version.startswith(tuple(f"{one}." for one in SUPPORTED)):
        raise UnsupportedVersion(f"this is vLLM {version}; {works}")
    lacking = missing()
    if lacking:
        raise UnsupportedVersion(
            f"this vLLM {version} differs from the released one ({'; '.join(lacking)}); {works}"
        )
    return version
