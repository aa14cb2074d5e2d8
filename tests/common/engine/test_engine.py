"""How adapters hold on to an engine, and what they say: with an engine that the tests write."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastload_common.engine import console
from fastload_common.engine.names import Engine, Name, missing
from fastload_common.engine.patch import Patch
from fastload_common.engine.unsupported import refuse
from fastload_common.engine.when_imported import when_imported
from fastload_common.errors import EngineUnsupportedError, FastloadError, ObjectMissingError

PACKAGE = "engine_of_the_test"
ENGINE = Engine(
    title="Engine",
    package=PACKAGE,
    advice="install another one",
    logger=PACKAGE,
    log_level_variable="ENGINE_LOGGING_LEVEL",
)
ROOT_LOGGING = replace(ENGINE, logger="", log_level_variable="")
"""An engine that configures the root's logger, and has no variable for its level."""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose modules the tests write; forgotten afterwards."""
    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    finders = list(sys.meta_path)
    yield package
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
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
    name = Name(ENGINE, f"{PACKAGE}.part", "f", "the test", ("model", "tokenizer"))
    faults = missing([name])
    assert (faults == []) is there
    if not there:
        assert name.dotted in faults[0]
        assert "the test" in faults[0]


def test_a_missing_module_is_a_missing_name(engine: Path) -> None:
    name = Name(ENGINE, f"{PACKAGE}.gone", "f", "the test")
    assert missing([name]) == [f"{PACKAGE}.gone.f (the test)"]
    with pytest.raises(EngineUnsupportedError, match=r"not supported: missing .*gone\.f"):
        name.get()


def test_front_modules_are_not_imported_for_the_probe(engine: Path) -> None:
    (engine / "front.py").write_text("raise RuntimeError('imported')")
    name = Name(ENGINE, f"{PACKAGE}.front", "f", "the test", front=True)
    assert missing([name]) == []


# -- when_imported ---------------------------------------------------------------------------


def test_an_action_waits_for_the_import(engine: Path) -> None:
    (engine / "late.py").write_text("VALUE = 1")
    seen: list[int] = []
    for _ in range(2):
        when_imported(f"{PACKAGE}.late", lambda: seen.append(sys.modules[f"{PACKAGE}.late"].VALUE))
    assert seen == []
    module = importlib.import_module(f"{PACKAGE}.late")
    assert seen == [1]
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__).__module__ != when_imported.__module__
    importlib.reload(module)
    assert seen == [1]


def test_an_action_is_done_at_once_where_the_module_is_there(engine: Path) -> None:
    (engine / "early.py").touch()
    importlib.import_module(f"{PACKAGE}.early")
    seen: list[int] = []
    when_imported(f"{PACKAGE}.early", lambda: seen.append(1))
    assert seen == [1]


