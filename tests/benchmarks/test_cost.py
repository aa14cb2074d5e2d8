"""What is charged to a client: its children too, alive or not; shared memory once."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

from benchmarks.cost import cpu_s, descendants, memory_bytes
from fastload_common.units import MIB

# Takes this much CPU, says so, and lives on until its input closes.
CHILD = """
import resource, sys
usage = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
while usage() < 0.3:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def test_the_cpu_of_children_counts_while_they_live_and_afterwards() -> None:
    before_s = cpu_s()
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "done\n"
    assert child.pid in descendants(os.getpid())
    alive_s = cpu_s() - before_s
    child.communicate()
    ended_s = cpu_s() - before_s
    assert alive_s >= 0.3
    assert ended_s >= alive_s
    assert child.pid not in descendants(os.getpid())


def test_memory_of_a_memfd_counts_once_mapped_or_not() -> None:
    size_bytes = 64 * MIB
    before_bytes = memory_bytes(os.getpid())
    fd = os.memfd_create("test")
    os.posix_fallocate(fd, 0, size_bytes)
    unmapped_bytes = memory_bytes(os.getpid()) - before_bytes
    mapped = mmap.mmap(fd, size_bytes)
    mapped.write(b"\1" * size_bytes)
    mapped_bytes = memory_bytes(os.getpid()) - before_bytes
    mapped.close()
    os.close(fd)
    # Python itself may take and give back some while this runs.
    assert abs(unmapped_bytes - size_bytes) < 8 * MIB
    assert abs(mapped_bytes - size_bytes) < 8 * MIB
