"""What the sweep runs: models, and the layouts in which each is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastload_common.testing.sweep_families import EXTRA
from fastload_common.testing.sweep_quantized import FORMATS, GROUP

if TYPE_CHECKING:
    from tests.sweep.results import Result


@dataclass(frozen=True)
class Layout:
    world_size: int
    arguments: dict[str, Any]
    """Of the engine, as its command line names them."""
    needs: str = ""
    """``moe`` or ``pipeline``: only for models that have it."""


LAYOUTS: dict[str, Layout] = {
    "tp1": Layout(1, {"tensor_parallel_size": 1}),
    "tp2": Layout(2, {"tensor_parallel_size": 2}),
    "pp2": Layout(2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, "pipeline"),
    "ep2": Layout(2, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "moe"),
    "tp4": Layout(4, {"tensor_parallel_size": 4}),
    "ep4": Layout(4, {"tensor_parallel_size": 4, "enable_expert_parallel": True}, "moe"),
    "tp2pp2": Layout(4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "pipeline"),
}
"""Name of a layout -> what it is."""


@dataclass(frozen=True)
class Case:
    name: str
    architecture: str
    kind: str = "architecture"  # or draft, quantized, layout
    config: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] | None = None  # None: all it can have
    format: str = ""  # of a quantized checkpoint

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "architecture": self.architecture,
            "config": self.config,
            "engine": self.engine,
            "by": "transformers",
            "format": self.format,
        }


def layouts_of(case: Case, first: Result | None, chosen: list[str]) -> Iterator[str]:
    """The layouts that a case has, by what its load at one rank said."""
    if first is None or first.outcome != "same":
        return
    for name in chosen:
        needs = LAYOUTS[name].needs
        if case.layouts is not None and name not in case.layouts:
            continue
        if not needs or getattr(first, needs):
            yield name


def _engine(name: str, pooling: Set[str]) -> dict[str, Any]:
    pools = {"runner": "pooling"} if name in pooling else {}
    return {**pools, **EXTRA.get(name, {}).get("engine", {})}


def all_cases() -> list[Case]:
    """Every architecture of the engine's registry, then what else is listed here."""
    return [*architectures(), *quantized_cases()]


def architectures() -> list[Case]:
    from vllm.model_executor.models import registry

    drafts = registry._SPECULATIVE_DECODING_MODELS
    pooling = registry._EMBEDDING_MODELS.keys() - registry._TEXT_GENERATION_MODELS.keys()
    return [
        Case(name, name, engine=_engine(name, pooling))
        for name in sorted(registry._VLLM_MODELS)
        if name not in drafts
    ]


# For each rank an odd number of groups of a scale, at 2 ranks and at 4.
_DENSE = {"intermediate_size": 12 * GROUP}
_EXPERTS = {**_DENSE, "moe_intermediate_size": 12 * GROUP}
QUANTIZED_MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _DENSE,
    "Qwen3MoeForCausalLM": _EXPERTS,
    "DeepseekV3ForCausalLM": {**_EXPERTS, "q_lora_rank": 64, "kv_lora_rank": 32},
}


def quantized_cases() -> list[Case]:
    """Each format in a model with GQA, with experts, and with latent attention and experts."""
    return [
        Case(
            f"{name} {architecture.removesuffix('ForCausalLM')}",
            architecture,
            kind="quantized",
            config=config,
            engine=dict(form.engine),
            format=name,
        )
        for name, form in FORMATS.items()
        for architecture, config in QUANTIZED_MODELS.items()
    ]
