"""Real SGLang from a registry: the same tokens as from a directory, few bytes more."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastload_common.testing import sglang_cpu
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.registry_server import RegistryServer, missing_programs
from tests.registry_models import (
    CHUNK_BYTES,
    MOST,
    push_compressed,
    push_files,
    push_image,
    served_bytes,
    write_model,
)
from tests.sglang.server import command, environment, run, serving

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
    ),
    pytest.mark.skipif(bool(missing_programs()), reason=missing_programs() or "-"),
]

WORKER = Path(__file__).with_name("config_worker.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def registry(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """Debian's registry, with the model as files, and in the folder of an image."""
    with RegistryServer(PrivateAuthority(tmp_path_factory.mktemp("authority"))) as server:
        push_files(server, "raw", model)
        push_image(server, "image", model)
        push_compressed(server, "gzip", model)
        yield server


@pytest.mark.parametrize(("ranks", "repository"), [(1, "image"), (2, "raw"), (2, "gzip")])
def test_the_same_tokens_and_few_bytes_more(
    ranks: int, repository: str, model: Path, registry: RegistryServer, tmp_path: Path
) -> None:
    own = environment(tmp_path, ranks=ranks)
    with serving(tmp_path / "default.log", own, str(model), ranks=ranks) as server:
        wanted = [server.tokens(), server.checksums()]
    uri = f"oci://{registry.host}/{repository}:v" + ("" if repository == "raw" else "/models/m")
    more = registry.environ() | {
        "FASTLOAD_REPORT": str(tmp_path / "report"),
        "FASTLOAD_CHUNK_BYTES": str(CHUNK_BYTES),
    }
    begin = len(registry.log_text())
    variables = environment(tmp_path, more, ranks=ranks)
    with serving(
        tmp_path / "fastload.log", variables, uri, "--load-format", "fastload", ranks=ranks
    ) as server:
        assert [server.tokens(), server.checksums()] == wanted
        named = server.ask("/v1/completions", {"model": uri, "prompt": [1], "max_tokens": 1})
        assert named["model"] == uri
    rows = [json.loads(line) for line in (tmp_path / "report").read_text().splitlines()]
    assert len(rows) == ranks
    # What the tag named, and not what it may name later.
    assert all(f"{repository}:v@sha256:" in row["uri"] for row in rows)
    assert all(bool(row["pulled"]) == (repository == "gzip") for row in rows)
    model_bytes = sum(file.stat().st_size for file in model.iterdir())
    retries = sum(row["retries"] for row in rows)
    share = served_bytes(registry, repository, begin) / model_bytes
    print(f"TP={ranks} {repository}: {share:.4f} of {model_bytes} bytes, {retries} repeated")
    # Of what is compressed it sends less.
    assert 0.5 < share <= MOST + retries * CHUNK_BYTES / model_bytes


@pytest.mark.parametrize(
    ("load_format", "kind"), [("fastload", "ObjectMissingError"), ("auto", "ConfigError")]
)
def test_what_is_not_in_the_registry_is_one_line(
    load_format: str, kind: str, registry: RegistryServer, tmp_path: Path
) -> None:
    uri = f"oci://{registry.host}/raw:absent"
    variables = environment(tmp_path, registry.environ())
    status, output, left = run(variables, *command(uri, "--load-format", load_format))
    assert (status, left) == (1, [])
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith(f"fastload: {kind}: ")
    assert uri in last


def test_credentials_that_are_refused_are_one_line(
    registry: RegistryServer, tmp_path: Path
) -> None:
    nobody = registry.environ() | {"DOCKER_CONFIG": str(tmp_path), "HOME": str(tmp_path)}
    nobody.pop("REGISTRY_AUTH_FILE", None)
    uri = f"oci://{registry.host}/raw:v"
    variables = environment(tmp_path, nobody)
    status, output, left = run(variables, *command(uri, "--load-format", "fastload"))
    assert (status, left) == (1, [])
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("fastload: AccessDeniedError: ")
    assert "no credentials" in last


def test_arguments_name_the_digest_and_clients_the_tag(
    model: Path, registry: RegistryServer, tmp_path: Path
) -> None:
    uri = f"oci://{registry.host}/raw:v"
    given = {
        "plain": ["--model-path", uri, "--load-format", "fastload"],
        "named": ["--model-path", uri, "--load-format", "fastload", "--served-model-name", "m"],
        "tokenizer": [
            *("--model-path", str(model), "--load-format", "fastload", "--tokenizer-path", uri)
        ],
        "draft": [
            *("--model-path", uri, "--load-format", "fastload"),
            *("--speculative-draft-model-path", f"oci://{registry.host}/image:v/models/m"),
            *("--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "2"),
            *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
        ],
        "pinned": ["--model-path", f"{uri}@{'sha256:' + '0' * 64}", "--load-format", "fastload"],
    }
    jobs = json.dumps([{"argv": [*argv, *sglang_cpu.ARGUMENTS]} for argv in given.values()])
    variables = environment(tmp_path, registry.environ())
    _, output, _ = run(variables, sys.executable, str(WORKER), jobs)
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    rows = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    found = dict(zip(given, rows, strict=True))
    for name in ("plain", "named"):
        row = found[name]
        assert row["load_format"] == "fastload"
        assert row["model_path"].startswith(f"{uri}@sha256:")
        assert row["tokenizer_path"] == row["model_path"]
        assert {"config.json", "tokenizer.json"} <= set(row["files"]["model_path"])
    assert found["plain"]["served_model_name"] == uri
    assert found["tokenizer"]["model_path"] == str(model)
    assert found["tokenizer"]["tokenizer_path"].startswith(f"{uri}@sha256:")
    draft = found["draft"]["speculative_draft_model_path"]
    assert draft.startswith(f"oci://{registry.host}/image:v@sha256:")
    assert draft.endswith("/models/m")
    assert found["named"]["served_model_name"] == "m"
    assert "ObjectMissingError" in found["pinned"]["error"]
