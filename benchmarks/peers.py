"""CPU and wall time of fastload beside its peers and a floor in C: one store, objects alike.

    python -m benchmarks.peers [--json] [--quick] [--rounds 5] [--only NAME,NAME]

Loopback, 8 connections, HTTP and TLS 1.3 (AES-128-GCM). Ranges are of 8 MiB, which costs the others
least; ``fastload`` chooses 16 MiB for so much data, ``fastload 8 MiB`` is the same with 8, and
``fastload defaults`` chooses connections, too. Most peers receive half of the objects: the table
says how many GiB each got. Each client runs alone in a process of its own, with open connections
and touched memory where it allows that; its children are counted. All deliver into memory of the
loader's, so what comes in memory of the client's own is copied there (see each client's module).
Bytes are checked at both ends of every part.

In each round every client runs once, in shuffled order. Figures are medians over the rounds, and
ratios are medians of the ratios *within a round*, so that other load on the machine weighs on
both sides. CPU is what counts here: the store takes part of the same CPUs, so wall times of fast
clients lie closer together than they would with a store elsewhere.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.compiled import Programs
from benchmarks.measure import ClientFailedError, Cost, measure
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of, programs_or_none, schemes_of
from benchmarks.roster import PEERS, present, shown
from benchmarks.server import S3Server
from benchmarks.work import Item, Work, objects_of
from fastload_common.units import GIB, MIB

__all__ = ["Sample", "bars_of", "summarize"]

CHUNK_BYTES = 8 * MIB
CONNECTIONS = 8
OBJECTS = 4
OBJECT_BYTES = 1024 * MIB
WARM_BYTES = 512 * MIB
"""Received twice before it counts: more than the memory that any client uses again and again."""
SAMPLE_EVERY_S = 0.25

BARS = (
    ("http", "C floor", 1.3),
    ("https", "C floor", 1.5),
    ("http", "awscrt", 1 / 3),
    ("https", "runai", 1 / 2),
    ("https", "runai tuned", 1 / 2),
)
"""Most CPU that fastload may take, as a multiple of another client's."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One client in one round."""

    scheme: str
    client: str
    round: int
    cpu_s_per_gib: float
    gib_per_s: float
    peak_bytes: int = 0
    size_bytes: int = 0


