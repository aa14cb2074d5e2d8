"""Archives that were made to harm: what each of them is, and the error that it must get.

Names and forms are those of real attacks: names that lead out, links that lead out and entries
through them, entries that contradict each other, headers that lie, bombs.
"""

from __future__ import annotations

import gzip
import random
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass

import zstandard

from fastload_common.errors import ArchiveInvalidError, ArchiveUnsafeError
from tests.common.pull.images import Entry, archive, directory, file, link, symlink

__all__ = ["CASES", "Case"]

UNSAFE, INVALID = ArchiveUnsafeError, ArchiveInvalidError


@dataclass(frozen=True)
class Case:
    """One archive, or layers of several.

    Attributes:
        error: its class; the text must be in its message.
        stored: whether the bytes are as a registry has them, not tar.
        most_bytes: bound of what it may unpack to.
        image: whether it is pulled as an image's root file system; else as an artifact.
    """

    name: str
    layers: tuple[bytes, ...]
    error: type[Exception]
    text: str
    stored: bool = False
    image: bool = True
    most_bytes: int | None = None


def raw(
    name: bytes = b"x",
    kind: bytes = b"0",
    data: bytes = b"",
    *,
    size: bytes | None = None,
    link: bytes = b"",
    change: Callable[[bytearray], None] = lambda block: None,
    checksum: bool = True,
) -> bytes:
    """One entry, field by field."""
    block = bytearray(512)
    block[0 : len(name)] = name
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124:136] = f"{len(data):011o}\0".encode() if size is None else size
    block[136:148], block[156:157] = b"00000000000\0", kind
    block[157 : 157 + len(link)] = link
    block[257:265] = b"ustar\x0000"
    change(block)
    if checksum:
        block[148:156] = b" " * 8
        block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block) + data + bytes(-len(data) % 512)


END = bytes(1024)


def pax(*records: tuple[str, bytes], kind: bytes = b"x") -> bytes:
    """An extended header of records with right lengths."""
    return raw(b"pax", kind, b"".join(record(key, value) for key, value in records))


def record(key: str, value: bytes) -> bytes:
    body = b" " + key.encode() + b"=" + value + b"\n"
    length = len(body)
    while length != len(body) + len(str(length)):
        length = len(body) + len(str(length))
    return str(length).encode() + body


def put(start: int, data: bytes) -> Callable[[bytearray], None]:
    def change(block: bytearray) -> None:
        block[start : start + len(data)] = data

    return change


def long_name(name: bytes, kind: bytes = b"L") -> bytes:
    return raw(b"././@LongLink", kind, name + b"\0")


def zeros_in_gzip() -> bytes:
    """A small file that says of itself that it is empty, with much behind it."""
    return gzip.compress(raw(b"zeros", size=f"{64 << 20:011o}\0".encode()) + bytes(64 << 20), 1)


NAMES = [
    Case("absolute path", (archive(file("/etc/passwd")),), UNSAFE, "absolute name"),
    Case("absolute path of a directory", (archive(directory("/tmp/x")),), UNSAFE, "absolute name"),
    Case("parent", (archive(file("../outside/canary")),), UNSAFE, "leaves the directory"),
    Case("parent in the middle", (archive(file("a/b/../../../x")),), UNSAFE, "leaves"),
    Case("parent that comes back", (archive(file("a/../b")),), UNSAFE, "leaves the directory"),
    Case("parent alone", (archive(directory("..")),), UNSAFE, "leaves the directory"),
    Case("parent after a dot", (archive(file("./../x")),), UNSAFE, "leaves the directory"),
    Case("file for the root", (raw(b".", b"0") + END,), INVALID, "root"),
    Case("no name", (raw(b"") + END,), INVALID, "no name"),
    Case("step too long", (pax(("path", b"n" * 300)) + raw() + END,), INVALID, "too long"),
    Case("path too long", (pax(("path", b"a/" * 2100 + b"x")) + raw() + END,), INVALID, "too long"),
    Case("too deep", (pax(("path", b"a/" * 200 + b"x")) + raw() + END,), INVALID, "deep"),
    Case("NUL in a pax path", (pax(("path", b"a\0b")) + raw() + END,), INVALID, "NUL"),
    Case("NUL in a long name", (long_name(b"a\0/../b") + raw() + END,), INVALID, "NUL"),
    Case("pax path leads out", (pax(("path", b"../x")) + raw(b"good") + END,), UNSAFE, "leaves"),
    Case("long name leads out", (long_name(b"../x") + raw(b"good") + END,), UNSAFE, "leaves"),
    Case(
        "prefix leads out",
        (raw(b"x", change=put(345, b"../outside")) + END,),
        UNSAFE,
        "leaves the directory",
    ),
]

