"""A directory of this node: whole entries or none, readers without locks, bounded, crash-safe.

Layout below the directory::

    v1/entries/<key>/manifest, blob     an entry; appears and goes by one rename
    v1/drafts/<random>/                 not published yet, or on its way out
    v1/locks/<key>                      held by the one that is writing that key
    v1/quarantine/<key>-<random>/       was damaged; the last few are kept to be looked at

A writer that dies leaves a draft, which a later one removes. Where locks do not work (NFS) none is
taken: two writers then make the same entry, the second one's rename fails, and it gives its own up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from fastload_common.clock import Clock, SystemClock
from fastload_common.compile_cache.bundle import check_blob
from fastload_common.compile_cache.key import is_key
from fastload_common.compile_cache.manifest import LIMITS, Limits, Manifest, decode_manifest
from fastload_common.compile_cache.stores.base import Entry, Package, Published, Sighting, look_at
from fastload_common.compile_cache.stores.directory import (
    check_writers,
    fsync_directory,
    is_network_mount,
    try_lock,
    unsafe_reason,
)
from fastload_common.compile_cache.stores.drafts import Drafts
from fastload_common.compile_cache.trust import Keys
from fastload_common.errors import BundleInvalidError, StoreUnsafeError
from fastload_common.units import format_size

__all__ = ["NodeStore"]

_MANIFEST, _BLOB = "manifest", "blob"
_KEPT_IN_QUARANTINE = 4
_PIECE_BYTES = 1 << 20


class NodeStore:
    """Entries in a directory.

    Args:
        directory: need not be there yet; created by the first `put`.
        max_bytes: bound of all entries together.
        keys: only entries signed with them are given out.
        forced: take a directory that others can write.
        clock: for the age of drafts.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        keys: Keys | None = None,
        limits: Limits = LIMITS,
        forced: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.directory = directory
        self._max_bytes = max_bytes
        self._keys = keys
        self._limits = limits
        self._forced = forced
        base = directory / "v1"
        self._base, self._entries = base, base / "entries"
        self._locks, self._quarantine = base / "locks", base / "quarantine"
        self._drafts = Drafts(base / "drafts", clock or SystemClock(), self._locks_work)
        self._ours = (base, self._entries, self._drafts.directory, self._locks, self._quarantine)
        self._may_lock: bool | None = None

    @property
    def name(self) -> str:
        return str(self.directory)

    def get(self, key: str) -> Entry | None:
        self._check_trust()
        found = self._open(key)
        if found is None:
            return None
        envelope, blob = found
        try:
            manifest = decode_manifest(envelope, keys=self._keys, key=key, limits=self._limits)
        except BaseException:
            blob.close()
            raise
        self._mark_used(key)
        return Entry(manifest, envelope, blob, self.name)

    def put(self, package: Package, *, replace: bool = False) -> Published:
        manifest = package.manifest
        size_bytes = manifest.blob_bytes + len(package.envelope)
        if size_bytes > self._max_bytes:
            return Published(
                False,
                f"it has {format_size(size_bytes)}, more than FASTLOAD_COMPILE_CACHE_MAX_BYTES "
                f"({format_size(self._max_bytes)})",
            )
        self._prepare()
        with self._lock(manifest.key) as is_ours:
            if not is_ours:
                return Published(False, "another process is publishing it")
            entry = self._entries / manifest.key
            if entry.exists():
                if not replace:
                    return Published(False, "it is there already")
                self.reject(manifest.key)
            self._drafts.sweep()
            self._evict(self._max_bytes - size_bytes)
            with self._drafts.new() as draft:
                _write_durably(draft / _BLOB, package.blob, manifest.blob_bytes)
                with open(draft / _MANIFEST, "xb") as stream:
                    stream.write(package.envelope)
                    _settle(stream)
                fsync_directory(draft)
                try:
                    os.rename(draft, entry)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
                    return Published(False, "another process was faster")
                fsync_directory(self._entries)
        return Published(True)

    def keys(self) -> list[str]:
        self._check_trust()
        try:
            return sorted(filter(is_key, os.listdir(self._entries)))
        except FileNotFoundError:
            return []

    def manifest(self, key: str) -> Manifest | None:
        return next((seen.manifest for seen in self.look([key]) if not seen.fault), None)

    def look(self, keys: list[str] | None = None) -> Iterator[Sighting]:
        for key in self.keys() if keys is None else keys:
            with contextlib.suppress(OSError):
                read = partial(self._envelope, key)
                seen = look_at(key, read, self._keys, self._limits)
                if seen is not None:
                    yield seen

    def manifests(self, most: int | None = None) -> Iterator[Manifest]:
        for seen in self.look(self.keys()[:most]):
            if seen.manifest is not None and not seen.fault:
                yield seen.manifest

    def facts(self, key: str) -> tuple[int, float]:
        """Bytes on disk and seconds (UTC) of the last use of an entry."""
        entry = self._entries / key
        return _size_bytes(entry), entry.stat().st_mtime

    def verify(self, key: str) -> None:
        """Read an entry whole.

        Raises:
            BundleInvalidError, BundleUntrustedError: it is damaged, or not to be used.
        """
        entry = self.get(key)
        if entry is None:
            raise BundleInvalidError("there is no such entry", key=key, store=self.name)
        with entry:
            check_blob(entry.manifest, entry.blob)

    def reject(self, key: str) -> bool:
        """Take a damaged entry out of the way; False where that is not allowed here."""
        try:
            self._refuse_others()
            self._quarantine.mkdir(exist_ok=True)
            self._refuse_others()
            aside = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self._quarantine))
            try:
                os.rename(self._entries / key, aside)  # which is empty, and replaced
            except BaseException:
                aside.rmdir()
                raise
            kept = sorted(self._quarantine.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        except FileNotFoundError:
            return True  # somebody else has
        except (OSError, StoreUnsafeError):
            return False
        for old in kept[:-_KEPT_IN_QUARANTINE]:
            shutil.rmtree(old, ignore_errors=True)
        return True

    def collect(self, max_bytes: int | None = None) -> tuple[int, int]:
        """Remove what dead writers left and the least recently used entries above the bound.

        Returns:
            Entries removed, and bytes that are left.
        """
        self._check_trust()
        self._refuse_others()
        self._drafts.sweep()
        return self._evict(self._max_bytes if max_bytes is None else max_bytes)

    # Reading

    def _open(self, key: str) -> tuple[bytes, BinaryIO] | None:
        """Manifest and open archive of one entry, never of two that stood there in turn."""
        try:
            directory = os.open(
                self._entries / key, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
            )
        except FileNotFoundError:
            return None
        try:
            with _open_at(_MANIFEST, directory) as stream:
                check_writers(directory, stream.fileno(), anybody=self._forced or bool(self._keys))
                envelope = stream.read(self._limits.manifest_bytes + 1)
            return envelope, _open_at(_BLOB, directory)
        except FileNotFoundError:
            if not (self._entries / key).exists():
                return None  # on its way out, just now
            raise BundleInvalidError("a file of the entry is gone", key=key) from None
        finally:
            os.close(directory)

    def _envelope(self, key: str) -> bytes | None:
        found = self._open(key)
        if found is None:
            return None
        found[1].close()
        return found[0]

    def _mark_used(self, key: str) -> None:
        # Another user's entry, or a read-only directory: then its age counts from elsewhere.
        with contextlib.suppress(OSError):
            os.utime(self._entries / key, follow_symlinks=False)

    def _check_trust(self) -> None:
        if self._forced or self._keys is not None:
            return
        for directory in (self.directory, self._base, self._entries):
            try:
                reason = unsafe_reason(directory)
            except FileNotFoundError:
                return
            if reason is not None:
                raise StoreUnsafeError(
                    f"the compile cache is not used: {reason}, and could put code into it",
                    hint="chmod go-w; or sign entries (FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE); "
                    "or FASTLOAD_COMPILE_CACHE_FORCE=true",
                )

    # Writing

    def _prepare(self) -> None:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        _make(self.directory, 0o755)
        self._check_trust()
        self._refuse_others()
        # Whom the operator lets write into the directory may write here as well.
        mode = (stat.S_IMODE(self.directory.stat().st_mode) & 0o1777) | 0o755
        for path in self._ours:
            # Among users who share it, whoever makes a part first must be no stranger.
            if path != self._quarantine or mode & 0o022:
                _make(path, mode)
        self._refuse_others()  # somebody may have been faster

    def _refuse_others(self) -> None:
        """Refuse to write where another user may put a link, now or between two of our steps.

        He would have us remove what is old in a directory of his choice.
        """
        for path in self._ours:
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISLNK(status.st_mode):
                raise StoreUnsafeError(f"nothing is written here: a link stands in {self._base}")
            trusted = (os.geteuid(), 0, self.directory.stat().st_uid)
            if not self._forced and status.st_uid not in trusted:
                raise StoreUnsafeError(
                    f"nothing is written here: {path} belongs to user {status.st_uid}",
                    hint="let root, or the owner of the directory above v1, make v1 and all in it",
                )

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[bool]:
        """Whether this process may write the key now. Never waits."""
        if not self._locks_work():
            yield True
            return
        path = self._locks / key
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            is_ours = try_lock(descriptor) is not False
            yield is_ours
            if is_ours:
                with contextlib.suppress(OSError):
                    path.unlink()
        finally:
            os.close(descriptor)

    def _locks_work(self) -> bool:
        if self._may_lock is None:
            self._may_lock = not is_network_mount(self.directory)
        return self._may_lock

    def _evict(self, max_bytes: int) -> tuple[int, int]:
        known = []
        for key in self.keys():
            with contextlib.suppress(OSError):
                size_bytes, used_s = self.facts(key)
                known.append((used_s, size_bytes, key))
        total_bytes = sum(size for _, size, _ in known)
        removed = 0
        for _, size_bytes, key in sorted(known):
            if total_bytes <= max_bytes:
                break
            with contextlib.suppress(OSError):
                grave = Path(tempfile.mkdtemp(dir=self._drafts.directory))
                os.rename(self._entries / key, grave / "entry")
                shutil.rmtree(grave, ignore_errors=True)
                total_bytes -= size_bytes
                removed += 1
        return removed, total_bytes


def _open_at(name: str, directory: int) -> BinaryIO:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would block
    try:
        descriptor = os.open(name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BundleInvalidError(f"the entry's {name} is a link") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BundleInvalidError(f"the entry's {name} is no file")
    return open(descriptor, "rb")


def _make(path: Path, mode: int) -> None:
    """Make a directory that is not there; only one of our own gets a mode."""
    if path.is_dir():
        return
    try:
        path.mkdir()
    except FileExistsError:
        return  # another process was faster
    with contextlib.suppress(PermissionError):
        path.chmod(mode)


def _write_durably(path: Path, blob: BinaryIO, size_bytes: int) -> None:
    blob.seek(0)
    written_bytes = 0
    with open(path, "xb") as stream:
        while piece := blob.read(_PIECE_BYTES):
            stream.write(piece)
            written_bytes += len(piece)
        if written_bytes != size_bytes:
            raise BundleInvalidError("the archive changed while it was stored")
        _settle(stream)


def _settle(stream: BinaryIO) -> None:
    """Readable by every user, and on the disk."""
    stream.flush()
    os.fchmod(stream.fileno(), 0o644)
    os.fsync(stream.fileno())


def _size_bytes(entry: Path) -> int:
    return sum(item.stat(follow_symlinks=False).st_size for item in os.scandir(entry))
