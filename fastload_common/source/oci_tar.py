"""Where the files of an uncompressed tar lie: its headers are read by range, its data is not.

Takes what the common writers make: POSIX (pax), GNU and the older form. Everything comes from
anybody: a damaged or odd archive is an error, never a wrong place; what `fastload pull` refuses by
its name, or as cut off, is refused here by the same errors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastload_common.errors import ArchiveInvalidError, ArchiveUnsafeError, SourceError
from fastload_common.units import KIB, MIB

__all__ = ["EntryKind", "TarEntry", "TarIndex", "read_tar_index"]

_BLOCK = 512
# Grows while headers lie close to each other, which is where small files are.
_LEAST_WINDOW_BYTES = 4 * KIB
_LARGEST_WINDOW_BYTES = 256 * KIB
_LONGEST_NAME_BYTES = 64 * KIB
_LONGEST_PATH = 4096
_LARGEST_PAX_BYTES = 1 * MIB
_MOST_ENTRIES = 1_000_000
_HARM = "the archive is damaged, or was made to harm"
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
}


class EntryKind(enum.Enum):
    """What an entry makes."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    HARD_LINK = "hard link"
    OTHER = "other"  # a device or a pipe: nothing that can be read


@dataclass(frozen=True, slots=True)
class TarEntry:
    """One entry.

    Attributes:
        path: parts, without empty ones, ``.`` and ``..``.
        start, size_bytes: of a file's data in the archive.
        target: of a link, as it stands there.
    """

    path: tuple[str, ...]
    kind: EntryKind
    start: int
    size_bytes: int
    target: str = ""


TarIndex = list[TarEntry]
"""The entries of one archive, in their order."""


def read_tar_index(read: Callable[[int, int], bytes], size_bytes: int, what: str) -> TarIndex:
    """All entries in their order.

    Args:
        read: bytes ``[start, end)`` of the archive.
        size_bytes: of the archive.
        what: names it in messages.

    Raises:
        SourceError: it could not be read, or not by range: compressed, with sparse files.
        ArchiveInvalidError: no tar, or a damaged one, or cut off.
        ArchiveUnsafeError: a name leads out of it.
    """
    return list(_Reader(read, size_bytes, what).entries())


