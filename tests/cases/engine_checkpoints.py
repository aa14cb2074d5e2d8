"""Checkpoints for cases in the engine, made in the process of the test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastload_common.testing.rig import Rig

__all__ = ["body_bytes", "put", "rewrite", "write_numbered"]

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
