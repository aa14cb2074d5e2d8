"""Tensors live as long as somebody holds them, and the memory of a load is bounded all the same.

Without an engine: consumers that do what engines' loaders do with the tensors they are given.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload_common.config import Settings
from fastload_common.load.request import RankPlace
from fastload_common.load.session import LoadSession, WeightSource
from fastload_common.load.sizes import choose_sizes
from fastload_common.staging.arena import Slot
from fastload_common.testing.checkpoints import random_tensor, write_checkpoint
from fastload_common.testing.rig import Rig
from fastload_common.units import MIB
from tests.bits import bytes_of
from tests.cases.harness import CHUNK_BYTES, MODEL, URI, load_in, settings

Weights = Iterable[tuple[str, torch.Tensor]]
Kept = dict[str, torch.Tensor]
Consumer = Callable[[Weights], Kept]

MEMORY_WORKER = Path(__file__).with_name("memory_worker.py")
ROOT = Path(__file__).parents[2]


def agrees(found: Kept) -> bool:
    return MODEL.agrees({name: bytes_of(value) for name, value in found.items()})


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Overwrite staging memory as it is given back; the sizes of what was overwritten."""
    release = Slot.release
    overwritten: list[int] = []

    def poisoned(slot: Slot) -> None:
        if slot._leased:
            whole = slot._arena._view[slot.position_bytes :][: slot._size_bytes]
            whole[:] = b"\xff" * slot._size_bytes
            overwritten.append(slot._size_bytes)
        release(slot)

    monkeypatch.setattr(Slot, "release", poisoned)
    return overwritten


@pytest.fixture(params=["lazy", "eager"])
def few_slots(request: pytest.FixtureRequest) -> Settings:
    """Memory for fewer chunks than the model has, traced or not."""
    return settings(trace=request.param)


# T14


def drain(weights: Weights) -> Kept:
    """Fused experts, for example: all are collected before the first is used."""
    kept = dict(list(weights))
    return {name: torch.empty_like(value).copy_(value) for name, value in kept.items()}


def keep(weights: Weights) -> Kept:
    """What is kept is the tensor itself."""
    return dict(weights)


def keep_views(weights: Weights) -> Kept:
    return {name: value.t().contiguous().t() for name, value in weights}


def copy_later(weights: Weights) -> Kept:
    """A pool of threads copies, and does not begin before the iterator has ended."""
    ended = threading.Event()
    found: Kept = {}

    def copy(name: str, value: torch.Tensor) -> None:
        ended.wait(60)
        target = torch.zeros(value.shape, dtype=value.dtype)
        target.copy_(value)
        found[name] = target

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        try:
            running = [pool.submit(copy, name, value) for name, value in weights]
        finally:
            ended.set()
        for future in running:
            future.result()
    return found


def replace_data(weights: Weights) -> Kept:
    """Parameters that take over the loaded tensor's memory instead of copying from it."""
    found: Kept = {}
    for name, value in weights:
        parameter = torch.nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
        parameter.data = value
        found[name] = parameter.data
    return found


@pytest.mark.parametrize("consumer", [drain, keep, keep_views, copy_later, replace_data])
def test_t14_what_is_kept_stays_as_it_was(
    rig: Rig, few_slots: Settings, poison: list[int], consumer: Consumer
) -> None:
    class Model(torch.nn.Module):
        kept: torch.nn.ModuleDict

    model = Model()

    def load_weights(weights: Weights) -> None:
        for name, value in consumer(weights).items():
            setattr(model, name.replace(".", "_"), value)

    with LoadSession([WeightSource(URI)], few_slots) as session:
        session.load(model, load_weights)
    assert len(poison) >= 20  # each slot several times
    assert agrees({name: getattr(model, name.replace(".", "_")) for name in MODEL.tensors})


def test_t14_tensors_of_a_reload_own_their_memory(rig: Rig, poison: list[int]) -> None:
    with LoadSession([WeightSource(URI)], settings()) as session:
        kept = dict(list(session.tensors()))
    assert poison
    assert agrees(kept)


