"""How much host memory one process may use for staging. Reads the kernel's files, nothing else.

The limit that counts is the container's, not the machine's: the smallest of the cgroup's own
and its ancestors' limits (v1 and v2, ``memory.high`` too), and what is available now.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastload_common.units import KIB, even_share, format_size

__all__ = [
    "MemoryBudget",
    "MemoryLimit",
    "ReadText",
    "read_kernel_file",
    "smallest_limit",
    "staging_budget",
]

_log = logging.getLogger(__name__)

ReadText = Callable[[str], str | None]

# The rest belongs to the model (on a CPU), the engine and its other processes.
_SHARE = 4
# An explicit budget above this part of the limit is taken, with a warning.
_WARN_SHARE = 2
# v1 tells of ancestors that this container cannot see in a line of memory.stat.
_FILES = {1: ("memory.limit_in_bytes", "memory.stat"), 2: ("memory.max", "memory.high")}
# cgroup v1 says "no limit" with the largest multiple of a page in 63 bits.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Staging memory for one process: ``bytes``, and why it is that much (for the log)."""

    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit in bytes and the file that states it."""

    bytes: int
    origin: str


def read_kernel_file(path: str) -> str | None:
    """The text of a file under /proc or /sys; None where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return None


def staging_budget(
    memory_bytes: int | None,
    *,
    wanted_bytes: int,
    local_rank: int = 0,
    local_world_size: int = 1,
    read_text: ReadText = read_kernel_file,
) -> MemoryBudget:
    """The memory of one rank for staging.

    Its share of ``memory_bytes`` where that is set. Else the smaller of ``wanted_bytes`` and a
    quarter of the smallest memory limit divided by the ranks of this node.

    Args:
        memory_bytes: the node's budget, or None.
        wanted_bytes: what this rank can make use of.
        local_world_size: ranks on this node, which share the budget; at least 1.
        read_text: reads a kernel file (tests give a made-up tree).
    """
    limit = smallest_limit(read_text)
    if memory_bytes is not None:
        _warn_if_too_large(memory_bytes, limit)
        own_bytes = even_share(memory_bytes, local_rank, local_world_size)
        reason = f"memory_bytes = {format_size(memory_bytes)}"
        return MemoryBudget(own_bytes, f"{reason} / {local_world_size} local ranks")
    if limit is None:
        return MemoryBudget(wanted_bytes, "what the requests need (no memory limit found)")
    share_bytes = limit.bytes // _SHARE // local_world_size
    if wanted_bytes <= share_bytes:
        return MemoryBudget(wanted_bytes, "what the requests need")
    return MemoryBudget(
        share_bytes,
        f"a quarter of {format_size(limit.bytes)} ({limit.origin}) / {local_world_size} local "
        "ranks",
    )


def smallest_limit(read_text: ReadText = read_kernel_file) -> MemoryLimit | None:
    """The smallest memory limit on this process, or the memory available now if that is less."""
    limits = [
        MemoryLimit(size_bytes, path)
        for path in _limit_files(read_text)
        if (size_bytes := _parse_limit(read_text(path))) is not None
    ]
    available_bytes = _available_bytes(read_text("/proc/meminfo"))
    if available_bytes is not None:
        limits.append(MemoryLimit(available_bytes, "MemAvailable of /proc/meminfo"))
    return min(limits, key=lambda limit: limit.bytes, default=None)


def _warn_if_too_large(memory_bytes: int, limit: MemoryLimit | None) -> None:
    if limit is None or memory_bytes <= limit.bytes // _WARN_SHARE:
        return
    _log.warning(
        "FASTLOAD_MEMORY_BYTES: %s of staging memory, but the memory limit is %s (%s); the kernel "
        "may kill this container while it loads",
        format_size(memory_bytes),
        format_size(limit.bytes),
        limit.origin,
    )


def _limit_files(read_text: ReadText) -> Iterator[str]:
    """The limit files of this process's cgroups and all their visible ancestors."""
    paths = dict(_cgroup_paths(read_text("/proc/self/cgroup") or ""))
    for version, root, mount_point in _cgroup_mounts(read_text("/proc/self/mountinfo") or ""):
        if version not in paths:
            continue
        names = _FILES[version]
        relative = _below(paths[version], root)
        while True:
            for name in names:
                yield posixpath.join(mount_point, relative, name)
            if not relative:
                break
            relative = posixpath.dirname(relative)


def _cgroup_paths(text: str) -> Iterator[tuple[int, str]]:
    """Version and path of the cgroups that account for this process's memory."""
    for line in text.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and controllers == "":
            yield 2, path
        elif "memory" in controllers.split(","):
            yield 1, path


def _cgroup_mounts(text: str) -> Iterator[tuple[int, str, str]]:
    """Version, root inside the hierarchy, and mount point of each cgroup file system."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield 2, fields[3], fields[4]
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield 1, fields[3], fields[4]


def _below(path: str, root: str) -> str:
    """The cgroup's path relative to what is mounted; "" where only that itself is visible."""
    relative = posixpath.relpath(path, root) if path.startswith("/") else ""
    return "" if relative == "." or relative.startswith("..") or "/.." in path else relative


def _parse_limit(text: str | None) -> int | None:
    for line in (text or "").splitlines():
        if line.startswith("hierarchical_memory_limit "):
            text = line.split()[1]
    if text is None or not text.strip().isdigit():
        return None  # absent, or "max"
    size_bytes = int(text)
    return size_bytes if size_bytes < _UNLIMITED_BYTES else None


def _available_bytes(meminfo: str | None) -> int | None:
    for line in (meminfo or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and value.split():
            return int(value.split()[0]) * KIB
    return None
