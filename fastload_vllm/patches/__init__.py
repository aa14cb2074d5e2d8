"""What is changed in vLLM at run time: one module, one patch, each with its reason.

A patch replaces one method by a wrapper that acts for load format ``fastload`` alone and
calls the original otherwise.
"""

from __future__ import annotations

from fastload_common.engine.patch import Patch
from fastload_vllm.patches import (
    compile_cache,
    compile_key,
    draft_load_format,
    model_load_format,
    object_store_format_check,
    object_store_metadata,
    registry_uris,
)

__all__ = ["COMPILE_KEY_PATCHES", "COMPILE_PATCHES", "PATCHES"]

PATCHES: tuple[Patch, ...] = (
    registry_uris.PATCH,
    model_load_format.PATCH,
    draft_load_format.PATCH,
    object_store_metadata.PATCH,
    object_store_format_check.PATCH,
)

COMPILE_KEY_PATCHES: tuple[Patch, ...] = compile_key.PATCHES
"""Applied in every process where a compile cache is switched on, with any load format."""

COMPILE_PATCHES: tuple[Patch, ...] = compile_cache.PATCHES
"""The same, where workers are started."""
