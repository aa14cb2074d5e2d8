"""The compile cache in the process that starts SGLang's ranks on a node."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastload_common.config import provide_variables
from fastload_common.engine.compile_counters import Counted
from fastload_common.engine.compile_start import CompileStart
from fastload_common.engine.start_board import RankReport, StartBoard, added
from fastload_sglang import compat
from fastload_sglang.caches import ROOTS
from fastload_sglang.compile_factors import factors_of
from fastload_sglang.compile_rank import VARIABLE
from fastload_sglang.compile_ranks import ranks_here

__all__ = ["begin", "end"]

logger = logging.getLogger(__name__)

_COUNTED = ("inductor", "fastload")
"""Roots of compilers that count, and of what is none."""

_LAST_WORDS_S = 10.0
"""How long an engine that is shut down waits for its ranks' last report."""


class _Watch:
    """One start, until its artefacts are published."""

    def __init__(self, start: CompileStart, board: StartBoard, ranks: int) -> None:
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="fastload-compile-watch", daemon=True)
        self._start = start
        self._board = board
        self._ranks = ranks

    def _run(self) -> None:
        try:
            self._start.wait()
        finally:
            self._board.tell_restored()
        before = self._start.directories.names()
        reports = self._board.collect(self._ranks, self.stop)
        self._board.remove()
        if len(reports) < self._ranks:
            logger.warning(
                "fastload: compile cache: nothing is published: %d of %d ranks have not said "
                "what they compiled",
                self._ranks - len(reports),
                self._ranks,
            )
        else:
            uncounted = added(before, self._start.directories.names(), _COUNTED)
            self._start.complete(
                _with_uncounted(reports, uncounted),
                waited_s=max(report.waited_s for report in reports),
            )


_watches: dict[int, _Watch] = {}
"""By the arguments of the engine that was started."""


def begin(server_args: Any) -> None:
    """Restore in the background, and watch; to be called before ranks are started. Never raises."""
    try:
        watch = _begun(server_args)
    except Exception as error:  # noqa: BLE001 - a cache never ends a server
        logger.warning("fastload: compile cache: not used: %s", type(error).__name__)
        logger.debug("fastload: compile cache: not begun", exc_info=True)
        return
    if watch is not None:
        _watches[id(server_args)] = watch
        watch.thread.start()


def end(server_args: Any, ask_ranks: Callable[[], object]) -> None:
    """The engine is being shut down: publish now what has not been.

    Args:
        server_args: with which it was started.
        ask_ranks: makes its ranks report.
    """
    watch = _watches.pop(id(server_args), None)
    if watch is None or not watch.thread.is_alive():
        return
    with contextlib.suppress(Exception):
        ask_ranks()
        watch.thread.join(_LAST_WORDS_S)
    watch.stop.set()
    watch.thread.join(_LAST_WORDS_S)


def _begun(server_args: Any) -> _Watch | None:
    ranks = ranks_here(server_args)
    start = CompileStart.begin(
        compat.ENGINE.package,
        lambda: factors_of(server_args, ranks),
        ROOTS,
        made_up=compat.DEFAULT_CACHES.get()(),
    )
    if start is None:
        provide_variables({VARIABLE: ""})  # an earlier start's
        return None
    board = StartBoard.create(start.directories.base)
    provide_variables({VARIABLE: str(board.path)})
    return _Watch(start, board, len(ranks.names))


def _with_uncounted(reports: list[RankReport], uncounted: dict[str, int]) -> list[Counted]:
    """What each rank counted; what none of them counts is added to the first."""
    first, *others = [report.counted for report in reports]
    details = {f"new_in_{root}": count for root, count in uncounted.items()}
    first = replace(
        first,
        compiled=first.compiled + sum(uncounted.values()),
        details={**first.details, **details},
    )
    return [first, *others]
