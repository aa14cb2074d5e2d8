"""The command ``fastload plan`` with an engine of the test: what it prints and never reads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload_common.cli.main import main
from fastload_common.errors import EngineUnsupportedError
from fastload_common.load.plan_job import PlanJob
from fastload_common.testing.request_log import LoggingProxy
from fastload_common.testing.s3_server import S3Server
from tests.common.cli.plan_engine import (
    COLUMNS,
    MATRIX_BYTES,
    MODEL_BYTES,
    NORM_BYTES,
    AsksForValues,
    CannotBeBuilt,
    CannotBeTraced,
    EmptyStage,
    Engine,
    OtherShape,
    Prepared,
    write_model,
)

pytestmark = [
    pytest.mark.torch,
    # Where a fork beside threads is warned of (Python 3.12), the tests' servers are meant.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

# More than between two parts of rows, less than between two ranks' rows.
GAP = ("--set", "merge_gap_bytes=16KiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class NeverStarted(Engine):
    def prepare(self, job: PlanJob) -> Prepared:
        raise RuntimeError("it was started")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--engine", "test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_every_rank_and_the_node(
    model: Path, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(Engine())
    found = planned(capsys, str(model), "--tp", "4", "--chunk-bytes", "64KiB", "--gbps", "8", *GAP)
    assert found["model_bytes"] == MODEL_BYTES
    assert found["chunk_bytes"] == 64 * 1024
    for rank in found["ranks"]:
        assert rank["needed_bytes"] == MATRIX_BYTES // 2 + NORM_BYTES + 4
        # Its rows, all of the matrix whose columns it needs, norm and scalar; heads of chunks.
        alone = MATRIX_BYTES // 4 + MATRIX_BYTES + NORM_BYTES + 4
        assert abs(rank["alone_fetched_bytes"] - alone) < 2 * COLUMNS * 4
        assert rank["tensors"] == rank["copies"] == 4
        assert rank["received_bytes"] > 0
        assert not rank["eager"]
    node = found["node"]
    assert node["needed_bytes"] == MODEL_BYTES
    assert 0 <= node["fetched_bytes"] - MODEL_BYTES < 256
    # A chunk may begin a little before the end of another one: read twice, and needed.
    assert node["over_read_bytes"] <= node["fetched_bytes"] - MODEL_BYTES
    assert node["seconds"] == node["fetched_bytes"] / 1e9
    assert node["alone_seconds"] == node["alone_fetched_bytes"] / 1e9
    for key in ("fetched_bytes", "requests", "over_read_bytes", "alone_fetched_bytes"):
        assert node[key] == sum(rank[key] for rank in found["ranks"])
    assert found["notes"] == []


def test_the_table_says_the_same(
    model: Path, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(Engine())
    assert main(["plan", str(model), "--engine", "test", "--tp", "2", "--gbps", "25", *GAP]) == 0
    printed = capsys.readouterr()
    assert "engines print" not in printed.out + printed.err
    assert "the node fetches 1.000 of the model's 4.0 MiB; without exchange 1.500" in printed.out
    assert "at 25 Gbit/s: 0.00 s" in printed.out
    rows = [line.split() for line in printed.out.splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("0", "1", "node")] == ["0", "1", "node"]


def test_progress_is_shown_to_a_terminal_only(
    model: Path,
    engine: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Quiet(Engine):  # what it prints would pass by the descriptors here
        def prepare(self, job: PlanJob) -> Prepared:
            return Prepared(self, job)

    engine(Quiet())
    assert main(["plan", str(model), "--engine", "test", "--tp", "2", "--json"]) == 0
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["plan", str(model), "--engine", "test", "--tp", "2", "--json"]) == 0
    printed = capfd.readouterr()
    assert len(json.loads(printed.out)["ranks"]) == 2
    assert printed.err.splitlines() == [
        "fastload: the engine starts",
        "fastload: 1 of 2 ranks traced",
        "fastload: 2 of 2 ranks traced",
    ]


def test_without_peers_nothing_is_shared(
    model: Path, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(Engine())
    found = planned(capsys, str(model))
    assert [rank["received_bytes"] for rank in found["ranks"]] == [0]
    assert found["node"]["shared_bytes"] == 0
    assert found["node"]["fetched_bytes"] == found["node"]["alone_fetched_bytes"]


@pytest.mark.s3
def test_headers_only_are_read(
    model: Path,
    engine: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    s3_server: S3Server,
    s3_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3_server.upload_dir(model, s3_bucket, "model")
    with LoggingProxy(s3_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        engine(Engine())
        found = planned(capsys, f"s3://{s3_bucket}/model", "--tp", "2")
        assert found["node"]["fetched_bytes"] >= MODEL_BYTES
        read = [row for row in proxy.requests if row.path.endswith(".safetensors")]
    # Once for both ranks: the first piece of each file, far less than its data.
    assert len(read) == 2
    assert all(row.body_bytes <= 128 * 1024 < MATRIX_BYTES for row in read)


def test_values_are_assumed_and_it_is_said(
    model: Path, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(Engine(AsksForValues))
    found = planned(capsys, str(model), "--tp", "2")
    [note] = found["notes"]
    assert note["ranks"] == [0, 1]
    assert "values of 1 tensors are asked for while tracing (scale)" in note["note"]
    assert "zeros" in note["note"]
    for rank in found["ranks"]:
        assert rank["needed_bytes"] == MATRIX_BYTES + NORM_BYTES + 4
        assert rank["requests"] >= 2


@pytest.mark.parametrize(
    ("planner", "reason"),
    [
        (Engine(CannotBeTraced), "not traceable (RuntimeError: values of zero make no sense here)"),
        (Engine(eager="the engine quantizes while it loads"), "quantizes while it loads"),
    ],
)
def test_whole_tensors_are_assumed_and_it_is_said(
    model: Path,
    engine: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    planner: Engine,
    reason: str,
) -> None:
    engine(planner)
    found = planned(capsys, str(model), "--tp", "2")
    assert f"every tensor is read whole, by each rank: {reason}" in found["notes"][0]["note"] or (
        reason in found["notes"][0]["note"]
    )
    for rank in found["ranks"]:
        assert rank["eager"]
        assert rank["needed_bytes"] == MODEL_BYTES
        assert rank["received_bytes"] == 0
    assert found["node"]["fetched_bytes"] >= 2 * MODEL_BYTES
    assert found["node"]["needed_bytes"] == MODEL_BYTES


@pytest.mark.parametrize(
    ("planner", "text"),
    [
        (Engine(OtherShape), "TensorMismatchError: "),
        (Engine(CannotBeBuilt), "ZeroDivisionError: no heads are left"),
    ],
)
def test_what_the_engine_refuses_is_an_error(
    model: Path,
    engine: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    planner: Engine,
    text: str,
) -> None:
    engine(planner)
    assert main(["plan", str(model), "--engine", "test", "--tp", "2"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert text in printed.err
    assert "Traceback" not in printed.err


def test_errors_of_the_checkpoint_are_those_of_a_load(
    tmp_path: Path, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(Engine())
    assert main(["plan", str(tmp_path), "--engine", "test"]) == 2
    assert capsys.readouterr().err.startswith("fastload: NoWeightsError: ")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("/nonexistent/model", "no such directory: /nonexistent/model"),
        ("./nonexistent", "no such directory: ./nonexistent"),
        ("a/b/c", "no such directory: a/b/c"),
        ("gs://bucket/model", "unknown scheme gs://"),
    ],
)
def test_a_place_that_is_not_there_is_refused_before_the_engine_starts(
    place: str, text: str, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(NeverStarted())
    assert main(["plan", place, "--engine", "test"]) == 2
    assert capsys.readouterr().err.startswith(f"fastload: ConfigError: {text}")


def test_an_id_of_a_hub_is_left_to_the_engine(
    engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(NeverStarted())
    assert main(["plan", "someone/model-7B", "--engine", "test"]) == 2
    assert "it was started" in capsys.readouterr().err


def test_a_stage_without_weights_is_noted(
    model: Path, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(Engine(EmptyStage))
    [note] = planned(capsys, str(model), "--pp", "2")["notes"]
    assert note["ranks"] == [1]
    assert "more stages than the model can fill" in note["note"]


def test_unknown_engines_and_arguments_are_errors(
    model: Path, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    class Absent(Engine):
        def check(self) -> None:
            raise EngineUnsupportedError("not installed in this environment")

    engine(Engine())
    assert main(["plan", str(model), "--engine", "other"]) == 2
    assert "no engine 'other'; there is test" in capsys.readouterr().err
    engine(Absent())
    assert main(["plan", str(model), "--engine", "test"]) == 2
    assert "not installed in this environment" in capsys.readouterr().err
    engine(Engine())
    for wrong in (["--engine-args", "{"], ["--engine-args", "[]"], ["--set", "chunk=1"]):
        assert main(["plan", str(model), "--engine", "test", *wrong]) == 2
        assert "ConfigError" in capsys.readouterr().err


def test_a_killed_engine_is_an_error(
    model: Path, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(Engine):
        def prepare(self, job: PlanJob) -> Prepared:
            os.kill(os.getpid(), 9)
            raise AssertionError

    engine(Killed())
    assert main(["plan", str(model), "--engine", "test"]) == 2
    assert "it ended with status -9" in capsys.readouterr().err
