"""The archive: what goes in comes out bit for bit, the same bytes each time, nothing else does."""

from __future__ import annotations

import hashlib
import io
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fastload_common.compile_cache.bundle import Packing, misfit, pack
from fastload_common.compile_cache.key import canonical
from fastload_common.compile_cache.manifest import (
    FileRecord,
    Limits,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from fastload_common.compile_cache.trust import Keys, load_keys
from fastload_common.compile_cache.unpack import unpack
from fastload_common.errors import BundleInvalidError, BundleUntrustedError, ConfigError
from tests.common.compile_cache.artefacts import (
    FACTORS,
    TREES,
    Tree,
    package,
    read_trees,
    write_keys,
    write_trees,
)


def destinations(directory: Path, *names: str) -> dict[str, Path]:
    return {name: directory / name for name in names or TREES}


def test_trees_come_back_with_bytes_modes_and_times(tmp_path: Path) -> None:
    roots = write_trees(tmp_path / "a")
    (roots["inductor"] / "nothing" / "in" / "it").mkdir(parents=True)
    made = package(roots)
    there = destinations(tmp_path / "b")
    unpack(decode_manifest(made.envelope), made.blob, there)
    assert read_trees(there) == TREES
    assert (there["inductor"] / "nothing/in/it").is_dir()
    for record in made.manifest.files:
        before = (roots[record.root] / record.name).stat()
        after = (there[record.root] / record.name).stat()
        assert (before.st_mode, before.st_mtime_ns) == (after.st_mode, after.st_mtime_ns)
    assert os.listdir(tmp_path / "b") == sorted(TREES), "a draft was left"


PART = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=8
).filter(lambda part: part not in (".", "..") and not re.search(r"lock$|tmp|swp$|^\.nfs", part))
TREE = st.dictionaries(
    st.lists(PART, min_size=1, max_size=3).map("/".join), st.binary(max_size=200), max_size=8
)


def without_clashes(tree: Tree) -> Tree:
    """No file is the directory of another one."""
    return {n: d for n, d in tree.items() if not any(other.startswith(f"{n}/") for other in tree)}


@hypothesis_settings(max_examples=40)
@given(TREE.map(without_clashes), TREE.map(without_clashes))
def test_random_trees_come_back_and_pack_alike(
    tmp_path_factory: pytest.TempPathFactory, one: Tree, other: Tree
) -> None:
    directory = tmp_path_factory.mktemp("trees")
    trees = {"one": one, "other": other}
    made = package(write_trees(directory / "a", trees))
    again = package(write_trees(directory / "again", trees))
    assert made.blob.read() == again.blob.read()
    assert made.envelope == again.envelope
    there = destinations(directory / "b", "one", "other")
    unpack(decode_manifest(made.envelope), made.blob, there)
    assert read_trees(there) == trees


def test_links_inside_become_files_and_links_out_are_refused(tmp_path: Path) -> None:
    roots = write_trees(tmp_path / "a")
    (roots["triton"] / "same").symlink_to("k/kernel.json")
    names = [f.name for f in package(roots).manifest.files if f.root == "triton"]
    assert names == ["k/kernel.cubin", "k/kernel.json", "same"]
    (roots["triton"] / "out").symlink_to("../inductor/empty")
    with pytest.raises(BundleInvalidError, match="leads out"):
        package(roots)


def test_what_is_no_artefact_is_left_out(tmp_path: Path) -> None:
    roots = write_trees(tmp_path / "a", {"r": {"x.lock": b"", "x.tmp": b"1", "x": b"2"}})
    os.mkfifo(roots["r"] / "pipe")
    assert [f.name for f in package(roots).manifest.files] == ["x"]


