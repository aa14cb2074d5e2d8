"""Real vLLM from a registry: the same tokens as from a directory, few bytes more than the model."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.registry_server import (
    FILEPATH,
    RegistryServer,
    missing_programs,
)
from fastload_common.testing.vllm_cpu import add_vllm_metadata

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(bool(missing_programs()), reason=missing_programs() or "-"),
]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RAW = "application/vnd.cncf.model.weight.v1.raw"
TAR = "application/vnd.oci.image.layer.v1.tar"
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 1),
    "zstd": lambda data: zstandard.compress(data, 1),
}
MOST = 1.01
"""Bytes that the registry serves / bytes of the model, of all processes of an engine."""
CHUNK_BYTES = 4 << 20
"""What a repeated request may cost: on a busy machine some look slow and are raced."""

# Large enough that headers, which each process reads, are no tenth of a percent of it.
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fastload_common.testing.tiny_models import write_tiny_model

    directory = tmp_path_factory.mktemp("models") / "m"
    return write_tiny_model(directory, "qwen3", max_shard_bytes=90_000_000, **SHAPE)


@pytest.fixture(scope="module")
def registry(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """Debian's registry, with the model as raw layers, and in the folder of an image."""
    with RegistryServer(PrivateAuthority(tmp_path_factory.mktemp("authority"))) as server:
        layers = [
            server.push_blob("raw", file.read_bytes(), RAW, {FILEPATH: file.name})
            for file in sorted(model.iterdir())
        ]
        server.push_manifest("raw", "v", layers)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            archive.add(model, "models/m")
        server.push_manifest("image", "v", [server.push_blob("image", out.getvalue(), TAR)])
        for repository, squeeze in COMPRESSIONS.items():
            push_compressed(server, repository, model, squeeze)
        yield server


def push_compressed(
    server: RegistryServer, repository: str, model: Path, squeeze: Callable[[bytes], bytes]
) -> None:
    """An image whose every file is a compressed layer; configuration and tokenizer too."""
    layers, digests = [], []
    for file in sorted(model.iterdir()):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            archive.add(file, f"models/m/{file.name}")
        digests.append(f"sha256:{hashlib.sha256(out.getvalue()).hexdigest()}")
        layers.append(server.push_blob(repository, squeeze(out.getvalue()), f"{TAR}+{repository}"))
    facts = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": digests},
    }
    config = server.push_blob(repository, json.dumps(facts).encode(), IMAGE_CONFIG)
    server.push_manifest(repository, "v", layers, config=config)


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


def served(registry: RegistryServer, repository: str, since: int) -> int:
    paths = f"/v2/{repository}/"
    return sum(one.body_bytes for one in registry.requests(since) if one.path.startswith(paths))


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
        served_bytes = served(registry, repository, begin)
        own = [
            row for row in reports if row["uri"].startswith(f"oci://{registry.host}/{repository}:")
        ]
        retries = sum(row["retries"] for row in own)
        share = served_bytes / model_bytes
        print(f"TP={ranks} {repository}: {share:.4f} of {model_bytes} bytes, {retries} repeated")
        assert len(own) == ranks
        assert share > 0.95
        assert served_bytes <= MOST * model_bytes + retries * CHUNK_BYTES


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
        served_bytes = sum(size_bytes.values())
        stored_bytes = rows[0]["pulled"]["size_bytes"]
        print(f"TP={ranks} {name}: {served_bytes} of {stored_bytes} bytes")
        # A request that looked slow may have been raced, on a busy machine.
        assert stored_bytes <= served_bytes <= stored_bytes + 16 * 1024 + 2 * CHUNK_BYTES


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
