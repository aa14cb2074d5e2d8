"""Keys: the same for the same factors everywhere, refused where they could not be trusted."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from fastload_common.compile_cache.factors import check_factors, pick_variables
from fastload_common.compile_cache.key import diff, key_of, nearest
from fastload_common.errors import FactorsInvalidError
from tests.common.compile_cache.artefacts import FACTORS
from tests.house.tree import ROOT


def test_the_key_depends_on_no_order_no_process_and_no_form_of_list() -> None:
    tables = {**FACTORS, "engine.factors": {"a": {"x": 1, "y": [1, 2]}, "b": None}}
    backwards = dict(reversed([*tables.items()]))
    backwards["engine.factors"] = {"b": None, "a": {"y": (1, 2), "x": 1}}
    assert key_of(tables) == key_of(backwards)
    code = (
        "import json,sys; from fastload_common.compile_cache.key import key_of;"
        "print(key_of(json.load(sys.stdin)))"
    )
    for seed in "12":
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(backwards),
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
        )
        assert done.stdout.strip() == key_of(tables)


def test_a_set_is_sorted_and_none_is_absent() -> None:
    assert check_factors({**FACTORS, "lora.targets": {"b", "a"}})["lora.targets"] == ["a", "b"]
    assert key_of({**FACTORS, "lora.targets": None}) == key_of(FACTORS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"engine.nmae": "x"}, "did you mean engine.name"),
        ({"engine.version": None}, "without engine.version"),
        ({"model.overrides": {"a": "/models/x"}}, r"model.overrides.a: a path"),
        ({"model.overrides": {"/models/x": 1}}, "a path"),
        ({"model.overrides": ["~/x"]}, "a path"),
        ({"engine.factors": {"a": "s3://bucket/m"}}, "URL"),
        ({"engine.factors": {"a": object()}}, "no JSON value"),
        ({"engine.factors": {1: 2}}, "no text"),
        ({"engine.factors": {"a": float("nan")}}, "no JSON number"),
        ({"engine.factors": {"a": "\ud800"}}, "surrogates"),
        ({"engine.variables": {"ENGINE_HOST_IP": "1"}}, "ENGINE_HOST_IP"),
    ],
)
def test_what_may_not_be_in_a_key_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(FactorsInvalidError, match=told):
        key_of({**FACTORS, **change})


def test_an_endless_table_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["x"] = endless
    with pytest.raises(FactorsInvalidError, match="deeply"):
        key_of({**FACTORS, "engine.factors": endless})


def test_variables_are_picked_by_name_and_noisy_names_are_no_choice() -> None:
    environ = {"ENGINE_USE_X": "1", "ENGINE_OTHER": "2", "ENGINE_EMPTY": ""}
    assert pick_variables(environ, ["ENGINE_USE_X", "ENGINE_EMPTY", "ABSENT"]) == {
        "ENGINE_USE_X": "1"
    }
    with pytest.raises(FactorsInvalidError, match="PLUGINS"):
        pick_variables(environ, ["ENGINE_PLUGINS"])
    assert pick_variables({"ENGINE_SUPPORT": "1"}, ["ENGINE_SUPPORT"])


def test_differences_are_in_words() -> None:
    other = {
        **FACTORS,
        "software.torch": "2.12.0",
        "hardware.cpu_isa": ["avx2", "amx_tile"],
        "model.content": {"config.json": "1" * 64, "modeling.py": "2" * 64},
        "layout.tensor": 2,
    }
    del other["dtype.model"]
    assert diff(check_factors(FACTORS), other) == [
        "dtype.model: bfloat16 here, not given there",
        "hardware.cpu_isa: has avx512f here, has amx_tile there",
        "layout.tensor: 1 here, 2 there",
        f"model.content.config.json: {'0' * 64} here, {'1' * 64} there",
        f"model.content.modeling.py: not given here, {'2' * 64} there",
        "software.torch: 2.13.0+cpu here, 2.12.0 there",
    ]
    assert diff(FACTORS, FACTORS) == []
    assert diff({**FACTORS, "layout.tensor": True}, FACTORS) == [
        "layout.tensor: true here, 1 there"
    ]


def test_the_nearest_entry_is_of_the_same_model_if_there_is_one() -> None:
    near = {**FACTORS, "layout.tensor": 2, "dtype.model": "float16"}
    other_model = {**FACTORS, "model.content": {"config.json": "1" * 64}}
    found = nearest([("b", other_model), ("a", near)], FACTORS)
    assert found is not None
    key, differing = found
    assert key == "a"
    assert [d.name for d in differing] == ["dtype.model", "layout.tensor"]
    assert nearest([], FACTORS) is None
    alone = nearest([("b", other_model)], FACTORS)
    assert alone is not None
    assert alone[0] == "b"
