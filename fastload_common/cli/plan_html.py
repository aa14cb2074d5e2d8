"""The page of ``fastload plan --html``: one file, no script, nothing from elsewhere.

Each shard is a bar as long as its size, with a lane for each rank: pale where the rank needs the
bytes, full where it fetches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from fastload_common.units import format_size

if TYPE_CHECKING:
    from fastload_common.cli.plan_numbers import NodeNumbers, Rows
    from fastload_common.load.plan_job import RankTrace

__all__ = ["plan_page"]

_WIDTH = 820  # of the largest shard, in pixels; nothing smaller than one can be seen
_LABEL = 250
_SHARD_PIXELS = 26  # height of a shard's lanes together, if they can be that thin
_COLOURS = (
    "#2563a8", "#d9731a", "#2c8c4b", "#b8323c", "#7a5ab0", "#7b5141", "#c85fa8", "#5f6a75",
)  # fmt: skip

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1120px; padding: 0 1em;
       color: #1c2024; background: #fff; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .2em .9em; text-align: right; border-bottom: 1px solid #d5d9dd; }
th:first-child, td:first-child { text-align: left; }
tr.node td { font-weight: 600; border-top: 2px solid #8a9199; }
i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
svg { display: block; } svg text { font-size: 11px; fill: currentColor; }
.bar { fill: #eceff2; } .need { opacity: .38; }
@media (prefers-color-scheme: dark) {
  body { color: #e4e7ea; background: #16191c; } th, td { border-color: #3a4047; }
  .bar { fill: #24292e; } .need { opacity: .5; } }
"""


def plan_page(title: str, node: NodeNumbers, traces: Sequence[RankTrace]) -> str:
    """The whole page. Names are escaped; they come from the store and the command line."""
    notes = {note: None for trace in traces for note in trace.notes}
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<title>fastload plan: {escape(title)}</title>",
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f"<p>The node fetches {node.model_ratio:.3f} of the model's "
            f"{format_size(node.model_bytes)}, in {node.requests} requests: {node.seconds:.2f} s "
            f"at {node.gbps:g} Gbit/s. Without exchange: {node.alone_ratio:.3f} of the model, "
            f"{node.alone_seconds:.2f} s.</p>",
            *(f"<p>{escape(note)}</p>" for note in notes),
            _table(node),
            "<p>Below, each shard is a bar as long as its size, with a lane for each rank: pale "
            "where the rank needs the bytes, full where it fetches them, for itself and its "
            "peers.</p>",
            _picture(node, traces[0]),
            "</body></html>",
            "",
        ]
    )


def _table(node: NodeNumbers) -> str:
    rows = [
        "<tr><th>rank</th><th>needs</th><th>fetches</th><th>requests</th><th>over-read</th>"
        "<th>from peers</th><th>alone</th></tr>"
    ]
    for rank in node.ranks:
        sizes = (
            format_size(rank.needed_bytes),
            format_size(rank.fetched_bytes),
            str(rank.requests),
            format_size(rank.over_read_bytes),
            format_size(rank.received_bytes),
            format_size(rank.alone_fetched_bytes),
        )
        name = f'<i style="background:{_colour(rank.rank)}"></i>{rank.rank}'
        rows.append(f"<tr><td>{name}</td>" + "".join(f"<td>{s}</td>" for s in sizes) + "</tr>")
    total = (
        format_size(node.needed_bytes),
        format_size(node.fetched_bytes),
        str(node.requests),
        format_size(node.over_read_bytes),
        format_size(sum(rank.received_bytes for rank in node.ranks)),
        format_size(node.alone_fetched_bytes),
    )
    cells = "".join(f"<td>{s}</td>" for s in total)
    rows.append(f'<tr class="node"><td>node</td>{cells}</tr>')
    return f"<table>{''.join(rows)}</table>"


def _colour(rank: int) -> str:
    return _COLOURS[rank % len(_COLOURS)]


def _picture(node: NodeNumbers, trace: RankTrace) -> str:
    lane = max(2, _SHARD_PIXELS // len(node.ranks))
    height = lane * len(node.ranks)
    step = max(height, 12) + 6
    largest = max((each.size_bytes for each in trace.objects), default=1) or 1
    names = [each.uri.rpartition("/")[2] for each in trace.objects]
    parts = [
        f'<svg width="{_LABEL + _WIDTH}" height="{step * len(names)}" role="img" '
        'aria-label="which rank reads which part of which shard">'
    ]
    for k, (name, each) in enumerate(zip(names, trace.objects, strict=True)):
        scale = _WIDTH / largest
        length = max(1.0, each.size_bytes * scale)
        parts.append(f'<g transform="translate(0 {k * step})">')
        parts.append(
            f'<text x="0" y="{max(height, 12) / 2 + 4:g}">{escape(_short(name))}'
            f"<title>{escape(each.uri)}, {format_size(each.size_bytes)}</title></text>"
        )
        parts.append(f'<rect class="bar" x="{_LABEL}" width="{length:.1f}" height="{height}"/>')
        for rank in node.ranks:
            y = rank.rank * lane + lane / 2
            parts.append(
                f'<g stroke="{_colour(rank.rank)}" stroke-width="{lane}" '
                f'transform="translate({_LABEL} {y:g})"><title>rank {rank.rank}: needs '
                f"{format_size(_size(rank.needs[k]))}, fetches "
                f"{format_size(_size(rank.fetches[k]))} of {escape(name)}</title>"
                f"{_lines(rank.needs[k], scale, 'need')}{_lines(rank.fetches[k], scale, '')}</g>"
            )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def _short(name: str, most: int = 36) -> str:
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-most // 2 :]}"


def _size(rows: Rows) -> int:
    return int((rows[:, 1] - rows[:, 0]).sum())


def _lines(rows: Rows, scale: float, style: str) -> str:
    """One path with a stroke for each run of pixels."""
    runs: list[list[int]] = []
    # Tenths of a pixel; neighbours that the eye cannot tell apart become one.
    for start, end in (rows * (scale * 10)).round().astype(int).tolist():
        if runs and start <= runs[-1][1] + 2:
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([start, max(end, start + 3)])
    if not runs:
        return ""
    path = "".join(f"M{start / 10:g} 0H{end / 10:g}" for start, end in runs)
    return f'<path{f" class={style!r}" if style else ""} d="{path}"/>'
