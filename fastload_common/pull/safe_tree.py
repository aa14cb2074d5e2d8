"""A directory in which names from anybody become files, and nothing outside of it is touched.

Every step of a path is opened by itself, below the descriptor of the step before, and never through
a symbolic link: the kernel is never given a path that somebody else wrote. So it holds whatever is
in the tree, and also where another process changes the tree meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from fastload_common.errors import ArchiveInvalidError, ArchiveUnsafeError

__all__ = [
    "EXPLICIT_MODE",
    "IMPLICIT_MODE",
    "LATE_MODE",
    "Parts",
    "SafeTree",
    "shown",
    "split_name",
]

Parts = tuple[bytes, ...]
"""A path below the root, step by step; the root itself has none."""

EXPLICIT_MODE = 0o700
"""Of a directory that an entry stands for, until its own mode is set at the end."""
IMPLICIT_MODE = 0o1701
"""Of a directory that was only made because something is in it; no archive has this."""
LATE_MODE = 0o001
"""Of what stands for a hard link to a file of a layer below; a link to that must wait as well."""

_LONGEST_STEP_BYTES = 255
_LONGEST_NAME_BYTES = 4096
_MOST_STEPS = 128
_KEPT_OPEN = 12
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def split_name(name: bytes, what: str = "an entry") -> Parts:
    """The steps of a name, which must stay below the root.

    Raises:
        ArchiveUnsafeError: it is absolute or climbs.
        ArchiveInvalidError: empty, too long, too deep, or with a NUL.
    """
    if b"\0" in name:
        raise ArchiveInvalidError(f"{what} has a NUL in its name: {shown(name)}", hint=_HARM)
    if name.startswith(b"/"):
        raise ArchiveUnsafeError(f"{what} has an absolute name: {shown(name)}", hint=_HARM)
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise ArchiveUnsafeError(f"{what} leaves the directory: {shown(name)}", hint=_HARM)
    if not name:
        raise ArchiveInvalidError(f"{what} has no name", hint=_HARM)
    if len(name) > _LONGEST_NAME_BYTES or any(len(part) > _LONGEST_STEP_BYTES for part in parts):
        raise ArchiveInvalidError(
            f"{what} has a name that is too long for a file system ({len(name)} bytes): "
            f"{shown(name)}",
            hint=_HARM,
        )
    if len(parts) > _MOST_STEPS:
        raise ArchiveInvalidError(
            f"{what} lies {len(parts)} directories deep; at most {_MOST_STEPS} are allowed: "
            f"{shown(name)}",
            hint=_HARM,
        )
    return parts


_HARM = "the archive is damaged, or was made to harm"


class SafeTree:
    """One root. For one thread.

    Args:
        root: an existing directory, no link.
        on_implicit: told each directory that is made with `IMPLICIT_MODE`.
    """

    def __init__(
        self, root: Path | str, on_implicit: Callable[[Parts], None] = lambda parts: None
    ) -> None:
        self._on_implicit = on_implicit
        self.root_fd = os.open(root, _DIRECTORY)
        self._open: OrderedDict[Parts, int] = OrderedDict()

    def __enter__(self) -> SafeTree:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all descriptors."""
        while self._open:
            os.close(self._open.popitem()[1])
        if self.root_fd >= 0:
            os.close(self.root_fd)
            self.root_fd = -1

    def directory(self, parts: Parts, *, create: bool = False) -> int:
        """A descriptor of a directory, valid until the next call.

        Args:
            create: make what is missing of it, with `IMPLICIT_MODE`.

        Raises:
            FileNotFoundError: there is none, and it is not to be created.
            ArchiveUnsafeError: the way leads through a symbolic link.
            ArchiveInvalidError: the way leads through something else that is no directory.
        """
        if not parts:
            return self.root_fd
        found = self._open.get(parts)
        if found is not None:
            self._open.move_to_end(parts)
            return found
        above = self.directory(parts[:-1], create=create)
        descriptor = self._step(above, parts, create)
        self._open[parts] = descriptor
        while len(self._open) > _KEPT_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def _step(self, above: int, parts: Parts, create: bool) -> int:
        try:
            return os.open(parts[-1], _DIRECTORY, dir_fd=above)
        except FileNotFoundError:
            if not create:
                raise
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise _no_directory(above, parts) from None
        os.mkdir(parts[-1], EXPLICIT_MODE, dir_fd=above)
        descriptor = os.open(parts[-1], _DIRECTORY, dir_fd=above)
        os.fchmod(descriptor, IMPLICIT_MODE)
        self._on_implicit(parts)
        return descriptor

    def make_directory(self, parts: Parts) -> None:
        """A directory that an entry stands for; it may be there already.

        Raises:
            ArchiveInvalidError: something else has its name.
        """
        if not parts:
            return
        above = self.directory(parts[:-1], create=True)
        try:
            os.mkdir(parts[-1], EXPLICIT_MODE, dir_fd=above)
        except FileExistsError:
            if not stat.S_ISDIR(_kind(parts[-1], above)):
                raise _taken(parts, "a directory") from None
            os.fchmod(self.directory(parts), EXPLICIT_MODE)

    def make_file(self, parts: Parts) -> int:
        """A new file's descriptor, which the caller closes.

        Raises:
            ArchiveInvalidError: its name is taken, or is the root's.
        """
        with self._new(parts, "a file") as above:
            return os.open(parts[-1], _NEW_FILE, 0o600, dir_fd=above)

    def make_symlink(self, parts: Parts, target: bytes) -> int:
        """A symbolic link; nothing ever follows it. Gives its directory's descriptor.

        Raises:
            ArchiveInvalidError: its name is taken, or is the root's.
        """
        with self._new(parts, "a symbolic link") as above:
            os.symlink(target, parts[-1], dir_fd=above)
            return above

    def make_link(self, parts: Parts, target: Parts) -> bool:
        """Another name of a file of this tree; False where that is not there, or not yet.

        Raises:
            ArchiveInvalidError: its name is taken, or the target is a directory.
            ArchiveUnsafeError: the way to the target leads through a symbolic link.
        """
        try:
            source = os.dup(self.directory(target[:-1])) if target else -1
        except FileNotFoundError:
            return False
        try:
            kind = _kind(target[-1], source) if target else stat.S_IFDIR
            if stat.S_ISREG(kind) and stat.S_IMODE(kind) == LATE_MODE:
                return False
            if stat.S_ISDIR(kind):
                raise ArchiveInvalidError(
                    f"{shown(parts)} is a hard link to a directory: {shown(target)}", hint=_HARM
                )
            with self._new(parts, "a hard link") as above:
                os.link(
                    target[-1],
                    parts[-1],
                    src_dir_fd=source,
                    dst_dir_fd=above,
                    follow_symlinks=False,
                )
            return True
        except FileNotFoundError:
            return False
        finally:
            if source >= 0:
                os.close(source)

    @contextlib.contextmanager
    def _new(self, parts: Parts, what: str) -> Iterator[int]:
        """The directory of something new; explains why it cannot be made."""
        if not parts:
            raise ArchiveInvalidError(f"the root itself is to be {what}", hint=_HARM)
        above = self.directory(parts[:-1], create=True)
        try:
            yield above
        except FileExistsError:
            if stat.S_ISDIR(_kind(parts[-1], above)):
                raise _taken(parts, what) from None
            raise ArchiveInvalidError(
                f"{shown(parts)} stands twice in the archive", hint=_HARM
            ) from None


def shown(name: bytes | Parts) -> str:
    """A name for messages, cut to a length that fits a line."""
    data = name if isinstance(name, bytes) else b"/".join(name)
    text = data[:120].decode("utf-8", "backslashreplace")
    return repr(text) + ("..." if len(data) > 120 else "")


def _kind(name: bytes, above: int) -> int:
    return os.stat(name, dir_fd=above, follow_symlinks=False).st_mode


def _no_directory(above: int, parts: Parts) -> ArchiveInvalidError | ArchiveUnsafeError:
    if stat.S_ISLNK(_kind(parts[-1], above)):
        return ArchiveUnsafeError(
            f"an entry lies below {shown(parts)}, which is a symbolic link of the same archive",
            hint=_HARM,
        )
    return ArchiveInvalidError(
        f"an entry lies below {shown(parts)}, which is no directory", hint=_HARM
    )


def _taken(parts: Parts, what: str) -> ArchiveInvalidError:
    return ArchiveInvalidError(
        f"{shown(parts)} is to be {what}, and is something else in the same archive", hint=_HARM
    )
