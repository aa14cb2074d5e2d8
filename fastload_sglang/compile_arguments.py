"""Which of SGLang's arguments decide what is compiled: facts as data.

Whatever is not listed here counts, so an argument that a later release adds makes another key and
never a wrong one. SGLang's own compilers look at the code they are given, not at arguments; so what
is left out here without need costs a miss, and nothing else.
"""

from __future__ import annotations

__all__ = [
    "CONTENT",
    "IGNORED",
    "IGNORED_NAMESPACES",
    "IGNORED_VARIABLES",
    "KEPT",
    "NAMED",
    "POOL_SIZES",
    "TABLES",
    "VARIABLES",
]

IGNORED_NAMESPACES = ("disagg", "observability", "serving")
"""Of processes that compile nothing, or of how requests come and go."""

KEPT = frozenset(
    (
        # Another role runs other passes over the model, or another part of it.
        "decoupled_spec_role",
        "disaggregation_mode",
        "enable_pdmux",
        "encoder_only",
        "language_model_only",
        "language_only",
        "sm_group_num",
        # Kernels of their own.
        "forward_hooks",
        "kv_canary",
        "kv_canary_real_data",
    )
)
"""What counts in spite of its namespace."""

NAMED: dict[str, str] = {
    "quantization": "model.quantization",
    "is_embedding": "model.task",
    "dtype": "dtype.model",
    "kv_cache_dtype": "dtype.kv_cache",
    "context_length": "limits.max_model_len",
    "chunked_prefill_size": "limits.max_num_batched_tokens",
    "max_running_requests": "limits.max_num_seqs",
    "page_size": "limits.block_size",
    "tp_size": "layout.tensor",
    "pp_size": "layout.pipeline",
    "ep_size": "layout.expert",
    "init_expert_location": "layout.expert_placement",
    "dp_size": "layout.data",
    "attn_cp_size": "layout.context",
    "enable_layernorm_sp": "layout.sequence",
    "speculative_algorithm": "speculative.method",
    "speculative_num_draft_tokens": "speculative.tokens",
    "enable_lora": "lora.enabled",
    "max_loras_per_batch": "lora.max_loras",
    "max_lora_rank": "lora.max_rank",
    "lora_target_modules": "lora.targets",
    "limit_mm_data_per_request": "multimodal.limits",
    "mm_process_config": "multimodal.processor",
    "attention_backend": "attention.backend",
    "cuda_graph_config": "compilation.graph_sizes",
    "enable_deterministic_inference": "compilation.deterministic",
}
"""Argument -> factor of its own."""

TABLES: dict[str, str] = {
    "exec.graph": "compilation.settings",
    "lora": "lora.settings",
    "mm": "multimodal.settings",
    "spec": "speculative.settings",
}
"""Namespace -> factor with the rest of it; all other namespaces are in ``engine.factors``."""

CONTENT = frozenset(
    (
        "dllm_algorithm_config",
        "init_expert_location",
        "speculative_adaptive_config",
        "speculative_dspark_confidence_sts_path",
        "speculative_dspark_sps_table_path",
        "speculative_token_map",
        "uno_lora_path",
    )
)
"""Files: what they say counts, not where they are."""

POOL_SIZES = frozenset(
    (
        "_swa_full_tokens_ratio_explicitly_set",
        "int8_mamba_ckpt_size",
        "mamba_full_memory_ratio",
        "max_mamba_cache_size",
        "max_total_tokens",
        "mem_fraction_static",
        "swa_full_tokens_ratio",
    )
)
"""Sizes of pools of memory: shapes of a graph only where the whole model is compiled."""

