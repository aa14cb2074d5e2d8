"""Objects in a directory. Knows the operating system's files, nothing of what is in them.

Guarantees: a file that changes between `stat` or `list` and a read is an `ObjectChangedError`,
never mixed bytes; bytes go from the page cache into the caller's buffer by one copy; links are
followed, and broken ones are named.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat as stat_bits
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastload_common.checksums.algorithms import Checksum
from fastload_common.clock import Clock, SystemClock
from fastload_common.errors import ObjectChangedError, ObjectMissingError, SourceUnavailableError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ListedObject, Receipt, Receiver, SourceDescription
from fastload_common.source.local_errors import file_error
from fastload_common.source.uri import file_path, file_uri
from fastload_common.units import MIB

__all__ = ["LocalReceiver", "LocalSource"]

_LOG = logging.getLogger(__name__)
_TEMPORARY = ".fastload-tmp-"

# Between two slices an abort is noticed.
_SLICE_BYTES = 4 * MIB

# A receiver reads chunk after chunk of few objects; more would only hold descriptors.
_OPEN_FILES = 4


class LocalSource:
    """A directory as an `ObjectSource`. Plain data; may be pickled and used by any thread.

    Args:
        directory: absolute path.
        clock: for the receipts.
    """

    def __init__(self, directory: Path, clock: Clock | None = None) -> None:
        self._directory = directory
        self._clock = clock or SystemClock()

    @property
    def root(self) -> str:
        return file_uri(self._directory)

    def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
        """See `ObjectSource.list`. Broken links are left out and logged; `stat` raises for them."""
        found: list[ListedObject] = []
        for path, key in self._walk(recursive):
            try:
                status = os.stat(path)
            except OSError as error:
                if not os.path.islink(path):
                    raise file_error(error, path, "list") from error
                _LOG.warning("left out of the listing: %s", file_error(error, path, "list"))
                continue
            if stat_bits.S_ISREG(status.st_mode):
                found.append(ListedObject(key, _identify(path, status)))
        return sorted(found, key=lambda item: item.key)

    def stat(self, key: str) -> ObjectId:
        path = self._path(key)
        try:
            status = os.stat(path)
        except OSError as error:
            raise file_error(error, path, "stat") from error
        _require_regular(path, status)
        return _identify(path, status)

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        byte_range = byte_range or ByteRange(0, object_id.size_bytes)
        data = bytearray(byte_range.size_bytes)
        if data:
            receiver = LocalReceiver(self._clock)
            try:
                receiver.receive(object_id, byte_range, memoryview(data))
            finally:
                receiver.close()
        return bytes(data)

    def stored_checksum(self, object_id: ObjectId) -> Checksum | None:
        """None: a file system keeps no checksum of a file."""
        return None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        temporary = path.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write_durably(temporary, data)
                # A link, unlike a rename, fails where the name is taken already.
                os.link(temporary, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
            _sync_directory(path.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise file_error(error, path, "write") from error
        return True

    def open_receiver(self) -> Receiver:
        return LocalReceiver(self._clock)

    def describe(self) -> SourceDescription:
        return SourceDescription("file", self.root, {"directory": str(self._directory)})

    def layout_hint(self) -> str:
        """What is odd about this directory as a model, in one sentence; empty if nothing is.

        For whoever found no weights here: a hub cache's outer directory, or broken links.
        """
        snapshots = self._directory / "snapshots"
        with contextlib.suppress(OSError):
            names = sorted(entry.name for entry in os.scandir(snapshots) if entry.is_dir())
            if names:
                return f"this is the root of a hub cache; use {snapshots / names[-1]}"
        broken = []
        with contextlib.suppress(OSError):
            for entry in sorted(os.scandir(self._directory), key=lambda entry: entry.name):
                if entry.is_symlink() and not os.path.exists(entry.path):
                    broken.append(f"{entry.name} -> {os.readlink(entry.path)}")
        if broken:
            return f"{len(broken)} links lead nowhere, such as {broken[0]}"
        return ""

    def close(self) -> None:
        """Nothing is held."""

    def __reduce__(self) -> tuple[type[LocalSource], tuple[Path]]:
        return (LocalSource, (self._directory,))

    def _path(self, key: str) -> Path:
        # Keys come from index files too, and those from anybody.
        parts = key.split("/")
        if not key or "\0" in key or any(part in ("", ".", "..") for part in parts):
            raise ObjectMissingError(
                f"no object can have the key {key!r}",
                hint="a key is relative to the root, without empty parts, '.' and '..'",
                uri=self.root,
            )
        return self._directory.joinpath(*parts)

    def _walk(self, recursive: bool) -> Iterator[tuple[Path, str]]:
        # Each pending directory carries the identities above it: a link back up is a loop.
        pending: list[tuple[Path, str, frozenset[tuple[int, int]]]] = [
            (self._directory, "", frozenset())
        ]
        while pending:
            directory, prefix, above = pending.pop()
            try:
                status = os.stat(directory)
                if (status.st_dev, status.st_ino) in above:
                    _LOG.warning("not followed: %s leads back to a directory above it", directory)
                    continue
                with os.scandir(directory) as entries:
                    # Not entry.is_dir(): that one raises for a loop of links.
                    children = [(entry.name, os.path.isdir(entry.path)) for entry in entries]
            except OSError as error:
                raise file_error(error, directory, "list") from error
            here = above | {(status.st_dev, status.st_ino)}
            for name, is_directory in children:
                path, key = directory / name, prefix + name
                if is_directory:
                    if recursive:
                        pending.append((path, key + "/", here))
                elif not name.startswith(_TEMPORARY):
                    yield path, key


class LocalReceiver:
    """Reads ranges with `os.preadv`; keeps the last few files open."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._files: OrderedDict[str, int] = OrderedDict()
        self._aborted = False

    def receive(self, object_id: ObjectId, byte_range: ByteRange, buffer: memoryview) -> Receipt:
        """See `Receiver.receive`. Here an abort is noticed every few MiB."""
        if len(buffer) != byte_range.size_bytes:
            raise ValueError(f"buffer of {len(buffer)} bytes for {byte_range}")
        started_s = self._clock.monotonic_s()
        path = file_path(object_id.uri)
        descriptor, opened = self._open(object_id, path)
        received_bytes = 0
        try:
            self._check(object_id, path, descriptor)
            first_byte_s = self._clock.monotonic_s() - started_s
            while received_bytes < len(buffer):
                if self._aborted:
                    raise _aborted(object_id)
                window = buffer[received_bytes : received_bytes + _SLICE_BYTES]
                count = os.preadv(descriptor, [window], byte_range.start + received_bytes)
                if count == 0:
                    raise ObjectChangedError(
                        "the file became shorter while it was read",
                        hint="do not write to a model that is being loaded",
                        uri=object_id.uri,
                        range=str(byte_range),
                        expected_bytes=object_id.size_bytes,
                        ends_at=byte_range.start + received_bytes,
                    )
                received_bytes += count
            # Once more: what was written during the read must not pass as the pinned state.
            self._check(object_id, path, descriptor)
        except OSError as error:
            self._forget(object_id.uri)
            raise file_error(error, path, "read") from error
        except ObjectChangedError:
            self._forget(object_id.uri)
            raise
        total_s = self._clock.monotonic_s() - started_s
        return Receipt(received_bytes, first_byte_s, total_s, new_connection=opened)

    def abort(self) -> None:
        """See `Receiver.abort`."""
        self._aborted = True

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _open(self, object_id: ObjectId, path: Path) -> tuple[int, bool]:
        if self._aborted:
            raise _aborted(object_id)
        descriptor = self._files.get(object_id.uri)
        if descriptor is not None:
            self._files.move_to_end(object_id.uri)
            return descriptor, False
        try:
            # Non-blocking, because opening a pipe that somebody put there would wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise ObjectChangedError(
                "the file was deleted after it was listed", uri=object_id.uri
            ) from error
        except OSError as error:
            raise file_error(error, path, "open") from error
        self._files[object_id.uri] = descriptor
        while len(self._files) > _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return descriptor, True

    def _check(self, object_id: ObjectId, path: Path, descriptor: int) -> None:
        status = os.fstat(descriptor)
        _require_regular(path, status)
        found = _identify(path, status)
        if object_id.etag is not None and found.etag != object_id.etag:
            raise ObjectChangedError(
                "the file was replaced or written to after it was listed",
                hint="do not write to a model that is being loaded",
                uri=object_id.uri,
                expected_etag=object_id.etag,
                found_etag=found.etag,
                expected_bytes=object_id.size_bytes,
                found_bytes=found.size_bytes,
            )

    def _forget(self, uri: str) -> None:
        descriptor = self._files.pop(uri, None)
        if descriptor is not None:
            os.close(descriptor)


def _identify(path: Path, status: os.stat_result) -> ObjectId:
    # The mtime alone can be set back by whoever writes.
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    token = "-".join(f"{number:x}" for number in numbers)
    return ObjectId(file_uri(path), token, status.st_size)


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat_bits.S_ISREG(status.st_mode):
        return
    kind = "a directory" if stat_bits.S_ISDIR(status.st_mode) else "not a regular file"
    raise ObjectMissingError(f"{path} is {kind}, where a file was asked for", uri=file_uri(path))


def _aborted(object_id: ObjectId) -> SourceUnavailableError:
    return SourceUnavailableError("the read was aborted", uri=object_id.uri)


def _write_durably(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
