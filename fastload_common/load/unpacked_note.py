"""What is noted of a tree that was pulled before it is known to be on the disk.

Whoever finds the note goes on from there, if the machine was not started anew since.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_note", "write_note"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def write_note(path: Path, facts: Mapping[str, Any]) -> None:
    """Note what the tree holds.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps({"boot": _boot_id(), "facts": dict(facts)}), encoding="ascii")


def read_note(path: Path) -> dict[str, Any] | None:
    """What was noted; None: nothing, not all of it, or before the machine was started anew."""
    try:
        found = json.loads(path.read_text(encoding="ascii"))
        facts = dict(found["facts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts if found["boot"] == _boot_id() else None


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return secrets.token_hex(8)  # nothing that is noted is believed
