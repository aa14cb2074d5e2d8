"""CPU seconds per GiB of the client, beside the floor in C, interleaved in one run.

    python -m benchmarks.client_cpu [--json] [--rounds 5] [--gib 2]

Over loopback HTTP, 8 MiB ranges, 8 connections, into memory that is touched already:

- ``floor``: a C client, `recv` straight into its buffers, no signing (native/range_client.c);
- ``fastload``: our S3 source, fetcher and staging memory, each request signed;
- ``boto3``: `get_object` in threads, for scale.

In each round every client runs once, in shuffled order, in a process of its own. The figure
is the median over the rounds of the ratio to the floor *of the same round*, so that other
load on the machine weighs on both. Exit status 1 if it is above the limit; without a C
compiler the benchmark is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.compiled import RangeServer, build, find_compiler
from benchmarks.receiving import CLIENTS, Work
from fastload_common.config import environment
from fastload_common.units import GIB, MIB

__all__ = ["Sample", "measure", "summarize"]

LIMIT = 1.5
"""Most CPU that fastload may take, as a multiple of the floor."""

OBJECT_BYTES = 512 * MIB
CHUNK_BYTES = 8 * MIB
CONNECTIONS = 8
# No further round begins after this, so that a loaded machine does not take for ever.
LAST_ROUND_BEGINS_S = 60.0
MIN_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One client in one round."""

    client: str
    round: int
    cpu_s_per_gib: float
    gib_per_s: float


def measure(client: str, work: Work, port: int, floor_program: Path) -> tuple[float, float]:
    """Run one client; its CPU seconds and wall seconds."""
    shape = [work.object_bytes, work.total_bytes, work.chunk_bytes, work.connections]
    if client == "floor":
        command = [str(floor_program), str(port)]
    else:
        command = [sys.executable, "-m", "benchmarks.receiving", client]
    done = subprocess.run(
        command + [str(number) for number in shape],
        env=_client_environment(port),
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    cost = json.loads(done.stdout)
    return cost["cpu_s"], cost["wall_s"]


def _client_environment(port: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in environment().items()
        if not name.startswith(("AWS_", "FASTLOAD_")) and not name.lower().endswith("_proxy")
    }
    return kept | {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def run(rounds: int, total_bytes: int, directory: Path) -> list[Sample]:
    """All samples, interleaved."""
    server_program = build("range_server", directory)
    floor_program = build("range_client", directory)
    clients = ["floor", *CLIENTS]
    samples = []
    began_s = time.monotonic()
    with RangeServer(server_program, OBJECT_BYTES) as server:
        for number in range(rounds):
            if number >= MIN_ROUNDS and time.monotonic() - began_s > LAST_ROUND_BEGINS_S:
                break
            random.shuffle(clients)
            for client in clients:
                # boto3 is there for scale only: half the work keeps the run short.
                size_bytes = total_bytes // 2 if client == "boto3" else total_bytes
                work = Work(OBJECT_BYTES, size_bytes, CHUNK_BYTES, CONNECTIONS)
                cpu_s, wall_s = measure(client, work, server.port, floor_program)
                gib = size_bytes / GIB
                samples.append(Sample(client, number, cpu_s / gib, gib / wall_s))
    return samples


def summarize(samples: list[Sample]) -> dict[str, Any]:
    """Medians, ratios to the floor of the same round, and the verdict."""
    floor = {s.round: s.cpu_s_per_gib for s in samples if s.client == "floor"}
    found: dict[str, Any] = {"limit": LIMIT, "rounds": len(floor), "clients": {}}
    for client in ("floor", *CLIENTS):
        own = [sample for sample in samples if sample.client == client]
        ratios = sorted(sample.cpu_s_per_gib / floor[sample.round] for sample in own)
        found["clients"][client] = {
            "cpu_s_per_gib": round(statistics.median(s.cpu_s_per_gib for s in own), 3),
            "gib_per_s": round(statistics.median(s.gib_per_s for s in own), 2),
            "ratio": round(statistics.median(ratios), 2),
            "ratio_min": round(ratios[0], 2),
            "ratio_max": round(ratios[-1], 2),
        }
    found["pass"] = found["clients"]["fastload"]["ratio"] <= LIMIT
    found["samples"] = [asdict(sample) for sample in samples]
    return found


def _print_table(found: dict[str, Any]) -> None:
    print(
        f"loopback HTTP, {CHUNK_BYTES // MIB} MiB ranges, {CONNECTIONS} connections, "
        f"{found['rounds']} rounds, {os.cpu_count()} CPUs; medians"
    )
    print(f"{'client':10} {'CPU s/GiB':>10} {'GiB/s':>7} {'x floor':>8} {'min..max':>12}")
    for client, row in found["clients"].items():
        spread = f"{row['ratio_min']:.2f}..{row['ratio_max']:.2f}"
        print(
            f"{client:10} {row['cpu_s_per_gib']:10.3f} {row['gib_per_s']:7.2f} "
            f"{row['ratio']:8.2f} {spread:>12}"
        )
    verdict = "PASS" if found["pass"] else "FAIL"
    ratio = found["clients"]["fastload"]["ratio"]
    print(f"{verdict}: fastload takes {ratio:.2f} x the CPU of the floor (limit {LIMIT})")


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU seconds per GiB beside a floor in C")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=2.0, help="GiB per client and round")
    options = parser.parse_args()
    if find_compiler() is None:
        reason = "skipped: no C compiler (cc, gcc or clang) for the floor"
        print(json.dumps({"skipped": reason}) if options.json else reason)
        return 0
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as directory:
        total_bytes = int(options.gib * GIB) // CHUNK_BYTES * CHUNK_BYTES
        found = summarize(run(options.rounds, total_bytes, Path(directory)))
    if options.json:
        print(json.dumps(found))
    else:
        _print_table(found)
    return 0 if found["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
