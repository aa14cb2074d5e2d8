"""The real engine as an operator starts it: drafts, reloading, and what errors look like."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing.s3_server import S3Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.s3,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WORKER = Path(__file__).with_name("serving_worker.py")
ROOT = Path(__file__).parents[2]
BUCKET = "serving"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fastload_common.testing.tiny_models import write_tiny_model

    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "first", "qwen3")
    write_tiny_model(root / "second", "qwen3", seed=1)
    write_tiny_model(root / "draft", "qwen3", seed=2, num_hidden_layers=1)
    lacking = shutil.copytree(root / "first", root / "lacking")
    index = json.loads((lacking / "model.safetensors.index.json").read_text())
    config = json.loads((lacking / "config.json").read_text())
    (lacking / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    assert index["weight_map"]
    return root


@pytest.fixture(scope="module")
def variables(
    models: Path, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """An environment in which ``vllm serve`` starts, on the CPU build too."""
    s3_server.make_bucket(BUCKET)
    for directory in models.iterdir():
        s3_server.upload_dir(directory, BUCKET, directory.name)
    work = tmp_path_factory.mktemp("work")
    return s3_server.environ() | {
        "FASTLOAD_CACHE_DIR": str(work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": f"{distribution_named_vllm(work)}{os.pathsep}{ROOT}",
    }


def distribution_named_vllm(work: Path) -> Path:
    """The CPU build is the distribution ``vllm-cpu``, but the command asks for ``vllm``."""
    directory = work / "names"
    directory.mkdir()
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
        info = directory / f"vllm-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
    return directory


def run(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=500,
    )


def tokens(job: dict[str, Any], variables: dict[str, str]) -> list[Any]:
    done = run([str(WORKER), json.dumps(job)], variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-5000:]
    found = json.loads(lines[-1].removeprefix("RESULT "))
    assert isinstance(found, list)
    return found


def test_drafts_and_reloads_come_from_s3(models: Path, variables: dict[str, str]) -> None:
    def uri(name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    speculative = {"method": "draft_model", "num_speculative_tokens": 2}
    found = tokens(
        {
            "engine": {
                "model": uri("first"),
                "load_format": "fastload",
                "speculative_config": speculative | {"model": uri("draft")},
            },
            "reload": [None, uri("second")],
        },
        variables,
    )
    wanted = tokens(
        {"engine": {"model": str(models / "first")}, "reload": [str(models / "second")]},
        variables,
    )
    assert wanted[0] != wanted[1]
    assert found == [wanted[0], wanted[0], wanted[1]]


def serve(model: str, variables: dict[str, str], *more: str) -> tuple[int, str]:
    command = str(Path(sys.executable).parent / "vllm")
    done = run([command, "serve", model, "--port", "0", *more], variables)
    return done.returncode, done.stdout


def test_an_error_before_the_engine_is_one_line(variables: dict[str, str]) -> None:
    status, output = serve("s3://no-such-bucket/m", variables, "--load-format", "fastload")
    assert status == 1
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("fastload: ObjectMissingError: ")
    assert "s3://no-such-bucket/m" in last
    assert "->" in last


def test_an_error_in_a_worker_is_said_once_and_without_our_stack(
    variables: dict[str, str],
) -> None:
    """A model whose configuration has more layers than its checkpoint."""
    status, output = serve(
        f"s3://{BUCKET}/lacking", variables, "--load-format", "fastload", "--max-model-len", "64"
    )
    assert status == 1
    said = [line for line in output.splitlines() if "fastload: TensorMissingError" in line]
    assert len(said) == 1
    assert "model.layers.2." in said[0]
    assert "fastload_common" not in output


def test_e12_a_plugin_that_is_filtered_out_is_an_unknown_format(
    models: Path, variables: dict[str, str]
) -> None:
    """None of our code runs then: the engine's own message is all that there can be."""
    job = {"engine": {"model": str(models / "first"), "load_format": "fastload"}, "reload": []}
    done = run([str(WORKER), json.dumps(job)], variables | {"VLLM_PLUGINS": "other"})
    assert done.returncode != 0
    assert "Load format `fastload` is not supported" in done.stdout
