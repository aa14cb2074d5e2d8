"""Files in uncompressed archives: found by their headers, with Python's own reader as the judge."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.errors import (
    ArchiveInvalidError,
    ArchiveUnsafeError,
    FastloadError,
    SourceError,
)
from fastload_common.source.oci_tar import EntryKind, TarEntry, read_tar_index
from fastload_common.source.oci_tree import FileAt, FileTree
from fastload_common.units import KIB, MIB

WHAT = "the layer sha256:x of oci://r/m:v"
Member = tuple[str, bytes | str | None]  # a name with bytes, a link's target, or a folder


class Archive:
    """Bytes that are read by range, and what was read of them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, end: int) -> bytes:
        self.reads.append((start, end))
        return self.data[start:end]

    def index(self) -> list[TarEntry]:
        return read_tar_index(self.read, len(self.data), WHAT)

    @property
    def read_bytes(self) -> int:
        return sum(end - start for start, end in self.reads)


def tar(*members: Member, form: int = tarfile.PAX_FORMAT, **more: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, **more) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type = tarfile.LNKTYPE if content.startswith("=") else tarfile.SYMTYPE
                info.linkname = content.removeprefix("=")
            else:
                info.size = len(content)
            body = content if isinstance(content, bytes) else b""
            archive.addfile(info, io.BytesIO(body))
    return out.getvalue()


def tree(*layers: bytes) -> dict[str, bytes]:
    """The files of these layers together, read where the index says that they are."""
    found = FileTree("oci://r/m:v")
    for number, data in enumerate(layers):
        found.add_layer(str(number), Archive(data).index())
    files = found.files("")
    assert files is not None
    return {key: content(layers, file) for key, file in files.items()}


def content(layers: tuple[bytes, ...], file: FileAt) -> bytes:
    assert file.start is not None
    return layers[int(file.digest)][file.start : file.start + file.size_bytes]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_the_forms_of_archives(form: int) -> None:
    long = "/".join(["folder" * 8] * (2 if form == tarfile.USTAR_FORMAT else 9)) + "/file"
    members: list[Member] = [
        ("./config.json", b"{}"),
        ("empty", b""),
        ("folder", None),
        (long, b"long name"),
        ("aligned", b"x" * 1024),
        ("last", b"y" * 700),
    ]
    if form != tarfile.USTAR_FORMAT:
        members.append(("ünïcödé", b"u"))
    wanted = {name.removeprefix("./"): data for name, data in members if isinstance(data, bytes)}
    assert tree(tar(*members, form=form)) == wanted


def test_a_size_that_octal_digits_cannot_hold() -> None:
    """GNU's base 256 and pax's text, in an archive of which only the headers are there."""
    huge_bytes = 9 << 30
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("huge")
        info.size = huge_bytes
        head = info.tobuf(form)
        tail = tarfile.TarInfo("small")
        tail.size = 3
        after = tail.tobuf(form) + b"abc".ljust(512, b"\0") + bytes(1024)

        def read(start: int, end: int, head: bytes = head, after: bytes = after) -> bytes:
            data = bytearray(end - start)
            for begin, part in ((0, head), (len(head) + huge_bytes, after)):
                first, last = max(start, begin), min(end, begin + len(part))
                if first < last:
                    data[first - start : last - start] = part[first - begin : last - begin]
            return bytes(data)

        huge, small = read_tar_index(read, len(head) + huge_bytes + len(after), WHAT)
        assert (huge.start, huge.size_bytes) == (len(head), huge_bytes)
        assert small.path == ("small",)
        assert read(small.start, small.start + 3) == b"abc"


def test_data_is_not_read() -> None:
    shards: list[Member] = [(f"model-{i}.safetensors", bytes(4 * MIB)) for i in range(4)]
    small: list[Member] = [(f"small-{i}", b"x" * 300) for i in range(200)]
    archive = Archive(tar(*shards, *small))
    assert len(archive.index()) == 204
    assert archive.read_bytes < 300 * KIB
    # Small files are read together, large ones are stepped over.
    assert len(archive.reads) < 15


def test_common_pax_fields_hold_for_all() -> None:
    data = tar(("a", b"1"), ("b", b"2"), pax_headers={"comment": "x" * 2000})
    assert tree(data) == {"a": b"1", "b": b"2"}


def test_what_is_no_file_has_no_bytes() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"device-{kind.decode()}")
            info.type = kind
            archive.addfile(info)
        info = tarfile.TarInfo("file")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"ok"))
    kinds = [entry.kind for entry in Archive(out.getvalue()).index()]
    assert kinds == [EntryKind.OTHER] * 3 + [EntryKind.FILE]
    assert tree(out.getvalue()) == {"file": b"ok"}


_NAMES = st.lists(st.sampled_from(["a", "b", "c", "long" * 30]), min_size=1, max_size=3)


