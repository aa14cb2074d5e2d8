"""Where a pull works until all is verified: a directory beside the destination, this user's alone.

Its name follows from the destination's, so that a pull that was ended is found and resumed. One
pull at a time works in it. At the end the finished tree is renamed to the destination.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from fastload_common.errors import ConfigError, PullError
from fastload_common.pull.policy import Special
from fastload_common.pull.records import Item, LayerItem
from fastload_common.units import format_size

__all__ = ["UNKNOWN_BOOT", "FinishedTree", "Stage", "UnpackedLayer", "boot_id"]

_NAME = ".fastload-pull-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
UNKNOWN_BOOT = "unknown"
_VERSION = 3


class Stage:
    """The directory, while it is locked.

    Args:
        destination: where the tree is to appear; its parent exists.

    Raises:
        ConfigError: there is something at the destination, or it cannot be a destination.
        PullError: another pull works on it, or somebody else can write into the stage.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = _checked(destination)
        digest = hashlib.sha256(os.fsencode(self.destination.name)).hexdigest()[:12]
        self.path = self.destination.parent / f"{_NAME}{digest}"
        self._lock = self._locked()
        self.blobs = self._made("blobs")
        self.layers = self._made("layers")
        self.tree = self.path / "tree"

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    def keep_only(self, keys: Iterable[str], layers: Iterable[UnpackedLayer]) -> None:
        """Remove what a former pull left and this one does not want."""
        wanted = {name for key in keys for name in (key, f"{key}.parts")}
        for entry in os.scandir(self.blobs):
            if entry.name not in wanted:
                os.unlink(entry.path)
        wanted = {path.name for layer in layers for path in layer.paths}
        for entry in os.scandir(self.layers):
            if entry.name not in wanted:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)

    def check_sizes(self, items: Iterable[Item]) -> None:
        """What no disk of this size ever holds is a mistake of the manifest, or a lie.

        Raises:
            PullError: one of the items.
        """
        status = os.statvfs(self.path)
        disk_bytes = status.f_blocks * status.f_frsize
        for item in items:
            size_bytes = item.object_id.size_bytes
            if size_bytes > disk_bytes:
                raise PullError(
                    f"{item.object_id.uri} is said to have {format_size(size_bytes)}, and the disk "
                    f"of {self.destination} has {format_size(disk_bytes)} in all",
                    hint="look at its manifest, or name a directory on another disk",
                )

    def check_free(self) -> None:
        """Look at the destination once more, before the layers are used up.

        Raises:
            PullError: somebody has put something there meanwhile.
        """
        try:
            _checked(self.destination)
        except ConfigError as error:
            raise PullError(
                f"everything was pulled and verified, but {error.what}",
                hint="pull again when it is free: nothing is fetched twice",
            ) from None

    def commit(self) -> None:
        """Rename the tree to the destination, and remove the stage.

        Raises:
            PullError: somebody has put something there meanwhile.
        """
        try:
            os.rename(self.tree, self.destination)
        except OSError as error:
            raise PullError(
                f"everything was pulled and verified, but {self.destination} could not be made: "
                f"{error.strerror}",
                hint="pull again when it is free: nothing is fetched twice",
            ) from error
        _sync(self.destination.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the stage with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_if_empty(self) -> None:
        """Remove the stage where nothing has come yet."""
        if not os.listdir(self.blobs) and not os.listdir(self.layers):
            self.remove()

    def _locked(self) -> int:
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        status = self.path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PullError(f"{self.path} is not a directory of this user", hint="remove it")
        if status.st_mode & 0o077:
            raise PullError(f"other users may enter {self.path}", hint="remove it")
        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise PullError(
                f"another pull to {self.destination} is at work",
                hint="wait for it, or name another directory",
            ) from None
        # Where the other pull ended just now, another one may have made a directory since.
        if not self.path.exists() or not os.path.samestat(os.fstat(lock), self.path.lstat()):
            os.close(lock)
            return self._locked()
        return lock

    def _made(self, name: str) -> Path:
        path = self.path / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path


class UnpackedLayer:
    """A layer's directory, its log, and what says that both are complete.

    Args:
        special: what the layer is unpacked with; a layer unpacked otherwise is another one.
    """

    def __init__(self, stage: Stage, item: LayerItem, special: Special, is_image: bool) -> None:
        identity = f"{_VERSION} {item.key} {item.diff_id} {special} {is_image}"
        digest = hashlib.sha256(identity.encode()).hexdigest()[:24]
        base = stage.layers / f"{item.number:04d}-{digest}"
        self.directory = base
        self.log = base.with_name(base.name + ".log")
        self._done = base.with_name(base.name + ".done")

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.directory, self.log, self._done

    def begin(self) -> None:
        """Make the directory anew."""
        self.discard()
        self.directory.mkdir(mode=0o700)

    def discard(self) -> None:
        """Remove what is there."""
        for path in (self._done, self.log):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        if self.directory.exists():
            shutil.rmtree(self.directory)

    def finish(self, facts: dict[str, int]) -> None:
        """Say that it is complete and verified."""
        _write_facts(self._done, {"boot": boot_id(), "state": self._state(), "facts": facts})

    def facts(self) -> dict[str, int] | None:
        """What `finish` was given; None where it is not complete, or is not as it was left.

        A file that anybody wrote to has another change time, which nobody can set. After a start of
        the machine nothing is believed: what was not written to the disk yet was lost.
        """
        try:
            found = json.loads(self._done.read_text(encoding="ascii"))
            if found["boot"] != boot_id() or found["state"] != self._state():
                return None
            return {str(name): int(value) for name, value in found["facts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _state(self) -> str:
        return _state(self.log, self.directory)


class FinishedTree:
    """The merged tree of a pull of which only the last rename failed.

    Args:
        identity: of all that the tree depends on.
    """

    def __init__(self, stage: Stage, identity: str) -> None:
        self._tree = stage.tree
        self._done = stage.path / "tree.done"
        self._identity = hashlib.sha256(f"{_VERSION} {identity}".encode()).hexdigest()

    def keep(self, facts: dict[str, Any]) -> None:
        """Say that it is complete, for the next pull."""
        state = {"boot": boot_id(), "identity": self._identity, "state": _state(self._tree)}
        _write_facts(self._done, {**state, "facts": facts})

    def facts(self) -> dict[str, Any] | None:
        """What `keep` was given; None where the tree is not complete, or another: it is removed."""
        try:
            found = json.loads(self._done.read_text(encoding="ascii"))
            wanted = {"boot": boot_id(), "identity": self._identity, "state": _state(self._tree)}
            if all(found[name] == value for name, value in wanted.items()):
                return dict(found["facts"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        with contextlib.suppress(FileNotFoundError):
            self._done.unlink()
        if self._tree.exists():
            shutil.rmtree(self._tree)
        return None


def _write_facts(path: Path, facts: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(facts), encoding="ascii")
    os.replace(temporary, path)


def _state(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        for name, status in _walk(os.fsencode(path)):
            numbers = (
                status.st_ino,
                status.st_mode,
                status.st_uid,
                status.st_size,
                status.st_mtime_ns,
                status.st_ctime_ns,
            )
            digest.update(name + repr(numbers).encode())
    return digest.hexdigest()


def _walk(top: bytes) -> Iterable[tuple[bytes, os.stat_result]]:
    pending = [top]
    while pending:
        path = pending.pop()
        status = os.lstat(path)
        yield path[len(top) :], status
        if stat.S_ISDIR(status.st_mode):
            pending += (os.path.join(path, name) for name in sorted(os.listdir(path)))


def boot_id() -> str:
    """Which start of the machine this is, or `UNKNOWN_BOOT`."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return UNKNOWN_BOOT


def _checked(destination: Path) -> Path:
    """The destination, absolute, with its parent's links followed.

    Raises:
        ConfigError: it cannot be one.
    """
    path = Path(os.path.abspath(destination))
    if path == Path(path.anchor):
        raise ConfigError("refusing the root of the file system as a destination")
    try:
        path = path.parent.resolve(strict=True) / path.name
    except (OSError, RuntimeError):
        raise ConfigError(f"{path.parent} is no directory", hint="make it first") from None
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ConfigError(f"{path} is there already", hint="name a directory that is not there")
    if path.is_mount():
        raise ConfigError(
            f"{path} is a mount point, where nothing can appear at once",
            hint=f"name a directory in it, such as {path / 'model'}",
        )
    if path.is_dir() and os.listdir(path):
        raise ConfigError(
            f"{path} is not empty", hint="remove it first, or name a directory that is not there"
        )
    return path


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
