"""`fastload pull` of an image beside `skopeo copy` and `umoci raw unpack`, and containerd's `ctr`.

    python -m benchmarks.pull [--json] [--quick] [--scale 0.25] [--rounds 3]

A registry (Debian's docker-registry) on loopback behind a proxy that gives each connection, whose
ever it is, 60 MB/s at most. The image unpacks to 2 GiB in 10 layers, all gzip; two of them are 40 %
of it each, of files that compress by half; the others are many small files. Cold start of every
program, fresh directories, one after the other; `ctr images pull` asks a private containerd that
runs already and has nothing yet, as a node's does. In each round what was unpacked is compared.

Then fastload alone at the extremes of its settings, with this image, with zstd layers of 32 MiB
windows and with one of 2,000 layers.

The bars: wall time at most 0.5 of skopeo and umoci together, peak memory of the process and its
children at most 256 MiB, and the trees equal. The ratio to ctr is beside it, without a bar.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.containerd import Containerd, containerd, why_absent
from benchmarks.cost import memory_bytes, process_cpu_s
from benchmarks.paced import paced
from benchmarks.plots import Panel
from benchmarks.pull_images import MANY_LAYERS, make_image, push_many, push_windows
from benchmarks.results import Bar, finish, options_of
from fastload_common.testing.registry_server import RegistryServer, missing_programs
from fastload_common.units import MIB

CONNECTION_BYTES_PER_S = 60_000_000
WALL_BAR, MEMORY_BAR_MIB = 0.5, 256.0
SAMPLE_EVERY_S = 0.05
REPOSITORY, WINDOWS, MANY = "bench/image", "bench/windows", "bench/many"

# What takes most of each.
_ALL = {
    "max_concurrent_downloads_per_image": "512",
    "concurrent_download_chunk_size": "1GiB",
    "max_concurrent_unpacks_per_image": "64",
}
# Settings at which memory must be as small, with names for the table, and the image of each.
EXTREMES: dict[str, tuple[str, dict[str, str]]] = {
    "512 downloads, 64 unpacks, chunks of 1 GiB": (REPOSITORY, _ALL),
    "512 downloads, 64 unpacks": (
        REPOSITORY,
        {name: _ALL[name] for name in _ALL if name != "concurrent_download_chunk_size"},
    ),
    "chunks of 1 GiB": (
        REPOSITORY,
        {"concurrent_download_chunk_size": "1GiB", "max_concurrent_downloads_per_image": "32"},
    ),
    "chunks of 256 KiB": (REPOSITORY, {"concurrent_download_chunk_size": "256KiB"}),
    "zstd windows of 32 MiB": (WINDOWS, {}),
    "zstd windows of 32 MiB, all of these": (WINDOWS, _ALL),
    f"{MANY_LAYERS:,} layers": (MANY, {}),
    f"{MANY_LAYERS:,} layers, all of these": (MANY, _ALL),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One program's run."""

    wall_s: float
    peak_mib: float
    cpu_s: float


def measure(
    command: list[str], environ: dict[str, str] | None = None, daemon: int | None = None
) -> Measured:
    """Run a program and look at the memory of it and its children all the while.

    Args:
        daemon: a process that works for it; what it and its children take counts too.
    """
    peak_bytes = 0
    begun_s, before_s = time.monotonic(), _cpu_s(daemon)
    with subprocess.Popen(
        command, env={**os.environ, **(environ or {})}, stdout=subprocess.DEVNULL
    ) as run:
        over = threading.Event()
        pids = [run.pid] if daemon is None else [run.pid, daemon]

        def look() -> None:
            nonlocal peak_bytes
            while not over.wait(SAMPLE_EVERY_S):
                peak_bytes = max(peak_bytes, sum(memory_bytes(pid) for pid in pids))

        watch = threading.Thread(target=look)
        watch.start()
        status = run.wait()
        wall_s = time.monotonic() - begun_s
        over.set()
        watch.join()
    if status:
        raise RuntimeError(f"{command[0]} ended with {status}")
    return Measured(wall_s, peak_bytes / MIB, _cpu_s(daemon) - before_s)


def _cpu_s(daemon: int | None) -> float:
    """Of children that have ended and of theirs, and of a daemon that has not."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime + (process_cpu_s(daemon) if daemon else 0.0)


def one_round(place: Path, host: str, environ: dict[str, str], ctr: bool) -> dict[str, Any]:
    """Each way, into fresh directories."""
    layout, theirs, mine = place / "layout", place / "umoci", place / "fastload"
    source = f"docker://{host}/{REPOSITORY}:latest"
    copied = measure(
        ["skopeo", "copy", "--quiet", "--src-tls-verify=false", source, f"oci:{layout}:latest"]
    )
    unpacked = measure(["umoci", "raw", "unpack", "--image", f"{layout}:latest", str(theirs)])
    shutil.rmtree(layout)
    expected = digest_of(theirs)
    shutil.rmtree(theirs)
    by_ctr = ctr_round(place, host, expected) if ctr else {}
    pulled = measure(fastload(f"{host}/{REPOSITORY}", mine), environ)
    equal = digest_of(mine) == expected
    shutil.rmtree(mine)
    peers_s = copied.wall_s + unpacked.wall_s
    found = {
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
    if by_ctr:
        found |= by_ctr
        found["ctr_ratio"] = round(pulled.wall_s / by_ctr["ctr_s"], 4)
    return found


def ctr_round(place: Path, host: str, expected: str) -> dict[str, Any]:
    """`ctr images pull` by a fresh daemon; what it took, the daemon's part included."""
    with containerd(place) as daemon:
        reference = f"{host}/{REPOSITORY}:latest"
        pulled = measure(daemon.pull(reference), daemon=daemon.pid)
        return {
            "ctr_s": round(pulled.wall_s, 3),
            "ctr_cpu_s": round(pulled.cpu_s, 3),
            "ctr_mib": round(pulled.peak_mib, 1),
            "ctr_equal": tree_of(daemon, reference, place) == expected,
            "ctr_snapshotter": daemon.snapshotter,
            "ctr_version": daemon.version,
        }


