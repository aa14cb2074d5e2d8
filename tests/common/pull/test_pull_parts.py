"""The parts of a pull by themselves: sizes, places of the node, spools, inflating."""

from __future__ import annotations

import gzip
import importlib
import os
import random
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.config import Settings
from fastload_common.errors import ArchiveInvalidError, ConfigError, OutOfBudgetError, PullError
from fastload_common.pull import inflate
from fastload_common.pull.digesting import Digest, Sha
from fastload_common.pull.inflate import open_inflater
from fastload_common.pull.node_slots import NodeSlots
from fastload_common.pull.sizes import MOST_UNPACKS, WINDOWS_BYTES, choose_pull_sizes
from fastload_common.pull.spool import Aborted, Spool
from fastload_common.ranges import ByteRange
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.transfer.receiver_process import process_count
from fastload_common.units import GIB, KIB, MIB

# What is beside these: the interpreter with all that is imported, as measured, and its threads.
OTHER_BYTES = 60 * MIB


@given(
    downloads=st.none() | st.integers(1, 4096),
    chunk_bytes=st.none() | st.integers(64 * KIB, 4 * GIB),
    unpacks=st.none() | st.integers(1, 1024),
    memory_bytes=st.none() | st.integers(1 * MIB, 1 << 40),
    cpu_count=st.integers(1, 256),
    total_bytes=st.integers(0, 1 << 44),
    remote=st.booleans(),
)
def test_memory_is_bounded_at_any_setting(
    downloads: int | None,
    chunk_bytes: int | None,
    unpacks: int | None,
    memory_bytes: int | None,
    cpu_count: int,
    total_bytes: int,
    remote: bool,
) -> None:
    settings = Settings(
        max_concurrent_downloads_per_image=downloads,
        concurrent_download_chunk_size=chunk_bytes,
        max_concurrent_unpacks_per_image=unpacks,
        memory_bytes=memory_bytes,
    )
    sizes = choose_pull_sizes(
        settings,
        total_bytes,
        cpu_count=cpu_count,
        descriptor_limit=1 << 16,
        remote=remote,
        read_text=lambda path: None,
    )
    staging_bytes = sizes.slot_bytes * sizes.slots
    receivers = process_count(sizes.connections, cpu_count) if remote else 0
    # A few MiB beyond the budget where it is set to next to nothing: a receiver must run.
    assert staging_bytes + receivers * 12 * MIB <= 128 * MIB + 13 * MIB
    pieces_bytes = sizes.unpacks * 10 * sizes.piece_bytes
    assert staging_bytes + receivers * 12 * MIB + pieces_bytes <= 256 * MIB - OTHER_BYTES
    assert 1 <= sizes.start_connections <= sizes.connections <= sizes.slots
    assert sizes.slot_bytes <= (chunk_bytes or 4 * MIB)
    assert 1 <= sizes.unpacks <= MOST_UNPACKS
    assert WINDOWS_BYTES >= inflate._LARGEST_WINDOW_BYTES
    if downloads is not None:
        assert sizes.connections <= downloads


def test_sizes_as_they_are_usually() -> None:
    def sizes(**more: object) -> tuple[int, int, int]:
        found = choose_pull_sizes(
            Settings(**more),  # type: ignore[arg-type]
            2 * GIB,
            cpu_count=8,
            descriptor_limit=1024,
            remote=True,
            read_text=lambda path: None,
        )
        return found.connections, found.slot_bytes, found.unpacks

    assert sizes() == (20, 4 * MIB, 4)
    assert sizes(max_concurrent_downloads_per_image=3, concurrent_download_chunk_size=16 * MIB) == (
        3,
        16 * MIB,
        4,
    )
    assert sizes(max_concurrent_unpacks_per_image=10)[2] == 10


def test_a_limit_that_holds_no_request_is_an_error() -> None:
    with pytest.raises(OutOfBudgetError, match="less than one request"):
        choose_pull_sizes(
            Settings(),
            GIB,
            cpu_count=1,
            descriptor_limit=1024,
            remote=True,
            read_text=lambda path: "MemAvailable: 200 kB" if path.endswith("meminfo") else None,
        )


def test_places_of_the_node_are_shared_and_come_back(tmp_path: Path) -> None:
    clock, stop = FakeClock(auto=True), threading.Event()
    slots = NodeSlots(tmp_path / "slots", "unpack", 3, clock)
    others = NodeSlots(tmp_path / "slots", "unpack", 3, clock)
    with slots.taken(2, stop) as first, others.taken(5, stop) as second:
        assert (first, second) == (2, 1)
        stop.set()
        with others.taken(1, stop) as third:
            assert third == 0
    with others.taken(5, threading.Event()) as all_of_them:
        assert all_of_them == 3
    with NodeSlots(tmp_path / "slots", "unpack", None, clock).taken(9, stop) as unbounded:
        assert unbounded is None


def test_a_pull_that_waits_for_a_place_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()

    clock = FakeClock(auto=True)
    end_s = clock.monotonic_s() + 30

    class Ending(FakeClock):
        def wait(self, event: threading.Event, timeout_s: float) -> bool:
            if clock.monotonic_s() > end_s:
                stop.set()
            return clock.wait(event, timeout_s)

    slots = NodeSlots(tmp_path / "slots", "download", 1, Ending())
    with slots.taken(1, stop) as first, slots.taken(1, stop) as second:
        assert (first, second) == (1, 0)
    assert caplog.text.count("waits for other pulls of this node: all 1 places for download") == 1


