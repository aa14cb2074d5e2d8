"""What `register` does inside a process of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from fastload_common.engine.compile_start import compile_cache_is_on
from fastload_common.engine.console import (
    join_engine_log,
    leave_out_own_stacks,
    show_own_errors_plainly,
)
from fastload_common.engine.names import LOAD_FORMAT
from fastload_common.engine.patch import Patch, apply_all
from fastload_common.engine.unsupported import refuse
from fastload_common.engine.when_imported import when_imported
from fastload_common.errors import EngineUnsupportedError
from fastload_vllm import compat

__all__ = ["activate"]

logger = logging.getLogger(__name__)


def activate() -> None:
    """Apply the patches, and have the load format registered where model loaders are used.

    Raises:
        Nothing where this vLLM is unsupported: it serves all else as if fastload were not
        installed, and the error comes when load format fastload is asked for.
    """
    join_engine_log(compat.ENGINE)
    leave_out_own_stacks(compat.ENGINE, logging.getLogger(compat.ENGINE.logger).handlers)
    show_own_errors_plainly(compat.ENGINE)
    faults = compat.missing(compat.CONFIG_NAMES)
    if faults:
        refuse([compat.CREATE_MODEL_CONFIG], _asks, faults)
    else:
        from fastload_vllm.patches import PATCHES

        applied = apply_all(PATCHES)
        if applied:
            logger.debug("fastload: patches applied: %s", ", ".join(applied))
    when_imported(compat.REGISTER_LOADER.module, register_loader)
    if compile_cache_is_on():
        use_compile_cache()


def use_compile_cache() -> None:
    """Apply the patches of the compile cache, for any load format; else say so and compile."""
    faults = compat.missing(compat.COMPILE_NAMES)
    if faults:
        logger.warning("fastload: compile cache: not used: %s", compat.unsupported(faults))
        return
    from fastload_vllm.patches import COMPILE_KEY_PATCHES, COMPILE_PATCHES

    apply_all(COMPILE_KEY_PATCHES)
    # The front end makes no executor, but may be forked into what does.
    when_imported(compat.MAKE_EXECUTOR.module, lambda: _apply(COMPILE_PATCHES))


def _apply(patches: Iterable[Patch]) -> None:
    try:
        apply_all(patches)
    except EngineUnsupportedError as error:
        logger.warning("fastload: compile cache: not used: %s", error)


def _asks(arguments: Any, *_: Any, **__: Any) -> bool:
    """Whether `EngineArgs` name our load format."""
    return str(getattr(arguments, "load_format", "")).lower() == LOAD_FORMAT


def register_loader() -> None:
    """Register the load format once; on failure say so and leave vLLM's own formats alone."""
    try:
        if LOAD_FORMAT in compat.REGISTERED_LOADERS.get():
            return
        from fastload_vllm.loader import FastloadModelLoader

        compat.REGISTER_LOADER.get()(LOAD_FORMAT)(FastloadModelLoader)
    except EngineUnsupportedError as error:
        logger.warning("fastload: load format %s is off: %s", LOAD_FORMAT, error)
