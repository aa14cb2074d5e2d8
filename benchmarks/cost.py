"""What a process and its descendants cost: CPU seconds and memory, read from the kernel."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cpu_s", "descendants", "memory_bytes", "process_cpu_s"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# clock_getcpuclockid(3): the clock of another process's CPU time, in ns, ended threads included.
_PROCESS_CLOCK = 2


def descendants(pid: int) -> list[int]:
    """Children, their children and so on that are alive now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(children.get(pid, ()))
    for one in found:
        found += children.get(one, ())
    return found


def cpu_s() -> float:
    """User and system seconds of this process and of all its descendants, alive or waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return own_s + sum(process_cpu_s(pid) for pid in descendants(os.getpid()))


def memory_bytes(pid: int) -> int:
    """Memory of a process and its descendants, what they share counted once.

    The proportional set sizes, except that memfds count with all pages that they hold, also
    where nobody has mapped them.
    """
    private = shared = 0
    files: dict[tuple[int, int], int] = {}
    for one in [pid, *descendants(pid)]:
        sizes = _proportional_sizes(one)
        shared += sizes.get("Pss_Shmem", 0)
        private += sizes.get("Pss", 0) - sizes.get("Pss_Shmem", 0)
        files.update(_memfds(one))
    return private + max(shared, sum(files.values()))


def process_cpu_s(pid: int) -> float:
    """User and system seconds of a process, and of its children that it has waited for."""
    try:
        alive_s = time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)
    except OSError:
        return 0.0  # it has just ended; its parent has waited for it
    fields = _stat(pid)
    waited_for = sum(int(text) for text in fields[13:15]) if fields else 0
    return alive_s + waited_for / _TICKS_PER_S


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; empty if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _proportional_sizes(pid: int) -> dict[str, int]:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return {}
    rows = (line.split() for line in text.splitlines() if line.startswith("Pss"))
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}


def _memfds(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith("/memfd:"):
                    found = os.stat(entry.path)
                    yield (found.st_dev, found.st_ino), found.st_blocks * 512
