"""What stands in for the patches in a vLLM that lacks a name: a clear error when asked for."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from fastload_common.errors import EngineUnsupportedError
from fastload_vllm import compat
from fastload_vllm.asked import LOAD_FORMAT

__all__ = ["refuse_arguments"]

logger = logging.getLogger(__name__)

_MARK = "__fastload_refuses__"


def refuse_arguments(faults: list[str]) -> None:
    """Say once what is missing, and raise when `EngineArgs` ask for load format fastload.

    Works with what is left; vLLM without that load format goes on as if nothing were installed.
    """
    error = compat.unsupported(faults)
    target = compat.CREATE_MODEL_CONFIG
    if target.module not in sys.modules:
        return
    try:
        original = target.get()
        arguments = compat.ENGINE_ARGUMENTS.get()
    except EngineUnsupportedError:
        logger.warning("fastload: load format %s is off: %s", LOAD_FORMAT, error)
        return
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(getattr(self, "load_format", "")).lower() == LOAD_FORMAT:
            raise compat.unsupported(faults)
        return original(self, *args, **kwargs)

    setattr(refusing, _MARK, True)
    setattr(arguments, target.path.rpartition(".")[2], refusing)
    logger.warning("fastload: load format %s is off: %s", LOAD_FORMAT, error)
