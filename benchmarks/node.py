"""What a node of several ranks gains by fetching each byte once.

    python -m benchmarks.node [--json] [--quick] [--rounds 3]

A model of 1 GiB in one object, tensor parallel 2 and 4 (see `benchmarks.clients.node_rank`), all
ranks as processes: with exchange, and each rank by itself (``FASTLOAD_EXCHANGE=off``). On the
loopback as it is, where CPU ends it, and on a link of 500 MB/s for the node, with 30 ms latency and
90 MB/s a connection, where bytes end it.

Wall time is from the first rank's start to the last one's end, without imports; CPU is that of all
ranks and their children; bytes are those that the store sent, headers included. Both ways alternate
in shuffled rounds; figures are medians, ratios are medians of the ratios within a round.

Bars: bytes of the node / bytes of the model <= 1.01 with exchange; its wall time on the link
<= 0.9 of that without.
"""

from __future__ import annotations

import json
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.compiled import Programs
from benchmarks.link import NETWORK as LINK
from benchmarks.measure import client_environment
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of, programs_or_none
from benchmarks.server import Network, S3Server
from benchmarks.work import HEADER_BYTES, objects_of
from fastload_common.units import GIB, MIB

MODEL_BYTES = GIB
OBJECTS = 1  # the store names tensors alike in every object
NETWORKS = {"loopback": Network(), "500 MB/s": LINK}
WAYS = {"exchange": "auto", "alone": "off"}
MOST_RATIO, MOST_WALL = 1.01, 0.9
LIMIT_S = 180.0

Row = dict[str, Any]


