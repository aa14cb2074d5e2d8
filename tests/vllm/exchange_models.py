"""Models of 10 to 50 MiB, one of each kind that ranks divide differently. Not a test itself.

Large enough that headers and alignment are less than a thousandth. The fp8 models are made from
plain ones: each linear weight of their layers with one scale, or one for each block of 128 × 128.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "write_model"]

_SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
_HEADS: dict[str, Any] = {"head_dim": 64, "num_key_value_heads": 8}
_SHARD_BYTES = 8 * 1024 * 1024

# A mixture of experts must be the first one that a process loads.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "moe": (
        "Qwen3MoeConfig",
        _SIZES
        | _HEADS
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384},
    ),
    "dense": ("Qwen3Config", _SIZES | _HEADS),
    "gqa": ("LlamaConfig", _SIZES | _HEADS | {"num_key_value_heads": 1}),
    "mla": (
        "DeepseekV3Config",
        _SIZES
        | {
            "num_key_value_heads": 8,
            "q_lora_rank": 256,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 384,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
        },
    ),
    "fp8": ("Qwen3Config", _SIZES | _HEADS),
    "fp8-block": ("Qwen3Config", _SIZES | _HEADS),
}
"""Kind -> (configuration class of transformers, its arguments)."""


def write_model(directory: Path, kind: str) -> Path:
    """Write one of `KINDS`: configuration, shards and index; no tokenizer."""
    import torch
    import transformers

    config_class, arguments = KINDS[kind]
    config = getattr(transformers, config_class)(
        vocab_size=2048,
        num_hidden_layers=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        dtype="bfloat16",
        **arguments,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size=_SHARD_BYTES)
    if kind == "fp8":
        _quantize(directory, None)
    elif kind == "fp8-block":
        _quantize(directory, 128)
    return directory


def _quantize(directory: Path, block: int | None) -> None:
    """Store each linear weight of the layers in fp8, with one scale, or one for each block."""
    import torch
    from safetensors.torch import load_file, save_file

    index_file = directory / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    for file in sorted(set(index["weight_map"].values())):
        tensors = {}
        for name, value in load_file(directory / file).items():
            tensors[name] = value
            if value.ndim != 2 or ".layers." not in name:
                continue
            tensors[name] = value.to(torch.float8_e4m3fn)
            scale = f"{name}_scale_inv" if block else f"{name}_scale"
            shape = [-(-size // block) for size in value.shape] if block else []
            tensors[scale] = torch.rand(shape, dtype=torch.float32) + 0.5
            index["weight_map"][scale] = file
        save_file(tensors, directory / file, {"format": "pt"})
    index_file.write_text(json.dumps(index))
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    } | ({"weight_block_size": [block, block]} if block else {})
    config_file.write_text(json.dumps(config))
