"""Pulls that end before their time: nothing at the destination, and the next one goes on."""

from __future__ import annotations

import os
import random
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fastload_common.config import Settings
from fastload_common.errors import (
    ChecksumMismatchError,
    ConfigError,
    FastloadError,
    PullError,
    SourceError,
)
from fastload_common.pull.pull import pull
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ObjectSource, Receipt, Receiver
from fastload_common.units import KIB, MIB
from tests.common.pull.images import Blobs, archive, file, tree_of

SETTINGS = Settings(concurrent_download_chunk_size=256 * KIB, max_concurrent_downloads_per_image=2)

RECORD_BYTES = 20  # of a journal


def noise_of(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@pytest.fixture
def tars() -> list[bytes]:
    return [
        archive(file("first", noise_of(3 * MIB, 1))),
        archive(file("second", noise_of(2 * MIB, 2))),
    ]


@dataclass
class Flaky:
    """A source that gives so many bytes and then refuses for good; counts what it gave."""

    source: Any
    left_bytes: int = 1 << 60
    only: str = ""
    waits_for: Callable[[], object] = lambda: True
    given: list[tuple[str, ByteRange]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def open_receiver(self) -> Receiver:
        return _FlakyReceiver(self, self.source.open_receiver())

    def close(self) -> None:
        self.source.close()

    @property
    def given_bytes(self) -> int:
        return sum(byte_range.size_bytes for _, byte_range in self.given)


class _FlakyReceiver:
    def __init__(self, flaky: Flaky, receiver: Receiver) -> None:
        self._flaky = flaky
        self._receiver = receiver

    def receive(self, object_id: ObjectId, byte_range: ByteRange, buffer: memoryview) -> Receipt:
        flaky = self._flaky
        with flaky.lock:
            if flaky.only in object_id.uri:
                flaky.left_bytes -= byte_range.size_bytes
            if flaky.left_bytes < 0:
                end_s = time.monotonic() + 30
                while not flaky.waits_for() and time.monotonic() < end_s:
                    time.sleep(0.005)
                raise SourceError("refused for good", uri=object_id.uri)
            flaky.given.append((object_id.uri, byte_range))
        return self._receiver.receive(object_id, byte_range, buffer)

    def abort(self) -> None:
        self._receiver.abort()

    def close(self) -> None:
        self._receiver.close()


@dataclass
class Scene:
    """A destination, and layers that are pulled to it again and again."""

    place: Path
    monkeypatch: pytest.MonkeyPatch
    blobs: Blobs
    sources: list[Flaky] = field(default_factory=list)

    @property
    def destination(self) -> Path:
        return self.place / "new"

    @property
    def stage(self) -> Path:
        (found,) = self.place.glob(".fastload-pull-*")
        return found

    def pull(self, tars: list[bytes], *, said: list[bytes] | None = None, **flaky: Any) -> Any:
        def opened(source: ObjectSource) -> Flaky:
            self.sources.append(Flaky(source, **flaky))
            return self.sources[-1]

        self.blobs.source = opened
        return self.blobs.pull(self.monkeypatch, self.destination, tars, said or tars)

    def interrupt(self, tars: list[bytes]) -> None:
        """A pull that fails when some of it is on the disk."""

        def has_some() -> bool:
            journals = self.place.glob(".fastload-pull-*/blobs/*.parts")
            return sum(path.stat().st_size for path in journals) >= 4 * RECORD_BYTES

        with pytest.raises(SourceError, match="refused for good"):
            self.pull(tars, left_bytes=2 * MIB, waits_for=has_some)
        assert has_some()

    def has_done(self) -> bool:
        """Whether the first layer is unpacked."""
        return bool(list(self.place.glob(".fastload-pull-*/layers/0000-*.done")))

    def check(self, tars: list[bytes]) -> None:
        assert (self.destination / "first").read_bytes() == noise_of(3 * MIB, 1)
        assert (self.destination / "second").read_bytes() == noise_of(2 * MIB, 2)
        assert not list(self.place.glob(".fastload-pull-*"))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    place = tmp_path / "place"
    place.mkdir()
    before = {thread.name for thread in threading.enumerate()}
    yield Scene(place, monkeypatch, Blobs(tmp_path / "blobs", settings=SETTINGS))
    left = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in left if name.startswith("fastload")]


def test_a_pull_that_failed_goes_on_with_what_is_missing(scene: Scene, tars: list[bytes]) -> None:
    scene.interrupt(tars)
    assert not scene.destination.exists()
    assert scene.stage.stat().st_mode & 0o777 == 0o700
    first = scene.sources[-1]
    report = scene.pull(tars)
    second = scene.sources[-1]
    assert 0 < report.resumed_bytes <= first.given_bytes
    assert report.fetched_bytes == second.given_bytes == report.size_bytes - report.resumed_bytes
    scene.check(tars)


def test_bytes_that_changed_on_the_disk_are_fetched_again(scene: Scene, tars: list[bytes]) -> None:
    scene.interrupt(tars)
    blob = max(scene.stage.glob("blobs/*[!s]"), key=lambda path: path.stat().st_size)
    start, end, _ = struct.unpack_from("<QQI", blob.with_name(blob.name + ".parts").read_bytes())
    with blob.open("r+b") as stream:
        stream.seek(start)
        stream.write(b"~~~~~~~~")
    before_bytes = scene.sources[-1].given_bytes
    report = scene.pull(tars)
    assert report.resumed_bytes <= before_bytes - (end - start)
    scene.check(tars)


def test_a_journal_that_lies_costs_the_blob(scene: Scene, tars: list[bytes]) -> None:
    scene.interrupt(tars)
    for journal in scene.stage.glob("blobs/*.parts"):
        blob = journal.with_name(journal.name.removesuffix(".parts"))
        data = bytes(blob.stat().st_size)
        blob.write_bytes(data)
        journal.write_bytes(struct.pack("<QQI", 0, len(data), zlib.crc32(data)))
    report = scene.pull(tars)
    assert report.fetched_bytes == report.size_bytes
    scene.check(tars)


def test_a_journal_that_is_cut_off_counts_as_far_as_it_goes(
    scene: Scene, tars: list[bytes]
) -> None:
    scene.interrupt(tars)
    for journal in scene.stage.glob("blobs/*.parts"):
        journal.write_bytes(journal.read_bytes()[:-7])
    report = scene.pull(tars)
    assert report.resumed_bytes < 2 * MIB
    scene.check(tars)


@pytest.mark.parametrize("discard", [True, False])
def test_a_layer_that_was_unpacked_is_not_fetched_again(
    scene: Scene, tars: list[bytes], discard: bool
) -> None:
    scene.blobs.settings = Settings(
        concurrent_download_chunk_size=256 * KIB,
        max_concurrent_downloads_per_image=1,
        max_concurrent_unpacks_per_image=1,
        discard_unpacked_layers=discard,
    )
    kept = 1 if discard else 2

    def is_unpacked() -> bool:
        return scene.has_done() and len(list(scene.stage.glob("blobs/*.parts"))) == kept

    with pytest.raises(SourceError):
        scene.pull(tars, left_bytes=1 * MIB, only="/1-", waits_for=is_unpacked)
    assert is_unpacked()
    scene.pull(tars)
    assert not [uri for uri, _ in scene.sources[-1].given if "/0-" in uri]
    scene.check(tars)


def test_an_unpacked_layer_that_somebody_touched_is_unpacked_again(
    scene: Scene, tars: list[bytes]
) -> None:
    scene.blobs.settings = Settings(
        concurrent_download_chunk_size=256 * KIB,
        max_concurrent_downloads_per_image=1,
        max_concurrent_unpacks_per_image=1,
    )
    with pytest.raises(SourceError):
        scene.pull(tars, left_bytes=1 * MIB, only="/1-", waits_for=scene.has_done)
    (unpacked,) = scene.stage.glob("layers/0000-*/first")
    status = unpacked.stat()
    with unpacked.open("r+b") as stream:
        stream.write(b"~")
    os.utime(unpacked, ns=(status.st_atime_ns, status.st_mtime_ns))
    scene.pull(tars)
    scene.check(tars)


def test_bytes_that_are_not_what_the_digest_says_are_refused(
    scene: Scene, tars: list[bytes], tmp_path: Path
) -> None:
    class Lying(_FlakyReceiver):
        def receive(
            self, object_id: ObjectId, byte_range: ByteRange, buffer: memoryview
        ) -> Receipt:
            receipt = super().receive(object_id, byte_range, buffer)
            if byte_range.start == 0:
                buffer[1000:1001] = b"~"
            return receipt

    scene.monkeypatch.setattr(
        Flaky, "open_receiver", lambda self: Lying(self, self.source.open_receiver())
    )
    with pytest.raises(ChecksumMismatchError, match="not what its digest says"):
        scene.pull(tars)
    assert not scene.destination.exists()
    assert not list(scene.stage.glob("blobs/*"))  # nothing of it is believed the next time


def test_content_that_is_not_what_the_diff_id_says_is_refused(
    scene: Scene, tars: list[bytes]
) -> None:
    with pytest.raises(ChecksumMismatchError, match="the content of"):
        scene.pull(tars, said=[tars[0], tars[0]])
    assert not scene.destination.exists()


def test_an_error_of_an_unpacker_ends_the_download(scene: Scene, tars: list[bytes]) -> None:
    hostile = [archive(file("../out")), archive(file("big", noise_of(30 * MIB, 3)))]
    with pytest.raises(PullError, match="leaves the directory"):
        scene.pull(hostile)
    assert not scene.destination.exists()


def test_what_a_former_pull_of_something_else_left_is_removed(
    scene: Scene, tars: list[bytes]
) -> None:
    other = [archive(file("other", noise_of(1 * MIB, 4)))]
    with pytest.raises(SourceError):
        scene.pull(other, left_bytes=0)
    scene.pull(tars)
    assert set(tree_of(scene.destination)) == {".", "first", "second"}


def test_two_pulls_to_one_destination_do_not_mix(
    scene: Scene, tars: list[bytes], tmp_path: Path
) -> None:
    seen: list[FastloadError] = []

    def opened(source: ObjectSource) -> ObjectSource:
        # While the first one is at work.
        with pytest.raises(PullError, match="another pull") as caught:
            pull(str(tmp_path), scene.destination, SETTINGS)
        seen.append(caught.value)
        return source

    scene.blobs.source = opened
    scene.blobs.pull(scene.monkeypatch, scene.destination, tars, tars)
    assert len(seen) == 1
    scene.check(tars)


def test_a_destination_that_is_taken_meanwhile_is_left_alone(
    scene: Scene, tars: list[bytes]
) -> None:
    def opened(source: ObjectSource) -> ObjectSource:
        scene.destination.mkdir()
        (scene.destination / "mine").write_text("mine")
        return source

    scene.blobs.source = opened
    with pytest.raises(PullError, match="is not empty -> pull again when it is free"):
        scene.blobs.pull(scene.monkeypatch, scene.destination, tars, tars)
    assert [path.name for path in scene.destination.iterdir()] == ["mine"]
    shutil.rmtree(scene.destination)
    report = scene.pull(tars)
    assert scene.sources[-1].given_bytes == report.fetched_bytes == 0
    scene.check(tars)


def test_an_empty_directory_may_be_the_destination(scene: Scene, tars: list[bytes]) -> None:
    scene.destination.mkdir()
    scene.pull(tars)
    scene.check(tars)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("full", "is not empty"),
        ("file", "is there already"),
        ("link", "is there already"),
        ("none/new", "is no directory"),
    ],
)
def test_a_destination_that_cannot_be_one_is_refused_at_once(
    tmp_path: Path, what: str, text: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=text):
        pull("s3://never-asked/at-all", tmp_path / what, Settings())
    assert not list(tmp_path.glob(".fastload-pull-*"))


def test_a_stage_that_others_may_enter_is_refused(scene: Scene, tars: list[bytes]) -> None:
    with pytest.raises(SourceError):
        scene.pull(tars, left_bytes=0)
    scene.stage.chmod(0o777)
    with pytest.raises(PullError, match="other users may enter"):
        scene.pull(tars)


def test_a_full_disk_is_said(scene: Scene, tars: list[bytes]) -> None:
    from fastload_common.pull.spool import Spool

    def full(self: Spool, start: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    with scene.monkeypatch.context() as patched:
        patched.setattr(Spool, "write", full)
        with pytest.raises(PullError, match=r"No space left on device.*make room"):
            scene.pull(tars)
    scene.pull(tars)
    scene.check(tars)


def test_a_disk_without_room_is_said_before_anything_is_fetched(
    scene: Scene, tars: list[bytes]
) -> None:
    status = list(os.statvfs(scene.place))
    status[4] = 1  # blocks that are free for users
    with scene.monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: os.statvfs_result(status))
        with pytest.raises(PullError, match="are to be fetched, and the disk"):
            scene.pull(tars)
    assert not scene.sources[-1].given
