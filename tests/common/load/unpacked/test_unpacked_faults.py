"""What ends an unpacking, and how it shares the disk with others."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastload_common.config import Settings
from fastload_common.errors import (
    ArchiveUnsafeError,
    ChecksumMismatchError,
    ConfigError,
    FastloadError,
    PullError,
)
from fastload_common.load import unpacked
from fastload_common.load.model_root import open_model_root
from fastload_common.load.unpacked_root import unpacked_root
from fastload_common.testing.scripted_registry import ScriptedRegistry
from tests.common.load.unpacked.unpacked_models import (
    entry,
    entry_root,
    push_image,
    push_model,
    start,
)
from tests.common.pull.images import Entry, archive, directory, file, symlink

# -- what cannot be ---------------------------------------------------------------------------


def test_a_damaged_layer_ends_the_load(
    registry: ScriptedRegistry, files: dict[str, bytes], settings: Settings
) -> None:
    uri = push_model(registry, files)
    digest = next(d for d, data in registry.blobs.items() if data[:2] == b"\x1f\x8b")
    data = registry.blobs[digest]
    registry.blobs[digest] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises((ChecksumMismatchError, PullError)):
        open_model_root(uri, settings)
    assert not (entry(settings) / "complete.json").exists()
    assert not (entry(settings) / "tree").exists()
    registry.blobs[digest] = data
    open_model_root(uri, settings).close()


def test_others_can_put_nothing_there(
    registry: ScriptedRegistry,
    files: dict[str, bytes],
    settings: Settings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = push_model(registry, files)
    open_model_root(uri, settings).close()
    entry(settings).chmod(0o755)
    with pytest.raises(PullError, match="not a directory of this user alone"):
        open_model_root(uri, settings)
    entry(settings).chmod(0o700)
    entry_root(settings).chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by other users"):
        open_model_root(uri, settings)
    entry_root(settings).chmod(0o700)
    # An emptyDir of Kubernetes: the operator names it, and there are no others.
    entry_root(settings).parent.chmod(0o777)
    open_model_root(uri, settings).close()
    assert "can be replaced" in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "home" / "fastload").mkdir(parents=True)
    (tmp_path / "home" / "fastload").chmod(0o777)
    found = unpacked_root(replace(settings, cache_dir=None))
    assert found == tmp_path / f"fastload-{os.geteuid()}" / "unpacked"


HOSTILE: dict[str, list[Entry]] = {
    "set-id": [file("m/config.json", b"{}", mode=0o4755)],
    "device": [Entry("m/null", type=b"3", device=(1, 3))],
    "above": [file("../config.json")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_pull_refuses_is_refused(
    name: str, registry: ScriptedRegistry, settings: Settings, tmp_path: Path
) -> None:
    push_image(registry, "v", archive(*HOSTILE[name]))
    with pytest.raises(ArchiveUnsafeError) as caught:
        open_model_root(f"oci://{registry.host}/r:v/m", settings)
    advised = "DIRECTORY --special drop, and load from there" in str(caught.value)
    assert advised == (name != "above")
    assert not (entry(settings) / "complete.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_links_stay_inside(registry: ScriptedRegistry, settings: Settings, tmp_path: Path) -> None:
    """In an image an absolute name counts from its root."""
    secret = tmp_path / "secret.json"
    secret.write_text("secret")
    up = "../" * 40
    tar = archive(
        directory("m"),
        file("models/real/config.json", b"{}"),
        symlink("m/config.json", "/models/real/config.json"),
        symlink("m/folder", "/models"),
        symlink("m/secret.json", str(secret)),
        symlink("m/other.json", f"{up}{secret}"),
        symlink("m/etc", f"{up}etc"),
    )
    push_image(registry, "v", tar)
    source = open_model_root(f"oci://{registry.host}/r:v/m", settings)
    found = {item.key: source.read(item.object_id) for item in source.list()}
    assert found == {"config.json": b"{}", "folder/real/config.json": b"{}"}


# -- room -------------------------------------------------------------------------------------


def test_without_room_nothing_is_fetched(
    registry: ScriptedRegistry,
    files: dict[str, bytes],
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = push_model(registry, files)
    monkeypatch.setattr(unpacked, "_disk", lambda path: (10, 1000))
    with pytest.raises(PullError, match="has 10 B free") as caught:
        open_model_root(uri, settings)
    assert "FASTLOAD_CACHE_DIR" in str(caught.value)
    layers = [digest for digest, data in registry.blobs.items() if not data.startswith(b"{")]
    assert not any(registry.count(digest) for digest in layers)


def test_what_nobody_uses_makes_room(
    registry: ScriptedRegistry,
    files: dict[str, bytes],
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for tag in ("old", "used"):
        uri = push_model(registry, files | {"name.json": tag.encode()}, tag)
        open_model_root(uri, settings).close()
    both = list(entry_root(settings).glob("sha*"))
    used = next(path for path in both if _holds(path, "used"))
    old = next(path for path in both if _holds(path, "old"))
    os.close(unpacked._held.pop(old))
    user = start(f"oci://{registry.host}/r:used/m", settings)
    assert user.stdout is not None
    assert json.loads(user.stdout.readline())["state"] == "found"
    os.close(unpacked._held.pop(used))
    for name in ("my-own-models", "note.gone", f"sha256-{'0' * 64}-backup"):
        (entry_root(settings) / name).mkdir(mode=0o700)
    left = entry_root(settings) / f"sha256-{'0' * 64}-0123abcd.gone"
    left.mkdir(mode=0o700)
    monkeypatch.setattr(unpacked, "_disk", lambda path: (1000, 10_000))  # never enough
    monkeypatch.setattr(unpacked, "format_size", lambda size_bytes: "")
    with pytest.raises(PullError):
        open_model_root(push_model(registry, files), settings)
    monkeypatch.undo()
    open_model_root(push_model(registry, files), settings).close()
    assert not old.exists()
    assert not left.exists()
    # What is not ours is nobody's to remove.
    for name in ("my-own-models", "note.gone", f"sha256-{'0' * 64}-backup"):
        (entry_root(settings) / name).rmdir()
    assert used.exists()
    outcome_of_rest, _ = user.communicate("")
    assert outcome_of_rest == ""
    assert len(list(entry_root(settings).glob("sha*"))) == 2
    assert not list(entry_root(settings).glob("*.gone"))


def _holds(path: Path, tag: str) -> bool:
    return (path / "tree/m/name.json").read_text() == tag


def test_a_disk_that_fills_up_is_not_left_full(
    registry: ScriptedRegistry,
    files: dict[str, bytes],
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill(uri: str, destination: Path, *_: Any, **__: Any) -> None:
        (destination.parent / "bytes").write_bytes(bytes(1000))
        raise PullError("full") from OSError(errno.ENOSPC, "No space left on device")

    uri = push_model(registry, files)
    monkeypatch.setattr(unpacked, "pull", fill)
    with pytest.raises(PullError, match="full"):
        open_model_root(uri, settings)
    assert [path.name for path in entry_root(settings).iterdir()] == [".lock"]


def test_a_file_system_without_locks_is_an_error_of_ours(
    registry: ScriptedRegistry,
    files: dict[str, bytes],
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    uri = push_model(registry, files)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(FastloadError, match="No locks available"):
        open_model_root(uri, settings)
