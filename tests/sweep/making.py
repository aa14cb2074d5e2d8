"""Makes the checkpoint of one case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fastload_common.testing.sweep_checkpoints import has_class, tiny_config, write_by_transformers
from fastload_common.testing.sweep_families import special
from fastload_common.testing.sweep_quantized import FORMATS, Format, quantized
from tests.sweep.engine_names import name_tensors

MAX_SHARD_BYTES = 192 * 1024


def make(engine: Any, case: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Write the checkpoint, by transformers unless the case says otherwise."""
    architecture, by = case["architecture"], case["by"]
    if case.get("format"):
        write_quantized(directory, architecture, case["config"], FORMATS[case["format"]])
        return {"ok": True, "by": "transformers"}
    if case["draft"]:
        write_draft(engine, case, directory)
        return {"ok": True, "by": "engine"}
    known = special(architecture)
    if not has_class(architecture):
        return {"ok": False, "error": "no configuration: transformers has no such class"}
    if by == "transformers" and not known.get("names"):
        write_by_transformers(directory, architecture, changes=case["config"])
        return {"ok": True, "by": by}
    write_config(directory, architecture, case["config"])
    write_by_engine(engine, directory, case["engine"])
    return {"ok": True, "by": "engine"}


def write_config(directory: Path, architecture: str, changes: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(architecture, changes)
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)


def write_by_engine(engine: Any, directory: Path, arguments: dict[str, Any]) -> None:
    """Write shards with the tensors that the engine's model wants."""
    command = {
        "directory": str(directory),
        "layout": {"tensor_parallel_size": 1},
        "engine": arguments,
    }
    with engine.building(command) as build:
        write_shards(directory, name_tensors(build))


def write_draft(engine: Any, case: dict[str, Any], directory: Path) -> None:
    """Write a draft under the engine's names, into its target's checkpoint or beside it."""
    architecture, draft = case["architecture"], case["draft"]
    where = directory / draft.get("model", "")
    tensors: dict[str, torch.Tensor] = {}
    if where == directory:
        write_by_transformers(directory, architecture, changes=case["config"])
        tensors = read_shards(directory)
    else:
        write_by_transformers(directory, architecture, changes=case["config"])
        write_config(where, DRAFT_CLASS.get(case["name"], architecture), {})
        path = where / "config.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"architectures": [case["name"]]})
        )
    command = {
        "directory": str(directory),
        "layout": {"tensor_parallel_size": 1},
        "engine": case["engine"],
        "draft": draft,
    }
    with engine.building(command) as build:
        named = name_tensors(build, RENAMES, shared=SHARED)
    for shard in where.glob("*.safetensors*"):
        shard.unlink()
    write_shards(where, tensors | named)


# What a draft's layers are called in the checkpoint, where the engine calls them otherwise.
RENAMES: tuple[dict[str, str], ...] = (
    {},
    {".mtp_block.": "."},
    {"model.": "mtp."},
    {"model.layers.": "mtp.layers."},
    {"model.": ""},
)
SHARED = ("embed_tokens", "lm_head", "shared_head.head")
"""Of the target, where a draft's checkpoint has none."""

# Whose configuration a draft has, where it is not its target's.
DRAFT_CLASS: dict[str, str] = {
    "Eagle3Qwen2_5vlForCausalLM": "LlamaForCausalLM",
    "Eagle3Qwen3vlForCausalLM": "LlamaForCausalLM",
    "EagleMiniCPMForCausalLM": "MiniCPMForCausalLM",
}


def write_quantized(
    directory: Path, architecture: str, changes: dict[str, Any], form: Format
) -> None:
    """Write a plain checkpoint, and then what the format makes of it."""
    write_by_transformers(directory, architecture, changes=changes)
    plain = read_shards(directory)
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    tensors, config = quantized(plain, form)
    write_shards(directory, tensors)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def read_shards(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def write_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write an index and as many small shards as it takes."""
    from safetensors.torch import save_file

    shards: list[dict[str, torch.Tensor]] = [{}]
    size_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and size_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size_bytes = 0
        shards[-1][name] = tensor.contiguous()
        size_bytes += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
