"""One change at a time to a vLLM configuration, and whether the compile key must change with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BASES", "CASES", "SHARED", "Case", "section"]

SHARED: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "load_format": "fastload",
}
_DRAFT = {"method": "draft_model", "model": "{draft}", "num_speculative_tokens": 2}
_LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]}

_RANK = "parallel_config.data_parallel_rank_local"

BASES: dict[str, dict[str, Any]] = {
    "dense": {"model": "{dense}"},
    "experts": {"model": "{experts}", "tensor_parallel_size": 2},
    "draft": {"model": "{dense}", "speculative_config": _DRAFT},
    "lora": {"model": "{dense}", **_LORA},
    "vision": {"model": "{vision}", "limit_mm_per_prompt": {"image": 1}},
    "gpu": {"model": "{dense}"},
}
"""Name -> arguments; ``{name}`` is a model's directory."""


@dataclass(frozen=True, slots=True)
class Case:
    """A change.

    Attributes:
        what: for the table in docs/compile-cache.md; see `section`.
        base: what is changed.
        arguments: of the engine, instead of those of the base.
        variables: of the environment; empty means unset.
        files: that the model's directory has instead of, or besides, those of the base. A table
            is merged into the JSON that is there.
        fields: path in the `VllmConfig` -> value, for what this machine's engine would not choose.
        machine: method of `Machine` -> value, or (argument, value); see `key_worker.machine`.
        changes: whether the key must change.
        engine: whether the engine's own key changes as well; None: not compared.
    """

    what: str
    base: str = "dense"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    changes: bool = True
    engine: bool | None = True


def _both(what: str, base: str = "dense", **arguments: Any) -> Case:
    return Case(what, base, arguments)


def _ours(what: str, base: str = "dense", **arguments: Any) -> Case:
    """The engine does not count it."""
    return Case(what, base, arguments, engine=False)


def _variable(name: str, value: str) -> Case:
    return Case(f"variable `{name}`", variables={name: value})


def _machine(what: str, base: str = "dense", **answers: Any) -> Case:
    return Case(what, base, machine=answers, engine=None)


def _neither(what: str, base: str = "dense", **arguments: Any) -> Case:
    return Case(what, base, arguments, changes=False, engine=False)


def _noise(name: str, value: str) -> Case:
    what = f"`{name}={value}`" if name == "VLLM_PLUGINS" else f"`{name}`"
    return Case(what, variables={name: value}, changes=False, engine=False)


def _beside(what: str, **files: str | Mapping[str, Any]) -> Case:
    named = {name.replace("__", "."): content for name, content in files.items()}
    return Case(what, files=named, changes=False, engine=False)


_ROPE = {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}

