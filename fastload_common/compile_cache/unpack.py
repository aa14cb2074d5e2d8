"""From an archive to directories: everything checked and complete before any of it can be seen.

Files are written into a new directory beside the destination, each compared with its digest while
it is written; then the directory is renamed. A destination that holds something already keeps what
is equal; what differs is replaced file by file, each at one blow.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from fastload_common.compile_cache import zstd
from fastload_common.compile_cache.bundle import check_blob
from fastload_common.compile_cache.manifest import FileRecord, Manifest
from fastload_common.compile_cache.stores.directory import is_network_mount
from fastload_common.errors import BundleInvalidError

__all__ = ["unpack"]

_PIECE_BYTES = 1 << 20
_DRAFT = ".fastload-unpacking-"
_YOUNG_S = 60.0


def unpack(manifest: Manifest, blob: BinaryIO, roots: Mapping[str, Path]) -> None:
    """Put a bundle's files into place.

    Args:
        manifest: as `decode_manifest` gave it, so its names and sizes have been checked.
        blob: the archive; seekable.
        roots: name -> destination, created here with its parents; all of the manifest's.

    Raises:
        BundleInvalidError: the archive is damaged; nothing was put into place.
        OSError: no space, a destination that cannot be written.
    """
    check_blob(manifest, blob)
    with contextlib.ExitStack() as stack:
        drafts = {
            root: stack.enter_context(_draft(Path(os.path.realpath(roots[root]))))
            for root in manifest.roots
        }
        source = zstd.reader(blob)
        try:
            for record in manifest.files:
                _write(record, source, drafts[record.root] / record.name)
            if source.read(1):
                raise BundleInvalidError("the archive holds more than its manifest says")
        except zstd.errors() as error:
            raise BundleInvalidError(
                f"the archive cannot be decompressed: {type(error).__name__}", key=manifest.key
            ) from None
        for root, name in manifest.directories:
            (drafts[root] / name).mkdir(parents=True, exist_ok=True)
        for root, draft in drafts.items():
            _place(draft, Path(os.path.realpath(roots[root])))


@contextlib.contextmanager
def _draft(destination: Path) -> Iterator[Path]:
    destination.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system, so that it can be renamed; its parent only this user can enter.
    parent = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=destination.parent))
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not is_network_mount(parent):
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sweep(parent)
        draft = parent / "tree"
        draft.mkdir(mode=0o755)
        yield draft
    finally:
        shutil.rmtree(parent, ignore_errors=True)
        os.close(descriptor)


def _sweep(draft: Path) -> None:
    """Remove what dead processes left beside a new draft."""
    now_s = draft.stat().st_mtime  # by the clock of this file system
    for other in draft.parent.glob(f"{_DRAFT}*"):
        with contextlib.suppress(OSError):
            if abs(now_s - other.lstat().st_mtime) < _YOUNG_S or other.is_symlink():
                continue  # it may not be locked yet
            descriptor = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)
            finally:
                os.close(descriptor)


def _write(record: FileRecord, source: zstd.Reader, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    digest = hashlib.sha256()
    missing_bytes = record.size_bytes
    with open(os.open(path, flags, 0o600), "wb") as stream:
        while missing_bytes:
            piece = source.read(min(_PIECE_BYTES, missing_bytes))
            if not piece:
                raise BundleInvalidError(f"the archive ends within {record.name!r}")
            missing_bytes -= len(piece)
            digest.update(piece)
            stream.write(piece)
        if digest.hexdigest() != record.sha256:
            raise BundleInvalidError(f"{record.name!r} is not what its digest says")
        stream.flush()
        os.fchmod(stream.fileno(), record.mode)
        os.utime(stream.fileno(), ns=(record.mtime_ns, record.mtime_ns))


def _place(draft: Path, destination: Path) -> None:
    """Rename a draft to its destination, or what is in it where that is there already."""
    try:
        os.rename(draft, destination)  # an empty directory is replaced as well
        return
    except (FileExistsError, NotADirectoryError):
        pass
    except OSError:  # ENOTEMPTY, or EBUSY of a mount point: then into it
        if not destination.is_dir():
            raise
    if not stat.S_ISDIR(destination.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "no directory", str(destination))
    for item in sorted(os.scandir(draft), key=lambda item: item.name):
        target = destination / item.name
        if item.is_dir(follow_symlinks=False):
            _place(Path(item.path), target)
        elif not _equal(Path(item.path), target):
            os.replace(item.path, target)


def _equal(one: Path, other: Path) -> bool:
    """Whether the other is a file with the same bytes, so that whoever uses it is left alone."""
    try:
        status = other.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != one.stat().st_size:
            return False
        with open(one, "rb") as first, open(other, "rb") as second:
            while piece := first.read(_PIECE_BYTES):
                if piece != second.read(len(piece)):
                    return False
        return True
    except OSError:
        return False
