"""What is noted of a tree that was pulled before it is known to be on the disk.

Whoever finds the note goes on from there, if the machine was not started anew since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastload_common.pull.stage import UNKNOWN_BOOT, boot_id

__all__ = ["read_note", "write_note"]


def write_note(path: Path, facts: Mapping[str, Any]) -> None:
    """Note what the tree holds.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps({"boot": boot_id(), "facts": dict(facts)}), encoding="ascii")


def read_note(path: Path) -> dict[str, Any] | None:
    """What was noted; None: nothing, not all of it, or before the machine was started anew."""
    try:
        found = json.loads(path.read_text(encoding="ascii"))
        facts = dict(found["facts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts if found["boot"] == boot_id() != UNKNOWN_BOOT else None