_CHANGES = (
    _both("`max_model_len`", max_model_len=128),
    _both("`max_num_batched_tokens`", max_num_batched_tokens=1024),
    _both("`max_num_seqs`", max_num_seqs=8),
    _both("dtype", dtype="float32"),
    _both("quantization", quantization="fp8"),
    _both("tensor-parallel size", tensor_parallel_size=2),
    _both("pipeline-parallel size", pipeline_parallel_size=2),
    _both("expert parallel", "experts", enable_expert_parallel=True),
    _both("data-parallel size of a model with experts", "experts", data_parallel_size=2),
    _both("dtype of the KV cache", kv_cache_dtype="fp8"),
    _both("block of the KV cache", block_size=32),
    _both("method of drafts", "draft", speculative_config=_NGRAM),
    _ours("tokens of a draft", "draft", speculative_config=_DRAFT | {"num_speculative_tokens": 3}),
    _both("content of the draft model", "draft", speculative_config=_DRAFT | {"model": "{draft2}"}),
    _both("LoRA on", **_LORA),
    _both("largest rank of LoRA", "lora", max_lora_rank=16),
    _both("targets of LoRA", "lora", lora_target_modules=["q_proj", "k_proj"]),
    _both("adapters in a batch", "lora", max_loras=2),
    _ours("images in a prompt", "vision", limit_mm_per_prompt={"image": 2}),
    _ours("settings of the image processor", "vision", mm_processor_kwargs={"max_pixels": 1024}),
    _both("`language_model_only`", "vision", language_model_only=True),
    _both("custom operators", compilation_config={"custom_ops": ["all"]}),
    _both("compilation mode", compilation_config={"mode": 0}),
    _both("compilation backend", compilation_config={"backend": "eager"}),
    _both("compile sizes", compilation_config={"compile_sizes": [8]}),
    _both("a pass", compilation_config={"pass_config": {"eliminate_noops": False}}),
    _both(
        "a setting of Inductor",
        compilation_config={"inductor_compile_config": {"coordinate_descent_tuning": True}},
    ),
    Case("sizes of CUDA graphs", fields={"compilation_config.cudagraph_capture_sizes": [1, 2]}),
    Case("mode of CUDA graphs", fields={"compilation_config.cudagraph_mode": "PIECEWISE"}),
    _both("attention backend", attention_backend="TORCH_SDPA"),
    _both("`hf_overrides`", hf_overrides=_ROPE),
    _both("`enforce_eager`", enforce_eager=True),
    _both("pooling instead of generation", runner="pooling"),
    Case("one field of config.json", files={"config.json": {"rms_norm_eps": 1e-5}}),
    Case("one that the engine does not know", files={"config.json": {"own": 1}}),
    Case("code beside the model (`*.py`)", files={"modeling_own.py": "x = 1"}),
    _variable("VLLM_PP_LAYER_PARTITION", "1,1"),
    _variable("VLLM_USE_AOT_COMPILE", "0"),
    _variable("VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE", "0"),
    _variable("VLLM_DISABLED_KERNELS", "x"),
    _ours("`kv_sharing_fast_prefill`", kv_sharing_fast_prefill=True),
    Case("variable `ATEN_CPU_CAPABILITY`", variables={"ATEN_CPU_CAPABILITY": "avx2"}, engine=False),
    Case(
        "variable `TORCHINDUCTOR_MAX_AUTOTUNE`",
        variables={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"},
        engine=False,
    ),
    Case("rank 0 on another GPU", "gpu", fields={_RANK: 1}, engine=False),
    _machine("version of the engine", engine_version="0.32.1"),
    _machine("an edit in the engine's file of the model", engine_file="qwen3"),
    _machine("an edit in a model's file which that one imports", engine_file="qwen2"),
    _machine("a package that adds models or operators", extension=("own-models", "1.0")),
    _machine("version of torch", version=("torch", "2.13.1")),
    _machine("build of torch", torch_build=("f" * 40, None, None)),
    _machine("version of Triton", version=("triton", "3.10.0")),
    _machine("CUDA", "gpu", torch_build=("c" * 40, "12.8", None)),
    _machine("architecture of the GPU", "gpu", gpus=[("NVIDIA H100", "sm_120")]),
    _machine("GPU", "gpu", gpus=[("NVIDIA H200", "sm_90")]),
    _machine("driver of the GPU", "gpu", gpu_driver="580.1"),
    _machine("instruction sets of the CPU", text="flags : avx2 fma"),
    _machine("C library", libc="musl 1.2"),
    _machine("Python", python="CPython 3.12.1"),
)
"""Each would be another artefact, or might be."""

_SAME = (
    _neither("the model in another directory", model="{dense_elsewhere}"),
    _neither("the model in S3", model="{dense_s3}"),
    _neither("the model in another bucket", model="{dense_s3_other}"),
    _neither(
        "the draft model elsewhere",
        "draft",
        speculative_config=_DRAFT | {"model": "{draft_elsewhere}"},
    ),
    _beside(
        "where and by which release config.json was written",
        config__json={"_name_or_path": "/x", "transformers_version": "4.0.0"},
    ),
    _beside("weights", model__safetensors="other"),
    _beside("README and tokenizer", README__md="x", tokenizer_config__json={"x": 1}),
    _neither("name that is served", served_model_name="other"),
    _neither("load format", load_format="auto"),
    _neither("settings of the loader", model_loader_extra_config={"concurrency": 7}),
    _neither("place of the tokenizer", tokenizer="{draft}"),
    _neither("defaults of sampling", generation_config="{draft}"),
    _neither("seed", seed=7),
    _neither("directory for downloads", download_dir="/somewhere"),
    _neither("share of the memory", gpu_memory_utilization=0.5),
    _neither("prefix caching", enable_prefix_caching=False),
    _neither("revision of a directory", revision="main"),
    _neither("adapters of LoRA in memory", "lora", max_cpu_loras=7),
    _noise("HOSTNAME", "pod-7"),
    _noise("POD_IP", "10.0.0.7"),
    _noise("VLLM_HOST_IP", "10.0.0.7"),
    _noise("VLLM_PORT", "1234"),
    _noise("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.7"),
    _noise("VLLM_NIXL_SIDE_CHANNEL_PORT", "5601"),
    _noise("VLLM_MOONCAKE_BOOTSTRAP_PORT", "9"),
    _noise("VLLM_RAY_BUNDLE_INDICES", "0,1"),
    _noise("VLLM_RPC_BASE_PATH", "/x"),
    _noise("VLLM_PLUGINS", "fastload"),
    _noise("VLLM_PLUGINS", "a,fastload"),
    _noise("VLLM_PLUGINS", "fastload,a"),
    _noise("VLLM_LOGGING_LEVEL", "DEBUG"),
    _noise("VLLM_LOG_BATCHSIZE_INTERVAL", "9"),
    _noise("VLLM_API_KEY", "secret"),
    _noise("VLLM_ENGINE_READY_TIMEOUT_S", "999"),
    _noise("VLLM_PROCESS_NAME_PREFIX", "x"),
    _noise("VLLM_SYSTEM_START_DATE", "2026-01-01"),
    _noise("VLLM_CPU_KVCACHE_SPACE", "2"),
    _noise("VLLM_CPU_OMP_THREADS_BIND", "0-1"),
    _noise("VLLM_NIC_SELECTION_VARS", "x"),
    _noise("VLLM_USAGE_SOURCE", "x"),
    _noise("MOONCAKE_PREFERRED_SEGMENT", "10.0.0.1:7000"),
    _noise("VLLM_CACHE_ROOT", "{draft}"),
    _noise("XDG_CACHE_HOME", "{draft}"),
    _noise("HOME", "{draft}"),
    _noise("TORCHINDUCTOR_CACHE_DIR", "/x"),
    _noise("TRITON_CACHE_DIR", "/x"),
    _noise("CUDA_VISIBLE_DEVICES", "1"),
    _noise("FASTLOAD_CONCURRENCY", "7"),
    _noise("FASTLOAD_CACHE_DIR", "{draft}"),
    _noise("AWS_REGION", "eu-west-1"),
)
"""None of these decides what is compiled."""

CASES = {f"{case.base}: {case.what}": case for case in (*_CHANGES, *_SAME)}


def section() -> str:
    """The cases as docs/compile-cache.md has them, below its heading."""
    told = {True: "yes", False: "no", None: "-"}
    lines = ["| change | our key | the engine's own key |", "|---|---|---|"]
    lines += [f"| {case.what} | yes | {told[case.engine]} |" for case in _CHANGES]
    same = ", ".join(case.what for case in _SAME)
    return "\n".join([*lines, "", f"Neither key changes with: {same}.", ""])
