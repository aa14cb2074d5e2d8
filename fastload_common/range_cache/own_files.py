"""Opens files of the cache; what is odd in their place is neither followed nor waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["OddFileError", "open_own", "read_own"]

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_SAID = {
    errno.ELOOP: "is a link",
    errno.EISDIR: "is a directory",
    errno.ENXIO: "is not a regular file",
    errno.EACCES: "is closed to this user",
    errno.EPERM: "is closed to this user",
}


class OddFileError(OSError):
    """This one file is not what an entry's file must be; others are not concerned.

    Args:
        number: of the system's error.
        text: why, after the file's name.
        path: of the file.
    """

    def __init__(self, number: int, text: str, path: Path) -> None:
        super().__init__(number, text, str(path))

    @property
    def reason(self) -> str:
        return f"{self.filename} {self.strerror}"


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user or of root.

    Args:
        flags: besides those that keep the caller safe.

    Returns:
        Its descriptor, the caller's to close.

    Raises:
        OddFileError: something else is there.
        OSError: nothing is, or the disk fails.
    """
    try:
        fd = os.open(path, flags | _FLAGS, 0o644)
    except OSError as error:
        text = _SAID.get(error.errno or 0)
        if text is None:
            raise
        raise OddFileError(error.errno or 0, text, path) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            is_directory = stat.S_ISDIR(status.st_mode)
            raise OddFileError(
                errno.EPERM, _SAID[errno.EISDIR if is_directory else errno.ENXIO], path
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise OddFileError(errno.EPERM, f"belongs to user {status.st_uid}", path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_own(path: Path, most_bytes: int) -> bytes:
    """What is in a small file, at most so many bytes of it.

    Raises:
        OSError: see `open_own`.
    """
    fd = open_own(path, os.O_RDONLY)
    try:
        return os.pread(fd, most_bytes, 0)
    finally:
        os.close(fd)
