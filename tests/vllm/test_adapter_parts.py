"""The adapter's own parts, without an engine."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastload_common.errors import EngineUnsupportedError, FastloadError, ObjectMissingError
from fastload_vllm import compat, console
from fastload_vllm.asked import asked, asking
from fastload_vllm.patches.patch import Patch
from fastload_vllm.when_imported import when_imported

ENGINE = "engine_of_the_test"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose modules the tests write; forgotten afterwards."""
    package = tmp_path / ENGINE
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    finders = list(sys.meta_path)
    yield package
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == ENGINE]:
        del sys.modules[name]


# -- compat ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "there"),
    [
        ("def f(model, tokenizer): ...", True),
        ("def f(model, tokenizer, more=None): ...", True),
        ("def f(model, *args, tokenizer, **more): ...", True),
        ("def f(model, tokenizer, more): ...", False),
        ("def f(tokenizer, model): ...", False),
        ("def f(model): ...", False),
        ("f = 3", False),
        ("", False),
    ],
)
def test_signatures_are_probed(engine: Path, code: str, there: bool) -> None:
    (engine / "part.py").write_text(code)
    name = compat.Name(f"{ENGINE}.part", "f", "the test", ("model", "tokenizer"))
    faults = compat.missing([name])
    assert (faults == []) is there
    if not there:
        assert name.dotted in faults[0]
        assert "the test" in faults[0]


def test_a_missing_module_is_a_missing_name(engine: Path) -> None:
    name = compat.Name(f"{ENGINE}.gone", "f", "the test")
    assert compat.missing([name]) == [f"{ENGINE}.gone.f (the test)"]
    with pytest.raises(EngineUnsupportedError, match=r"not supported: missing .*gone\.f"):
        name.get()


def test_front_modules_are_not_imported_for_the_probe(engine: Path) -> None:
    (engine / "front.py").write_text("raise RuntimeError('imported')")
    name = compat.Name(f"{ENGINE}.front", "f", "the test", front=True)
    assert compat.missing([name]) == []


# -- when_imported ---------------------------------------------------------------------------


def test_an_action_waits_for_the_import(engine: Path) -> None:
    (engine / "late.py").write_text("VALUE = 1")
    seen: list[int] = []
    for _ in range(2):
        when_imported(f"{ENGINE}.late", lambda: seen.append(sys.modules[f"{ENGINE}.late"].VALUE))
    assert seen == []
    module = importlib.import_module(f"{ENGINE}.late")
    assert seen == [1]
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__).__module__ != when_imported.__module__
    importlib.reload(module)
    assert seen == [1]


def test_an_action_is_done_at_once_where_the_module_is_there(engine: Path) -> None:
    (engine / "early.py").touch()
    importlib.import_module(f"{ENGINE}.early")
    seen: list[int] = []
    when_imported(f"{ENGINE}.early", lambda: seen.append(1))
    assert seen == [1]