def fastload(image: str, destination: Path, settings: dict[str, str] | None = None) -> list[str]:
    """The command line for an image of a registry."""
    command = [sys.executable, "-m", "fastload_common.cli.main", "pull", "--json"]
    for name, value in (settings or {}).items():
        command += ["--set", f"{name}={value}"]
    return [*command, f"oci://{image}:latest", str(destination)]


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


def tree_of(daemon: Containerd, reference: str, place: Path) -> str:
    """The digest of the tree that a containerd has unpacked."""
    mounted = place / "ctr"
    code = "import sys; from pathlib import Path; from benchmarks.pull import digest_of; "
    code += "print(digest_of(Path(sys.argv[1])))"
    return daemon.within(reference, mounted, [sys.executable, "-c", code, str(mounted)]).strip()


def run(scale: float, rounds: int, *, ctr: bool) -> Iterator[dict[str, Any]]:
    """One row for each round, and one for each of the extreme settings."""
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as name:
        place = Path(name)
        size_bytes = make_image(place / "image", scale)
        with RegistryServer(None, auth=False) as registry:
            registry.push_image(place / "image", REPOSITORY, "latest")
            shutil.rmtree(place / "image")
            sizes = {
                REPOSITORY: size_bytes,
                WINDOWS: push_windows(registry, WINDOWS, scale),
                MANY: push_many(registry, MANY, MANY_LAYERS),
            }
            with paced(registry.host, CONNECTION_BYTES_PER_S) as host:
                environ = {"FASTLOAD_OCI_PLAIN_HTTP": host, "FASTLOAD_PROGRESS": "off"}
                for number in range(rounds):
                    row = {"what": f"round {number}", "bytes": size_bytes}
                    yield row | one_round(place, host, environ, ctr)
                for what, (image, settings) in EXTREMES.items():
                    destination = place / "extreme"
                    found = measure(fastload(f"{host}/{image}", destination, settings), environ)
                    shutil.rmtree(destination)
                    yield {
                        "what": what,
                        "bytes": sizes[image],
                        "fastload_s": round(found.wall_s, 3),
                        "fastload_mib": round(found.peak_mib, 1),
                    }


def panels(found: dict[str, Any]) -> list[Panel]:
    rows = [row for row in found["rows"] if "ratio" in row]
    names = {
        "skopeo copy": "skopeo_s",
        "umoci raw unpack": "umoci_s",
        "ctr images pull": "ctr_s",
        "fastload pull": "fastload_s",
    }
    here = {name: key for name, key in names.items() if all(key in row for row in rows)}
    values = {n: statistics.median([row[key] for row in rows]) for n, key in here.items()}
    why = found.get("absent", {}).get("ctr")
    absent = {"ctr images pull": why} if why else {}
    title = "an image of 10 layers, 60 MB/s for each connection"
    memory = {row["what"]: row["fastload_mib"] for row in found["rows"]}
    return [
        Panel(title, "seconds", {"wall time": values}, {}, absent, tuple(names)),
        Panel("peak memory of fastload pull", "MiB", {"fastload": memory}, {"bar": MEMORY_BAR_MIB}),
    ]


def bars_of(rows: list[dict[str, Any]]) -> list[Bar]:
    """The verdicts. The memory's names where it was the most."""
    compared = [row for row in rows if "ratio" in row]
    ratio = statistics.median([row["ratio"] for row in compared])
    worst = max(rows, key=lambda row: float(row["fastload_mib"]))
    return [
        Bar("wall of skopeo and umoci", ratio, WALL_BAR),
        Bar(f"peak MiB at any setting ({worst['what']})", worst["fastload_mib"], MEMORY_BAR_MIB),
        Bar("trees that differ", float(sum(not row["equal"] for row in compared)), 0.0),
    ]


def main() -> int:
    parser, directory = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if lacks := missing_programs("docker-registry", "skopeo", "umoci"):
        print(json.dumps({"absent": lacks}) if options.json else lacks)
        return 0
    absent = why_absent()
    scale = options.scale * (0.25 if options.quick else 1)
    rows = []
    for row in run(scale, options.rounds, ctr=not absent):
        rows.append(row)
        if not options.json:
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    ratios = [row["ctr_ratio"] for row in rows if "ctr_ratio" in row]
    found: dict[str, Any] = {"benchmark": "pull", "rows": rows, "scale": scale}
    found["ctr_ratio"] = statistics.median(ratios) if ratios else None
    if absent:
        found["absent"] = {"ctr": absent}
    if not options.json:
        print(f"wall of ctr: {found['ctr_ratio']} (no bar)" if ratios else f"no ctr: {absent}")
    bars = bars_of(rows)
    return finish("pull", found, bars, panels, as_json=options.json, directory=directory)


if __name__ == "__main__":
    sys.exit(main())
