"""What is changed in vLLM at run time: one module, one patch, each with its reason.

A patch replaces one method by a wrapper that acts for load format ``fastload`` alone and
calls the original otherwise.
"""

from __future__ import annotations

from fastload_common.engine.patch import Patch
from fastload_vllm.patches import (
    draft_load_format,
    model_load_format,
    object_store_format_check,
    object_store_metadata,
)

__all__ = ["PATCHES"]

PATCHES: tuple[Patch, ...] = (
    model_load_format.PATCH,
    draft_load_format.PATCH,
    object_store_metadata.PATCH,
    object_store_format_check.PATCH,
)
