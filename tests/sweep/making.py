"""Makes the checkpoint of one case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastload_common.testing.sweep_checkpoints import has_class, write_by_transformers


def make(engine: Any, case: dict[str, Any], directory: Path) -> dict[str, Any]:
    architecture = case["architecture"]
    if has_class(architecture):
        write_by_transformers(directory, architecture, changes=case.get("config"))
        return {"ok": True, "by": "transformers"}
    return {"ok": False, "error": "no configuration"}
