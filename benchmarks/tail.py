"""What slow and dead requests cost a load.

    python -m benchmarks.tail [--json] [--quick] [--rounds 3]

The network of benchmarks.link (30 ms, 90 MB/s a connection, 500 MB/s in all). Then the same with
faults: of all GETs, 10 % take three times as long, and 1 % never end: half of them bring a head
and nothing more, half stop somewhere in the body. The request's number and a seed decide, so the
clients meet the same faults as long as they ask alike.

Figures: time with faults / time without (both from the first request to the last byte), and the
bytes that the store sent beyond the objects' sizes, as a share of them. Bars for fastload: 1.10
and 5 %. The others receive less and run once; one that has not ended after the limit is stopped,
and that is its result.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from typing import Any

from benchmarks.compiled import Programs
from benchmarks.link import NETWORK, work_of
from benchmarks.measure import ClientFailedError, measure
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of, programs_or_none
from benchmarks.roster import PEERS, present, shown
from benchmarks.server import Network, S3Server
from benchmarks.work import Item, objects_of
from fastload_common.units import MIB

__all__ = ["FAULTS", "summarize"]

FAULTS = replace(NETWORK, slow_share=0.10, slow_factor=3, stall_share=0.01)
# Seeds under which both kinds of fault hit among the first 60 requests, and about as many as
# the shares say among the first 500.
SEEDS = (2, 9, 11)
OBJECT_BYTES = 512 * MIB
OBJECTS, PEER_OBJECTS = 8, 2
BAR_WALL, BAR_BYTES = 1.10, 0.05
LIMIT_S, QUICK_LIMIT_S = 40.0, 15.0


def run(
    programs: Programs, names: list[str], rounds: int, scale: float, limit_s: float
) -> list[dict[str, Any]]:
    """One row for each run: fastload with each seed, the others with the first."""
    object_bytes = max(MIB, int(OBJECT_BYTES * scale) // MIB * MIB)
    rows = []
    for seed in SEEDS[:rounds]:
        for name in names if seed == SEEDS[0] else ["fastload"]:
            items = objects_of(OBJECTS if name == "fastload" else PEER_OBJECTS, object_bytes)
            for faults in (False, True):
                network = replace(FAULTS if faults else NETWORK, seed=seed)
                row: dict[str, Any] = {"client": name, "seed": seed, "faults": faults}
                rows.append(row | _figures(name, items, network, programs, limit_s))
    return rows


def _figures(
    name: str, items: tuple[Item, ...], network: Network, programs: Programs, limit_s: float
) -> dict[str, Any]:
    size_bytes = sum(item.size_bytes for item in items)
    with S3Server(programs, items, network) as server:
        try:
            cost = measure(work_of(name, items), server, programs, limit_s=limit_s)
        except ClientFailedError as error:
            return {"bytes": size_bytes, "failed": str(error)}
    found: dict[str, Any] = {
        "bytes": size_bytes,
        "extra_bytes_share": round(cost.server["bytes"] / size_bytes - 1, 4),
        "server": cost.server,
    }
    if not cost.ended:
        return found | {"failed": f"did not end in {limit_s:.0f} s"}
    return found | {"span_s": round(cost.span_s, 3)}


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each client: medians over its seeds."""
    found = {}
    for name in dict.fromkeys(row["client"] for row in rows):
        own = [row for row in rows if row["client"] == name]
        clean = {row["seed"]: row.get("span_s") for row in own if not row["faults"]}
        faulty = [row for row in own if row["faults"]]
        pairs = [(row.get("span_s"), clean[row["seed"]]) for row in faulty]
        ratios = [after / before for after, before in pairs if after and before]
        extra = [row["extra_bytes_share"] for row in faulty if "span_s" in row]
        found[name] = {
            "wall_ratio": round(statistics.median(ratios), 3) if ratios else None,
            "wall_ratio_max": round(max(ratios), 3) if ratios else None,
            "extra_bytes_share": max(extra) if extra else None,
            "requests": [row.get("server", {}).get("requests") for row in faulty],
            "slow": [row.get("server", {}).get("slow") for row in faulty],
            "stalled": [row.get("server", {}).get("stalled") for row in faulty],
            "failed": next((row["failed"] for row in own if "failed" in row), None),
        }
    return found


def panels(found: dict[str, Any]) -> list[Panel]:
    clients = found["clients"]
    notes = {name: row["failed"] for name, row in clients.items() if row["failed"]}
    notes |= found["absent"]
    wall = {name: row["wall_ratio"] for name, row in clients.items() if row["wall_ratio"]}
    extra = {
        name: 100 * row["extra_bytes_share"]
        for name, row in clients.items()
        if row["extra_bytes_share"] is not None
    }
    return [
        Panel(
            "10 % of requests 3x slower, 1 % never end: time with / without",
            "ratio",
            {"time": wall},
            {f"bar {BAR_WALL}": BAR_WALL},
            notes,
            tuple(PEERS),
        ),
        Panel(
            "Bytes sent by the store beyond the objects",
            "% of the objects",
            {"extra bytes": extra},
            {"bar 5 %": 100 * BAR_BYTES},
            notes,
            tuple(PEERS),
        ),
    ]


def bars_of(row: dict[str, Any]) -> list[Bar]:
    """The bars, from fastload's row of `summarize`; not measured if no fault of a kind came."""
    seen = all(row["stalled"]) and all(row["slow"])
    found = {
        ("time with faults / without", BAR_WALL): row["wall_ratio"],
        ("extra bytes, share", BAR_BYTES): row["extra_bytes_share"],
    }
    return [
        Bar(name, value if seen and not row["failed"] else None, limit, failed=row["failed"])
        for (name, limit), value in found.items()
    ]


def main() -> int:
    parser, directory = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=len(SEEDS))
    parser.add_argument("--only", default=",".join(PEERS), help="clients, separated by commas")
    options = parser.parse_args()
    # The floor has no timeouts: it would wait for ever, as a matter of course.
    names, absent = present([name for name in PEERS if name in options.only.split(",")])
    names = [name for name in names if name != "C floor"]
    with programs_or_none(options.json) as programs:
        if programs is None:
            return 0
        rounds = 1 if options.quick else options.rounds
        scale = options.scale * (0.5 if options.quick else 1)
        limit_s = QUICK_LIMIT_S if options.quick else LIMIT_S
        rows = run(programs, names, rounds, scale, limit_s)
    found: dict[str, Any] = {"benchmark": "tail", "about": shown(names), "absent": absent}
    found |= {"clients": summarize(rows), "rows": rows, "limit_s": limit_s}
    if not options.json:
        print(f"{'client':12} {'time':>7} {'extra bytes':>12}  requests slow stalled")
        for name, row in found["clients"].items():
            print(
                f"{name:12} {row['wall_ratio']!s:>7} {row['extra_bytes_share']!s:>12}  "
                f"{row['requests']} {row['slow']} {row['stalled']} {row['failed'] or ''}"
            )
    bars = bars_of(found["clients"]["fastload"]) if "fastload" in names else []
    return finish("tail", found, bars, panels, as_json=options.json, directory=directory)


if __name__ == "__main__":
    sys.exit(main())
