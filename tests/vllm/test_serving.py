"""The real engine as an operator starts it: drafts, reloading, and what errors look like."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing.s3_server import S3Server
from fastload_common.testing.vllm_cpu import add_vllm_metadata

pytestmark = [
    pytest.mark.engine,
    pytest.mark.s3,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WORKER = Path(__file__).with_name("serving_worker.py")
ROOT = Path(__file__).parents[2]
BUCKET = "serving"


# Every process of the engine notes which names it looks up and which addresses it calls.
NOTE_HOSTS = """
import os, sys

def note(event, arguments):
    host = None
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        # A datagram socket is "connected" to learn one's own address; nothing is sent.
        if arguments[0].type & 0xF == 1:
            host = arguments[1][0]
    if host is not None:
        with open(os.environ["TEST_HOSTS"], "a") as stream:
            print(host.decode() if isinstance(host, bytes) else host, file=stream)

sys.addaudithook(note)
"""


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
    names = add_vllm_metadata(work / "names")
    (names / "sitecustomize.py").write_text(NOTE_HOSTS)
    return s3_server.environ() | {
        "FASTLOAD_CACHE_DIR": str(work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": f"{names}{os.pathsep}{ROOT}",
        "TEST_HOSTS": str(work / "hosts"),
    }


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


def test_e08_drafts_and_reloads_come_from_s3_and_nowhere_else(
    models: Path, variables: dict[str, str]
) -> None:
    """Also where nobody forbade the hub."""

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
        {name: value for name, value in variables.items() if name != "HF_HUB_OFFLINE"},
    )
    own = {"127.0.0.1", "::1", "localhost", socket.gethostname(), own_address()}
    hosts = set(Path(variables["TEST_HOSTS"]).read_text().split())
    assert "127.0.0.1" in hosts
    assert hosts - own == set()
    wanted = tokens(
        {"engine": {"model": str(models / "first")}, "reload": [str(models / "second")]},
        variables,
    )
    assert wanted[0] != wanted[1]
    assert found == [wanted[0], wanted[0], wanted[1]]


def own_address() -> str:
    """The address that this machine would use; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def serve(model: str, variables: dict[str, str], *more: str) -> tuple[int, str]:
    command = str(Path(sys.executable).parent / "vllm")
    done = run([command, "serve", model, "--port", "0", *more], variables)
    return done.returncode, done.stdout


def test_an_error_in_a_directory_is_one_line(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    status, output = serve(str(tmp_path), variables, "--load-format", "fastload")
    assert status == 1
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("fastload: NoWeightsError: ")
    assert str(tmp_path) in last


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
