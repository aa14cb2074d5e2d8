"""A model whose metadata is fetched, and looks into the directory that keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from fastload_common.config import Settings
from fastload_common.load import content_store

TENSORS = {
    "model.embed_tokens.weight": torch.arange(32, dtype=torch.bfloat16).reshape(8, 4),
    "lm_head.weight": torch.ones(8, 4, dtype=torch.float32),
    "model.scale": torch.tensor(2, dtype=torch.int64),
}


def make_model(directory: Path, config: str = '{"model_type": "tiny"}') -> Path:
    directory.mkdir(parents=True)
    files = {
        "config.json": config,
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "modeling_tiny.py": "X = 1",
        "tokenizer.model": "\x00model",
        "1_Pooling/config.json": "{}",
        "code/more/helper.py": "Y = 2",
        "original/params.json": "{}",
        "checkpoint-500/config.json": "{}",
        "pytorch_model.bin": "weights",
        "onnx/model.onnx": "weights",
        "original/consolidated.00.pth": "weights",
        "training_args.bin": "pickle",
        "picture.png": "image",
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    save_file(TENSORS, directory / "model.safetensors")
    return directory


def names_in(directory: Path) -> set[str]:
    found = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    return set(found) - {content_store.MANIFEST}


def entries(settings: Settings) -> list[Path]:
    assert settings.cache_dir is not None
    return sorted((settings.cache_dir / "metadata" / "entries").iterdir())


def left_overs(settings: Settings) -> list[Path]:
    assert settings.cache_dir is not None
    return list((settings.cache_dir / "metadata" / "work").iterdir())


def forget_entries() -> None:
    """Release what this process holds, as its end would."""
    for descriptor in content_store._held.values():
        os.close(descriptor)
    content_store._held.clear()
