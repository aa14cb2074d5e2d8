"""What the compile cache costs a start that waits for it: a hit from S3, and a miss.

    python -m benchmarks.compile_cache [--json] [--quick]

A bundle of 15 MiB that does not shrink, in a real S3 server on loopback (SeaweedFS), with and
without signatures, with S3 alone and with an empty directory of the node before it. Each start is
a new process with empty directories, from `CompileStart.begin` to the end of `wait`, with no
weights to load meanwhile, which would hide it; importing botocore is in it. The bandwidth is that
of boto3, reading an object of the same size from the same server in the same round, over an open
connection.

Bars, for medians of the rounds: a hit <= 1 s + size / bandwidth; a miss <= 0.5 s. The processes
share the CPUs with the server and with whatever else runs: ``load_average`` is in the results, and
CPU seconds stand beside wall time. On a busy machine the wall time is that of the others' work;
``chrt -f 1 python -m benchmarks.compile_cache`` puts it before theirs (``real_time`` says so).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of
from fastload_common.testing.s3_server import S3Server
from fastload_common.units import MIB

BUNDLE_BYTES = 15 * MIB
BUCKET = "compiled"
HIT_BAR_S, MISS_BAR_S = 1.0, 0.5
ROUNDS, QUICK_ROUNDS = 9, 3
HIT, MISS = 1, 2
"""Keys: one that is published, one that is not."""


class Bench:
    """Processes that start on nodes with empty disks."""

    def __init__(self, work: Path, server: S3Server, size_bytes: int) -> None:
        self._work = work
        self._server = server
        self._size_bytes = size_bytes
        self._key = work / "key.pem"
        _write_key(self._key)

    def call(self, what: str, *, signed: bool, node: bool, key: int = HIT) -> dict[str, Any]:
        """One process on a new node."""
        disk = Path(tempfile.mkdtemp(dir=self._work))
        prefix = f"s3://{BUCKET}/{'signed' if signed else 'plain'}"
        variables = {
            "FASTLOAD_COMPILE_CACHE": f"{disk / 'entries'},{prefix}" if node else prefix,
            "FASTLOAD_CACHE_DIR": str(disk / "cache"),
        }
        if signed:
            variables["FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE"] = str(self._key)
        try:
            return self._run(what, {"key": key, "bytes": self._size_bytes}, variables)
        finally:
            shutil.rmtree(disk)

    def read(self, name: str) -> dict[str, Any]:
        """The plain client."""
        job = {"bucket": BUCKET, "name": name, "bytes": self._size_bytes, "times": 3}
        return self._run("read", job, {})

    def _run(self, what: str, job: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AWS_", "FASTLOAD_", "BENCH_", "TORCHINDUCTOR_"))
        }
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.clients.compile_start", what, json.dumps(job)],
            env=environ | self._server.environ() | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if done.returncode:
            raise RuntimeError(f"{what}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def measure(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """One row for each start; the rounds alternate, so that other load weighs on all cases."""
    rows = []
    for number in range(rounds):
        plain = statistics.median(bench.read("object")["read_s"])
        for signed in (False, True):
            for node in (False, True):
                for what, key in (("hit", HIT), ("miss", MISS)):
                    row = bench.call("start", signed=signed, node=node, key=key)
                    if row["status"] != what or row.get("wrong"):
                        raise RuntimeError(f"wanted a {what}: {row}")
                    rows.append(
                        {
                            "round": number,
                            "case": what,
                            "signed": signed,
                            "stores": "directory and S3" if node else "S3",
                            "read_s": plain,
                            "load_average": os.getloadavg()[0],
                            **row,
                        }
                    )
    return rows


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Case -> medians, and how far the slowest was above the plain read of its round."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = f"{row['case']}, {'signed' if row['signed'] else 'unsigned'}, {row['stores']}"
        cases.setdefault(name, []).append(row)
    return {
        name: {
            "overhead_s": round(statistics.median(row["overhead_s"] for row in part), 4),
            "overhead_max_s": round(max(row["overhead_s"] for row in part), 4),
            "over_read_s": round(
                statistics.median(row["overhead_s"] - row["read_s"] for row in part), 4
            ),
            "begin_s": round(statistics.median(row["begin_s"] for row in part), 4),
            "cpu_s": round(statistics.median(row["cpu_s"] for row in part), 4),
            "read_s": round(statistics.median(row["read_s"] for row in part), 4),
        }
        for name, part in cases.items()
    }


def bars_of(cases: dict[str, dict[str, Any]]) -> list[Bar]:
    bars = []
    for name, case in cases.items():
        if name.startswith("hit"):
            bars.append(Bar(f"s - size / bandwidth, {name}", case["over_read_s"], HIT_BAR_S))
        else:
            bars.append(Bar(f"s, {name}", case["overhead_s"], MISS_BAR_S))
    return bars


def panels(found: dict[str, Any]) -> list[Panel]:
    cases = found["cases"]
    return [
        Panel(
            "A start that waits for the compile cache: 15 MiB, S3 on loopback",
            "seconds",
            {
                "wall": {name: case["overhead_s"] for name, case in cases.items()},
                "CPU": {name: case["cpu_s"] for name, case in cases.items()},
                "boto3 reads as much": {
                    name: case["read_s"] for name, case in cases.items() if name[0] == "h"
                },
            },
            limits={"miss": MISS_BAR_S, "hit, without the read": HIT_BAR_S},
        )
    ]


def _write_key(file: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    file.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def main() -> int:
    """See the module."""
    parser, directory = options_of(__doc__)
    options = parser.parse_args()
    size_bytes = int(BUNDLE_BYTES * options.scale)
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as work, S3Server() as server:
        server.make_bucket(BUCKET)
        server.client().put_object(Bucket=BUCKET, Key="object", Body=os.urandom(size_bytes))
        bench = Bench(Path(work), server, size_bytes)
        published = [bench.call("publish", signed=signed, node=False) for signed in (False, True)]
        rows = measure(bench, QUICK_ROUNDS if options.quick else ROUNDS)
    cases = summarize(rows)
    found = {"bundle_bytes": size_bytes, "cases": cases, "rows": rows, "published": published}
    found["real_time"] = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    return finish(
        "compile_cache", found, bars_of(cases), panels, as_json=options.json, directory=directory
    )


if __name__ == "__main__":
    sys.exit(main())
