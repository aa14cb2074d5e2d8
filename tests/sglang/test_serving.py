"""The real server, as an operator starts it: from S3 as from a directory with SGLang's loader."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing.s3_server import S3Server
from tests.sglang.server import Server, environment, serving

pytestmark = [
    pytest.mark.engine,
    pytest.mark.s3,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
    ),
]

BUCKET = "sglang-serving"

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
def models(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Path:
    from fastload_common.testing.tiny_models import write_tiny_model

    root = tmp_path_factory.mktemp("models")
    s3_server.make_bucket(BUCKET)
    for seed, name in enumerate(("first", "second")):
        write_tiny_model(root / name, "qwen3", seed=seed)
        s3_server.upload_dir(root / name, BUCKET, name)
    return root


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("work")
    (work / "python").mkdir()
    (work / "python" / "sitecustomize.py").write_text(NOTE_HOSTS)
    return work


def facts(server: Server, second: str) -> dict[str, Any]:
    """Tokens and parameters of the model, and of another one that is then put in its place."""
    first = [server.tokens(), server.checksums()]
    gone = server.ask("/update_weights_from_disk", {"model_path": f"{second}-gone"})
    assert not gone["success"], gone
    after = [server.tokens(), server.checksums()]
    updated = server.ask("/update_weights_from_disk", {"model_path": second})
    assert updated["success"], updated
    return {
        "first": first,
        "after a failed update": after,
        "second": [server.tokens(), server.checksums()],
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_from_s3_all_is_as_the_default_loader_makes_it(
    models: Path, work: Path, s3_server: S3Server, ranks: int
) -> None:
    with serving(
        work / f"default-{ranks}.log",
        environment(work, ranks=ranks),
        str(models / "first"),
        ranks=ranks,
    ) as server:
        wanted = facts(server, str(models / "second"))
    report = work / f"report-{ranks}.jsonl"
    mine = s3_server.environ() | {
        "FASTLOAD_REPORT": str(report),
        "TEST_HOSTS": str(work / f"hosts-{ranks}"),
        "PYTHONPATH": f"{work / 'python'}{os.pathsep}{environment(work)['PYTHONPATH']}",
    }
    variables = environment(work, mine, ranks=ranks)
    del variables["HF_HUB_OFFLINE"]  # nobody forbids the hub: it is not asked
    with serving(
        work / f"fastload-{ranks}.log",
        variables,
        f"s3://{BUCKET}/first",
        *("--load-format", "fastload"),
        ranks=ranks,
    ) as server:
        found = facts(server, f"s3://{BUCKET}/second")
    assert found == wanted
    assert wanted["first"] != wanted["second"]
    assert len(wanted["first"][1]) > 15 * ranks
    assert {name.split()[0] for name in wanted["first"][1]} == {str(r) for r in range(ranks)}
    check_reports([json.loads(line) for line in report.read_text().splitlines()], ranks)
    check_hosts(Path(mine["TEST_HOSTS"]).read_text().split())


def check_reports(reports: list[dict[str, Any]], ranks: int) -> None:
    starts = [r for r in reports if r["uri"].endswith("/first")]
    updates = [r for r in reports if r["uri"].endswith("/second")]
    assert len(starts) == len(updates) == ranks
    assert {r["status"] for r in starts + updates} == {"ok"}
    assert {r["eager_reason"] for r in starts + updates} == {None}
    node_bytes = sum(r["fetched_bytes"] for r in starts)
    assert node_bytes <= 1.01 * starts[0]["model_bytes"]
    if ranks > 1:
        assert {r["node"]["exchange"] for r in starts} == {"on"}


def check_hosts(hosts: list[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent
        own = {str(probe.getsockname()[0])}
    own |= {"127.0.0.1", "::1", "localhost", socket.gethostname(), "0.0.0.0"}
    assert "127.0.0.1" in hosts
    assert set(hosts) - own == set()
