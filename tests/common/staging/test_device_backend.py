"""What is asked of a device for the slices that engines take, in which order; what fails how."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import pytest
import torch

from fastload_common.errors import DeviceCopyError
from fastload_common.exchange.slots import PeerMemory
from fastload_common.staging import pins
from fastload_common.staging.arena import Arena
from fastload_common.staging.placement import ChunkBytes, Placement
from fastload_common.staging.placer import Placer
from fastload_common.testing.fake_device import FakeDevice
from fastload_common.units import KIB, MIB
from tests.common.staging.device_harness import CPU, Rig, WatchedArena, check_load
from tests.common.trace.harness import arange

META = torch.device("meta")
CHUNK = 256 * KIB


def rig(tensors: dict[str, torch.Tensor], device: FakeDevice, **options: object) -> Rig:
    return Rig(tensors, device=device, chunk_bytes=CHUNK, **options)  # type: ignore[arg-type]


def kinds(device: FakeDevice) -> list[str]:
    return [operation.kind for operation in device.operations]


def test_a_large_tensor_is_one_copy_for_each_chunk() -> None:
    device = FakeDevice()
    weight = arange(512, 512)  # 1 MiB
    check_load(rig({"w": weight}, device), {"w": torch.zeros(512, 512)}, _copy_all)
    assert device.moved_bytes("copy") == MIB
    assert kinds(device).count("copy") == len(_marks(device))
    assert device.count("spread") == 0


def test_no_tensor_waits_for_its_last_byte() -> None:
    """What a chunk holds is asked for before the next chunk is taken."""
    device = FakeDevice()
    weight = arange(512, 512)
    load = rig({"w": weight}, device)
    asked: list[int] = []
    plain = load._pass_time

    def note() -> None:
        asked.append(device.moved_bytes("copy"))
        plain()

    load._pass_time = note  # type: ignore[method-assign]
    check_load(load, {"w": torch.zeros(512, 512)}, _copy_all)
    assert len(asked) >= 4
    assert asked == sorted(set(asked)), "each chunk asks for its part at once"


def test_only_this_ranks_columns_cross() -> None:
    device = FakeDevice()
    weight = arange(256, 1024)
    load = rig({"w": weight}, device, merge_gap_bytes=CHUNK)
    check_load(load, {"w": torch.zeros(256, 256)}, lambda t, p: p["w"].copy_(t["w"][:, 256:512]))
    assert device.moved_bytes("copy", "rows") == 256 * 256 * 4
    assert 0 < device.count("rows") <= len(load.requests)
    assert device.count("spread") == 0


def test_columns_are_gathered_on_the_host_where_rows_cannot_be_copied() -> None:
    device = FakeDevice(copies_rows=False)
    weight = arange(256, 1024)
    load = rig({"w": weight}, device, merge_gap_bytes=CHUNK, slot_count=8)
    check_load(load, {"w": torch.zeros(256, 256)}, lambda t, p: p["w"].copy_(t["w"][:, 256:512]))
    assert device.moved_bytes("copy", "rows") == 256 * 256 * 4
    assert _facts(load)["ring_bytes"] == 256 * 256 * 4


def test_many_small_tensors_of_a_chunk_cross_in_one_copy() -> None:
    device = FakeDevice()
    tensors = {f"w{k}": arange(100, start=k) for k in range(200)}
    load = rig(tensors, device)
    check_load(load, {name: torch.zeros(100) for name in tensors}, _copy_all)
    assert len(load.requests) == 1
    assert kinds(device) == ["copy", "spread", "mark"]
    assert _facts(load)["packed_pieces"] == 200


def test_small_tensors_far_apart_do_not_bring_what_is_between() -> None:
    device = FakeDevice()
    tensors = {"a": arange(10), "big": arange(30_000), "b": arange(10)}
    load = rig(tensors, device, merge_gap_bytes=CHUNK)
    check_load(
        load,
        {"a": torch.zeros(10), "b": torch.zeros(10)},
        lambda t, p: [p[name].copy_(t[name]) for name in p],
    )
    assert device.moved_bytes("copy") == 80


def test_casts_are_made_on_the_device() -> None:
    device = FakeDevice()
    weight = arange(256, 256, dtype=torch.bfloat16)
    check_load(rig({"w": weight}, device), {"w": torch.zeros(256, 256)}, _copy_all)
    assert device.moved_bytes("copy") == weight.nbytes, "not the wider form"
    assert device.count("spread") == len(_marks(device))


def test_pinned_memory_is_the_slots_and_they_are_pinned_once() -> None:
    device = FakeDevice()
    load = rig({"w": arange(1024, 1024)}, device, slot_count=2)
    check_load(load, {"w": torch.zeros(1024, 1024)}, _copy_all)
    assert len(load.requests) >= 16
    assert device.peak_pinned_bytes <= load.arena.size_bytes
    assert _facts(load)["pinned_bytes"] == device.peak_pinned_bytes


def test_a_short_load_pins_few_slots() -> None:
    device = FakeDevice()
    load = rig({"w": arange(16, 16)}, device, slot_count=64)
    check_load(load, {"w": torch.zeros(16, 16)}, _copy_all)
    assert device.peak_pinned_bytes == load.arena.stride_bytes


def test_where_pinning_is_refused_the_load_goes_on_and_says_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pins._log_refusal.cache_clear()
    for _ in range(2):
        device = FakeDevice(refuses=lambda read_only: True)
        load = rig({"w": arange(512, 512)}, device, slot_count=4)
        check_load(load, {"w": torch.zeros(512, 512)}, _copy_all)
        assert device.peak_pinned_bytes == 0
        assert _facts(load)["pageable_bytes"] == MIB
    assert [r.message for r in caplog.records if "page-lock" in r.message] == [
        "a rank could not page-lock its own staging memory (refused by the test): copies to the "
        "device are slower"
    ]


def test_other_ranks_memory_is_pinned_where_that_is_allowed() -> None:
    device = FakeDevice()
    load = rig({"w": arange(512, 512)}, device, peer_share=1.0)
    check_load(load, {"w": torch.zeros(512, 512)}, _copy_all)
    assert 0 < device.peak_pinned_bytes <= load.peers.size_bytes
    assert _facts(load)["pinned_bytes"] == 0
    assert "ring_bytes" not in _facts(load)


def test_memory_of_another_size_than_a_ranks_is_not_pinned() -> None:
    """A map of a large file, say: to pin it would take what nobody has allowed."""
    device = FakeDevice()
    load = rig({"w": arange(512, 512)}, device, peer_share=1.0, slot_count=4)
    load.peers.close()
    load.peers = WatchedArena(CHUNK, 20, device)
    load.peer_memory = PeerMemory(load.peers.fd, load.peers.size_bytes)
    check_load(load, {"w": torch.zeros(512, 512)}, _copy_all)
    assert _facts(load)["pinned_of_others_bytes"] == 0
    assert device.peak_pinned_bytes <= load.arena.size_bytes


def test_other_ranks_memory_goes_through_the_ring_where_read_only_maps_are_refused() -> None:
    device = FakeDevice(refuses=lambda read_only: read_only)
    load = rig({"w": arange(512, 512)}, device, peer_share=1.0, slot_count=8)
    check_load(load, {"w": torch.zeros(512, 512)}, _copy_all)
    assert _facts(load)["ring_bytes"] == MIB
    assert _facts(load)["pinned_bytes"] == load.arena.stride_bytes, "one buffer, a slot"


def test_an_integrated_device_gets_no_second_copy() -> None:
    device = FakeDevice(is_integrated=True, refuses=lambda read_only: True)
    load = rig({"w": arange(512, 512)}, device, slot_count=8)
    check_load(load, {"w": torch.zeros(512, 512)}, _copy_all)
    assert device.memory_bytes == 0
    assert load.arena.peak_leased_bytes <= 8 * CHUNK
    assert "ring_bytes" not in _facts(load)
    assert "pageable_bytes" not in _facts(load)


def test_a_failed_copy_is_raised_before_the_load_ends() -> None:
    device = FakeDevice()
    device.fails_at = 1
    with pytest.raises(
        DeviceCopyError, match=r"fake:0 failed.*illegal memory access.*kernel's log"
    ):
        check_load(rig({"w": arange(16, 16)}, device), {"w": torch.zeros(16, 16)}, _copy_all)
    assert device.pinned == {}


def test_slots_come_back_though_copies_fail() -> None:
    """Whoever waits for memory would never hear of the error."""
    device = FakeDevice()
    device.fails_at = 2
    load = rig({"w": arange(1024, 1024)}, device, slot_count=1, threaded=True)
    with pytest.raises(DeviceCopyError):
        check_load(load, {"w": torch.zeros(1024, 1024)}, _copy_all)
    assert load.arena.leased_count == 0


def test_an_error_of_the_fetch_waits_for_the_copies_and_stays_the_error() -> None:
    device = FakeDevice()
    load = rig({"w": arange(1024, 1024)}, device, threaded=True)
    plain = load._lease

    def lease(arena: object, size_bytes: int) -> object:
        if len(load.placed) == 5:
            raise ConnectionError("the store is gone")
        return plain(arena, size_bytes)  # type: ignore[arg-type]

    load._lease = lease  # type: ignore[method-assign, assignment]
    with pytest.raises(ConnectionError, match="the store is gone"):
        check_load(load, {"w": torch.zeros(1024, 1024)}, _copy_all)
    assert load.arena.leased_count == 0
    assert device.done_count == len(device.operations) > 0
    assert device.pinned == {}


def test_copies_come_after_what_the_engine_asked_for_and_end_with_the_load() -> None:
    device = FakeDevice()
    check_load(rig({"w": arange(512, 512)}, device), {"w": torch.zeros(512, 512)}, _copy_all)
    assert device.calls[:2] == ["begin", "finish"]


def test_the_device_is_that_of_the_target() -> None:
    asked: list[torch.device] = []

    def open_device(device: torch.device) -> None:
        asked.append(device)

    arena = Arena(4096, 2)
    placer = Placer(arena, open_device=open_device)
    chunk, placements = _one_chunk(arena, [META, CPU, META])
    for placement in placements:
        placer.take(placement, chunk)
    placer.close()
    arena.close()
    assert asked == [META, CPU]


def test_a_chunk_for_two_devices_is_given_back_after_both() -> None:
    devices = {META: FakeDevice(), CPU: FakeDevice()}
    arena = Arena(4096, 2)
    placer = Placer(arena, open_device=devices.__getitem__, threaded=False)
    chunk, placements = _one_chunk(arena, [META, CPU])
    released: list[str] = []
    with placer.run():
        for placement in placements:
            placer.take(placement, chunk)
        placer.let_go(lambda: released.append("now"))
        devices[CPU].do()
        placer.release_done()
        assert released == []
        devices[META].do()
        placer.release_done()
        assert released == ["now"]
    placer.close()
    arena.close()


def test_threads_work_with_the_device_and_pin_what_will_be_needed() -> None:
    """A thread that has not said so would take memory of the first device."""
    device = FakeDevice()  # refuses calls of threads that have not
    arena = Arena(4096, 8)
    placer = Placer(arena, open_device=lambda _: device)
    placer.expect([CPU], 3 * 4096)
    _join("fastload-pins")
    assert len(device.pinned) == 3
    placer.close()
    assert device.pinned == {}
    arena.close()


def test_pinning_ahead_ends_where_memory_does(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(pinned_limit_bytes=2 * 4096)
    arena = Arena(4096, 8)
    placer = Placer(arena, open_device=lambda _: device)
    placer.expect([CPU], 8 * 4096)
    _join("fastload-pins")
    assert len(device.pinned) == 2
    placer.close()
    arena.close()


def test_a_thread_that_cannot_work_with_the_device_gives_slots_back_and_says_why() -> None:
    class Gone(FakeDevice):
        def current(self) -> AbstractContextManager[None]:  # type: ignore[override]
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("no such device")
            return super().current()

    load = rig({"w": arange(512, 512)}, Gone(), slot_count=1, threaded=True)
    with pytest.raises(DeviceCopyError, match="no such device"):
        check_load(load, {"w": torch.zeros(512, 512)}, _copy_all)
    assert load.arena.leased_count == 0


def test_a_thread_that_cannot_pin_ahead_is_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(FakeDevice):
        def register(self, address: int, size_bytes: int, *, read_only: bool) -> None:
            raise RuntimeError("the driver is gone")

    arena = Arena(4096, 8)
    placer = Placer(arena, open_device=lambda _: Broken())
    placer.expect([CPU], 8 * 4096)
    _join("fastload-pins")
    placer.close()
    arena.close()
    assert caplog.text.count("page-locked ahead: the driver is gone") == 1


def _join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(20)


def _one_chunk(arena: Arena, targets: list[torch.device]) -> tuple[ChunkBytes, list[Placement]]:
    from fastload_common.plan.geometry import View
    from fastload_common.plan.records import TensorRead
    from fastload_common.ranges import ObjectId

    slot = arena.try_lease()
    assert slot is not None
    model = ObjectId("s3://m/w", '"1"', 4096)
    reads = [TensorRead(model, 64 * k, 4, View((16,), (1,), 0)) for k in range(len(targets))]
    placements = [
        Placement(read, torch.float32, torch.zeros(16, device=target))
        for read, target in zip(reads, targets, strict=True)
    ]
    return ChunkBytes(slot.memory, 0), placements


def _copy_all(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
    for name, param in params.items():
        param.copy_(loaded[name])


def _marks(device: FakeDevice) -> list[str]:
    return [kind for kind in kinds(device) if kind == "mark"]


def _facts(load: Rig) -> dict[str, int]:
    [facts] = load.placer.facts.values()
    return facts  # type: ignore[return-value]
