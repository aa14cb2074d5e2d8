"""What the operator sees: our log lines in the engine's log, our errors as one line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from fastload_common.config import environment
from fastload_common.engine.names import Engine
from fastload_common.errors import FastloadError

__all__ = [
    "debugging",
    "join_engine_log",
    "leave_out_own_stacks",
    "run_by_engine_command",
    "show_own_errors_plainly",
]


class _ToEngineLog(logging.Handler):
    """Hands records to the engine's logger, or to the root's while the engine has none."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        target = logging.getLogger(self._engine.logger)
        if not target.handlers:
            target = logging.getLogger()
        if target.isEnabledFor(record.levelno):
            target.handle(record)


class _WithoutOurStack(logging.Filter):
    """The engine's record of our errors: no stack, and the error where it is not said yet."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def filter(self, record: logging.LogRecord) -> bool:
        # Some engines format the stack themselves, while the error is being handled.
        error = record.exc_info[1] if record.exc_info else sys.exc_info()[1]
        text = record.getMessage()
        stack = text.find("Traceback (most recent call last)")
        if not isinstance(error, FastloadError) or debugging(self._engine):
            return True
        if record.exc_info or stack >= 0:
            head = text[:stack].rstrip() if stack >= 0 else text
            kind = type(error).__name__
            said = f"({kind}, see above)" if error.is_said else f"fastload: {kind}: {error}"
            error.is_said = True
            record.msg = f"{head} {said}"
            record.args = None
            record.exc_info = None
            record.exc_text = None
        return True


def join_engine_log(engine: Engine) -> None:
    """Show our log in the engine's log. Idempotent.

    An engine may configure its own logger only, some time after it called us, so our INFO lines
    would be dropped. Where the operator configures logging, our records go where all others go.
    """
    for name in ("fastload_common", f"fastload_{engine.package}"):
        own = logging.getLogger(name)
        if any(isinstance(handler, _ToEngineLog) for handler in own.handlers):
            continue
        own.addHandler(_ToEngineLog(engine))
        own.propagate = False
        # Above this the target's level decides, which may not be set yet.
        own.setLevel(logging.DEBUG if debugging(engine) else logging.INFO)


def leave_out_own_stacks(engine: Engine, places: Iterable[logging.Filterer]) -> None:
    """Where the engine logs one of our errors with its stack, leave the stack out. Idempotent.

    The error says what to do; where it was not logged yet (`FastloadError.is_said`), it is here.

    Args:
        engine: whose log it is.
        places: handlers or loggers through which such records go.
    """
    for place in places:
        if not any(isinstance(f, _WithoutOurStack) for f in place.filters):
            place.addFilter(_WithoutOurStack(engine))


def debugging(engine: Engine) -> bool:
    """Whether the operator asked the engine for everything."""
    level = environment().get(engine.log_level_variable, "") if engine.log_level_variable else ""
    return level.upper() == "DEBUG" or logging.getLogger(engine.logger).isEnabledFor(logging.DEBUG)


def run_by_engine_command(engine: Engine) -> bool:
    """Whether this process is the engine's own command, not somebody's program that uses it."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name).partition(".")[0] == engine.package
    return Path(sys.argv[0] if sys.argv else "").name == engine.package


def show_own_errors_plainly(engine: Engine) -> None:
    """End the engine's command with one line where one of our errors is what ends it. Idempotent.

    Such an error says itself what to do; the engine's stack above it helps nobody. Every other
    exception goes to the hook that was there, and so does ours when debugging is on.
    """
    if not run_by_engine_command(engine) or isinstance(sys.excepthook, _PlainErrors):
        return
    sys.excepthook = _PlainErrors(engine, sys.excepthook)


class _PlainErrors:
    """An excepthook that knows `FastloadError` and leaves the rest to the one before."""

    def __init__(self, engine: Engine, before: object) -> None:
        self._engine = engine
        self._before = before

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, FastloadError) and not debugging(self._engine):
            print(f"fastload: {kind.__name__}: {error}", file=sys.stderr, flush=True)
            return
        assert callable(self._before)
        self._before(kind, error, traceback)
