"""`fastload pull` of an image beside `skopeo copy` and `umoci raw unpack`.

    python -m benchmarks.pull [--json] [--quick] [--scale 0.25]

A registry (Debian's docker-registry) on loopback that gives each connection 60 MB/s at most. The
image unpacks to 2 GiB in 10 layers, all gzip; two of them are 40 % of it each, of files that
compress by half; the others are many small files. Cold start of every program, fresh directories,
one after the other. The bars: wall time at most 0.5 of the two peers together, peak memory of the
process and its children at most 256 MiB, and the trees equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cost import memory_bytes
from benchmarks.paced import paced
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of
from fastload_common.testing.registry_server import RegistryServer, missing_programs
from fastload_common.units import GIB, KIB, MIB

__all__ = ["make_image"]

IMAGE_BYTES = 2 * GIB
LAYERS, LARGE, LARGE_SHARE = 10, 2, 0.4
CONNECTION_BYTES_PER_S = 60_000_000
WALL_BAR, MEMORY_BAR_MIB = 0.5, 256.0
SAMPLE_EVERY_S = 0.05
REPOSITORY = "bench/image"

# Settings at which memory must be as small, with names for the table.
EXTREMES = {
    "256 downloads, 64 unpacks": {
        "max_concurrent_downloads_per_image": "256",
        "max_concurrent_unpacks_per_image": "64",
    },
    "chunks of 1 GiB": {
        "concurrent_download_chunk_size": "1GiB",
        "max_concurrent_downloads_per_image": "32",
    },
    "chunks of 256 KiB": {"concurrent_download_chunk_size": "256KiB"},
}


def make_image(layout: Path, scale: float) -> int:
    """Make an image with umoci; the bytes that it unpacks to."""
    _run("umoci", "init", "--layout", str(layout))
    _run("umoci", "new", "--image", f"{layout}:latest")
    total_bytes = 0
    for number in range(LAYERS):
        share = LARGE_SHARE if number < LARGE else (1 - LARGE * LARGE_SHARE) / (LAYERS - LARGE)
        size_bytes = int(IMAGE_BYTES * scale * share)
        # Not beside each other, as in real images.
        large = number < LARGE
        with tempfile.NamedTemporaryFile(dir=layout.parent, suffix=".tar") as stream:
            with tarfile.open(fileobj=stream, mode="w") as made:
                total_bytes += _fill(made, number, size_bytes, 64 * MIB if large else 40 * KIB)
            stream.flush()
            _run("umoci", "raw", "add-layer", "--image", f"{layout}:latest", stream.name)
    return total_bytes


def _fill(made: tarfile.TarFile, number: int, size_bytes: int, file_bytes: int) -> int:
    noise = random.Random(number)
    block = noise.randbytes(MIB)
    left_bytes, count = size_bytes, 0
    directory = tarfile.TarInfo(f"layer{number}")
    directory.type, directory.mode = tarfile.DIRTYPE, 0o755
    made.addfile(directory)
    while left_bytes > 0:
        info = tarfile.TarInfo(f"layer{number}/d{count % 97}/file{count}")
        info.size = min(file_bytes, left_bytes)
        made.addfile(info, _Content(noise, block, info.size))  # type: ignore[arg-type]
        left_bytes -= info.size
        count += 1
    return size_bytes


class _Content:
    """Half noise that is new each time, half a repetition."""

    def __init__(self, noise: random.Random, block: bytes, size_bytes: int) -> None:
        self._noise = noise
        self._block = block
        self._left_bytes = size_bytes

    def read(self, size_bytes: int) -> bytes:
        size_bytes = min(size_bytes, self._left_bytes)
        self._left_bytes -= size_bytes
        parts = []
        for _ in range(0, size_bytes, 4 * KIB):
            at = self._noise.randrange(len(self._block) - 4 * KIB)
            parts.append(self._noise.randbytes(2 * KIB) + self._block[at : at + 16] * 128)
        return b"".join(parts)[:size_bytes]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One program's run."""

    wall_s: float
    peak_mib: float
    cpu_s: float


def measure(command: list[str], environ: dict[str, str] | None = None) -> Measured:
    """Run a program and look at the memory of it and its children all the while."""
    peak_bytes = 0
    begun_s, before_s = time.monotonic(), _children_cpu_s()
    with subprocess.Popen(
        command, env={**os.environ, **(environ or {})}, stdout=subprocess.DEVNULL
    ) as run:
        over = threading.Event()

        def look() -> None:
            nonlocal peak_bytes
            while not over.wait(SAMPLE_EVERY_S):
                peak_bytes = max(peak_bytes, memory_bytes(run.pid))

        watch = threading.Thread(target=look)
        watch.start()
        status = run.wait()
        wall_s = time.monotonic() - begun_s
        over.set()
        watch.join()
    if status:
        raise RuntimeError(f"{command[0]} ended with {status}")
    return Measured(wall_s, peak_bytes / MIB, _children_cpu_s() - before_s)


