"""The commands on a directory and on a real S3 server: what is printed, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastload_common.cli.main import main
from fastload_common.config import OPTIONS
from fastload_common.testing.s3_server import S3Server

CHUNK_BYTES = 64 * 1024


def write_model(directory: Path) -> Path:
    """Two shards, two dtypes, a scalar, an empty tensor, an index, and files beside them."""
    directory.mkdir(parents=True, exist_ok=True)
    first: dict[str, Any] = {
        "embed.weight": np.arange(40_000, dtype=np.float32).reshape(100, 400),
        "scale": np.full((), 3, dtype=np.float16),
    }
    second: dict[str, Any] = {
        "norm.weight": np.ones(7, dtype=np.float16),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensors in zip(names, (first, second), strict=True):
        save_file(tensors, directory / name, {"format": "pt"})
    index = dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text('{"architectures": []}')
    (directory / "empty.txt").write_text("")
    (directory / "original").mkdir()
    (directory / "original" / "consolidated.pth").write_bytes(b"x" * 1000)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def uri(model: Path, s3_server: S3Server, s3_bucket: str) -> str:
    s3_server.upload_dir(model, s3_bucket, "tiny")
    return f"s3://{s3_bucket}/tiny"


def read_bytes(model: Path) -> int:
    """What `bench` reads of the model: everything but ``original/``."""
    return sum(path.stat().st_size for path in model.iterdir() if path.is_file())


def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_inspect_prints_tensors_shards_and_sizes(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(model)]) == 0
    out = capsys.readouterr().out
    assert "embed.weight" in out
    assert "100x400" in out
    assert "scalar" in out
    assert "model-00002-of-00002.safetensors" in out
    assert "4 tensors in 2 shards, 156.3 KiB" in out


def test_inspect_can_leave_the_tensors_out(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model), "--no-tensors"]) == 0
    out = capsys.readouterr().out
    assert "embed.weight" not in out
    assert "4 tensors in 2 shards" in out


@pytest.mark.s3
def test_inspect_as_json_from_s3(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", uri, "--json"]) == 0
    found = as_json(capsys)
    assert found["root"] == uri
    assert found["tensor_count"] == 4
    assert found["tensor_bytes"] == 160_000 + 2 + 14
    assert found["dtypes"] == {
        "F32": {"tensors": 2, "bytes": 160_000},
        "F16": {"tensors": 2, "bytes": 16},
    }
    assert [shard["tensors"] for shard in found["shards"]] == [2, 2]
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    embed = by_name["embed.weight"]
    assert (embed["dtype"], embed["shape"]) == ("F32", [100, 400])
    assert embed["end"] - embed["start"] == 160_000
    assert embed["shard"] == "model-00001-of-00002.safetensors"
    assert by_name["empty"]["start"] == by_name["empty"]["end"]


@pytest.mark.s3
def test_bench_reads_every_byte_once(
    uri: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--json", "--set", "chunk_bytes=64KiB", "--set", "concurrency=3"]
    assert main(["bench", uri, *arguments]) == 0
    found = as_json(capsys)
    assert found["size_bytes"] == read_bytes(model) == found["bytes_received"]
    sizes = [path.stat().st_size for path in model.iterdir() if path.is_file()]
    assert found["objects"] == sum(size > 0 for size in sizes)
    assert found["requests"] == sum(-(-size // CHUNK_BYTES) for size in sizes)
    assert found["retries"] == 0
    assert found["concurrency"] == 3
    assert 0 < found["new_connections"] <= 3
    assert found["wall_s"] > 0
    assert found["gib_per_s"] > 0
    assert found["cpu_s_per_gib"] > 0
    assert found["total_s"]["max"] >= found["total_s"]["p50"] > 0


def test_bench_prints_speed_and_cpu(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(model)]) == 0
    out = capsys.readouterr().out
    assert "GiB/s" in out
    assert "s/GiB" in out
    assert "0 retries" in out


def test_bench_holds_its_memory_bound(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "chunk_bytes=64KiB", "--set", "memory_bytes=1MiB"]
    assert main(["bench", str(model), "--json", *settings]) == 0
    assert as_json(capsys)["peak_staging_bytes"] <= 1024**2


def test_bench_of_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path)]) == 2
    assert "nothing to read" in capsys.readouterr().err


def test_config_prints_every_setting_with_its_origin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FASTLOAD_MAX_ATTEMPTS", "9")
    assert main(["config", "--json", "--set", "chunk_bytes=16MiB"]) == 0
    found = as_json(capsys)
    assert list(found) == [option.name for option in OPTIONS]
    assert found["max_attempts"] == {
        "value": 9,
        "origin": "FASTLOAD_MAX_ATTEMPTS",
        "unit": "count",
    }
    assert found["chunk_bytes"]["value"] == 16 * 1024**2
    assert found["chunk_bytes"]["origin"] == "--set"
    assert found["concurrency"]["origin"] == "default"
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert all(option.name in out and option.meaning in out for option in OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "--set", "concurrency"], "expected NAME=VALUE"),
        (["config", "--set", "concurency=3"], "did you mean concurrency?"),
        (["bench", "/", "--set", "concurrency=x"], "expected a whole number"),
        (["inspect", "/nowhere/at/all"], "ObjectMissingError"),
        (["inspect", "gs://bucket/model"], "ConfigError"),
    ],
)
def test_errors_are_one_clear_line_without_a_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.err.startswith("fastload: ")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback_wherever_it_stands(
    place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["inspect", "/nowhere/at/all"]
    arguments.insert(place, "--debug")
    assert main(arguments) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nothing"], ["inspect"], ["inspect", "a", "b"]])
def test_a_wrong_command_line_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "Usage: fastload" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fastload 0.")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("inspect", "bench", "doctor", "config"))


@pytest.mark.s3
def test_a_wrong_secret_is_one_line_and_the_secret_is_not_printed(
    uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-that-nobody-may-see")
    for command in (["inspect", uri], ["bench", uri], ["--debug", "inspect", uri]):
        assert main(command) == 2
        printed = capsys.readouterr()
        assert "AccessDeniedError" in printed.err
        assert "wrong-secret" not in printed.err + printed.out
        assert "Signature=" not in printed.err


@pytest.mark.s3
def test_the_installed_program_works_in_a_pipe(uri: str) -> None:
    """Names are whole and nothing is coloured when another program reads."""
    program = Path(sys.executable).parent / "fastload"
    done = subprocess.run(
        [str(program), "inspect", uri],
        env={**os.environ, "COLUMNS": "40"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "model-00001-of-00002.safetensors" in done.stdout
    assert "\x1b" not in done.stdout