@given(st.lists(st.tuples(_NAMES.map("/".join), st.binary(max_size=1500)), max_size=8))
def test_any_archive_gives_what_pythons_reader_gives(members: list[tuple[str, bytes]]) -> None:
    data = tar(*members)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        wanted = []
        for info in archive:
            file = archive.extractfile(info)
            assert file is not None
            wanted.append((info.name, file.read()))
    found = [
        ("/".join(entry.path), data[entry.start : entry.start + entry.size_bytes])
        for entry in Archive(data).index()
    ]
    assert found == wanted


@given(st.data())
def test_any_damage_is_refused_or_stays_inside(data: st.DataObject) -> None:
    good = bytearray(tar(("a" * 150, b"1" * 600), ("b", "a"), ("c", b"2")))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    archive = Archive(bytes(good[:cut]))
    entries: list[TarEntry] = []
    with contextlib.suppress(SourceError, ArchiveInvalidError, ArchiveUnsafeError):
        entries = archive.index()
    for entry in entries:
        assert entry.start >= 0
        assert entry.start + entry.size_bytes <= cut
        assert ".." not in entry.path


def patched(offset: int, new: bytes, *, sums: bool = True) -> bytes:
    """An archive with one file, one field of its header changed."""
    data = bytearray(tar(("name", b"data"), form=tarfile.USTAR_FORMAT))
    data[offset : offset + len(new)] = new
    if sums:
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def pax(record: bytes) -> bytes:
    info = tarfile.TarInfo("pax")
    info.type = tarfile.XHDTYPE
    info.size = len(record)
    head = info.tobuf(tarfile.USTAR_FORMAT)
    return head + record.ljust(-(-len(record) // 512) * 512, b"\0") + patched(0, b"name")


HOSTILE: dict[str, tuple[bytes, str]] = {
    "no archive": (b"safetensors" * 200, "no tar"),
    "gzip": (b"\x1f\x8b\x08" + bytes(600), "compressed with gzip"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(600), "compressed with zstd"),
    "bzip2": (b"BZh9" + bytes(600), "compressed with bzip2"),
    "xz": (b"\xfd7zXZ\0" + bytes(600), "compressed with xz"),
    "wrong sum": (patched(0, b"other", sums=False), "no tar"),
    "sum of letters": (patched(148, b"letters\0", sums=False), "no tar"),
    "up": (patched(0, b"../etc/passwd\0"), "outside"),
    "up inside": (patched(0, b"a/../../b\0"), "outside"),
    "size of letters": (patched(124, b"zzzzzzzzzzz\0"), "damaged size"),
    "size negative": (patched(124, b"\xff" * 12), "negative"),
    "size beyond the archive": (patched(124, b"77777777777\0"), "larger than itself"),
    "size past the end": (patched(124, b"00000023001\0"), "in the middle of a file"),
    "name endless": (tar(("n/" * 3000 + "x", b"")), "longer than any"),
    "sparse": (patched(156, b"S"), "sparse"),
    "up alone": (patched(0, b"..\0"), "outside"),
    "absolute": (patched(0, b"/etc/passwd\0"), "absolute name"),
    "absolute by pax": (pax(b"16 path=/models\n"), "absolute name"),
    "NUL": (pax(b"12 path=a\0b\n"), "NUL"),
    "cut": (tar(("a", b"x" * 2000))[:2200], "in the middle of a file"),
    "cut in the first header": (tar(("a", b"x"))[:300], "within a header"),
    "cut in a later header": (tar(("a", b"x"), ("b", b"y"))[:1324], "within a header"),
    "pax alone": (pax(b"9 path=x\n")[:1024], "without its entry"),
    "pax before the end": (pax(b"9 path=x\n")[:1024] + bytes(1024), "without its entry"),
    "pax without length": (pax(b"path=x\n"), "extended header"),
    "pax too long": (pax(b"999 path=x\n"), "extended header"),
    "pax too short": (pax(b"3 path=x\n"), "extended header"),
    "pax without value": (pax(b"9 pathx\n"), "extended header"),
    "pax zero": (pax(b"0 path=x\n"), "extended header"),
    "pax up": (pax(b"14 path=../../x\n".replace(b"14", b"16")), "outside"),
    "pax size of letters": (pax(b"13 size=many\n"), "damaged size"),
    "pax size beyond": (pax(b"21 size=999999999999\n"), "in the middle of a file"),
    "pax sparse": (pax(b"22 GNU.sparse.major=1\n"), "sparse"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_refused_by_name(name: str) -> None:
    data, says = HOSTILE[name]
    with pytest.raises(FastloadError, match=says) as caught:
        Archive(data).index()
    # As `fastload pull` has it, but for what cannot be read by range.
    kind: type[FastloadError] = ArchiveInvalidError
    if says in ("outside", "absolute name"):
        kind = ArchiveUnsafeError
    elif says == "sparse" or says.startswith("compressed"):
        kind = SourceError
    assert type(caught.value) is kind
    assert WHAT in str(caught.value)


def test_headers_are_not_taken_without_end() -> None:
    info = tarfile.TarInfo("x")
    info.type = tarfile.XHDTYPE
    info.size = 2 * MIB
    with pytest.raises(ArchiveInvalidError, match="header of 2097152 bytes"):
        Archive(info.tobuf(tarfile.USTAR_FORMAT) + bytes(3 * MIB)).index()


def test_an_archive_may_end_without_a_mark_where_an_entry_ends() -> None:
    data = tar(("a", b"x" * 512), ("b", b"y"))
    assert tree(data[:2048]) == {"a": b"x" * 512, "b": b"y"}
    assert tree(data[:1537]) == {"a": b"x" * 512, "b": b"y"}  # nor with its padding


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("x", b"1"), ("x", b"2")], "twice"),
        ([("a/x", b"1"), ("./a//x", b"2")], "twice"),
        ([("x", b"1"), ("x", "y")], "twice"),
        ([("y", b"1"), ("x", "=y"), ("x", "=y")], "twice"),
        ([("x", b"1"), ("x", None)], "something else"),
        ([("x", None), ("x", b"1")], "something else"),
        ([("x/y", b"1"), ("x", b"1")], "something else"),
        ([("x", b"1"), ("x/y/z", b"1")], "below what is no folder"),
    ],
)
def test_entries_that_contradict_each_other(members: list[Any], says: str) -> None:
    with pytest.raises(ArchiveInvalidError, match=says) as caught:
        tree(tar(*members))
    assert "oci://r/m:v" in str(caught.value)


