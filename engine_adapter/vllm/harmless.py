"""Fields of vLLM's configuration that do not part engines: of all others a difference does.

Each is `Class.field` (`env.NAME` for a variable of vLLM's), with the reason why it can change
neither KV bytes, nor what they mean, nor which of them are written. Fields are listed one by one:
what is not here is in the namespace, a field of a vLLM to come too. Rounding does not count: it
differs between two batches of one engine as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ONE_PROCESS = "names or numbers one process of a deployment"
_NETWORK = "where processes find each other"
_SPEED = "when, where and with what else work is done, not what is computed"
_OUTPUT = "what is made of the model's output; KV is computed before"
_WATCH = "what is logged, traced or measured"
_FOLDERS = "where files are kept; what they hold is told apart by content"
_STATE = "what a running engine has found out or done so far"
_SIZES = "how much room or how many requests; chunks are the same in a smaller cache"
_LOADING = "how weights reach memory; which weights they are is told apart by content"
_RESOLVED = "what was asked for; what it was resolved to counts"
_LATER = (
    "is set sooner or later as vLLM has one process or more; KVCacheConfig's, and groups', count"
)
_TOKENS = "tokens are in the keys, however text became tokens"
_MEDIA = "which media are taken, and how they are fetched; what they hold is in the keys"
_FRONT = "what the API server does with requests and answers"
_SECRET = "a password"


def _each(reason: str, owner: str, names: str) -> dict[str, str]:
    return {f"{owner}.{name}": reason for name in names.split()}


HARMLESS: dict[str, str] = {
    **_each(_ONE_PROCESS, "VllmConfig", "instance_id"),
    **_each(_SPEED, "VllmConfig", "shutdown_timeout"),
    **_each("our own options", "VllmConfig", "additional_config.kvquay"),
    # ---- model ---------------------------------------------------------------------------------
    **_each(_FOLDERS, "ModelConfig", "model hf_config_path"),
    **_each(_TOKENS, "ModelConfig", "tokenizer tokenizer_mode tokenizer_revision"),
    **_each(_TOKENS, "ModelConfig", "skip_tokenizer_init"),
    **_each("a name for users", "ModelConfig", "served_model_name"),
    **_each(_SECRET, "ModelConfig", "hf_token"),
    **_each("of sampling; KV is computed before", "ModelConfig", "seed"),
    **_each(_OUTPUT, "ModelConfig", "max_logprobs logprobs_mode return_sampling_mask"),
    **_each(_OUTPUT, "ModelConfig", "use_fp64_gumbel generation_config override_generation_config"),
    **_each(_OUTPUT, "ModelConfig", "logits_processors"),
    **_each(_FRONT, "ModelConfig", "renderer_num_workers"),
    **_each(_MEDIA, "ModelConfig", "allowed_local_media_path allowed_media_domains"),
    **_each(_SIZES, "ModelConfig", "enable_sleep_mode"),
    **_each(_RESOLVED, "ModelConfig", "original_max_model_len hf_overrides"),
    # ---- weights -------------------------------------------------------------------------------
    **_each(_FOLDERS, "LoadConfig", "download_dir"),
    **_each(_LOADING, "LoadConfig", "safetensors_load_strategy safetensors_prefetch_num_threads"),
    **_each(_LOADING, "LoadConfig", "safetensors_prefetch_block_size"),
    **_each(_WATCH, "LoadConfig", "use_tqdm_on_load"),
    **_each(_LOADING, "WeightTransferConfig", "backend"),
    # ---- cache ---------------------------------------------------------------------------------
    **_each(_SIZES, "CacheConfig", "gpu_memory_utilization kv_cache_memory_bytes"),
    **_each(_SIZES, "CacheConfig", "num_gpu_blocks_override kv_offloading_size"),
    **_each(_SIZES, "CacheConfig", "simple_cpu_offload_num_blocks"),
    **_each(_STATE, "CacheConfig", "num_gpu_blocks num_cpu_blocks kv_cache_size_tokens"),
    **_each(_STATE, "CacheConfig", "kv_cache_max_concurrency _block_size_resolved"),
    **_each(_RESOLVED, "CacheConfig", "user_specified_block_size user_specified_mamba_block_size"),
    **_each(_LATER, "CacheConfig", "hash_block_size cache_hit_alignment_tokens"),
    **_each(_LATER, "CacheConfig", "effective_attention_block_size"),
    **_each(_SIZES, "KVCacheConfig", "num_blocks hisparse_host_num_blocks"),
    **_each(
        "grows with the number of blocks; how a block lies counts as `placement`",
        "KVCacheTensor",
        "size layer_stride offset",
    ),
    # ---- offloading ----------------------------------------------------------------------------
    **_each(_ONE_PROCESS, "OffloadingConfig", "engine_id"),
    **_each(_WATCH, "OffloadingConfig", "enable_kv_cache_events"),
    **_each("is KVTransferConfig's, where each option counts", "OffloadingConfig", "extra_config"),
    **_each(_FOLDERS, "OffloadingModelConfig", "name"),
    **_each(_ONE_PROCESS, "OffloadingParallelConfig", "rank data_parallel_index"),
    **_each(_ONE_PROCESS, "OffloadingParallelConfig", "data_parallel_rank_local"),
    **_each("replicas of one model", "OffloadingParallelConfig", "data_parallel_size"),
    **_each(_ONE_PROCESS, "KVTransferConfig", "engine_id kv_rank kv_parallel_size"),
    **_each(_NETWORK, "KVTransferConfig", "kv_ip kv_port"),
    **_each("who stores and who loads; not what", "KVTransferConfig", "kv_role"),
    **_each("what a failed load does to its request", "KVTransferConfig", "kv_load_failure_policy"),
    **_each("of another kind of connector", "KVTransferConfig", "kv_buffer_device kv_buffer_size"),
    **_each(_NETWORK, "KVTransferConfig", "kv_connector_extra_config.socket"),
    **_each(_RESOLVED, "KVTransferConfig", "kv_connector_extra_config.block_size"),
    **_each(_RESOLVED, "KVTransferConfig", "kv_connector_extra_config.blocks_per_chunk"),
    **_each(
        "the version of the namespace, with which an engine attaches",
        "KVTransferConfig",
        "kv_connector_extra_config.weights_version",
    ),
    **_each(
        "which code of ours; how it lays out rows counts as `row_layout`",
        "KVTransferConfig",
        "kv_connector_extra_config.spec_name",
    ),
    **_each(
        "which chunks are stored, never a part of one",
        "KVTransferConfig",
        "kv_connector_extra_config.offload_prompt_only",
    ),
    **_each(_WATCH, "KVTransferConfig", "kv_connector_extra_config.self_describing_kv_events"),
    # ---- scheduler -----------------------------------------------------------------------------
    **_each(_SIZES, "SchedulerConfig", "max_num_batched_tokens max_num_scheduled_tokens"),
    **_each(_SIZES, "SchedulerConfig", "max_num_seqs max_num_active_seqs max_num_queued_reqs"),
    **_each(_SIZES, "SchedulerConfig", "max_num_queued_tokens max_num_encoder_input_tokens"),
    **_each(_SIZES, "SchedulerConfig", "encoder_cache_size watermark scheduler_reserve_full_isl"),
    **_each(_SPEED, "SchedulerConfig", "long_prefill_token_threshold"),
    **_each(_SPEED, "SchedulerConfig", "long_prefill_token_threshold_adaptive policy"),
    **_each(_SPEED, "SchedulerConfig", "enable_chunked_prefill disable_chunked_mm_input"),
    **_each(_SPEED, "SchedulerConfig", "prefill_schedule_interval async_scheduling"),
    **_each(_FRONT, "SchedulerConfig", "stream_interval"),
    # ---- processes -----------------------------------------------------------------------------
    **_each("its type counts", "DeviceConfig", "device"),
    **_each(_ONE_PROCESS, "ParallelConfig", "rank node_rank data_parallel_rank"),
    **_each(_ONE_PROCESS, "ParallelConfig", "data_parallel_rank_local data_parallel_index"),
    **_each(_ONE_PROCESS, "ParallelConfig", "_api_process_count _api_process_rank"),
    **_each(_ONE_PROCESS, "ParallelConfig", "assigned_physical_gpu_ids"),
    **_each("replicas of one model", "ParallelConfig", "data_parallel_size"),
    **_each("replicas of one model", "ParallelConfig", "data_parallel_size_local"),
    **_each(_NETWORK, "ParallelConfig", "data_parallel_master_ip data_parallel_rpc_port"),
    **_each(_NETWORK, "ParallelConfig", "data_parallel_master_port data_parallel_backend"),
    **_each(_NETWORK, "ParallelConfig", "data_parallel_external_lb data_parallel_hybrid_lb"),
    **_each(_NETWORK, "ParallelConfig", "_data_parallel_master_port_list _coord_store_port"),
    **_each(_NETWORK, "ParallelConfig", "master_addr master_port nnodes placement_group"),
    **_each(_NETWORK, "ParallelConfig", "ray_runtime_env distributed_executor_backend"),
    **_each(_SPEED, "ParallelConfig", "distributed_timeout_seconds dp_sync_interval"),
    **_each(_SPEED, "ParallelConfig", "cpu_distributed_timeout_seconds numa_bind"),
    **_each(_SPEED, "ParallelConfig", "numa_bind_nodes numa_bind_cpus"),
    **_each(_LOADING, "ParallelConfig", "max_parallel_loading_workers"),
    **_each(_WATCH, "ParallelConfig", "ray_workers_use_nsight"),
    # ---- compilation ---------------------------------------------------------------------------
    **_each(_STATE, "CompilationConfig", "static_forward_context static_all_moe_layers"),
    **_each(_STATE, "CompilationConfig", "traced_files enabled_custom_ops disabled_custom_ops"),
    **_each(_STATE, "CompilationConfig", "compilation_time encoder_compilation_time"),
    **_each(_FOLDERS, "CompilationConfig", "cache_dir local_cache_dir"),
    **_each(_WATCH, "CompilationConfig", "debug_dump_path"),
    **_each(_SPEED, "CompilationConfig", "cudagraph_capture_sizes max_cudagraph_capture_size"),
    **_each(_SPEED, "CompilationConfig", "compile_ranges_endpoints cudagraph_num_of_warmups"),
    # ---- drafts --------------------------------------------------------------------------------
    **_each("is VllmConfig's, which counts", "SpeculativeConfig", "target_model_config"),
    **_each("is VllmConfig's, which counts", "SpeculativeConfig", "target_parallel_config"),
    # ---- output --------------------------------------------------------------------------------
    **_each(_OUTPUT, "StructuredOutputsConfig", "backend disable_any_whitespace reasoning_parser"),
    **_each(_OUTPUT, "StructuredOutputsConfig", "disable_additional_properties"),
    **_each(_OUTPUT, "StructuredOutputsConfig", "reasoning_parser_plugin enable_in_reasoning"),
    **_each(_OUTPUT, "ReasoningConfig", "reasoning_parser reasoning_start_str reasoning_end_str"),
    **_each(_OUTPUT, "ReasoningConfig", "_reasoning_start_token_ids _reasoning_end_token_ids"),
    **_each(_OUTPUT, "ReasoningConfig", "_natural_reasoning_end_token_ids _enabled"),
    **_each(_OUTPUT, "WatermarkConfig", "key algorithm alpha context_width prf"),
    **_each(_OUTPUT, "WatermarkConfig", "deduplicate_contexts deduplicate_contexts_max_history"),
    **_each(_OUTPUT, "WatermarkConfig", "allow_target_only_watermarking"),
    **_each(_OUTPUT, "AuxOutputConfig", "enable_return_routed_experts max_bytes"),
    # ---- watching ------------------------------------------------------------------------------
    **_each(_WATCH, "KVEventsConfig", "enable_kv_cache_events publisher endpoint replay_endpoint"),
    **_each(_WATCH, "KVEventsConfig", "buffer_steps hwm max_queue_size topic"),
    **_each(_WATCH, "LoggingConfig", "log_level formatter configure_logging"),
    **_each(_WATCH, "LoggingConfig", "pylogging_config_file"),
    **_each(_WATCH, "WatchdogConfig", "timeout check_interval dump_dir"),
    **_each(_WATCH, "ObservabilityConfig", "show_hidden_metrics_for_version kv_cache_metrics"),
    **_each(_WATCH, "ObservabilityConfig", "otlp_traces_endpoint collect_detailed_traces"),
    **_each(_WATCH, "ObservabilityConfig", "per_request_spec_decode_metrics cudagraph_metrics"),
    **_each(_WATCH, "ObservabilityConfig", "kv_cache_metrics_sample custom_histogram_buckets"),
    **_each(_WATCH, "ObservabilityConfig", "enable_layerwise_nvtx_tracing enable_mfu_metrics"),
    **_each(_WATCH, "ObservabilityConfig", "enable_mm_processor_stats jit_monitor_mode"),
    **_each(_WATCH, "ObservabilityConfig", "enable_logging_iteration_details"),
    **_each(_WATCH, "ObservabilityConfig", "jit_monitor_verbose"),
    **_each(_WATCH, "ProfilerConfig", "profiler torch_profiler_dir torch_profiler_activities"),
    **_each(_WATCH, "ProfilerConfig", "proton_profiler_dir proton_context proton_data"),
    **_each(_WATCH, "ProfilerConfig", "proton_backend proton_mode proton_hook"),
    **_each(_WATCH, "ProfilerConfig", "proton_output_format proton_graph_attribution"),
    **_each(_WATCH, "ProfilerConfig", "torch_profiler_with_stack torch_profiler_with_flops"),
    **_each(_WATCH, "ProfilerConfig", "torch_profiler_use_gzip torch_profiler_record_shapes"),
    **_each(_WATCH, "ProfilerConfig", "torch_profiler_dump_cuda_time_total ignore_frontend"),
    **_each(_WATCH, "ProfilerConfig", "torch_profiler_with_memory capture_torch_profiler"),
    **_each(_WATCH, "ProfilerConfig", "detailed_trace_annotation delay_iterations"),
    **_each(_WATCH, "ProfilerConfig", "max_iterations warmup_iterations active_iterations"),
    **_each(_WATCH, "ProfilerConfig", "wait_iterations"),
    # ---- variables -----------------------------------------------------------------------------
    **_each(_ONE_PROCESS, "env", "LOCAL_RANK CUDA_VISIBLE_DEVICES VLLM_DP_RANK VLLM_DP_SIZE"),
    **_each(_ONE_PROCESS, "env", "VLLM_DP_RANK_LOCAL VLLM_PROCESS_NAME_PREFIX"),
    **_each(_ONE_PROCESS, "env", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"),
    **_each(_ONE_PROCESS, "env", "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD"),
    **_each(_ONE_PROCESS, "env", "VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES"),
    **_each(_NETWORK, "env", "VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH VLLM_LOOPBACK_IP"),
    **_each(_NETWORK, "env", "VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_EC_SIDE_CHANNEL_HOST"),
    **_each(_NETWORK, "env", "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT"),
    **_each(_NETWORK, "env", "VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT"),
    **_each(_NETWORK, "env", "VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_BOOTSTRAP_PORT"),
    **_each(_NETWORK, "env", "MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME"),
    **_each(_SECRET, "env", "VLLM_API_KEY S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY"),
    **_each(_FOLDERS, "env", "VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_ASSETS_CACHE S3_ENDPOINT_URL"),
    **_each(_FOLDERS, "env", "VLLM_XLA_CACHE_PATH VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"),
    **_each(_FOLDERS, "env", "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_ASSETS_CACHE_MODEL_CLEAN"),
    **_each(_FOLDERS, "env", "CUDA_HOME LD_LIBRARY_PATH VLLM_RUST_FRONTEND_PATH"),
    **_each(_SPEED, "env", "MAX_JOBS NVCC_THREADS VLLM_TRITON_JIT_WARMUP_NUM_THREADS"),
    **_each(_SPEED, "env", "VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
    **_each(_SPEED, "env", "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"),
    **_each(_SPEED, "env", "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU"),
    **_each(_SIZES, "env", "VLLM_CPU_KVCACHE_SPACE VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS"),
    **_each(_FRONT, "env", "VLLM_SERVER_DEV_MODE VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
    **_each(_FRONT, "env", "VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_USE_RUST_FRONTEND"),
    **_each(_MEDIA, "env", "VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_MEDIA_CACHE"),
    **_each(_MEDIA, "env", "VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_CACHE_MAX_SIZE_MB"),
    **_each(_WATCH, "env", "VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK"),
    **_each(_WATCH, "env", "VLLM_USAGE_SOURCE VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH"),
    **_each(_WATCH, "env", "VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX"),
    **_each(_WATCH, "env", "VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL"),
    **_each(_WATCH, "env", "VLLM_TRACE_FUNCTION VLLM_DEBUG_LOG_API_SERVER_RESPONSE"),
    **_each(_WATCH, "env", "VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_LOG_BATCHSIZE_INTERVAL"),
    **_each(_WATCH, "env", "VLLM_DEBUG_DUMP_PATH VLLM_DISABLE_LOG_LOGO VLLM_GC_DEBUG"),
}
"""Field or variable, and why it is harmless."""

PRESENCE_IS_HARMLESS = frozenset(
    f"VllmConfig.{name}"
    for name in (
        "kv_events_config",
        "reasoning_config",
        "watermark_config",
        "watchdog_config",
        "weight_transfer_config",
    )
)
"""Parts that may be None: being there changes nothing beyond their fields, each of which counts
unless it is listed. A watermark asks for another model runner, which counts by itself."""

_PLACES = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Of a model's own configuration: where it lay and who wrote it. Its commit counts with weights."""

_LIKE_A_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(_|$)")


def is_harmless(owner: type | str, field: str) -> bool:
    """Whether this field is listed, of the class or one that it inherits from, or of `env`.

    A variable of vLLM's to come that is named like a password is left out too: a namespace is
    logged.
    """
    if isinstance(owner, str):
        like_a_secret = owner == "env" and _LIKE_A_SECRET.search(field) is not None
        return like_a_secret or f"{owner}.{field}" in HARMLESS
    return any(f"{one.__name__}.{field}" in HARMLESS for one in owner.__mro__)


def without_places(config: Any) -> Any:
    """A model's own configuration without names of places, at any level."""
    if isinstance(config, Mapping):
        return {key: without_places(one) for key, one in config.items() if key not in _PLACES}
    return [without_places(one) for one in config] if isinstance(config, list) else config
