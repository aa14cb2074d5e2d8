"""What the sweep runs: models, and the layouts in which each is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastload_common.testing.sweep_families import special
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
    named: bool = False
    """Only for cases that name it."""


LAYOUTS: dict[str, Layout] = {
    "tp1": Layout(1, {"tensor_parallel_size": 1}),
    "tp2": Layout(2, {"tensor_parallel_size": 2}),
    "pp2": Layout(2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, "pipeline"),
    "ep2": Layout(2, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "moe"),
    "eplb2": Layout(
        2,
        {
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
            "enable_eplb": True,
            "eplb_config": {"num_redundant_experts": 2, "window_size": 4, "step_interval": 4},
        },
        "moe",
        named=True,
    ),
    "dp2": Layout(2, {"tensor_parallel_size": 1, "data_parallel_size": 2}, named=True),
    "dp2ep": Layout(
        2,
        {"tensor_parallel_size": 1, "data_parallel_size": 2, "enable_expert_parallel": True},
        "moe",
        named=True,
    ),
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
    draft: dict[str, Any] = field(default_factory=dict)  # speculative configuration
    reload: bool = False  # load the weights a second time, in place
    alone: bool = False  # the engine changes transformers' classes: new processes afterwards

    @property
    def quantization(self) -> str:
        """The format of quantized weights, if they are."""
        return self.format or str(self.engine.get("quantization", ""))

    def command(self) -> dict[str, Any]:
        """What a rank must know to load it."""
        return {"engine": self.engine, "draft": self.draft, "reload": self.reload}

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "architecture": self.architecture,
            "config": self.config,
            "engine": self.engine,
            "by": "transformers",
            "format": self.format,
            "draft": self.draft,
        }


def layouts_of(case: Case, first: Result | None, chosen: list[str]) -> Iterator[str]:
    """The layouts that a case has, by what its load at one rank said."""
    if first is None or first.outcome != "same":
        return
    for name in chosen:
        needs = LAYOUTS[name].needs
        if name not in case.layouts if case.layouts is not None else LAYOUTS[name].named:
            continue
        if not needs or getattr(first, needs):
            yield name


def _engine(name: str, pooling: Set[str]) -> dict[str, Any]:
    pools = {"runner": "pooling"} if name in pooling else {}
    return {**pools, **special(name).get("engine", {})}


def all_cases() -> list[Case]:
    """Every architecture of the engine's registry, then what else is listed here."""
    return [*architectures(), *quantized_cases(), *layout_cases(), *drafts()]


def architectures() -> list[Case]:
    from vllm.model_executor.models import registry

    drafts = registry._SPECULATIVE_DECODING_MODELS
    pooling = registry._EMBEDDING_MODELS.keys() - registry._TEXT_GENERATION_MODELS.keys()
    return [
        Case(
            name,
            name,
            engine=_engine(name, pooling),
            alone=name.startswith("TransformersMoE"),
            layouts=("tp2",) if name.startswith("TransformersMoE") else None,
        )
        for name in sorted(registry._VLLM_MODELS)
        if name not in drafts
    ]


# For each rank an odd number of groups of a scale, at 2 ranks and at 4.
_DENSE = {"intermediate_size": 12 * GROUP}
_EXPERTS = {**_DENSE, "moe_intermediate_size": 12 * GROUP}
FUSED: dict[str, dict[str, Any]] = {"GptOssForCausalLM": _DENSE}
QUANTIZED_MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _DENSE,
    "Qwen3MoeForCausalLM": _EXPERTS,
    "DeepseekV3ForCausalLM": {**_EXPERTS, "q_lora_rank": 64, "kv_lora_rank": 32},
}


def quantized_cases() -> list[Case]:
    """Each format in a model with GQA, with experts, and with latent attention and experts."""
    return _online() + [
        Case(
            f"{name} {architecture.removesuffix('ForCausalLM')}",
            architecture,
            kind="quantized",
            config=config,
            engine=dict(form.engine),
            format=name,
        )
        for name, form in FORMATS.items()
        for architecture, config in (FUSED if form.fused else QUANTIZED_MODELS).items()
    ]


