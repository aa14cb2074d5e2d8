"""s5cmd: one `cp` of all objects into files in memory; the whole process counts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.work import BUCKET, Item, Work, check
from fastload_common.config import environment
from fastload_common.units import MIB


class S5Client:
    """No warm-up is possible: each call is a new process."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._program = str(Path(sys.executable).with_name("s5cmd"))

    def receive(self, items: tuple[Item, ...]) -> int:
        needed_bytes = sum(item.size_bytes for item in items)
        part_mib = max(5, self._work.chunk_bytes // MIB)
        with tempfile.TemporaryDirectory(dir=_directory_for(needed_bytes)) as directory:
            commands = "\n".join(
                f"cp --concurrency {self._work.connections} --part-size {part_mib} "
                f"s3://{BUCKET}/{item.name} {directory}/{item.name}"
                for item in items
            )
            endpoint = environment()["AWS_ENDPOINT_URL"]
            subprocess.run(
                [self._program, "--endpoint-url", endpoint, "--log", "error", "run"],
                input=commands,
                check=True,
                text=True,
            )
            return sum(_size_of_checked(Path(directory, item.name)) for item in items)

    def close(self) -> None:
        """Nothing is open."""


def _directory_for(size_bytes: int) -> Path | None:
    """In memory where that much fits; a container has 64 MB there. None: the default."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > size_bytes
    return memory if fits else None


def _size_of_checked(file: Path) -> int:
    size_bytes = file.stat().st_size
    with file.open("rb") as opened:
        for start in range(0, size_bytes, MIB):
            opened.seek(start)
            check(opened.read(8), start)
    return size_bytes


def open_client(work: Work) -> S5Client:
    return S5Client(work)
