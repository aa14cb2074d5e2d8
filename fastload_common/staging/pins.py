"""Which host memory is page-locked for a device: staging slots, one's own and other ranks'.

Slot by slot, when something of it is first used, and then for the whole load: a load that needs few
slots pins few. Own slots are staging memory, so what is pinned never exceeds the memory budget; the
pages of other ranks' memory are theirs, and counted there.

Where the system refuses, copies go from pageable memory; the log says it once.
"""

from __future__ import annotations

import functools
import logging
import mmap
import threading
from dataclasses import dataclass, field

import numpy as np

from fastload_common.clock import Clock
from fastload_common.errors import OutOfBudgetError
from fastload_common.staging.arena import Arena
from fastload_common.staging.device import Device, PinRefusedError

__all__ = ["Pins"]

_log = logging.getLogger(__name__)

# Another rank's memory is about as large as this one's.
_LARGEST_SHARE = 4


@dataclass(slots=True)
class _Area:
    """One map of memory.

    Attributes:
        held: keeps it mapped.
        stride_bytes: a slot and the next begin that far from each other.
        pinned: slots that are page-locked.
        refused: whether the system refused one.
    """

    held: memoryview
    base: int
    stride_bytes: int
    arena: Arena | None
    pinned: set[int] = field(default_factory=set)
    refused: bool = False


class Pins:
    """For one device. From any thread.

    Args:
        device: pins.
        arena: this rank's own staging memory.
        clock: measures what pinning costs.

    Attributes:
        own_bytes, peer_bytes: pinned, of this rank's memory and of other ranks'.
        seconds: that pinning took, in whatever thread.
    """

    def __init__(self, device: Device, arena: Arena, clock: Clock) -> None:
        self._device = device
        self._arena = arena
        self._clock = clock
        self._areas: dict[int, _Area] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.own_bytes = self.peer_bytes = 0
        self.seconds = 0.0

    def cover(self, data: memoryview) -> bool:
        """Whether these bytes, which lie in one slot, are page-locked; they are from now on."""
        self._stopping.set()
        if not isinstance(data.obj, mmap.mmap) or not len(data):
            return False  # memory that is no slot
        with self._lock:
            area = self._area_of(data)
            slot, offset_bytes = divmod(_address(data) - area.base, area.stride_bytes)
            if offset_bytes + len(data) > area.stride_bytes:
                return False  # another rank's slots are longer
            return self._pin(area, slot)

    def start(self, slot_count: int) -> None:
        """Pin so many of the own slots in a thread, until the first one is needed."""
        if self._thread is None and slot_count > 0:
            self._thread = threading.Thread(
                target=self._pin_own, args=(slot_count,), name="fastload-pins", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Unpin everything; nothing reads it any more. Safe to call twice."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for area in self._areas.values():
                for slot in area.pinned:
                    self._unpin(area.base + slot * area.stride_bytes)
            self._areas.clear()

    def _pin_own(self, slot_count: int) -> None:
        try:
            with self._device.current():
                for slot in range(min(slot_count, self._arena.slot_count)):
                    if self._stopping.is_set():
                        return
                    with self._lock:
                        if not self._pin(self._area_of(self._arena.reserve(slot)), slot):
                            return
        except Exception as error:  # noqa: BLE001 -- slots are pinned when they are used, or not
            _log.warning("staging memory could not be page-locked ahead: %s", error)

    def _area_of(self, data: memoryview) -> _Area:
        memory = data.obj
        area = self._areas.get(id(memory))
        if area is None:
            held = memoryview(memory)
            stride_bytes = self._arena.stride_bytes
            own = self._arena.owns(memory)
            if not own and len(held) % stride_bytes:
                stride_bytes = len(held)  # not made as ours is: as one
            area = _Area(held, _address(held), stride_bytes, self._arena if own else None)
            # The ranks of a node divide its budget evenly: this is no rank's staging memory.
            area.refused = len(held) > _LARGEST_SHARE * self._arena.size_bytes
            self._areas[id(memory)] = area
        return area

    def _pin(self, area: _Area, slot: int) -> bool:
        """Whether the slot is pinned, at last; the lock is held."""
        if slot in area.pinned:
            return True
        if area.refused:
            return False
        started_s = self._clock.monotonic_s()
        try:
            if area.arena is not None:
                area.arena.reserve(slot)
            self._device.register(
                area.base + slot * area.stride_bytes,
                area.stride_bytes,
                read_only=area.held.readonly,
            )
        except (PinRefusedError, OutOfBudgetError) as error:
            area.refused = True
            _log_refusal("another rank's" if area.arena is None else "its own", str(error))
            return False
        finally:
            self.seconds += self._clock.monotonic_s() - started_s
        area.pinned.add(slot)
        if area.arena is None:
            self.peer_bytes += area.stride_bytes
        else:
            self.own_bytes += area.stride_bytes
        return True

    def _unpin(self, address: int) -> None:
        try:
            self._device.unregister(address)
        except Exception as error:  # noqa: BLE001 -- the load is over, and this changes nothing
            _log.warning("staging memory could not be unpinned: %s", error)


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])


@functools.cache
def _log_refusal(whose: str, reason: str) -> None:
    _log.warning(
        "a rank could not page-lock %s staging memory (%s): copies to the device are slower",
        whose,
        reason,
    )
