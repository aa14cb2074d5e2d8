"""Every name of vLLM that is touched stands in the source of the newest release, and here.

Nothing is imported: the source is parsed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fastload_common.testing.engine_source import Source, faults, installed_into, parsed
from fastload_vllm import compat

ALL = (*compat.NAMES, *compat.FIELDS)


@pytest.fixture(scope="session")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The newest release, installed without its dependencies (some 350 MB)."""
    root = tmp_path_factory.mktemp("newest-vllm")
    fault = installed_into(root, "vllm")
    if fault is not None:
        pytest.skip(fault)
    return Source(root)


def test_the_newest_release_has_every_name(newest: Source) -> None:
    assert faults(newest, ALL) == []


def test_the_installed_release_has_every_name() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed here")
    assert faults(Source(Path(spec.origin).parent.parent), ALL) == []


def test_a_missing_name_and_a_changed_signature_are_seen(tmp_path: Path) -> None:
    """The check can fail: it is run against a package that has hardly anything."""
    wanted = compat.PULL_METADATA
    for name in ALL:
        file = tmp_path.joinpath(*name.module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    for package in tmp_path.rglob("*"):
        if package.is_dir():
            (package / "__init__.py").touch()
    owner, method = wanted.path.split(".")
    file = tmp_path.joinpath(*wanted.module.split(".")).with_suffix(".py")
    file.write_text(f"class {owner}:\n    def {method}(self, model, tokenizer): ...\n")
    without = faults(Source(tmp_path), ALL)
    assert not any(wanted.dotted in fault for fault in without)
    assert f"{compat.REGISTER_LOADER.dotted} is gone" in without
    parsed.cache_clear()
    file.write_text(f"class {owner}:\n    def {method}(self, model, tokenizer, more): ...\n")
    assert any(wanted.dotted in fault for fault in faults(Source(tmp_path), ALL))
    parsed.cache_clear()
