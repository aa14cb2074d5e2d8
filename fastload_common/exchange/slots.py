"""Filled chunks on their way: a slot of one's own that several ranks read, and a peer's slot.

A slot is free again when the last rank that needs it has said so, this one included. Memory of
another rank is mapped for reading only, through a descriptor that allows nothing else.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from fastload_common.errors import OutOfBudgetError
from fastload_common.plan.records import Chunk
from fastload_common.units import format_size

__all__ = ["Filled", "OwnChunk", "PeerChunk", "PeerMemories", "PeerMemory", "Shared", "read_only"]


class Filled(Protocol):
    """A fetched chunk in this rank's own staging memory, as the transfer gives it."""

    @property
    def chunk(self) -> Chunk: ...

    @property
    def data(self) -> memoryview: ...

    @property
    def position_bytes(self) -> int: ...

    def release(self) -> None: ...


class Shared:
    """One own slot with the ranks that have still to take it. For any thread."""

    def __init__(self, filled: Filled, takers: Iterable[int]) -> None:
        self._filled = filled
        self._takers = set(takers)
        self._lock = threading.Lock()

    def taken_by(self, rank: int) -> bool:
        """One rank has what it needs; whether it was the last one: then the slot is free.

        Raises:
            KeyError: that rank was not to take it, or has.
        """
        with self._lock:
            self._takers.remove(rank)
            if self._takers:
                return False
        self._filled.release()
        return True

    def abandon(self) -> None:
        """Free the slot whoever still reads it."""
        self._filled.release()

    @property
    def takers(self) -> set[int]:
        with self._lock:
            return set(self._takers)


class OwnChunk:
    """A chunk that this rank fetched, for itself and perhaps for others.

    Attributes:
        data: its bytes, until `release`.
    """

    __slots__ = ("_release", "chunk", "data")

    def __init__(self, chunk: Chunk, data: memoryview, release: Callable[[], None]) -> None:
        self.chunk = chunk
        self.data = data
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """This rank needs it no longer. Safe to call twice."""
        release, self._release = self._release, None
        if release is not None:
            release()


class PeerChunk(OwnChunk):
    """A chunk that another rank fetched, in that rank's memory: ``data`` cannot be written."""

    __slots__ = ()

    def release(self) -> None:
        """See `OwnChunk`; the memory must not be read afterwards."""
        # Turns use after release into an error, except through views made from this one.
        with contextlib.suppress(BufferError):
            self.data.release()
        super().release()


class PeerMemory:
    """The staging memory of another rank, mapped for reading.

    Args:
        fd: the memory's descriptor; not kept.
        size_bytes: of the memory.

    Raises:
        OSError, ValueError: it cannot be mapped.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._map = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)
        self.size_bytes = size_bytes

    def at(self, position_bytes: int, size_bytes: int) -> memoryview:
        """A part of it.

        Raises:
            ValueError: it is not inside.
        """
        if position_bytes + size_bytes > self.size_bytes:
            raise ValueError(f"{size_bytes} bytes at {position_bytes} of {self.size_bytes}")
        return self._view[position_bytes : position_bytes + size_bytes]

    def close(self) -> None:
        """Unmap it; what somebody still looks at stays mapped until it is dropped."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()


class PeerMemories:
    """The staging memory of all others, each mapped when something of it is first looked at."""

    def __init__(self) -> None:
        self._mapped: dict[int, PeerMemory] = {}

    def look(
        self, rank: int, arena: tuple[int, int] | None, position_bytes: int, size_bytes: int
    ) -> memoryview:
        """A part of one rank's memory.

        Args:
            arena: descriptor and size of that memory, as that rank gave them.

        Raises:
            OutOfBudgetError: it cannot be mapped here.
            ValueError: there is none, or no such part.
        """
        memory = self._mapped.get(rank)
        if memory is None:
            if arena is None:
                raise ValueError("it was not given")
            try:
                memory = self._mapped[rank] = PeerMemory(*arena)
            except OSError as error:
                raise OutOfBudgetError(
                    f"the staging memory of rank {rank} ({format_size(arena[1])}) could not be "
                    f"mapped: {error.strerror}",
                    hint="raise the limit on address space (ulimit -v) or lower "
                    "FASTLOAD_MEMORY_BYTES, or set FASTLOAD_EXCHANGE=off",
                ) from error
        return memory.at(position_bytes, size_bytes)

    def close(self) -> None:
        while self._mapped:
            self._mapped.popitem()[1].close()


def read_only(fd: int) -> int:
    """A descriptor of the same memory that cannot write; the caller owns it.

    Where the system has no such way it can write, and only the map is for reading.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.dup(fd)