def test_folders_may_stand_twice() -> None:
    data = tar(("a/x", b"1"), ("a", None), ("a", None), ("a/y", b"2"))
    assert tree(data) == {"a/x": b"1", "a/y": b"2"}


# Layers over each other


def test_what_is_above_counts() -> None:
    below = tar(("a/x", b"old"), ("a/y", b"y"), ("b", b"file"), ("c/d", b"inside"))
    above = tar(("a/x", b"new"), ("b/now", b"a folder"), ("c", b"a file"))
    assert tree(below, above) == {
        "a/x": b"new",
        "a/y": b"y",
        "b/now": b"a folder",
        "c": b"a file",
    }


def test_whiteouts() -> None:
    below = tar(("a/x", b"1"), ("a/y", b"2"), ("b/c/z", b"3"), ("d", b"4"))
    above = tar(("a/.wh.x", b""), ("b/.wh.c", b""), (".wh.d", b""), (".wh.nothing", b""))
    assert tree(below, above) == {"a/y": b"2"}


def test_an_opaque_folder_hides_what_is_below_it_and_not_what_is_beside_it() -> None:
    """Also where the whiteout comes after what its own layer has."""
    below = tar(("a/x", b"1"), ("a/b/y", b"2"), ("c", b"3"))
    above = tar(("a/new", b"4"), ("a/.wh..wh..opq", b""))
    assert tree(below, above) == {"a/new": b"4", "c": b"3"}
    assert tree(below, tar((".wh..wh..opq", b""))) == {}


def test_a_whiteout_and_a_file_of_one_layer() -> None:
    assert tree(tar(("a", b"old")), tar(("a", b"new"), (".wh.a", b""))) == {"a": b"new"}


def test_links() -> None:
    data = tar(
        ("blobs/1", b"weights"),
        ("snap/model", "../blobs/1"),
        ("snap/absolute", "/blobs/1"),
        ("snap/hard", "=blobs/1"),
        ("snap/chain", "model"),
        ("snap/dangling", "nowhere"),
        ("snap/circle", "circle"),
        ("outside", "../../../../etc/passwd"),
    )
    found = tree(data)
    assert found == {
        "blobs/1": b"weights",
        "snap/model": b"weights",
        "snap/absolute": b"weights",
        "snap/hard": b"weights",
        "snap/chain": b"weights",
    }


def test_a_folder_under_another_name() -> None:
    made = FileTree("oci://r/m:v")
    made.add_layer("0", Archive(tar(("v1/m", b"1"), ("current", "v1"))).index())
    assert set(made.files("current") or {}) == {"m"}
    assert set(made.files("") or {}) == {"v1/m"}
    assert made.files("nowhere") is None
    assert made.files("v1/m") is None
    # What a later layer puts there goes where the link leads.
    made.add_layer("1", Archive(tar(("current/n", b"2"))).index())
    assert set(made.files("v1") or {}) == {"m", "n"}


@pytest.mark.parametrize(
    "members",
    [
        [("a", "=nowhere")],
        [("a", "=../../etc/passwd")],
        [("a", "=folder"), ("folder/x", b"")],
        [("a", "b"), ("b", "a"), ("a/file", b"x")],
    ],
)
def test_links_that_lead_nowhere_are_an_error_where_they_are_needed(members: list[Any]) -> None:
    with pytest.raises(SourceError, match="oci://r/m:v"):
        tree(tar(*members))


def test_deep_folders_are_no_recursion() -> None:
    deep: Callable[[int], str] = lambda depth: "/".join(["d"] * depth)  # noqa: E731
    assert tree(tar((deep(2_000), b"x"))) == {deep(2_000): b"x"}
