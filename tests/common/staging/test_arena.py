"""The arena: bounded, re-used, never a crash."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_mock import MockerFixture

from fastload_common.errors import OutOfBudgetError
from fastload_common.staging import arena as arena_module
from fastload_common.staging.arena import Arena, Slot

SLOT_BYTES = 100_000  # not a multiple of a page on purpose


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(SLOT_BYTES, 3)
    yield made
    made.close()


def lease(arena: Arena) -> Slot:
    slot = arena.try_lease()
    assert slot is not None
    return slot


def reserved_bytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_slots_are_writable_whole_and_apart(arena: Arena) -> None:
    slots = [lease(arena) for _ in range(3)]
    for number, slot in enumerate(slots):
        assert len(slot.memory) == SLOT_BYTES
        slot.memory[:] = bytes([number + 1]) * SLOT_BYTES
    assert [set(bytes(slot.memory)) for slot in slots] == [{1}, {2}, {3}]


def test_memory_is_a_memfd_and_not_dev_shm(arena: Arena) -> None:
    assert os.readlink(f"/proc/self/fd/{arena.fd}").startswith("/memfd:")


def test_the_last_released_slot_is_used_first_and_few_pages_are_touched(arena: Arena) -> None:
    assert reserved_bytes(arena) == 0
    for _ in range(10):
        slot = lease(arena)
        slot.memory[:] = b"x" * SLOT_BYTES
        slot.release()
    assert SLOT_BYTES <= reserved_bytes(arena) < 2 * SLOT_BYTES
    assert arena.peak_leased_bytes == SLOT_BYTES


def test_a_new_slot_is_reserved_before_it_is_handed_out(arena: Arena) -> None:
    lease(arena)
    assert reserved_bytes(arena) >= SLOT_BYTES


def test_no_more_is_reserved_than_was_asked(arena: Arena) -> None:
    for size_bytes, pages in ((1, 1), (mmap.PAGESIZE + 1, 2), (1, 2), (3 * mmap.PAGESIZE, 3)):
        slot = arena.try_lease(size_bytes)
        assert slot is not None
        slot.memory[:] = b"x" * size_bytes
        slot.release()
        assert reserved_bytes(arena) == pages * mmap.PAGESIZE
    assert arena.peak_leased_bytes == 3 * mmap.PAGESIZE
    for size_bytes in (0, SLOT_BYTES + 1):
        with pytest.raises(ValueError, match="asked of a slot"):
            arena.try_lease(size_bytes)


def test_a_slot_says_where_it_is_in_the_file(arena: Arena) -> None:
    slots = [lease(arena) for _ in range(3)]
    for number, slot in enumerate(slots):
        slot.memory[:5] = b"here%d" % number
    for number, slot in enumerate(slots):
        assert os.pread(arena.fd, 5, slot.position_bytes) == b"here%d" % number
        assert slot.position_bytes % mmap.PAGESIZE == 0
    # Another mapping of the file, as another process has it, is the same memory.
    other = mmap.mmap(arena.fd, arena.size_bytes)
    other[slots[1].position_bytes] = ord("T")
    assert bytes(slots[1].memory[:5]) == b"Tere1"
    other.close()


def test_try_lease_does_not_wait(arena: Arena) -> None:
    slots = [arena.try_lease(10) for _ in range(4)]
    assert slots[3] is None
    assert all(slot is not None and len(slot.memory) == 10 for slot in slots[:3])
    assert slots[0] is not None
    slots[0].release()
    again = arena.try_lease()
    assert again is not None
    assert len(again.memory) == SLOT_BYTES
    with pytest.raises(ValueError, match="asked of a slot"):
        arena.try_lease(SLOT_BYTES + 1)
    arena.close()
    assert arena.try_lease(1) is None


def mapped_bytes(arena: Arena) -> int:
    """How much of the staging memory is mapped into this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    total = 0
    for line in lines:
        if "memfd:fastload-staging" in line:
            total += 1024 * next(int(x.split()[1]) for x in lines if x.startswith("Rss:"))
    return total


