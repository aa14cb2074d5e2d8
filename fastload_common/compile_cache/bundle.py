"""From directories to one archive and back.

The archive is the files' bytes one after the other, compressed; names, sizes, modes and digests
stand in the manifest only. So there is no format in which a link, a device or a way out of the
directory could be written. Packing the same trees gives the same bytes.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fastload_common import __version__
from fastload_common.compile_cache import zstd
from fastload_common.compile_cache.factors import check_factors
from fastload_common.compile_cache.key import key_of
from fastload_common.compile_cache.manifest import (
    LIMITS,
    FileRecord,
    Limits,
    Manifest,
    check_name,
)
from fastload_common.errors import BundleInvalidError
from fastload_common.units import format_size

__all__ = ["PASSING", "Packing", "check_blob", "misfit", "pack"]

PASSING = ("*.lock", "*.tmp", "*.tmp.*", ".*.swp", ".nfs*", ".ninja_lock", "__pycache__")
"""Names that are no artefacts: locks, what is being written, what Python makes again by itself."""

_PIECE_BYTES = 1 << 20
_RESOLVED = " (without links)"


@dataclass(frozen=True, slots=True)
class Packing:
    """How directories become a bundle.

    Attributes:
        places: further paths that may be written inside of files and bind a bundle to them.
        harmless: what may be taken out of a file's bytes before such paths are looked for, such
            as a comment that nobody follows.
        passing: patterns of names to leave out.
        seen: path without links -> bytes and time (ns) of the files that were complete when that
            was noted. Others are left out, and one that is not as noted is an error. None: all are.
        limits: as for unpacking.
    """

    places: Mapping[str, Path] = field(default_factory=dict)
    harmless: Sequence[re.Pattern[bytes]] = ()
    passing: Sequence[str] = PASSING
    seen: Mapping[str, tuple[int, int]] | None = None
    limits: Limits = LIMITS


def pack(
    factors: Mapping[str, object],
    roots: Mapping[str, Path],
    out: BinaryIO,
    how: Packing | None = None,
) -> Manifest:
    """Write the archive of some directories, and return its manifest.

    Args:
        factors: see `check_factors`.
        roots: name -> directory; one that is not there counts as empty.
        out: receives the archive.

    Raises:
        BundleInvalidError: a link that leads out, a file that is none, one that changed meanwhile,
            or more than the limits allow.
        OSError: a file cannot be read, or ``out`` not be written.
    """
    how = how or Packing()
    checked = check_factors(factors)
    writer = _Writer(out, _needles({**how.places, **roots}), how)
    directories: list[tuple[str, str]] = []
    for root in sorted(roots):
        for name, path in _walk(roots[root], how.passing):
            check_name(name)
            if path is None:
                directories.append((root, name))
            elif how.seen is None or os.path.realpath(path) in how.seen:
                writer.add(root, name, path)
    writer.finish()
    return Manifest(
        key=key_of(checked),
        factors=checked,
        roots=tuple(sorted(roots)),
        files=tuple(writer.files),
        directories=tuple(directories),
        bound=dict(sorted(writer.bound.items())),
        blob_sha256=writer.digest.hexdigest(),
        blob_bytes=writer.blob_bytes,
        fastload_version=__version__,
    )


def misfit(manifest: Manifest, places: Mapping[str, Path]) -> str | None:
    """Why a bundle cannot be used with these directories; None if it can.

    Args:
        places: name -> path of the roots and of what else was given when it was packed.
    """
    missing = [root for root in manifest.roots if root not in places]
    if missing:
        return f"it has artefacts for {', '.join(missing)}, which this process has no directory for"
    for place, path in manifest.bound.items():
        name = place.removesuffix(_RESOLVED)
        resolve = _absolute if name == place else os.path.realpath
        here = resolve(places[name]) if name in places else "unknown"
        if here != path:
            return f"its files name {path} as {name}, which is {here} here"
    return None


def check_blob(manifest: Manifest, blob: BinaryIO) -> None:
    """Compare the whole archive with the manifest, and rewind it.

    Raises:
        BundleInvalidError: another size or digest.
    """
    blob.seek(0)
    digest = hashlib.sha256()
    size_bytes = 0
    while piece := blob.read(_PIECE_BYTES):
        size_bytes += len(piece)
        digest.update(piece)
        if size_bytes > manifest.blob_bytes:
            break
    if size_bytes != manifest.blob_bytes:
        more = "more than " if size_bytes > manifest.blob_bytes else ""
        raise BundleInvalidError(
            f"the archive has {more}{min(size_bytes, manifest.blob_bytes)} bytes "
            f"instead of {manifest.blob_bytes}",
            key=manifest.key,
        )
    if digest.hexdigest() != manifest.blob_sha256:
        raise BundleInvalidError("the archive is damaged: its digest is another", key=manifest.key)
    blob.seek(0)


class _Writer:
    """The archive while it is written."""

    def __init__(self, out: BinaryIO, needles: Sequence[tuple[str, bytes]], how: Packing) -> None:
        self._out = out
        self._needles = needles
        self._how = how
        self._compressor = zstd.compressor()
        self._content_bytes = 0
        self.files: list[FileRecord] = []
        self.bound: dict[str, str] = {}
        self.digest = hashlib.sha256()
        self.blob_bytes = 0

    def add(self, root: str, name: str, path: Path) -> None:
        data, status = _read_whole(path, self._how.limits.content_bytes - self._content_bytes)
        if self._how.seen is not None:
            noted = self._how.seen.get(os.path.realpath(path))
            if noted != (status.st_size, status.st_mtime_ns):
                raise BundleInvalidError(
                    f"{path} has changed since warm-up", hint="a later start publishes it"
                )
        self._content_bytes += len(data)
        if len(self.files) >= self._how.limits.files:
            raise BundleInvalidError("too many files", limit=self._how.limits.files)
        self._look_for_places(data)
        mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        sha256 = hashlib.sha256(data).hexdigest()
        self.files.append(FileRecord(root, name, len(data), sha256, mode, status.st_mtime_ns))
        self._write(self._compressor.compress(data))

    def finish(self) -> None:
        self._write(self._compressor.flush())

    def _write(self, data: bytes) -> None:
        self.digest.update(data)
        self.blob_bytes += len(data)
        if self.blob_bytes > self._how.limits.blob_bytes:
            raise BundleInvalidError(
                f"the archive has more than {format_size(self._how.limits.blob_bytes)}"
            )
        self._out.write(data)

    def _look_for_places(self, data: bytes) -> None:
        if not any(needle in data for _, needle in self._needles):
            return
        for pattern in self._how.harmless:
            data = pattern.sub(b"", data)
        for place, needle in self._needles:
            # Not where it is only the start of another name: /a/b in /a/bc.
            if re.search(re.escape(needle) + rb"(?![\w.-])", data):
                self.bound[place] = os.fsdecode(needle)


def _needles(places: Mapping[str, Path]) -> list[tuple[str, bytes]]:
    """What to look for in files: each place, as it was given and without links."""
    found: list[tuple[str, bytes]] = []
    for name, path in places.items():
        given, resolved = _absolute(path), os.path.realpath(path)
        for place, text in ((name, given), (name + _RESOLVED, resolved)):
            # One that a bundle could only be bound to by accident is not looked for.
            if text.count(os.sep) > 1 and (place == name or resolved != given):
                found.append((place, os.fsencode(text)))
    return found


def _absolute(path: Path) -> str:
    return os.path.abspath(path)


def _walk(directory: Path, passing: Sequence[str]) -> Iterator[tuple[str, Path | None]]:
    """Name and path of each file, sorted; path None for a directory with nothing in it."""
    inside = os.path.realpath(directory)
    yield from _walk_below(Path(inside), "", inside, passing)


def _walk_below(
    directory: Path, prefix: str, inside: str, passing: Sequence[str]
) -> Iterator[tuple[str, Path | None]]:
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    found = False
    for name in names:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in passing):
            continue
        path = directory / name
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            found = True
            yield from _walk_below(path, f"{prefix}{name}/", inside, passing)
        elif stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and _stays(path, inside)):
            found = True
            yield f"{prefix}{name}", path
        elif stat.S_ISLNK(mode):
            raise BundleInvalidError(f"{path} is a link that leads out of its directory")
        # Sockets and pipes belong to somebody who lives; they are no artefacts.
    if not found and prefix:
        yield prefix[:-1], None


def _stays(link: Path, inside: str) -> bool:
    """Whether a link leads to a file below the same directory; its bytes are packed then."""
    target = os.path.realpath(link)
    return target.startswith(f"{inside}{os.sep}") and os.path.isfile(target)


def _read_whole(path: Path, room_bytes: int) -> tuple[bytes, os.stat_result]:
    with open(os.path.realpath(path), "rb") as stream:
        before = os.fstat(stream.fileno())
        if before.st_size > room_bytes:
            raise BundleInvalidError(
                "the directories hold more than one entry may",
                hint="raise FASTLOAD_COMPILE_CACHE_MAX_BYTES if that is right",
                file=str(path),
            )
        data = stream.read(before.st_size + 1)
        after = os.fstat(stream.fileno())
    state = (before.st_size, before.st_mtime_ns)
    if len(data) != before.st_size or state != (after.st_size, after.st_mtime_ns):
        raise BundleInvalidError(
            f"{path} changed while it was packed", hint="publish after warm-up has ended"
        )
    return data, before
