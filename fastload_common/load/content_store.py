"""Directories named by their content: written once, whole, shared by all processes of a node.

Layout below the root::

    lock                   one short-held lock for look-up, publication and eviction
    entries/<sha256>/      the published directories; a manifest inside lists file and size
    names/<sha256>         what a listing led to: the name of an entry
    work/<random>/         not published yet

A process holds a shared lock on each entry that it uses until it ends, so eviction leaves it
alone; a writer holds a lock on its work directory, so what a dead one left can be told. The
kernel releases both, whatever kills the process. Lock order: root, then entry.

A process that is stopped while it holds the root's lock keeps the others out: after `LOCK_LIMIT_S`
they get a `TimeoutError`, an `OSError` like every other reason not to use this root.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from fastload_common.clock import Clock, SystemClock
from fastload_common.units import format_size

__all__ = ["LOCK_LIMIT_S", "MANIFEST", "ContentStore", "Draft"]

logger = logging.getLogger(__name__)

MANIFEST = ".fastload.json"

LOCK_LIMIT_S = 10.0
"""Longest wait for the root's lock; it is held for milliseconds at a time."""

_LOCK_POLL_S = 0.02

_held: dict[Path, int] = {}
"""Entry -> descriptor that holds its shared lock; kept open for the life of the process."""