IGNORED = frozenset(
    (
        # device
        *("base_gpu_id", "custom_sigquit_handler", "gc_threshold", "gpu_id_step", "numa_node"),
        *("random_seed", "sleep_on_idle", "soft_watchdog_timeout", "use_ray", "watchdog_timeout"),
        # exec
        *("debug_cuda_graph", "disable_cuda_graph", "disable_outlines_disk_cache"),
        *("elastic_ep_scale_timeout", "enable_cudagraph_gc", "enable_draft_weights_cpu_backup"),
        *("enable_layerwise_nvtx_marker", "enable_memory_saver", "enable_profile_cuda_graph"),
        *(
            "enable_weights_cpu_backup",
            "ep_join_mode",
            "eplb_min_rebalancing_utilization_threshold",
        ),
        *("eplb_rebalance_layers_per_chunk", "eplb_rebalance_num_iterations"),
        *("expert_balancedness_report_mode", "expert_distribution_recorder_buffer_size"),
        *("expert_distribution_recorder_mode", "grammar_backend", "kt_weight_path"),
        *("mooncake_ib_device", "ple_offload_dir", "pre_warm_nccl", "watermark_config"),
        *("watermark_key", "watermark_key_b"),
        # Said once more, and decided, in cuda_graph_config.
        *("cuda_graph_backend_decode", "cuda_graph_backend_prefill", "cuda_graph_bs_decode"),
        *("cuda_graph_bs_prefill", "cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill"),
        *("cuda_graph_max_seq_len_prefill", "disable_decode_cuda_graph"),
        "disable_prefill_cuda_graph",
        # lora; adapters are looked into
        *("enable_lora_overlap_loading", "lora_drain_wait_threshold", "lora_eviction_policy"),
        *("lora_paths", "lora_strict_loading", "max_loaded_loras"),
        # memory
        *("_radix_eviction_policy_explicitly_set", "flexkv_config_file"),
        *("hicache_host_memory_fraction", "hicache_host_memory_mode", "hicache_ratio"),
        *("hicache_size", "hicache_storage_backend", "hicache_storage_backend_extra_config"),
        *("hicache_storage_prefetch_policy", "hicache_storage_prefetch_retry_max_attempts"),
        *("hicache_storage_prefetch_retry_poll_interval", "hicache_write_policy"),
        *("lmcache_config_file", "radix_eviction_policy", "radix_eviction_policy_config"),
        *("unified_cache_external_linker_backend", "unified_cache_external_linker_config"),
        # mm
        *("allowed_media_domains", "enable_broadcast_mm_inputs_process", "enable_mm_global_cache"),
        *("enable_prefix_mm_cache", "media_url_max_file_size_mb", "mm_feature_transport"),
        *("mm_global_cache_backend", "mm_io_worker_num", "mm_preprocess_cache_size_mb"),
        *("mm_processor_worker_num", "trust_mm_content_hashes"),
        # model; its content is a factor
        *("checkpoint_engine_wait_weights_before_ready", "custom_weight_loader"),
        *("decrypted_config_file", "decrypted_draft_config_file", "delete_ckpt_after_loading"),
        *("download_dir", "engine_info_bootstrap_port", "json_model_override_args", "load_format"),
        *("model_checksum", "model_loader_extra_config", "model_path", "modelexpress_config"),
        *("modelopt_checkpoint_restore_path", "modelopt_checkpoint_save_path"),
        *("modelopt_export_path", "quantization_param_path"),
        *(
            "remote_instance_weight_loader_backend",
            "remote_instance_weight_loader_seed_instance_ip",
        ),
        "remote_instance_weight_loader_seed_instance_service_port",
        "remote_instance_weight_loader_send_weights_group_ports",
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        *("revision", "startup_weight_load_mode", "trust_remote_code", "weight_cache_mode"),
        *("weight_cache_socket", "weight_cache_timeout", "weight_loader_disable_mmap"),
        *("weight_loader_drop_cache_after_load", "weight_loader_prefetch_checkpoints"),
        "weight_loader_prefetch_num_threads",
        # parallel; the ranks of this node are a factor
        *("dist_init_addr", "dist_timeout", "enable_p2p_check", "gated_launch_port"),
        *("load_balance_method", "nccl_port", "node_rank"),
        # schedule
        *("abort_on_priority_when_disabled", "default_priority_value"),
        *("disable_priority_preemption", "enable_prefill_delayer", "enable_priority_scheduling"),
        *("max_queued_requests", "min_free_slots_delay", "prefill_decode_interval"),
        *("prefill_decode_interval_min_bs", "prefill_delayer_forward_passes_buckets"),
        *("prefill_delayer_max_delay_ms", "prefill_delayer_max_delay_passes"),
        *("prefill_delayer_queue_min_ratio", "prefill_delayer_token_usage_low_watermark"),
        *("prefill_delayer_wait_seconds_buckets", "priority_scheduling_preemption_threshold"),
        *("retraction_policy", "schedule_conservativeness", "schedule_low_priority_values_first"),
        *("schedule_policy", "scheduler_recv_interval"),
        # spec; the draft's content is a factor
        *("spec_trace_dir", "speculative_draft_load_format", "speculative_draft_model_path"),
        *("speculative_draft_model_revision", "speculative_ngram_capacity"),
        *("speculative_ngram_external_corpus_max_tokens", "speculative_ngram_external_corpus_path"),
        "speculative_ngram_external_sam_budget",
    )
)
"""What differs from pod to pod, or changes nothing of the code."""

VARIABLES = (
    *("SGLANG_", "CUTE_", "CUTLASS_", "DG_", "FLASHINFER_", "NVCC_", "TILELANG_"),
    *("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TRITON_", "TRTLLM_", "TVM_FFI_"),
    *("ATEN_CPU_CAPABILITY", "CC", "CXX", "CFLAGS", "CXXFLAGS", "TORCH_CUDA_ARCH_LIST"),
)
"""Variables that may change what is compiled: names, and beginnings that end with ``_``."""

IGNORED_VARIABLES = (
    "SGLANG_BLOCK_NONZERO_RANK_CHILDREN",
    # How many threads a rank has is a factor, which cores they are is none.
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_FLASHINFER_AUTOTUNE_CACHE",
    # Made anew at each start.
    "SGLANG_RUN_ID",
    "SGLANG_SET_CPU_AFFINITY",
    "SGLANG_TEST_",
    "SGLANG_USE_MODELSCOPE",
)
"""Names, and beginnings of names, that do not."""
