"""The adapter's own parts, without an engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastload_common.engine.names import Name
from fastload_common.errors import ConfigError
from fastload_sglang import caches, compat, group
from fastload_sglang.metadata_link import is_linked, link, unlink
from fastload_sglang.patches import COMPILE_PATCHES, PATCHES
from fastload_sglang.reference import patches_page

ROOT = Path(__file__).parents[2]


# -- metadata_link ---------------------------------------------------------------------------


def test_a_link_is_made_and_moved_on(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "0123"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        link(path, tmp_path / name)
        assert path.resolve() == tmp_path / name
        assert is_linked(path)
    assert sorted(p.name for p in path.parent.iterdir()) == ["0123"]


def test_what_another_loader_left_is_put_aside_and_back(tmp_path: Path) -> None:
    path, ours = tmp_path / "0123", tmp_path / "ours"
    ours.mkdir()
    path.mkdir()
    (path / "config.json").write_text("theirs")
    link(path, ours)
    assert is_linked(path)
    unlink(path)
    assert not path.is_symlink()
    assert (path / "config.json").read_text() == "theirs"
    unlink(path)  # no link: left alone
    assert (path / "config.json").read_text() == "theirs"
    link(path, ours)
    assert list(ours.iterdir()) == []


def test_a_link_that_leads_nowhere_is_none(tmp_path: Path) -> None:
    link(tmp_path / "0123", tmp_path / "gone")
    assert not is_linked(tmp_path / "0123")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="SGLANG_CACHE_DIR"):
        link(tmp_path / "file" / "0123", tmp_path)


# -- group -----------------------------------------------------------------------------------


class Parallel(SimpleNamespace):
    """Raises for what nobody has written, as the engine's does."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"parallel name {name!r} has not been written")


def world(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=object())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the engine would answer for the names that the module asks it for."""
    answers: dict[str, Any] = {"_DEFAULT_LOAD_GROUP": "all"}
    monkeypatch.setattr(Name, "get", lambda name: answers[name.path])
    return answers


@pytest.mark.parametrize(
    ("parallel", "place"),
    [
        (Parallel(nnodes=1), (0, 1, 0, 1)),
        (Parallel(nnodes=1, world_group=world(1, 2), dp_size=1, dp_rank=None), (1, 2, 1, 2)),
        (Parallel(nnodes=2, world_group=world(5, 8), dp_size=1, dp_rank=None), (5, 8, 1, 4)),
        # Replicas of the whole model on one node.
        (Parallel(nnodes=1, world_group=world(1, 2), dp_size=3, dp_rank=2), (1, 2, 5, 6)),
        (Parallel(nnodes=2, world_group=world(1, 4), dp_size=2, dp_rank=1), (1, 4, 1, 2)),
    ],
)
def test_the_place_of_a_rank(
    engine: dict[str, Any], parallel: Parallel, place: tuple[int, ...]
) -> None:
    engine["get_parallel"] = lambda: parallel
    found = group.rank_place()
    assert found.engine == "sglang"
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == place


@pytest.mark.parametrize(
    ("load_group", "parallel", "size"),
    [
        ("all", Parallel(), None),  # nothing is distributed
        ("all", Parallel(world_group=world(0, 1)), None),
        ("all", Parallel(world_group=world(0, 4)), 4),
        (world(0, 2), Parallel(world_group=world(0, 4)), 2),  # one stage loads a draft
        (None, Parallel(world_group=world(0, 4)), None),  # the engine says: alone
        ("all", Parallel(world_group=world(0, 4), launch_world_size=4, max_world_size=4), 4),
        # Ranks may join a running engine, and load then.
        ("all", Parallel(world_group=world(0, 4), launch_world_size=4, max_world_size=8), None),
    ],
)
def test_who_loads_together(
    engine: dict[str, Any], load_group: Any, parallel: Parallel, size: int | None
) -> None:
    pytest.importorskip("torch")
    engine["get_parallel"] = lambda: parallel
    found = group.loading_group(SimpleNamespace(load_group=load_group))
    assert (found and found.size) == size


# -- names, patches, caches ------------------------------------------------------------------


def test_every_patched_name_is_probed() -> None:
    for patches, table in (
        (PATCHES, compat.CONFIG_NAMES),
        (COMPILE_PATCHES, compat.COMPILE_NAMES),
    ):
        probed = {name for names in table.values() for name in names}
        assert {patch.target for patch in patches} <= probed
        assert {patch.target.module for patch in patches} == set(table)


def test_one_file_is_one_patch() -> None:
    files = {file.stem for file in (ROOT / "fastload_sglang" / "patches").glob("*.py")}
    assert files - {"__init__", "compile_cache"} == {
        patch.name.replace("-", "_") for patch in PATCHES
    }


def test_the_page_is_up_to_date() -> None:
    page = "docs/patches-sglang.md"
    committed = (ROOT / page).read_text(encoding="utf-8")
    assert committed == patches_page(), f"run python -m fastload_sglang.reference {page}"


def test_no_other_module_imports_the_engine() -> None:
    for file in (ROOT / "fastload_sglang").rglob("*.py"):
        lines = file.read_text(encoding="utf-8").splitlines()
        found = [
            line for line in lines if line.strip().startswith(("import sglang", "from sglang"))
        ]
        assert found == [], f"{file.name}: take it from compat"


def test_caches_are_where_the_variables_say(tmp_path: Path) -> None:
    home, base = tmp_path / "home", tmp_path / "cache"
    roots = {root.name: root for root in caches.ROOTS}
    assert len(roots) == len(caches.ROOTS)
    assert caches.BASE.directory({}, base, home) == home / ".cache/sglang"
    inductor = roots["inductor"]
    assert inductor.directory({}, base, home) == base / "inductor"
    variables = {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere", "SGLANG_JIT_CACHE_DIR": ""}
    assert inductor.directory(variables, base, home) == Path("/elsewhere")
    assert roots["jit-kernels"].directory(variables, base, home) == home / ".cache/sglang/jit"
    assert not any(root.portable for root in caches.NOT_KEPT)


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_engine_sets_the_variables_that_are_listed(tmp_path: Path) -> None:
    import json
    import os
    import subprocess
    import sys

    code = "import json, os, sglang; print('RESULT ' + json.dumps(dict(os.environ)))"
    names = [name for root in caches.ROOTS for name in root.variables]
    mine = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=mine | {"SGLANG_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    environ = json.loads(line.removeprefix("RESULT "))
    for root in caches.ROOTS:
        found = root.directory(environ, tmp_path, Path.home())
        assert found == root.directory({}, tmp_path, Path.home()), root.name
    assert environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
