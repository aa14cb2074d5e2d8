"""Directories as sources: the conformance suite, and what only files can do."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastload_common.clock import SystemClock
from fastload_common.config import Settings
from fastload_common.errors import AccessDeniedError, ObjectChangedError, ObjectMissingError
from fastload_common.ranges import ByteRange
from fastload_common.source.local import LocalReceiver, LocalSource
from fastload_common.source.registry import layout_hint, open_source
from fastload_common.testing.source_suite import SourceSuite, StoreUnderTest


@dataclass
class _Directory:
    source: LocalSource
    path: Path

    def write(self, key: str, data: bytes) -> None:
        file = self.path / key
        file.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.parent / "new"
        new.write_bytes(data)
        new.rename(file)

    def write_beside(self, data: bytes) -> None:
        (self.path.parent / (self.path.name + "2")).write_bytes(data)

    def delete(self, key: str) -> None:
        (self.path / key).unlink()


@pytest.fixture
def directory(tmp_path: Path) -> _Directory:
    path = tmp_path / "a model"
    path.mkdir()
    source = open_source(str(path), Settings())
    assert isinstance(source, LocalSource)
    return _Directory(source, path)


class TestLocal(SourceSuite):
    @pytest.fixture
    def store(self, directory: _Directory) -> StoreUnderTest:
        return directory


def test_written_in_place_is_a_change(directory: _Directory) -> None:
    directory.write("key", b"0123456789")
    object_id = directory.source.stat("key")
    receiver = directory.source.open_receiver()
    receiver.receive(object_id, ByteRange(0, 2), memoryview(bytearray(2)))
    status = os.stat(directory.path / "key")
    with (directory.path / "key").open("r+b") as file:
        file.write(b"X")
    os.utime(directory.path / "key", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ObjectChangedError, match="written to"):
        receiver.receive(object_id, ByteRange(0, 2), memoryview(bytearray(2)))
    receiver.close()


def test_s21_written_in_place_with_the_time_set_back(directory: _Directory) -> None:
    directory.write("key", bytes(range(200)))
    object_id = directory.source.stat("key")
    path = directory.path / "key"
    before = os.stat(path)
    # The kernel's clock has steps of milliseconds; until it has moved, nothing could be seen.
    while os.stat(path).st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(bytes(200))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_mtime_ns == before.st_mtime_ns
    with pytest.raises(ObjectChangedError, match="written to"):
        directory.source.read(object_id)


def test_truncated_during_the_read(directory: _Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.write("key", bytes(range(200)))
    object_id = directory.source.stat("key")
    real = os.preadv

    def short_then_end(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        # Two short reads, then the file has become 100 bytes long.
        return real(descriptor, [buffers[0][: min(50, max(0, 100 - offset))]], offset)

    monkeypatch.setattr(os, "preadv", short_then_end)
    buffer = bytearray(200)
    receiver = LocalReceiver(SystemClock())
    with pytest.raises(ObjectChangedError, match="shorter") as caught:
        receiver.receive(object_id, ByteRange(0, 200), memoryview(buffer))
    assert caught.value.fields["ends_at"] == 100
    assert bytes(buffer[:100]) == bytes(range(100))
    receiver.close()


def test_written_to_during_the_read(directory: _Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.write("key", bytes(range(200)))
    object_id = directory.source.stat("key")
    real = os.preadv

    def read_then_write(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        os.utime(directory.path / "key", ns=(1, 1))
        return count

    monkeypatch.setattr(os, "preadv", read_then_write)
    with pytest.raises(ObjectChangedError, match="written to") as caught:
        directory.source.read(object_id)
    assert caught.value.received_bytes == 0


def test_short_reads_are_continued(directory: _Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.write("key", bytes(range(200)))
    object_id = directory.source.stat("key")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: real(fd, [b[0][:7]], at))
    assert directory.source.read(object_id) == bytes(range(200))


def test_s24_directory_where_a_file_is_asked(directory: _Directory) -> None:
    (directory.path / "sub").mkdir()
    with pytest.raises(ObjectMissingError, match="is a directory"):
        directory.source.stat("sub")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_s24_unreadable_file_as_user(directory: _Directory) -> None:
    directory.write("key", b"0123")
    (directory.path / "key").chmod(0)
    with pytest.raises(AccessDeniedError, match="not allowed to open"):
        directory.source.read(directory.source.stat("key"))


def test_s24_unreadable_file(directory: _Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.write("key", b"0123")
    object_id = directory.source.stat("key")

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AccessDeniedError, match="not allowed to open") as caught:
        directory.source.read(object_id)
    assert str(directory.path / "key") in str(caught.value)
    assert caught.value.fields["errno"] == "EACCES"


def test_pipe_is_refused_without_waiting(directory: _Directory) -> None:
    directory.write("key", b"0123")
    object_id = directory.source.stat("key")
    directory.delete("key")
    os.mkfifo(directory.path / "key")
    with pytest.raises(ObjectMissingError, match="not a regular file"):
        directory.source.read(object_id)
    assert directory.source.list() == []


@pytest.mark.parametrize("key", ["", "../other", "a/../../b", "/etc/passwd", "a//b", "./a", "a\0b"])
def test_keys_that_leave_the_root_are_refused(directory: _Directory, key: str) -> None:
    with pytest.raises(ObjectMissingError, match="no object can have the key"):
        directory.source.stat(key)
    with pytest.raises(ObjectMissingError, match="no object can have the key"):
        directory.source.put_if_absent(key, b"x")


def test_missing_directory_is_named(tmp_path: Path) -> None:
    source = open_source(str(tmp_path / "nothing"), Settings())
    with pytest.raises(ObjectMissingError, match="no such directory") as caught:
        source.list()
    assert str(tmp_path / "nothing") in str(caught.value)


def test_file_as_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ObjectMissingError, match="is a file, where a directory was expected"):
        open_source(str(tmp_path / "file"), Settings()).list()


def test_put_leaves_no_temporary_file_when_it_fails(
    directory: _Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Exception, match="No space left"):
        directory.source.put_if_absent("key", b"0123")
    assert list(directory.path.iterdir()) == []


def test_many_files_keep_few_descriptors(directory: _Directory) -> None:
    for i in range(20):
        directory.write(f"key{i}", b"0123")
    receiver = directory.source.open_receiver()
    before = len(os.listdir("/proc/self/fd"))
    for row in directory.source.list():
        receiver.receive(row.object_id, ByteRange(0, 4), memoryview(bytearray(4)))
    assert len(os.listdir("/proc/self/fd")) - before <= 4
    receiver.close()
    assert len(os.listdir("/proc/self/fd")) == before


# F21: the layout of a hub cache


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    root = tmp_path / "models--x"
    (root / "blobs").mkdir(parents=True)
    (root / "blobs" / "abc").write_bytes(b"weights")
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "again.safetensors").symlink_to("../../blobs/abc")
    return root


def test_f21_snapshot_of_links(hub_cache: Path) -> None:
    source = open_source(str(hub_cache / "snapshots" / "0123abcd"), Settings())
    again, model = source.list()
    assert (again.key, model.key) == ("again.safetensors", "model.safetensors")
    # Two names of one file have one state, so whoever looks at it can read it once.
    assert again.object_id.etag == model.object_id.etag
    assert source.read(model.object_id) == b"weights"
    assert layout_hint(source) == ""


def test_f21_cache_root_gets_a_hint(hub_cache: Path) -> None:
    source = open_source(str(hub_cache), Settings())
    assert f"use {hub_cache}/snapshots/0123abcd" in layout_hint(source)


def test_f21_dangling_link(hub_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (hub_cache / "blobs" / "abc").unlink()
    source = open_source(str(hub_cache / "snapshots" / "0123abcd"), Settings())
    with caplog.at_level(logging.WARNING):
        assert source.list() == []
    assert "dangling link" in caplog.text
    with pytest.raises(ObjectMissingError, match=r"dangling link: its target \.\./\.\./blobs/abc"):
        source.stat("model.safetensors")
    assert "2 links lead nowhere" in layout_hint(source)


def test_f21_loop_of_links(directory: _Directory, caplog: pytest.LogCaptureFixture) -> None:
    directory.write("sub/key", b"0123")
    (directory.path / "one").symlink_to("two")
    (directory.path / "two").symlink_to("one")
    (directory.path / "sub" / "up").symlink_to("..")
    with caplog.at_level(logging.WARNING):
        assert [row.key for row in directory.source.list()] == ["sub/key"]
    assert "loop of links" in caplog.text
    assert "leads back to a directory above it" in caplog.text
    with pytest.raises(ObjectMissingError, match="loop of links"):
        directory.source.stat("one")
