"""How full a link is kept that no single connection can fill.

    python -m benchmarks.link [--json] [--quick]

The store answers after 30 ms, each reply comes at 90 MB/s at most, and all of them together at
500 MB/s at most: eight connections are needed all the while. One object of 4 GiB, and 32 objects
of 128 MiB, over HTTP, cold start. fastload chooses connections and chunks by itself; the others
have 32 connections and 8 MiB chunks, and only a part of the objects, so as not to take for ever.

The figure is bytes / (time from the first request to the last byte) / 500 MB/s; beside it the
same with the client's start (listing, threads or processes) in the time. The bar: >= 0.95.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.compiled import Programs
from benchmarks.measure import ClientFailedError, Cost, measure
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of, programs_or_none
from benchmarks.roster import PEERS, VARIANTS, present, shown
from benchmarks.server import Network, S3Server
from benchmarks.work import Item, Work, objects_of
from fastload_common.units import GIB, MIB

__all__ = ["NETWORK"]

NETWORK = Network(latency_ms=30, connection_rate=90e6, link_rate=500e6)
SHAPES = {"1 x 4 GiB": (1, 4 * GIB), "32 x 128 MiB": (32, 128 * MIB)}
PEER_SHARE = 0.5
CONNECTIONS, CHUNK_BYTES = 32, 8 * MIB
BAR = 0.95
LIMIT_S = 90.0


def items_of(shape: str, share: float) -> tuple[Item, ...]:
    """Objects of a shape, a part of them: fewer of many, a smaller one of one."""
    count, size_bytes = SHAPES[shape]
    if count == 1:
        return objects_of(1, max(MIB, int(size_bytes * share) // MIB * MIB))
    return objects_of(max(1, round(count * share)), size_bytes)


def work_of(name: str, items: tuple[Item, ...]) -> Work:
    """fastload as it is when nothing is set; the others as this benchmark says."""
    if name == "fastload":
        return Work("fastload", items, 0, 0)
    return Work(PEERS[name].client, items, CHUNK_BYTES, CONNECTIONS, options=PEERS[name].options)


def run(programs: Programs, names: list[str], rounds: int, scale: float) -> list[dict[str, Any]]:
    """One row for each run: fastload in every round, the others once."""
    rows = []
    for number in range(rounds):
        for shape in SHAPES:
            for name in names if number == 0 else ["fastload"]:
                share = 1.0 if name == "fastload" else PEER_SHARE
                items = items_of(shape, share * scale)
                with S3Server(programs, items, NETWORK) as server:
                    row: dict[str, Any] = {"client": name, "shape": shape, "round": number}
                    row["bytes"] = sum(item.size_bytes for item in items)
                    try:
                        cost = measure(work_of(name, items), server, programs, limit_s=LIMIT_S)
                        row |= _figures(cost, row["bytes"])
                    except ClientFailedError as error:
                        row["failed"] = str(error)
                    rows.append(row)
    return rows


def _figures(cost: Cost, size_bytes: int) -> dict[str, Any]:
    if not cost.ended:
        return {"failed": f"did not end in {LIMIT_S:.0f} s"}
    whole_s = cost.wall_s + cost.setup_s
    return {
        "share": round(size_bytes / cost.span_s / NETWORK.link_rate, 4),
        "share_with_start": round(size_bytes / whole_s / NETWORK.link_rate, 4),
        "span_s": round(cost.span_s, 3),
        "setup_s": round(cost.setup_s, 3),
        "cpu_s_per_gib": round(cost.cpu_s / (size_bytes / GIB), 3),
        "server": cost.server,
    }


def median(rows: list[dict[str, Any]], name: str, shape: str, key: str) -> float | None:
    """The median of a figure over the rounds; None if there is none."""
    of_client = (row for row in rows if (row["client"], row["shape"]) == (name, shape))
    values = [row[key] for row in of_client if key in row]
    return statistics.median(values) if values else None


def panels(found: dict[str, Any]) -> list[Panel]:
    rows = found["rows"]
    names = list(dict.fromkeys(row["client"] for row in rows))
    drawn = []
    for shape in SHAPES:
        series = {
            text: {n: value for n in names if (value := median(rows, n, shape, key)) is not None}
            for text, key in (
                ("first request to last byte", "share"),
                ("with the client's start", "share_with_start"),
            )
        }
        title = f"{shape}: share of a 500 MB/s link, 30 ms, 90 MB/s a connection"
        notes = {row["client"]: "failed" for row in rows if "failed" in row}
        notes |= found["absent"]
        unit = "share of the link's limit"
        drawn.append(Panel(title, unit, series, {f"bar {BAR}": BAR}, notes, tuple(PEERS)))
    return drawn


def main() -> int:
    parser, directory = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PEERS), help="clients, separated by commas")
    options = parser.parse_args()
    # fastload chooses its shape here anyway.
    wanted = [name for name in PEERS if name not in VARIANTS]
    names, absent = present([name for name in wanted if name in options.only.split(",")])
    with programs_or_none(options.json) as programs:
        if programs is None:
            return 0
        scale = options.scale * (0.25 if options.quick else 1)
        rows = run(programs, names, 1 if options.quick else options.rounds, scale)
    found: dict[str, Any] = {"benchmark": "link", "about": shown(names), "absent": absent}
    found |= {"rows": rows, "connections": CONNECTIONS, "chunk_bytes": CHUNK_BYTES}
    bars = []
    for shape in SHAPES:
        value = median(rows, "fastload", shape, "share")
        bars.append(Bar(f"share of the link, {shape}", value, BAR, at_least=True))
    if not options.json:
        print(f"{'client':12} {'objects':14} {'GiB':>5} {'share':>7} {'with start':>11}")
        for row in rows:
            figures = f"{row.get('share', '-'):>7} {row.get('share_with_start', '-'):>11}"
            size_gib = row["bytes"] / GIB
            print(
                f"{row['client']:12} {row['shape']:14} {size_gib:5.2f} {figures} "
                f"{row.get('failed', '')}"
            )
    return finish("link", found, bars, panels, as_json=options.json, directory=directory)


if __name__ == "__main__":
    sys.exit(main())
