"""What `register` does inside a process of SGLang."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from fastload_common.config import environment
from fastload_common.engine.console import (
    join_engine_log,
    leave_out_own_stacks,
    show_own_errors_plainly,
)
from fastload_common.engine.names import LOAD_FORMAT, missing
from fastload_common.engine.patch import apply_all
from fastload_common.engine.unsupported import refuse
from fastload_common.engine.when_imported import when_imported
from fastload_common.errors import EngineUnsupportedError
from fastload_sglang import compat

__all__ = ["activate"]

logger = logging.getLogger(__name__)

_COMPILE_CACHE = "FASTLOAD_COMPILE_CACHE"
_LOGS_OF_ENDS = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.data_parallel_controller",
)
"""Loggers that get the stack of what ended a process of the engine."""


def activate() -> None:
    """Let the load format be chosen, and patch what this process imports, when it does.

    Raises:
        Nothing where this SGLang is unsupported: it serves all else as if fastload were not
        installed, and the error comes when load format fastload is asked for.
    """
    from fastload_sglang.patches import COMPILE_PATCHES, PATCHES

    join_engine_log(compat.ENGINE)
    leave_out_own_stacks(compat.ENGINE, map(logging.getLogger, _LOGS_OF_ENDS))
    show_own_errors_plainly(compat.ENGINE)
    when_imported(compat.FORMAT_CHOICES.module, _offer_format)
    for module in dict.fromkeys(patch.target.module for patch in PATCHES):
        when_imported(module, partial(_patch, module))
    if environment().get(_COMPILE_CACHE):  # what it says is looked at where it is used
        for module in dict.fromkeys(patch.target.module for patch in COMPILE_PATCHES):
            when_imported(module, partial(_patch_compile_cache, module))


def _offer_format() -> None:
    """Where names cannot be added, the command line says that it does not know ours."""
    try:
        choices = compat.FORMAT_CHOICES.get()
    except EngineUnsupportedError as error:
        logger.warning("fastload: load format %s is off: %s", LOAD_FORMAT, error)
        return
    if LOAD_FORMAT not in choices:
        choices.append(LOAD_FORMAT)


def _offer_registries() -> None:
    """What has an unknown scheme SGLang takes for a server that hands out weights."""
    # Here, where models are prepared: not in every process that calls the plugin.
    from fastload_common.engine.object_model import REGISTRY_SCHEME

    schemes = compat.OBJECT_SCHEMES.get()
    if REGISTRY_SCHEME not in schemes:
        schemes.append(REGISTRY_SCHEME)


def _patch(module: str) -> None:
    from fastload_sglang.patches import PATCHES

    patches = [patch for patch in PATCHES if patch.target.module == module]
    faults = missing(compat.CONFIG_NAMES[module])
    if faults:
        refuse([patch.target for patch in patches], _asks, faults)
        return
    applied = apply_all(patches)
    if module == compat.OBJECT_SCHEMES.module:
        _offer_registries()
    if applied:
        logger.debug("fastload: patches applied: %s", ", ".join(applied))


def _patch_compile_cache(module: str) -> None:
    """Where names are missing SGLang compiles as without us."""
    from fastload_sglang.patches import COMPILE_PATCHES

    faults = missing(compat.COMPILE_NAMES[module])
    if faults:
        logger.warning("fastload: compile cache: not used: %s", compat.ENGINE.unsupported(faults))
        return
    applied = apply_all(patch for patch in COMPILE_PATCHES if patch.target.module == module)
    if applied:
        logger.debug("fastload: patches applied: %s", ", ".join(applied))


def _asks(arguments: Any, *_: Any, **__: Any) -> bool:
    """Whether a configuration of loading, or the command line's, names our load format."""
    return str(getattr(arguments, "load_format", "")).lower() == LOAD_FORMAT
