"""Throughput while a Python thread of the loading process computes, as an engine's does.

    python -m benchmarks.busy [--json] [--quick] [--rounds 3]

Two comparisons, over HTTP and TLS, 8 MiB ranges, 8 connections, warm:

- ``limited``: all replies together come at 200 MB/s at most, so that the machine's CPUs are not
  full; throughput with the computing thread over throughput without one.
- ``unlimited``: throughput with the computing thread over throughput with the same computation
  in another process, which takes as much CPU but not the interpreter's lock. Beside it, without a
  bar, the literal ratio: over throughput with no computation anywhere. On a machine whose CPUs
  are full it says what any computation takes.

Each client runs once each way in each round, in shuffled order; figures are medians
of the ratios within a round. The bar for fastload: >= 0.90 in all four. The others are there for
scale, and receive less.
"""

from __future__ import annotations

import itertools
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.compiled import Programs
from benchmarks.measure import ClientFailedError, measure
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of, programs_or_none, schemes_of
from benchmarks.roster import PEERS, present, shown
from benchmarks.server import Network, S3Server
from benchmarks.work import Item, Work, objects_of
from fastload_common.units import GIB, MIB

__all__ = ["ratios"]

CHUNK_BYTES, CONNECTIONS = 8 * MIB, 8
LINK_RATE = 200e6
CASES = {"limited": Network(link_rate=LINK_RATE), "unlimited": Network()}
# A client of Python threads falls to a tenth under TLS: it gets less, so that it ends.
TOTAL_BYTES = {"fastload": 768 * MIB, "C floor": 768 * MIB, "boto3": 128 * MIB}
TOTAL_BYTES |= {"awscrt": 384 * MIB}
OBJECT_BYTES = 128 * MIB
BAR = 0.90
LIMIT_S = 60.0

# What the thread of benchmarks.clients.run computes.
_COMPUTATION = "total = 0\nwhile True:\n    for number in range(1000):\n        total += number\n"


