"""What is changed in vLLM at run time: one module, one patch, each with its reason.

A patch replaces one method by a wrapper that acts for load format ``fastload`` alone and
calls the original otherwise. `apply_all` may be called many times.
"""

from __future__ import annotations

from fastload_vllm.patches import (
    draft_load_format,
    model_load_format,
    object_store_format_check,
    object_store_metadata,
)
from fastload_vllm.patches.patch import Patch

__all__ = ["PATCHES", "Patch", "apply_all"]

PATCHES: tuple[Patch, ...] = (
    model_load_format.PATCH,
    draft_load_format.PATCH,
    object_store_metadata.PATCH,
    object_store_format_check.PATCH,
)


def apply_all() -> list[str]:
    """Apply what applies to this process and is not applied yet; returns those patches' names."""
    return [patch.name for patch in PATCHES if patch.apply()]