def _online() -> list[Case]:
    """Weights that the engine quantizes while it loads them."""
    shorthands = ("fp8_per_tensor", "fp8_per_block", "int8_per_channel_weight_only", "mxfp8")
    return [
        Case(
            f"online {shorthand} {architecture.removesuffix('ForCausalLM')}",
            architecture,
            kind="quantized",
            config=QUANTIZED_MODELS[architecture],
            engine={"quantization": shorthand},
            layouts=("tp2", "ep2"),
        )
        for shorthand in shorthands
        for architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM")
    ]


# Draft in the target's own checkpoint <- the target.
PREDICTED: dict[str, str] = {
    "DeepSeekMTPModel": "DeepseekV3ForCausalLM",
    "DeepseekV32MTPModel": "DeepseekV32ForCausalLM",
    "ErnieMTPModel": "Ernie4_5_MoeForCausalLM",
    "Exaone4_5_MTP": "Exaone4_5_ForConditionalGeneration",
    "ExaoneMoeMTP": "ExaoneMoeForCausalLM",
    "Glm4MoeLiteMTPModel": "Glm4MoeLiteForCausalLM",
    "Glm4MoeMTPModel": "Glm4MoeForCausalLM",
    "GlmOcrMTPModel": "GlmOcrForConditionalGeneration",
    "HYV3MTPModel": "HYV3ForCausalLM",
    "LongCatFlashMTPModel": "LongcatFlashForCausalLM",
    "MiMoMTPModel": "MiMoForCausalLM",
    "MiMoV2MTPModel": "MiMoV2FlashForCausalLM",
    "NemotronHMTPModel": "NemotronHForCausalLM",
    "Qwen3NextMTP": "Qwen3NextForCausalLM",
    "Qwen3_5MTP": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeMTP": "Qwen3_5MoeForConditionalGeneration",
}
# Draft in a checkpoint of its own <- its target, and the method.
SEPARATE: dict[str, tuple[str, str]] = {
    "EagleLlamaForCausalLM": ("LlamaForCausalLM", "eagle"),
    "EagleMistralForCausalLM": ("MistralForCausalLM", "eagle"),
    "EagleMiniCPMForCausalLM": ("MiniCPMForCausalLM", "eagle"),
    "EagleCohereForCausalLM": ("CohereForCausalLM", "eagle"),
    "EagleLlama4ForCausalLM": ("Llama4ForCausalLM", "eagle"),
    "EagleDeepSeekMTPModel": ("DeepseekV3ForCausalLM", "eagle"),
    "Eagle3LlamaForCausalLM": ("LlamaForCausalLM", "eagle3"),
    "LlamaForCausalLMEagle3": ("LlamaForCausalLM", "eagle3"),
    "Eagle3Qwen3ForCausalLM": ("Qwen3ForCausalLM", "eagle3"),
    "Eagle3Qwen2_5vlForCausalLM": ("Qwen2_5_VLForConditionalGeneration", "eagle3"),
    "Eagle3Qwen3vlForCausalLM": ("Qwen3VLForConditionalGeneration", "eagle3"),
    "Eagle3DeepseekV2ForCausalLM": ("DeepseekV2ForCausalLM", "eagle3"),
    "Eagle3MiniMaxM2ForCausalLM": ("MiniMaxM2ForCausalLM", "eagle3"),
    "PeagleLlamaForCausalLM": ("LlamaForCausalLM", "eagle3"),
    "PeagleQwen3ForCausalLM": ("Qwen3ForCausalLM", "eagle3"),
    "MedusaModel": ("LlamaForCausalLM", "medusa"),
    "DFlashDraftModel": ("Qwen3ForCausalLM", "dflash"),
}


def drafts() -> list[Case]:
    """Every draft model of the registry."""
    from vllm.model_executor.models import registry

    cases = []
    for name in sorted(registry._SPECULATIVE_DECODING_MODELS):
        target, method = SEPARATE.get(name, (PREDICTED.get(name, name), "mtp"))
        draft = {"method": method} | ({"model": "draft"} if name in SEPARATE else {})
        cases.append(
            Case(
                name,
                target,
                kind="draft",
                config=_predicting(name, target),
                engine=_engine(target, frozenset()),
                layouts=("tp2", "ep2", "tp4", "ep4"),
                draft=draft,
            )
        )
    return cases


def _predicting(name: str, target: str) -> dict[str, Any]:
    layers = {"num_nextn_predict_layers": 1}
    if name in SEPARATE:
        return {}
    return {"text_config": layers} if name == "GlmOcrMTPModel" else layers