LINKS = [
    Case(
        "entry through a link out",
        (archive(symlink("evil", "../outside"), file("evil/canary", b"changed")),),
        UNSAFE,
        "symbolic link of the same archive",
    ),
    Case(
        "entry through an absolute link",
        (archive(symlink("evil", "/tmp"), file("evil/x")),),
        UNSAFE,
        "symbolic link of the same archive",
    ),
    Case(
        "directory through a link",
        (archive(symlink("evil", ".."), directory("evil/x/")),),
        UNSAFE,
        "symbolic link of the same archive",
    ),
    Case(
        "entry through a chain of links",
        (archive(symlink("a", "b"), symlink("b", "../outside"), file("a/canary", b"changed")),),
        UNSAFE,
        "symbolic link of the same archive",
    ),
    Case(
        "link through a link",
        (archive(symlink("evil", "../outside"), symlink("evil/x", "y")),),
        UNSAFE,
        "symbolic link of the same archive",
    ),
    Case(
        "entry through a link of a layer below",
        (archive(symlink("evil", "../../outside")), archive(file("evil/canary", b"changed"))),
        UNSAFE,
        "leads out of the root",
    ),
    Case(
        "whiteout through a link of a layer below",
        (archive(symlink("evil", "../../outside")), archive(file("evil/.wh.canary", b""))),
        UNSAFE,
        "leads out of the root",
    ),
    Case(
        "opaque whiteout through a link of a layer below",
        (archive(symlink("evil", "../../outside")), archive(file("evil/.wh..wh..opq", b""))),
        UNSAFE,
        "leads out of the root",
    ),
    Case(
        "loop of links of a layer below",
        (archive(symlink("a", "b"), symlink("b", "a")), archive(file("a/x"))),
        UNSAFE,
        "loop",
    ),
    Case(
        "link out in an artifact",
        (archive(symlink("config.json", "/etc/passwd")),),
        UNSAFE,
        "leads out of the directory",
        image=False,
    ),
    Case(
        "climbing link in an artifact",
        (archive(directory("d/"), symlink("d/x", "../../outside/canary")),),
        UNSAFE,
        "leads out of the directory",
        image=False,
    ),
    Case(
        "link that climbs out of another one in an artifact",
        (archive(symlink("here", "."), symlink("x", "here/../outside")),),
        UNSAFE,
        "leads out of the directory",
        image=False,
    ),
    Case(
        "layers through links in an artifact",
        (archive(symlink("here", ".")), archive(file("here/x"))),
        UNSAFE,
        "symbolic link of another one",
        image=False,
    ),
    Case("link to nothing", (raw(b"x", b"2") + END,), UNSAFE, "symbolic link to"),
    Case("link with NUL", (pax(("linkpath", b"a\0b")) + raw(b"x", b"2") + END,), INVALID, "NUL"),
    Case("hard link out", (archive(link("x", "../outside/canary")),), UNSAFE, "leaves"),
    Case("absolute hard link", (archive(link("x", "/etc/passwd")),), UNSAFE, "absolute"),
    Case(
        "hard link through a link",
        (archive(symlink("evil", "../outside"), link("x", "evil/canary")),),
        UNSAFE,
        "symbolic link of the same archive",
    ),
    Case(
        "hard link through a link of a layer below",
        (archive(symlink("evil", "../../outside")), archive(link("x", "evil/canary"))),
        UNSAFE,
        "leads out of the root",
    ),
    Case("hard link to nothing", (archive(link("x", "not-there")),), INVALID, "no file"),
    Case("hard link to itself", (archive(link("x", "x")),), INVALID, "itself"),
    Case(
        "hard link to a directory",
        (archive(directory("d/"), link("x", "d")),),
        INVALID,
        "directory",
    ),
    Case(
        "write through a hard link",
        (archive(symlink("a", "../outside/canary"), link("b", "a"), file("b", b"changed")),),
        INVALID,
        "twice",
    ),
]

