"""Small random models with a tokenizer, made on the spot, for demos and tests.

Real configuration classes and real weight names of transformers, real safetensors files
(several shards and an index), nothing downloaded. Needs torch and transformers, which come
with the engine; never imported by what is shipped to run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["FAMILIES", "write_tiny_model", "write_tokenizer"]

VOCAB_SIZE = 512
"""Larger than the tokenizer's 258 entries, as published models have it."""

_END_OF_TEXT = "<|endoftext|>"
_PAD = "<|pad|>"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", _COMMON | _ATTENTION),
    "llama": ("LlamaConfig", _COMMON | _ATTENTION),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _COMMON
        | _ATTENTION
        | _EXPERTS
        | {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "mamba2": (
        "Mamba2Config",
        _COMMON
        | {
            "num_heads": 8,
            "head_dim": 32,
            "expand": 2,
            "state_size": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 32,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        _COMMON
        | _ATTENTION
        | _EXPERTS
        | {
            "num_local_experts": 4,
            "intermediate_size": 128,
            "sliding_window": 128,
        },
    ),
    "bloom": ("BloomConfig", _COMMON | {"n_layer": 2, "n_head": 4, "tie_word_embeddings": True}),
}
"""Family -> (configuration class of transformers, its arguments)."""


def write_tiny_model(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 256 * 1024,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write configuration, weights and tokenizer of a random model.

    Args:
        directory: created if absent; files of the same names are replaced.
        family: one of `FAMILIES`.
        seed: of the weights. The same seed gives the same bytes.
        dtype: torch's name of the weights' type.
        max_shard_bytes: a shard is closed before it grows past this; the default gives several.
        tokenizer: whether to write a byte-level tokenizer too.
        **overrides: arguments of the configuration class, e.g. ``num_key_value_heads=1``.

    Returns:
        The directory.

    Raises:
        KeyError: an unknown family.
    """
    import torch
    import transformers

    config_class, arguments = FAMILIES[family]
    config = getattr(transformers, config_class)(**(arguments | overrides), dtype=dtype)
    directory.mkdir(parents=True, exist_ok=True)
    with _seeded(seed):
        model = transformers.AutoModelForCausalLM.from_config(config)
        _randomise(model)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size=max_shard_bytes)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer: two special tokens and one token a byte; no merges."""
    characters = _byte_characters()
    vocabulary = {_END_OF_TEXT: 0, _PAD: 1}
    vocabulary |= {character: index + 2 for index, character in enumerate(characters)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 0, "content": _END_OF_TEXT, **special},
            {"id": 1, "content": _PAD, **special},
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _END_OF_TEXT,
        "eos_token": _END_OF_TEXT,
        "pad_token": _PAD,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    }
    (directory / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _byte_characters() -> list[str]:
    """The printable character that stands for each of the 256 bytes in byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(others))]


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch inside, and leave its generator as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _randomise(model: Any) -> None:
    """Give every parameter its own values: constant ones hide swapped or missed slices.

    Matrices get a spread that keeps activations alive through the layers, so that greedy
    tokens differ from step to step; vectors (norms, biases, state-space constants) keep
    their meaning and get noise on top.
    """
    import torch

    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
            noise = torch.randn(parameter.shape, dtype=torch.float32)
            if parameter.ndim >= 2:
                fan_in = max(1, parameter.shape[-1])
                parameter.copy_(noise * (1.5 / fan_in**0.5))
            else:
                parameter.add_((noise * 0.05).to(parameter.dtype))
