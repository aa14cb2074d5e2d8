"""What is changed in SGLang at run time: one module, one patch, each with its reason."""

from __future__ import annotations

from fastload_common.engine.patch import Patch
from fastload_sglang.patches import (
    compile_cache,
    load_format_class,
    object_store_format,
    object_store_metadata,
    object_store_models,
)

__all__ = ["COMPILE_PATCHES", "PATCHES"]

PATCHES: tuple[Patch, ...] = (
    load_format_class.PATCH,
    object_store_models.PATCH,
    object_store_metadata.PATCH,
    object_store_format.PATCH,
)

COMPILE_PATCHES: tuple[Patch, ...] = compile_cache.COMPILE_PATCHES
"""For the compile cache: applied where one is asked for, whatever the load format."""