KINDS = [
    Case(
        "character device",
        (archive(Entry("null", type=tarfile.CHRTYPE, device=(1, 3))),),
        UNSAFE,
        "is a device",
    ),
    Case(
        "block device",
        (archive(Entry("sda", type=tarfile.BLKTYPE, device=(8, 0))),),
        UNSAFE,
        "is a device",
    ),
    Case("pipe", (archive(Entry("pipe", type=tarfile.FIFOTYPE)),), UNSAFE, "is a pipe"),
    Case("set-user-ID", (archive(file("su", mode=0o4755)),), UNSAFE, "set-user-ID"),
    Case("set-group-ID", (archive(file("su", mode=0o2755)),), UNSAFE, "set-group-ID"),
    Case(
        "capabilities",
        (archive(Entry("ping", b"x", pax={"SCHILY.xattr.security.capability": "\1\0\0\2"})),),
        UNSAFE,
        "capabilities",
    ),
    Case("unknown type", (raw(b"x", b"Z") + END,), INVALID, "type"),
    Case("sparse file", (raw(b"x", b"S") + END,), INVALID, "sparse"),
    Case(
        "sparse file by pax",
        (pax(("GNU.sparse.major", b"1"), ("GNU.sparse.minor", b"0")) + raw() + END,),
        INVALID,
        "sparse",
    ),
    Case("whiteout of the parent", (archive(file(".wh...", b"")),), UNSAFE, "whiteout"),
    Case("whiteout of the directory", (archive(file("d/.wh..", b"")),), UNSAFE, "whiteout"),
    Case("whiteout of nothing", (archive(file("d/.wh.", b"")),), UNSAFE, "whiteout"),
    Case("below a whiteout", (archive(file(".wh.d/x", b"")),), UNSAFE, "below a whiteout"),
]

CONTRADICTIONS = [
    Case("file twice", (archive(file("x"), file("x")),), INVALID, "twice"),
    Case("file twice, spelt otherwise", (archive(file("a/x"), file("./a//x")),), INVALID, "twice"),
    Case("link over file", (archive(file("x"), symlink("x", "y")),), INVALID, "twice"),
    Case(
        "file over link", (archive(symlink("x", "../outside/canary"), file("x")),), INVALID, "twice"
    ),
    Case("file then directory", (archive(file("x"), directory("x/")),), INVALID, "something else"),
    Case("directory then file", (archive(directory("x/"), file("x")),), INVALID, "something else"),
    Case("entry below a file", (archive(file("x"), file("x/y")),), INVALID, "no directory"),
]

