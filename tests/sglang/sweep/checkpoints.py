"""Checkpoints of the sweep: those of transformers, with what SGLang wants to be told beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fastload_common.testing.sweep_checkpoints import write_by_transformers
from fastload_common.testing.sweep_quantized import FORMATS, GROUP
from tests.sweep.making import read_shards, write_quantized, write_shards

# Published configurations have these; transformers leaves out what its own code does not need.
USUAL: dict[str, Any] = {
    "position_embedding_type": "absolute",
    "max_position_embeddings": 256,
    "full_attention_interval": 2,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

# On a CPU the engine has rotary embeddings of this kind only for latent attention.
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
LATENT = ("Deepseek", "Longcat", "SarvamMLA", "GlmMoeDsa", "Glm4MoeLite", "KimiLinear")

WITH_TRITON = ("Exaone", "GptOss")
"""What the engine loads only for an attention backend that this machine lacks; none is made."""


QUANTIZED = tuple(
    f"{architecture} {name}"
    for architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM")
    for name in FORMATS
)
"""An architecture, and how its checkpoint is quantized."""

DRAFTS = (
    "DeepseekV3ForCausalLM draft",
    "Glm4MoeForCausalLM draft",
    "Glm4MoeForCausalLM draft-apart",
    "Glm4MoeLiteForCausalLM draft",
)
"""Drafts in the checkpoint of their target."""


def arguments(name: str) -> dict[str, Any]:
    """Of the engine, beside the usual ones."""
    architecture, _, kind = name.partition(" ")
    found = dict(FORMATS[kind].engine) if kind in FORMATS else {}
    if architecture.startswith(WITH_TRITON):
        found["attention_backend"] = "triton"
    return found


def make(name: str, directory: Path) -> None:
    """Write one model."""
    architecture, _, kind = name.partition(" ")
    if kind in FORMATS:
        wide = {"intermediate_size": 12 * GROUP}
        if "Moe" in architecture:
            wide["moe_intermediate_size"] = 12 * GROUP
        write_quantized(directory, architecture, wide, FORMATS[kind])
    else:
        write_by_transformers(directory, architecture)
    if kind.startswith("draft"):
        _add_predictor(directory, apart=kind == "draft-apart")
    file = directory / "config.json"
    config = json.loads(file.read_text())
    _complete(config)
    if kind.startswith("draft"):
        config.setdefault("num_nextn_predict_layers", 1)
    if architecture.startswith(LATENT):
        config["rope_parameters"] = _YARN
    file.write_text(json.dumps(config, indent=1))


def _add_predictor(directory: Path, *, apart: bool) -> None:
    """Add the layer that predicts a further token, as published checkpoints have it.

    Args:
        directory: of the model.
        apart: in a file of its own, which the index does not name.
    """
    from safetensors.torch import save_file

    tensors = read_shards(directory)
    config = json.loads((directory / "config.json").read_text())
    layers = config["num_hidden_layers"]
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    more = {n.replace(last, new): t.flip(0) for n, t in tensors.items() if n.startswith(last)}
    norm, embedding = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    more |= {
        f"{new}{name}": tensor.clone()
        for name, tensor in {
            "enorm.weight": norm,
            "hnorm.weight": norm + 1,
            "shared_head.norm.weight": norm + 2,
            "eh_proj.weight": torch.cat([embedding[: norm.numel()]] * 2, dim=1),
            "embed_tokens.weight": embedding,
            "shared_head.head.weight": embedding + 1,
        }.items()
    }
    for shard in directory.glob("*.safetensors*"):
        shard.unlink()
    write_shards(directory, tensors if apart else tensors | more)
    if apart:
        save_file(more, directory / "mtp.safetensors", {"format": "pt"})


def _complete(config: dict[str, Any]) -> None:
    for part in [config, *(v for k, v in config.items() if k == "text_config")]:
        for key, value in {**USUAL, "hidden_act": part.get("hidden_activation", "silu")}.items():
            part.setdefault(key, value)
