"""What decides the compiled artefacts of a vLLM configuration; see `fastload cache key`."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastload_common.compile_cache.content import decides_code, model_content_of
from fastload_common.compile_cache.key import canonical
from fastload_common.compile_cache.machine import machine_factors
from fastload_common.config import environment
from fastload_common.engine.compile_source import extensions_of, source_digest
from fastload_common.engine.compile_values import fields_of, plain, without_noise
from fastload_common.errors import FactorsInvalidError, FastloadError
from fastload_vllm import compat

__all__ = [
    "content_of",
    "factors_of",
    "is_recording",
    "model_identity",
    "recorded",
    "recording",
    "without_model_noise",
    "without_variable_noise",
]

_rows = threading.local()

_SPECULATIVE = (
    "enforce_eager",
    "disable_padded_drafter_batch",
    "parallel_drafting",
    "draft_tensor_parallel_size",
    "quantization",
    "speculative_token_tree",
    "use_heterogeneous_vocab",
)
_LORA = (
    "fully_sharded_loras",
    "enable_tower_connector_lora",
    "specialize_active_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
    "max_lora_cls_labels",
)
_MULTIMODAL = ("language_model_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend")
_COMPILATION = ("mode", "backend", "custom_ops", "splitting_ops", "compile_sizes", "pass_config")
_NO_CODE = {"generation_config": "", "override_generation_config": (), "max_logprobs": 0}
"""Of sampling, behind what is compiled; the engine counts them, some of them by their place."""
_CONTEXT = ("prefill_context_parallel_size", "decode_context_parallel_size")
_PARTITION = "VLLM_PP_LAYER_PARTITION"
_COMPILERS = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_", "ATEN_CPU_CAPABILITY")
_OF_NO_CODE = frozenset(
    (
        "MOONCAKE_PREFERRED_SEGMENT",
        "VERBOSE",
        "VLLM_BUILD_COMMIT",
        # The number of threads is not in the code, see `_OF_THE_CPU`.
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        "VLLM_IMAGE_TAG",
        "VLLM_LORA_RESOLVER_HF_REPO_LIST",
        "VLLM_MAX_STOP_STRINGS",
        "VLLM_NIC_SELECTION_VARS",
        "VLLM_USAGE_SOURCE",
        "VLLM_XGRAMMAR_CACHE_MB",
    )
)
"""Variables that the engine counts although they decide nothing of what is compiled."""
_NO_CODE_WORDS = frozenset({"CACHE", "DEBUG", "THREADS", "TRACE", "PROGRESS", "PRINT"})
_OF_THE_CPU = frozenset({"TORCHINDUCTOR_CPP_DYNAMIC_THREADS"})
_EXPERTS = ("enable_eplb", "eplb_config", "expert_placement_strategy", "all2all_backend")


def factors_of(config: Any) -> dict[str, Any]:
    """All factors of a `VllmConfig`, as `check_factors` wants them.

    Raises:
        FastloadError: the model's configuration cannot be read.
    """
    return {
        **_of_engine(config),
        **_of_model(config.model_config),
        **_of_limits(config),
        **_of_layout(config.parallel_config),
        **_of_compilation(config),
        **_of_speculation(config.speculative_config),
        **_of_lora(config.lora_config),
        **_of_multimodal(getattr(config.model_config, "multimodal_config", None)),
    }


def _of_engine(config: Any) -> dict[str, Any]:
    kind = _kind()
    environ = environment()
    return {
        **machine_factors(kind="rocm" if kind == "cuda" and _is_rocm() else kind),
        "engine.name": compat.ENGINE.package,
        "engine.version": compat.engine_version(),
        "engine.source": _source_digest(getattr(config.model_config, "architectures", ())),
        "engine.extensions": extensions_of(
            compat.PLUGIN_GROUPS, compat.DISTRIBUTIONS, environ.get("VLLM_PLUGINS")
        ),
        "engine.factors": _own_factors(config),
        "engine.variables": _variables_of_compilers(environ),
    }


def _of_model(model: Any) -> dict[str, Any]:
    return {
        "model.content": content_of(str(model.model)) or _content_by_name(model),
        "model.overrides": {"hf_overrides": plain(getattr(model, "hf_overrides", None))},
        "model.quantization": plain(model.quantization),
        "model.task": plain(model.runner_type),
        "dtype.model": str(model.dtype),
    }


def _of_limits(config: Any) -> dict[str, Any]:
    return {
        "dtype.kv_cache": plain(config.cache_config.cache_dtype),
        "limits.max_model_len": config.model_config.max_model_len,
        "limits.max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "limits.max_num_seqs": config.scheduler_config.max_num_seqs,
        "limits.block_size": plain(config.cache_config.block_size),
    }


def _of_layout(parallel: Any) -> dict[str, Any]:
    return {
        "layout.tensor": parallel.tensor_parallel_size,
        "layout.pipeline": parallel.pipeline_parallel_size,
        "layout.pipeline_partition": environment().get(_PARTITION) or None,
        "layout.expert": bool(parallel.enable_expert_parallel),
        "layout.expert_placement": fields_of(parallel, _EXPERTS),
        "layout.data": parallel.data_parallel_size,
        "layout.context": fields_of(parallel, _CONTEXT),
        "layout.ranks": _ranks(parallel),
        "layout.devices": None if _kind() == "cpu" else _devices(parallel),
    }


def _of_compilation(config: Any) -> dict[str, Any]:
    compilation = config.compilation_config
    _refuse_frozen(compilation.inductor_compile_config)
    return {
        "attention.backend": plain(getattr(config.attention_config, "backend", None)),
        "compilation.graph_mode": plain(compilation.cudagraph_mode),
        "compilation.graph_sizes": plain(compilation.cudagraph_capture_sizes),
        "compilation.settings": {
            **fields_of(compilation, _COMPILATION),
            # Models compile other modules with it, and the engine does not count it.
            **fields_of(config.cache_config, ("kv_sharing_fast_prefill",)),
        },
        "compilation.inductor": plain(compilation.inductor_compile_config),
    }


def _refuse_frozen(inductor: Mapping[str, Any]) -> None:
    """Where weights become constants of the code, it is of these weights alone."""
    frozen = inductor.get("freezing") or environment().get("TORCHINDUCTOR_FREEZING") == "1"
    # The engine freezes for it, on a CPU.
    if frozen or (_kind() == "cpu" and inductor.get("max_autotune")):
        raise FactorsInvalidError(
            "weights are compiled in (Inductor's freezing), so artefacts are of no other model's "
            "use",
            hint="without freezing, or max_autotune on a CPU, they are cached",
        )


def _of_speculation(speculative: Any) -> dict[str, Any]:
    if speculative is None:
        return {}
    draft = speculative.draft_model_config
    return {
        "speculative.method": plain(speculative.method),
        "speculative.tokens": speculative.num_speculative_tokens,
        "speculative.model": draft and (content_of(str(draft.model)) or _content_by_name(draft)),
        "speculative.settings": fields_of(speculative, _SPECULATIVE),
    }


def _of_lora(lora: Any) -> dict[str, Any]:
    if lora is None:
        return {"lora.enabled": False}
    return {
        "lora.enabled": True,
        "lora.max_loras": lora.max_loras,
        "lora.max_rank": lora.max_lora_rank,
        "lora.dtype": str(lora.lora_dtype),
        "lora.targets": lora.target_modules and sorted(lora.target_modules),
        "lora.settings": fields_of(lora, _LORA),
    }


def _of_multimodal(multimodal: Any) -> dict[str, Any]:
    if multimodal is None:
        return {}
    return {
        "multimodal.limits": plain(multimodal.limit_per_prompt),
        "multimodal.processor": plain(multimodal.mm_processor_kwargs),
        "multimodal.settings": fields_of(multimodal, _MULTIMODAL),
    }


def content_of(directory: str) -> dict[str, str] | None:
    """Digests of a model's configuration and code; None where it is no directory with any."""
    try:
        return _content(directory, _stamps(Path(directory)))
    except (FastloadError, OSError):
        return None


