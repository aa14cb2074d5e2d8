"""Loads onto a device from checkpoints in memory, with a schedule that a seed decides.

The device is a fake one, whose copies read their source as late as the schedule says; or a real
one, where the same loads must give the same values.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch

from fastload_common.exchange.slots import PeerMemory, read_only
from fastload_common.load.executor import Executor
from fastload_common.load.report import LoadReport
from fastload_common.plan.records import Chunk, Plan
from fastload_common.staging.arena import Arena, Slot
from fastload_common.staging.placer import Placer
from fastload_common.testing.fake_device import FakeDevice
from fastload_common.trace.recorder import Recorder
from tests.bits import bytes_of
from tests.common.trace.harness import Body, MemoryCheckpoint

CHUNK_BYTES = 4096
CPU = torch.device("cpu")


class WatchedArena(Arena):
    """Notes each slot that is leased again while a device has still to read it."""

    def __init__(self, slot_bytes: int, slot_count: int, device: FakeDevice | None) -> None:
        super().__init__(slot_bytes, slot_count)
        self._watched = device
        self.reused_early = 0

    def try_lease(self, size_bytes: int | None = None) -> Slot | None:
        slot = super().try_lease(size_bytes)
        if slot is not None and self._watched is not None:
            self.reused_early += self._watched.reads(address_of(slot.memory), len(slot.memory))
        return slot


class FilledSlot:
    """A chunk in a slot, as this rank's own or as another rank's."""

    def __init__(
        self, chunk: Chunk, slot: Slot, data: memoryview, released: Callable[[], None]
    ) -> None:
        self.chunk = chunk
        self.data = data
        self._slot = slot
        self._released = released

    def release(self) -> None:
        self._slot.release()
        self._released()


@dataclass
class Rig(MemoryCheckpoint):
    """A checkpoint, staging memory of a few slots, and a device.

    Attributes:
        device: records; None: a real one.
        target: where parameters are.
        peer_share: this share of the chunks lies in another rank's memory, mapped for reading.
        threaded: whether a thread waits for the copies; else the schedule does.
    """

    device: FakeDevice | None = None
    target: torch.device = CPU
    slot_count: int = 3
    peer_share: float = 0.0
    threaded: bool = False
    seed: int = 0
    chunk_bytes: int = CHUNK_BYTES
    placed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.random = Random(self.seed)
        self.shuffle = self.random.shuffle
        self.arena = WatchedArena(self.chunk_bytes, self.slot_count, self.device)
        self.peers = WatchedArena(self.chunk_bytes, self.slot_count, self.device)
        fd = read_only(self.peers.fd)
        self.peer_memory = PeerMemory(fd, self.peers.size_bytes)
        os.close(fd)
        self.placer = Placer(
            self.arena,
            open_device=(lambda device: self.device) if self.device is not None else None,
            threaded=self.threaded,
        )
        self._freed = threading.Condition()

    def executor(self) -> Executor:
        self.report = LoadReport("test", "0", "s3://test", 0)
        return Executor(
            self.fetch,
            chunk_bytes=self.chunk_bytes,
            merge_gap_bytes=self.merge_gap_bytes,
            report=self.report,
            placer=self.placer,
        )

    def fetch(self, chunks: Iterable[Chunk]) -> Iterator[FilledSlot]:  # type: ignore[override]
        chunks = list(chunks)
        self.shuffle(chunks)
        for number, chunk in enumerate(chunks):
            span = chunk.byte_range
            self.requests.append(span)
            is_peers = self.random.random() < self.peer_share
            arena = self.peers if is_peers else self.arena
            slot = self._lease(arena, span.size_bytes)
            slot.memory[:] = self.body[span.start : span.end]
            data = slot.memory
            if is_peers:
                data = self.peer_memory.at(slot.position_bytes, span.size_bytes)
            self._pass_time()
            self.placed.append(number)
            yield FilledSlot(chunk, slot, data, self._wake)

    def load(self, consume: Callable[[dict[str, torch.Tensor]], object]) -> None:
        """Trace, load, and give everything back."""
        executor = self.executor()
        recorder = Recorder(executor)
        try:
            with recorder.recording():
                consume({name: recorder.lazy(entry) for name, entry in self.entries.items()})
            transfers = recorder.ledger.transfers
            executor.run_all(transfers, self._take_plan)
            assert all(transfer.done for transfer in transfers)
        finally:
            recorder.close()
            executor.close()
            self.peer_memory.close()
            self.peers.close()
            self.arena.close()

    def _take_plan(self, plan: Plan) -> None:
        self.plan = plan

    def _lease(self, arena: Arena, size_bytes: int) -> Slot:
        with self._freed:
            while (slot := arena.try_lease(size_bytes)) is None:
                if self.threaded:
                    assert self._freed.wait(20), "no slot comes back"
                    continue
                leased = arena.leased_count
                self.placer.release_done()
                if self.device is not None and arena.leased_count == leased:
                    assert self.device.done_count < len(self.device.operations), "a leak"
                    self.device.do(self.random.randint(1, 4))
        return slot

    def _pass_time(self) -> None:
        if self.device is not None and not self.threaded:
            self.device.do(self.random.choice((0, 0, 1, 2, 5)))
            if self.random.random() < 0.5:
                self.placer.release_done()

    def _wake(self) -> None:
        with self._freed:
            self._freed.notify_all()


def check_load(rig: Rig, params: dict[str, torch.Tensor], body: Body) -> dict[str, torch.Tensor]:
    """Load, and compare with the same body over real tensors on the host. Returns what came."""
    expected = {name: param.clone() for name, param in params.items()}
    body({name: tensor.clone() for name, tensor in rig.tensors.items()}, expected)
    actual = {name: param.clone().to(rig.target) for name, param in params.items()}
    rig.load(lambda loaded: body(loaded, actual))
    for name, param in actual.items():
        assert same(param, expected[name]), name
    assert_clean(rig)
    return actual


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    return bytes_of(left) == bytes_of(right)


def assert_clean(rig: Rig) -> None:
    """Nothing is leased, pinned or waited for, and nothing was used too early or too much."""
    assert rig.arena.leased_count == 0
    assert rig.peers.leased_count == 0
    assert not [
        t for t in threading.enumerate() if t.name.startswith(("fastload-copies", "fastload-pins"))
    ]
    device = rig.device
    if device is None:
        return
    assert rig.arena.reused_early + rig.peers.reused_early == 0
    assert device.pinned == {}
    assert device.peak_pinned_bytes <= rig.arena.size_bytes + rig.peers.size_bytes
    assert device.memory_bytes <= rig.arena.stride_bytes + 256
    assert device.done_count == len(device.operations)


def address_of(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])
