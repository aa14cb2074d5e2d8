"""What slow and dead requests cost a load.

    python -m benchmarks.tail [--json] [--quick] [--rounds 3]

The network of benchmarks.link (30 ms, 90 MB/s a connection, 500 MB/s in all). Then the same with
faults: of all GETs, 10 % have three times the latency and a third of what others have of the
connection's rate and of the link, and 1 % never end: half of them bring a head and nothing more,
half stop somewhere in the body. The request's number and a seed decide, so the clients meet the
same faults as long as they ask alike.

Figures: time with faults / time without (both from the first request to the last byte), and the
bytes that the store sent beyond the objects' sizes, as a share of them. Bars for fastload: 1.10
on the median over the seeds, and 5 % on the worst of them; the worst time is printed too.

The store times the requests: p50 and p95 of those that did not stall, and the median of the slow
ones / that of the others, for each MiB since requests differ in size. If that is not between 2.5
and 3.5 the faults were not what they are meant to be, and nothing is measured. One whose
connection the client closed counts with the time that the whole would have taken at its pace.

The others run once. Some wait for a minute before they give a dead request up: they get 150 s,
and one that has not ended by then is stopped, which is its result. ``--quick`` leaves them out.
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
from benchmarks.roster import PEERS, VARIANTS, present, shown
from benchmarks.server import Network, S3Server
from benchmarks.work import Item, objects_of
from fastload_common.units import MIB

__all__ = ["FAULTS", "summarize"]

FAULTS = replace(NETWORK, slow_share=0.10, slow_factor=3, stall_share=0.01)
# Seeds under which both kinds of fault hit among the first 60 requests, and about as many as
# the shares say among the first 500.
SEEDS = (2, 9, 11)
OBJECT_BYTES = 512 * MIB
OBJECTS = 8
BAR_WALL, BAR_BYTES = 1.10, 0.05
SLOW_RATIO = (2.5, 3.5)
LIMIT_S, PEER_LIMIT_S = 40.0, 150.0
LEFT_OUT = "left out by --quick: may wait long for dead requests"
_COUNTED = ("requests", "slow", "stalled", "request_p50_s", "request_p95_s")


def run(programs: Programs, names: list[str], rounds: int, scale: float) -> list[dict[str, Any]]:
    """One row for each run: fastload with each seed, the others with the first."""
    object_bytes = max(MIB, int(OBJECT_BYTES * scale) // MIB * MIB)
    rows = []
    for seed in SEEDS[:rounds]:
        for name in names if seed == SEEDS[0] else ["fastload"]:
            items = objects_of(OBJECTS, object_bytes)
            limit_s = LIMIT_S if name == "fastload" else PEER_LIMIT_S
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
    slow_s, other_s = cost.server["slow_s_per_mib"], cost.server["other_s_per_mib"]
    found: dict[str, Any] = {
        "bytes": size_bytes,
        "slow_ratio": round(slow_s / other_s, 3) if slow_s and other_s else None,
        "extra_bytes_share": round(cost.server["bytes"] / size_bytes - 1, 4),
        "server": cost.server,
    }
    if not cost.ended:
        return found | {"failed": f"did not end in {limit_s:.0f} s"}
    return found | {"span_s": round(cost.span_s, 3)}


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each client: medians over its seeds; what belongs to one seed as a list of them."""
    found = {}
    for name in dict.fromkeys(row["client"] for row in rows):
        own = [row for row in rows if row["client"] == name]
        clean = {row["seed"]: row.get("span_s") for row in own if not row["faults"]}
        faulty = [row for row in own if row["faults"]]
        times = {row["seed"]: (row.get("span_s"), clean[row["seed"]]) for row in faulty}
        by_seed = {
            seed: after / before for seed, (after, before) in times.items() if after and before
        }
        ratios = list(by_seed.values())
        extra = [row["extra_bytes_share"] for row in faulty if "span_s" in row]
        stores = [row.get("server", {}) for row in faulty]
        found[name] = {
            "seeds": [row["seed"] for row in faulty],
            "wall_ratio": round(statistics.median(ratios), 3) if ratios else None,
            "wall_ratio_max": round(max(ratios), 3) if ratios else None,
            "extra_bytes_share": max(extra) if extra else None,
            "worst_seed": max(by_seed, key=by_seed.__getitem__, default=None),
            "wall_ratios": [round(ratio, 3) for ratio in ratios],
            **{name: [store.get(name) for store in stores] for name in _COUNTED},
            "slow_ratio": [row.get("slow_ratio") for row in faulty],
            "not_measured": next(filter(None, map(_not_measured, faulty)), None),
            "failed": next((row["failed"] for row in own if "failed" in row), None),
        }
    return found


