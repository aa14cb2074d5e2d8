"""Run one function over many items in threads and lose no error."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastload_common.errors import CheckpointError, FastloadError

__all__ = ["all_at_once", "one_error"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_SHOWN_ERRORS = 20
# A signal that comes just before a thread blocks does not wake it.
_SIGNAL_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


@dataclass(frozen=True, slots=True)
class _NotBegun:
    pass


def all_at_once(
    function: Callable[[_Item], _Result], items: Sequence[_Item], *, threads: int
) -> list[_Result]:
    """Call the function for every item, at most ``threads`` at the same time.

    After a `CheckpointError` the other items still run, so that the operator learns of every
    damaged file at once. After any other error no further item is begun: a store that does not
    answer one request will hardly answer the rest.

    What interrupts the caller (Ctrl-C, a signal handler's `SystemExit`) leaves at once: no further
    item is begun, and calls that are blocked are left to their threads, which keep neither the
    caller nor the interpreter from ending.

    Returns:
        The results in the order of the items.

    Raises:
        FastloadError: the only one, or one that stands for all (see `one_error`).
        BaseException: the first error that is none of ours (a fault of the program), as it is.
    """
    stop = threading.Event()

    def guarded(item: _Item) -> _Result | _Failed | _NotBegun:
        if stop.is_set():
            return _NotBegun()
        try:
            return function(item)
        except CheckpointError as error:
            return _Failed(error)
        except Exception as error:  # noqa: BLE001 - handed on below, none is lost
            stop.set()
            return _Failed(error)

    if len(items) <= 1 or threads == 1:
        outcomes = [guarded(item) for item in items]
    else:
        try:
            outcomes = _in_threads(guarded, items, threads)
        except BaseException:
            stop.set()
            raise
    errors = [outcome.error for outcome in outcomes if isinstance(outcome, _Failed)]
    if errors:
        raise one_error(errors)
    return [outcome for outcome in outcomes if not isinstance(outcome, _Failed | _NotBegun)]


def _in_threads(
    call: Callable[[_Item], _Result | _Failed | _NotBegun], items: Sequence[_Item], threads: int
) -> list[_Result | _Failed | _NotBegun]:
    """The outcomes in the order of the items. Daemon threads: an executor's would be joined."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, _Result | _Failed | _NotBegun]] = queue.SimpleQueue()
    for number in range(len(items)):
        waiting.put(number)

    def work() -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                outcome = call(items[number])
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                outcome = _Failed(error)
            done.put((number, outcome))

    started: list[threading.Thread] = []
    for number in range(min(threads, len(items))):
        thread = threading.Thread(target=work, name=f"fastload-open-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit of threads: those that run do the work
            if not started:
                raise
            break
        started.append(thread)
    outcomes: dict[int, _Result | _Failed | _NotBegun] = {}
    while len(outcomes) < len(items):
        with contextlib.suppress(queue.Empty):
            number, outcome = done.get(timeout=_SIGNAL_POLL_S)
            outcomes[number] = outcome
    for thread in started:
        thread.join()
    return [outcomes[number] for number in range(len(items))]


def one_error(errors: Sequence[BaseException]) -> BaseException:
    """Make one error of several: of their nearest common class, naming every one.

    The several are its ``__cause__``, as an `ExceptionGroup`.
    """
    for error in errors:
        if not isinstance(error, FastloadError):
            return error
    ours = [error for error in errors if isinstance(error, FastloadError)]
    if len(ours) == 1:
        return ours[0]
    kind = _common_class([type(error) for error in ours])
    lines = [f"({number}) {error.what}" for number, error in enumerate(ours[:_SHOWN_ERRORS], 1)]
    if len(ours) > _SHOWN_ERRORS:
        lines.append(f"and {len(ours) - _SHOWN_ERRORS} more")
    hints = list(dict.fromkeys(error.hint for error in ours if error.hint))
    merged = kind(
        f"{len(ours)} objects failed: {'; '.join(lines)}",
        hint="; ".join(hints),
        failed_objects=len(ours),
    )
    merged.__cause__ = ExceptionGroup("all of them", ours)
    return merged


def _common_class(kinds: Sequence[type[FastloadError]]) -> type[FastloadError]:
    for candidate in kinds[0].__mro__:
        if issubclass(candidate, FastloadError) and all(issubclass(k, candidate) for k in kinds):
            return candidate
    return FastloadError
