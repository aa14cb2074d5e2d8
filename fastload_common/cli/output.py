"""What the commands print with: one way to print, one look of tables. Knows nothing of fastload."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["print_json", "show", "table"]

_PIPE_WIDTH = 400
"""Columns when the output is no terminal: a name must never be cut for a program that reads it."""


def show(*parts: RenderableType) -> None:
    """Print texts and tables, on a terminal with its colours and width, elsewhere plainly.

    Texts are printed as they are: no markup is read in data, no number is coloured.
    """
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False, markup=False, emoji=False).print(*parts, sep="\n")
        return
    plain = Console(
        file=io.StringIO(),
        width=_PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        color_system=None,
    )
    with plain.capture() as captured:
        plain.print(*parts, sep="\n")
    # Cells are padded to their column's width: of no use at the end of a line.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without frames, whose cells are plain text.

    Args:
        columns: headings.
        right: those of them that hold numbers.
    """
    from rich import box
    from rich.table import Table

    # A rule under the headings would be as long as the longest line.
    made = Table(
        box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False, show_edge=False
    )
    for column in columns:
        made.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=False
        )
    return made


def print_json(value: Any) -> None:
    """Print one JSON document for a program."""
    print(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False))
