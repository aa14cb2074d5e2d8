"""Asks a disk that may never answer: a dead one keeps its callers for ever, and no signal helps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["NoAnswerError", "ask"]

T = TypeVar("T")


class NoAnswerError(Exception):
    """Nothing came in time; the thread that asked is left behind."""


def ask(question: Callable[[], T], patience_s: float) -> T:
    """The answer, from a thread of its own.

    Args:
        patience_s: in real time.

    Raises:
        NoAnswerError: none came.
        Exception: as the question raised it.
    """
    answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((question(), None))
        except Exception as error:  # noqa: BLE001 -- raised again by whoever asked
            answers.put((None, error))

    threading.Thread(target=work, name="fastload-ask", daemon=True).start()
    try:
        value, error = answers.get(timeout=patience_s)
    except queue.Empty:
        raise NoAnswerError(f"no answer for {patience_s:.0f} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