def test_populate_maps_what_is_written_and_no_more(arena: Arena) -> None:
    slot, other = lease(arena), lease(arena)
    before = mapped_bytes(arena)
    pages = -(-SLOT_BYTES // mmap.PAGESIZE)
    arena.populate(slot.position_bytes, 1)
    assert mapped_bytes(arena) == before + mmap.PAGESIZE
    for _ in range(2):
        arena.populate(slot.position_bytes + 10_000, SLOT_BYTES - 10_000)
        assert mapped_bytes(arena) == before + pages * mmap.PAGESIZE
    assert reserved_bytes(arena) == 2 * pages * mmap.PAGESIZE
    other.memory[-1] = 1


def test_the_descriptor_goes_with_the_arena(arena: Arena) -> None:
    assert not os.get_inheritable(arena.fd)
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        _ = arena.fd


def test_peak_counts_what_was_held_at_once(arena: Arena) -> None:
    first, second = lease(arena), lease(arena)
    first.release()
    second.release()
    lease(arena)
    assert arena.peak_leased_bytes == 2 * SLOT_BYTES
    assert arena.leased_count == 1


def test_a_slot_that_is_given_back_is_the_next_one(arena: Arena) -> None:
    slots = [lease(arena) for _ in range(3)]
    assert arena.try_lease() is None
    slots[1].release()
    assert lease(arena)._index == slots[1]._index


def test_no_lease_after_close(arena: Arena) -> None:
    arena.close()
    assert arena.try_lease() is None


def test_release_twice_gives_one_slot(arena: Arena) -> None:
    slot = lease(arena)
    slot.release()
    slot.release()
    assert arena.leased_count == 0
    assert len({lease(arena)._index for _ in range(3)}) == 3


def test_use_after_release_is_an_error(arena: Arena) -> None:
    slot = lease(arena)
    slot.release()
    with pytest.raises(ValueError, match="released"):
        slot.memory[0] = 1


def test_close_with_leased_slots_keeps_their_memory_until_they_go() -> None:
    arena = Arena(SLOT_BYTES, 2)
    fd = arena.fd
    slot = lease(arena)
    arena.close()
    arena.close()
    slot.memory[:] = b"y" * SLOT_BYTES
    slot.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_close_while_a_view_is_out_keeps_the_view_alive() -> None:
    arena = Arena(SLOT_BYTES, 1)
    slot = lease(arena)
    slot.memory[:] = b"z" * SLOT_BYTES
    view = slot.memory[10:20]
    slot.release()
    arena.close()
    del arena, slot
    gc.collect()
    assert bytes(view) == b"z" * 10


def test_a_view_that_goes_after_the_close_takes_the_memory_with_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(SLOT_BYTES, 1)
    slot = lease(arena)
    view = slot.memory[10:20]
    slot.release()
    arena.close()
    assert len(os.listdir("/proc/self/fd")) == before + 1  # the mapping has one of its own
    del view
    assert len(os.listdir("/proc/self/fd")) == before
    assert arena.is_closed


def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        arena = Arena(SLOT_BYTES, 2)
        lease(arena).release()
        arena.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_without_a_memfd_a_temporary_file_is_used_and_said_once(
    mocker: MockerFixture, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    arena_module._log_fallback.cache_clear()
    mocker.patch.object(os, call, side_effect=OSError(errno.EPERM, "not permitted"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            arena = Arena(SLOT_BYTES, 2)
            slots = [lease(arena) for _ in range(2)]
            slots[1].memory[-1] = 7
            assert slots[1].memory[-1] == 7
            # Other processes can map it, and no path leads to it.
            assert os.pread(arena.fd, 1, slots[1].position_bytes + SLOT_BYTES - 1) == b"\7"
            assert os.readlink(f"/proc/self/fd/{arena.fd}").endswith(" (deleted)")
            slots[0].release()
            arena.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not permitted" in caplog.text


def test_memory_that_cannot_be_had_is_a_typed_error_and_the_slot_comes_back(
    arena: Arena, mocker: MockerFixture
) -> None:
    patched = mocker.patch.object(
        os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device")
    )
    with pytest.raises(OutOfBudgetError, match=r"slot 1 of 3.*No space left"):
        arena.try_lease()
    assert arena.leased_count == 0
    mocker.stop(patched)
    lease(arena)
    assert reserved_bytes(arena) >= SLOT_BYTES


def test_an_address_space_too_small_is_a_typed_error() -> None:
    with pytest.raises(OutOfBudgetError, match="could not map"):
        Arena(1 << 46, 4)


def test_more_than_can_be_addressed_is_an_error_of_ours() -> None:
    with pytest.raises(OutOfBudgetError, match="more than can be addressed"):
        Arena(1 << 20, 10**24)


@pytest.mark.parametrize(("slot_bytes", "slot_count"), [(0, 1), (1, 0), (-1, 1)])
def test_nonsense_is_refused(slot_bytes: int, slot_count: int) -> None:
    with pytest.raises(ValueError, match="not an arena"):
        Arena(slot_bytes, slot_count)


def test_many_threads_never_share_a_slot() -> None:
    arena = Arena(4096, 3)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            while (slot := arena.try_lease()) is None:
                pass
            slot.memory[:] = bytes([number]) * 4096
            if bytes(slot.memory) != bytes([number]) * 4096:
                wrong.append(number)
            slot.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert arena.leased_count == 0
    assert arena.peak_leased_bytes <= 3 * 4096
    arena.close()