def test_a_module_that_is_not_there_stays_not_there(engine: Path) -> None:
    when_imported(f"{ENGINE}.nowhere", lambda: pytest.fail("acted"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{ENGINE}.nowhere")


def test_an_import_that_fails_does_not_act(engine: Path) -> None:
    (engine / "broken.py").write_text("raise ValueError('broken')")
    when_imported(f"{ENGINE}.broken", lambda: pytest.fail("acted"))
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module(f"{ENGINE}.broken")


# -- patches ---------------------------------------------------------------------------------


def make_patch(calls: list[tuple[Any, ...]], *, front: bool = False) -> Patch:
    def wrapper(original: Any, self: Any, value: int) -> Any:
        calls.append((self, value))
        return original(self, value) + 1

    target = compat.Name(f"{ENGINE}.part", "Thing.work", "the test", ("value",), front=front)
    return Patch("test", target, "the test", "never", wrapper)


CODE = "class Thing:\n    def work(self, value):\n        'Work.'\n        return value * 10\n"


def test_a_patch_is_applied_once_and_can_be_taken_back(engine: Path) -> None:
    (engine / "part.py").write_text(CODE)
    calls: list[tuple[Any, ...]] = []
    patch = make_patch(calls)
    thing = importlib.import_module(f"{ENGINE}.part").Thing
    assert [patch.apply(), patch.apply()] == [True, False]
    assert patch.applied()
    assert thing().work(2) == 21
    assert len(calls) == 1
    assert thing.work.__doc__ == "Work."
    assert [patch.revert(), patch.revert()] == [True, False]
    assert thing().work(2) == 20


def test_a_front_end_patch_waits_for_the_front_end(engine: Path) -> None:
    (engine / "part.py").write_text(CODE)
    patch = make_patch([], front=True)
    assert patch.apply() is False
    assert f"{ENGINE}.part" not in sys.modules
    importlib.import_module(f"{ENGINE}.part")
    assert patch.apply() is True


# -- asked -----------------------------------------------------------------------------------


def test_scopes_nest_and_end() -> None:
    assert asked() is None
    with asking("FastLoad", {"concurrency": 3}):
        outer = asked()
        assert outer is not None
        assert outer.fastload
        assert outer.extra_config == {"concurrency": 3}
        with asking("auto", "not a mapping"):
            inner = asked()
            assert inner is not None
            assert not inner.fastload
            assert inner.extra_config == {}
        assert asked() is outer
    assert asked() is None


# -- console ---------------------------------------------------------------------------------


@pytest.fixture
def as_engine_command(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """This process looks like ``vllm serve``; what the hook before ours got."""
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", "serve"])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: others.append(error))
    return others


def test_our_error_is_one_line(
    as_engine_command: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    console.show_own_errors_plainly()
    error = ObjectMissingError("no such bucket", hint="check it", uri="s3://b/m")
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == (
        "fastload: ObjectMissingError: no such bucket [uri=s3://b/m] -> check it\n"
    )
    assert as_engine_command == []


def test_other_errors_are_left_to_the_hook_before(
    as_engine_command: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        console.show_own_errors_plainly()
    error = ValueError("not ours")
    sys.excepthook(ValueError, error, None)
    assert as_engine_command == [error]
    assert capsys.readouterr().err == ""


def test_debugging_shows_the_whole_stack(
    as_engine_command: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    console.show_own_errors_plainly()
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    error = FastloadError("ours")
    sys.excepthook(FastloadError, error, None)
    assert as_engine_command == [error]


@pytest.mark.parametrize(
    ("argv", "spec", "wanted"),
    [
        ("/usr/bin/vllm", None, True),
        ("/app/serve.py", None, False),
        ("/x/__main__.py", "vllm.entrypoints.openai.api_server", True),
        ("/x/vllm", "ray.worker", False),
    ],
)
def test_only_the_engines_own_command_is_changed(
    argv: str, spec: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    if spec is not None:
        main.__spec__ = importlib.machinery.ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [argv])
    assert console.run_by_engine_command() is wanted


@pytest.fixture
def engine_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """vLLM's logger with a handler of its own, at INFO; ours as they are before vLLM starts."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    loggers = [logging.getLogger(name) for name in ("vllm", *console._OWN_LOGGERS)]
    before = [(log, log.handlers[:], log.level, log.propagate) for log in loggers]
    for log in loggers:
        log.handlers.clear()
    loggers[0].addHandler(Keep())
    loggers[0].setLevel(logging.INFO)
    loggers[0].propagate = False
    yield records
    for log, handlers, level, propagate in before:
        log.handlers[:] = handlers
        log.setLevel(level)
        log.propagate = propagate


def test_our_lines_are_in_the_engines_log(engine_log: list[logging.LogRecord]) -> None:
    for _ in range(2):
        console.join_engine_log()
    logging.getLogger("fastload_common.load.session").info("loaded")
    logging.getLogger("fastload_common.load.session").debug("detail")
    assert [record.getMessage() for record in engine_log] == ["loaded"]


def test_where_the_engine_does_not_log_the_root_gets_our_lines(
    engine_log: list[logging.LogRecord], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm").handlers.clear()
    console.join_engine_log()
    logging.getLogger("fastload_common.load").info("loaded")
    logging.getLogger("fastload_common.load").warning("odd")
    assert [record.getMessage() for record in caplog.records] == ["odd"]
    with caplog.at_level(logging.INFO):
        logging.getLogger("fastload_common.load").info("loaded")
    assert [record.getMessage() for record in caplog.records] == ["odd", "loaded"]
    assert engine_log == []


def log_failure(error: Exception) -> None:
    try:
        raise error
    except Exception:
        logging.getLogger("vllm").exception("Worker %d failed.", 3)


def test_the_engines_record_of_our_error_has_no_stack(
    engine_log: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        console.join_engine_log()
    log_failure(ObjectMissingError("no such bucket"))
    log_failure(ValueError("not ours"))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    log_failure(ObjectMissingError("no such bucket"))
    assert [(r.getMessage(), r.exc_info is not None) for r in engine_log] == [
        ("Worker 3 failed. (ObjectMissingError, see above)", False),
        ("Worker 3 failed.", True),
        ("Worker 3 failed.", True),
    ]
