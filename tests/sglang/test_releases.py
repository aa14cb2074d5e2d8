"""Every name of SGLang that is touched stands in the newest release, the one before, and here.

Nothing is imported: the source is parsed.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from fastload_common.testing.engine_source import Source, faults, installed_into, parsed
from fastload_sglang import compat
from fastload_sglang.caches import COMPLETE
from fastload_sglang.post_load import DO_MORE_AFTER, STEP

ALL = (*compat.NAMES, *compat.FIELDS, *(point.target for point in COMPLETE))


def release(directory: Path, requirement: str) -> Source:
    fault = installed_into(directory, requirement)
    if fault is not None:
        pytest.skip(fault)
    return Source(directory)


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The newest release, installed without its dependencies (some 120 MB)."""
    return release(tmp_path_factory.mktemp("newest-sglang"), "sglang")


def test_the_newest_release_has_every_name(newest: Source) -> None:
    assert faults(newest, ALL) == []


def test_the_release_before_has_every_name(newest: Source, tmp_path: Path) -> None:
    [information] = newest.root.glob("sglang-*.dist-info")
    version = information.name.removeprefix("sglang-").removesuffix(".dist-info")
    before = release(tmp_path / "before", f"sglang<{version}")
    assert faults(before, ALL) == []


def test_the_installed_release_has_every_name() -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("SGLang is not installed here")
    assert faults(Source(Path(spec.origin).parent.parent), ALL) == []


def not_last(root: Path) -> set[str]:
    """Modules of models with a function that does more than return after the postponed step."""
    found = set()
    for file in (root / "sglang" / "srt" / "models").rglob("*.py"):
        for function in ast.walk(parsed(file)):
            if not isinstance(function, ast.FunctionDef) or function.name == STEP:
                continue
            for number, statement in enumerate(function.body):
                calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
                names = {getattr(call.func, "attr", "") for call in calls}
                after = function.body[number + 1 :]
                if STEP in names and any(not isinstance(node, ast.Return) for node in after):
                    found.add(".".join(file.relative_to(root).with_suffix("").parts))
    return found


def test_the_postponed_step_is_the_last_one(newest: Source) -> None:
    assert not_last(newest.root) == set(DO_MORE_AFTER)


def test_a_missing_name_and_a_changed_signature_are_seen(tmp_path: Path) -> None:
    """The check can fail: it is run against a package that has hardly anything."""
    wanted = compat.PULL_METADATA
    file = tmp_path.joinpath(*wanted.module.split(".")).with_suffix(".py")
    owner, method = wanted.path.split(".")
    file.parent.mkdir(parents=True)
    for parameters, missing in (("model_path", False), ("model_path, more", True)):
        file.write_text(f"class {owner}:\n    def {method}(cls, {parameters}): ...\n")
        parsed.cache_clear()
        assert bool(faults(Source(tmp_path), [wanted])) is missing
    assert faults(Source(tmp_path), [compat.METADATA_PATH]) == [
        f"{compat.METADATA_PATH.dotted} is gone"
    ]
