"""What the operator sees: our log lines in the engine's log, our errors as one line."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType

from fastload_common.config import environment
from fastload_common.errors import FastloadError

__all__ = ["debugging", "join_engine_log", "run_by_engine_command", "show_own_errors_plainly"]

_ENGINE_LOGGER = "vllm"
_OWN_LOGGERS = ("fastload_common", "fastload_vllm")


class _ToEngineLog(logging.Handler):
    """Hands records to the engine's logger, or to the root's while the engine has none."""

    def emit(self, record: logging.LogRecord) -> None:
        target = logging.getLogger(_ENGINE_LOGGER)
        if not target.handlers:
            target = logging.getLogger()
        if target.isEnabledFor(record.levelno):
            target.handle(record)


class _WithoutOurStack(logging.Filter):
    """Shortens the engine's record of one of our errors, whose own line stands above already."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, FastloadError) and not debugging():
            record.msg = f"{record.getMessage()} ({type(error).__name__}, see above)"
            record.args = None
            record.exc_info = None
            record.exc_text = None
        return True


def join_engine_log() -> None:
    """Show our log in the engine's log. Idempotent.

    vLLM configures its own logger only, some time after it called us, so our INFO lines would
    be dropped. Where the operator configures logging (``VLLM_CONFIGURE_LOGGING=0``), our
    records go where all others go. Where the engine logs one of our errors with its stack, the
    stack is left out: the error has been logged, and says what to do.
    """
    for handler in logging.getLogger(_ENGINE_LOGGER).handlers:
        if not any(isinstance(f, _WithoutOurStack) for f in handler.filters):
            handler.addFilter(_WithoutOurStack())
    for name in _OWN_LOGGERS:
        own = logging.getLogger(name)
        if any(isinstance(handler, _ToEngineLog) for handler in own.handlers):
            continue
        own.addHandler(_ToEngineLog())
        own.propagate = False
        # Above this the target's level decides, which may not be set yet.
        own.setLevel(logging.DEBUG if debugging() else logging.INFO)


def debugging() -> bool:
    """Whether the operator asked vLLM for everything."""
    wanted = environment().get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG"
    return wanted or logging.getLogger(_ENGINE_LOGGER).isEnabledFor(logging.DEBUG)


def run_by_engine_command() -> bool:
    """Whether this process is vLLM's own command, not somebody's program that uses vLLM."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name).partition(".")[0] == _ENGINE_LOGGER
    return Path(sys.argv[0] if sys.argv else "").name == _ENGINE_LOGGER


def show_own_errors_plainly() -> None:
    """End vLLM's command with one line where one of our errors is what ends it. Idempotent.

    Such an error says itself what to do; the engine's stack above it helps nobody. Every other
    exception goes to the hook that was there, and so does ours when debugging is on.
    """
    if not run_by_engine_command() or isinstance(sys.excepthook, _PlainErrors):
        return
    sys.excepthook = _PlainErrors(sys.excepthook)


class _PlainErrors:
    """An excepthook that knows `FastloadError` and leaves the rest to the one before."""

    def __init__(self, before: object) -> None:
        self._before = before

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, FastloadError) and not debugging():
            print(f"fastload: {kind.__name__}: {error}", file=sys.stderr, flush=True)
            return
        assert callable(self._before)
        self._before(kind, error, traceback)