def layout_cases() -> list[Case]:
    """Ways of dividing a model that no architecture has by itself."""

    def case(name: str, architecture: str, layouts: str, engine: Any = None, **config: Any) -> Case:
        return Case(
            name,
            architecture,
            kind="layout",
            config=config,
            engine=engine or {},
            layouts=tuple(layouts.split()),
        )

    round_robin = {"expert_placement_strategy": "round_robin"}
    return [
        case("one kv head", "LlamaForCausalLM", "tp2 tp4 pp2", num_key_value_heads=1),
        case("tied embeddings", "Qwen3ForCausalLM", "tp2 tp4 pp2", tie_word_embeddings=True),
        case("round-robin experts", "DeepseekV3ForCausalLM", "ep2 ep4", round_robin, n_group=2),
        case("redundant experts of Qwen3", "Qwen3MoeForCausalLM", "eplb2"),
        case("redundant experts of DeepSeek", "DeepseekV3ForCausalLM", "eplb2"),
        case("redundant experts of GPT-OSS", "GptOssForCausalLM", "eplb2"),
        case("reloaded Llama", "LlamaForCausalLM", "tp2 pp2 tp4"),
        case("reloaded Qwen3", "Qwen3MoeForCausalLM", "tp2 ep2"),
        case("reloaded DeepSeek", "DeepseekV3ForCausalLM", "tp2"),
        case("data-parallel DeepSeek", "DeepseekV3ForCausalLM", "dp2 dp2ep"),
        case("data-parallel Qwen3", "Qwen3MoeForCausalLM", "dp2 dp2ep"),
        case("data-parallel GPT-OSS", "GptOssForCausalLM", "dp2 dp2ep"),
        case("data-parallel Llama4", "Llama4ForCausalLM", "dp2 dp2ep"),
    ]


SUBSET: dict[str, str] = {
    # One for each way in which a loader puts a model together.
    "LlamaForCausalLM": "tp2 pp2 tp4",  # fused projections, fewer kv heads than 4 ranks
    "Qwen3MoeForCausalLM": "tp2 ep2 pp2 tp4 ep4",  # experts one by one
    "GptOssForCausalLM": "tp2 ep2 ep4",  # experts in one tensor, biases
    "Llama4ForConditionalGeneration": "tp2 ep2",  # experts in one tensor, transposed; a tower
    "DeepseekV3ForCausalLM": "tp2 ep2 tp2pp2",  # latent attention, shared experts
    "Mamba2ForCausalLM": "tp2 tp4",  # state space; a parameter is read after it is written
    "JambaForCausalLM": "tp2",  # attention, state space and experts
    "Qwen3NextForCausalLM": "tp2",  # linear attention
    "FalconForCausalLM": "tp2",  # fused in the checkpoint, in an order of its own
    "BloomForCausalLM": "tp2",
    "GPT2LMHeadModel": "tp2",  # transposed in the checkpoint
    "Phi3ForCausalLM": "tp2",  # fused in the checkpoint
    "Gemma3ForConditionalGeneration": "tp2",  # tied embeddings, norms plus one, a tower
    "OPTForCausalLM": "tp2",
    "Qwen2_5_VLForConditionalGeneration": "tp2",
    "WhisperForConditionalGeneration": "tp2",  # encoder and decoder
    "BertModel": "tp2",
    "CLIPModel": "tp2",
    "LlamaModel": "tp2",  # embedding
    "BertForSequenceClassification": "tp2",
    "fp8-per-tensor Llama": "tp2",
    "fp8-per-block DeepseekV3": "tp2",
    "ct-int8 Llama": "tp2",
    "ct-int4 Qwen3Moe": "tp2 ep2",
    "ct-nvfp4 Qwen3Moe": "tp2",
    "awq Llama": "tp2",
    "gptq-4bit Qwen3Moe": "tp2",
    "modelopt-nvfp4 Llama": "tp2",
    "round-robin experts": "ep2",
    "redundant experts of Qwen3": "eplb2",
    "data-parallel DeepSeek": "dp2ep",
    "tied embeddings": "tp2 pp2",
    "one kv head": "tp2",
}
"""Names of the cases of every test run -> the layouts beside `tp1`."""


def subset() -> list[Case]:
    cases = {case.name: case for case in all_cases()}
    return [
        dataclasses.replace(cases[name], layouts=tuple(layouts.split()))
        for name, layouts in SUBSET.items()
    ]
