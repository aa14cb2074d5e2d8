"""Applies unpacked layers to a root, the lowest first, by renaming.

A directory that the layers below do not have is renamed as a whole, so merging costs next to
nothing for most of an image. Whiteouts come first: they are for the layers below only. Owner, mode
and time of directories come last of all, when nothing changes in them any more.

In an image a path may lead through a symbolic link of a layer below; it is followed within the
root, as the image's own processes would. Elsewhere that is an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastload_common.errors import ArchiveInvalidError, ArchiveUnsafeError
from fastload_common.pull.layer_log import Note, Record, read_log
from fastload_common.pull.policy import Ownership, check_linked, set_xattrs
from fastload_common.pull.safe_tree import IMPLICIT_MODE, Parts, SafeTree, shown

__all__ = ["merge_layers"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40
_HERE = (b"", b".")
_DEFAULT_MODE = 0o755


def merge_layers(
    layers: Sequence[tuple[Path, Path]], root: Path, ownership: Ownership, *, is_image: bool
) -> None:
    """Move the files of all layers into the root.

    Args:
        layers: the directory and the log of each, the lowest first. The directories are used up.
        root: exists and is empty.
        is_image: whether it is an image's root file system.

    Raises:
        ArchiveUnsafeError: a path leads out of the root, or through a link where it may not.
        ArchiveInvalidError: a hard link to nothing.
    """
    os.chmod(root, IMPLICIT_MODE)
    with _Root(root, is_image) as merged:
        for directory, log in layers:
            for record in read_log(log):
                merged.clear(record)
            source = os.open(directory, _DIRECTORY)
            try:
                merged.move(source, merged.root_fd, ())
            finally:
                os.close(source)
            for record in read_log(log):
                if record.note is Note.LATE_LINK:
                    merged.link(record)
            shutil.rmtree(directory)
        for _, log in layers:
            for record in read_log(log):
                if record.note is Note.DIRECTORY:
                    merged.dress(record, ownership)
        for _, log in layers:
            for record in read_log(log):
                if record.note is Note.IMPLICIT:
                    merged.dress_implicit(record.path)
        merged.dress_implicit(())


class _Root:
    """The tree that grows."""

    def __init__(self, root: Path, is_image: bool) -> None:
        self._tree = SafeTree(root)
        self._is_image = is_image

    def __enter__(self) -> _Root:
        return self

    def __exit__(self, *error: object) -> None:
        self._tree.close()

    @property
    def root_fd(self) -> int:
        return self._tree.root_fd

    def clear(self, record: Record) -> None:
        """Remove what a whiteout names; nothing where that is not there."""
        if record.note is Note.WHITEOUT:
            with contextlib.suppress(FileNotFoundError), self._opened(record.path[:-1]) as above:
                _remove(os.fsdecode(record.path[-1]), above)
        elif record.note is Note.OPAQUE:
            with contextlib.suppress(FileNotFoundError), self._opened(record.path) as opened:
                for name in os.listdir(opened):
                    _remove(name, opened)

    def move(self, source: int, target: int, path: Parts) -> None:
        """Move what is in one directory into another one, which is at this path."""
        with os.scandir(source) as scanned:
            entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scanned]
        for name, is_directory in entries:
            there = _mode(name, target)
            if is_directory and there is not None and stat.S_ISDIR(there):
                with _below(source, name) as inner, _below(target, name) as outer:
                    self.move(inner, outer, (*path, os.fsencode(name)))
                continue
            if is_directory and there is not None and stat.S_ISLNK(there):
                with _below(source, name) as inner:
                    if os.fstat(inner).st_mode & 0o7777 == IMPLICIT_MODE:
                        below = (*path, os.fsencode(name))
                        with self._through_link(below) as outer:
                            self.move(inner, outer, below)
                        continue
            if there is not None and (is_directory or stat.S_ISDIR(there)):
                _remove(name, target)
            os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)

    def link(self, record: Record) -> None:
        """Make a hard link whose target came with a layer below."""
        with self._opened(record.path[:-1]) as above:
            try:
                with self._opened(record.target[:-1]) as source:
                    mode = _mode(os.fsdecode(record.target[-1]), source)
                    if mode is None or stat.S_ISDIR(mode):
                        raise FileNotFoundError
                    os.unlink(record.path[-1], dir_fd=above)
                    os.link(
                        record.target[-1],
                        record.path[-1],
                        src_dir_fd=source,
                        dst_dir_fd=above,
                        follow_symlinks=False,
                    )
                    check_linked(record.path, above, is_image=self._is_image)
            except (FileNotFoundError, IndexError):
                raise ArchiveInvalidError(
                    f"{shown(record.path)} is a hard link to {shown(record.target)}, which is no "
                    "file of this layer or of one below",
                    hint="the archive is damaged, or was made to harm",
                ) from None
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                raise ArchiveInvalidError(
                    f"{shown(record.path)} cannot be made: the file system allows no more hard "
                    f"links to {shown(record.target)}",
                    hint="pull to another file system, or have it packed otherwise",
                ) from None

    def dress(self, record: Record, ownership: Ownership) -> None:
        """Give a directory its own owner, mode and time, where it is still one."""
        try:
            descriptor = os.dup(self._tree.directory(record.path))
        except FileNotFoundError:
            return
        except ArchiveUnsafeError:
            with contextlib.suppress(FileNotFoundError), self._opened(record.path) as opened:
                _dress(opened, record, ownership)
            return
        except ArchiveInvalidError:
            return  # a layer above has a file there
        try:
            if self._is_image or record.path:
                _dress(descriptor, record, ownership)
            else:
                # An artifact's files are below a directory of whoever pulls: it is given to nobody
                # else, and stays open to its owner and closed to other writers.
                os.fchmod(descriptor, record.mode & 0o755 | 0o700)
        finally:
            os.close(descriptor)

    def dress_implicit(self, path: Parts) -> None:
        """The usual mode for a directory that never got one."""
        with (
            contextlib.suppress(FileNotFoundError, ArchiveInvalidError),
            self._opened(path) as opened,
        ):
            if os.fstat(opened).st_mode & 0o7777 == IMPLICIT_MODE:
                os.fchmod(opened, _DEFAULT_MODE)

    @contextlib.contextmanager
    def _through_link(self, path: Parts) -> Iterator[int]:
        if not self._is_image:
            raise ArchiveUnsafeError(
                f"a layer has entries below {shown(path)}, which is a symbolic link of another one"
            )
        try:
            with self._opened(path) as opened:
                yield opened
        except FileNotFoundError:
            raise ArchiveInvalidError(
                f"a layer has entries below {shown(path)}, a symbolic link that leads nowhere"
            ) from None

    @contextlib.contextmanager
    def _opened(self, parts: Parts) -> Iterator[int]:
        """A directory, links followed within the root.

        Raises:
            FileNotFoundError: there is no such directory.
            ArchiveUnsafeError: a link leads out, or nowhere in 40 steps.
        """
        opened = [os.dup(self._tree.root_fd)]
        pending = deque(parts)
        links = 0
        try:
            while pending:
                step = pending.popleft()
                if step == b"..":
                    if len(opened) == 1:
                        raise ArchiveUnsafeError(f"the way to {shown(parts)} leads out of the root")
                    os.close(opened.pop())
                    continue
                try:
                    opened.append(os.open(step, _DIRECTORY, dir_fd=opened[-1]))
                except OSError as error:
                    if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                        raise
                    target = self._target(step, opened[-1], parts)
                    links += 1
                    if links > _MOST_LINKS:
                        raise ArchiveUnsafeError(f"the way to {shown(parts)} is a loop") from None
                    while target.startswith(b"/") and len(opened) > 1:
                        os.close(opened.pop())
                    pending.extendleft(s for s in reversed(target.split(b"/")) if s not in _HERE)
            yield opened[-1]
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _target(self, step: bytes, above: int, parts: Parts) -> bytes:
        try:
            target = os.readlink(step, dir_fd=above)
        except OSError:
            raise FileNotFoundError(errno.ENOENT, "no directory", shown(parts)) from None
        if not self._is_image:
            raise ArchiveUnsafeError(f"the way to {shown(parts)} leads through a symbolic link")
        return target


@contextlib.contextmanager
def _below(above: int, name: str) -> Iterator[int]:
    descriptor = os.open(name, _DIRECTORY, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _mode(name: str, above: int) -> int | None:
    """Kind and mode of a name; None where nothing has it."""
    try:
        return os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _remove(name: str, above: int) -> None:
    mode = _mode(name, above)
    if mode is None:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(name, dir_fd=above)
    else:
        os.unlink(name, dir_fd=above)


def _dress(descriptor: int, record: Record, ownership: Ownership) -> None:
    ownership.give(descriptor, record.uid, record.gid)
    # Without these bits a user could not enter, or remove, what this pull has made.
    mode = record.mode if os.geteuid() == 0 else record.mode | 0o700
    os.fchmod(descriptor, mode)
    set_xattrs(descriptor, record.xattrs, record.path)
    os.utime(descriptor, ns=(record.mtime_ns, record.mtime_ns))
