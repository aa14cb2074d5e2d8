"""Writes the page on what the adapter changes and touches in vLLM.

``python -m fastload_vllm.reference docs/patches.md`` writes it; a test compares it with what
is committed. Needs no engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fastload_common.engine import reference
from fastload_vllm.compat import ENGINE, FIELDS, NAMES
from fastload_vllm.patches import COMPILE_KEY_PATCHES, COMPILE_PATCHES, PATCHES

__all__ = ["patches_page"]

_HOW = (
    "The plugin registers the load format `fastload` through vLLM's public registry. Patches whose "
    "names begin with `compile-` are applied only where `FASTLOAD_COMPILE_CACHE` is set, with any "
    "load format."
)


def patches_page() -> str:
    """Every patch with its reason, and every name of vLLM that is touched."""
    patches = (*PATCHES, *COMPILE_KEY_PATCHES, *COMPILE_PATCHES)
    return reference.patches_page(ENGINE, _HOW, patches, (*NAMES, *FIELDS), "docs/patches.md")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(patches_page(), encoding="utf-8")
