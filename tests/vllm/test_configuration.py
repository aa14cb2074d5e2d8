"""What vLLM's configuration becomes with the plugin: s3:// models, and all else untouched."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing.s3_server import S3Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.s3,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WORKER = Path(__file__).with_name("config_worker.py")
ROOT = Path(__file__).parents[2]
BUCKET = "configurations"


def run_worker(scenario: str, job: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(WORKER), scenario, json.dumps(job)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the same with tied embeddings that the checkpoint contradicts, and without files."""
    from fastload_common.testing.tiny_models import write_tiny_model

    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "qwen3", "qwen3")
    write_tiny_model(root / "draft", "qwen3", seed=1, num_hidden_layers=1)
    tied = write_tiny_model(root / "contradicted", "qwen3", max_shard_bytes=1 << 30)
    config = json.loads((tied / "config.json").read_text())
    del config["dtype"]
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    for name in ("config.json", "tokenizer.json"):
        lacking = shutil.copytree(root / "qwen3", root / f"without-{name}")
        for file in lacking.glob(f"{name.partition('.')[0]}*.json"):
            file.unlink()
    return root


@pytest.fixture(scope="module")
def variables(
    models: Path, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    s3_server.make_bucket(BUCKET)
    for directory in models.iterdir():
        s3_server.upload_dir(directory, BUCKET, directory.name)
    cache = tmp_path_factory.mktemp("cache")
    return s3_server.environ() | {"FASTLOAD_CACHE_DIR": str(cache)}


def uri(name: str) -> str:
    return f"s3://{BUCKET}/{name}"


@pytest.fixture(scope="module")
def made(models: Path, variables: dict[str, str]) -> dict[str, Any]:
    fast = {"load_format": "fastload"}
    draft = {"method": "draft_model", "num_speculative_tokens": 2}
    job = {
        "s3": {"model": uri("qwen3"), **fast},
        "upper": {"model": uri("qwen3"), "load_format": "FastLoad"},
        "directory": {"model": str(models / "qwen3"), **fast},
        "tokenizer": {"model": str(models / "qwen3"), "tokenizer": uri("draft"), **fast},
        "both": {"model": uri("qwen3"), "tokenizer": uri("draft"), **fast},
        "untied": {"model": uri("contradicted"), **fast},
        "untied-directory": {"model": str(models / "contradicted")},
        "draft": {
            "model": str(models / "qwen3"),
            "speculative_config": {"model": uri("draft"), **draft},
            **fast,
        },
        "draft-own-format": {
            "model": str(models / "qwen3"),
            "speculative_config": {
                "model": uri("draft"),
                "draft_load_config": {"load_format": "fastload"},
                **draft,
            },
        },
        "plain": {"model": str(models / "qwen3")},
        "auto": {"model": uri("qwen3")},
        "runai": {"model": uri("qwen3"), "load_format": "runai_streamer"},
        "gs": {"model": "gs://bucket/model", **fast},
        "az": {"model": "az://bucket/model", **fast},
        "bucket": {"model": "s3://no-such-bucket/x", **fast},
        "empty": {"model": uri("nothing"), **fast},
        "config": {"model": uri("without-config.json"), **fast},
        "no-tokenizer": {"model": uri("without-tokenizer.json"), **fast},
        "skip-tokenizer": {
            "model": uri("without-tokenizer.json"),
            "skip_tokenizer_init": True,
            **fast,
        },
        "setting": {
            "model": uri("qwen3"),
            "model_loader_extra_config": {"concurency": 3},
            **fast,
        },
    }
    return run_worker("many", job, variables)


def test_e13_s3_model_without_the_runai_package(
    made: dict[str, Any], variables: dict[str, str], models: Path
) -> None:
    found = made["s3"]
    assert found["model_weights"] == uri("qwen3")
    assert found["load_format"] == "fastload"
    assert found["model"] == found["tokenizer"]
    assert Path(found["model"]).is_relative_to(variables["FASTLOAD_CACHE_DIR"])
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert (Path(found["model"]) / name).read_bytes() == (models / "qwen3" / name).read_bytes()
    assert found["served_model_name"] == uri("qwen3")
    assert made["upper"] == found


def test_no_weight_is_on_disk(made: dict[str, Any], models: Path) -> None:
    weights = sum(file.stat().st_size for file in (models / "qwen3").glob("*.safetensors"))
    headers = sum(file.stat().st_size for file in Path(made["s3"]["model"]).glob("*.safetensors"))
    assert 0 < headers < weights / 50


def test_a_tokenizer_elsewhere(made: dict[str, Any], models: Path) -> None:
    assert made["tokenizer"]["model"] == str(models / "qwen3")
    assert made["tokenizer"]["model_weights"] == ""
    assert made["both"]["model"] == made["s3"]["model"]
    assert made["both"]["tokenizer"] == made["tokenizer"]["tokenizer"] != made["s3"]["model"]
    assert (Path(made["both"]["tokenizer"]) / "tokenizer.json").is_file()


def test_f18_an_lm_head_that_contradicts_the_configuration_is_seen(made: dict[str, Any]) -> None:
    """vLLM asks the weight files; for s3:// it sees their headers."""
    assert made["untied-directory"]["untied"] is True
    assert made["untied"]["untied"] is True
    assert made["untied"]["dtype"] == made["untied-directory"]["dtype"] == "torch.bfloat16"
    assert made["s3"]["untied"] is False


def test_draft_models_have_sources_of_their_own(made: dict[str, Any]) -> None:
    for name in ("draft", "draft-own-format"):
        directory, weights = made[name]["draft"]
        assert weights == uri("draft")
        assert (Path(directory) / "config.json").is_file()
        assert made[name]["model_weights"] == ""


def test_directories_and_other_formats_are_as_before(made: dict[str, Any], models: Path) -> None:
    for name, load_format in (("directory", "fastload"), ("plain", "auto")):
        assert made[name]["model"] == made[name]["tokenizer"] == str(models / "qwen3")
        assert made[name]["model_weights"] == ""
        assert made[name]["load_format"] == load_format


@pytest.mark.parametrize(
    ("name", "error", "texts"),
    [
        ("auto", "ConfigError", ["got auto", "--load-format fastload", "vllm[runai]"]),
        ("runai", "ConfigError", ["got runai_streamer", "vllm[runai]"]),
        ("gs", "ConfigError", ["gs://bucket/model", "s3://"]),
        ("az", "ConfigError", ["az://bucket/model", "s3://"]),
        ("bucket", "ObjectMissingError", ["s3://no-such-bucket/x"]),
        ("empty", "NoWeightsError", ["s3://configurations/nothing"]),
        ("config", "ObjectMissingError", ["without-config.json", "config.json nor params.json"]),
        ("no-tokenizer", "ObjectMissingError", ["without-tokenizer.json", "--tokenizer"]),
        ("setting", "ConfigError", ["concurency", "did you mean concurrency"]),
    ],
)
def test_e13_the_other_forms_fail_with_what_to_do(
    made: dict[str, Any], name: str, error: str, texts: list[str]
) -> None:
    assert made[name].get("error") == error
    for text in texts:
        assert text in made[name]["message"]


def test_a_model_without_a_tokenizer_can_be_asked_for(made: dict[str, Any]) -> None:
    assert made["skip-tokenizer"]["model_weights"] == uri("without-tokenizer.json")


def test_e12_registration_is_idempotent_and_waits_for_the_loaders(made: dict[str, Any]) -> None:
    assert made["process"] == {
        "loaders_imported_before": False,
        "loader": "FastloadModelLoader",
        "patched_once": True,
        "overwritten": 0,
        "hub": [],
    }


@pytest.mark.parametrize("plugins", ["", "other"])
def test_e12_a_plugin_that_is_filtered_out_is_an_unknown_format(plugins: str) -> None:
    """None of our code runs then: the engine's own message is all that there can be."""
    assert run_worker("filtered", {}, {"VLLM_PLUGINS": plugins}) == {
        "ours": [],
        "error": ["Load format `fastload` is not supported"],
    }


RUNAI = '''
    """Stands in for the Run:ai package: its metadata comes from a directory."""
    import os, shutil
    from pathlib import Path

    class SafetensorsStreamer: ...

    def list_safetensors(path): return []

    def pull_files(path, directory, allow, ignore):
        for file in Path(os.environ["TEST_MODEL"]).glob("*.json"):
            shutil.copy(file, directory)
'''


def test_e13_runai_formats_are_untouched_where_runai_is(
    models: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    package = tmp_path / "runai_model_streamer"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(RUNAI))
    made = run_worker(
        "many",
        {
            "runai": {"model": uri("qwen3"), "load_format": "runai_streamer"},
            "auto": {"model": uri("qwen3")},
            "fast": {"model": uri("qwen3"), "load_format": "fastload"},
        },
        variables
        | {
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            "TEST_MODEL": str(models / "qwen3"),
            "VLLM_ASSETS_CACHE": str(tmp_path / "assets"),
        },
    )
    for name in ("runai", "auto"):
        assert made[name]["load_format"] == "runai_streamer"
        assert Path(made[name]["model"]).is_relative_to(tmp_path / "assets")
        assert made[name]["model_weights"] == uri("qwen3")
    assert made["fast"]["load_format"] == "fastload"
    assert Path(made["fast"]["model"]).is_relative_to(variables["FASTLOAD_CACHE_DIR"])


def test_an_unsupported_vllm_says_what_is_missing_when_asked(
    models: Path, variables: dict[str, str]
) -> None:
    made = run_worker(
        "unsupported",
        {
            "fast": {"model": str(models / "qwen3"), "load_format": "fastload"},
            "plain": {"model": str(models / "qwen3")},
        },
        variables,
    )
    assert made["plain"]["load_format"] == "auto"
    assert made["fast"]["error"] == "EngineUnsupportedError"
    assert "this vLLM is not supported: missing" in made["fast"]["message"]
    assert "maybe_pull_model_tokenizer_for_runai(model, tokenizer)" in made["fast"]["message"]
    assert made["loader"]["error"] == "EngineUnsupportedError"
    assert "DefaultModelLoader.Source" in made["loader"]["message"]
