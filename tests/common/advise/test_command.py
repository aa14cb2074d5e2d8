"""The command ``fastload advise``."""

from __future__ import annotations

import io
import json
import subprocess
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


@pytest.mark.parametrize("directory", ["/node", '/node disk/it\'s "$HOME" `id` #1;*&\\', "/a\nb"])
def test_variables_are_what_a_shell_reads(run: Any, tmp_path: Path, directory: str) -> None:
    prefix = "s3://cache/with space"
    arguments = ("--model-size", "67GiB", *MACHINE, "--node-directory", directory)
    file = tmp_path / "fastload env.sh"
    file.write_text(run(*arguments, "--compile-prefix", prefix, "--format", "env"))
    script = 'set -eua; . "$1"; printf "%s\\0%s" "$FASTLOAD_NODE_CACHE" "$FASTLOAD_COMPILE_CACHE"'
    said = subprocess.run(
        ["sh", "-c", script, "sh", str(file)], capture_output=True, text=True, check=True
    )
    expected = [f"{directory}/ranges", f"{directory}/compile,{prefix}"]
    assert said.stdout.split("\0") == expected
    assert said.stderr == ""


def test_usual_values_stand_without_quotes(run: Any) -> None:
    """Such a file serves as an --env-file too, which knows no quotes."""
    prefix = ("--compile-prefix", "s3://compile-cache/prod-1/a_b")
    for loader in ("fastload", "runai"):
        found = run("--model-size", "67GiB", *MACHINE, *prefix, "--format", "env", "--for", loader)
        assert found
        assert not set("'\"\\$`") & set(found)


def test_a_model_in_a_registry_does_not_come_from_s3(run: Any) -> None:
    """Sizes are given, so nothing is asked; the URI says where the model is."""
    for uri in ("oci://registry.example/m:v1", "OCI://registry.example/m:v1"):
        for size, kind in (("67GiB", MACHINE), ("230GB", ("--instance-type", "g5.xlarge"))):
            found = json.loads(run(uri, "--model-size", size, *kind, "--json"))
            own = " ".join(setting["why"] for setting in found["fastload"])
            phases = [phase["name"] for phase in found["phases"]]
            assert "weights, from the registry" in phases
            assert "weights, from S3" not in phases
            assert "from the registry into the parameters" in own
            assert "bucket" not in own
            (streamer,) = [note for note in found["notes"] if "Run:ai's streamer reads no" in note]
            # The compile cache is in S3 all the same.
            others = [note for note in found["notes"] if note != streamer]
            assert "S3" not in " ".join(others)
            assert "S3" not in own.replace("nodes take it from S3", "")


def test_the_registrys_rate_decides_from_a_registry(run: Any) -> None:
    machine = ("--vcpus", "512", "--memory", "64GiB", "--gbps", "1000")
    rates = ("--assume", "registry_connection_bytes_per_s=1MB")
    seconds = {}
    for uri in ("oci://registry.example/m:v1", "s3://models/m"):
        found = json.loads(run(uri, "--model-size", "8GiB", *machine, *rates, "--json"))
        seconds[uri[:3]] = next(p["seconds"] for p in found["phases"] if "weights" in p["name"])
    assert seconds["oci"] > 10 * seconds["s3:"]


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
