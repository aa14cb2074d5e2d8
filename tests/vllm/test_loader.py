"""The loader inside the real vLLM: sources, checks, errors, reloading."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WORKER = Path(__file__).with_name("loader_worker.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    def write(file: Path, **values: float) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: torch.full((4, 4), v, dtype=torch.bfloat16) for name, v in values.items()}
        save_file(tensors, file)

    root = tmp_path_factory.mktemp("checkpoints")
    write(root / "one" / "model.safetensors", a=1, b=2)
    write(root / "one" / "inner" / "model.safetensors", c=3)
    write(root / "both" / "model.safetensors", a=1, b=2)
    write(root / "both" / "consolidated.safetensors", a=5, b=6)
    write(root / "both" / "original" / "model.safetensors", a=8, b=8)
    write(root / "more" / "model.safetensors", a=1, b=2)
    write(root / "more" / "other-1.safetensors", a=7)
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps({"root": str(root)})],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    # What the operator reads in the log.
    return found | {"log": done.stdout + done.stderr}


@pytest.mark.parametrize("name", ["plain", "uri-first", "online", "hf-set"])
def test_weights_are_loaded(said: dict[str, Any], name: str) -> None:
    assert said[name]["sums"] == {"a": 16, "b": 32}


def test_f13_the_set_that_the_default_loader_takes(said: dict[str, Any]) -> None:
    assert said["mistral-set"]["sums"] == {"a": 80, "b": 96}
    assert said["mistral-set"]["seen"] == ["a", "b"]


def test_patterns_of_the_model_decide(said: dict[str, Any]) -> None:
    assert said["patterns"] == {"sums": {"a": 112}, "seen": ["a"]}


def test_secondary_weights_come_from_the_same_root(said: dict[str, Any]) -> None:
    assert said["secondary"]["sums"] == {"a": 16, "b": 32, "more_c": 48}
    assert said["secondary"]["seen"] == ["a", "b", "more_c"]


def test_reloading_gives_real_tensors_in_file_order(said: dict[str, Any]) -> None:
    assert list(said["reload"].items()) == [("a", 16), ("b", 32)]


def test_online_quantization_is_read_eagerly_and_said(said: dict[str, Any]) -> None:
    assert "vLLM quantizes this model while it loads" in said["log"]


def test_parameters_that_nothing_filled_are_an_error(said: dict[str, Any]) -> None:
    found = said["missing"]
    assert found["error"] == "TensorMissingError"
    assert "values.c" in found["message"]
    assert "values.a" not in found["message"]


def test_quantized_models_are_not_checked_as_in_the_default_loader(said: dict[str, Any]) -> None:
    assert said["missing-quantized"]["sums"] == {"a": 16, "b": 32, "c": 0}


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("no-directory", "ConfigError", "/no/such/directory"),
        ("unknown-setting", "ConfigError", "'a'"),
        ("torchao", "EngineUnsupportedError", "torchao"),
        ("ignored", "NoWeightsError", "one"),
    ],
)
def test_errors_say_what_is_wrong(said: dict[str, Any], name: str, error: str, text: str) -> None:
    assert said[name].get("error") == error
    assert text in said[name]["message"]


def test_our_stack_is_not_shown(said: dict[str, Any]) -> None:
    assert said["missing"]["frames"] == ["attempt", "action", "load_weights"]
    assert said["missing"]["cause"] is False
    assert said["log"].count("fastload: TensorMissingError: 1 parameters") == 1


def test_a_draft_in_the_targets_checkpoint_is_read_from_there(said: dict[str, Any]) -> None:
    assert said["roots"] == {
        "own": "s3://b/own",
        "directory": "/metadata/of/target",
        "in-target": "s3://b/target",
        "in-target-of-draft": "s3://b/target",
        "beside-target": "/elsewhere",
    }
