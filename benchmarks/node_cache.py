"""What the node cache costs a first load, and what it gives the second.

    python -m benchmarks.node_cache [--json] [--quick] [--rounds 5] [--directory /mnt/nvme]

A model of 1 GiB in one object, all ranks as processes (see `benchmarks.clients.node_rank`), on a
link of 500 MB/s for the node, with 30 ms latency and 90 MB/s a connection. In each round, with an
empty cache: TP=2 without the cache and with it, in shuffled order; then TP=4 from what that left;
then TP=4 once more with half of the data file cut off.

Wall time is from the first rank's start to the last one's end, without imports; what is written
behind the load may take longer, and before each load all of that is on the disk, so that none pays
for the one before it. Bytes are those that the store sent.

Bars: wall time of a first load with the cache / without it <= 1.03 (median of the rounds); bytes of
the second load 0; those of the third 0.5 of the model.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.compiled import Programs
from benchmarks.link import NETWORK as LINK
from benchmarks.node import MODEL_BYTES, load
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of, programs_or_none
from benchmarks.server import S3Server
from benchmarks.work import HEADER_BYTES, objects_of
from fastload_common.units import MIB, format_size

MOST_WALL = 1.03
MOST_HALF = 0.51
CASES = ("off", "first", "second", "half")

Row = dict[str, Any]


def run(programs: Programs, rounds: int, size_bytes: int, place: Path | None) -> list[Row]:
    """One row for each load."""
    items = objects_of(1, size_bytes // (16 * MIB) * (16 * MIB) + HEADER_BYTES)
    shuffled = random.Random(1)
    rows = []
    for number in range(rounds):
        directory = tempfile.mkdtemp(prefix="fastload-cache-", dir=place)
        try:
            firsts = ["off", "first"]
            shuffled.shuffle(firsts)
            with S3Server(programs, items, LINK) as server:
                for case in (*firsts, "second", "half"):
                    if case == "half":
                        _cut(Path(directory))
                    settings = {} if case == "off" else {"FASTLOAD_NODE_CACHE": directory}
                    ranks = 2 if case in ("off", "first") else 4
                    row: Row = {"case": case, "ranks": ranks, "round": number}
                    row["load_average"] = round(os.getloadavg()[0], 1)
                    try:
                        os.sync()
                        row |= load(server, ranks, "exchange", settings)
                    except RuntimeError as error:
                        row["failed"] = str(error)
                    rows.append(row)
        finally:
            shutil.rmtree(directory)
    return rows


def _cut(directory: Path) -> None:
    for path in directory.glob("*/*.data"):
        os.truncate(path, path.stat().st_size // 2)


def summarize(rows: list[Row]) -> Row:
    """Medians for each case, and the ratio of the two first loads within a round."""
    found: Row = {}
    for case in CASES:
        good = [row for row in rows if row["case"] == case and "failed" not in row]
        found[case] = {
            key: round(statistics.median(row[key] for row in good), 4)
            for key in ("wall_s", "cpu_s", "model_ratio", "requests")
            if good
        }
        found[case]["dropped_bytes"] = sum(
            one.get("dropped_bytes", 0) for row in good for one in row["node_cache"]
        )
        failed = [row["failed"] for row in rows if row["case"] == case and "failed" in row]
        if failed:
            found["failed"] = f"{case}: {failed[0]}"
    pairs: dict[int, Row] = {}
    for row in rows:
        if "failed" not in row:
            pairs.setdefault(row["round"], {})[row["case"]] = row["wall_s"]
    ratios = [pair["first"] / pair["off"] for pair in pairs.values() if {"first", "off"} <= {*pair}]
    found["wall_ratio"] = round(statistics.median(ratios), 3) if ratios else None
    found["wall_ratios"] = [round(ratio, 3) for ratio in ratios]
    return found


def bars_of(cases: Row) -> list[Bar]:
    """The verdicts."""
    failed = cases.get("failed")
    return [
        Bar("first load with / without", cases["wall_ratio"], MOST_WALL, failed=failed),
        Bar("bytes / model, second", cases["second"].get("model_ratio"), 0.0, failed=failed),
        Bar("bytes / model, half", cases["half"].get("model_ratio"), MOST_HALF, failed=failed),
    ]


def panels(found: Row) -> list[Panel]:
    cases = found["cases"]
    rows = (
        ("wall_s", f"load of {format_size(found['model_bytes'])}", "seconds"),
        ("cpu_s", "CPU of all ranks", "CPU seconds"),
    )
    return [
        Panel(title, unit, {"load": {case: cases[case][key] for case in CASES if cases[case]}}, {})
        for key, title, unit in rows
    ]


def main() -> int:
    parser, directory = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the cache is; default: $TMPDIR")
    options = parser.parse_args()
    with programs_or_none(options.json) as programs:
        if programs is None:
            return 0
        size_bytes = int(MODEL_BYTES * options.scale * (0.5 if options.quick else 1))
        rounds = 1 if options.quick else options.rounds
        rows = run(programs, rounds, size_bytes, options.directory)
    cases = summarize(rows)
    if not options.json:
        print(f"{'':8} {'wall s':>8} {'CPU s':>8} {'bytes/model':>12} {'dropped MiB':>12}")
        for case in CASES:
            if cases[case].get("wall_s") is not None:
                row = cases[case]
                print(
                    f"{case:8} {row['wall_s']:8.2f} {row['cpu_s']:8.2f} "
                    f"{row['model_ratio']:12.3f} {row['dropped_bytes'] / MIB:12.0f}"
                )
        print(f"first / off within each round: {cases['wall_ratios']}")
    found: Row = {"benchmark": "node_cache", "model_bytes": size_bytes}
    found |= {"cases": cases, "rows": rows}
    bars = bars_of(cases)
    return finish("node_cache", found, bars, panels, as_json=options.json, directory=directory)


if __name__ == "__main__":
    sys.exit(main())
