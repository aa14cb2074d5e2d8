"""What the key of vLLM refuses, and that an edit is noticed within a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastload_common.engine.compile_values import without_noise
from fastload_common.errors import FactorsInvalidError

pytest.importorskip("vllm")

pytestmark = pytest.mark.engine


def test_an_edit_of_the_model_is_another_content(tmp_path: Path) -> None:
    from fastload_vllm.compile_factors import content_of

    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1}))
    (tmp_path / "modeling_own.py").write_text("x = 1")
    first = content_of(str(tmp_path))
    assert content_of(str(tmp_path)) == first
    (tmp_path / "modeling_own.py").write_text("x = 22")
    second = content_of(str(tmp_path))
    assert first is not None
    assert second is not None
    assert first["config.json"] == second["config.json"]
    assert first["modeling_own.py"] != second["modeling_own.py"]


@pytest.mark.parametrize("settings", [{"freezing": True}, {"max_autotune": True}])
def test_code_with_weights_in_it_has_no_key(settings: dict[str, bool]) -> None:
    from fastload_vllm.compile_factors import _refuse_frozen

    _refuse_frozen({"freezing": False})
    with pytest.raises(FactorsInvalidError, match="weights are compiled in"):
        _refuse_frozen(settings)


def test_addresses_are_noise_and_devices_are_not() -> None:
    given = {"A": "10.0.0.1:7000", "B": "10.0.0.1", "C": "pod-7.local:7000", "D": "cuda:0"}
    assert without_noise(given) == {"D": "cuda:0"}
