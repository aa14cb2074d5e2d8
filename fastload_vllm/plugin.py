"""What `register` does inside a process of vLLM."""

from __future__ import annotations

import logging

from fastload_common.errors import EngineUnsupportedError
from fastload_vllm import compat
from fastload_vllm.asked import LOAD_FORMAT
from fastload_vllm.console import join_engine_log, show_own_errors_plainly
from fastload_vllm.when_imported import when_imported

__all__ = ["activate"]

logger = logging.getLogger(__name__)


def activate() -> None:
    """Apply the patches, and have the load format registered where model loaders are used.

    Raises:
        Nothing where this vLLM is unsupported: it serves all else as if fastload were not
        installed, and the error comes when load format fastload is asked for.
    """
    join_engine_log()
    show_own_errors_plainly()
    faults = compat.missing(compat.CONFIG_NAMES)
    if faults:
        from fastload_vllm.unsupported import refuse_arguments

        refuse_arguments(faults)
    else:
        from fastload_vllm.patches import apply_all

        applied = apply_all()
        if applied:
            logger.debug("fastload: patches applied: %s", ", ".join(applied))
    when_imported(compat.REGISTER_LOADER.module, register_loader)


def register_loader() -> None:
    """Register the load format once; on failure say so and leave vLLM's own formats alone."""
    try:
        if LOAD_FORMAT in compat.REGISTERED_LOADERS.get():
            return
        from fastload_vllm.loader import FastloadModelLoader

        compat.REGISTER_LOADER.get()(LOAD_FORMAT)(FastloadModelLoader)
    except EngineUnsupportedError as error:
        logger.warning("fastload: load format %s is off: %s", LOAD_FORMAT, error)
