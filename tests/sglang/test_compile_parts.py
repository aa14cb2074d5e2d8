"""The compile cache's parts in SGLang's adapter, without an engine."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastload_common.engine.compile_counters import Counted
from fastload_common.engine.key_maker import GROUP
from fastload_common.engine.names import Name
from fastload_common.engine.start_board import RankReport, StartBoard
from fastload_common.errors import ConfigError, EngineUnsupportedError
from fastload_sglang import compat, compile_rank, compile_start, key_maker, plugin
from fastload_sglang.caches import TACTICS_VARIABLE
from fastload_sglang.compile_factors import variables
from fastload_sglang.compile_rank import VARIABLE, tactics_file
from fastload_sglang.compile_ranks import ranks_here

ROOT = Path(__file__).parents[2]

# -- ranks -----------------------------------------------------------------------------------


def arguments(**given: Any) -> SimpleNamespace:
    usual = {
        "nnodes": 1,
        "node_rank": 0,
        "pp_size": 1,
        "tp_size": 1,
        "dp_size": 1,
        "enable_dp_attention": False,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
    }
    return SimpleNamespace(**usual | given)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are as they were decided."""
    monkeypatch.setattr(Name, "get", lambda name: {"resolving_view": lambda a: a}[name.path])


@pytest.mark.parametrize(
    ("given", "names", "devices"),
    [
        ({}, ["dp0 pp0 tp0"], [0]),
        ({"tp_size": 2, "base_gpu_id": 4}, ["dp0 pp0 tp0", "dp0 pp0 tp1"], [4, 5]),
        ({"tp_size": 2, "gpu_id_step": 2}, ["dp0 pp0 tp0", "dp0 pp0 tp1"], [0, 2]),
        ({"dp_size": 2}, ["dp0 pp0 tp0", "dp1 pp0 tp0"], [0, 1]),
        # They share attention: two ranks in all.
        (
            {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
            ["dp0 pp0 tp0", "dp0 pp0 tp1"],
            [0, 1],
        ),
        # Two nodes: of one stage, and a stage each.
        (
            {"tp_size": 4, "nnodes": 2, "node_rank": 1},
            ["dp0 pp0 tp2", "dp0 pp0 tp3"],
            [0, 1],
        ),
        (
            {"tp_size": 2, "pp_size": 2, "nnodes": 2, "node_rank": 1},
            ["dp0 pp1 tp0", "dp0 pp1 tp1"],
            [0, 1],
        ),
    ],
)
def test_the_ranks_of_a_node(
    engine: None, given: dict[str, Any], names: list[str], devices: list[int]
) -> None:
    found = ranks_here(arguments(**given))
    assert (found.names, found.devices) == (names, devices)


def test_one_visible_device_for_each_rank(engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS", "true")
    assert ranks_here(arguments(tp_size=2)).devices == [0, 0]


@pytest.mark.parametrize(
    ("bound", "threads"), [("0-3|4-5,8", [4, 3]), ("7|9|11", [1, 1]), ("1-8|9-16", [8, 8])]
)
def test_how_many_cores_each_rank_has_and_not_which(
    engine: None, monkeypatch: pytest.MonkeyPatch, bound: str, threads: list[int]
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", bound)
    assert ranks_here(arguments(tp_size=2)).threads == threads


# -- variables -------------------------------------------------------------------------------


def test_variables_that_change_what_is_compiled_and_no_others() -> None:
    assert variables(
        {
            "SGLANG_ENABLE_JIT_DEEPGEMM": "1",
            "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
            "TORCH_CUDA_ARCH_LIST": "9.0a",
            "CXX": "clang++",
            # Of a pod, of a start, of a place.
            "SGLANG_RUN_ID": "sglang-run-1",
            "SGLANG_HOST_IP": "10.0.0.7",
            "SGLANG_CACHE_DIR": "/tmp/a",
            "SGLANG_PLUGINS": "fastload",
            "SGLANG_LOGGING_CONFIG_PATH": "/etc/a",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            "FLASHINFER_WORKSPACE_BASE": "/tmp/a",
            "TRITON_CACHE_DIR": "/tmp/a",
            # Of nobody here.
            "CCACHE_SLOPPINESS": "1",
            "HOME": "/home/somebody",
            "FASTLOAD_COMPILE_CACHE": "/tmp/a",
            "SGLANG_EMPTY": "",
        }
    ) == {
        "CXX": "clang++",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "1",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "TORCH_CUDA_ARCH_LIST": "9.0a",
    }


def test_a_place_that_nobody_listed_is_seen_to_differ() -> None:
    one, other = (variables({"CC": path})["CC"] for path in ("/usr/bin/gcc", "/opt/gcc"))
    assert one != other
    assert "/" not in one


# -- where FlashInfer's choices are kept -----------------------------------------------------


def test_choices_of_one_model_are_found_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        tmp_path / "flashinfer" / "autotune" / "0.7.2" / "sm90" / place / "rank_tp1_pp0_dp0.json"
        for place in ("0123", "4567")
    ]
    assert [tactics_file(file, is_draft=False) for file in files] == files
    monkeypatch.setenv(TACTICS_VARIABLE, str(tmp_path / "key"))
    moved = {tactics_file(file, is_draft=False) for file in files}
    assert moved == {tmp_path / "key" / "target" / "0.7.2" / "sm90" / "rank_tp1_pp0_dp0.json"}
    draft = tactics_file(files[0], is_draft=True)
    assert draft == tmp_path / "key" / "draft" / "0.7.2" / "sm90" / "rank_tp1_pp0_dp0.json"
    assert draft.parent.is_dir()


# -- a rank ----------------------------------------------------------------------------------


def test_a_rank_without_a_compile_cache_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, ""):
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        compile_rank.wait_restored()
        compile_rank.report(is_warm=True)


def test_a_rank_reports_and_its_failure_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_rank, "_waited_s", None)
    board = StartBoard.create(tmp_path)
    monkeypatch.setenv(VARIABLE, str(board.path))
    board.tell_restored()
    compile_rank.wait_restored()
    compile_rank.report(is_warm=False)
    [report] = board.reports()
    assert (report.is_warm, report.counted.compiled) == (False, 0)
    monkeypatch.setattr(StartBoard, "report", lambda *_: 1 / 0)
    compile_rank.report(is_warm=True)
    assert "a rank cannot report: ZeroDivisionError" in caplog.text
    assert board.reports() == [report]
    board.remove()
    compile_rank.report(is_warm=True)  # the start is over


