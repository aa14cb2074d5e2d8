"""One layer's archive to one directory of its own, safely whatever the archive holds.

The directory holds the files, and the log beside it what files cannot say. Nothing in it has been
applied to the layers below yet: that is `merge`. Directories are writable by their owner alone
until then.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fastload_common.errors import ArchiveInvalidError, ArchiveUnsafeError
from fastload_common.pull.layer_log import LogWriter, Note, Record
from fastload_common.pull.policy import (
    DIRECTORY_BYTES,
    Ownership,
    Special,
    check_linked,
    check_symlink,
    device_refused,
    disk_bytes,
    make_device,
    mode_of,
    set_xattrs,
    xattrs_of,
)
from fastload_common.pull.safe_tree import LATE_MODE, Parts, SafeTree, shown, split_name
from fastload_common.pull.tar_header import Entry, Kind
from fastload_common.pull.tar_reader import TarReader

__all__ = ["Unpacked", "unpack_layer"]

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_AUFS = b".wh..wh."


@dataclass(slots=True)
class Unpacked:
    """What a layer came to.

    Attributes:
        entries: all of the archive.
        file_bytes: content of its files.
        archive_bytes: of the archive, not compressed.
        on_disk_bytes: see `policy.disk_bytes`, of all entries.
        left_out: devices, pipes and the like that were dropped, or could not be made.
        not_owned: files and directories that this process may not give to their owner.
    """

    entries: int = 0
    file_bytes: int = 0
    archive_bytes: int = 0
    on_disk_bytes: int = 0
    left_out: int = 0
    not_owned: int = 0


def unpack_layer(
    next_piece: Callable[[], bytes],
    directory: Path,
    log: LogWriter,
    allow: Callable[[int, int, int], None],
    allow_content: Callable[[int], None],
    *,
    special: Special,
    is_image: bool,
) -> Unpacked:
    """Unpack an archive.

    Args:
        next_piece: the archive's bytes, not compressed; empty at the end. All of it is read.
        directory: exists and is empty; only this process writes there.
        allow: told, before an entry is made, its bytes, those of the archive so far, and what
            all entries take on the disk; raises where it is too much.
        allow_content: the same for the archive's bytes so far alone, at each piece.
        special: see `policy.Special`.
        is_image: whether it is a layer of an image's root file system.

    Raises:
        ArchiveInvalidError, ArchiveUnsafeError: at the first entry that is not as it must be.
        OSError: the disk is full, or the like.
    """
    reader = TarReader(_bounded(next_piece, allow_content))
    on_disk_bytes = 0

    def implicit(parts: Parts) -> None:
        nonlocal on_disk_bytes
        on_disk_bytes += DIRECTORY_BYTES
        # One header can name more than a hundred of them.
        allow(0, reader.read_bytes, on_disk_bytes)
        log.add(Record(Note.IMPLICIT, parts))

    with SafeTree(directory, implicit) as tree:
        unpacking = _Unpacking(tree, log, special, is_image)
        for entry in reader.entries():
            on_disk_bytes += disk_bytes(entry)
            allow(entry.size_bytes, reader.read_bytes, on_disk_bytes)
            with _named(entry):
                unpacking.make(entry, reader)
        done = unpacking.done
        done.archive_bytes = reader.read_bytes
        done.on_disk_bytes = on_disk_bytes
        done.not_owned = unpacking.ownership.refused
        return done


@contextlib.contextmanager
def _named(entry: Entry) -> Iterator[None]:
    """Name the entry where the file system refuses it for what it is."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EMLINK:
            why = "the file system allows no more hard links to one file, or directories in one"
        elif error.errno == errno.ENAMETOOLONG:
            why = "its name is too long for this file system"
        elif error.errno in (errno.EFBIG, errno.EOVERFLOW):
            why = "it is larger than a file may be here"
        else:
            raise
        raise ArchiveInvalidError(
            f"{entry.shown} cannot be made: {why}",
            hint="pull to another file system, or have it packed otherwise",
        ) from error


def _bounded(next_piece: Callable[[], bytes], allow: Callable[[int], None]) -> Callable[[], bytes]:
    """The same pieces; what stands after the archive's end counts too."""
    total_bytes = 0

    def piece() -> bytes:
        nonlocal total_bytes
        data = next_piece()
        total_bytes += len(data)
        allow(total_bytes)
        return data

    return piece


