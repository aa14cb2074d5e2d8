"""Placement on one device: what a chunk holds is copied while the next chunks arrive.

A chunk's memory is given back when the last copy from it is done, not before. Copies are made
straight out of the chunk where its memory is page-locked, this rank's or another one's; else
through the ring. Many small pieces of a chunk cross in one copy, and are put in place there.

Must not know: URIs, requests, names of tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fastload_common.clock import Clock
from fastload_common.errors import DeviceCopyError
from fastload_common.plan.geometry import contiguous_strides
from fastload_common.plan.pieces import Piece
from fastload_common.staging.arena import Arena, Slot
from fastload_common.staging.device import Device, Mark
from fastload_common.staging.pending import Pending
from fastload_common.staging.pins import Pins
from fastload_common.staging.placement import ChunkBytes, Placement
from fastload_common.staging.ring import Ring
from fastload_common.staging.route import Dense, Rows, Run, Spread, Table, dense, route, tables
from fastload_common.units import KIB

__all__ = ["DeviceBackend"]

# Smaller runs wait for the end of the chunk, and cross together with their neighbours: to ask for a
# copy takes as long as to make one of about this size. Not measured: see docs/gpu.md.
_SMALL_BYTES = 512 * KIB
# Between neighbours: these bytes cross for nothing, in less time than another copy takes to begin.
_GAP_BYTES = 16 * KIB
_ALIGNMENT_BYTES = 256
# Of the slots, one in so many may be a buffer of the ring.
_RING_SHARE = 8
_MOST_RING_SLOTS = 4
# With fewer, the ring would take too many of them.
_LEAST_SLOTS = 4


class DeviceBackend:
    """Places on one device. All but what its threads do is the loading thread's.

    Args:
        device: where; nothing else uses its stream.
        arena: this rank's staging memory.
        clock: measures.
        threaded: see `Pending`.
    """

    def __init__(
        self, device: Device, arena: Arena, clock: Clock, *, threaded: bool = True
    ) -> None:
        self._device = device
        self._arena = arena
        self._pins = Pins(device, arena, clock)
        self._pending = Pending(device.current, threaded=threaded)
        limit = min(max(arena.slot_count // _RING_SHARE, 1), _MOST_RING_SLOTS)
        if arena.slot_count < _LEAST_SLOTS:
            limit = 0
        self._ring = Ring(self._lease_pinned, limit, device.mark)
        self._scratch: torch.Tensor | None = None
        self._scratch_used_bytes = 0
        self._begun = False
        # Of the chunk that is being placed.
        self._chunk: ChunkBytes | None = None
        self._pinned = False
        self._small: list[tuple[int, torch.Tensor]] = []
        self._spreads: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._kept: list[torch.Tensor] = []  # pageable memory that copies read
        self.counts: Counter[str] = Counter()

    def start(self, slot_count: int) -> None:
        """Begin to pin memory beside what else there is to do before the first chunk."""
        self._pins.start(slot_count)

    @property
    def facts(self) -> dict[str, object]:
        """Numbers for the report."""
        return {
            "pinned_bytes": self._pins.own_bytes,
            "pinned_of_others_bytes": self._pins.peer_bytes,
            "pin_s": round(self._pins.seconds, 6),
            **self.counts,
        }

    def take(self, placement: Placement, chunk: ChunkBytes) -> None:
        """Copy what a chunk holds of a read; `end` must follow, before the next chunk."""
        self._check()
        target = placement.target()
        if target is None:
            placement.take(chunk)  # gathered in host memory, and copied when it is whole
            return
        with self._errors():
            if self._chunk is None:
                self._begin(chunk)
            unit = placement.unit
            for piece in placement.cut(chunk):
                self._cross(target, unit, piece, chunk)

    def end(self, release: Callable[[], None]) -> None:
        """The chunk holds nothing more for this device: give it back when its copies are done."""
        chunk, self._chunk = self._chunk, None
        if chunk is None:
            release()
            return
        try:
            with self._errors():
                self._flush(chunk)
        finally:
            kept, self._kept = self._kept, []
            self._small.clear()
            self._spreads = ([], [])
            self._pending.add(self._mark(), lambda: _release(kept, release))
        self._check()

    def release_done(self) -> None:
        """Give back what is not read any more; only where nothing is threaded."""
        self._pending.release_done()

    def finish(self) -> None:
        """Wait for everything.

        Raises:
            DeviceCopyError: a copy has failed.
        """
        self.settle()
        self._check()

    def settle(self) -> None:
        """Wait for everything, and raise nothing: something else has failed, or `finish` will."""
        self._pending.drain()
        if self._begun:
            try:
                self._device.finish()
            except Exception as error:  # noqa: BLE001 -- raised by `finish`
                self._pending.fail(error)
        self._begun = False
        self._ring.release()
        self._scratch = None
        self._scratch_used_bytes = 0

    def synchronize(self) -> None:
        """Wait for what the engine has asked of the device as well.

        Raises:
            DeviceCopyError: something of it has failed.
        """
        with self._errors():
            self._device.synchronize()

    def close(self) -> None:
        """End the thread and unpin all memory."""
        self.settle()
        self._pending.close()
        self._pins.close()

    # -- pieces -----------------------------------------------------------------------------

    def _begin(self, chunk: ChunkBytes) -> None:
        if not self._begun:
            self._device.begin()
            self._begun = True
        self._chunk = chunk
        self._pinned = self._pins.cover(chunk.data)

    def _cross(
        self, target: torch.Tensor, unit: torch.dtype, piece: Piece, chunk: ChunkBytes
    ) -> None:
        """Have one piece copied; its source offset counts from the chunk's first byte."""
        itemsize = unit.itemsize
        match route(piece, itemsize, same_dtype=target.dtype == unit):
            case Run(size_bytes):
                run = target.as_strided((size_bytes // itemsize,), (1,), piece.dst_offset)
                start = piece.src_offset * itemsize
                if size_bytes <= _SMALL_BYTES:
                    self._small.append((start, run.view(torch.uint8)))
                else:
                    self._bring(run.view(torch.uint8), chunk, start)
                    self.counts["run_bytes"] += size_bytes
            case Rows():
                for table in tables(piece):
                    self._bring_rows(target, unit, table, chunk)
            case Dense():
                count = _numel(piece.sizes)
                memory = self._room(count * itemsize).view(unit)
                for table in tables(dense(piece, int(memory.storage_offset()))):
                    self._bring_rows(memory, unit, table, chunk)
                self._spread(target, piece, memory, contiguous_strides(piece.sizes))
            case Spread(span_bytes):
                raw = self._room(span_bytes)
                self._bring(raw, chunk, piece.src_offset * itemsize)
                self._spread(target, piece, raw.view(unit), piece.src_strides)
                self.counts["spread_bytes"] += span_bytes

    def _spread(
        self,
        target: torch.Tensor,
        piece: Piece,
        memory: torch.Tensor,
        strides: tuple[int, ...],
    ) -> None:
        """From the device's own memory into the destination, before that memory is used again."""
        targets, sources = self._spreads
        targets.append(target.as_strided(piece.sizes, piece.dst_strides, piece.dst_offset))
        sources.append(memory.as_strided(piece.sizes, strides, int(memory.storage_offset())))

    def _bring(self, target: torch.Tensor, chunk: ChunkBytes, start: int) -> None:
        """One run of the chunk, from a byte of it on, into bytes of the device."""
        source = chunk.typed(torch.uint8)[start : start + len(target)]
        self._device.copy(target, self._readable(source))

    def _readable(self, source: torch.Tensor) -> torch.Tensor:
        """The same bytes where the device can read them while others go on."""
        if self._pinned or self._device.is_integrated:
            return source
        buffer = self._ring.take(len(source))
        if buffer is None:
            self.counts["pageable_bytes"] += len(source)
            return source
        self.counts["ring_bytes"] += len(source)
        return buffer.copy_(source)

    def _bring_rows(
        self, target: torch.Tensor, unit: torch.dtype, table: Table, chunk: ChunkBytes
    ) -> None:
        """One table of rows of the chunk."""
        itemsize = unit.itemsize
        shape = (table.rows, table.width)
        at = target.as_strided(shape, (table.dst_stride, 1), table.dst_offset)
        size_bytes = table.rows * table.width * itemsize
        # As bytes: the chunk need not be aligned for the dtype.
        source = chunk.typed(torch.uint8).as_strided(
            (table.rows, table.width * itemsize),
            (table.src_stride * itemsize, 1),
            table.src_offset * itemsize,
        )
        self.counts["row_bytes"] += size_bytes
        if self._device.copies_rows and self._pinned:
            self._device.copy_rows(at.view(torch.uint8), source)
            return
        gathered = self._gathered(source, size_bytes)
        if table.dst_stride == table.width:
            run = target.as_strided((table.rows * table.width,), (1,), table.dst_offset)
            self._device.copy(run.view(torch.uint8), gathered)
            return
        memory = self._room(size_bytes)
        self._device.copy(memory, gathered)
        self._spreads[0].append(at)
        self._spreads[1].append(memory.view(unit).view(shape))

    def _gathered(self, source: torch.Tensor, size_bytes: int) -> torch.Tensor:
        """Rows of the chunk as one run of host memory: only these bytes cross."""
        run = self._ring.take(size_bytes)
        if run is None:
            run = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            self._kept.append(run)
            self.counts["pageable_bytes"] += size_bytes
        else:
            self.counts["ring_bytes"] += size_bytes
        run.view(source.shape).copy_(source)
        return run

    # -- the end of a chunk -----------------------------------------------------------------

    def _flush(self, chunk: ChunkBytes) -> None:
        """Small pieces, neighbours together; then what is put in place on the device."""
        self._small.sort(key=lambda small: small[0])
        first = 0
        while first < len(self._small):
            last, end = first, self._end_of(first)
            while last + 1 < len(self._small) and self._small[last + 1][0] <= end + _GAP_BYTES:
                last += 1
                end = max(end, self._end_of(last))
            self._bring_small(chunk, self._small[first : last + 1], end)
            first = last + 1
        self._put_in_place()

    def _end_of(self, index: int) -> int:
        start, target = self._small[index]
        return start + len(target)

    def _bring_small(
        self, chunk: ChunkBytes, pieces: list[tuple[int, torch.Tensor]], end: int
    ) -> None:
        """Neighbours, up to a byte of the chunk."""
        start, target = pieces[0]
        if len(pieces) == 1:
            self._bring(target, chunk, start)
            self.counts["run_bytes"] += len(target)
            return
        memory = self._room(end - start)
        self._bring(memory, chunk, start)
        self.counts["packed_bytes"] += end - start
        self.counts["packed_pieces"] += len(pieces)
        for at, target in pieces:
            self._spreads[0].append(target)
            self._spreads[1].append(memory[at - start : at - start + len(target)])

    def _room(self, size_bytes: int) -> torch.Tensor:
        """Memory of the device, aligned, until `_put_in_place`, which it calls if it must."""
        if self._scratch is None:
            self._scratch = self._device.memory(self._arena.stride_bytes + _ALIGNMENT_BYTES)
        if self._scratch_used_bytes + size_bytes > len(self._scratch):
            # Copies into it come after what is put in place from it: no wait.
            self._put_in_place()
        start = self._scratch_used_bytes
        end = start + size_bytes
        self._scratch_used_bytes = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._scratch[start:end]

    def _put_in_place(self) -> None:
        targets, sources = self._spreads
        self._scratch_used_bytes = 0
        if targets:
            self._device.spread(targets, sources)
        self._spreads = ([], [])

    # -- memory and errors ------------------------------------------------------------------

    def _lease_pinned(self) -> Slot | None:
        slot = self._arena.try_lease()
        if slot is not None and not self._pins.cover(slot.memory):
            slot.release()
            return None
        return slot

    def _mark(self) -> Mark:
        try:
            return self._device.mark()
        except Exception as error:  # noqa: BLE001 -- kept, and raised by `_check`
            self._pending.fail(error)
            return _Finish(self._device)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns the runtime's errors into ours: an engine's own would be taken for the model's."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._error(error) from error

    def _check(self) -> None:
        error = self._pending.error
        if error is not None:
            raise self._error(error) from error

    def _error(self, error: BaseException) -> DeviceCopyError:
        return DeviceCopyError(
            f"copying weights to {self._device.name} failed: {type(error).__name__}: {error}",
            hint="the model is not whole; see the kernel's log for faults of the device or driver",
            device=self._device.name,
        )


class _Finish:
    """A mark where there could be none: all is done when the device is."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def is_done(self) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        self._device.finish()


def _release(kept: list[torch.Tensor], release: Callable[[], None]) -> None:
    kept.clear()
    release()


def _numel(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count
