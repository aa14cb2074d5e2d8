"""Run one function over many items in threads and lose no error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from fastload_common.errors import CheckpointError, FastloadError

__all__ = ["all_at_once", "one_error"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_SHOWN_ERRORS = 20


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


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

    Returns:
        The results in the order of the items.

    Raises:
        FastloadError: the only one, or one that stands for all (see `one_error`).
        Exception: the first error that is none of ours (a fault of the program), as it is.
    """
    if not items:
        return []
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

    if len(items) == 1 or threads == 1:
        outcomes = [guarded(item) for item in items]
    else:
        with ThreadPoolExecutor(min(threads, len(items)), "fastload-open") as pool:
            outcomes = list(pool.map(guarded, items))
    errors = [outcome.error for outcome in outcomes if isinstance(outcome, _Failed)]
    if errors:
        raise one_error(errors)
    return [outcome for outcome in outcomes if not isinstance(outcome, _Failed | _NotBegun)]


def one_error(errors: Sequence[Exception]) -> Exception:
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
