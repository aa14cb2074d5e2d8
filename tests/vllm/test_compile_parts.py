"""Parts of the compile key that need no engine: models known by name, variables of compilers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastload_vllm import compile_factors
from fastload_vllm.compile_factors import model_identity, without_model_noise


def model(name: str, commit: str | None = None, **config: Any) -> SimpleNamespace:
    read = SimpleNamespace(to_dict=lambda: config, _commit_hash=commit)
    return SimpleNamespace(model=name, revision="main", hf_config=read)


def test_a_model_of_a_hub_counts_by_its_commit_or_else_by_its_name() -> None:
    content = compile_factors._content_by_name
    plain = content(model("org/name", a=1))
    assert plain["revision"] == "org/name@main"
    assert content(model("org/name", a=2))["config.json"] != plain["config.json"]
    assert content(model("org/name", a=1, _name_or_path="/x")) == plain
    commit = content(model("org/name", "c" * 40, a=1))
    assert commit == content(model("org/moved", "c" * 40, a=1))
    assert commit["revision"] == "c" * 40


def test_the_engines_key_has_the_content_of_a_directory_and_no_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    factors = {
        "model": str(tmp_path),
        "model_weights": "s3://bucket/model",
        "revision": "main",
        "generation_config": "/somewhere",
        "dtype": "bfloat16",
    }
    told = without_model_noise(model(str(tmp_path)), factors)
    assert told["model"] == model_identity(str(tmp_path))
    assert (told["model_weights"], told["revision"], told["generation_config"]) == ("", None, "")
    assert told["dtype"] == "bfloat16"
    assert set(told) == set(factors)
    by_name = without_model_noise(model("org/name"), factors | {"model": "org/name"})
    assert (by_name["model"], by_name["revision"]) == ("org/name", "main")


def test_settings_of_compilers_count_and_their_directories_do_not() -> None:
    kept = {"TORCHINDUCTOR_FREEZING": "1", "TRITON_F32_DEFAULT": "ieee", "TORCHDYNAMO_X": "1"}
    noise = {
        "TORCHINDUCTOR_CACHE_DIR": "/x",
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
        "TRITON_PTXAS_PATH": "/x",
        "TORCHINDUCTOR_EMPTY": "",
        "HOME": "/x",
    }
    assert compile_factors._variables_of_compilers(kept | noise) == kept
