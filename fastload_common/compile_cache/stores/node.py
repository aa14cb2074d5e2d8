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
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fastload_common.clock import Clock, SystemClock
from fastload_common.compile_cache.bundle import check_blob
from fastload_common.compile_cache.key import is_key
from fastload_common.compile_cache.manifest import LIMITS, Limits, Manifest, decode_manifest
from fastload_common.compile_cache.stores.base import Entry, Package, Published
from fastload_common.compile_cache.stores.directory import (
    check_writers,
    fsync_directory,
    is_network_mount,
    unsafe_reason,
)
from fastload_common.compile_cache.trust import Keys
from fastload_common.errors import BundleInvalidError, CompileCacheError, StoreUnsafeError
from fastload_common.units import format_size

__all__ = ["NodeStore"]

_MANIFEST, _BLOB = "manifest", "blob"
_KEPT_IN_QUARANTINE = 4
_PIECE_BYTES = 1 << 20

_ABANDONED_S = 24 * 3600.0
"""Where locks do not tell whether a draft's writer lives, it is taken for dead after this."""

_YOUNG_S = 60.0
"""A draft this young may not have been locked by its writer yet."""


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
        self._clock = clock or SystemClock()
        base = directory / "v1"
        self._base, self._entries, self._drafts = base, base / "entries", base / "drafts"
        self._locks, self._quarantine = base / "locks", base / "quarantine"
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
            self._sweep()
            self._evict(self._max_bytes - size_bytes)
            with self._draft() as draft:
                _write_durably(draft / _BLOB, package.blob, manifest.blob_bytes)
                with open(draft / _MANIFEST, "xb") as stream:
                    stream.write(package.envelope)
                    _settle(stream)
                draft.chmod(0o755)
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
        try:
            found = self._open(key)
            if found is None:
                return None
            found[1].close()
            return decode_manifest(found[0], keys=self._keys, key=key, limits=self._limits)
        except (OSError, CompileCacheError):
            return None

    def manifests(self, most: int | None = None) -> Iterator[Manifest]:
        found = (self.manifest(key) for key in self.keys()[:most])
        return (manifest for manifest in found if manifest is not None)

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
        if self._has_links():
            return False
        try:
            self._quarantine.mkdir(exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self._quarantine))
            try:
                os.rename(self._entries / key, aside)  # which is empty, and replaced
            except BaseException:
                aside.rmdir()
                raise
            kept = sorted(self._quarantine.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        except FileNotFoundError:
            return True  # somebody else has
        except OSError:
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
        self._refuse_links()
        self._sweep()
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

    def _mark_used(self, key: str) -> None:
        # Another user's entry, or a read-only directory: then its age counts from elsewhere.
        with contextlib.suppress(OSError):
            os.utime(self._entries / key)

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
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(PermissionError):  # another user's process was faster
                self.directory.chmod(0o755)
        self._check_trust()
        self._refuse_links()
        # Whom the operator lets write into the directory may write here as well.
        mode = (stat.S_IMODE(self.directory.stat().st_mode) & 0o1777) | 0o755
        for path in (self._base, self._entries, self._drafts, self._locks):
            if not path.is_dir():
                path.mkdir(exist_ok=True)
                with contextlib.suppress(PermissionError):
                    path.chmod(mode)

    def _has_links(self) -> bool:
        ours = (self._base, self._entries, self._drafts, self._locks, self._quarantine)
        return any(path.is_symlink() for path in ours)

    def _refuse_links(self) -> None:
        # Whoever else may write here would have us remove what is old in a directory of his choice.
        if self._has_links():
            raise StoreUnsafeError(f"the compile cache is not used: a link stands in {self._base}")

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[bool]:
        """Whether this process may write the key now. Never waits."""
        if not self._locks_work():
            yield True
            return
        path = self._locks / key
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            is_ours = _try_lock(descriptor) is not False
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

    @contextlib.contextmanager
    def _draft(self) -> Iterator[Path]:
        path = Path(tempfile.mkdtemp(dir=self._drafts))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if self._locks_work():
                _try_lock(descriptor)
            yield path
        finally:
            os.close(descriptor)
            shutil.rmtree(path, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove drafts whose writers are dead."""
        try:
            drafts = list(self._drafts.iterdir())
        except FileNotFoundError:
            return
        for path in drafts:
            with contextlib.suppress(OSError):
                # Whichever clock is wrong, time goes on.
                age_s = abs(self._clock.wall_s() - path.lstat().st_mtime)
                if age_s > _ABANDONED_S or (age_s > _YOUNG_S and self._is_abandoned(path)):
                    shutil.rmtree(path, ignore_errors=True)

    def _is_abandoned(self, draft: Path) -> bool:
        if not self._locks_work():
            return False
        descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return _try_lock(descriptor) is True
        finally:
            os.close(descriptor)

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
                grave = Path(tempfile.mkdtemp(dir=self._drafts))
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


def _try_lock(descriptor: int) -> bool | None:
    """True: ours. False: somebody else's. None: this file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


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
