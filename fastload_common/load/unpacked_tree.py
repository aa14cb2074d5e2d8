"""A pulled tree on this node: its links stay inside of it, what it holds is counted, it is removed.

Knows directories; nothing of registries.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from fastload_common.errors import ArchiveUnsafeError

__all__ = ["allocated_bytes", "confine_links", "contents_of", "force_to_disk", "remove_tree"]


def confine_links(tree: Path) -> None:
    """Make absolute links relative, since they mean the tree's root, and remove what leads out.

    Whoever then reads in the tree, following links as the kernel does, reads nothing else.

    Raises:
        ArchiveUnsafeError: a link leads out, and cannot be removed.
    """
    root = os.path.realpath(tree)
    links = [entry.path for entry in _walk(root, open_up=True) if entry.is_symlink()]
    for path in links:
        target = os.readlink(path)
        if target.startswith("/"):
            # The walk follows no link, so that this is how deep the link really lies.
            depth = path[len(root) :].count("/") - 1
            inside = "../" * depth + target.lstrip("/")
            with contextlib.suppress(OSError):
                os.unlink(path)
                os.symlink(inside or ".", path)
    for path in links:
        found = os.path.realpath(path)
        if found == root or found.startswith(root + "/"):
            continue
        with contextlib.suppress(OSError):
            os.unlink(path)
        if os.path.lexists(path):
            raise ArchiveUnsafeError(
                f"a link leads out of what was unpacked: {path[len(root) + 1 :]!r}",
                hint="push the artifact again without it",
            )


def contents_of(tree: Path) -> dict[str, int]:
    """How many entries there are, and the bytes of all files: what a half removed tree has not."""
    entries = size_bytes = 0
    for entry in _walk(os.fspath(tree)):
        entries += 1
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            size_bytes += status.st_size
    return {"entries": entries, "tree_bytes": size_bytes}


def allocated_bytes(directory: Path) -> int:
    """What the files in a directory take of its disk; those that vanish meanwhile do not count."""
    found = 0
    for entry in _walk(os.fspath(directory)):
        with contextlib.suppress(OSError):
            if entry.is_file(follow_symlinks=False):
                found += entry.stat(follow_symlinks=False).st_blocks * 512
    return found


def force_to_disk(directory: Path) -> None:
    """Have all that was written to this file system reach the disk.

    Raises:
        OSError: it could not be written.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_one = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if sync_one is None:
            os.sync()
        elif sync_one(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(directory))
    finally:
        os.close(descriptor)


def remove_tree(directory: Path) -> None:
    """Remove a directory with all that is in it, also what this user may not write.

    What cannot be removed stays, and is tried again by whoever looks for garbage next.
    """
    for _ in _walk(os.fspath(directory), open_up=True):
        pass
    shutil.rmtree(directory, ignore_errors=True)


def _walk(top: str, *, open_up: bool = False) -> Iterator[os.DirEntry[str]]:
    """All entries below a directory; follows no link, and leaves out what it may not enter.

    Args:
        open_up: let this user write and enter each directory first.
    """
    pending = [top]
    while pending:
        directory = pending.pop()
        if open_up:
            with contextlib.suppress(OSError):
                os.chmod(directory, stat.S_IMODE(os.lstat(directory).st_mode) | 0o700)
        try:
            with os.scandir(directory) as found:
                entries = list(found)
        except OSError:
            continue
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
