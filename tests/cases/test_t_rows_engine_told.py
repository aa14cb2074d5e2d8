"""What is said about checkpoints and settings that cannot be right, through the real engine."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastload_common.config import OPTIONS
from fastload_common.testing.rig import Rig
from tests.cases.engine_checkpoints import put, rewrite, write_numbered
from tests.cases.engine_process import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("told") / "m", "qwen3", num_hidden_layers=1)


def outcome(engine: EngineProcess, model: Path | str, **arguments: Any) -> dict[str, Any]:
    found: dict[str, Any] = engine.call("engine_told:outcome", model=str(model), **arguments)
    return found


# T10


def nibbles(tensors: dict[str, Any]) -> dict[str, Any]:
    """Linear layers as BitsAndBytes stores them: a column of bytes and the state to unpack it."""
    import torch

    found = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or "embed" in name or "lm_head" in name:
            found[name] = tensor
            continue
        state = name + ".quant_state.bitsandbytes__nf4"
        found[name] = torch.zeros(tensor.numel() // 2, 1, dtype=torch.uint8)
        found[name + ".absmax"] = torch.ones(tensor.numel() // 64)
        found[name + ".quant_map"] = torch.linspace(-1, 1, 16)
        found[state] = torch.zeros(64, dtype=torch.uint8)
    return found


def test_t10_four_bits_of_bitsandbytes_are_refused_not_sliced(
    engine: EngineProcess, engine_store: Rig, model: Path, tmp_path: Path
) -> None:
    """This vLLM knows no such method any more, and says so before any weight is read."""
    packed = rewrite(Path(shutil.copytree(model, tmp_path / "bnb")), nibbles)
    (packed / "model.gguf").write_bytes(b"GGUF")
    path = packed / "config.json"
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))
    uri = put(engine_store, packed, "t10")
    said = engine.call("engine_models:load_failures", model=str(packed), layout={"tensor": 2})
    assert "bitsandbytes" in said["auto"]
    assert said["fastload"] == said["auto"]
    found = outcome(engine, uri, ranks=2)
    assert "bitsandbytes" in found["said"]


def test_t10_weights_that_are_packed_but_not_declared_do_not_fit(
    engine: EngineProcess, model: Path, tmp_path: Path
) -> None:
    """Without the method in config.json: an error about a shape, and no garbage."""
    packed = rewrite(Path(shutil.copytree(model, tmp_path / "bnb")), nibbles)
    found = outcome(engine, packed, ranks=2)
    assert found["said"].startswith("TensorMismatchError: ")
    assert "config.json" in found["said"]


# T23


@pytest.mark.parametrize("indexed", [True, False])
def test_t23_an_adapter_beside_the_base_is_no_part_of_it(
    engine: EngineProcess, engine_store: Rig, model: Path, tmp_path: Path, indexed: bool
) -> None:
    """Its names would fit, and its file is a safetensors file like any other."""
    from safetensors.torch import load_file, save_file

    both = Path(shutil.copytree(model, tmp_path / "both"))
    weights = load_file(both / "model.safetensors")
    save_file(
        {name: value + 1 for name, value in weights.items()}, both / "adapter_model.safetensors"
    )
    (both / "adapter_model.bin").write_bytes(b"PK")
    (both / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    if not indexed:
        (both / "model.safetensors.index.json").unlink()
    uri = put(engine_store, both, f"t23-{indexed}")
    [row] = engine.call(
        "engine_models:compare_ranks",
        model=str(model),
        uri=uri,
        ranks=[0],
        options={"dtype": "float32"},
    )
    assert row["different"] == []
    assert row["report"]["needed_bytes"] == row["held_bytes"] == row["report"]["model_bytes"]


def test_t23_an_adapter_in_a_store_is_refused_in_one_line(engine: EngineProcess) -> None:
    """fastload reads bases only: adapters are the engine's, which wants them in a directory.

    It says which one it did not find; no hub is asked, since the URI is no name of a repository.
    """
    said = engine.call("engine_told:adapter_outcome", path="s3://bucket/adapters/tuned")
    kind, _, words = said.partition(": ")
    assert kind == "LoRAAdapterNotFoundError"
    assert "tuned" in words
    assert "s3://bucket/adapters/tuned" in words
    assert "\n" not in words


# T26


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"concurency": 8}, "did you mean concurrency?"),
        ({"concurrency": "eight"}, "'concurrency': expected a whole number, got 'eight'"),
        ({"concurrency": -4}, "'concurrency': -4 is below the minimum"),
        ({"memory_bytes": "1MiB", "chunk_bytes": "2MiB"}, "is smaller than chunk_bytes"),
    ],
)
def test_t26_a_setting_that_cannot_be_right_ends_the_start(
    engine: EngineProcess, model: Path, extra: dict[str, Any], words: str
) -> None:
    said = outcome(engine, model, extra_config=extra)["said"]
    assert said.startswith("ConfigError: ")
    assert words in said
    if "concurency" in extra:
        for option in OPTIONS:
            assert option.name in said


def test_t26_a_number_may_be_a_string(engine: EngineProcess, model: Path) -> None:
    found = outcome(engine, model, extra_config={"concurrency": "8", "deadline_s": "60"})
    assert found["said"] == "loaded"


def test_t26_a_file_is_no_setting(engine: EngineProcess, model: Path, tmp_path: Path) -> None:
    """vLLM takes JSON, not the name of a file with it; nothing goes on without the settings."""
    file = tmp_path / "extra.json"
    file.write_text('{"concurrency": 8}')
    said = outcome(engine, model, extra_config=str(file))["said"]
    assert said != "loaded"
    assert "model_loader_extra_config" in said or "model-loader-extra-config" in said


def test_t26_the_configuration_wins_and_each_rank_says_what_it_took(
    engine: EngineProcess, model: Path
) -> None:
    found = outcome(
        engine,
        model,
        extra_config={"concurrency": 6},
        environ={"FASTLOAD_CONCURRENCY": "40", "FASTLOAD_MAX_ATTEMPTS": "3"},
        ranks=2,
    )
    assert found["said"] == "loaded"
    told = [line for line in found["lines"] if "max_attempts" in line]
    assert len(told) == 2
    for rank, line in enumerate(told):
        assert f"rank {rank}" in line
        assert "'concurrency': 6" in line
        assert "'max_attempts': 3" in line
        # Of the six requests of the node this rank has three.
        assert "concurrency=3" in line
