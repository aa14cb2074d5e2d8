"""One object in the cache: written, read in other pieces, damaged, shared, removed."""

from __future__ import annotations

import fcntl
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload_common.range_cache import entry as entry_module
from fastload_common.range_cache.entry import Entry, Identity
from fastload_common.range_cache.own_files import OddFileError
from fastload_common.range_cache.records import BLOCK_BYTES
from fastload_common.ranges import ByteRange, ObjectId

SIZE_BYTES = 5 * BLOCK_BYTES + 12_345
DATA = random.Random(1).randbytes(SIZE_BYTES)
IDENTITY = Identity("https://store", ObjectId("s3://b/k", '"e"', SIZE_BYTES))
EVERYTHING = ByteRange(0, SIZE_BYTES)


def opened(directory: Path, *, writable: bool = True, create: bool = True) -> Entry:
    entry = Entry(directory, IDENTITY, writable=writable)
    assert entry.open(create=create)
    return entry


def write(entry: Entry, byte_range: ByteRange = EVERYTHING) -> int:
    data = memoryview(DATA)[byte_range.start : byte_range.end]
    return sum(piece.end - piece.start for piece in entry.write(byte_range, data))


def read(entry: Entry, byte_range: ByteRange = EVERYTHING) -> list[ByteRange]:
    """Read what is held: what is not, or is damaged. What was read is right."""
    memory = bytearray(byte_range.size_bytes)
    cover = entry.coverage.cover(byte_range)
    lost = list(cover.missing)
    for held in cover.held:
        bad = entry.read(held, memoryview(memory), byte_range.start)
        if not bad:
            part = held.wanted
            got = memory[part.start - byte_range.start : part.end - byte_range.start]
            assert got == DATA[part.start : part.end]
        lost += [ByteRange(piece.start, piece.end) for piece in bad]
    return sorted(lost)


PLACES = st.integers(0, SIZE_BYTES)
RANGES = st.tuples(PLACES, PLACES).map(sorted).filter(lambda r: r[0] < r[1])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=st.lists(RANGES, max_size=5), asked=RANGES)
def test_any_range_comes_back_from_whatever_ranges_were_written(
    tmp_path: Path, written: list[list[int]], asked: list[int]
) -> None:
    entry = opened(tmp_path)
    try:
        for row in written:
            write(entry, ByteRange(*row))
        again = opened(tmp_path, writable=False, create=False)
        assert again.coverage.pieces == entry.coverage.pieces
        for one in (entry, again):
            for lost in read(one, ByteRange(*asked)):
                assert all(lost.intersect(ByteRange(*row)) is None for row in written)
        again.close()
    finally:
        entry.remove()
        entry.close()


def test_what_is_held_is_not_written_again(tmp_path: Path) -> None:
    entry = opened(tmp_path)
    assert write(entry, ByteRange(100, BLOCK_BYTES)) == BLOCK_BYTES - 100
    assert write(entry, ByteRange(0, BLOCK_BYTES + 5)) == 105
    assert write(entry) == SIZE_BYTES - BLOCK_BYTES - 5
    assert write(entry) == 0
    entry.close()


def test_two_that_write_the_same_see_each_others_records(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    write(one)
    assert write(other) == 0
    assert read(other) == []
    one.close()
    other.close()


def test_another_state_of_the_object_is_another_entry(tmp_path: Path) -> None:
    entry = opened(tmp_path)
    write(entry)
    entry.close()
    one = IDENTITY.object_id
    for identity in (
        Identity("https://other", one),
        Identity(IDENTITY.scope, ObjectId(one.uri, '"f"', one.size_bytes)),
        Identity(IDENTITY.scope, ObjectId(one.uri, one.etag, one.size_bytes + 1)),
    ):
        assert not Entry(tmp_path, identity, writable=True).open()


@pytest.mark.parametrize("algorithms", [(2,), (1,)])
def test_either_checksum_does(
    tmp_path: Path, algorithms: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_module, "usable_algorithms", lambda: algorithms)
    entry = opened(tmp_path)
    write(entry, ByteRange(5, 3 * BLOCK_BYTES))
    write(entry)
    assert {piece.algorithm for piece in entry.coverage.pieces} == set(algorithms)
    assert read(entry) == []
    entry.close()


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 0x10]))


def test_a_flipped_bit_costs_its_block_only(tmp_path: Path) -> None:
    entry = opened(tmp_path)
    write(entry)
    damage(entry.path(".data"), 2 * BLOCK_BYTES + 77)
    block = ByteRange(2 * BLOCK_BYTES, 3 * BLOCK_BYTES)
    assert read(entry) == [block]
    # Also where only other bytes of the block are wanted.
    assert read(entry, ByteRange(block.start + 500, block.start + 600)) == [block]
    entry.forget([p for p in entry.coverage.pieces if p.start == block.start])
    again = opened(tmp_path)
    assert again.coverage.cover(EVERYTHING).missing == (block,)
    assert write(again) == BLOCK_BYTES
    assert read(again) == []
    third = opened(tmp_path, writable=False)
    assert read(third) == []
    for one in (entry, again, third):
        one.close()


