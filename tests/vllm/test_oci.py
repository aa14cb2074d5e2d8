"""Real vLLM from a registry: the same tokens as from a directory, few bytes more than the model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.registry_server import RegistryServer, missing_programs
from fastload_common.testing.vllm_cpu import add_vllm_metadata
from tests.registry_models import (
    CHUNK_BYTES,
    MOST,
    push_compressed,
    push_files,
    push_image,
    served_bytes,
    write_model,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(bool(missing_programs()), reason=missing_programs() or "-"),
]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPRESSIONS = ("gzip", "zstd")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def registry(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """Debian's registry, with the model as raw layers, and in the folder of an image."""
    with RegistryServer(PrivateAuthority(tmp_path_factory.mktemp("authority"))) as server:
        push_files(server, "raw", model)
        push_image(server, "image", model)
        for how in COMPRESSIONS:
            push_compressed(server, how, model)
        yield server


@pytest.fixture(scope="module")
def variables(registry: RegistryServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    work = tmp_path_factory.mktemp("work")
    names = add_vllm_metadata(work / "names")
    return registry.environ() | {
        "FASTLOAD_CACHE_DIR": str(work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": f"{names}{os.pathsep}{ROOT}",
    }


def run(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=850,
    )


def tokens(ranks: int, cases: dict[str, str], variables: dict[str, str]) -> dict[str, Any]:
    job = {
        "tensor_parallel_size": ranks,
        "cases": [
            {
                "name": name,
                "model": model,
                "load_format": "fastload" if model.startswith("oci://") else "auto",
            }
            for name, model in cases.items()
        ],
    }
    done = run([str(HERE / "token_worker.py"), json.dumps(job)], variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(cases), done.stdout[-5000:]
    rows = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    return {row["name"]: row["tokens"] for row in rows}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_tokens_and_few_bytes_more(
    ranks: int, model: Path, registry: RegistryServer, variables: dict[str, str], tmp_path: Path
) -> None:
    begin = len(registry.log_text())
    cases = {"directory": str(model), "raw": f"oci://{registry.host}/raw:v"}
    if ranks == 2:
        cases["image"] = f"oci://{registry.host}/image:v/models/m"
    more = {
        "FASTLOAD_CACHE_DIR": str(tmp_path / "cache"),
        "FASTLOAD_REPORT": str(tmp_path / "report"),
        "FASTLOAD_CHUNK_BYTES": str(CHUNK_BYTES),
    }
    found = tokens(ranks, cases, variables | more)
    assert len({str(row) for row in found["directory"]}) > 1
    assert all(one == found["directory"] for one in found.values())
    model_bytes = sum(file.stat().st_size for file in model.iterdir())
    reports = [json.loads(line) for line in (tmp_path / "report").read_text().splitlines()]
    for repository in list(cases)[1:]:
        sent_bytes = served_bytes(registry, repository, begin)
        own = [
            row for row in reports if row["uri"].startswith(f"oci://{registry.host}/{repository}:")
        ]
        retries = sum(row["retries"] for row in own)
        share = sent_bytes / model_bytes
        print(f"TP={ranks} {repository}: {share:.4f} of {model_bytes} bytes, {retries} repeated")
        assert len(own) == ranks
        assert share > 0.95
        assert sent_bytes <= MOST * model_bytes + retries * CHUNK_BYTES


@pytest.mark.parametrize("ranks", [1, 2])
def test_compressed_layers_are_fetched_once_for_the_node(
    ranks: int, model: Path, registry: RegistryServer, variables: dict[str, str], tmp_path: Path
) -> None:
    more = {
        "FASTLOAD_CACHE_DIR": str(tmp_path / "cache"),
        "FASTLOAD_REPORT": str(tmp_path / "report"),
    }
    # TP=1 is started twice, the second time with what the first one has unpacked.
    first = {name: f"oci://{registry.host}/{name}:v/models/m" for name in COMPRESSIONS}
    again = {f"{name} again": uri for name, uri in first.items()} if ranks == 1 else {}
    begin = len(registry.log_text())
    found = tokens(ranks, {"directory": str(model), **first, **again}, variables | more)
    assert len({str(row) for row in found["directory"]}) > 1
    assert all(one == found["directory"] for one in found.values())
    for name in COMPRESSIONS:
        layers = [one for one in registry.requests(begin) if one.path.startswith(f"/v2/{name}/b")]
        size_bytes: dict[str, int] = {}
        for one in layers:
            size_bytes[one.path] = size_bytes.get(one.path, 0) + one.body_bytes
        rows = [
            row
            for row in map(json.loads, (tmp_path / "report").read_text().splitlines())
            if f"/{name}:" in row["uri"]
        ]
        assert len(rows) == ranks * (1 + bool(again))
        for row in rows:
            assert row["pulled"]["state"] == "found"  # by the process that made the configuration
        # The image's configuration is read too, and is no layer.
        sent_bytes = sum(size_bytes.values())
        stored_bytes = rows[0]["pulled"]["size_bytes"]
        print(f"TP={ranks} {name}: {sent_bytes} of {stored_bytes} bytes")
        # A request that looked slow may have been raced, on a busy machine.
        assert stored_bytes <= sent_bytes <= stored_bytes + 16 * 1024 + 2 * CHUNK_BYTES


def test_what_is_not_in_the_registry_is_one_line(
    registry: RegistryServer, variables: dict[str, str]
) -> None:
    command = str(Path(sys.executable).parent / "vllm")
    uri = f"oci://{registry.host}/raw:absent"
    for load_format, kind in (("fastload", "ObjectMissingError"), ("auto", "ConfigError")):
        done = run([command, "serve", uri, "--port", "0", "--load-format", load_format], variables)
        assert done.returncode == 1
        assert "Traceback" not in done.stdout
        last = done.stdout.strip().splitlines()[-1]
        assert last.startswith(f"fastload: {kind}: ")
        assert uri in last
