"""A node of real vLLM ranks fetches each byte of a model once, whatever the model."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing.s3_server import S3Server
from fastload_common.testing.vllm_cpu import add_vllm_metadata

pytestmark = [
    pytest.mark.engine,
    pytest.mark.s3,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUCKET = "exchange"
RANKS = 2
MOST = 1.01
"""Bytes that the node fetches / bytes of the model."""


@pytest.fixture(scope="module")
def kinds(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Kind -> URI of a model, in the order in which one process must load them."""
    from fastload_common.testing.tiny_models import write_tokenizer

    exchange_models = _module("exchange_models")
    s3_server.make_bucket(BUCKET)
    found = {}
    for kind in exchange_models.KINDS:
        directory = tmp_path_factory.mktemp(kind)
        exchange_models.write_model(directory, kind)
        write_tokenizer(directory)
        s3_server.upload_dir(directory, BUCKET, kind)
        found[kind] = f"s3://{BUCKET}/{kind}"
    return found


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def variables(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    work = tmp_path_factory.mktemp("work")
    names = add_vllm_metadata(work / "names")
    return s3_server.environ() | {
        "FASTLOAD_CACHE_DIR": str(work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": f"{names}{os.pathsep}{ROOT}",
    }


@pytest.fixture(scope="module")
def loaded(
    kinds: dict[str, str],
    variables: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[dict[str, Any]]]:
    """Kind -> the reports of its ranks; every model loaded once, at TP=2."""
    work = tmp_path_factory.mktemp("loads")
    report = work / "report.jsonl"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes, logs = [], []
    for rank in range(RANKS):
        job = {"rank": rank, "world_size": RANKS, "port": port, "models": [*kinds.values()]}
        logs.append(work / f"rank{rank}.log")
        with logs[-1].open("w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "exchange_worker.py"), json.dumps(job)],
                    env=os.environ | variables | {"FASTLOAD_REPORT": str(report)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * RANKS, "\n".join(log.read_text()[-4000:] for log in logs)
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    found = {
        kind: sorted((row for row in rows if row["uri"] == uri), key=lambda row: row["rank"])
        for kind, uri in kinds.items()
    }
    assert all(len(rows) == RANKS for rows in found.values()), rows
    return found


@pytest.mark.parametrize("kind", ["dense", "gqa", "moe", "mla", "fp8", "fp8-block"])
def test_each_byte_once(loaded: dict[str, list[dict[str, Any]]], kind: str) -> None:
    rows = loaded[kind]
    fetched = sum(row["fetched_bytes"] for row in rows)
    alone = sum(row["needed_bytes"] for row in rows)
    model = rows[0]["model_bytes"]
    print(
        f"{kind}: node fetched {fetched / model:.4f} of the model, its ranks need {alone / model}"
    )
    for row in rows:
        assert row["status"] == "ok"
        assert row["eager_reason"] is None
        assert row["node"]["exchange"] == "on", row["node"]
        assert row["node"]["received_bytes"] > 0
    assert model > 10e6
    assert fetched <= MOST * model
    # All of it arrives: these models leave no tensor out.
    assert fetched >= model
    assert alone >= model
    assert max(row["fetched_bytes"] for row in rows) < 0.6 * fetched


@pytest.mark.parametrize("kind", ["dense", "gqa", "moe", "mla", "fp8", "fp8-block"])
def test_the_plan_tells_what_is_loaded(
    kinds: dict[str, str],
    variables: dict[str, str],
    loaded: dict[str, list[dict[str, Any]]],
    kind: str,
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fastload_common.cli.main", "plan", kinds[kind]),
            *("--tp", str(RANKS), "--json"),
        ],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    plan = json.loads(done.stdout)
    rows = loaded[kind]
    assert plan["model_bytes"] == rows[0]["model_bytes"]
    for key in ("needed_bytes", "fetched_bytes"):
        assert [rank[key] for rank in plan["ranks"]] == [row[key] for row in rows], key
    node = plan["node"]
    assert node["fetched_bytes"] == rows[0]["node"]["node_fetched_bytes"]
    assert node["shared_bytes"] == rows[0]["node"]["node_shared_bytes"]
    assert node["alone_fetched_bytes"] > node["fetched_bytes"]
    assert not any(rank["eager"] for rank in plan["ranks"])


def test_a_server_says_it_in_its_log(
    kinds: dict[str, str], variables: dict[str, str], tmp_path: Path
) -> None:
    """`vllm serve` as an operator starts it, TP=2; its log has the ratio, its report too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log, report = tmp_path / "log", tmp_path / "report.jsonl"
    with log.open("w") as output:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", kinds["dense"]),
                *("--load-format", "fastload", "--tensor-parallel-size", "2", "--enforce-eager"),
                *("--max-model-len", "64", "--max-num-seqs", "2", "--port", str(port)),
            ],
            env=os.environ | variables | {"FASTLOAD_REPORT": str(report)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_up(server, port, log)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=60)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok", "ok"]
    fetched = sum(row["fetched_bytes"] for row in rows)
    print(f"served: node fetched {fetched / rows[0]['model_bytes']:.4f} of the model")
    assert fetched <= MOST * rows[0]["model_bytes"]
    said = re.findall(
        r"fastload: rank [01]/2 loaded .* all of them fetched ([0-9.]+) of the model",
        log.read_text(),
    )
    assert len(said) == RANKS, log.read_text()[-4000:]
    assert all(1 <= float(ratio) <= MOST for ratio in said), said


def _wait_until_up(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end_s = time.monotonic() + 400
    while True:
        assert server.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < end_s, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
