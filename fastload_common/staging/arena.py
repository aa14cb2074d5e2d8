"""Staging memory: a fixed set of equal slots that are leased, filled, placed and given back.

Guarantees: at most ``slot_bytes * slot_count`` bytes, ever; the pages that a lease asks for are
reserved before it is handed out, so writing to them cannot raise SIGBUS in any process. Slots are
re-used last in, first out, and reserved no further than was ever asked of them: a load that needs
few slots at once, or short ones, touches few pages.

The memory is a memfd, so that receiver processes and other ranks of the node can map it. It is
accounted to this process's memory and does not use ``/dev/shm``, which has 64 MB in a container.
Whoever writes into a slot maps its pages first: here by `Arena.populate`.

Must not know: URIs, requests, tensors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import sys
import tempfile
import threading

from fastload_common.errors import OutOfBudgetError
from fastload_common.units import MIB, format_size

__all__ = ["Arena", "Slot"]

_log = logging.getLogger(__name__)

# madvise(2), Linux 5.14; Python has no name for it.
_MADV_POPULATE_WRITE = 23
# `mmap.madvise` holds the GIL: populate in steps of about a millisecond.
_POPULATE_STEP_BYTES = 2 * MIB


class Slot:
    """One leased piece of staging memory. The lessee owns it until `release`.

    Attributes:
        memory: writable, exactly as many bytes as were leased. Its contents are undefined.
        position_bytes: where it begins in the arena's file.
    """

    __slots__ = ("_arena", "_index", "_leased", "_size_bytes", "memory", "position_bytes")

    def __init__(self, arena: Arena, index: int, memory: memoryview) -> None:
        self._arena = arena
        self._index = index
        self._leased = True
        self._size_bytes = len(memory)
        self.memory = memory
        self.position_bytes = index * arena._stride_bytes

    def release(self) -> None:
        """Give the slot back; the memory must not be touched afterwards. Safe to call twice."""
        # Turns use after release into an error, except through views made from this one.
        with contextlib.suppress(BufferError):
            self.memory.release()
        self._arena._take_back(self)


class Arena:
    """A fixed number of equal slots. Every method may be called from any thread.

    Args:
        slot_bytes: size of one slot; the longest range that one request may ask for.
        slot_count: how many slots may be leased at once.

    Attributes:
        size_bytes: of the file behind the memory.

    Raises:
        OutOfBudgetError: the address space cannot be had.
    """

    def __init__(self, slot_bytes: int, slot_count: int) -> None:
        if slot_bytes < 1 or slot_count < 1:
            raise ValueError(f"not an arena: {slot_count} slots of {slot_bytes} bytes")
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        # Slots start on pages, so that they can be populated and registered one by one.
        self._stride_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        total_bytes = self._stride_bytes * slot_count
        if total_bytes > sys.maxsize:
            raise OutOfBudgetError(
                f"{slot_count} staging slots of {slot_bytes} bytes are more than can be addressed",
                hint="lower FASTLOAD_MEMORY_BYTES",
            )
        self.size_bytes = total_bytes
        self._fd: int | None
        self._map: mmap.mmap | None
        self._fd, self._map = _map_memory(total_bytes)
        # Where the system may use large pages for shared memory; elsewhere it does nothing.
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        # A slot may be given back wherever this thread allocates, by a generator that is collected.
        self._lock = threading.RLock()
        self._free: list[int] = []
        self._untouched = 0  # slots from this index on were never leased
        self._reserved_bytes: dict[int, int] = {}  # of each slot, from its start
        self._populated_bytes: dict[int, int] = {}
        self._leased = 0
        self._leased_bytes = 0
        self._peak_leased_bytes = 0
        self._closed = False

    @property
    def fd(self) -> int:
        """The file behind the memory; this arena's own, valid until its `close`.

        Raises:
            ValueError: it is closed.
        """
        if self._fd is None:
            raise ValueError("this arena is closed")
        return self._fd

    @property
    def peak_leased_bytes(self) -> int:
        """The most bytes that were leased at one time."""
        return self._peak_leased_bytes

    @property
    def leased_count(self) -> int:
        """Slots leased now."""
        return self._leased

    @property
    def is_closed(self) -> bool:
        """Whether nothing will ever be leased again."""
        return self._closed

    def try_lease(self, size_bytes: int | None = None) -> Slot | None:
        """Take a free slot. Never waits.

        Args:
            size_bytes: how much of the slot is needed. Default: all of it.

        Returns:
            The slot, which the caller must release; None if all are leased, or the arena is closed.

        Raises:
            OutOfBudgetError: the memory behind the slot cannot be had.
        """
        size_bytes = self.slot_bytes if size_bytes is None else size_bytes
        self._check_size(size_bytes)
        with self._lock:
            if self._closed or not (self._free or self._untouched < self.slot_count):
                return None
            slot = self._hand_out(size_bytes)
        return self._reserved(slot)

    @property
    def stride_bytes(self) -> int:
        """From the start of one slot to the start of the next: whole pages."""
        return self._stride_bytes

    def owns(self, memory: object) -> bool:
        """Whether an object that a view is of is this arena's map."""
        return memory is self._map

    def reserve(self, index: int) -> memoryview:
        """Reserve all pages of a slot, leased or not, so that they can be page-locked.

        Returns:
            Those pages. They may be used by whoever leases the slot.

        Raises:
            OutOfBudgetError: the memory behind the slot cannot be had.
            ValueError: this arena is closed.
        """
        self._reserve(index, self._stride_bytes)
        start = index * self._stride_bytes
        return self._view[start : start + self._stride_bytes]

    def populate(self, position_bytes: int, size_bytes: int) -> None:
        """Map the pages of a leased slot into this process, so that writing does not fault.

        Args:
            position_bytes: where in the arena's file; within a slot.
            size_bytes: how many bytes from there.
        """
        memory = self._map
        if memory is None:
            raise ValueError("this arena is closed")
        index, offset_bytes = divmod(position_bytes, self._stride_bytes)
        done_bytes = self._populated_bytes.get(index, 0)
        end_bytes = -(-(offset_bytes + size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if end_bytes <= done_bytes:
            return
        start, end = index * self._stride_bytes + done_bytes, index * self._stride_bytes + end_bytes
        # Without it (old kernel) the pages are mapped one fault at a time: slower, still right.
        with contextlib.suppress(OSError):
            for step in range(start, end, _POPULATE_STEP_BYTES):
                memory.madvise(_MADV_POPULATE_WRITE, step, min(_POPULATE_STEP_BYTES, end - step))
        self._populated_bytes[index] = end_bytes

    def close(self) -> None:
        """Give the memory back. Nothing is leased any more.

        Memory that is still in use (a slot not released, a view or tensor over one) stays
        mapped until its last user drops it. Safe to call twice.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._leased == 0:
                self._unmap()

    def _check_size(self, size_bytes: int) -> None:
        if not 0 < size_bytes <= self.slot_bytes:
            raise ValueError(f"{size_bytes} bytes asked of a slot of {self.slot_bytes} bytes")

    def _hand_out(self, size_bytes: int) -> Slot:
        """A free slot, of which there is one; the caller holds the lock."""
        is_new = not self._free
        index = self._untouched if is_new else self._free.pop()
        self._untouched += is_new
        self._leased += 1
        self._leased_bytes += size_bytes
        self._peak_leased_bytes = max(self._peak_leased_bytes, self._leased_bytes)
        start = index * self._stride_bytes
        return Slot(self, index, self._view[start : start + size_bytes])

    def _take_back(self, slot: Slot) -> None:
        with self._lock:
            if not slot._leased:
                return
            slot._leased = False
            self._leased -= 1
            self._leased_bytes -= slot._size_bytes
            self._free.append(slot._index)
            if self._closed and self._leased == 0:
                self._unmap()

    def _reserved(self, slot: Slot) -> Slot:
        """The slot, with the pages reserved that were never asked of it."""
        try:
            self._reserve(slot._index, slot._size_bytes)
        except BaseException:
            slot.release()
            raise
        return slot

    def _reserve(self, index: int, size_bytes: int) -> None:
        done_bytes = self._reserved_bytes.get(index, 0)
        if size_bytes <= done_bytes:
            return
        wanted_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        start = index * self._stride_bytes + done_bytes
        try:
            # Fails with an error where touching the pages would fail with SIGBUS.
            os.posix_fallocate(self.fd, start, wanted_bytes - done_bytes)
        except OSError as error:
            raise OutOfBudgetError(
                f"could not reserve staging slot {index + 1} of {self.slot_count} "
                f"({format_size(self.slot_bytes)} each): {error.strerror}",
                hint="lower FASTLOAD_MEMORY_BYTES or give the container more memory",
            ) from error
        self._reserved_bytes[index] = wanted_bytes

    def _unmap(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)
        self._view.release()
        # A view that somebody still holds keeps the mapping; the last one to go unmaps it, so
        # nothing here may refer to it any more.
        memory, self._map = self._map, None
        if memory is not None:
            with contextlib.suppress(BufferError):
                memory.close()


def _map_memory(size_bytes: int) -> tuple[int, mmap.mmap]:
    """Map shared memory behind a memfd, or behind a temporary file where there is no memfd."""
    fd: int | None = None
    try:
        fd = _open_memory(size_bytes)
        return fd, mmap.mmap(fd, size_bytes)
    except (OSError, OverflowError) as error:
        if fd is not None:
            os.close(fd)
        raise OutOfBudgetError(
            f"could not map {format_size(size_bytes)} of staging memory: "
            f"{getattr(error, 'strerror', None) or error}",
            hint="lower FASTLOAD_MEMORY_BYTES or raise the limit on address space (ulimit -v)",
        ) from error


def _open_memory(size_bytes: int) -> int:
    """A descriptor of so many bytes that no path leads to."""
    fd: int | None = None
    try:
        fd = os.memfd_create("fastload-staging", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        return fd
    except (AttributeError, OSError) as error:
        if fd is not None:
            os.close(fd)
        _log_fallback(str(error))
    fd, path = tempfile.mkstemp(prefix="fastload-staging-")
    try:
        os.unlink(path)
        os.truncate(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


@functools.cache
def _log_fallback(reason: str) -> None:
    _log.warning(
        "no memfd for staging memory (%s): a temporary file is used instead, which may be written "
        "to disk",
        reason,
    )