@contextmanager
def computing_process(wanted: bool) -> Iterator[None]:
    """The computation, in a process that is no child of the client."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _COMPUTATION])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(
    programs: Programs, names: list[str], schemes: list[str], rounds: int, scale: float
) -> list[dict[str, Any]]:
    """One row for each run."""
    object_bytes = max(MIB, int(OBJECT_BYTES * scale) // MIB * MIB)
    items = objects_of(max(TOTAL_BYTES.values()) // OBJECT_BYTES, object_bytes)
    warm = Item("warm.safetensors", max(MIB, int(CONNECTIONS * CHUNK_BYTES * scale) // MIB * MIB))
    rows = []
    for scheme, (case, network) in itertools.product(schemes, CASES.items()):
        with S3Server(programs, (*items, warm), network, tls=scheme == "https") as server:
            runs = _runs(names, case)
            for number in range(rounds):
                for name, busy, alone in random.sample(runs, len(runs)):
                    taken = items[: TOTAL_BYTES[name] // OBJECT_BYTES]
                    work = Work(PEERS[name].client, taken, CHUNK_BYTES, CONNECTIONS, warm, busy)
                    row: dict[str, Any] = {"scheme": scheme, "case": case, "client": name}
                    row |= {"round": number, "busy": busy, "alone": alone}
                    with computing_process(case == "unlimited" and not busy and not alone):
                        rows.append(row | _figures(work, server, programs))
    return rows


def _runs(names: list[str], case: str) -> list[tuple[str, bool, bool]]:
    """Client, whether its process computes, whether nobody does."""
    # The floor has no interpreter that could be busy.
    ways = [(False, case == "limited"), (True, False)]
    ways += [(False, True)] if case == "unlimited" else []
    return [
        (name, busy, alone)
        for name in names
        for busy, alone in ways
        if name != "C floor" or not busy
    ]


def _figures(work: Work, server: S3Server, programs: Programs) -> dict[str, Any]:
    try:
        cost = measure(work, server, programs, limit_s=LIMIT_S)
    except ClientFailedError as error:
        return {"failed": str(error)}
    if not cost.ended:
        # Less than this, which is what the ratio then says at most.
        at_most = work.total_bytes / GIB / LIMIT_S
        return {"failed": f"did not end in {LIMIT_S:.0f} s", "gib_per_s": at_most}
    gib = cost.size_bytes / GIB
    return {
        "gib_per_s": round(gib / cost.wall_s, 4),
        "cpu_s_per_gib": round(cost.cpu_s / gib, 3),
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each scheme, case and client: medians, and the ratio of busy to not busy."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=_place):
        key = f"{row['client']}, {row['scheme']}, {row['case']}"
        found.setdefault(key, {"busy": {}, "beside": {}, "alone": {}})
        if "gib_per_s" in row:
            kind = "busy" if row["busy"] else "alone" if row["alone"] else "beside"
            found[key][kind][row["round"]] = row["gib_per_s"]
    return {key: _summary(**speeds) for key, speeds in found.items()}


def _place(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["scheme"], row["case"], list(TOTAL_BYTES).index(row["client"])


def _summary(
    busy: dict[int, float], beside: dict[int, float], alone: dict[int, float]
) -> dict[str, Any]:
    idle = beside or alone
    kept = sorted(busy[number] / idle[number] for number in busy if number in idle)
    literal = [busy[number] / alone[number] for number in busy if number in alone]
    return {
        "gib_per_s": round(statistics.median(idle.values()), 3) if idle else None,
        "gib_per_s_busy": round(statistics.median(busy.values()), 3) if busy else None,
        "kept": round(statistics.median(kept), 3) if kept else None,
        "kept_min": round(kept[0], 3) if kept else None,
        "kept_max": round(kept[-1], 3) if kept else None,
        "gib_per_s_alone": round(statistics.median(alone.values()), 3) if alone else None,
        "literal": round(statistics.median(literal), 3) if literal else None,
    }


def panels(found: dict[str, Any]) -> list[Panel]:
    rows = found["ratios"]
    kept = {key: row["kept"] for key, row in rows.items() if row["kept"] is not None}
    speeds = {
        text: {key: row[name] for key, row in rows.items() if row[name] is not None}
        for text, name in (("not computing", "gib_per_s"), ("computing", "gib_per_s_busy"))
    }
    return [
        Panel(
            "Throughput kept while a Python thread computes",
            "share of the throughput without",
            {"kept": kept},
            {f"bar {BAR}": BAR},
            found["absent"],
        ),
        Panel("Throughput", "GiB/s", speeds),
    ]


def main() -> int:
    parser, directory = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(TOTAL_BYTES), help="clients, with commas")
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    names, absent = present([name for name in TOTAL_BYTES if name in options.only.split(",")])
    with programs_or_none(options.json) as programs:
        if programs is None:
            return 0
        found: dict[str, Any] = {"benchmark": "busy", "about": shown(names), "absent": absent}
        schemes = schemes_of(programs, found)
        scale = options.scale * (0.5 if options.quick else 1)
        found["rows"] = run(programs, names, schemes, rounds, scale)
    found["ratios"] = ratios(found["rows"])
    found["link_rate"] = LINK_RATE
    if not options.json:
        print(f"{'':30} {'GiB/s':>7} {'busy':>7} {'kept':>6} {'min..max':>13} {'literal':>8}")
        for key, row in found["ratios"].items():
            spread = f"{row['kept_min']}..{row['kept_max']}"
            print(
                f"{key:30} {row['gib_per_s']!s:>7} {row['gib_per_s_busy']!s:>7} "
                f"{row['kept']!s:>6} {spread:>13} {row['literal']!s:>8}"
            )
    bars = [
        Bar(f"throughput kept by {key}", row["kept"], BAR, at_least=True)
        for key, row in found["ratios"].items()
        if key.startswith("fastload")
    ]
    return finish("busy", found, bars, panels, as_json=options.json, directory=directory)


if __name__ == "__main__":
    sys.exit(main())
