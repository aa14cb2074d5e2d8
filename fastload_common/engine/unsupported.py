"""What stands in for an adapter's patches where the engine lacks a name: a clear error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from fastload_common.engine.names import LOAD_FORMAT, Name
from fastload_common.engine.patch import Patch
from fastload_common.errors import EngineUnsupportedError

__all__ = ["refuse"]

logger = logging.getLogger(__name__)


def refuse(targets: Iterable[Name], asks: Callable[..., bool], faults: list[str]) -> None:
    """Say what is missing, now and whenever the load format is asked for. Idempotent.

    The engine without that load format goes on as if nothing were installed.

    Args:
        targets: what the engine calls with the operator's wishes; may be missing too.
        asks: called as those are: whether they ask for our load format.
        faults: what is missing.
    """
    told = False
    for target in targets:
        patch = _refusal(target, asks, faults)
        try:
            told = patch.applied() or told
            patch.apply()
        except EngineUnsupportedError:
            continue
    if not told:
        error = target.engine.unsupported(faults)
        logger.warning("fastload: load format %s is off: %s", LOAD_FORMAT, error)


def _refusal(target: Name, asks: Callable[..., bool], faults: list[str]) -> Patch:
    def refusing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if asks(*args, **kwargs):
            raise target.engine.unsupported(faults)
        return original(*args, **kwargs)

    return Patch(
        name="unsupported",
        target=target,
        reason="The engine lacks what the adapter needs.",
        ends="A newer fastload.",
        wrapper=refusing,
    )
