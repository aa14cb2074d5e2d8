"""A rank's part in the compile cache: wait for artefacts before compiling, say what was compiled.

Where the process that started this one uses no compile cache, nothing is done.
"""

from __future__ import annotations

import logging
from pathlib import Path

from fastload_common.config import environment, load_settings
from fastload_common.engine.compile_counters import counted_by_torch
from fastload_common.engine.start_board import RankReport, StartBoard
from fastload_common.errors import FastloadError
from fastload_sglang.caches import TACTICS_VARIABLE

__all__ = ["VARIABLE", "report", "tactics_file", "wait_restored"]

logger = logging.getLogger(__name__)

VARIABLE = "_FASTLOAD_COMPILE_START"
"""Leads the ranks to their start's directory. Not a setting."""

_UNPACK_S = 90.0
"""Longer than the one who restores takes until it says that it gives up."""

_waited_s: float | None = None


def wait_restored() -> None:
    """Wait until artefacts are in place; once in a process."""
    global _waited_s
    board = _board()
    if board is None or _waited_s is not None:
        return
    try:
        limit_s = load_settings().compile_cache_deadline_s + _UNPACK_S
    except FastloadError:
        limit_s = _UNPACK_S
    _waited_s = board.wait_restored(limit_s)


def report(*, is_warm: bool) -> None:
    """Say what this rank has compiled so far. Never raises.

    Args:
        is_warm: warm-up has ended.
    """
    board = _board()
    if board is None or not board.path.exists():
        return
    try:
        board.report(RankReport(is_warm, round(_waited_s or 0.0, 3), counted_by_torch()))
    except Exception as error:  # noqa: BLE001 - a cache never ends a server
        logger.warning("fastload: compile cache: a rank cannot report: %s", type(error).__name__)
        logger.debug("fastload: compile cache: not reported", exc_info=True)


def tactics_file(file: Path, *, is_draft: bool) -> Path:
    """Where FlashInfer's choices of this rank are kept, instead of `file`.

    The engine's directory for them is named by the place of the model, so that the same one from
    elsewhere would be tuned again. Ours is already that of all else that decides.
    """
    base = environment().get(TACTICS_VARIABLE)
    if not base:
        return file
    version, architecture = file.parts[-4:-2]
    role = "draft" if is_draft else "target"
    moved = Path(base) / role / version / architecture / file.name
    moved.parent.mkdir(parents=True, exist_ok=True)
    return moved


def _board() -> StartBoard | None:
    path = environment().get(VARIABLE)
    return StartBoard(Path(path)) if path else None