def _stamps(directory: Path) -> tuple[tuple[str, int, int, int], ...]:
    """By which an edit of a file that counts is noticed."""
    found = []
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if decides_code(name) and path.is_file():
            state = path.stat()
            found.append((name, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
    return tuple(sorted(found))


@functools.lru_cache(maxsize=8)
def _content(directory: str, stamps: tuple[tuple[str, int, int, int], ...]) -> dict[str, str]:
    return model_content_of(Path(directory))


def without_variable_noise(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's variables but those that decide no code."""
    return without_noise(variables, _OF_NO_CODE)


def model_identity(directory: str) -> str | None:
    """A name for the content of a model's directory, wherever it is."""
    content = content_of(directory)
    if content is None:
        return None
    return f"content-{hashlib.sha256(canonical(content)).hexdigest()[:32]}"


@contextmanager
def recording() -> Iterator[dict[str, dict[str, Any]]]:
    """Collect what the engine's configurations hash; see `recorded`."""
    rows: dict[str, dict[str, Any]] = {}
    _rows.current = rows
    try:
        yield rows
    finally:
        _rows.current = None


def recorded(config: Any, factors: Mapping[str, Any]) -> None:
    """Note the factors of one part of the configuration, if somebody collects them."""
    rows = getattr(_rows, "current", None)
    if rows is not None:
        name = type(config).__name__
        name = name if name not in rows else f"{name} {len(rows)}"
        rows[name] = {key: plain(value) for key, value in factors.items()}


def is_recording() -> bool:
    """Whether this thread is inside of `recording`."""
    return getattr(_rows, "current", None) is not None


def without_model_noise(model: Any, factors: dict[str, Any]) -> dict[str, Any]:
    """What the engine hashes of a model's configuration, with the content instead of places."""
    named: dict[str, Any] = dict(_NO_CODE)
    identity = model_identity(str(model.model))
    if identity is not None:
        named |= {"model": identity, "model_weights": "", "revision": None, "code_revision": None}
    return factors | {name: value for name, value in named.items() if name in factors}


def _own_factors(config: Any) -> dict[str, Any]:
    """What the engine itself hashes, row by row; of parts that hash in another way, the hash.

    The hash of all is there too: where the engine looks elsewhere, the key is another one.
    """
    with recording() as rows:
        hashes = {"all": str(config.compute_hash())}
    for name in ("scheduler_config", "lora_config", "speculative_config", "kernel_config"):
        part = getattr(config, name, None)
        if part is not None:
            hashes[name] = str(part.compute_hash())
    variables = plain(without_variable_noise(compat.COMPILE_VARIABLES.get()()))
    told = {name: value for name, value in variables.items() if value is not None}
    return {**rows, "hashes": hashes, "variables": told}


def _variables_of_compilers(environ: Mapping[str, str]) -> dict[str, Any]:
    """Those of Inductor, Dynamo and Triton: settings that the engine does not know of."""
    named = {
        name: value
        for name, value in environ.items()
        if value and name.startswith(_COMPILERS) and name not in _OF_THE_CPU
    }
    return {
        name: value
        for name, value in without_noise(named).items()
        if _NO_CODE_WORDS.isdisjoint(name.split("_"))
    }


def _content_by_name(model: Any) -> dict[str, str]:
    """Of a model that only its name is known of: its configuration as the engine has read it."""
    config = canonical(plain(model.hf_config.to_dict()))
    # A commit says what its files are; without one the name has to do.
    commit = getattr(model.hf_config, "_commit_hash", None)
    return {
        "config.json": hashlib.sha256(config).hexdigest(),
        "revision": commit or f"{model.model}@{model.revision}",
    }


def _source_digest(architectures: Any) -> str | None:
    """Of the files that define the model's classes: a local edit is another model."""
    models = compat.MODELS.get()
    places = [models[name][0] for name in architectures or () if name in models]
    first, *_ = compat.MODELS_PACKAGES
    return source_digest(
        [place if place.startswith("vllm.") else f"{first}.{place}" for place in places],
        compat.MODELS_PACKAGES,
    )


def _ranks(parallel: Any) -> list[str]:
    """The ranks of this node, as the engine names their directories."""
    first = parallel.node_rank_within_dp * parallel.local_world_size
    index = parallel.data_parallel_index
    return [f"{rank}_{index}" for rank in range(first, first + parallel.local_world_size)]


def _devices(parallel: Any) -> list[int]:
    """Device numbers of this node's ranks: generated code names its device."""
    first, count = 0, parallel.local_world_size
    by_engine = parallel.distributed_executor_backend not in ("ray", "external_launcher")
    if by_engine and parallel.nnodes_within_dp == 1:
        replica = parallel.data_parallel_rank_local
        first = (parallel.data_parallel_index if replica is None else replica) * count
    logical = range(first, first + count)
    given = getattr(parallel, "assigned_physical_gpu_ids", None)
    return [given[rank] if given and rank < len(given) else rank for rank in logical]


def _kind() -> str:
    return str(compat.CURRENT_PLATFORM.get().device_type)


def _is_rocm() -> bool:
    return bool(compat.CURRENT_PLATFORM.get().is_rocm())
