"""Small pieces of error messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["enumerate_some", "short"]

_SHORT_CHARACTERS = 160


def short(value: Any) -> str:
    """What a file says, cut to a length that fits a log line even if the file is hostile."""
    text = repr(value)
    if len(text) <= _SHORT_CHARACTERS:
        return text
    return f"{text[: _SHORT_CHARACTERS - 20]}... ({len(text)} characters)"


def enumerate_some(items: Sequence[str], limit: int = 10) -> str:
    """``a, b, c and 7 more``."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
