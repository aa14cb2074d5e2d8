"""Every parameter and every token equal to the default loader's, in the real engine.

Each world size runs once: its ranks load every model with the default loader and with
fastload, from a directory and from S3, and compare all tensors bit for bit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing.s3_server import S3Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ROOT = Path(__file__).parents[2]
TOKEN_WORKER = Path(__file__).with_name("token_worker.py")

# A mixture of experts must be the first model: the expert-parallel group is made with it.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen3": {},
    "llama": {},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "mamba2": {},
    "gpt_oss": {},
    "bloom": {},
    # No lm_head in the files; one that equals the embedding; one that differs from it.
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen3-tied-equal-head": {},
    "qwen3-tied-other-head": {},
}
TOKEN_MODELS = ("qwen3_moe", "qwen3", "llama-one-kv-head", "mamba2", "gpt_oss", "bloom")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from fastload_common.testing.tiny_models import write_tiny_model

    root = tmp_path_factory.mktemp("models")
    made = {
        name: write_tiny_model(root / name, name.partition("-")[0], **overrides)
        for name, overrides in MODELS.items()
    }
    for name in ("qwen3-tied-equal-head", "qwen3-tied-other-head"):
        claim_tied(made[name], equal=name.endswith("equal-head"))
    return made


def claim_tied(directory: Path, *, equal: bool) -> None:
    """Let the configuration say that the embeddings are tied, though the files have an lm_head."""
    from safetensors.torch import load_file, save_file

    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    if not equal:
        return
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    embedding = load_file(directory / weight_map["model.embed_tokens.weight"])
    shard = directory / weight_map["lm_head.weight"]
    tensors = load_file(shard)
    tensors["lm_head.weight"] = embedding["model.embed_tokens.weight"].clone()
    save_file(tensors, shard, {"format": "pt"})


@pytest.fixture(scope="module")
def uris(s3_server: S3Server, models: dict[str, Path]) -> dict[str, str]:
    bucket = "equivalence"
    s3_server.make_bucket(bucket)
    for name, directory in models.items():
        s3_server.upload_dir(directory, bucket, name)
    return {name: f"s3://{bucket}/{name}" for name in models}


@pytest.fixture
def engine_environ(s3_server: S3Server, tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        **s3_server.environ(),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "FASTLOAD_CACHE_DIR": str(tmp_path / "cache"),
        "FASTLOAD_REPORT": str(tmp_path / "report.jsonl"),
    }


def run_ranks(commands: list[list[str]], environ: dict[str, str], tmp_path: Path) -> list[Any]:
    """Run one process a rank; the JSON results of each, or its output where it failed."""
    logs = [tmp_path / f"rank{rank}.log" for rank in range(len(commands))]
    processes = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT
                )
            )
    try:
        codes = [process.wait(timeout=1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for code, log in zip(codes, logs, strict=True):
        assert code == 0, log.read_text()[-4000:]
    return [list(_results(log)) for log in logs]


def _results(log: Path) -> Iterator[Any]:
    for line in log.read_text().splitlines():
        head, found, result = line.partition("RESULT ")
        if found and not head:
            yield json.loads(result)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_parameter_is_equal(
    world_size: int,
    models: dict[str, Path],
    uris: dict[str, str],
    engine_environ: dict[str, str],
    tmp_path: Path,
) -> None:
    cases = [
        {"name": f"{name} from {kind}", "directory": str(models[name]), "uri": uri}
        for name in models
        for kind, uri in (("a directory", str(models[name])), ("S3", uris[name]))
    ]
    worker = [sys.executable, "-m", "tests.vllm.equivalence_worker"]
    port = _free_port()
    jobs = [
        {"rank": rank, "world_size": world_size, "port": port, "cases": cases}
        for rank in range(world_size)
    ]
    results = run_ranks(
        [[*worker, json.dumps(job), str(models["qwen3_moe"])] for job in jobs],
        engine_environ,
        tmp_path,
    )
    for rank, rows in enumerate(results):
        assert [row["name"] for row in rows] == [case["name"] for case in cases]
        for row in rows:
            assert row["tensors"] > 10, row
            assert not row["missing"], (rank, row)
            assert not row["different"], (rank, row)
    _check_reports(tmp_path / "report.jsonl", world_size, len(cases))


def _check_reports(path: Path, world_size: int, cases: int) -> None:
    """Each load was traced, and with two ranks each one needed little more than half."""
    reports = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(reports) == world_size * cases
    for report in reports:
        assert report["status"] == "ok"
        assert report["eager_reason"] is None
        assert report["engine"] == "vllm"
        share = report["needed_bytes"] / report["model_bytes"]
        assert share <= 1.0
        if world_size == 2 and "tied" not in report["uri"]:
            # Replicated: norms and, with one KV head, that head.
            assert share < 0.56, report["uri"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_greedy_tokens_are_equal(
    world_size: int,
    models: dict[str, Path],
    uris: dict[str, str],
    engine_environ: dict[str, str],
    tmp_path: Path,
) -> None:
    # One process serves all models at TP=1; at TP=2 each one starts three more.
    names = [*TOKEN_MODELS, "qwen3-tied", "qwen3-tied-other-head"]
    from_directory = names if world_size == 1 else ["qwen3"]
    cases = []
    for name in names if world_size == 1 else TOKEN_MODELS:
        cases.append({"name": name, "model": str(models[name]), "load_format": "auto"})
        cases.append({"name": name, "model": uris[name], "load_format": "fastload"})
        if name in from_directory:
            cases.append({"name": name, "model": str(models[name]), "load_format": "fastload"})
    environ = dict(engine_environ)
    if world_size == 1:
        environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: no start for each model
    else:
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    job = {"tensor_parallel_size": world_size, "cases": cases}
    [rows] = run_ranks([[sys.executable, str(TOKEN_WORKER), json.dumps(job)]], environ, tmp_path)
    assert [row["name"] for row in rows] == [case["name"] for case in cases]
    default: dict[str, Any] = {}
    for row, case in zip(rows, cases, strict=True):
        if case["load_format"] == "auto":
            default = row
            assert len({token for tokens in row["tokens"] for token in tokens}) > 1
        assert row == default, case
