"""Pictures of results: panels of horizontal bars, one colour to a series."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Panel", "draw"]

_COLOURS = ("#2a6f97", "#e08e45", "#6a994e", "#9d4edd")
_ROW_INCHES = 0.26
_WIDTH_INCHES = 7.5
_NOTE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart.

    Attributes:
        title, unit: what is shown; the unit is the label of the axis.
        series: name -> (row -> value); a row that a series lacks stays empty.
        limits: name -> value, drawn as a line.
        notes: row -> text beside it, such as "not installed".
        order: rows that come first, in this order, if they are there.
    """

    title: str
    unit: str
    series: dict[str, dict[str, float]]
    limits: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()

    @property
    def rows(self) -> list[str]:
        names: dict[str, None] = {}
        for row_names in [*(values.keys() for values in self.series.values()), self.notes.keys()]:
            names |= dict.fromkeys(row_names)
        first = [name for name in self.order if name in names]
        return [*first, *(name for name in names if name not in self.order)]


def draw(file: Path, panels: list[Panel]) -> None:
    """Write the panels below each other as a PNG. Needs matplotlib."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]

    heights = [1.1 + _ROW_INCHES * len(panel.rows) * len(panel.series) for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(_WIDTH_INCHES, sum(heights)),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
        layout="constrained",
    )
    for panel, row in zip(panels, axes, strict=True):
        _draw_panel(row[0], panel)
    figure.savefig(file, dpi=90)
    pyplot.close(figure)


def _draw_panel(axis: Any, panel: Panel) -> None:
    rows = panel.rows
    thickness = 0.8 / max(1, len(panel.series))
    for number, (name, values) in enumerate(panel.series.items()):
        places = [index + number * thickness for index, row in enumerate(rows) if row in values]
        sizes = [values[row] for row in rows if row in values]
        bars = axis.barh(places, sizes, thickness * 0.9, label=name, color=_COLOURS[number])
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    for name, value in panel.limits.items():
        axis.axvline(value, color="#b00020", linewidth=1, linestyle="--", label=name)
    middle = thickness * (len(panel.series) - 1) / 2
    for row, text in panel.notes.items():
        axis.text(
            0, rows.index(row) + 0.2, f" {text[:_NOTE_CHARACTERS]}", fontsize=7, color="#666666"
        )
    axis.set_yticks([index + middle for index in range(len(rows))], rows, fontsize=8)
    axis.set_ylim(len(rows) - 0.2, -0.5)
    axis.margins(x=0.12)
    axis.set_xlabel(panel.unit, fontsize=8)
    axis.set_title(panel.title, fontsize=9, loc="left")
    axis.legend(fontsize=7, loc="best")
    axis.spines[["top", "right"]].set_visible(False)
