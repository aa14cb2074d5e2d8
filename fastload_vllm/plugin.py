"""What `register` does inside a process of vLLM."""

from __future__ import annotations

import logging

from fastload_vllm import compat
from fastload_vllm.asked import LOAD_FORMAT

__all__ = ["activate"]

logger = logging.getLogger(__name__)


def activate() -> None:
    """Register the load format and apply the patches, or what tells why not."""
    from fastload_vllm.console import join_engine_log, show_own_errors_plainly

    join_engine_log()
    show_own_errors_plainly()
    faults = compat.missing()
    if faults:
        from fastload_vllm.unsupported import refuse

        refuse(faults)
        return
    from fastload_vllm.patches import apply_all

    applied = apply_all()
    if LOAD_FORMAT not in compat.REGISTERED_LOADERS.get():
        from fastload_vllm.loader import FastloadModelLoader

        compat.REGISTER_LOADER.get()(LOAD_FORMAT)(FastloadModelLoader)
    if applied:
        logger.debug("fastload: patches applied: %s", ", ".join(applied))