class Draft:
    """A directory that is being filled by this process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.files: dict[str, tuple[int, str]] = {}

    def write(self, name: str, data: bytes) -> None:
        """Write one file (``/`` between parts) durably. Any thread, each name once.

        Raises:
            OSError: no space, a name that is too long, a file where a directory must be.
        """
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        self.files[name] = (len(data), hashlib.sha256(data).hexdigest())

    def digest(self) -> str:
        """SHA-256 over the sorted names, sizes and digests of the files."""
        return _digest_of(self.files)

    def close(self) -> None:
        os.close(self.descriptor)


def _digest_of(files: dict[str, tuple[int, str]]) -> str:
    rows = json.dumps(sorted([name, *facts] for name, facts in files.items()))
    return hashlib.sha256(rows.encode()).hexdigest()


class ContentStore:
    """The store below one root.

    Args:
        root: created here, with its parents.
        max_bytes: bound of all entries together; the least recently used go first.
        clock: times the wait for the lock (tests).

    Raises:
        OSError: the root cannot be created or written, or (every method) not locked.
    """

    def __init__(self, root: Path, max_bytes: int, clock: Clock | None = None) -> None:
        self.root = root
        self._max_bytes = max_bytes
        self._clock = clock or SystemClock()
        self._entries, self._names = root / "entries", root / "names"
        self._work = root / "work"
        for directory in (self._entries, self._names, self._work):
            directory.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._sweep()

    def find(self, name: str) -> Path | None:
        """The entry that `name` led to before, now held by this process; None if it is gone."""
        with self._locked():
            try:
                digest = (self._names / name).read_text()
            except OSError:
                return None
            entry = self._entries / digest
            if not _is_digest(digest) or not _intact(entry):
                return None
            _hold(entry)
            return entry

    @contextlib.contextmanager
    def draft(self) -> Iterator[Draft]:
        """A work directory; gone at the end unless it was published."""
        with self._locked():
            path = Path(tempfile.mkdtemp(dir=self._work))
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        draft = Draft(path, descriptor)
        try:
            yield draft
        finally:
            shutil.rmtree(path, ignore_errors=True)
            draft.close()

    def publish(self, draft: Draft, name: str) -> Path:
        """Make the draft an entry under its digest, or take the equal one that is there.

        Args:
            draft: complete; not used afterwards.
            name: what leads to the entry from now on, of the form of a file name.

        Raises:
            OSError: no space.
        """
        digest = draft.digest()
        entry = self._entries / digest
        manifest = {"files": {name: size for name, (size, _) in sorted(draft.files.items())}}
        (draft.path / MANIFEST).write_text(json.dumps(manifest))
        for directory in [draft.path, *(p for p in draft.path.rglob("*") if p.is_dir())]:
            _sync(directory)
        with self._locked():
            if not _intact(entry):
                if entry.exists():
                    self._remove(entry)
                fcntl.flock(draft.descriptor, fcntl.LOCK_UN)
                os.rename(draft.path, entry)
                _sync(self._entries)
            _hold(entry)
            self._write_name(name, digest)
            kept_bytes = self._evict(self._max_bytes)
        if kept_bytes > self._max_bytes:
            logger.warning(
                "fastload: %s holds %s, more than FASTLOAD_CACHE_MAX_BYTES (%s): all of it is in "
                "use by this process or others",
                self.root,
                format_size(kept_bytes),
                format_size(self._max_bytes),
            )
        return entry

    def clear_unused(self) -> None:
        """Remove every entry that no process uses, when the file system is full."""
        with self._locked():
            self._evict(0)

    def _write_name(self, name: str, digest: str) -> None:
        temporary = self._work / f"name-{os.getpid()}"
        temporary.write_text(digest)
        os.replace(temporary, self._names / name)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait_for_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _wait_for_lock(self, descriptor: int) -> None:
        end_s = self._clock.monotonic_s() + LOCK_LIMIT_S
        never = threading.Event()
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._clock.monotonic_s() >= end_s:
                    raise TimeoutError(
                        f"another process has held its lock for {LOCK_LIMIT_S:g} s; is one stopped?"
                    ) from None
            self._clock.wait(never, _LOCK_POLL_S)

    def _sweep(self) -> None:
        """Remove what dead writers left."""
        for path in self._work.iterdir():
            with contextlib.suppress(OSError):
                if path.is_dir():
                    if _lock_exclusively(path):
                        shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()

    def _evict(self, max_bytes: int) -> int:
        """Remove the least recently used entries that nobody uses, down to the bound.

        Returns:
            How many bytes are left.
        """
        known = []
        for entry in self._entries.iterdir():
            with contextlib.suppress(OSError):
                known.append((entry.stat().st_mtime_ns, _size_bytes(entry), entry))
        total_bytes = sum(size for _, size, _ in known)
        for _, size_bytes, entry in sorted(known):
            if total_bytes <= max_bytes:
                break
            if entry not in _held and _lock_exclusively(entry):
                self._remove(entry)
                total_bytes -= size_bytes
        for name in self._names.iterdir():
            with contextlib.suppress(OSError):
                if not (self._entries / name.read_text()).is_dir():
                    name.unlink()
        return total_bytes

    def _remove(self, entry: Path) -> None:
        """Out of sight at once, then deleted; a kill in between leaves it to `_sweep`."""
        held = _held.pop(entry, None)
        if held is not None:
            os.close(held)
        grave = Path(tempfile.mkdtemp(dir=self._work)) / "entry"
        os.rename(entry, grave)
        shutil.rmtree(grave.parent, ignore_errors=True)


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _intact(entry: Path) -> bool:
    """Whether the files of the manifest have the very bytes that the entry is named by."""
    try:
        files = json.loads((entry / MANIFEST).read_bytes())["files"]
        return _digest_of({name: _facts(entry / name) for name in files}) == entry.name
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _facts(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file, as a draft notes them."""
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return stream.tell(), digest


def _hold(entry: Path) -> None:
    """Keep the entry until this process ends, and mark it as used now."""
    with contextlib.suppress(OSError):
        os.utime(entry)
    if entry in _held:
        return
    descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        # A file system without locks: then nothing there is evicted either.
        os.close(descriptor)
        return
    _held[entry] = descriptor


def _lock_exclusively(directory: Path) -> bool:
    """Whether nobody holds the directory. The lock ends with the call: the root's covers it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _size_bytes(entry: Path) -> int:
    return sum(path.lstat().st_size for path in entry.rglob("*") if not path.is_dir())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
