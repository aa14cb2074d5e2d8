"""Engines that are processes, on a real S3 server; and writers that are killed."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload_common.range_cache.place import directory_of
from fastload_common.testing.s3_server import S3Server
from tests.common.exchange.rank_processes import RankProcesses
from tests.common.range_cache import kill_main

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses() as found:
        yield found


class Engines:
    """Runs loads of one model by ranks that are processes, all with one cache."""

    def __init__(self, processes: RankProcesses, server: S3Server, root: Path, work: Path) -> None:
        self._processes = processes
        self._environ = server.environ()
        self._root = root
        self._work = work
        self._runs = 0

    def load(self, uri: str, ranks: int, truth: Path) -> list[dict[str, Any]]:
        """The reports of a load whose weights are right."""
        self._runs += 1
        found = self._processes.run(
            self._work / str(self._runs),
            uri,
            ranks,
            truth,
            environ=self._environ,
            settings={
                "chunk_bytes": "256KiB",
                "memory_bytes": "256MiB",
                "node_cache": str(self._root),
            },
            write_all=True,
            half_empty_disk=True,
        )
        reports = []
        for rank in found["ranks"]:
            result = rank["result"]
            assert result is not None
            assert (result["error"], result["faults"]) == (None, [])
            reports.append(result["report"])
        return reports


def total(reports: list[dict[str, Any]], field: str) -> int:
    return sum(report[field] for report in reports)


@pytest.mark.s3
def test_two_then_four_ranks_and_half_of_the_cache(
    processes: RankProcesses,
    s3_server: S3Server,
    checkpoint: Path,
    tensors: dict[str, torch.Tensor],
    root: Path,
    tmp_path: Path,
) -> None:
    bucket = f"b-{uuid.uuid4().hex[:16]}"
    s3_server.make_bucket(bucket)
    s3_server.upload_dir(checkpoint, bucket, "m")
    uri = f"s3://{bucket}/m"
    engines = Engines(processes, s3_server, root, tmp_path)
    model_bytes = sum(value.nbytes for value in tensors.values())

    first = engines.load(uri, 2, checkpoint)
    assert model_bytes * 0.95 <= total(first, "fetched_bytes") <= 1.01 * model_bytes
    assert [report["node_cache"]["reason"] for report in first] == [None, None]
    assert sum(report["node_cache"]["dropped_bytes"] for report in first) == 0

    second = engines.load(uri, 4, checkpoint)
    assert total(second, "fetched_bytes") == total(second, "requests") == 0
    assert sum(report["node_cache"]["read_bytes"] for report in second) >= model_bytes

    half = sorted(directory_of(root).glob("*.data"))[0]
    gone_bytes = half.stat().st_size
    half.unlink()
    half.with_suffix(".journal").unlink()
    third = engines.load(uri, 4, checkpoint)
    assert gone_bytes - 128 * 1024 <= total(third, "fetched_bytes") <= gone_bytes

    fourth = engines.load(uri, 3, checkpoint)
    assert total(fourth, "fetched_bytes") == total(fourth, "requests") == 0


def test_killed_writers_leave_nothing_that_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.common.range_cache.kill_main"]
    done = subprocess.run(
        [*command, str(tmp_path / "cache"), "40"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["killed"] > 20
    assert found["end"] == [kill_main.SIZE_BYTES, 0]
    # Data is written before its record, and the system does not crash here.
    assert found["bad"] == 0
    assert any(0 < good < kill_main.SIZE_BYTES for good in found["seen"])