def load(server: S3Server, ranks: int, way: str, settings: Mapping[str, str] | None = None) -> Row:
    """Load once; figures of the node.

    Args:
        settings: more variables.

    Raises:
        RuntimeError: a rank failed; the text is its last line.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = client_environment(server) | {"FASTLOAD_EXCHANGE": WAYS[way]} | dict(settings or {})
    server.take_counters()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.clients.node_rank"),
                json.dumps({"rank": rank, "ranks": ranks, "port": port}),
            ],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"did not end in {LIMIT_S:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError((errors.strip() or "no message").splitlines()[-1][:200])
    found = [json.loads(output.strip().splitlines()[-1]) for output, _ in said]
    counters = server.take_counters()
    return {
        "wall_s": max(row["ended_s"] for row in found) - min(row["began_s"] for row in found),
        "cpu_s": sum(row["cpu_s"] for row in found),
        "sent_bytes": counters["bytes"],
        "requests": counters["requests"],
        "model_ratio": counters["bytes"] / found[0]["model_bytes"],
        "needed_ratio": sum(row["needed_bytes"] for row in found) / found[0]["model_bytes"],
        "phases_s": [row["phases_s"] for row in found],
        "node_cache": [row["node_cache"] for row in found],
    }


def run(programs: Programs, rounds: int, size_bytes: int, sizes: list[int]) -> list[Row]:
    """One row for each load."""
    each = max(16 * MIB, size_bytes // OBJECTS // (16 * MIB) * (16 * MIB))
    items = objects_of(OBJECTS, each + HEADER_BYTES)
    shuffled = random.Random(1)
    rows = []
    for number in range(rounds):
        cases = [(network, ranks) for network in NETWORKS for ranks in sizes]
        shuffled.shuffle(cases)
        for network, ranks in cases:
            ways = list(WAYS)
            shuffled.shuffle(ways)
            with S3Server(programs, items, NETWORKS[network]) as server:
                for way in ways:
                    row: Row = {"network": network, "ranks": ranks, "way": way, "round": number}
                    try:
                        row |= load(server, ranks, way)
                    except RuntimeError as error:
                        row["failed"] = str(error)
                    rows.append(row)
    return rows


def summarize(rows: list[Row]) -> dict[str, Row]:
    """Medians for each network and number of ranks, and of the ratios within a round."""
    found: dict[str, Row] = {}
    for network in NETWORKS:
        for ranks in sorted({row["ranks"] for row in rows}):
            case: Row = {}
            pairs: dict[int, Row] = {}
            for row in rows:
                if (row["network"], row["ranks"]) != (network, ranks):
                    continue
                if "failed" in row:
                    case["failed"] = f"{row['way']}: {row['failed']}"
                    continue
                pairs.setdefault(row["round"], {})[row["way"]] = row
            for way in WAYS:
                of_way = [pair[way] for pair in pairs.values() if way in pair]
                case[way] = {
                    key: round(statistics.median(row[key] for row in of_way), 4)
                    for key in ("wall_s", "cpu_s", "model_ratio", "needed_ratio", "requests")
                    if of_way
                }
            both = [pair for pair in pairs.values() if len(pair) == len(WAYS)]
            for key in ("wall_s", "cpu_s"):
                ratios = [pair["exchange"][key] / pair["alone"][key] for pair in both]
                case[f"{key}_ratio"] = round(statistics.median(ratios), 3) if ratios else None
            found[f"{network}, TP={ranks}"] = case
    return found


def bars_of(cases: dict[str, Row]) -> list[Bar]:
    """The verdicts."""
    bars = []
    for name, case in cases.items():
        failed = case.get("failed")
        ratio = case["exchange"].get("model_ratio")
        bars.append(Bar(f"bytes / model, {name}", ratio, MOST_RATIO, failed=failed))
        if not name.startswith("loopback"):
            wall = case["wall_s_ratio"]
            bars.append(Bar(f"wall / wall alone, {name}", wall, MOST_WALL, failed=failed))
    return bars


def panels(found: Row) -> list[Panel]:
    drawn = []
    for key, title, unit in (
        ("wall_s", "load of 1 GiB", "seconds"),
        ("cpu_s", "CPU of all ranks", "CPU seconds"),
        ("model_ratio", "bytes that the store sent / bytes of the model", "ratio"),
    ):
        series = {
            way: {name: case[way][key] for name, case in found["cases"].items() if case[way]}
            for way in WAYS
        }
        limits = {f"bar {MOST_RATIO}": MOST_RATIO} if key == "model_ratio" else {}
        drawn.append(Panel(title, unit, series, limits))
    return drawn


def main() -> int:
    parser, directory = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, separated by commas")
    options = parser.parse_args()
    sizes = [int(text) for text in options.ranks.split(",")]
    with programs_or_none(options.json) as programs:
        if programs is None:
            return 0
        size_bytes = int(MODEL_BYTES * options.scale * (0.5 if options.quick else 1))
        rows = run(programs, 1 if options.quick else options.rounds, size_bytes, sizes)
    cases = summarize(rows)
    if not options.json:
        head = f"{'':20} {'wall s':>16} {'ratio':>6} {'CPU s':>16} {'ratio':>6} {'bytes/model':>16}"
        print(head + "\n" + f"{'':20} {'exchange  alone':>16} {'':6} {'exchange  alone':>16}")
        for name, case in cases.items():
            ours, alone = case["exchange"], case["alone"]
            if not ours or not alone:
                print(f"{name:20} {case.get('failed')}")
                continue
            print(
                f"{name:20} {ours['wall_s']:8.2f} {alone['wall_s']:7.2f} "
                f"{case['wall_s_ratio']:6.2f} {ours['cpu_s']:8.2f} {alone['cpu_s']:7.2f} "
                f"{case['cpu_s_ratio']:6.2f} {ours['model_ratio']:8.3f} {alone['model_ratio']:7.3f}"
            )
    found: Row = {"benchmark": "node", "model_bytes": MODEL_BYTES, "cases": cases, "rows": rows}
    bars = bars_of(cases)
    return finish("node", found, bars, panels, as_json=options.json, directory=directory)


if __name__ == "__main__":
    sys.exit(main())
