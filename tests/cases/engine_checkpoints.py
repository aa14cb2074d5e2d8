"""Checkpoints for cases in the engine, made in the process of the test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastload_common.testing.rig import Rig

__all__ = ["body_bytes", "put", "rewrite", "write_config", "write_numbered"]

BUCKET = "engine"
_FIRST_NUMBER = 1 << 20
_LAST_NUMBER = 1 << 24


def write_numbered(directory: Path, family: str, **overrides: Any) -> Path:
    """A tiny model in F32 whose elements all differ: what a rank holds says what it needs."""
    from fastload_common.testing.tiny_models import write_tiny_model

    write_tiny_model(directory, family, dtype="float32", **overrides)
    return rewrite(directory, number)


def number(tensors: dict[str, Any]) -> dict[str, Any]:
    """Count all elements of all tensors, from a number that no other value has."""
    import torch

    first = _FIRST_NUMBER
    numbered = {}
    for name, tensor in tensors.items():
        stop = first + tensor.numel()
        numbered[name] = torch.arange(first, stop, dtype=torch.float32).reshape(tensor.shape)
        first = stop
    assert first < _LAST_NUMBER
    return numbered


def rewrite(
    directory: Path,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    file_of: Callable[[str], str] = lambda name: "model.safetensors",
) -> Path:
    """Give a model's tensors to `change`, and write what it returns to the files of `file_of`."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    files: dict[str, dict[str, Any]] = {}
    for name, tensor in change(tensors).items():
        files.setdefault(file_of(name), {})[name] = tensor.contiguous()
    for file, content in files.items():
        save_file(content, directory / file, {"format": "pt"})
    weight_map = {name: file for file, content in files.items() for name in content}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def put(rig: Rig, directory: Path, prefix: str) -> str:
    """Put a model into the store; its URI."""
    for path in directory.iterdir():
        rig.put(BUCKET, f"{prefix}/{path.name}", path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


def body_bytes(rig: Rig, prefix: str) -> int:
    """Bytes of tensors that were asked for below a prefix; reads of headers are left out."""
    total = 0
    for request in rig.log.gets():
        if not request.key.startswith(prefix) or not request.key.endswith(".safetensors"):
            continue
        if request.byte_range is not None and request.byte_range.start > 0:
            total += request.byte_range.size_bytes
    return total


def mxfp4_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """The experts of a gpt-oss model as it is published: 4-bit blocks of 32 with their scales."""
    import torch

    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            found[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        for part, sizes in (
            ("blocks", (experts, outputs, inputs // 32, 16)),
            ("scales", (experts, outputs, inputs // 32)),
        ):
            found[f"{name}_{part}"] = torch.randint(
                0, 256, sizes, dtype=torch.uint8, generator=generator
            )
    return found


def write_config(directory: Path, config_class: str, **more: Any) -> Path:
    """A small numbered model of one layer, of any configuration class of transformers."""
    import transformers

    plain = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 1,
        "dtype": "float32",
    }
    config = getattr(transformers, config_class)(**(plain | more))
    return _write(directory, config, number)


def _write(
    directory: Path,
    config: Any,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    file_of: Callable[[str], str] = lambda name: "model.safetensors",
) -> Path:
    import transformers

    from fastload_common.testing.tiny_models import write_tokenizer

    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    write_tokenizer(directory)
    return rewrite(directory, change, file_of)


def write_mtp_model(directory: Path) -> Path:
    """A numbered GLM-4.5 with two layers, and a third one that predicts the next token but one."""
    import torch
    import transformers

    layers = 2
    config = transformers.Glm4MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        first_k_dense_replace=0,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        num_nextn_predict_layers=1,
        tie_word_embeddings=False,
        dtype="float32",
    )

    def add_layer(tensors: dict[str, Any]) -> dict[str, Any]:
        last = f"model.layers.{layers - 1}."
        own = f"model.layers.{layers}."
        found = dict(tensors)
        for name, tensor in tensors.items():
            if name.startswith(last):
                found[own + name.removeprefix(last)] = tensor
        for part in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
            found[own + part] = torch.empty(64)
        found[own + "eh_proj.weight"] = torch.empty(64, 128)
        found[own + "embed_tokens.weight"] = torch.empty(512, 64)
        found[own + "shared_head.head.weight"] = torch.empty(512, 64)
        return number(found)

    def file_of(name: str) -> str:
        return "mtp.safetensors" if f".{layers}." in name else "model.safetensors"

    return _write(directory, config, add_layer, file_of)
