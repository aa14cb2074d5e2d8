"""The real SGLang compiles once: what one start compiled, others use, on this node or a new one.

At tensor parallelism 2 SGLang compiles a function of its embeddings, for prefill and for decoding.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing import sglang_cpu
from fastload_common.testing.s3_server import S3Server
from tests.sglang.server import environment, serving
from tests.sglang.test_engine import tokens

pytestmark = [
    pytest.mark.engine,
    pytest.mark.s3,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
    ),
]

BUCKET = "sglang-compile"
DEADLINE_S = 60.0


class Node:
    """A machine whose disk may be lost. Its paths stay: artefacts name them.

    Args:
        work: a new directory.
        s3: variables that lead to the S3 server.
    """

    def __init__(self, work: Path, s3: Mapping[str, str]) -> None:
        self.work = work
        self.disk = work / "disk"
        self.report = work / "report.jsonl"
        self.variables = {
            **environment(self.disk, ranks=2),
            **s3,
            "FASTLOAD_COMPILE_CACHE": f"{self.disk / 'store'},s3://{BUCKET}/compile",
            "FASTLOAD_REPORT": str(self.report),
        }

    def lose_disk(self) -> None:
        shutil.rmtree(self.disk)

    def reports(self) -> list[dict[str, Any]]:
        """Lines of the compile cache, oldest first."""
        if not self.report.exists():
            return []
        lines = map(json.loads, self.report.read_text().splitlines())
        return [line for line in lines if line.get("kind") == "compile_cache"]

    def serve(self, model: str, *arguments: str) -> tuple[list[int], dict[str, Any]]:
        """Tokens of a server that is started, and what it reports."""
        known = len(self.reports())
        log = self.work / f"{known}.log"
        with serving(log, self.variables, model, *arguments, ranks=2, warm_up=True) as server:
            found = server.tokens()
            deadline_s = time.monotonic() + DEADLINE_S
            while len(self.reports()) == known and time.monotonic() < deadline_s:
                time.sleep(0.2)
        assert len(self.reports()) == known + 1, "\n".join(server.own_lines())
        return found, self.reports()[-1]

    def generate(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """The same of an engine without a server; it reports when it is shut down."""
        known = len(self.reports())
        found = tokens({"tp_size": 2, **arguments}, self.variables)
        [report] = self.reports()[known:]
        return found, report


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Path:
    from fastload_common.testing.tiny_models import write_tiny_model

    directory = tmp_path_factory.mktemp("models") / "model"
    write_tiny_model(directory, "qwen3")
    s3_server.make_bucket(BUCKET)
    s3_server.upload_dir(directory, BUCKET, "model")
    return directory


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Node:
    return Node(tmp_path_factory.mktemp("node"), s3_server.environ())


@pytest.mark.timeout(1200)
def test_what_one_start_compiled_all_others_use(node: Node, model: Path) -> None:
    store = str(node.disk / "store")
    from_s3 = (f"s3://{BUCKET}/model", "--load-format", "fastload")

    wanted, cold = node.serve(*from_s3)
    assert cold["measured"] == cold["status"] == "miss"
    assert cold["ranks"] == 2
    assert cold["compiled"] >= 4
    assert cold["loaded"] == 0
    assert set(cold["published"].values()) == {"stored"}
    assert len(cold["published"]) == 2
    check_left(node, cold["key"])

    assert key_without_starting(node, *from_s3) == cold["key"]

    node.lose_disk()
    found, new_node = node.serve(*from_s3)
    assert found == wanted
    check_hit(new_node, cold)
    assert new_node["store"].startswith("s3://")

    # Another place of the same model, another loader, another port, and no server at all.
    generated, same_node = node.generate(model_path=str(model))
    check_hit(same_node, cold)
    assert same_node["store"] == store

    # One more argument that decides what is compiled; an engine publishes when it is shut down.
    again, other = node.generate(model_path=str(model), chunked_prefill_size=1024)
    assert again == generated
    assert other["measured"] == other["status"] == "miss"
    assert other["nearest_key"] == cold["key"]
    assert any("limits.max_num_batched_tokens" in line for line in other["differing"])
    assert set(other["published"].values()) == {"stored"}


def key_without_starting(node: Node, *arguments: str) -> str:
    """What ``fastload cache key --engine sglang`` says of such a server."""
    code = (
        "import json, sys\n"
        "from fastload_common.compile_cache.factors import check_factors\n"
        "from fastload_common.compile_cache.key import key_of\n"
        "from fastload_sglang.key_maker import key_maker\n"
        "key_maker.check()\n"
        "factors = check_factors(key_maker.factors(sys.argv[1:]))\n"
        "print('KEY', key_of(factors))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, *sglang_cpu.ARGUMENTS, "--tp", "2"],
        env=node.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=400,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("KEY ")]
    assert lines, done.stdout[-3000:]
    return lines[-1].split()[1]


def check_hit(report: Mapping[str, Any], cold: Mapping[str, Any]) -> None:
    """All was found that the first start had to compile, by the engine's own counters."""
    assert report["key"] == cold["key"], report["differing"]
    assert report["measured"] == report["status"] == "hit"
    assert report["compiled"] == 0
    assert report["loaded"] == cold["compiled"]
    assert report["files"] > 10
    assert report["saved_s"] > 0
    assert report["published"] == {}


def check_left(node: Node, key: str) -> None:
    """All artefacts are in this key's directory, none where the engine would put them."""
    [base] = (node.disk / "fastload-cache" / "compile").iterdir()
    assert key.startswith(base.name)
    assert list(base.glob("start-*")) == []
    others = (node.disk / "sglang-cache").rglob("*")
    assert [path for path in others if path.is_file() and path.suffix in (".py", ".so")] == []
