"""The compile key of real vLLM configurations changes when the artefact would, and only then.

So does the engine's own key, below which it looks for what was restored.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastload_common.compile_cache.key import diff, key_of
from fastload_common.testing.s3_server import S3Server
from tests.vllm.key_cases import BASES, CASES, SHARED, section

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compile-cache.md"
HEADING = "## What changes the key\n"

engine = [
    pytest.mark.engine,
    pytest.mark.s3,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

POD = {
    "HOSTNAME": "another-pod",
    "VLLM_HOST_IP": "10.0.0.9",
    "VLLM_PORT": "7777",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "5602",
    "VLLM_RAY_BUNDLE_INDICES": "3,4",
    "VLLM_PLUGINS": "fastload,lora_filesystem_resolver",
    "VLLM_API_KEY": "secret",
    "FASTLOAD_CONCURRENCY": "9",
    "PYTHONHASHSEED": "2",
}
SERVED = [
    "--host",
    "0.0.0.0",
    "--port",
    "9999",
    "--served-model-name",
    "x",
    "--api-key",
    "secret",
    "--seed",
    "3",
]


def places(root: Path, s3_server: S3Server) -> dict[str, str]:
    """Directories with configurations, most without weights; one in two buckets too."""
    import transformers

    from fastload_common.testing.sweep_checkpoints import tiny_config
    from fastload_common.testing.tiny_models import FAMILIES, write_tiny_model

    def write(name: str, family: str, architecture: str, **changes: Any) -> str:
        kind, arguments = FAMILIES[family]
        arguments = arguments | changes | {"architectures": [architecture], "dtype": "bfloat16"}
        getattr(transformers, kind)(**arguments).save_pretrained(root / name)
        return str(root / name)

    dense, expert = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
    found = {
        "dense": str(write_tiny_model(root / "dense", "qwen3")),  # in S3 it must be whole
        "draft": write("draft", "qwen3", dense, num_hidden_layers=1),
        "draft2": write("draft2", "qwen3", dense, num_hidden_layers=1, intermediate_size=128),
        "experts": write("experts", "qwen3_moe", expert),
        "vision": str(root / "vision"),
    }
    vision = tiny_config("Blip2ForConditionalGeneration")
    vision.architectures = ["Blip2ForConditionalGeneration"]
    vision.save_pretrained(root / "vision")
    for name in ("dense", "draft"):
        found[f"{name}_elsewhere"] = str(shutil.copytree(found[name], root / "x" / name / "rev"))
    for name, bucket in (("dense_s3", "keys-one"), ("dense_s3_other", "keys-two")):
        s3_server.make_bucket(bucket)
        s3_server.upload_dir(Path(found["dense"]), bucket, name)
        found[name] = f"s3://{bucket}/{name}"
    return found


@pytest.fixture(scope="module")
def told(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes say: one of all cases, and at once the command line of another pod."""
    root = tmp_path_factory.mktemp("keys")
    found = places(root, s3_server)
    job = root / "job.json"
    job.write_text(json.dumps({"places": found, "scratch": str(root / "variants")}))
    shared = s3_server.environ() | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    here = {
        "FASTLOAD_COMPILE_CACHE": str(root / "store"),
        "FASTLOAD_CACHE_DIR": str(root / "cache"),
        "PYTHONHASHSEED": "1",
    }
    there = POD | {name: str(root / "pod") for name in ("VLLM_CACHE_ROOT", "FASTLOAD_CACHE_DIR")}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SHARED.items()]
    command = ["cache", "key", found["dense_s3_other"], "--json", "--", *options, *SERVED]
    jobs = (
        ([sys.executable, "-m", "tests.vllm.key_worker", str(job)], shared | here),
        ([sys.executable, "-m", "fastload_common.cli.main", *command], shared | there),
    )
    with ThreadPoolExecutor() as pool:
        table, pod = pool.map(lambda each: run(*each), jobs)
    # Nothing but its document comes from the command.
    return {"table": json.loads(table.splitlines()[-1]), "pod": json.loads(pod)}


def run(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


class TestEngine:
    pytestmark = engine

    @pytest.mark.parametrize("name", CASES)
    def test_c05_c07_c12_one_change(self, told: dict[str, Any], name: str) -> None:
        case, found = CASES[name], told["table"][name]
        assert bool(found["differing"]) is case.changes, found["differing"]
        if case.engine is not None:
            assert found["own"] is case.engine, found["differing"]
        # Where the engine looks elsewhere, what we restore under the same key is of no use.
        assert found["differing"] or not found["own"]
        assert found["sent"], "another key in the engine's core"

    @pytest.mark.parametrize("name", BASES)
    def test_a_key_is_that_of_the_process_that_it_is_sent_to(
        self, told: dict[str, Any], name: str
    ) -> None:
        assert told["table"][name]["sent"]

    def test_c03_c05_c21_another_pod_has_the_same_key(self, told: dict[str, Any]) -> None:
        here, there = told["table"]["dense"]["factors"], told["pod"]["factors"]
        assert diff(here, there) == []
        assert told["pod"]["key"] == key_of(here)


def test_the_page_has_every_case() -> None:
    _, _, rest = PAGE.read_text().partition(HEADING)
    written, _, _ = rest.partition("\n## ")
    assert section().strip() in written, "put what section() returns there"
