"""Writes the page on what the adapter changes and touches in SGLang.

``python -m fastload_sglang.reference docs/patches-sglang.md`` writes it; a test compares it with
what is committed. Needs no engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fastload_common.engine import reference
from fastload_sglang.compat import ENGINE, FIELDS, NAMES
from fastload_sglang.patches import COMPILE_PATCHES, PATCHES

__all__ = ["patches_page"]

_HOW = (
    "The plugin adds `fastload` to the load formats that the command line accepts. Patches whose "
    "names begin with `compile-` are applied only where `FASTLOAD_COMPILE_CACHE` is set, with any "
    "load format."
)


def patches_page() -> str:
    """Every patch with its reason, and every name of SGLang that is touched."""
    page = "docs/patches-sglang.md"
    patches = (*PATCHES, *COMPILE_PATCHES)
    return reference.patches_page(ENGINE, _HOW, patches, (*NAMES, *FIELDS), page)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(patches_page(), encoding="utf-8")