def _children_cpu_s() -> float:
    """Of children that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def one_round(place: Path, host: str, environ: dict[str, str]) -> dict[str, Any]:
    """Both ways, into fresh directories."""
    layout, theirs, mine = place / "layout", place / "umoci", place / "fastload"
    source = f"docker://{host}/{REPOSITORY}:latest"
    copied = measure(
        ["skopeo", "copy", "--quiet", "--src-tls-verify=false", source, f"oci:{layout}:latest"]
    )
    unpacked = measure(["umoci", "raw", "unpack", "--image", f"{layout}:latest", str(theirs)])
    pulled = measure(fastload(host, mine), environ)
    equal = digest_of(mine) == digest_of(theirs)
    for path in (layout, theirs, mine):
        shutil.rmtree(path)
    peers_s = copied.wall_s + unpacked.wall_s
    return {
        "skopeo_s": round(copied.wall_s, 3),
        "umoci_s": round(unpacked.wall_s, 3),
        "fastload_s": round(pulled.wall_s, 3),
        "ratio": round(pulled.wall_s / peers_s, 4),
        "peers_cpu_s": round(copied.cpu_s + unpacked.cpu_s, 3),
        "fastload_cpu_s": round(pulled.cpu_s, 3),
        "fastload_mib": round(pulled.peak_mib, 1),
        "skopeo_mib": round(copied.peak_mib, 1),
        "umoci_mib": round(unpacked.peak_mib, 1),
        "equal": equal,
    }


def fastload(host: str, destination: Path, settings: dict[str, str] | None = None) -> list[str]:
    """The command line."""
    command = [sys.executable, "-m", "fastload_common.cli.main", "pull", "--json"]
    for name, value in (settings or {}).items():
        command += ["--set", f"{name}={value}"]
    return [*command, f"oci://{host}/{REPOSITORY}:latest", str(destination)]


def digest_of(root: Path) -> str:
    """Of names, kinds, modes, owners, times of files, and contents."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*"), key=str):
        status = path.lstat()
        row = [str(path.relative_to(root)), status.st_mode, status.st_uid, status.st_gid]
        found.update(repr(row).encode())
        if path.is_file() and not path.is_symlink():
            found.update(repr(status.st_mtime_ns).encode())
            with path.open("rb") as stream:
                found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()


def run(scale: float, rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each round, and one for each of the extreme settings."""
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as name:
        place = Path(name)
        size_bytes = make_image(place / "image", scale)
        with RegistryServer(None, auth=False) as registry:
            registry.push_image(place / "image", REPOSITORY, "latest")
            shutil.rmtree(place / "image")
            with paced(registry.host, CONNECTION_BYTES_PER_S) as host:
                environ = {"FASTLOAD_OCI_PLAIN_HTTP": host, "FASTLOAD_PROGRESS": "off"}
                for number in range(rounds):
                    row = {"what": f"round {number}", "bytes": size_bytes}
                    yield row | one_round(place, host, environ)
                for what, settings in EXTREMES.items():
                    destination = place / "extreme"
                    found = measure(fastload(host, destination, settings), environ)
                    shutil.rmtree(destination)
                    yield {
                        "what": what,
                        "bytes": size_bytes,
                        "fastload_s": round(found.wall_s, 3),
                        "fastload_mib": round(found.peak_mib, 1),
                    }


def panels(found: dict[str, Any]) -> list[Panel]:
    rows = [row for row in found["rows"] if "ratio" in row]
    names = {
        "skopeo copy": "skopeo_s",
        "umoci raw unpack": "umoci_s",
        "fastload pull": "fastload_s",
    }
    values = {n: statistics.median([row[key] for row in rows]) for n, key in names.items()}
    title = "an image of 10 layers, 60 MB/s for each connection"
    return [Panel(title, "seconds", {"wall time": values}, {}, {}, tuple(names))]


def main() -> int:
    parser, directory = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if lacks := missing_programs("docker-registry", "skopeo", "umoci"):
        print(json.dumps({"absent": lacks}) if options.json else lacks)
        return 0
    rows = []
    for row in run(options.scale * (0.25 if options.quick else 1), options.rounds):
        rows.append(row)
        if not options.json:
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    compared = [row for row in rows if "ratio" in row]
    bars = [
        Bar(
            "wall of skopeo and umoci", statistics.median([r["ratio"] for r in compared]), WALL_BAR
        ),
        Bar("peak MiB at any setting", max(r["fastload_mib"] for r in rows), MEMORY_BAR_MIB),
        Bar("trees that differ", float(sum(not row["equal"] for row in compared)), 0.0),
    ]
    found = {"benchmark": "pull", "rows": rows, "scale": options.scale}
    return finish("pull", found, bars, panels, as_json=options.json, directory=directory)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
