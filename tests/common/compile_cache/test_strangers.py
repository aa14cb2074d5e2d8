"""Entries of others, directories of others: what is not for this process, and what it leaves."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastload_common.cli.main import main
from fastload_common.clock import SystemClock
from fastload_common.compile_cache.key import canonical
from fastload_common.compile_cache.lifecycle import CompileCache, Outcome
from fastload_common.compile_cache.manifest import Limits, decode_manifest
from fastload_common.compile_cache.stores.directory import unsafe_reason
from fastload_common.compile_cache.stores.node import NodeStore
from fastload_common.compile_cache.trust import Keys
from fastload_common.config import Settings
from fastload_common.errors import (
    BundleInvalidError,
    BundleUnfitError,
    BundleUntrustedError,
    ConfigError,
    StoreUnsafeError,
)
from fastload_common.testing.s3_server import S3Server
from fastload_common.units import GIB, MIB
from tests.common.compile_cache.artefacts import FACTORS, package, write_trees

KEY = package({}).manifest.key
STRANGER = 12345

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def other_version(envelope: bytes, keys: Keys | None = None) -> bytes:
    lines = envelope.replace(b"cache 1\n", b"cache 2\n", 1).split(b"\n")
    message = b"\n".join(lines[:2]) + b"\nmore in it\n"
    line = b"unsigned\n"
    if keys is not None:
        made = keys.sign(message)
        line = f"ed25519 {made.key_id} {made.value.hex()}\n".encode()
    return message + line + hashlib.sha256(message + line).hexdigest().encode() + b"\n"


def other_codec(envelope: bytes) -> bytes:
    magic, payload, _ = envelope.split(b"\n", 2)
    changed = json.loads(payload)
    changed["blob"]["codec"] = "lz4"
    body = magic + b"\n" + canonical(changed) + b"\nunsigned\n"
    return body + hashlib.sha256(body).hexdigest().encode() + b"\n"


# Not for this process


def start(settings: Settings, place: Path, *, replace: bool = False) -> Outcome:
    cache = CompileCache.open(settings, SystemClock())
    assert cache is not None
    outcome = cache.restore(FACTORS, {"inductor": place / "there"})
    roots = write_trees(place / "compiled", {"inductor": {"small": b"x"}})
    cache.publish(outcome, roots, replace=replace)
    assert cache.close(60)
    return outcome


@pytest.mark.parametrize("why", ["bound", "version", "codec"])
def test_a_good_entry_of_others_stays_where_it_is(
    tmp_path: Path, s3_server: S3Server, s3_bucket: str, why: str
) -> None:
    node, uri = tmp_path / "cache", f"s3://{s3_bucket}/p"
    made = package(write_trees(tmp_path / "large", {"inductor": {"zeros": bytes(2 * MIB)}}))
    envelope = {"version": other_version, "codec": other_codec}.get(why, bytes)(made.envelope)
    assert NodeStore(node, max_bytes=GIB).put(replace(made, envelope=envelope)).stored
    name = f"p/v1/manifests/{KEY}"
    s3_server.client().put_object(Bucket=s3_bucket, Key=name, Body=envelope)
    settings = Settings(
        compile_cache=(str(node), uri),
        compile_cache_max_bytes=MIB if why == "bound" else GIB,
        compile_cache_deadline_s=60.0,
    )
    for number in range(2):
        outcome = start(settings, tmp_path / f"start-{number}", replace=True)
        assert outcome.status == "miss"
        assert outcome.reason.count("BundleUnfitError") == 2
        assert outcome.published == dict.fromkeys((str(node), uri), "it is there already")
    assert (node / "v1/entries" / KEY / "manifest").read_bytes() == envelope
    assert not (node / "v1/quarantine").exists()
    kept = s3_server.client().get_object(Bucket=s3_bucket, Key=name)["Body"].read()
    assert kept == envelope


def test_damage_is_no_other_version_and_a_signature_is_asked_of_each(
    tmp_path: Path, keys: Keys
) -> None:
    envelope = package(write_trees(tmp_path)).envelope
    with pytest.raises(BundleInvalidError, match="damaged"):
        decode_manifest(envelope.replace(b"cache 1\n", b"cache 3\n", 1))
    with pytest.raises(BundleUntrustedError):
        decode_manifest(other_version(envelope), keys=keys)
    with pytest.raises(BundleUnfitError):
        decode_manifest(other_version(envelope, keys), keys=keys)


@pytest.mark.parametrize(
    "limits", [Limits(content_bytes=99), Limits(files=1), Limits(blob_bytes=99)], ids=repr
)
def test_more_than_the_limits_is_unfit(tmp_path: Path, limits: Limits) -> None:
    envelope = package(write_trees(tmp_path)).envelope
    with pytest.raises(BundleUnfitError):
        decode_manifest(envelope, limits=limits)


# Drafts and clocks


class Wrong(SystemClock):
    """A clock that is off by days."""

    def wall_s(self) -> float:
        return super().wall_s() + 3 * 86400


@pytest.mark.parametrize("locks", [True, False])
def test_c09_clocks_a_living_writers_draft_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    store = NodeStore(tmp_path / "cache", max_bytes=GIB, clock=Wrong())
    store.put(package(write_trees(tmp_path / "a")))
    monkeypatch.setattr(
        "fastload_common.compile_cache.stores.node.is_network_mount", lambda _: not locks
    )
    store = NodeStore(tmp_path / "cache", max_bytes=GIB, clock=Wrong())
    alive = tmp_path / "cache/v1/drafts/alive"
    alive.mkdir()
    descriptor = os.open(alive, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        store.collect()
        assert alive.exists() is locks, "only where no lock can be asked does the age decide"
    finally:
        os.close(descriptor)
    store.collect()
    assert not alive.exists()


# Directories of others


@needs_root
@pytest.mark.parametrize("name", ["v1", "v1/drafts", "v1/entries", "v1/quarantine"])
def test_nothing_is_written_or_removed_below_a_strangers_directory(
    tmp_path: Path, keys: Keys, name: str
) -> None:
    """He may put a link in its place at any time."""
    root = tmp_path / "cache"
    made = package(write_trees(tmp_path / "a"), keys=keys)
    store = NodeStore(root, max_bytes=GIB, keys=keys)
    root.mkdir()
    root.chmod(0o1777)
    assert store.put(made).stored
    old = root / "v1/drafts/old"
    old.mkdir()
    os.utime(old, (1, 1))
    os.chown(root / name, STRANGER, STRANGER)
    with pytest.raises(StoreUnsafeError, match=f"user {STRANGER}"):
        store.put(made)
    with pytest.raises(StoreUnsafeError, match="nothing is written here"):
        store.collect()
    assert not store.reject(KEY)
    assert old.exists()
    entry = store.get(KEY)
    assert entry is not None, "it is signed: whose directory it lies in does not matter"
    entry.blob.close()
    forced = NodeStore(root, max_bytes=GIB, keys=keys, forced=True)
    assert forced.put(made).reason == "it is there already"
    os.chown(root, STRANGER, STRANGER)  # who owns what is above may do as he likes anyway
    store.collect()
    assert not old.exists()


def test_all_that_is_written_below_has_the_modes_of_what_is_above(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o1777)
    NodeStore(root, max_bytes=GIB, forced=True).put(package(write_trees(tmp_path / "a")))
    for name in ("v1", "v1/entries", "v1/drafts", "v1/locks", "v1/quarantine"):
        assert (root / name).stat().st_mode & 0o7777 == 0o1777
    assert (root / "v1/entries" / KEY).stat().st_mode & 0o7777 == 0o755


@needs_root
def test_c16_a_directory_above_may_be_a_groups_but_no_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "parent"
    (parent / "cache").mkdir(parents=True)
    parent.chmod(0o2775)  # as Debian's /var/local
    assert unsafe_reason(parent / "cache") is None
    os.chown(parent, STRANGER, 0)
    parent.chmod(0o1755)
    assert unsafe_reason(parent / "cache") == f"{parent}, above it, belongs to user {STRANGER}"

    real = open

    def opened(path: Any, *more: Any, **named: Any) -> Any:
        if path == "/proc/self/uid_map":
            return io.StringIO("         0       1000          1\n")
        return real(path, *more, **named)

    monkeypatch.setattr("builtins.open", opened)
    assert unsafe_reason(parent / "cache") is None, "in a user namespace that may well be root"


# What the commands say


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["cache", *arguments])
    return code, capsys.readouterr().out


def test_the_commands_show_what_is_not_trusted(
    tmp_path: Path,
    key_files: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    s3_bucket: str,
) -> None:
    roots = write_trees(tmp_path / "a")
    node = tmp_path / "cache"
    other = {**FACTORS, "layout.tensor": 8}
    third = {**FACTORS, "layout.tensor": 4}
    store = NodeStore(node, max_bytes=GIB)
    store.put(package(roots))
    store.put(package(roots, other))
    made = package(roots, third)
    store.put(made)
    manifest = node / "v1/entries" / made.manifest.key / "manifest"
    manifest.write_bytes(made.envelope[:-1])
    monkeypatch.setenv("FASTLOAD_COMPILE_CACHE", f"{node},s3://{s3_bucket}/p")
    code, out = run(capsys, "list")
    assert (code, out.count("not trusted"), out.count("damaged")) == (0, 0, 1)
    assert run(capsys, "push")[1].count("copied") == 2
    monkeypatch.setenv("FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE", str(key_files[1]))
    code, out = run(capsys, "list")
    assert (code, out.count("not trusted"), out.count("damaged")) == (0, 4, 1)
    code, out = run(capsys, "list", "--json")
    assert {row["fault"] for row in json.loads(out)} == {"not trusted", "damaged"}
    code, out = run(capsys, "show", KEY)
    assert code == 0
    assert "not trusted" in out
    assert "hardware.cpu_isa" in out
    assert run(capsys, "show", made.manifest.key)[0] == 2
    assert run(capsys, "verify", KEY)[0] == 1


def test_verify_finds_nothing_wrong_with_what_is_for_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = package(write_trees(tmp_path / "a", {"inductor": {"zeros": bytes(2 * MIB)}}))
    NodeStore(tmp_path / "cache", max_bytes=GIB).put(made)
    monkeypatch.setenv("FASTLOAD_COMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FASTLOAD_COMPILE_CACHE_MAX_BYTES", "1MiB")
    code, out = run(capsys, "verify")
    assert code == 0
    assert "would unpack to 2.0 MiB" in out
    assert "not for this process" in run(capsys, "list")[1]


@pytest.mark.parametrize(
    "place",
    [
        "s3://b/p?X-Amz-Signature=SECRET",
        "S3://b/p?X-Amz-Signature=SECRET",
        "s3:///p?X-Amz-Signature=SECRET",
        "s3://b/p#SECRET",
        "https://h/p?X-Amz-Signature=SECRET",
    ],
)
def test_a_signed_url_is_no_prefix_and_is_not_shown(place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CompileCache.open(Settings(compile_cache=(place,)))
    assert "SECRET" not in f"{caught.value} {caught.value!r}"