def run(
    programs: Programs, names: list[str], schemes: list[str], rounds: int, scale: float
) -> tuple[list[Sample], dict[str, str]]:
    """All samples, interleaved; and the clients that failed, with what they said."""
    object_bytes = max(MIB, int(OBJECT_BYTES * scale) // MIB * MIB)
    items = objects_of(OBJECTS, object_bytes)
    warm = Item("warm.safetensors", max(MIB, int(WARM_BYTES * scale) // MIB * MIB))
    samples, failed = [], {}
    for scheme in schemes:
        with S3Server(programs, (*items, warm), tls=scheme == "https") as server:
            for number in range(rounds):
                for name in random.sample(names, len(names)):
                    try:
                        cost = _measure(name, items, warm, server, programs)
                    except ClientFailedError as error:
                        failed[f"{name} ({scheme})"] = str(error)
                        continue
                    samples.append(_sample(scheme, name, number, cost))
    return samples, failed


def _measure(
    name: str, items: tuple[Item, ...], warm: Item, server: S3Server, programs: Programs
) -> Cost:
    peer = PEERS[name]
    taken = items[: max(1, round(len(items) * peer.share))]
    chunk_bytes = CHUNK_BYTES if peer.chunk_bytes is None else peer.chunk_bytes
    connections = CONNECTIONS if peer.connections is None else peer.connections
    work = Work(peer.client, taken, chunk_bytes, connections, warm, options=peer.options)
    cost = measure(work, server, programs, sample_every_s=SAMPLE_EVERY_S)
    if not cost.ended:
        raise ClientFailedError(f"{name}: did not end in time")
    return cost


def _sample(scheme: str, name: str, number: int, cost: Cost) -> Sample:
    gib = cost.size_bytes / GIB
    speed = gib / cost.wall_s
    return Sample(scheme, name, number, cost.cpu_s / gib, speed, cost.peak_bytes, cost.size_bytes)


def summarize(samples: list[Sample]) -> dict[str, dict[str, Any]]:
    """For each scheme and client: medians, and fastload's CPU and wall as multiples of it."""
    found: dict[str, dict[str, Any]] = {}
    for scheme in dict.fromkeys(sample.scheme for sample in samples):
        of_scheme = [sample for sample in samples if sample.scheme == scheme]
        ours = {sample.round: sample for sample in of_scheme if sample.client == "fastload"}
        found[scheme] = {}
        measured = {sample.client for sample in of_scheme}
        for client in (name for name in PEERS if name in measured):
            own = [sample for sample in of_scheme if sample.client == client]
            pairs = [(ours[sample.round], sample) for sample in own if sample.round in ours]
            found[scheme][client] = _row(own, pairs)
    return found


def _row(own: list[Sample], pairs: list[tuple[Sample, Sample]]) -> dict[str, Any]:
    cpu = sorted(mine.cpu_s_per_gib / other.cpu_s_per_gib for mine, other in pairs)
    wall = [other.gib_per_s / mine.gib_per_s for mine, other in pairs]
    return {
        "rounds": len(own),
        "bytes": own[0].size_bytes,
        "cpu_s_per_gib": round(statistics.median(s.cpu_s_per_gib for s in own), 3),
        "gib_per_s": round(statistics.median(s.gib_per_s for s in own), 3),
        "peak_mib": round(statistics.median(s.peak_bytes for s in own) / MIB),
        "fastload_cpu_ratio": round(statistics.median(cpu), 3) if cpu else None,
        "fastload_cpu_ratio_min": round(cpu[0], 3) if cpu else None,
        "fastload_cpu_ratio_max": round(cpu[-1], 3) if cpu else None,
        "fastload_wall_ratio": round(statistics.median(wall), 3) if wall else None,
    }


def bars_of(rows: dict[str, dict[str, Any]]) -> list[Bar]:
    """The bars, from what `summarize` gives."""
    bars = []
    for scheme, client, limit in BARS:
        row = rows.get(scheme, {}).get(client, {})
        name = f"fastload's CPU as a multiple of that of {client}, {scheme}"
        bars.append(Bar(name, row.get("fastload_cpu_ratio"), limit))
    return bars


def _print_table(rows: dict[str, dict[str, Any]], absent: dict[str, str]) -> None:
    for scheme, clients in rows.items():
        print(f"\n{scheme}, {CONNECTIONS} connections; medians")
        print(
            f"{'client':17} {'GiB':>5} {'CPU s/GiB':>10} {'GiB/s':>7} {'peak MiB':>9} "
            f"{'fastload CPU':>13} {'min..max':>13} {'wall':>6}"
        )
        for client, row in sorted(clients.items(), key=lambda item: item[1]["cpu_s_per_gib"]):
            spread = f"{row['fastload_cpu_ratio_min']}..{row['fastload_cpu_ratio_max']}"
            print(
                f"{client:17} {row['bytes'] / GIB:5.2f} {row['cpu_s_per_gib']:10.3f} "
                f"{row['gib_per_s']:7.2f} {row['peak_mib']:9} "
                f"{row['fastload_cpu_ratio']!s:>12}x {spread:>13} "
                f"{row['fastload_wall_ratio']!s:>5}x"
            )
    for client, why in absent.items():
        print(f"{client}: {why}")


def panels(found: dict[str, Any]) -> list[Panel]:
    rows = found["clients"]
    notes = {name.partition(" (")[0]: "failed" for name in found["failed"]}
    notes |= found["absent"]
    titles = {
        "cpu_s_per_gib": ("Client CPU, children counted", "CPU seconds per GiB (less is better)"),
        "gib_per_s": ("Throughput, store on the same CPUs", "GiB/s"),
        "peak_mib": ("Peak memory above the start, process tree", "MiB"),
    }
    drawn = []
    for key, (title, unit) in titles.items():
        series = {
            scheme: {client: row[key] for client, row in clients.items()}
            for scheme, clients in rows.items()
        }
        drawn.append(Panel(title, unit, series, notes=notes, order=tuple(PEERS)))
    return drawn


def main() -> int:
    parser, directory = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(PEERS), help="clients, separated by commas")
    options = parser.parse_args()
    rounds = min(options.rounds, 2) if options.quick else options.rounds
    names, absent = present([name for name in PEERS if name in options.only.split(",")])
    with programs_or_none(options.json) as programs:
        if programs is None:
            return 0
        found: dict[str, Any] = {"benchmark": "peers", "about": shown(names), "absent": absent}
        schemes = schemes_of(programs, found)
        scale = options.scale * (0.5 if options.quick else 1)
        samples, found["failed"] = run(programs, names, schemes, rounds, scale)
    found["clients"] = summarize(samples)
    found["chunk_bytes"], found["connections"] = CHUNK_BYTES, CONNECTIONS
    if not options.json:
        _print_table(found["clients"], absent | found["failed"])
    bars = bars_of(found["clients"])
    return finish("peers", found, bars, panels, as_json=options.json, directory=directory)


if __name__ == "__main__":
    sys.exit(main())
