"""SGLang's `Engine` without a server, with a data-parallel controller between."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing.s3_server import S3Server
from tests.sglang.server import environment, shared_memory

pytestmark = [
    pytest.mark.engine,
    pytest.mark.s3,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
    ),
]

WORKER = Path(__file__).with_name("engine_worker.py")
BUCKET = "sglang-engine"


def tokens(arguments: dict[str, Any], variables: dict[str, str]) -> Any:
    before = shared_memory()
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(arguments)],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=400,
    )
    for segment in shared_memory() - before:
        segment.unlink(missing_ok=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-5000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def test_each_replica_of_an_engine_loads_from_s3(s3_server: S3Server, tmp_path: Path) -> None:
    from fastload_common.testing.tiny_models import write_tiny_model

    write_tiny_model(tmp_path / "model", "qwen3")
    s3_server.make_bucket(BUCKET)
    s3_server.upload_dir(tmp_path / "model", BUCKET, "model")
    wanted = tokens({"model_path": str(tmp_path / "model")}, environment(tmp_path))
    report = tmp_path / "report.jsonl"
    mine = s3_server.environ() | {"FASTLOAD_REPORT": str(report)}
    arguments = {"model_path": f"s3://{BUCKET}/model", "load_format": "fastload", "dp_size": 2}
    assert tokens(arguments, environment(tmp_path, mine, ranks=2)) == wanted
    reports = [json.loads(line) for line in report.read_text().splitlines()]
    assert [r["status"] for r in reports] == ["ok", "ok"]
