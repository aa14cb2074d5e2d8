"""A directory that one start has for itself, and in which it finds only what was whole before.

Engines write into their caches as they compile, some of them not at one blow. So no two living
starts share a directory: the second one with the same key gets one beside it. What a start has
finished it seals; whatever is not as it was sealed, half a file of a killed process above all, the
next one removes before anybody looks there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from fastload_common.load.cache_root import private_directory

__all__ = ["Place", "Seen", "see", "take_place"]

Seen = dict[str, tuple[int, int]]
"""Path without links -> bytes and time of change (ns) of a file."""

_MOST = 64
"""Starts with the same key at once, below one cache directory."""
_KEPT = 4
"""Directories of other starts that stay: engines that are started in turn find theirs again."""
_ATTEMPTS = 8
_NAME = re.compile(r"[0-9a-f]{32}(-[1-9][0-9]?)?")
_SEAL = ".whole"
_GONE = ".gone-"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Place:
    """A directory, held until this process, and what it has forked, has ended.

    Attributes:
        path: this user's alone.
        is_finished: its start has compiled; another one of this process may have it.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.is_finished = False
        self._descriptor = descriptor
        self._pid = os.getpid()

    @property
    def is_mine(self) -> bool:
        """Whether this process took it, and not one that has forked this one."""
        return self._pid == os.getpid()

    def seal(self, seen: Seen) -> None:
        """Let the next start find these files again, as long as they stay as they were seen.

        Raises:
            OSError: it cannot be written; the next start finds nothing here then.
        """
        below = f"{os.path.realpath(self.path)}{os.sep}"
        files = {name[len(below) :]: row for name, row in seen.items() if name.startswith(below)}
        text = json.dumps({"boot": _boot(), "files": files})
        descriptor, draft = tempfile.mkstemp(prefix=f"{_SEAL}-", dir=self.path)
        try:
            with open(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(draft, self.path / _SEAL)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise

    def finish(self) -> None:
        """Let another start of this process have it: its own has compiled and published."""
        self.is_finished = True

    def close(self) -> None:
        """Let others have the directory; once."""
        if _held.get(self.path) is self:
            del _held[self.path]
        os.close(self._descriptor)


_held: dict[Path, Place] = {}
"""Of this process: engines that it runs in turn share one."""


def take_place(parent: Path, name: str) -> Place:
    """Find or make a directory that no living start has.

    Args:
        parent: made if it is not there; this user's alone.
        name: 32 hexadecimal digits. Another start's directory of that name is left to it.

    Raises:
        OSError: it cannot be made, locked or cleared.
    """
    private_directory(parent)
    for number in range(_MOST):
        path = parent / (f"{name}-{number}" if number else name)
        held = _held.get(path)
        if held is not None and held.is_mine and held.is_finished:
            held.is_finished = False
            return held
        descriptor = _lock(path, create=True)
        if descriptor is None:
            continue
        try:
            _clear(path)
            os.utime(path)
            with contextlib.suppress(OSError):
                _tidy(path)
        except BaseException:
            os.close(descriptor)
            raise
        _held[path] = Place(path, descriptor)
        return _held[path]
    raise OSError(errno.EBUSY, "as many starts as may be have it", str(parent / name))


def see(directories: Iterable[Path]) -> Seen:
    """All files below some directories, as they are now."""
    found: Seen = {}
    for directory in directories:
        for where, _, files in os.walk(os.path.realpath(directory)):
            for name in files:
                path = f"{where}{os.sep}{name}"
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    if stat.S_ISREG(status.st_mode):
                        found[path] = (status.st_size, status.st_mtime_ns)
    return found


def _lock(path: Path, *, create: bool) -> int | None:
    """Hold a directory; None if another process has it, or nobody can find it any more."""
    for _ in range(_ATTEMPTS):
        if create:
            path.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # somebody has just tidied up
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here, there = os.fstat(descriptor), os.stat(path, follow_symlinks=False)
            if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


def _clear(path: Path) -> None:
    """Remove all files but those that are as they were sealed."""
    known = _sealed(path)
    # From here on the directory counts as unfinished.
    with contextlib.suppress(FileNotFoundError):
        (path / _SEAL).unlink()
    for item in list(os.scandir(path)):
        if item.is_dir(follow_symlinks=False):
            if not known:
                shutil.rmtree(item.path)
        else:
            os.unlink(item.path)
    for where, directories, files in os.walk(path):
        for name in (*files, *directories):
            item_path = Path(where, name)
            status = item_path.lstat()
            if stat.S_ISDIR(status.st_mode):
                continue
            found = (status.st_size, status.st_mtime_ns)
            if known.get(item_path.relative_to(path).as_posix()) != found:
                item_path.unlink()


def _sealed(path: Path) -> Seen:
    try:
        found = json.loads((path / _SEAL).read_text(encoding="utf-8"))
        # What was not on the disk yet when the power failed has the right size all the same.
        if found["boot"] != _boot():
            return {}
        return {name: (int(size), int(time)) for name, (size, time) in found["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _tidy(path: Path) -> None:
    """Remove directories that nobody has used for longest, and what others were removing."""
    for grave in path.parent.glob(f"{_GONE}*"):
        shutil.rmtree(grave, ignore_errors=True)
    others = [other for other in _siblings(path) if other[1] != path]
    for _, other in sorted(others, reverse=True)[_KEPT:]:
        with contextlib.suppress(OSError):
            descriptor = _lock(other, create=False)
            if descriptor is None:
                continue
            try:
                grave = Path(tempfile.mkdtemp(prefix=_GONE, dir=path.parent))
                os.rename(other, grave / other.name)
                shutil.rmtree(grave, ignore_errors=True)
            finally:
                os.close(descriptor)


def _siblings(path: Path) -> Iterator[tuple[float, Path]]:
    for other in path.parent.iterdir():
        if _NAME.fullmatch(other.name):
            with contextlib.suppress(OSError):
                status = other.lstat()
                if stat.S_ISDIR(status.st_mode):
                    yield status.st_mtime, other
