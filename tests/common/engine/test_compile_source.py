"""Which code an engine traces: local edits, what a file imports, packages that add to it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastload_common.engine.compile_source import extensions_of, source_digest
from fastload_common.engine.compile_values import without_noise

FILES = {
    "__init__.py": "",
    "models/__init__.py": "",
    "models/one.py": "from .two import Two\nimport engine_x.models.three\nfrom os import path\n",
    "models/two.py": "from engine_x.models import (four,\n    five)\nimport engine_x.more.own\n",
    "models/three.py": "",
    "models/four/__init__.py": "from .deep import x\n",
    "models/four/deep.py": "x = 1\n",
    "models/other.py": "",
    "more/__init__.py": "",
    "more/own/__init__.py": "",
    "more/own/by_device.py": "",
    "layers.py": "",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """Writes a package that nobody imports, and gives the digest of one of its modules."""
    home = tmp_path / "engine_x"
    for name, text in FILES.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = {
        f"engine_x.{name}": SimpleNamespace(origin=str(home / name / "__init__.py"))
        for name in ("models", "more")
    }
    monkeypatch.setattr("importlib.util.find_spec", found.get)

    def digest(changes: dict[str, str] | None = None) -> str | None:
        for name, text in (changes or {}).items():
            (home / name).write_text(text)
        packages = ["engine_x.gone", "engine_x.models", "engine_x.more"]
        return source_digest(["engine_x.models.one"], packages)

    return digest


@pytest.mark.parametrize(
    "name", ["one.py", "two.py", "three.py", "four/__init__.py", "four/deep.py"]
)
def test_an_edit_of_what_a_model_is_made_of_is_seen(
    package: Callable[..., str | None], name: str
) -> None:
    before = package()
    assert before is not None
    assert package() == before
    assert package({f"models/{name}": FILES[f"models/{name}"] + "y = 2\n"}) != before


@pytest.mark.parametrize("name", ["models/other.py", "layers.py"])
def test_other_files_do_not_count(package: Callable[..., str | None], name: str) -> None:
    before = package()
    assert package({name: "y = 2\n"}) == before


def test_of_a_model_that_is_a_package_all_counts(package: Callable[..., str | None]) -> None:
    package()

    def digest() -> str | None:
        return source_digest(["engine_x.more.own"], ["engine_x.more"])

    before = digest()
    assert before is not None
    package({"more/own/by_device.py": "y = 2\n"})
    assert digest() != before


def test_without_a_file_there_is_no_digest(package: Callable[..., str | None]) -> None:
    assert package() is not None
    assert source_digest(["engine_x.models.gone", "elsewhere.x"], ["engine_x.models"]) is None


def test_packages_that_add_to_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        SimpleNamespace(name=name, dist=SimpleNamespace(name=f"dist-{name}", version="1"))
        for name in ("a", "b")
    ]
    own = SimpleNamespace(name="x", dist=SimpleNamespace(name="vllm", version="1"))
    ours = SimpleNamespace(name="fastload", dist=SimpleNamespace(name="fastload", version="1"))
    groups = {"plugins": [*points, own, ours]}
    monkeypatch.setattr(metadata, "entry_points", lambda group: groups.get(group, []))
    both = {"dist-a": "1", "dist-b": "1"}
    assert extensions_of(["plugins", "none"], ["vllm"], None) == both
    assert extensions_of(["plugins"], ["vllm"], "b, a,fastload") == both
    assert extensions_of(["plugins"], ["vllm"], "fastload,b") == {"dist-b": "1"}
    assert extensions_of(["plugins"], ["vllm"], "fastload") == {}
    assert extensions_of(["plugins"], ["vllm"], "") == {}


def test_variables_that_decide_no_code_are_left_out() -> None:
    kept = {"VLLM_USE_X": 1, "VLLM_MAX_LOGITS_MB": 1, "VLLM_SSM_LAYOUT": "SD", "VLLM_NONE": None}
    noise = {
        "VLLM_PORT": 1,
        "VLLM_LOG_X": 1,
        "VLLM_X_LOGGING_Y": 1,
        "VLLM_X_TIMEOUT_S": 1,
        "VLLM_TIMEOUT_SECONDS": 1,
        "VLLM_START_DATE": "x",
        "VLLM_NAME_PREFIX": "x",
        "VLLM_WHERE": "/x",
    }
    assert without_noise(kept | noise) == kept