def _not_measured(row: dict[str, Any]) -> str | None:
    """Why a run with faults says nothing about them; None if it does."""
    server = row.get("server", {})
    if not server.get("slow") or not server.get("stalled"):
        return "not measured: a kind of fault did not come"
    ratio, (least, most) = row.get("slow_ratio"), SLOW_RATIO
    if ratio is None or not least <= ratio <= most:
        return f"not measured: slow requests took {ratio} times as long as others"
    return None


def panels(found: dict[str, Any]) -> list[Panel]:
    clients = found["clients"]
    notes = {name: text for name, row in clients.items() if (text := _note(row))}
    notes |= found["absent"] | found["left_out"]
    measured = {name: row for name, row in clients.items() if not _note(row)}
    wall = {name: row["wall_ratio"] for name, row in measured.items()}
    extra = {name: 100 * row["extra_bytes_share"] for name, row in measured.items()}
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


def _note(row: dict[str, Any]) -> str | None:
    found: str | None = row["failed"] or row["not_measured"]
    return found


def bars_of(row: dict[str, Any]) -> list[Bar]:
    """The bars, from fastload's row of `summarize`; not measured as `_not_measured` says."""
    found = {
        ("time with faults / without, median of the seeds", BAR_WALL): row["wall_ratio"],
        ("extra bytes, share", BAR_BYTES): row["extra_bytes_share"],
    }
    return [
        Bar(name, None if _note(row) else value, limit, failed=row["failed"])
        for (name, limit), value in found.items()
    ]


def _print_table(clients: dict[str, Any], others: dict[str, str]) -> None:
    print(
        f"{'client':12} {'time':>6} {'worst':>6} {'seed':>4} {'extra bytes':>11}  of each seed: "
        "requests, slow, stalled, p50 s, p95 s, slow / others"
    )
    for name, row in clients.items():
        listed = [row[key] for key in (*_COUNTED, "slow_ratio")]
        print(
            f"{name:12} {row['wall_ratio']!s:>6} {row['wall_ratio_max']!s:>6} "
            f"{row['worst_seed']!s:>4} {row['extra_bytes_share']!s:>11}  "
            f"{' '.join(map(str, listed))} {_note(row) or ''}"
        )
    for name, why in others.items():
        print(f"{name}: {why}")


def main() -> int:
    parser, directory = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=len(SEEDS))
    parser.add_argument("--only", default=",".join(PEERS), help="clients, separated by commas")
    options = parser.parse_args()
    # The floor has no timeouts: it would wait for ever, as a matter of course.
    names, absent = present([name for name in PEERS if name in options.only.split(",")])
    names = [name for name in names if name not in ("C floor", *VARIANTS)]
    left_out = {name: LEFT_OUT for name in names if options.quick and name != "fastload"}
    names = [name for name in names if name not in left_out]
    with programs_or_none(options.json) as programs:
        if programs is None:
            return 0
        rounds = 1 if options.quick else options.rounds
        rows = run(programs, names, rounds, options.scale)
    found: dict[str, Any] = {"benchmark": "tail", "about": shown(names), "absent": absent}
    found |= {"clients": summarize(rows), "rows": rows, "left_out": left_out}
    found |= {"limit_s": LIMIT_S, "peer_limit_s": PEER_LIMIT_S}
    if not options.json:
        _print_table(found["clients"], absent | left_out)
    bars = bars_of(found["clients"]["fastload"]) if "fastload" in names else []
    return finish("tail", found, bars, panels, as_json=options.json, directory=directory)


if __name__ == "__main__":
    sys.exit(main())
