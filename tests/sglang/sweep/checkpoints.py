"""Checkpoints of the sweep: those of transformers, with what SGLang wants to be told beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastload_common.testing.sweep_checkpoints import write_by_transformers

# Published configurations have these; transformers leaves out what its own code does not need.
USUAL: dict[str, Any] = {
    "position_embedding_type": "absolute",
    "max_position_embeddings": 256,
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


def arguments(architecture: str) -> dict[str, Any]:
    """Of the engine, beside the usual ones."""
    return {"attention_backend": "triton"} if architecture.startswith(WITH_TRITON) else {}


def make(architecture: str, directory: Path) -> None:
    """Write one model."""
    write_by_transformers(directory, architecture)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config = USUAL | {"hidden_act": config.get("hidden_activation", "silu")} | config
    if architecture.startswith(LATENT):
        config["rope_parameters"] = _YARN
    file.write_text(json.dumps(config, indent=1))
