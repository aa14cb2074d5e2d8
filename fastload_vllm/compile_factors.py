"""What decides the compiled artefacts of a vLLM configuration; see `fastload cache key`."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastload_common.compile_cache.content import model_content_of
from fastload_common.compile_cache.key import canonical
from fastload_common.compile_cache.machine import machine_factors
from fastload_common.engine.compile_values import fields_of, plain, without_noise
from fastload_common.errors import FastloadError
from fastload_vllm import compat

__all__ = ["content_of", "factors_of", "model_identity", "recorded", "recording"]

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
    "max_cpu_loras",
)
_MULTIMODAL = ("language_model_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend")
_EXPERTS = ("enable_eplb", "eplb_config", "expert_placement_strategy", "all2all_backend")


def factors_of(config: Any) -> dict[str, Any]:
    """All factors of a `VllmConfig`, as `check_factors` wants them.

    Raises:
        FastloadError: the model's configuration cannot be read.
    """
    model, parallel = config.model_config, config.parallel_config
    speculative, lora = config.speculative_config, config.lora_config
    multimodal = getattr(model, "multimodal_config", None)
    compilation, scheduler = config.compilation_config, config.scheduler_config
    kind = compat.CURRENT_PLATFORM.get().device_type
    found = machine_factors(kind="rocm" if kind == "cuda" and _is_rocm() else kind)
    found |= {
        "engine.name": compat.ENGINE.package,
        "engine.version": compat.engine_version(),
        "engine.source": _source_digest(getattr(model, "architectures", ())),
        "engine.factors": _own_factors(config),
        "model.content": content_of(str(model.model)) or _content_by_name(model),
        "model.overrides": {"hf_overrides": plain(getattr(model, "hf_overrides", None))},
        "model.quantization": plain(model.quantization),
        "model.task": plain(model.runner_type),
        "dtype.model": str(model.dtype),
        "dtype.kv_cache": plain(config.cache_config.cache_dtype),
        "limits.max_model_len": model.max_model_len,
        "limits.max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "limits.max_num_seqs": scheduler.max_num_seqs,
        "limits.block_size": plain(config.cache_config.block_size),
        "layout.tensor": parallel.tensor_parallel_size,
        "layout.pipeline": parallel.pipeline_parallel_size,
        "layout.expert": bool(parallel.enable_expert_parallel),
        "layout.expert_placement": fields_of(parallel, _EXPERTS),
        "layout.data": parallel.data_parallel_size,
        "layout.context": fields_of(
            parallel, ("prefill_context_parallel_size", "decode_context_parallel_size")
        ),
        "layout.ranks": _ranks(parallel),
        "layout.devices": _devices(parallel) if kind != "cpu" else None,
        "attention.backend": plain(getattr(config.attention_config, "backend", None)),
        "compilation.graph_mode": plain(compilation.cudagraph_mode),
        "compilation.graph_sizes": plain(compilation.cudagraph_capture_sizes),
        "compilation.settings": fields_of(
            compilation, ("mode", "backend", "custom_ops", "splitting_ops", "compile_sizes")
        ),
        "compilation.inductor": plain(compilation.inductor_compile_config),
    }
    if speculative is not None:
        draft = speculative.draft_model_config
        found |= {
            "speculative.method": plain(speculative.method),
            "speculative.tokens": speculative.num_speculative_tokens,
            "speculative.model": draft and content_of(str(draft.model)),
            "speculative.settings": fields_of(speculative, _SPECULATIVE),
        }
    found["lora.enabled"] = lora is not None
    if lora is not None:
        found |= {
            "lora.max_loras": lora.max_loras,
            "lora.max_rank": lora.max_lora_rank,
            "lora.dtype": str(lora.lora_dtype),
            "lora.targets": plain(lora.target_modules),
            "lora.settings": fields_of(lora, _LORA),
        }
    if multimodal is not None:
        found |= {
            "multimodal.limits": plain(multimodal.limit_per_prompt),
            "multimodal.processor": plain(multimodal.mm_processor_kwargs),
            "multimodal.settings": fields_of(multimodal, _MULTIMODAL),
        }
    return found


@functools.lru_cache(maxsize=8)
def content_of(directory: str) -> dict[str, str] | None:
    """Digests of a model's configuration and code; None where it is no directory with any."""
    if not Path(directory).is_dir():
        return None
    try:
        return model_content_of(Path(directory))
    except (FastloadError, OSError):
        return None


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


def _own_factors(config: Any) -> dict[str, Any]:
    """What the engine itself hashes, row by row; of parts that hash in another way, the hash."""
    with recording() as rows:
        config.compute_hash()
    hashes = {}
    for name in ("scheduler_config", "lora_config", "speculative_config", "kernel_config"):
        part = getattr(config, name, None)
        if part is not None:
            hashes[name] = str(part.compute_hash())
    variables = plain(without_noise(compat.COMPILE_VARIABLES.get()()))
    return {**rows, "hashes": hashes, "variables": variables}


def _content_by_name(model: Any) -> dict[str, str]:
    """Of a model that only its name is known of: its configuration as the engine has read it."""
    config = canonical(plain(model.hf_config.to_dict()))
    return {
        "config.json": hashlib.sha256(config).hexdigest(),
        "revision": f"{model.model}@{model.revision}",
    }


def _source_digest(architectures: Any) -> str | None:
    """Of the files that define the model's classes: a local edit is another model."""
    models = compat.MODELS.get()
    digest = hashlib.sha256()
    found = False
    for name in architectures or ():
        place = models.get(name)
        if place is None:
            continue
        spec = importlib.util.find_spec(f"{compat.MODELS_PACKAGE}.{place[0]}")
        if spec is not None and spec.origin is not None:
            digest.update(Path(spec.origin).read_bytes())
            found = True
    return digest.hexdigest() if found else None


def _ranks(parallel: Any) -> list[str]:
    """The ranks of this node, as the engine names their directories."""
    first = parallel.node_rank_within_dp * parallel.local_world_size
    index = parallel.data_parallel_index
    return [f"{rank}_{index}" for rank in range(first, first + parallel.local_world_size)]


def _devices(parallel: Any) -> list[int]:
    """Device numbers of this node's ranks: generated code names its device."""
    first = (parallel.data_parallel_rank_local or 0) * parallel.local_world_size
    return list(range(first, first + parallel.local_world_size))


def _is_rocm() -> bool:
    return bool(compat.CURRENT_PLATFORM.get().is_rocm())
