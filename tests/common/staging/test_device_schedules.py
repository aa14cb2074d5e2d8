"""Random loads under random schedules: no memory is used again before its copy is done."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload_common.errors import DeviceCopyError
from fastload_common.staging import device_backend, route
from fastload_common.staging.pending import Pending
from fastload_common.staging.ring import Ring
from fastload_common.testing.fake_device import FakeDevice
from tests.common.staging.device_harness import CPU, Rig, check_load
from tests.common.staging.device_programs import Program

seeds = st.integers(0, 1 << 30)


class WatchedRing(Ring):
    """Notes each part of a buffer that is given out while a device has still to read it."""

    device: FakeDevice | None = None
    reused_early = 0
    taken = 0

    def take(self, size_bytes: int) -> torch.Tensor | None:
        part = super().take(size_bytes)
        if part is not None and self.device is not None:
            WatchedRing.taken += 1
            WatchedRing.reused_early += self.device.reads(part.data_ptr(), len(part))
        return part


@pytest.fixture(autouse=True, scope="module")
def _small_sizes() -> Iterator[None]:
    """All ways are taken by small tensors too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_backend, "_SMALL_BYTES", 64)
        patch.setattr(device_backend, "_GAP_BYTES", 32)
        patch.setattr(route, "SHORTEST_ROW_BYTES", 8)
        patch.setattr(route, "_MOST_TABLES", 3)
        patch.setattr(device_backend, "Ring", WatchedRing)
        yield


def make_rig(
    seed: int, *, threaded: bool = False, real: torch.device | None = None
) -> tuple[Rig, Program]:
    random = Random(seed)
    program = Program(seed)
    refused = random.choice(("nothing", "nothing", "peers", "everything", "some"))
    device = FakeDevice(
        copies_rows=random.random() < 0.7,
        is_integrated=random.random() < 0.2,
        refuses=lambda read_only: refused == "everything" or (refused == "peers" and read_only),
        pinned_limit_bytes=3 * 4096 if refused == "some" else None,
    )
    WatchedRing.device = device if real is None else None
    rig = Rig(
        program.tensors,
        device=device if real is None else None,
        target=real or CPU,
        lead_bytes=random.choice((64, 64, 65, 72)),
        slot_count=random.randint(1, 9),
        peer_share=random.choice((0.0, 0.5, 1.0)),
        merge_gap_bytes=random.choice((0, 64, 4096)),
        chunk_bytes=random.choice((512, 4096)),
        threaded=threaded,
        seed=seed,
    )
    return rig, program


@given(seed=seeds)
@settings(max_examples=300)
def test_no_memory_is_used_again_before_its_copy_is_done(seed: int) -> None:
    rig, program = make_rig(seed)
    check_load(rig, program.params, program.run)
    assert WatchedRing.reused_early == 0


@given(seed=seeds)
@settings(max_examples=60)
def test_nor_where_a_thread_waits_for_the_copies(seed: int) -> None:
    rig, program = make_rig(seed, threaded=True)
    check_load(rig, program.params, program.run)
    assert WatchedRing.reused_early == 0


@given(seed=seeds)
@settings(max_examples=60)
def test_a_copy_that_fails_ends_the_load_and_leaves_nothing(seed: int) -> None:
    rig, program = make_rig(seed)
    assert rig.device is not None
    rig.device.fails_at = Random(seed).randint(1, 12)
    error: DeviceCopyError | None = None
    try:
        check_load(rig, program.params, program.run)
    except DeviceCopyError as raised:
        error = raised
    if len(rig.device.operations) < rig.device.fails_at:
        assert error is None
    else:
        assert "illegal memory access" in str(error)
    assert rig.arena.leased_count == 0
    assert rig.peers.leased_count == 0
    assert rig.device.pinned == {}


def test_the_schedules_use_all_ways() -> None:
    """What the property is about happens: rings go round, slots are waited for, and so on."""
    WatchedRing.taken = 0
    kinds: dict[str, int] = {}
    waited = 0
    for seed in range(150):
        rig, program = make_rig(seed)
        check_load(rig, program.params, program.run)
        assert rig.device is not None
        for name in (*(one.kind for one in rig.device.operations), *_counts(rig)):
            kinds[name] = kinds.get(name, 0) + 1
        waited += len(rig.requests) > rig.slot_count
    assert min(kinds[name] for name in ("copy", "rows", "spread", "mark")) > 50
    assert min(kinds[name] for name in ("packed_pieces", "ring_bytes", "pageable_bytes")) > 5
    assert WatchedRing.taken > 100
    assert waited > 50


def _counts(rig: Rig) -> list[str]:
    return [name for facts in rig.placer.facts.values() for name, n in facts.items() if n]  # type: ignore[attr-defined]


def test_a_slot_given_back_at_once_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pending, "add", lambda self, mark, release: release())
    assert _noticed() > 10


def test_a_ring_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchedRing, "_turn", _turn_at_once)
    before = WatchedRing.reused_early
    _noticed()
    found, WatchedRing.reused_early = WatchedRing.reused_early - before, 0
    assert found > 3


def _turn_at_once(self: Ring) -> bool:
    self._mark = lambda: _Reached()
    return Ring._turn(self)


class _Reached:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None: ...


def _noticed() -> int:
    """How many loads of some are wrong, or used memory again too early."""
    count = 0
    for seed in range(60):
        rig, program = make_rig(seed)
        try:
            check_load(rig, program.params, program.run)
        except AssertionError:
            count += 1
    return count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("first_seed", range(0, 100, 20))
def test_the_same_loads_on_a_real_device(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        rig, program = make_rig(seed, threaded=True, real=torch.device("cuda", 0))
        check_load(rig, program.params, program.run)
