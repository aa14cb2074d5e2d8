"""SGLang's own handling of its arguments with fastload installed: no model is loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing import sglang_cpu
from fastload_common.testing.s3_server import S3Server
from tests.sglang.server import environment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.s3,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
    ),
]

WORKER = Path(__file__).with_name("config_worker.py")
BUCKET = "sglang-configuration"
MODEL = f"s3://{BUCKET}/model"
DRAFT = f"s3://{BUCKET}/draft"
TOKENIZER = f"s3://{BUCKET}/tokenizer"
SPECULATIVE = (
    *("--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Path:
    from fastload_common.testing.tiny_models import write_tiny_model

    root = tmp_path_factory.mktemp("models")
    s3_server.make_bucket(BUCKET)
    write_tiny_model(root / "model", "qwen3")
    write_tiny_model(root / "draft", "qwen3", seed=1, num_hidden_layers=1)
    (root / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / "tokenizer" / name).write_bytes((root / "model" / name).read_bytes())
    (root / "bare").mkdir()
    for file in (root / "model").glob("model*"):
        (root / "bare" / file.name).write_bytes(file.read_bytes())
    for each in root.iterdir():
        s3_server.upload_dir(each, BUCKET, each.name)
    return root


JOBS: dict[str, dict[str, Any]] = {
    "s3": {"argv": ["--model-path", MODEL, "--load-format", "fastload"]},
    "upper case": {"loader": "FastLoad"},
    "loader": {"loader": "fastload"},
    "other loader": {"loader": "auto"},
    "unknown": {"argv": ["--model-path", MODEL, "--load-format", "fastlod"]},
    "without": {"argv": ["--model-path", MODEL]},
    "tokenizer": {
        "argv": [
            *("--model-path", MODEL, "--load-format", "fastload", "--tokenizer-path", TOKENIZER)
        ]
    },
    "draft": {
        "argv": [
            *("--model-path", MODEL, "--load-format", "fastload", *SPECULATIVE),
            *("--speculative-draft-model-path", DRAFT),
        ]
    },
    "draft of its own format": {
        "argv": [
            *("--model-path", "DIRECTORY", *SPECULATIVE),
            *("--speculative-draft-model-path", DRAFT),
            *("--speculative-draft-load-format", "fastload"),
        ]
    },
    "directory": {"argv": ["--model-path", "DIRECTORY", "--load-format", "fastload"]},
    "no directory": {"argv": ["--model-path", "/no/such/model", "--load-format", "fastload"]},
    "other store": {"argv": ["--model-path", "gs://b/m", "--load-format", "fastload"]},
    "no configuration": {
        "argv": ["--model-path", f"s3://{BUCKET}/bare", "--load-format", "fastload"]
    },
    "no tokenizer": {
        "argv": [
            *("--model-path", MODEL, "--load-format", "fastload"),
            *("--tokenizer-path", f"s3://{BUCKET}/bare"),
        ]
    },
    "bad setting": {
        "argv": [
            *("--model-path", MODEL, "--load-format", "fastload"),
            *("--model-loader-extra-config", '{"concurency": 3}'),
        ]
    },
    "no JSON": {
        "argv": [
            *("--model-path", MODEL, "--load-format", "fastload"),
            *("--model-loader-extra-config", "{"),
        ]
    },
    "checksums": {
        "argv": ["--model-path", MODEL, "--load-format", "fastload", "--model-checksum", "x"]
    },
}


def decided(
    jobs: dict[str, dict[str, Any]], directory: Path, variables: dict[str, str]
) -> dict[str, dict[str, Any]]:
    text = json.dumps(
        [
            {"argv": [*job["argv"], *sglang_cpu.ARGUMENTS]} if "argv" in job else job
            for job in jobs.values()
        ]
    ).replace("DIRECTORY", str(directory / "model"))
    done = subprocess.run(
        [sys.executable, str(WORKER), text],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=400,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(jobs), done.stdout[-5000:]
    return {
        name: json.loads(line.removeprefix("RESULT "))
        for name, line in zip(jobs, found, strict=True)
    }


@pytest.fixture(scope="module")
def results(
    directory: Path, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    work = tmp_path_factory.mktemp("work")
    return decided(JOBS, directory, environment(work, s3_server.environ()))


def test_a_model_in_s3_keeps_the_format_that_was_asked(results: dict[str, Any]) -> None:
    found = results["s3"]
    assert found["load_format"] == "fastload"
    assert found["draft_format"] is None
    assert found["model_path"] == MODEL
    files = found["files"]["model_path"]
    assert {"config.json", "tokenizer.json"} <= set(files)
    assert found["modules"] == []


@pytest.mark.parametrize("name", ["loader", "upper case"])
def test_the_format_is_our_loader(results: dict[str, Any], name: str) -> None:
    assert results[name]["load_format"] == "FastloadModelLoader"


def test_other_formats_are_as_they_were(results: dict[str, Any]) -> None:
    assert results["other loader"]["load_format"] == "auto"
    assert results["unknown"]["error"] == "SystemExit: 2"
    assert results["directory"]["load_format"] == "fastload"


def test_without_the_format_the_error_names_it(results: dict[str, Any]) -> None:
    assert "needs a load format that reads object stores, got auto" in results["without"]["error"]
    assert "--load-format fastload" in results["without"]["error"]


def test_a_tokenizer_may_have_a_place_of_its_own(results: dict[str, Any]) -> None:
    assert results["tokenizer"]["files"]["tokenizer_path"] == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_drafts_are_prepared_too(results: dict[str, Any]) -> None:
    found = results["draft"]
    assert (found["load_format"], found["draft_format"]) == ("fastload", "fastload")
    assert "config.json" in found["files"]["speculative_draft_model_path"]
    found = results["draft of its own format"]
    assert (found["load_format"], found["draft_format"]) == ("auto", "fastload")
    assert "config.json" in found["files"]["speculative_draft_model_path"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no directory", "ObjectMissingError: no such directory: /no/such/model"),
        ("other store", "ConfigError: load format fastload reads s3://.* and directories"),
        ("no configuration", "ObjectMissingError: .* holds neither config.json"),
        ("no tokenizer", "ObjectMissingError: .*/bare holds no tokenizer"),
        ("bad setting", "ConfigError: .*concurency"),
        ("no JSON", "ConfigError: --model-loader-extra-config must be a JSON object"),
        ("checksums", "ConfigError: --model-checksum"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    results: dict[str, Any], name: str, words: str
) -> None:
    import re

    assert re.match(words, results[name]["error"]), results[name]


def test_a_link_of_an_earlier_start_is_not_taken_for_another_format(
    directory: Path, s3_server: S3Server, tmp_path: Path
) -> None:
    jobs = {name: JOBS[name] for name in ("s3", "without")}
    found = decided(jobs, directory, environment(tmp_path, s3_server.environ()))
    assert found["s3"]["load_format"] == "fastload"
    assert "got auto" in found["without"]["error"]


@pytest.mark.parametrize(("plugins", "known"), [("other", False), ("other, fastload", True)])
def test_the_filter_of_plugins_is_respected(
    directory: Path, s3_server: S3Server, tmp_path: Path, plugins: str, known: bool
) -> None:
    jobs = {"directory": JOBS["directory"]}
    variables = environment(tmp_path, s3_server.environ() | {"SGLANG_PLUGINS": plugins})
    found = decided(jobs, directory, variables)["directory"]
    assert found.get("load_format") == ("fastload" if known else None)
    assert found.get("error") == (None if known else "SystemExit: 2")