def test_places_where_others_can_write_are_refused(tmp_path: Path) -> None:
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots").chmod(0o777)
    slots = NodeSlots(tmp_path / "slots", "unpack", 3, FakeClock(auto=True))
    with pytest.raises(PullError, match="others can write"), slots.taken(1, threading.Event()):
        pass


@given(st.data())
def test_a_spool_knows_what_it_has(tmp_path_factory: pytest.TempPathFactory, data: object) -> None:
    draw: Callable[..., object] = data.draw  # type: ignore[attr-defined]
    size_bytes = draw(st.integers(1, 200))
    assert isinstance(size_bytes, int)
    content = random.Random(size_bytes).randbytes(size_bytes)
    path = tmp_path_factory.mktemp("spool") / "blob"
    spool = Spool(path, size_bytes)
    spool.prepare()
    there = bytearray(size_bytes)
    for _ in range(12):
        start = draw(st.integers(0, size_bytes - 1))
        end = draw(st.integers(0, size_bytes))
        assert isinstance(start, int)
        assert isinstance(end, int)
        if start < end and not spool.is_complete:
            spool.write(start, memoryview(content)[start:end])
            there[start:end] = b"\1" * (end - start)
    spool.close()
    for one in (spool, _again(path, size_bytes)):
        assert one.present_bytes == sum(there)
        missing = bytearray(size_bytes)
        for byte_range in one.missing():
            missing[byte_range.start : byte_range.end] = b"\1" * byte_range.size_bytes
        assert all(a != b for a, b in zip(there, missing, strict=True))


def _again(path: Path, size_bytes: int) -> Spool:
    spool = Spool(path, size_bytes)
    spool.prepare()
    return spool


def test_a_reader_follows_the_writer_and_ends_with_the_pull(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "blob", 6)
    spool.prepare()
    seen: list[bytes] = []

    def follow() -> None:
        with spool.reading(100) as read:
            try:
                while piece := read():
                    seen.append(piece)
            except Aborted:
                seen.append(b"aborted")

    thread = threading.Thread(target=follow)
    thread.start()
    spool.write(3, memoryview(b"def"))
    spool.write(0, memoryview(b"ab"))
    spool.abort()
    thread.join()
    assert b"".join(seen).startswith((b"aborted", b"ababorted"))
    assert spool.missing() == [ByteRange(2, 3)]
    spool.close()


@pytest.fixture(params=["isal", "zlib"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "zlib":
        monkeypatch.setattr(inflate, "gzip_library", lambda: zlib)
    else:
        pytest.importorskip("isal")


def pieces_of(stored: bytes, piece_bytes: int) -> list[bytes]:
    at = [18]

    def read() -> bytes:
        start, at[0] = at[0], at[0] + piece_bytes
        return stored[start : at[0]]

    inflater = open_inflater(stored[:18], read, piece_bytes)
    found = []
    while piece := inflater.next_piece():
        found.append(piece)
    return found


CONTENT = random.Random(5).randbytes(50_000) + bytes(400_000)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("piece_bytes", [1000, 65536])
@pytest.mark.parametrize(
    "stored",
    [
        CONTENT,
        gzip.compress(CONTENT),
        gzip.compress(CONTENT[:77]) + gzip.compress(b"") + gzip.compress(CONTENT[77:]),
        gzip.compress(CONTENT) + bytes(700),
        zstandard.compress(CONTENT),
        zstandard.compress(CONTENT[:77]) + zstandard.compress(CONTENT[77:]),
        b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstandard.compress(CONTENT),
    ],
    ids=["plain", "gzip", "members", "padded", "zstd", "frames", "skipped"],
)
def test_content_comes_in_bounded_pieces(stored: bytes, piece_bytes: int) -> None:
    found = pieces_of(stored, piece_bytes)
    assert b"".join(found) == CONTENT
    assert max(map(len, found)) <= piece_bytes


@pytest.mark.usefixtures("library")
def test_what_is_no_gzip_data_is_an_error() -> None:
    good = gzip.compress(CONTENT)
    for bad in (good[:-9], good[:-4] + bytes(4), good + b"more", good[:30] + b"~~~" + good[33:]):
        with pytest.raises(ArchiveInvalidError):
            pieces_of(bad, 4096)


def test_without_a_library_zstd_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        pieces_of(zstandard.compress(CONTENT), 4096)


def test_an_error_of_the_digest_thread_is_not_lost() -> None:
    class Broken(Sha):
        def update(self, data: bytes) -> None:
            raise MemoryError

    with Digest(Broken(f"sha256:{'0' * 64}")) as digest:
        for _ in range(20):
            digest.update(b"x")
        with pytest.raises(MemoryError):
            digest.check("it")


def test_files_are_given_to_nobody_else_without_the_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastload_common.pull.policy import Ownership

    def denied(*arguments: object, **more: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", denied)
    ownership = Ownership(is_tried=True)
    ownership.give(str(tmp_path).encode(), 5, 5)
    assert ownership.refused == 1
