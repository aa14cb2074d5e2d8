"""What is called in torch and in CUDA's runtime, by what names and with what numbers.

No device is needed: the runtimes are replaced. On a real one: `test_device_schedules`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastload_common.staging import torch_device
from fastload_common.staging.device import PinRefusedError
from fastload_common.staging.torch_device import TorchDevice, open_device

DEVICE = torch.device("cuda", 3)


class Recorder:
    """Stands for ``torch.cuda`` and the two runtimes; records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = 0
        self.stream_now: list[object] = []
        self.device_now: list[object] = []

    def Stream(self, device: torch.device) -> SimpleNamespace:  # noqa: N802
        self.calls.append(("Stream", device))
        return SimpleNamespace(
            cuda_stream=77,
            wait_stream=lambda other: self.calls.append(("wait_stream", other)),
            synchronize=lambda: self.calls.append(("synchronize",)),
        )

    def Event(self, **options: bool) -> SimpleNamespace:  # noqa: N802
        self.calls.append(("Event", options))
        return SimpleNamespace(
            record=lambda stream: self.calls.append(("record", stream.cuda_stream)),
            query=lambda: False,
            synchronize=lambda: self.calls.append(("event",)),
        )

    def current_stream(self, device: torch.device) -> str:
        return f"the engine's on {device}"

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.stream_now.append(stream)
        yield
        self.stream_now.pop()

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        self.device_now.append(device)
        yield
        self.device_now.pop()

    def cudart(self) -> SimpleNamespace:
        def register(address: int, size_bytes: int, flags: int) -> int:
            assert self.device_now == [DEVICE]
            self.calls.append(("register", address, size_bytes, flags))
            return self.status

        def unregister(address: int) -> int:
            self.calls.append(("unregister", address))
            return self.status

        return SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=unregister,
            cudaGetErrorString=lambda status: f"error {status}",
        )


class Status(SimpleNamespace):
    pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    success, old_driver = Status(name="cudaSuccess"), Status(name="cudaErrorInsufficientDriver")

    def copy(*arguments: object) -> tuple[Status]:
        assert recorder.stream_now, "inside the stream, and so on its device"
        recorder.calls.append(("cudaMemcpy2DAsync", *arguments))
        return (success if recorder.status == 0 else Status(name="cudaErrorInvalidValue"),)

    runtime = SimpleNamespace(
        cudaMemcpy2DAsync=copy,
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyHostToDevice=1),
        cudaError_t=SimpleNamespace(cudaSuccess=success),
        cudaGetDeviceCount=lambda: (success if recorder.status != 35 else old_driver, 8),
    )
    bindings = SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "get_device_module", lambda device: recorder)
    monkeypatch.setattr(torch.cuda, "cudart", recorder.cudart)
    monkeypatch.setattr(TorchDevice, "_forget_error", lambda self: recorder.calls.append(("ok",)))
    torch_device._row_copier.cache_clear()
    yield recorder
    torch_device._row_copier.cache_clear()


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps"])
def test_other_devices_have_no_runtime(kind: str) -> None:
    assert open_device(torch.device(kind)) is None


def test_its_stream_is_on_the_targets_device_and_comes_after_the_engines(cuda: Recorder) -> None:
    device = open_device(DEVICE)
    assert device is not None
    assert device.name == "cuda:3"
    device.begin()
    device.finish()
    assert cuda.calls == [
        ("Stream", DEVICE),
        ("wait_stream", "the engine's on cuda:3"),
        ("synchronize",),
    ]


@pytest.mark.parametrize(("read_only", "flags"), [(False, 1), (True, 9)])
def test_memory_is_registered(cuda: Recorder, read_only: bool, flags: int) -> None:
    device = TorchDevice(DEVICE)
    device.register(4096, 8192, read_only=read_only)
    device.unregister(4096)
    assert cuda.calls[1:] == [("register", 4096, 8192, flags), ("unregister", 4096)]


def test_a_refusal_leaves_no_error_behind(cuda: Recorder) -> None:
    """The runtime would show it to the engine's next kernel."""
    device = TorchDevice(DEVICE)
    cuda.status = 801
    with pytest.raises(PinRefusedError, match="error 801"):
        device.register(4096, 8192, read_only=True)
    with pytest.raises(RuntimeError, match="error 801"):
        device.unregister(4096)
    assert cuda.calls.count(("ok",)) == 2


def test_rows_are_copied_by_address_pitch_and_width(cuda: Recorder) -> None:
    device = TorchDevice(DEVICE)
    assert device.copies_rows
    source = torch.zeros(10, 64, dtype=torch.uint8)[:, 16:48]
    target = torch.zeros(10, 40, dtype=torch.uint8)[:, :32]
    device.copy_rows(target, source)
    assert cuda.calls[-1] == (
        *("cudaMemcpy2DAsync", target.data_ptr(), 40, source.data_ptr(), 64, 32, 10, 1, 77),
    )
    cuda.status = 1
    with pytest.raises(RuntimeError, match="cudaErrorInvalidValue"):
        device.copy_rows(target, source)


def test_runs_and_spreads_are_copied_on_the_stream(
    cuda: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = TorchDevice(DEVICE)
    source, target = torch.arange(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    device.copy(target, source)
    assert torch.equal(target, source)
    whole = torch.arange(64, dtype=torch.uint8)
    targets = [torch.zeros(3, dtype=torch.uint8), torch.zeros(2, 2), torch.zeros(1).byte()]
    sources = [source[:3], torch.tensor([[1, 2], [3, 4]]).byte(), source[8:]]
    for start, end in ((0, 16), (8, 12), (2, 8), (1, 9)):  # as words of 8, 4, 2 and 1 bytes
        targets.append(torch.zeros(64, dtype=torch.uint8)[start:end])
        sources.append(whole[start:end])
    device.spread(targets, sources)
    for one, other in zip(targets, sources, strict=True):
        assert torch.equal(one, other.to(one.dtype))


def test_marks_are_events_that_do_not_spin(cuda: Recorder) -> None:
    mark = TorchDevice(DEVICE).mark()
    assert mark.is_done() is False
    mark.wait()
    assert cuda.calls[1:] == [("Event", {"blocking": True}), ("record", 77), ("event",)]


def test_without_cuda_bindings_rows_are_gathered(
    cuda: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert not TorchDevice(DEVICE).copies_rows
    assert not TorchDevice(DEVICE).copies_rows
    assert caplog.text.count("cuda-bindings") == 1


def test_bindings_of_a_newer_cuda_than_the_driver_are_not_used(
    cuda: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.status = 35
    assert not TorchDevice(DEVICE).copies_rows
    assert "cudaErrorInsufficientDriver" in caplog.text


def test_rocm_has_no_rows(cuda: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not TorchDevice(DEVICE).copies_rows


def test_xpu_copies_from_pageable_memory(cuda: Recorder) -> None:
    device = TorchDevice(torch.device("xpu", 0))
    assert not device.copies_rows
    with pytest.raises(PinRefusedError, match="xpu"):
        device.register(4096, 8192, read_only=False)
    device.mark()
    assert cuda.calls[-2:] == [("Event", {}), ("record", 77)]


def test_integrated_is_what_the_runtime_says(
    cuda: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for says in (True, False):
        properties = SimpleNamespace(is_integrated=says)
        cuda.get_device_properties = lambda device, found=properties: found  # type: ignore[attr-defined]
        assert TorchDevice(DEVICE).is_integrated is says
