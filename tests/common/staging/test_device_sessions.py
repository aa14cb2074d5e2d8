"""Whole loads, by one rank and by several that exchange, onto a fake device."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastload_common.errors import DeviceCopyError, PeerError
from fastload_common.staging import torch_device
from fastload_common.testing.fake_device import FakeDevice
from tests.common.exchange.exchange_harness import (
    SlicedModel,
    Weights,
    load_ranks,
    make_tensors,
    settings_of,
)
from tests.common.load.session_harness import Model, load

Tensors = dict[str, torch.Tensor]

OPTIONS: dict[str, Any] = {}  # of the devices that this test opens
FAILS_AT: dict[int, int] = {}  # number of the device, from 1 on -> the operation that fails


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    """11 MiB: more than the slots hold."""
    return make_tensors(layers=3, width=512)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeDevice]]:
    """The devices that were opened. Targets on the host are taken for theirs."""
    opened: list[FakeDevice] = []

    def open_device(device: torch.device) -> FakeDevice:
        opened.append(FakeDevice(**OPTIONS))
        opened[-1].fails_at = FAILS_AT.get(len(opened))
        return opened[-1]

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    OPTIONS.clear()
    FAILS_AT.clear()
    monkeypatch.setattr(torch_device, "open_device", open_device)
    yield opened
    for device in opened:
        assert device.pinned == {}
    left = [t.name for t in threading.enumerate() if t.name.startswith("fastload")]
    assert left == []
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_rank(checkpoint: Path, tensors: Tensors, devices: list[FakeDevice]) -> None:
    model = Model(tensors)
    session = load(checkpoint, settings_of(), model)
    assert model.holds(tensors)
    [device] = devices
    assert device.done_count == len(device.operations)
    assert device.calls[:2] == ["begin", "finish"]
    assert device.calls[-1] == "synchronize"
    assert device.peak_pinned_bytes <= 2 << 20
    facts = session.report.as_dict()["devices"]["cpu"]
    assert 0 < facts["pinned_bytes"] == device.peak_pinned_bytes
    size_bytes = sum(value.nbytes for value in tensors.values())
    assert facts["run_bytes"] + facts["packed_bytes"] >= size_bytes


def test_a_failed_copy_is_no_reason_to_read_eagerly(
    checkpoint: Path, tensors: Tensors, devices: list[FakeDevice]
) -> None:
    FAILS_AT[1] = 3
    model = Model(tensors)
    with pytest.raises(DeviceCopyError, match="illegal memory access"):
        load(checkpoint, settings_of(), model)
    assert len(devices) == 1


def test_nothing_is_pinned_for_a_load_that_reads_eagerly(
    checkpoint: Path, tensors: Tensors, devices: list[FakeDevice]
) -> None:
    model = Model(tensors)
    load(checkpoint, settings_of(trace="eager"), model)
    assert model.holds(tensors)
    assert devices == []


@pytest.mark.parametrize("refuses", ["nothing", "maps for reading", "everything"])
@pytest.mark.parametrize("copies_rows", [True, False])
def test_ranks_that_exchange(
    checkpoint: Path,
    tensors: Tensors,
    devices: list[FakeDevice],
    refuses: str,
    copies_rows: bool,
) -> None:
    OPTIONS["copies_rows"] = copies_rows
    OPTIONS["refuses"] = lambda read_only: (
        refuses == "everything" or (refuses == "maps for reading" and read_only)
    )
    outcomes = load_ranks(str(checkpoint), 3, settings_of(memory_bytes="6MiB"))
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.model.faults(tensors) == []
        assert outcome.report.node["received_bytes"] > 0
        [facts] = outcome.report.devices.values()
        assert (facts["pinned_of_others_bytes"] > 0) == (refuses == "nothing")
        assert facts["pinned_bytes"] <= 2 << 20
    assert len(devices) == 3
    if refuses == "nothing" and copies_rows:
        assert all(
            "ring_bytes" not in facts for o in outcomes for facts in o.report.devices.values()
        )


def test_the_others_hear_of_a_rank_whose_copies_fail(
    checkpoint: Path, tensors: Tensors, devices: list[FakeDevice]
) -> None:
    FAILS_AT[1] = 4
    outcomes = load_ranks(str(checkpoint), 2, settings_of(memory_bytes="4MiB"))
    errors = sorted((type(outcome.error) for outcome in outcomes), key=lambda kind: kind.__name__)
    assert errors == [DeviceCopyError, PeerError]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnARealDevice:
    """The same loads, onto a GPU."""

    def test_one_rank(self, checkpoint: Path, tensors: Tensors) -> None:
        model = Model(tensors).cuda()
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        session = load(checkpoint, settings_of(), model)
        assert model.cpu().holds(tensors)
        [facts] = session.report.devices.values()
        assert facts["run_bytes"] + facts["packed_bytes"] > 0
        slot_bytes = settings_of().chunk_bytes or 0
        assert torch.cuda.max_memory_allocated() - before_bytes <= slot_bytes + 4096

    def test_ranks_that_exchange(self, checkpoint: Path, tensors: Tensors) -> None:
        outcomes = load_ranks(
            str(checkpoint),
            3,
            settings_of(memory_bytes="6MiB"),
            models=[CudaModel(rank, 3) for rank in range(3)],
        )
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
            assert outcome.model.faults(tensors) == []
            assert list(outcome.report.devices) == ["cuda:0"]


class CudaModel(SlicedModel):
    """Takes its slices on the GPU, and shows them on the host."""

    def load_weights(self, weights: Weights) -> set[str]:
        for name, tensor in weights:
            source = self.part(name, tensor)
            target = torch.full(tuple(source.shape), 7, dtype=source.dtype, device="cuda:0")
            target.copy_(source)
            self.held[name] = target
        return set(self.held)

    def faults(self, tensors: Tensors) -> list[str]:
        self.held = {name: value.cpu() for name, value in self.held.items()}
        return super().faults(tensors)