class _Reader:
    def __init__(self, read: Callable[[int, int], bytes], size_bytes: int, what: str) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._what = what
        self._start = 0
        self._window = b""
        self._window_bytes = _LEAST_WINDOW_BYTES

    def entries(self) -> Iterator[TarEntry]:
        position, count = 0, 0
        overrides: dict[str, str] = {}
        common: dict[str, str] = {}
        while position < self._size_bytes:
            if position + _BLOCK > self._size_bytes:
                raise self._invalid("is cut off within a header", position)
            block = self._bytes(position, _BLOCK)
            if not any(block):
                if overrides:
                    raise self._invalid(
                        "ends after an extended header, without its entry", position
                    )
                return  # the end; what may follow is padding
            self._check(block, position)
            kind = block[156:157]
            size_bytes = self._number(block[124:136], position)
            data = position + _BLOCK
            if kind in b"LKxg":
                text = self._extension(kind, data, size_bytes)
                if kind == b"x":
                    overrides |= self._pax(text, position)
                elif kind == b"g":
                    common |= self._pax(text, position)
                else:
                    name = text.split(b"\0", 1)[0]
                    overrides["path" if kind == b"L" else "linkpath"] = _text(name)
            else:
                count += 1
                if count > _MOST_ENTRIES:
                    raise self._fault(f"holds more than {_MOST_ENTRIES} entries", position)
                fields = common | overrides
                overrides = {}
                entry = self._entry(block, kind, fields, position)
                size_bytes = entry.size_bytes
                yield entry
            position = data + -(-size_bytes // _BLOCK) * _BLOCK
        # The padding after the last file may be missing, as umoci leaves it out: no byte is lost.
        if overrides:
            raise self._invalid("is cut off after an extended header, without its entry", position)

    def _entry(self, block: bytes, kind: bytes, fields: dict[str, str], position: int) -> TarEntry:
        if kind == b"S" or any(key.startswith("GNU.sparse") for key in fields):
            raise self._fault("holds a sparse file, which cannot be read by range", position)
        size_bytes = self._number(block[124:136], position)
        if "size" in fields:
            text = fields["size"]
            if not (text.isascii() and text.isdigit() and len(text) < 20):
                raise self._invalid("has a damaged size", position)
            size_bytes = int(text)
        name = fields.get("path")
        if name is None:
            name = _text(block[:100].split(b"\0", 1)[0])
            prefix = block[345:500].split(b"\0", 1)[0]
            if prefix and block[257:263] == b"ustar\0":
                name = f"{_text(prefix)}/{name}"
        target = fields.get("linkpath")
        if target is None:
            target = _text(block[157:257].split(b"\0", 1)[0])
        what = _KINDS.get(kind, EntryKind.OTHER)
        if what is EntryKind.FILE and name.endswith("/") and kind in b"\0 ":
            what = EntryKind.FOLDER  # as the oldest writers mark them
        if what is not EntryKind.FILE and what is not EntryKind.OTHER:
            size_bytes = 0
        start = position + _BLOCK
        if start + size_bytes > self._size_bytes:
            raise self._invalid("ends in the middle of a file", position)
        return TarEntry(self._path(name, position), what, start, size_bytes, target)

    def _path(self, name: str, position: int) -> tuple[str, ...]:
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if len(name) > _LONGEST_PATH:
            raise self._invalid("has a name that is longer than any file system takes", position)
        if "\0" in name:
            raise self._invalid(f"has a name with a NUL: {name[:100]!r}", position)
        if name.startswith("/"):
            raise self._unsafe(f"has an absolute name: {name[:100]!r}", position)
        if ".." in parts:
            raise self._unsafe(f"names a file outside of it: {name[:100]!r}", position)
        return parts

    def _extension(self, kind: bytes, start: int, size_bytes: int) -> bytes:
        limit_bytes = _LARGEST_PAX_BYTES if kind in b"xg" else _LONGEST_NAME_BYTES
        if size_bytes > limit_bytes or start + size_bytes > self._size_bytes:
            raise self._invalid(f"has a header of {size_bytes} bytes", start)
        return self._bytes(start, size_bytes) if size_bytes else b""

    def _pax(self, text: bytes, position: int) -> dict[str, str]:
        """Records of the form ``length key=value`` and a line break."""
        found: dict[str, str] = {}
        while text:
            length, space, _ = text.partition(b" ")
            if not space or not length.isdigit() or len(length) > 8:
                raise self._invalid("has a damaged extended header", position)
            size_bytes = int(length)
            record = text[len(length) + 1 : size_bytes]
            key, equals, value = record.partition(b"=")
            if size_bytes > len(text) or not record.endswith(b"\n") or not equals or not key:
                raise self._invalid("has a damaged extended header", position)
            found[_text(key)] = _text(value[:-1])
            text = text[size_bytes:]
        return found

    def _check(self, block: bytes, position: int) -> None:
        stored = block[148:156].split(b"\0", 1)[0].strip()
        computed = sum(block) - sum(block[148:156]) + 8 * 32
        is_octal = stored and all(digit in b"01234567" for digit in stored)
        if is_octal and int(stored, 8) == computed:
            return
        if position == 0:
            for magic, name in _COMPRESSED.items():
                if block.startswith(magic):
                    raise self._fault(f"is compressed with {name}, whatever its type says", 0)
        raise self._invalid("is no tar, or a damaged one", position)

    def _number(self, text: bytes, position: int) -> int:
        if text[0] & 0x80:  # base 256, for what octal digits cannot hold
            if text[0] != 0x80:
                raise self._invalid("has a negative size", position)
            value = int.from_bytes(text[1:], "big")
        else:
            digits = text.split(b"\0", 1)[0].strip()
            if not all(digit in b"01234567" for digit in digits):
                raise self._invalid("has a damaged size", position)
            value = int(digits or b"0", 8)
        if value > self._size_bytes:
            raise self._invalid("holds a file that is larger than itself", position)
        return value

    def _bytes(self, start: int, size_bytes: int) -> bytes:
        """A part of the archive, from the window if it is there."""
        end = start + size_bytes
        if not self._start <= start <= end <= self._start + len(self._window):
            # Right behind what is there: many small files.
            is_near = start <= self._start + len(self._window) + self._window_bytes
            grown = min(_LARGEST_WINDOW_BYTES, self._window_bytes * 2)
            self._window_bytes = grown if is_near and self._window else _LEAST_WINDOW_BYTES
            stop = min(self._size_bytes, max(end, start + self._window_bytes))
            self._window = self._read(start, stop)
            self._start = start
            if len(self._window) != stop - start:
                raise self._fault("was not read whole", start)
        return self._window[start - self._start : end - self._start]

    def _invalid(self, why: str, position: int) -> ArchiveInvalidError:
        return ArchiveInvalidError(f"{self._what} {why}", hint=_HARM, offset=position)

    def _unsafe(self, why: str, position: int) -> ArchiveUnsafeError:
        return ArchiveUnsafeError(f"{self._what} {why}", hint=_HARM, offset=position)

    def _fault(self, why: str, position: int) -> SourceError:
        return SourceError(f"{self._what} {why}", offset=position)


_KINDS = {
    b"0": EntryKind.FILE,
    b"\0": EntryKind.FILE,
    b"7": EntryKind.FILE,
    b"1": EntryKind.HARD_LINK,
    b"2": EntryKind.LINK,
    b"5": EntryKind.FOLDER,
}


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
