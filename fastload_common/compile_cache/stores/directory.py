"""Facts about a directory that decide whether code may be taken from it, and how it is locked."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from fastload_common.errors import StoreUnsafeError

__all__ = ["check_writers", "fsync_directory", "is_network_mount", "try_lock", "unsafe_reason"]

_NETWORK = (
    "nfs ceph lustre gpfs cifs smb3 9p afs beegfs glusterfs wekafs fuse.s3fs fuse.mountpoint-s3 "
    "fuse.gcsfuse fuse.blobfuse fuse.juicefs fuse.sshfs fuse.glusterfs fuse.ceph virtiofs"
)
_NETWORK_NAMES = frozenset(_NETWORK.split())


def unsafe_reason(directory: Path) -> str | None:
    """Why others could put code into a directory; None if only this user and root can.

    The group of a directory above is trusted: root:staff may write into Debian's /var/local, and
    where each user has a group of his own, his directories are often 0775.

    Raises:
        OSError: it cannot be looked at.
    """
    path = Path(os.path.realpath(directory))
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):#o})"
    for parent in path.parents:
        status = parent.stat()
        # Whoever can rename what is in a parent can put another directory in its place.
        if status.st_uid not in (os.geteuid(), 0) and _is_mapped(status.st_uid):
            return f"{parent}, above it, belongs to user {status.st_uid}"
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"{parent} can be written by others, so {path} can be replaced"
    return None


def check_writers(*descriptors: int, anybody: bool) -> None:
    """Refuse an entry's directory or manifest that others can change, unless anybody may.

    They may be older than the mode of what is above. Its manifest has the archive's digest.

    Raises:
        StoreUnsafeError: they can.
    """
    for status in () if anybody else map(os.fstat, descriptors):
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            raise StoreUnsafeError(
                "an entry belongs to another user, or others can write it",
                hint="remove it, or sign entries",
            )


def is_network_mount(directory: Path) -> bool:
    """Whether it lies on a file system of another machine, where locks and renames are not as here.

    What cannot be told counts as local.
    """
    path = os.path.realpath(directory)
    best, kind = -1, ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
            lines = stream.readlines()
    except OSError:
        return False
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        mount = fields[4].replace("\\040", " ")
        if _is_below(path, mount) and len(mount) >= best:
            best, kind = len(mount), after.split(" ")[0]
    return kind in _NETWORK_NAMES or kind.startswith("nfs")


def fsync_directory(directory: Path) -> None:
    """Make names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """True: ours. False: somebody else's. None: this file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def _is_mapped(uid: int) -> bool:
    """Whether it is a user of here: in a user namespace all others, root too, look the same."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as stream:
            rows = [[int(field) for field in line.split()] for line in stream]
    except OSError:
        return True
    return any(first <= uid < first + count for first, _, count in rows)


def _is_below(path: str, mount: str) -> bool:
    return path == mount or path.startswith(mount if mount.endswith("/") else f"{mount}/")
