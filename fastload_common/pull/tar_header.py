"""One header block of a tar archive, and the records that extend it. Pure: bytes in, records out.

Everything is from whoever made the archive: each field is checked, and what this does not know is
an error, never skipped. Names are bytes, as file systems have them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from enum import Enum

from fastload_common.errors import ArchiveInvalidError

__all__ = ["BLOCK_BYTES", "Entry", "Kind", "PaxRecords", "parse_header", "parse_pax"]

BLOCK_BYTES = 512

_XATTR = b"SCHILY.xattr."
# Programs' own keywords begin with capitals, and others are to pass over them.
_IGNORED = re.compile(
    rb"(atime|ctime|comment|charset|hdrcharset|uname|gname"
    rb"|(?!GNU\.sparse\.|SCHILY\.xattr\.|SCHILY\.realsize)[A-Z][A-Z0-9]*\..*)",
    re.DOTALL,
)
_DECIMAL = re.compile(rb"[0-9]{1,20}")
_TIME = re.compile(rb"(-?)([0-9]{1,12})(?:\.([0-9]{0,40}))?")
_LARGEST_ID = (1 << 32) - 2  # the largest number means "leave it" to chown
_LARGEST_DEVICE = (1 << 20) - 1
_LARGEST_SIZE_BYTES = (1 << 63) - 1
_LARGEST_TIME_S = 1 << 33
_MOST_DIGITS = 7  # of a record's length


class Kind(Enum):
    """What an entry is; the values are those of the header's type field."""

    FILE = b"0"
    LINK = b"1"
    SYMLINK = b"2"
    CHARACTER_DEVICE = b"3"
    BLOCK_DEVICE = b"4"
    DIRECTORY = b"5"
    FIFO = b"6"
    GNU_LONG_NAME = b"L"
    GNU_LONG_LINK = b"K"
    PAX = b"x"
    PAX_GLOBAL = b"g"


_KINDS = {kind.value: kind for kind in Kind} | {b"\0": Kind.FILE, b"7": Kind.FILE}
_WITH_CONTENT = {
    Kind.FILE,
    Kind.GNU_LONG_NAME,
    Kind.GNU_LONG_LINK,
    Kind.PAX,
    Kind.PAX_GLOBAL,
}