HEADERS = [
    Case("no archive", (b"not a tar archive" * 100,), INVALID, "checksum"),
    Case(
        "wrong checksum",
        (raw(b"x", change=put(148, b"0000001\0"), checksum=False),),
        INVALID,
        "checksum",
    ),
    Case("size is no number", (raw(b"x", size=b"12x\0\0\0\0\0\0\0\0\0") + END,), INVALID, "size"),
    Case("negative size", (raw(b"x", size=b"\xff" * 12) + END,), INVALID, "negative"),
    Case("size of 2^90", (raw(b"x", size=b"\x80" + b"\x7f" * 11) + END,), INVALID, "bytes"),
    Case("pax size", (pax(("size", b"-1")) + raw() + END,), INVALID, "no number"),
    Case("pax owner", (pax(("uid", b"99999999999")) + raw() + END,), INVALID, "owner"),
    Case("pax time", (pax(("mtime", b"nan")) + raw() + END,), INVALID, "no time"),
    Case("pax length", (raw(b"p", b"x", b"99 path=x\n") + raw() + END,), INVALID, "length"),
    Case("pax without length", (raw(b"p", b"x", b"path=x\n") + raw() + END,), INVALID, "length"),
    Case(
        "pax without end of line", (raw(b"p", b"x", b"9 path=xy") + raw() + END,), INVALID, "length"
    ),
    Case("pax unknown", (pax(("evil", b"1")) + raw() + END,), INVALID, "not known"),
    Case("pax twice", (pax(("path", b"a")) + pax(("path", b"b")) + raw() + END,), INVALID, "two"),
    Case("pax for all", (pax(("path", b"../x"), kind=b"g") + raw() + END,), INVALID, "all entries"),
    Case(
        "pax of a GiB", (raw(b"p", b"x", size=b"10000000000\0") + END,), INVALID, "extended header"
    ),
    Case("pax without entry", (pax(("path", b"x")) + END,), INVALID, "without its entry"),
    Case("two long names", (long_name(b"a") + long_name(b"b") + raw() + END,), INVALID, "two"),
    Case("entry after one empty block", (bytes(512) + raw() + END,), INVALID, "empty block"),
    Case("cut off in a header", (archive(file("x"))[:300],), INVALID, "cut off"),
    Case("cut off in a file", (archive(file("x", b"d" * 5000))[:2000],), INVALID, "cut off"),
    Case(
        "cut off in gzip",
        (gzip.compress(archive(file("x", bytes(range(256)) * 99)))[:-20],),
        INVALID,
        "cut off",
        stored=True,
    ),
    Case(
        "damaged gzip",
        (gzip.compress(archive(file("x")))[:-8] + bytes(8),),
        INVALID,
        "gzip",
        stored=True,
    ),
    Case(
        "after the gzip data",
        (gzip.compress(archive(file("x"))) + b"evil",),
        INVALID,
        "follows",
        stored=True,
    ),
    Case(
        "cut off in zstd",
        (zstandard.compress(archive(file("x", random.Random(1).randbytes(1 << 18))))[: 1 << 17],),
        INVALID,
        "cut off",
        stored=True,
    ),
    Case(
        "damaged zstd",
        (b"\x28\xb5\x2f\xfd" + b"\x00\x58" + b"\xff" * 600,),
        INVALID,
        "zstd",
        stored=True,
    ),
    Case(
        "zstd window of a GiB",
        (b"\x28\xb5\x2f\xfd" + struct.pack("<BB", 0, (30 - 10) << 3) + bytes(100),),
        INVALID,
        "window",
        stored=True,
    ),
]

BOMBS = [
    Case(
        "announced size",
        (gzip.compress(raw(b"big", size=b"\x80" + struct.pack(">xxxQ", 1 << 50)) + bytes(4096)),),
        UNSAFE,
        "unpack to",
        stored=True,
    ),
    Case("zeros in gzip", (zeros_in_gzip(),), UNSAFE, "unpack to", stored=True, most_bytes=4 << 20),
    Case(
        "zeros in zstd after the end",
        (zstandard.compress(END + bytes(64 << 20)),),
        UNSAFE,
        "unpack to",
        stored=True,
        most_bytes=4 << 20,
    ),
    Case(
        "many files together",
        (archive(*(file(f"f{number}", bytes(1 << 18)) for number in range(20))),),
        UNSAFE,
        "unpack to",
        most_bytes=4 << 20,
    ),
    Case(
        "many layers together",
        tuple(archive(file(f"f{number}", bytes(1 << 20))) for number in range(5)),
        UNSAFE,
        "unpack to",
        most_bytes=4 << 20,
    ),
]

CASES = [*NAMES, *LINKS, *KINDS, *CONTRADICTIONS, *HEADERS, *BOMBS]