@pytest.mark.parametrize("left", [0, 1, BLOCK_BYTES + 1, SIZE_BYTES - 1])
def test_a_truncated_data_file_costs_what_is_gone(tmp_path: Path, left: int) -> None:
    entry = opened(tmp_path)
    write(entry)
    os.truncate(entry.path(".data"), left)
    lost = read(entry)
    assert lost[0].start == left - left % BLOCK_BYTES
    assert sum(r.size_bytes for r in lost) == SIZE_BYTES - lost[0].start
    entry.close()


@pytest.mark.parametrize("left", [0, 1, 15, 16, 100])
def test_a_truncated_journal_costs_what_it_spoke_of(tmp_path: Path, left: int) -> None:
    entry = opened(tmp_path)
    write(entry, ByteRange(0, BLOCK_BYTES))  # 40 bytes of journal
    write(entry)
    entry.close()
    os.truncate(entry.path(".journal"), left)
    again = opened(tmp_path)
    known_bytes = BLOCK_BYTES if left >= 40 else 0
    assert again.coverage.held_bytes == known_bytes
    assert write(again) == SIZE_BYTES - known_bytes
    assert read(again) == []
    again.close()


def test_a_journal_without_its_data_is_found_out(tmp_path: Path) -> None:
    entry = opened(tmp_path)
    write(entry)
    entry.close()
    entry.path(".data").unlink()
    again = opened(tmp_path)
    assert sum(r.size_bytes for r in read(again)) == SIZE_BYTES
    again.close()


def test_zeros_of_a_lost_write_do_not_pass(tmp_path: Path) -> None:
    """After a power loss a journal may speak of data that never reached the disk."""
    entry = opened(tmp_path)
    write(entry)
    with entry.path(".data").open("r+b") as file:
        file.seek(BLOCK_BYTES)
        file.write(bytes(BLOCK_BYTES))
    assert read(entry) == [ByteRange(BLOCK_BYTES, 2 * BLOCK_BYTES)]
    entry.close()


def test_an_entry_that_was_removed_takes_nothing_more(tmp_path: Path) -> None:
    entry = opened(tmp_path)
    write(entry, ByteRange(0, 100))
    entry.remove()
    assert write(entry) == 0
    assert os.listdir(tmp_path) == []
    entry.close()
    entry.close()


def test_links_and_files_of_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry(tmp_path, IDENTITY, writable=True)
    target = tmp_path / "target"
    target.write_bytes(b"x")
    entry.path(".data").symlink_to(target)
    with pytest.raises(OddFileError, match="is a link"):
        entry.open(create=True)
    entry.path(".data").unlink()
    os.mkfifo(entry.path(".data"))
    with pytest.raises(OddFileError, match="is not a regular file"):
        entry.open(create=True)
    entry.path(".data").unlink()
    entry.path(".data").touch()
    if os.getuid():
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:
        os.chown(entry.path(".data"), 12345, 12345)
    with pytest.raises(OddFileError, match="belongs to user"):
        entry.open(create=True)
    assert not entry.is_open


def test_what_it_is_stands_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed in between leaves something that the next one mends."""

    class Killed(BaseException):
        pass

    def killed(*paths: object) -> None:
        raise Killed

    entry = opened(tmp_path)
    facts = entry.path(".json")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            write(entry)
    entry.close()
    assert not facts.exists()
    for cut in (None, b"", b'{"format'):  # as an older version may have left it
        if cut is not None:
            facts.write_bytes(cut)
        again = opened(tmp_path)
        again.coverage.clear()
        write(again)
        again.close()
        assert json.loads(facts.read_bytes()) == IDENTITY.facts
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".data", ".journal", ".json"]


@pytest.mark.parametrize("call", ["open", "flock", "pread"])
def test_close_does_not_wait_for_who_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    first = opened(tmp_path)
    write(first)
    first.close()
    module = fcntl if call == "flock" else os
    asked, answer = threading.Event(), threading.Event()
    works = getattr(module, call)
    got: list[int] = []

    def hangs(*args: Any) -> Any:
        asked.set()
        assert answer.wait(30)
        value = works(*args)
        if call == "open":
            got.append(value)
        elif call == "flock":
            got.append(args[0])
        return value

    entry = Entry(tmp_path, IDENTITY, writable=True)
    opening = threading.Thread(target=entry.open)
    with monkeypatch.context() as patch:
        patch.setattr(module, call, hangs)
        opening.start()
        assert asked.wait(30)
        closing = threading.Thread(target=entry.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        answer.set()
        opening.join(30)
    assert not entry.is_open
    for fd in got:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with entry.path(".data").open() as file:  # nobody has it locked
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not entry.open()
