"""The command ``fastload advise``."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastload_common.cli.main import main
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.checkpoints import tiny_layers, write_checkpoint
from fastload_common.testing.registry_server import RegistryServer, missing_programs

MACHINE = ("--instance-type", "g6e.12xlarge", "--tp", "4")
MANIFEST = {"schemaVersion": 2, "layers": [{"size": 2_000_000_000}, {"size": 3_000_000_000}]}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> str:
        code = main(["advise", *arguments])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return run


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["advise", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(("size", "readers"), [("10GiB", 3), ("67GiB", 17), ("140GiB", 35)])
def test_published_values(run: Any, size: str, readers: int) -> None:
    found = run("--model-size", size, *MACHINE, "--format", "env", "--for", "runai")
    assert f"RUNAI_STREAMER_CONCURRENCY={readers}\n" in found
    assert "RUNAI_STREAMER_CHUNK_BYTESIZE=4294967296\n" in found
    assert "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS=3000\n" in found
    assert "RUNAI_STREAMER_S3_LOW_SPEED_LIMIT=1048576\n" in found


def test_the_model_is_measured_by_its_headers(run: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_layers())
    found = json.loads(run(str(tmp_path), *MACHINE, "--json"))
    assert found["model"]["bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert found["model"]["uri"] == str(tmp_path)


def test_for_people(run: Any, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(MANIFEST))
    found = run("--model-size", "67GiB", *MACHINE, "--manifest", str(manifest), "--image", "e/v:1")
    assert "machine g6e.12xlarge: 48 vCPUs, 384.0 GiB, 100 Gbit/s for a pod" in found
    assert "67.0 GiB (71.9 GB)" in found
    assert "image e/v:1: 4.7 GiB, 2 layers" in found
    assert "2 of 2 layers are above 1 GB" in found
    for name in ("FASTLOAD_NODE_CACHE", "RUNAI_STREAMER_CONCURRENCY", "discard_unpacked_layers"):
        assert name in found
    for phase in ("image, parallel pull", "weights, from S3", "new node, with these settings"):
        assert phase in found
    assert "As of 20" in found


def test_for_programs(run: Any) -> None:
    found = json.loads(
        run("--model-size", "67GiB", *MACHINE, "--layer", "2GB", "--image-size", "9GB", "--json")
    )
    assert found["image"] == {
        "reference": "",
        "bytes": 9_000_000_000,
        "layers": 1,
        "layers_above_1_gb": 1,
    }
    assert found["machine"]["vcpus"] == 48
    assert found["assumed"]["compile_s"] == 53
    settings = {setting["name"]: setting for setting in found["soci"]}
    assert settings["max_concurrent_unpacks_per_image"]["value"] == 1
    assert all(setting["why"] for setting in found["fastload"] + found["runai"] + found["soci"])
    assert all(phase["formula"] and phase["bound"] for phase in found["phases"])
    tomllib.loads(found["bottlerocket_toml"])
    assert "FastImagePull: true" in found["al2023_user_data"]


def test_node_files_and_variables(run: Any) -> None:
    image = ("--layer", "2GB", "--layer", "3GB")
    toml = tomllib.loads(run(*MACHINE, *image, "--format", "toml"))
    plugin = toml["settings"]["container-runtime-plugins"]["soci-snapshotter"]
    assert plugin["parallel-pull-unpack"]["max-concurrent-unpacks-per-image"] == 2
    assert run(*MACHINE, *image, "--format", "mime").startswith("MIME-Version: 1.0\n")
    arguments = ("--model-size", "67GiB", *MACHINE, "--node-directory", "/node/")
    variables = dict(line.split("=", 1) for line in run(*arguments, "--format", "env").splitlines())
    listed = yaml.safe_load(run(*arguments, "--format", "yaml"))["env"]
    assert {item["name"]: item["value"] for item in listed} == variables
    assert variables["FASTLOAD_COMPILE_CACHE"] == "/node/compile"
    assert variables["FASTLOAD_NODE_CACHE"] == "/node/ranges"


def test_a_manifest_from_standard_input(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(MANIFEST)))
    found = json.loads(run(*MACHINE, "--manifest", "-", "--json"))
    assert found["image"]["layers_above_1_gb"] == 2


def test_a_machine_by_its_numbers(run: Any) -> None:
    found = json.loads(
        run("--model-size", "8GiB", "--vcpus", "16", "--memory", "64GiB", "--gbps", "10", "--json")
    )
    assert found["machine"]["name"] == "this machine"
    assert found["machine"]["nvme_bytes"] == 0


def test_assumptions_change_the_seconds(run: Any) -> None:
    found = json.loads(run("--model-size", "8GiB", *MACHINE, "--assume", "compile_s=7", "--json"))
    seconds = {phase["name"]: phase["seconds"] for phase in found["phases"]}
    assert seconds["compile, nothing cached"] == 7


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give --instance-type, or --vcpus, --memory, --gbps"),
        (("--instance-type", "g6.huge"), "not in the table"),
        ((*MACHINE, "--model-size", "big"), "--model-size: expected a size"),
        ((*MACHINE, "--layer", "1GB", "--manifest", "x"), "leave --image-size and --layer out"),
        ((*MACHINE, "--manifest", "/nowhere"), "--manifest /nowhere"),
        ((*MACHINE, "--format", "env"), "none was given"),
        ((*MACHINE, "--assume", "speed=1"), "knows no 'speed'"),
        ((*MACHINE, "--compile-prefix", "bucket/prefix"), "s3://bucket/prefix"),
        ((*MACHINE, "--node-directory", "cache"), "--node-directory"),
        (("--instance-type", "g6e.12xlarge", "--tp", "5", "--model-size", "1GiB"), "4 GPUs"),
    ],
)
def test_what_cannot_be_is_told(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, *arguments)


def test_an_index_of_platforms_is_no_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "index.json"
    file.write_text('{"manifests": []}')
    assert "several platforms" in refused(capsys, *MACHINE, "--manifest", str(file))
    file.write_text("[]")
    assert "expected a JSON object" in refused(capsys, *MACHINE, "--manifest", str(file))


def test_layers_are_read_from_the_registry(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks := missing_programs("docker-registry"):
        pytest.skip(lacks)
    with RegistryServer(PrivateAuthority(tmp_path)) as registry:
        for name, value in registry.environ().items():
            monkeypatch.setenv(name, value)
        layers = [
            registry.push_blob("engine", bytes([size]) * size, "application/octet-stream")
            for size in (10, 20, 30)
        ]
        registry.push_manifest("engine", "1", layers)
        found = json.loads(run(*MACHINE, "--image", f"oci://{registry.host}/engine:1", "--json"))
        assert (found["image"]["bytes"], found["image"]["layers"]) == (60, 3)
        # With sizes nothing is asked.
        before = len(registry.requests())
        run(*MACHINE, "--image", f"oci://{registry.host}/engine:1", "--image-size", "9GB")
        assert len(registry.requests()) == before
