"""Fields of vLLM's configuration that do not part engines: of all others a difference does.

Each name is a dotted field, or a whole part of the configuration, with the reason why it can change
neither KV bytes, nor what they mean, nor which of them are written. What is not here is in the
namespace, a field of a vLLM to come too.
"""

from __future__ import annotations

_ONE_PROCESS = "names or numbers one process of a deployment"
_NETWORK = "where processes of one engine find each other"
_SPEED = "when and with what else work is done, not what is computed"
_OUTPUT = "what is made of the model's output; KV is computed before"
_WATCH = "what is logged, traced or measured"
_FOLDERS = "where files are kept; what weights they hold is told apart by content"
_STATE = "what a running engine has found out or done so far"
_SIZES = "how much room or how many requests; chunks are the same in a smaller cache"
_LOADING = "how weights reach memory; which weights they are is told apart by content"

HARMLESS: dict[str, str] = {
    "instance_id": _ONE_PROCESS,
    "shutdown_timeout": _SPEED,
    "optimization_level": "is resolved into compilation_config and kernel_config, which count",
    "performance_mode": _SPEED,
    "additional_config.kvquay": "our own options",
    "kv_transfer_config": "our own options; those that count are told apart by name",
    "kv_events_config": _WATCH,
    "observability_config": _WATCH,
    "logging_config": _WATCH,
    "profiler_config": _WATCH,
    "structured_outputs_config": _OUTPUT,
    "reasoning_config": _OUTPUT,
    "watermark_config": _OUTPUT,
    "aux_output_config": _OUTPUT,
    "weight_transfer_config": _LOADING,
    "scheduler_config": _SPEED,
    "device_config.device": _ONE_PROCESS,
    "load_config.download_dir": _FOLDERS,
    "load_config.safetensors_load_strategy": _LOADING,
    "load_config.safetensors_prefetch_num_threads": _LOADING,
    "load_config.safetensors_prefetch_block_size": _LOADING,
    "load_config.use_tqdm_on_load": _WATCH,
    "model_config.model": _FOLDERS,
    "model_config.model_weights": _FOLDERS,
    "model_config.hf_config_path": _FOLDERS,
    "model_config.tokenizer": "tokens are in the keys, however text became tokens",
    "model_config.tokenizer_mode": "tokens are in the keys, however text became tokens",
    "model_config.tokenizer_revision": "tokens are in the keys, however text became tokens",
    "model_config.skip_tokenizer_init": "tokens are in the keys, however text became tokens",
    "model_config.served_model_name": "a name for users",
    "model_config.hf_token": "a password",
    "model_config.seed": "of sampling; KV is computed before",
    "model_config.max_logprobs": _OUTPUT,
    "model_config.logprobs_mode": _OUTPUT,
    "model_config.return_sampling_mask": _OUTPUT,
    "model_config.use_fp64_gumbel": _OUTPUT,
    "model_config.generation_config": _OUTPUT,
    "model_config.override_generation_config": _OUTPUT,
    "model_config.logits_processors": _OUTPUT,
    "model_config.renderer_num_workers": _SPEED,
    "model_config.allowed_local_media_path": "which media are accepted; what they hold is in keys",
    "model_config.allowed_media_domains": "which media are accepted; what they hold is in keys",
    "model_config.enable_sleep_mode": _SPEED,
    "cache_config.gpu_memory_utilization": _SIZES,
    "cache_config.kv_cache_memory_bytes": _SIZES,
    "cache_config.num_gpu_blocks_override": _SIZES,
    "cache_config.num_gpu_blocks": _STATE,
    "cache_config.num_cpu_blocks": _STATE,
    "cache_config.kv_cache_size_tokens": _STATE,
    "cache_config.kv_cache_max_concurrency": _STATE,
    "cache_config.kv_offloading_size": _SIZES,
    "cache_config.user_specified_block_size": "who chose the block size; the size counts",
    "cache_config._block_size_resolved": _STATE,
    "cache_config.hash_block_size": "is set later in some processes; tokens_per_hash counts",
    "cache_config.cache_hit_alignment_tokens": "is set later in some processes, from the groups' "
    "block sizes, which count",
    "parallel_config.rank": _ONE_PROCESS,
    "parallel_config.node_rank": _ONE_PROCESS,
    "parallel_config.data_parallel_size": "replicas of the same model",
    "parallel_config.data_parallel_size_local": "replicas of the same model",
    "parallel_config.data_parallel_rank": _ONE_PROCESS,
    "parallel_config.data_parallel_rank_local": _ONE_PROCESS,
    "parallel_config.data_parallel_index": _ONE_PROCESS,
    "parallel_config.data_parallel_master_ip": _NETWORK,
    "parallel_config.data_parallel_rpc_port": _NETWORK,
    "parallel_config.data_parallel_master_port": _NETWORK,
    "parallel_config.data_parallel_backend": _NETWORK,
    "parallel_config.data_parallel_external_lb": _NETWORK,
    "parallel_config.data_parallel_hybrid_lb": _NETWORK,
    "parallel_config.master_addr": _NETWORK,
    "parallel_config.master_port": _NETWORK,
    "parallel_config.nnodes": _NETWORK,
    "parallel_config.distributed_executor_backend": _NETWORK,
    "parallel_config.distributed_timeout_seconds": _NETWORK,
    "parallel_config.cpu_distributed_timeout_seconds": _NETWORK,
    "parallel_config._data_parallel_master_port_list": _NETWORK,
    "parallel_config._coord_store_port": _NETWORK,
    "parallel_config._api_process_count": _ONE_PROCESS,
    "parallel_config._api_process_rank": _ONE_PROCESS,
    "parallel_config.assigned_physical_gpu_ids": _ONE_PROCESS,
    "parallel_config.numa_bind": _SPEED,
    "parallel_config.numa_bind_nodes": _SPEED,
    "parallel_config.numa_bind_cpus": _SPEED,
    "parallel_config.max_parallel_loading_workers": _LOADING,
    "parallel_config.placement_group": _NETWORK,
    "parallel_config.ray_runtime_env": _NETWORK,
    "parallel_config.ray_workers_use_nsight": _WATCH,
    "compilation_config.static_forward_context": _STATE,
    "compilation_config.static_all_moe_layers": _STATE,
    "compilation_config.traced_files": _STATE,
    "compilation_config.enabled_custom_ops": _STATE,
    "compilation_config.disabled_custom_ops": _STATE,
    "compilation_config.compilation_time": _STATE,
    "compilation_config.encoder_compilation_time": _STATE,
    "compilation_config.cache_dir": _FOLDERS,
    "compilation_config.local_cache_dir": _FOLDERS,
    "compilation_config.debug_dump_path": _WATCH,
    "compilation_config.cudagraph_capture_sizes": _SPEED,
    "compilation_config.max_cudagraph_capture_size": _SPEED,
    "compilation_config.compile_ranges_endpoints": _SPEED,
    "compilation_config.cudagraph_num_of_warmups": _SPEED,
}
"""Field or part, and why it is harmless."""


def is_harmless(name: str) -> bool:
    """Whether the dotted field, or a part that it belongs to, is listed."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in HARMLESS for end in range(1, len(parts) + 1))
