"""What the commands print with: one console, one look of tables. Knows nothing of fastload."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["console", "print_json", "table"]

_PIPE_WIDTH = 400
"""Columns when the output is no terminal: a name must never be cut for a program that reads it."""


def console() -> Console:
    """A console on standard output that neither colours numbers nor reads markup in data."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without frames, whose cells are plain text.

    Args:
        columns: headings.
        right: those of them that hold numbers.
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=False
        )
    return made


def print_json(value: Any) -> None:
    """Print one JSON document for a program."""
    print(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False))
