"""Page-locked buffers for bytes that a device cannot copy from where they are.

They are slots of the staging memory, so they are within its budget, and pinned with it. A buffer is
filled from its start to its end, and again from its start when what was copied from it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastload_common.staging.arena import Slot
from fastload_common.staging.device import Mark

__all__ = ["Ring"]

_ALIGNMENT_BYTES = 64


class _Buffer:
    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.bytes = torch.frombuffer(slot.memory, dtype=torch.uint8)
        self.used_bytes = 0
        self.mark: Mark | None = None  # behind the last copy from it


class Ring:
    """One thread's.

    Args:
        lease: gives a pinned slot of whole size, or None where there is none now.
        limit: how many are leased at most.
        mark: makes a mark behind all copies so far.
    """

    def __init__(
        self, lease: Callable[[], Slot | None], limit: int, mark: Callable[[], Mark]
    ) -> None:
        self._lease = lease
        self._limit = limit
        self._mark = mark
        self._buffers: list[_Buffer] = []  # the oldest first; the last one is being filled

    def take(self, size_bytes: int) -> torch.Tensor | None:
        """So many bytes to fill and to copy from, at once; None: there is no buffer.

        Waits for the oldest copy where all buffers are being copied from.
        """
        if not self._fits(size_bytes) and not (self._turn() and self._fits(size_bytes)):
            return None
        buffer = self._buffers[-1]
        start = buffer.used_bytes
        end = start + size_bytes
        buffer.used_bytes = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return buffer.bytes[start:end]

    def release(self) -> None:
        """Give all slots back; nothing is being copied from them."""
        while self._buffers:
            buffer = self._buffers.pop()
            slot = buffer.slot
            del buffer
            slot.release()

    def _fits(self, size_bytes: int) -> bool:
        if not self._buffers:
            return False
        buffer = self._buffers[-1]
        return buffer.used_bytes + size_bytes <= len(buffer.bytes)

    def _turn(self) -> bool:
        """Begin another buffer: whether there is one."""
        if self._buffers:
            self._buffers[-1].mark = self._mark()
        slot = self._lease() if len(self._buffers) < self._limit else None
        if slot is not None:
            self._buffers.append(_Buffer(slot))
            return True
        if not self._buffers:
            return False
        oldest = self._buffers.pop(0)
        assert oldest.mark is not None
        try:
            oldest.mark.wait()
        finally:
            self._buffers.append(oldest)
        oldest.used_bytes, oldest.mark = 0, None
        return True
