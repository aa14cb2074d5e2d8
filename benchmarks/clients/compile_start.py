"""One start with a compile cache, or one plain read from the same store, in a process of its own.

    python -m benchmarks.clients.compile_start start | publish | read JSON

Prints one line of JSON. ``start``: `CompileStart.begin` to the end of `wait`, with nothing else to
do meanwhile, in a process that has imported nothing of botocore. ``read``: an object, by boto3,
over a connection that is open.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from fastload_common.engine.cache_roots import CacheRoot
from fastload_common.engine.compile_counters import Counted
from fastload_common.engine.compile_start import CompileStart

LAYOUT = (
    CacheRoot("graphs", ("BENCH_GRAPHS",), "~/.cache/graphs"),
    CacheRoot("inductor", ("TORCHINDUCTOR_CACHE_DIR",), "/tmp/torchinductor_{user}"),
)
FILES = 120


def factors(key: int) -> dict[str, Any]:
    return {
        "engine.name": "engine",
        "engine.version": "1",
        "model.content": {"config.json": "0" * 64},
        "layout.tensor": key,
        "software.torch": "2.13.0",
        "software.python": "CPython 3.11",
        "software.libc": "glibc 2.36",
        "hardware.kind": "cpu",
        "hardware.machine": "x86_64",
    }


def start(job: dict[str, Any]) -> dict[str, Any]:
    """Begin and wait; how long that took, and what came of it."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    found = CompileStart.begin("bench", lambda: factors(job["key"]), LAYOUT)
    assert found is not None
    begin_s = time.monotonic() - began_s
    outcome = found.wait()
    row = {
        "overhead_s": time.monotonic() - began_s,
        "begin_s": begin_s,
        "cpu_s": time.process_time() - began_cpu_s,
        "status": outcome.status,
        "store": outcome.store,
        "content_bytes": outcome.content_bytes,
        "restore_s": outcome.restore_s,
    }
    if outcome.status == "hit":
        wrong = sum(
            path.read_bytes() != content(path.name, job["bytes"])
            for name in ("BENCH_GRAPHS", "TORCHINDUCTOR_CACHE_DIR")
            for path in Path(os.environ[name]).rglob("f*")
        )
        row["wrong"] = wrong
    found.finish(60)
    return row


def publish(job: dict[str, Any]) -> dict[str, Any]:
    """Compile what does not shrink when it is compressed, and publish it."""
    found = CompileStart.begin("bench", lambda: factors(job["key"]), LAYOUT)
    assert found is not None
    found.wait()
    for number in range(FILES):
        name = ("BENCH_GRAPHS", "TORCHINDUCTOR_CACHE_DIR")[number % 2]
        path = Path(os.environ[name], f"d{number % 7}", f"f{number}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(path.name, job["bytes"]))
    found.complete([Counted(FILES, 0, 1.0)])
    found.finish(120)
    return {"published": found.outcome.published, "publish_s": found.outcome.publish_s}


def content(name: str, total_bytes: int) -> bytes:
    return random.Random(name).randbytes(total_bytes // FILES)


def read(job: dict[str, Any]) -> dict[str, Any]:
    """One object, several times; seconds of each."""
    import boto3

    client = boto3.client("s3")
    client.head_object(Bucket=job["bucket"], Key=job["name"])
    seconds = []
    for _ in range(job["times"]):
        began_s = time.monotonic()
        data = client.get_object(Bucket=job["bucket"], Key=job["name"])["Body"].read()
        seconds.append(time.monotonic() - began_s)
        assert len(data) == job["bytes"]
    return {"read_s": seconds}


def main() -> None:
    """See the module."""
    what, job = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps({"start": start, "publish": publish, "read": read}[what](job)))


if __name__ == "__main__":
    main()