@dataclass(slots=True)
class Entry:
    """One entry as the archive has it; nothing of it is safe yet.

    Attributes:
        name, link: as they stand there.
        mode: the permission bits and set-id bits.
        size_bytes: of the content that follows; 0 for whatever has none.
        mtime_ns: since the epoch.
        device: number of a device.
        xattrs: extended attributes.
    """

    name: bytes
    kind: Kind
    mode: int
    uid: int
    gid: int
    size_bytes: int
    mtime_ns: int
    link: bytes
    device: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The name for messages, cut to a length that fits a line."""
        text = self.name.decode("utf-8", "backslashreplace")
        return repr(text if len(text) <= 120 else f"{text[:120]}...")


@dataclass(slots=True)
class PaxRecords:
    """What extended headers say of the next entry; None: they say nothing."""

    path: bytes | None = None
    linkpath: bytes | None = None
    size_bytes: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    xattrs: dict[bytes, bytes] = field(default_factory=dict)

    def apply(self, entry: Entry) -> None:
        """Put what is said in the place of what the header has."""
        if self.path is not None:
            entry.name = self.path
        if self.linkpath is not None:
            entry.link = self.linkpath
        if self.size_bytes is not None and entry.kind is Kind.FILE:
            entry.size_bytes = self.size_bytes
        entry.uid = entry.uid if self.uid is None else self.uid
        entry.gid = entry.gid if self.gid is None else self.gid
        entry.mtime_ns = entry.mtime_ns if self.mtime_ns is None else self.mtime_ns
        entry.xattrs = self.xattrs


def parse_header(block: bytes) -> Entry:
    """Parse one block that is not all zeros.

    Raises:
        ArchiveInvalidError: no header, a damaged one, or a type that is not known.
    """
    _check_sum(block)
    kind = _kind_of(block[156:157])
    name = _text(block[0:100])
    is_posix = block[257:263] == b"ustar\0"
    if is_posix and block[345] != 0:
        name = _text(block[345:500]) + b"/" + name
    if kind is Kind.FILE and name.endswith(b"/"):
        kind = Kind.DIRECTORY  # of the oldest archives
    size_bytes = _number(block[124:136], "size")
    entry = Entry(
        name=name,
        kind=kind,
        mode=_number(block[100:108], "mode") & 0o7777,
        uid=_number(block[108:116], "owner"),
        gid=_number(block[116:124], "group"),
        size_bytes=size_bytes if kind in _WITH_CONTENT else 0,
        mtime_ns=_number(block[136:148], "time", signed=True) * 10**9,
        link=_text(block[157:257]),
    )
    if kind in (Kind.CHARACTER_DEVICE, Kind.BLOCK_DEVICE):
        major, minor = _number(block[329:337], "device"), _number(block[337:345], "device")
        if max(major, minor) > _LARGEST_DEVICE:
            raise _invalid(f"a device has the number {major}:{minor}")
        entry.device = os.makedev(major, minor)
    _check_numbers(entry.size_bytes, entry.uid, entry.gid, entry.mtime_ns)
    return entry


def parse_pax(data: bytes, *, is_global: bool = False) -> PaxRecords:
    """Parse the content of an extended header.

    Args:
        is_global: it is said of all following entries; then only what changes nothing is allowed.

    Raises:
        ArchiveInvalidError: damaged, or says what is not known.
    """
    found = PaxRecords()
    position = 0
    while position < len(data):
        key, value, position = _record(data, position)
        if _IGNORED.fullmatch(key):
            continue
        if is_global:
            raise _invalid(f"a global extended header sets {_shown(key)} for all entries")
        _take(found, key, value)
    return found


def _take(found: PaxRecords, key: bytes, value: bytes) -> None:
    if key.startswith(_XATTR):
        name = key[len(_XATTR) :]
        if not name or b"\0" in name or len(name) > 255:
            raise _invalid(f"an extended attribute has the name {_shown(name)}")
        found.xattrs[name] = value
        return
    if not value:
        return  # the header's own value stands
    if key in (b"path", b"linkpath"):
        if b"\0" in value:
            raise _invalid(f"the extended header's {key.decode()} holds a NUL: {_shown(value)}")
        if key == b"path":
            found.path = value
        else:
            found.linkpath = value
    elif key == b"mtime":
        found.mtime_ns = _time_ns(value)
    elif key in (b"size", b"uid", b"gid"):
        if not _DECIMAL.fullmatch(value):
            raise _invalid(f"the extended header's {key.decode()} is no number: {_shown(value)}")
        number = int(value)
        if key == b"size":
            found.size_bytes = number
        elif key == b"uid":
            found.uid = number
        else:
            found.gid = number
        _check_numbers(found.size_bytes or 0, found.uid or 0, found.gid or 0, 0)
    elif key.startswith(b"GNU.sparse.") or key == b"SCHILY.realsize":
        raise _sparse()
    else:
        raise _invalid(f"an extended header sets {_shown(key)}, which is not known")


def _record(data: bytes, position: int) -> tuple[bytes, bytes, int]:
    """Key, value and the end of the record that begins here."""
    space = data.find(b" ", position, position + _MOST_DIGITS + 1)
    digits = data[position:space] if space > 0 else b""
    if not _DECIMAL.fullmatch(digits):
        raise _invalid(f"an extended header's record has no length, at byte {position}")
    end = position + int(digits)
    if not space < end <= len(data) or data[end - 1] != 0x0A:
        raise _invalid(f"an extended header's record has a wrong length, at byte {position}")
    key, equals, value = data[space + 1 : end - 1].partition(b"=")
    if not equals or not key or b"\0" in key:
        raise _invalid(f"an extended header's record has no key, at byte {position}")
    return key, value, end


def _kind_of(field_: bytes) -> Kind:
    kind = _KINDS.get(field_)
    if kind is None:
        if field_ == b"S":
            raise _sparse()
        raise _invalid(f"an entry has the type {field_!r}, which is not known")
    return kind


def _check_sum(block: bytes) -> None:
    told = _number(block[148:156], "checksum")
    blank = block[:148] + b" " * 8 + block[156:]
    if told == sum(blank):
        return
    if told == sum(byte - 256 if byte > 127 else byte for byte in blank):
        return  # as the oldest programs reckon it
    raise _invalid("not a tar archive, or a damaged one: a header's checksum is wrong")


def _number(data: bytes, what: str, *, signed: bool = False) -> int:
    if data[0] & 0x80:
        value = int.from_bytes(data, "big", signed=False) & ((1 << (len(data) * 8 - 1)) - 1)
        if data[0] & 0x40:
            if not signed:
                raise _invalid(f"an entry's {what} is negative")
            value -= 1 << (len(data) * 8 - 1)
        return value
    text = data.split(b"\0", 1)[0].strip(b" ")
    if not text:
        return 0
    try:
        value = int(text, 8)
    except ValueError:
        value = -1
    if value < 0 or b"_" in text:
        raise _invalid(f"an entry's {what} is no number: {_shown(text)}")
    return value


def _check_numbers(size_bytes: int, uid: int, gid: int, mtime_ns: int) -> None:
    if size_bytes > _LARGEST_SIZE_BYTES:
        raise _invalid(f"an entry says that it has {size_bytes} bytes")
    if max(uid, gid) > _LARGEST_ID:
        raise _invalid(f"an entry has the owner {uid} and the group {gid}")
    if abs(mtime_ns) > _LARGEST_TIME_S * 10**9:
        raise _invalid(f"an entry's time is {mtime_ns // 10**9} s since the epoch")


def _time_ns(value: bytes) -> int:
    match = _TIME.fullmatch(value)
    if match is None:
        raise _invalid(f"the extended header's mtime is no time: {_shown(value)}")
    fraction = (match.group(3) or b"")[:9].ljust(9, b"0")
    time_ns = int(match.group(2)) * 10**9 + int(fraction)
    _check_numbers(0, 0, 0, time_ns)
    return -time_ns if match.group(1) else time_ns


def _text(data: bytes) -> bytes:
    return data.split(b"\0", 1)[0]


def _shown(data: bytes) -> str:
    text = data[:100].decode("utf-8", "backslashreplace")
    return repr(text) + ("..." if len(data) > 100 else "")


def _sparse() -> ArchiveInvalidError:
    return ArchiveInvalidError(
        "an entry is a sparse file, which layers must not have",
        hint="pack the archive without --sparse",
    )


def _invalid(what: str) -> ArchiveInvalidError:
    return ArchiveInvalidError(what, hint="the archive is damaged, or was made to harm")