def test_a_module_that_is_not_there_stays_not_there(engine: Path) -> None:
    when_imported(f"{PACKAGE}.nowhere", lambda: pytest.fail("acted"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{PACKAGE}.nowhere")


def test_an_import_that_fails_does_not_act(engine: Path) -> None:
    (engine / "broken.py").write_text("raise ValueError('broken')")
    when_imported(f"{PACKAGE}.broken", lambda: pytest.fail("acted"))
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module(f"{PACKAGE}.broken")


# -- patches ---------------------------------------------------------------------------------


def make_patch(calls: list[tuple[Any, ...]], *, front: bool = False) -> Patch:
    def wrapper(original: Any, self: Any, value: int) -> Any:
        calls.append((self, value))
        return original(self, value) + 1

    target = Name(ENGINE, f"{PACKAGE}.part", "Thing.work", "the test", ("value",), front=front)
    return Patch("test", target, "the test", "never", wrapper)


CODE = "class Thing:\n    def work(self, value):\n        'Work.'\n        return value * 10\n"


def test_a_patch_is_applied_once_and_can_be_taken_back(engine: Path) -> None:
    (engine / "part.py").write_text(CODE)
    calls: list[tuple[Any, ...]] = []
    patch = make_patch(calls)
    thing = importlib.import_module(f"{PACKAGE}.part").Thing
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
    assert f"{PACKAGE}.part" not in sys.modules
    importlib.import_module(f"{PACKAGE}.part")
    assert patch.apply() is True


# -- console ---------------------------------------------------------------------------------


@pytest.fixture
def as_engine_command(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """This process looks like the engine's command; what the hook before ours got."""
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{PACKAGE}", "serve"])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: others.append(error))
    return others


def test_our_error_is_one_line(
    as_engine_command: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    console.show_own_errors_plainly(ENGINE)
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
        console.show_own_errors_plainly(ENGINE)
    error = ValueError("not ours")
    sys.excepthook(ValueError, error, None)
    assert as_engine_command == [error]
    assert capsys.readouterr().err == ""


def test_debugging_shows_the_whole_stack(
    as_engine_command: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    console.show_own_errors_plainly(ENGINE)
    monkeypatch.setenv("ENGINE_LOGGING_LEVEL", "debug")
    error = FastloadError("ours")
    sys.excepthook(FastloadError, error, None)
    assert as_engine_command == [error]


@pytest.mark.parametrize(
    ("argv", "spec", "wanted"),
    [
        (f"/usr/bin/{PACKAGE}", None, True),
        ("/app/serve.py", None, False),
        ("/x/__main__.py", f"{PACKAGE}.entrypoints.api_server", True),
        (f"/x/{PACKAGE}", "ray.worker", False),
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
    assert console.run_by_engine_command(ENGINE) is wanted


@pytest.fixture
def engine_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """The engine's logger with a handler of its own, at INFO; ours as they are before it starts."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    loggers = [
        logging.getLogger(name) for name in (PACKAGE, "fastload_common", f"fastload_{PACKAGE}")
    ]
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
        console.join_engine_log(ENGINE)
    logging.getLogger("fastload_common.load.session").info("loaded")
    logging.getLogger("fastload_common.load.session").debug("detail")
    assert [record.getMessage() for record in engine_log] == ["loaded"]


def test_where_the_engine_does_not_log_the_root_gets_our_lines(
    engine_log: list[logging.LogRecord], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger(PACKAGE).handlers.clear()
    console.join_engine_log(ENGINE)
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
        logging.getLogger(PACKAGE).exception("Worker %d failed.", 3)


def test_the_engines_record_of_our_error_has_no_stack(
    engine_log: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        console.leave_out_own_stacks(ENGINE, logging.getLogger(PACKAGE).handlers)
    unsaid = ObjectMissingError("no such bucket")
    log_failure(unsaid)
    log_failure(unsaid)
    log_failure(ValueError("not ours"))
    monkeypatch.setenv("ENGINE_LOGGING_LEVEL", "DEBUG")
    log_failure(ObjectMissingError("no such bucket"))
    assert [(r.getMessage(), r.exc_info is not None) for r in engine_log] == [
        ("Worker 3 failed. fastload: ObjectMissingError: no such bucket", False),
        ("Worker 3 failed. (ObjectMissingError, see above)", False),
        ("Worker 3 failed.", True),
        ("Worker 3 failed.", True),
    ]


def test_a_stack_that_the_engine_writes_into_its_text_is_left_out(
    engine_log: list[logging.LogRecord],
) -> None:
    """Also through a logger of the engine's, where the root's handlers come later."""
    log = logging.getLogger(f"{PACKAGE}.scheduler")
    for _ in range(2):
        console.leave_out_own_stacks(ROOT_LOGGING, [log])
    said = ObjectMissingError("no such bucket")
    said.is_said = True
    for error in (said, ValueError("not ours")):
        try:
            raise error
        except Exception:
            log.error(f"Scheduler hit an exception: {traceback.format_exc()}")  # noqa: G004
            log.error("It ends.")
    first, second, third, fourth = [record.getMessage() for record in engine_log]
    assert first == "Scheduler hit an exception: (ObjectMissingError, see above)"
    assert second == fourth == "It ends."
    assert "ValueError: not ours" in third
    log.filters.clear()


# -- unsupported -----------------------------------------------------------------------------


def test_what_is_unsupported_is_refused_where_it_is_asked_for(
    engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (engine / "part.py").write_text(CODE)
    there = Name(ENGINE, f"{PACKAGE}.part", "Thing.work", "the test")
    gone = Name(ENGINE, f"{PACKAGE}.part", "Thing.gone", "the test")
    for _ in range(2):
        refuse([gone, there], lambda self, value: value == 7, [gone.fault])
    assert len(caplog.records) == 1
    thing = importlib.import_module(f"{PACKAGE}.part").Thing()
    assert thing.work(2) == 20
    with pytest.raises(EngineUnsupportedError, match=r"missing .*\.gone .*another one"):
        thing.work(7)