# -- the process that starts them ------------------------------------------------------------


class Start:
    """Stands for `CompileStart`.

    Args:
        names: root and name of each file, as they are looked at one time after the other.
    """

    def __init__(self, *names: set[tuple[str, str]]) -> None:
        self.completed: list[tuple[list[Counted], float]] = []
        self.directories = self
        self._names = iter(names)

    def wait(self) -> None:
        """Artefacts are there."""

    def names(self) -> set[tuple[str, str]]:
        return next(self._names, set())

    def complete(self, counted: list[Counted], *, waited_s: float) -> None:
        self.completed.append((counted, waited_s))


ENGINE = object()
"""Stands for an engine's arguments."""


def watch_of(start: Start, board: StartBoard, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    kind: Any = compile_start._Watch
    watch = kind(start, board, ranks)
    monkeypatch.setitem(compile_start._watches, id(ENGINE), watch)
    watch.thread.start()
    return watch


def test_what_nobody_counts_is_compiled_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {("triton", "a/kernel.cubin"), ("inductor", "x/1.py")}
    new = {("triton", "b/kernel.cubin"), ("triton", "c/kernel.cubin"), ("inductor", "y/2.py")}
    start, board = Start(before, before | new), StartBoard.create(tmp_path)
    watch = watch_of(start, board, 1, monkeypatch)
    rank = StartBoard(board.path)
    rank.wait_restored(30.0)
    rank.report(RankReport(is_warm=True, waited_s=0.5, counted=Counted(2, 1, 3.0, {"miss": 2})))
    watch.thread.join(30)
    details = {"miss": 2, "new_in_triton": 2}
    assert start.completed == [([Counted(4, 1, 3.0, details)], 0.5)]
    assert not board.path.exists()


def test_an_engine_that_ends_asks_its_ranks_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, board = Start(), StartBoard.create(tmp_path)
    watch = watch_of(start, board, 1, monkeypatch)
    report = RankReport(is_warm=True, waited_s=0.0, counted=Counted(loaded=4))
    compile_start.end(ENGINE, lambda: StartBoard(board.path).report(report))
    assert not watch.thread.is_alive()
    assert start.completed == [([report.counted], 0.0)]
    compile_start.end(ENGINE, lambda: 1 / 0)  # there is nothing to end any more


def test_ranks_that_cannot_be_asked_hold_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = Start()
    watch = watch_of(start, StartBoard.create(tmp_path), 2, monkeypatch)
    compile_start.end(ENGINE, lambda: 1 / 0)
    watch.thread.join(30)
    assert start.completed == []
    assert "nothing is published: 2 of 2 ranks have not said" in caplog.text


def test_no_error_of_the_cache_ends_a_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(compile_start, "ranks_here", fails)
    compile_start.begin(ENGINE)
    assert "compile cache: not used: RuntimeError" in caplog.text
    assert "secret" not in caplog.text


# -- the plugin ------------------------------------------------------------------------------


def test_patches_are_asked_for_only_where_a_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[str] = []
    monkeypatch.setattr(plugin, "when_imported", lambda module, _: modules.append(module))
    for name in ("join_engine_log", "leave_out_own_stacks", "show_own_errors_plainly"):
        monkeypatch.setattr(plugin, name, lambda *_: None)  # the log of this process stays
    own = set(compat.COMPILE_NAMES)
    for value, wanted in (("", set()), ("/tmp/cache", own)):
        modules.clear()
        monkeypatch.setenv("FASTLOAD_COMPILE_CACHE", value)
        plugin.activate()
        assert own & set(modules) == wanted


def test_an_engine_without_the_names_compiles_as_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "missing", lambda names: [name.fault for name in names])
    with caplog.at_level(logging.WARNING):
        plugin._patch_compile_cache(compat.LAUNCH.module)
    assert "compile cache: not used: this SGLang is not supported" in caplog.text
    assert compat.LAUNCH.dotted in caplog.text


# -- fastload cache key ----------------------------------------------------------------------


def test_the_key_maker_is_found_and_says_where_the_engine_is_not() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    place = project["entry-points"][GROUP]["sglang"]
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(module), name)
    if importlib.util.find_spec("sglang") is None:
        with pytest.raises(EngineUnsupportedError, match="not installed in this environment"):
            found.check()
    else:
        found.check()


def test_what_the_engine_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(arguments: list[str]) -> Any:
        assert arguments == ["--model-path", "model", "--tp", "3"]
        raise SystemExit(2)

    def decides(arguments: list[str]) -> Any:
        def resolve_once() -> None:
            raise ValueError("no such thing")

        return SimpleNamespace(resolve_once=resolve_once)

    monkeypatch.setattr(key_maker, "missing", lambda _: [])
    for prepare, message in ((refuses, "refuses these arguments"), (decides, "no such thing")):
        answers = {"load_plugins": lambda: None, "prepare_server_args": prepare}
        monkeypatch.setattr(Name, "get", lambda name, answers=answers: answers[name.path])
        with pytest.raises(ConfigError, match=message):
            key_maker.SglangKeyMaker().factors(["model", "--tp", "3"])