class _Unpacking:
    """The state of one layer."""

    def __init__(self, tree: SafeTree, log: LogWriter, special: Special, is_image: bool) -> None:
        self._tree = tree
        self._log = log
        self._special = special
        self._is_image = is_image
        self.ownership = Ownership()
        self.done = Unpacked()

    def make(self, entry: Entry, reader: TarReader) -> None:
        self.done.entries += 1
        parts = split_name(entry.name)
        if any(part.startswith(_WHITEOUT) for part in parts[:-1]):
            raise ArchiveUnsafeError(f"{shown(parts)} lies below a whiteout")
        if parts and parts[-1].startswith(_WHITEOUT):
            self._whiteout(parts)
        elif entry.kind is Kind.DIRECTORY:
            self._directory(entry, parts)
        elif entry.kind is Kind.FILE:
            self._file(entry, parts, reader)
        elif entry.kind is Kind.SYMLINK:
            self._symlink(entry, parts)
        elif entry.kind is Kind.LINK:
            self._link(entry, parts)
        else:
            self._device(entry, parts)

    def _directory(self, entry: Entry, parts: Parts) -> None:
        mode = mode_of(entry, parts, self._special)
        xattrs = xattrs_of(entry, parts, self._special)
        self._tree.make_directory(parts)
        self._try_xattrs(xattrs, parts)
        self._log.add(
            Record(Note.DIRECTORY, parts, (), mode, entry.uid, entry.gid, entry.mtime_ns, xattrs)
        )

    def _try_xattrs(self, xattrs: tuple[tuple[bytes, bytes], ...], parts: Parts) -> None:
        """They are set last of all, by `merge`; what cannot be set is better known now.

        Others than those of users may change what this process may do in the directory.
        """
        tried = tuple(one for one in xattrs if one[0].startswith(b"user."))
        if tried:
            descriptor = self._tree.directory(parts)
            set_xattrs(descriptor, tried, parts)
            for name, _ in tried:
                with contextlib.suppress(OSError):
                    os.removexattr(descriptor, name)

    def _file(self, entry: Entry, parts: Parts, reader: TarReader) -> None:
        mode = mode_of(entry, parts, self._special)
        xattrs = xattrs_of(entry, parts, self._special)
        descriptor = self._tree.make_file(parts)
        try:
            for piece in reader.content():
                _write(descriptor, piece)
            self.ownership.give(descriptor, entry.uid, entry.gid)
            os.fchmod(descriptor, mode)  # after the owner: that clears set-id bits
            set_xattrs(descriptor, xattrs, parts)
            os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(descriptor)
        self.done.file_bytes += entry.size_bytes

    def _symlink(self, entry: Entry, parts: Parts) -> None:
        check_symlink(parts, entry.link, is_image=self._is_image)
        above = self._tree.make_symlink(parts, entry.link)
        self.ownership.give(parts[-1], entry.uid, entry.gid, above)
        times = (entry.mtime_ns, entry.mtime_ns)
        os.utime(parts[-1], ns=times, dir_fd=above, follow_symlinks=False)

    def _link(self, entry: Entry, parts: Parts) -> None:
        target = split_name(entry.link, f"the target of the hard link {entry.shown}")
        if target == parts:
            raise ArchiveInvalidError(f"{shown(parts)} is a hard link to itself")
        if not self._tree.make_link(parts, target):
            # Its place is taken until the layers below are known.
            descriptor = self._tree.make_file(parts)
            os.fchmod(descriptor, LATE_MODE)
            os.close(descriptor)
            self._log.add(Record(Note.LATE_LINK, parts, target))
        else:
            check_linked(parts, self._tree.directory(parts[:-1]), is_image=self._is_image)

    def _device(self, entry: Entry, parts: Parts) -> None:
        if device_refused(entry, parts, self._special):
            self.done.left_out += 1
            return
        mode = mode_of(entry, parts, self._special)
        os.close(self._tree.make_file(parts))  # where the name is taken this says so
        above = self._tree.directory(parts[:-1])
        os.unlink(parts[-1], dir_fd=above)
        if not make_device(entry, parts[-1], above):
            self.done.left_out += 1
            return
        self.ownership.give(parts[-1], entry.uid, entry.gid, above)
        os.chmod(parts[-1], mode, dir_fd=above)
        times = (entry.mtime_ns, entry.mtime_ns)
        os.utime(parts[-1], ns=times, dir_fd=above, follow_symlinks=False)

    def _whiteout(self, parts: Parts) -> None:
        if parts[-1] == _OPAQUE:
            self._log.add(Record(Note.OPAQUE, parts[:-1]))
            return
        if parts[-1].startswith(_AUFS):
            self.done.left_out += 1  # a union file system's own notes
            return
        name = parts[-1][len(_WHITEOUT) :]
        if name in (b"", b".", b".."):
            raise ArchiveUnsafeError(f"the whiteout {shown(parts)} would remove a directory above")
        self._log.add(Record(Note.WHITEOUT, (*parts[:-1], name)))


def _write(descriptor: int, piece: memoryview) -> None:
    done_bytes = os.write(descriptor, piece)
    while done_bytes < len(piece):
        done_bytes += os.write(descriptor, piece[done_bytes:])