@pytest.mark.gpu
def test_t14_copies_to_a_gpu_that_are_still_running(rig: Rig, poison: list[int]) -> None:
    """Not run here: where there is a device, copies may still run as their slot is refilled."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found: Kept = {}

    def load_weights(weights: Weights) -> None:
        for name, value in weights:
            found[name] = torch.empty(value.shape, dtype=value.dtype, device="cuda")
            found[name].copy_(value, non_blocking=True)

    with LoadSession([WeightSource(URI)], settings()) as session:
        session.load(None, load_weights)
    assert agrees({name: value.cpu() for name, value in found.items()})


# T15 and T21

BUDGET = 24 * MIB
TENSOR = 4 * MIB


MEASURED = [
    ("copy", "lazy"),
    ("drain-copy", "lazy"),
    ("stream", "lazy"),
    ("copy", "eager"),
    ("stream", "eager"),
    ("drain", "lazy"),
    ("drain", "eager"),
]
Grown = dict[tuple[str, str], int]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Grown:
    """How much loads of three times the budget, from one file, added to a process at most."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system cannot forget a process's peak of memory")
    directory = tmp_path_factory.mktemp("large")
    sizes = [TENSOR // 4096, 1024]
    tensors = {f"w{k}": random_tensor("F32", sizes, k) for k in range(3 * BUDGET // TENSOR)}
    write_checkpoint(directory / "model", tensors)
    write_checkpoint(directory / "small", {"w": random_tensor("F32", [256, 1024])})
    job = {
        "uri": str(directory / "model"),
        "warm_uri": str(directory / "small"),
        "shapes": dict.fromkeys(tensors, sizes),
        "settings": {"memory_bytes": BUDGET, "chunk_bytes": MIB, "progress": "off"},
        "measured": MEASURED,
    }
    done = subprocess.run(
        [sys.executable, str(MEMORY_WORKER), json.dumps(job)],
        # What is freed is given back at once: else the allocator decides what is measured.
        env={"PYTHONPATH": str(ROOT), "PATH": os.defpath, "MALLOC_MMAP_THRESHOLD_": "1048576"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    digests = {name: hashlib.sha256(spec.data).hexdigest() for name, spec in tensors.items()}
    rows = json.loads(done.stdout)
    for row in rows:
        assert row["digests"] == digests
        assert row["peak_staging_bytes"] <= BUDGET
    return {kind: row["grown_bytes"] for kind, row in zip(MEASURED, rows, strict=True)}


@pytest.mark.parametrize("consumer", ["copy", "drain-copy"])
def test_t15_t21_a_traced_load_takes_its_staging_memory(grown: Grown, consumer: str) -> None:
    """One file of the whole model: parameters and staging, and never the file beside them.

    It makes no difference whether the consumer drains the iterator: it was given no bytes.
    """
    assert grown[consumer, "lazy"] <= BUDGET + TENSOR


@pytest.mark.parametrize(
    ("consumer", "trace"), [("stream", "lazy"), ("copy", "eager"), ("stream", "eager")]
)
def test_t15_a_streaming_consumer_takes_a_budget_and_a_tensor(
    grown: Grown, consumer: str, trace: str
) -> None:
    """And the tensor that the consumer has in hand while it asks for the next one."""
    assert grown[consumer, trace] <= BUDGET + 2 * TENSOR


@pytest.mark.parametrize("trace", ["lazy", "eager"])
def test_t15_a_draining_consumer_ends(grown: Grown, trace: str) -> None:
    """Who collects values holds the model: its memory is its own, and nothing waits for it."""
    assert 3 * BUDGET <= grown["drain", trace] <= 4 * BUDGET


def test_t15_eight_ranks_of_a_node_share_one_budget() -> None:
    most = settings(memory_bytes="1GiB", chunk_bytes="4MiB", concurrency=64)
    sizes = [
        choose_sizes(most, RankPlace(local_rank=rank, local_world_size=8), 10**11)
        for rank in range(8)
    ]
    assert sum(own.memory_bytes for own in sizes) <= 1024 * MIB
    assert sum(own.concurrency for own in sizes) <= 64


@pytest.mark.gpu
def test_t21_a_file_is_never_on_the_gpu(rig: Rig) -> None:
    """Not run here: nothing is allocated on the device beside the parameters, nor kept there."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    targets = {
        name: torch.zeros(spec.shape, dtype=torch.uint8, device="cuda")
        for name, spec in MODEL.tensors.items()
    }
    torch.cuda.synchronize()
    before_bytes, before_reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()

    def load_weights(weights: Weights) -> None:
        for name, value in weights:
            targets[name].copy_(value)

    with LoadSession([WeightSource(URI)], settings()) as session:
        session.load(None, load_weights)
    assert torch.cuda.max_memory_allocated() <= before_bytes + 16 * CHUNK_BYTES
    assert torch.cuda.memory_reserved() <= before_reserved + 16 * CHUNK_BYTES
    assert agrees({name: value.cpu() for name, value in targets.items()})


# T22


def test_t22_a_process_without_a_gpu_is_asked_for_none(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors go where parameters are; no rank becomes a device, and no device is looked for."""

    def asked(*_: object, **__: object) -> Any:
        raise AssertionError("a device was asked for")

    for name in ("set_device", "current_device", "device_count", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, asked)
    place = RankPlace(rank=9, world_size=16, local_rank=1, local_world_size=8)
    with LoadSession([WeightSource(URI)], settings(memory_bytes="64MiB"), place) as session:
        assert MODEL.agrees(load_in(session))


@pytest.mark.gpu
def test_t22_the_device_is_where_the_parameters_are(rig: Rig) -> None:
    """Not run here: rank 9 of a world whose process sees one device has it as number 0."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    place = RankPlace(rank=9, world_size=16, local_rank=1, local_world_size=8)
    found: Kept = {}

    def load_weights(weights: Weights) -> None:
        for name, value in weights:
            found[name] = torch.zeros(value.shape, dtype=value.dtype, device="cuda:0")
            found[name].copy_(value)

    with LoadSession([WeightSource(URI)], settings(memory_bytes="64MiB"), place) as session:
        session.load(None, load_weights)
    assert agrees({name: value.cpu() for name, value in found.items()})
