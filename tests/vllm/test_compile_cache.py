"""The real engine with torch.compile: cold, again on the same node, and on a new node.

A new node is an empty disk and the same prefix in S3. Whether anything was compiled is what the
engine's counters say.
"""

from __future__ import annotations

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
from fastload_common.testing.vllm_cpu import add_vllm_metadata

pytestmark = [
    pytest.mark.timeout(1500),  # three starts of an engine
    pytest.mark.engine,
    pytest.mark.s3,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WORKER = Path(__file__).with_name("serving_worker.py")
ROOT = Path(__file__).parents[2]
BUCKET = "compiled"
NO_AOT = {"VLLM_USE_AOT_COMPILE": "0"}


class Node:
    """A node's disk, and the starts of engines on it.

    Attributes:
        directory: model and what stays when the node is replaced.
    """

    def __init__(self, directory: Path, store: S3Server, prefix: str) -> None:
        self.directory = directory
        self._disk = directory / "disk"
        names = add_vllm_metadata(directory / "names")
        self._variables = store.environ() | {
            "FASTLOAD_CACHE_DIR": str(self._disk / "cache"),
            "FASTLOAD_COMPILE_CACHE": f"{self._disk / 'entries'},s3://{BUCKET}/{prefix}",
            "FASTLOAD_REPORT": str(directory / "report"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": f"{names}{os.pathsep}{ROOT}",
        }

    def replace(self) -> None:
        """A new node: nothing is left of the disk."""
        shutil.rmtree(self._disk)

    def start(
        self, model: str, variables: dict[str, str], **engine: Any
    ) -> tuple[list[Any], dict[str, Any], str]:
        """Tokens, the report's line about the compile cache, and the log."""
        # A share of memory that is there while others test as well.
        own = {"model": model, "load_format": "fastload", "gpu_memory_utilization": 0.2}
        job = {"engine": own | {"enforce_eager": False} | engine, "reload": []}
        done = subprocess.run(
            [sys.executable, str(WORKER), json.dumps(job)],
            env=os.environ | self._variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=550,
        )
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert results, done.stdout[-5000:]
        lines = [json.loads(line) for line in (self.directory / "report").read_text().splitlines()]
        said = [line for line in lines if line.get("kind") == "compile_cache"]
        assert said, done.stdout[-5000:]
        return json.loads(results[-1].removeprefix("RESULT ")), said[-1], done.stdout


@pytest.fixture(scope="module")
def model(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    from fastload_common.testing.tiny_models import write_tiny_model

    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, "qwen3")
    s3_server.make_bucket(BUCKET)
    s3_server.upload_dir(directory, BUCKET, "model")
    s3_server.upload_dir(directory, BUCKET, "elsewhere/same-model")
    return f"s3://{BUCKET}/model"


def test_the_second_start_and_a_new_node_compile_nothing(
    model: str, s3_server: S3Server, tmp_path: Path
) -> None:
    node = Node(tmp_path, s3_server, "two-ranks")
    cold = node.start(model, NO_AOT, tensor_parallel_size=2)
    assert cold[1]["measured"] == "miss"
    assert cold[1]["compiled"] >= 2
    assert cold[1]["ranks"] == 2
    assert set(cold[1]["published"].values()) == {"stored"}

    again = node.start(model, NO_AOT, tensor_parallel_size=2)
    node.replace()
    # The same model under another name, and a plugin list and a port of this pod.
    noise = {"VLLM_PLUGINS": "fastload", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5999"}
    elsewhere = f"s3://{BUCKET}/elsewhere/same-model"
    new = node.start(elsewhere, NO_AOT | noise, tensor_parallel_size=2)
    for tokens, report, log in (again, new):
        assert report["measured"] == "hit", log[-5000:]
        assert report["compiled"] == 0
        assert report["loaded"] >= 2
        assert report["key"] == cold[1]["key"]
        assert report["saved_s"] > 0
        assert report["compile_s"] < cold[1]["compile_s"]
        assert tokens == cold[0]
    assert new[1]["store"].startswith("s3://")


def test_artefacts_that_the_engine_cannot_load_are_no_hit(
    model: str, s3_server: S3Server, tmp_path: Path
) -> None:
    """vLLM's CPU build saves what it compiles ahead of time, and cannot load it."""
    node = Node(tmp_path, s3_server, "ahead-of-time")
    cold = node.start(model, {})
    assert cold[1]["measured"] == "miss"
    again = node.start(model, {})
    assert again[0] == cold[0]
    assert again[1]["status"] == "hit"
    if again[1]["measured"] == "hit":
        pytest.skip("this build loads what it has saved")
    assert again[1]["measured"] == "unused"
    assert "cannot load" in again[1]["why"]
    assert "VLLM_USE_AOT_COMPILE" in again[1]["why"]
    assert again[1]["published"] == {}
    assert "compile cache: unused, as measured" in again[2]