def test_a_file_that_grows_while_it_is_packed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = write_trees(tmp_path / "a", {"r": {"x": b"1"}})
    real = os.fstat

    def grown(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        (roots["r"] / "x").write_bytes(b"12")
        return found

    monkeypatch.setattr("fastload_common.compile_cache.bundle.os.fstat", grown)
    with pytest.raises(BundleInvalidError, match="changed while it was packed"):
        package(roots)


def test_paths_inside_of_files_bind_a_bundle(tmp_path: Path) -> None:
    roots = write_trees(tmp_path / "a", {"r": {"x": b"", "y": b""}})
    (roots["r"] / "x").write_bytes(f"import '{roots['r']}/y'".encode())
    (roots["r"] / "y").write_bytes(f"{roots['r']}-other".encode())
    manifest = package(roots).manifest
    assert manifest.bound == {"r": str(roots["r"])}
    assert misfit(manifest, roots) is None
    told = misfit(manifest, {"r": tmp_path / "b"})
    assert told is not None
    assert str(roots["r"]) in told
    harmless = Packing(harmless=(re.compile(rb"import '[^']*'"),))
    assert package(roots, how=harmless).manifest.bound == {}
    places = Packing(places={"python": tmp_path / "a"}, harmless=harmless.harmless)
    bound = package(roots, how=places).manifest
    assert misfit(bound, roots) is not None
    assert misfit(bound, {**roots, "python": tmp_path / "a"}) is None


def test_a_root_behind_a_link_is_seen_by_both_names(tmp_path: Path) -> None:
    write_trees(tmp_path / "real", {"r": {}})
    (tmp_path / "link").symlink_to("real")
    roots = {"r": tmp_path / "link" / "r"}
    (tmp_path / "real/r/x").write_bytes(f"{tmp_path}/real/r/x".encode())
    manifest = package(roots).manifest
    assert list(manifest.bound.values()) == [f"{tmp_path}/real/r"]
    assert misfit(manifest, roots) is None
    assert misfit(manifest, {"r": tmp_path / "real" / "r2"}) is not None


def test_a_missing_root_is_a_misfit(tmp_path: Path) -> None:
    told = misfit(package(write_trees(tmp_path)).manifest, {"inductor": tmp_path})
    assert told is not None
    assert "triton" in told


def test_more_than_the_limits_is_not_packed(tmp_path: Path) -> None:
    roots = write_trees(tmp_path / "a")
    for limits in (Limits(content_bytes=1000), Limits(files=2), Limits(blob_bytes=100)):
        with pytest.raises(BundleInvalidError):
            pack(FACTORS, roots, io.BytesIO(), Packing(limits=limits))


# Reading what somebody else wrote


def resealed(envelope: bytes, change: Any) -> bytes:
    """A manifest with another content and a digest that fits it."""
    manifest = change(decode_manifest(envelope))
    return encode_manifest(manifest, None)


RECORD = FileRecord("r", "x", 1, hashlib.sha256(b"1").hexdigest(), 0o644, 0)


@pytest.mark.parametrize(
    "record",
    [
        replace(RECORD, name=name)
        for name in (
            "../x",
            "a/../../x",
            "/etc/x",
            "",
            ".",
            "a//b",
            "a/",
            "a\0b",
            "a/./b",
            "x" * 300,
        )
    ]
    + [replace(RECORD, mode=mode) for mode in (0o4755, 0o2755, 0o777, 0o100644, 0o120777)]
    + [
        replace(RECORD, size_bytes=-1),
        replace(RECORD, sha256="A" * 64),
        replace(RECORD, root="other"),
        replace(RECORD, mtime_ns=1 << 70),
    ],
    ids=repr,
)
def test_what_a_file_may_not_be_is_refused(tmp_path: Path, record: FileRecord) -> None:
    made = package(write_trees(tmp_path / "a", {"r": {"x": b"1"}}))
    hostile = resealed(made.envelope, lambda m: replace(m, files=(record,)))
    with pytest.raises(BundleInvalidError):
        decode_manifest(hostile)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: replace(m, files=(RECORD, RECORD)),
        lambda m: replace(m, files=(RECORD, replace(RECORD, name="x/y"))),
        lambda m: replace(m, directories=(("r", "x"),)),
        lambda m: replace(m, directories=(("r", ".."),)),
        lambda m: replace(m, roots=("../r",)),
        lambda m: replace(m, roots=("r", "r")),
        lambda m: replace(m, key="0" * 64),
        lambda m: replace(m, factors={**m.factors, "engine.version": "9"}),
        lambda m: replace(m, blob_sha256="../../x"),
        lambda m: replace(m, bound={"r": 7}),
    ],
    ids=str,
)
def test_what_a_manifest_may_not_be_is_refused(tmp_path: Path, change: Any) -> None:
    made = package(write_trees(tmp_path / "a", {"r": {"x": b"1"}}))
    with pytest.raises(BundleInvalidError):
        decode_manifest(resealed(made.envelope, change))


