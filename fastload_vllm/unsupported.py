"""What stands in for the adapter in a vLLM that lacks a name: a clear error when asked for."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from fastload_common.errors import EngineUnsupportedError
from fastload_vllm import compat
from fastload_vllm.asked import LOAD_FORMAT

__all__ = ["refuse"]

logger = logging.getLogger(__name__)

_MARK = "__fastload_refuses__"


def refuse(faults: list[str]) -> None:
    """Say once what is missing, and raise when load format fastload is asked for.

    Works with whatever is left: the front end's `EngineArgs.create_model_config`, and the
    loader registry. vLLM without load format fastload goes on as if nothing were installed.
    """
    error = compat.unsupported(faults)
    if _refuse_arguments(error) | _refuse_loader(error):
        logger.warning("fastload: load format %s is off: %s", LOAD_FORMAT, error)


def _refuse_arguments(error: EngineUnsupportedError) -> bool:
    target = compat.CREATE_MODEL_CONFIG
    if target.module not in sys.modules:
        return False
    try:
        original = target.get()
        arguments = compat.ENGINE_ARGUMENTS.get()
    except EngineUnsupportedError:
        return False
    if hasattr(original, _MARK):
        return False

    @functools.wraps(original)
    def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(getattr(self, "load_format", "")).lower() == LOAD_FORMAT:
            raise error
        return original(self, *args, **kwargs)

    setattr(refusing, _MARK, True)
    setattr(arguments, target.path.rpartition(".")[2], refusing)
    return True


def _refuse_loader(error: EngineUnsupportedError) -> bool:
    try:
        base: Any = compat.BASE_LOADER.get()
        if LOAD_FORMAT in compat.REGISTERED_LOADERS.get():
            return False
        register = compat.REGISTER_LOADER.get()
    except EngineUnsupportedError:
        return False

    def refusing(self: Any, load_config: Any) -> None:
        raise error

    register(LOAD_FORMAT)(type("UnsupportedFastloadLoader", (base,), {"__init__": refusing}))
    return True