def test_a_manifest_in_another_form_is_refused(tmp_path: Path) -> None:
    made = package(write_trees(tmp_path / "a"))
    lines = made.envelope.split(b"\n")
    body = b"\n".join([lines[0], lines[1].replace(b'"key"', b' "key"', 1), lines[2], b""])
    sealed = body + hashlib.sha256(body).hexdigest().encode() + b"\n"
    with pytest.raises(BundleInvalidError, match="one form"):
        decode_manifest(sealed)
    for payload in (b"[]", b"{}", b"1", b"[" * 100_000, canonical({"form": 1})):
        body = b"\n".join([lines[0], payload, lines[2], b""])
        sealed = body + hashlib.sha256(body).hexdigest().encode() + b"\n"
        with pytest.raises(BundleInvalidError):
            decode_manifest(sealed)


def test_the_manifest_of_another_key_is_refused(tmp_path: Path) -> None:
    made = package(write_trees(tmp_path / "a"))
    with pytest.raises(BundleInvalidError, match="another key"):
        decode_manifest(made.envelope, key="0" * 64)


@pytest.mark.parametrize("claimed_bytes", [0, 10, 5000])
def test_an_archive_that_is_longer_or_shorter_than_told_puts_nothing_into_place(
    tmp_path: Path, claimed_bytes: int
) -> None:
    made = package(write_trees(tmp_path / "a", {"r": {"x": bytes(1000), "y": b"1"}}))
    files = tuple(
        replace(f, size_bytes=claimed_bytes) if f.name == "x" else f for f in made.manifest.files
    )
    with pytest.raises(BundleInvalidError):
        unpack(replace(made.manifest, files=files), made.blob, {"r": tmp_path / "b" / "r"})
    assert os.listdir(tmp_path / "b") == []


# Damage: every bit of the manifest, every class of byte of the archive


def bits_of(data: bytes) -> list[tuple[int, int]]:
    """Every bit of the ends, of what separates lines, and one of every 7th byte between."""
    ends = {*range(min(80, len(data))), *range(max(0, len(data) - 220), len(data))}
    lines = {n for n, byte in enumerate(data) if byte == 10}
    near = {n for line in lines for n in (line - 1, line, line + 1) if 0 <= n < len(data)}
    full = [(n, bit) for n in sorted(ends | near) for bit in range(8)]
    return full + [(n, n % 8) for n in range(0, len(data), 7) if n not in ends | near]


def flipped(data: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return bytes(changed)


@pytest.mark.parametrize("signed", [False, True])
def test_every_flipped_bit_and_cut_of_a_manifest_is_seen(
    tmp_path: Path, keys: Keys, signed: bool
) -> None:
    envelope = package(write_trees(tmp_path / "a"), keys=keys if signed else None).envelope
    assert decode_manifest(envelope, keys=keys if signed else None)
    for position, bit in bits_of(envelope):
        with pytest.raises(BundleInvalidError):
            decode_manifest(flipped(envelope, position, bit))
    for length in range(len(envelope)):
        with pytest.raises(BundleInvalidError):
            decode_manifest(envelope[:length])
    for more in (b"\n", b"x", envelope):
        with pytest.raises(BundleInvalidError):
            decode_manifest(envelope + more)


def test_every_flipped_bit_and_cut_of_an_archive_is_seen(tmp_path: Path) -> None:
    tree = {"r": {"x.py": b"print()\n" * 9, "y.so": bytes(range(256)), "z": b""}}
    made = package(write_trees(tmp_path / "a", tree))
    data = made.blob.read()
    there = {"r": tmp_path / "b" / "r"}
    wrong = [flipped(data, position, bit) for position in range(len(data)) for bit in range(8)]
    wrong += [data[:length] for length in range(len(data))] + [data + b"\0", data + data]
    for blob in wrong:
        with pytest.raises(BundleInvalidError):
            unpack(made.manifest, io.BytesIO(blob), there)
    assert not (tmp_path / "b").exists()
    unpack(made.manifest, io.BytesIO(data), there)


def test_flips_behind_the_archives_digest_are_seen_by_each_files_own(tmp_path: Path) -> None:
    """An archive that fits its digest, by somebody who can write both, but not the manifest."""
    made = package(write_trees(tmp_path / "a", {"r": {"x": b"one"}}))
    other = package(write_trees(tmp_path / "c", {"r": {"x": b"two"}}))
    digest, size_bytes = other.manifest.blob_sha256, other.manifest.blob_bytes
    mixed = replace(made.manifest, blob_sha256=digest, blob_bytes=size_bytes)
    with pytest.raises(BundleInvalidError, match="not what its digest says"):
        unpack(mixed, other.blob, {"r": tmp_path / "b" / "r"})


# What stands at the destination already


def test_what_is_equal_is_left_alone_and_what_differs_is_replaced(tmp_path: Path) -> None:
    made = package(write_trees(tmp_path / "a"))
    there = write_trees(tmp_path / "b")
    torn, kept = there["inductor"] / "ab/cab.so", there["inductor"] / "ab/cab.py"
    own = there["triton"] / "k" / "own"
    torn.write_bytes(b"torn")
    own.write_bytes(b"mine")
    before = kept.stat().st_ino
    unpack(made.manifest, made.blob, there)
    assert kept.stat().st_ino == before
    assert own.read_bytes() == b"mine"
    own.unlink()
    assert read_trees(there) == TREES


def test_a_link_at_the_destination_is_not_followed(tmp_path: Path) -> None:
    made = package(write_trees(tmp_path / "a"))
    there = destinations(tmp_path / "b")
    there["inductor"].mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (there["inductor"] / "ab").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="no directory"):
        unpack(made.manifest, made.blob, there)
    assert os.listdir(tmp_path / "elsewhere") == []


# Signatures


def test_only_what_is_signed_with_the_key_is_taken(
    tmp_path: Path, keys: Keys, key_files: tuple[Path, Path]
) -> None:
    public = load_keys(key_files[1])
    assert public is not None
    assert not public.may_sign
    roots = write_trees(tmp_path / "a")
    signed, unsigned = package(roots, keys=keys).envelope, package(roots).envelope
    assert decode_manifest(signed, keys=public).signature is not None
    assert decode_manifest(signed).key == decode_manifest(unsigned).key
    with pytest.raises(BundleUntrustedError, match="not signed"):
        decode_manifest(unsigned, keys=public)
    with pytest.raises(BundleUntrustedError, match="public key"):
        package(roots, keys=public)
    other = load_keys(write_keys(tmp_path)[0])
    with pytest.raises(BundleUntrustedError, match=keys.key_id):
        decode_manifest(signed, keys=other)


def test_a_signature_does_not_fit_another_manifest(tmp_path: Path, keys: Keys) -> None:
    one = package(write_trees(tmp_path / "a"), keys=keys).envelope.split(b"\n")
    other = package(write_trees(tmp_path / "b", {"r": {}}), keys=keys).envelope.split(b"\n")
    body = b"\n".join([other[0], other[1], one[2], b""])
    mixed = body + hashlib.sha256(body).hexdigest().encode() + b"\n"
    with pytest.raises(BundleUntrustedError, match="not that of its content"):
        decode_manifest(mixed, keys=keys)
    assert isinstance(decode_manifest(mixed), Manifest), "without a key nobody looks"


@pytest.mark.parametrize("content", [b"", b"not a key", b"\0" * 100])
def test_a_key_file_that_holds_no_key_is_told_without_its_content(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "key.pem"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="no Ed25519 key") as caught:
        load_keys(file)
    assert "not a key" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        load_keys(tmp_path / "absent")
    assert load_keys(None) is None
