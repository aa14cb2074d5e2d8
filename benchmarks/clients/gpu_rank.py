"""One rank of `benchmarks.gpu`, in a process of its own: a stack of divided layers, and a loader.

    python -m benchmarks.clients.gpu_rank JSON

Parameters are made on the device, and filled by weight loaders that narrow, as engines' are. Says
``ready`` and waits for a line; loads; waits for the other ranks; checks every byte; prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.clients.run import end_with_parent
from benchmarks.cost import cpu_s
from benchmarks.gpu_models import GOLDEN, PERIOD_WORDS, File, Spec, files_of
from benchmarks.gpu_store import BUCKET
from fastload_common.config import load_settings
from fastload_common.engine.cpu_group import CpuGroup
from fastload_common.load.request import RankPlace, WeightSource
from fastload_common.load.session import LoadSession
from fastload_common.source.registry import open_source
from fastload_common.staging import torch_device
from fastload_common.testing.fake_device import FakeDevice

Weights = Iterable[tuple[str, torch.Tensor]]
_CHECKED_AT_ONCE_WORDS = 1 << 24


class Stack(torch.nn.Module):
    """What one rank holds of a model."""

    def __init__(self, files: list[File], rank: int, ranks: int, device: torch.device) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.specs = {spec.name: spec for file in files for spec in file.specs}
        for spec in self.specs.values():
            if spec.part == 0:
                shape = list(spec.shape)
                if spec.dim is not None:
                    shape[spec.dim] //= ranks
                shape[0] *= spec.parts
                data = torch.empty(shape, dtype=torch.bfloat16, device=device)
                parameter = torch.nn.Parameter(data, requires_grad=False)
                self.register_parameter(_attribute(spec), parameter)

    def place(self, spec: Spec) -> torch.Tensor:
        """The part of a parameter that a tensor goes into."""
        data: torch.Tensor = getattr(self, _attribute(spec)).data
        rows = data.shape[0] // spec.parts
        return data.narrow(0, spec.part * rows, rows)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            spec = self.specs[name]
            if spec.dim is not None:
                size = spec.shape[spec.dim] // self.ranks
                tensor = tensor.narrow(spec.dim, self.rank * size, size)
            self.place(spec).copy_(tensor)

    def check(self, files: list[File]) -> None:
        """Compare everything with what must stand there.

        Raises:
            AssertionError: something else does.
        """
        for file in files:
            for spec, start in zip(file.specs, file.starts, strict=True):
                self._check(spec, start)

    def _check(self, spec: Spec, start: int) -> None:
        place = self.place(spec)
        rows = place.view(1, -1) if place.dim() == 1 else place
        wide = spec.dtype == "F32"
        item_bytes = 4 if wide else 2
        columns = spec.shape[-1] if place.dim() > 1 else spec.shape[0]
        row_words = columns * item_bytes // 8
        first_row = self.rank * rows.shape[0] if spec.dim == 0 else 0
        first_word = self.rank * rows.shape[1] * item_bytes // 8 if spec.dim == 1 else 0
        width = rows.shape[1] * item_bytes // 8
        step = max(1, _CHECKED_AT_ONCE_WORDS // width)
        within = torch.arange(width, device=place.device)
        for at in range(0, rows.shape[0], step):
            part = rows[at : at + step]
            numbers = torch.arange(at, at + len(part), device=place.device).view(-1, 1)
            numbers = start // 8 + (first_row + numbers) * row_words + first_word + within
            words = numbers % PERIOD_WORDS * (GOLDEN - (1 << 64))
            if wide:
                expected = words.view(torch.float32).to(torch.bfloat16)
                right = torch.equal(expected.view(torch.int16), part.contiguous().view(torch.int16))
            else:
                right = torch.equal(words, part.contiguous().view(torch.int64))
            assert right, f"wrong bytes in {spec.name}"


def _attribute(spec: Spec) -> str:
    return spec.parameter.replace(".", "_")


def fastload(job: dict[str, Any], stack: Stack, group: CpuGroup | None) -> dict[str, Any]:
    """The loader that an engine would call."""
    rank, ranks = stack.rank, stack.ranks
    place = RankPlace(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    with LoadSession(
        [WeightSource(f"s3://{BUCKET}")], load_settings({}), place, progress=False, group=group
    ) as session:
        session.load(stack, stack.load_weights)
    report = session.report.as_dict()
    wanted = ("phases_s", "devices", "requests", "retries", "node", "needed_bytes", "fetched_bytes")
    return {name: report[name] for name in wanted}


def runai(job: dict[str, Any], stack: Stack, group: CpuGroup | None) -> dict[str, Any]:
    """Run:ai Model Streamer, as engines use it: whole tensors on the host, on every rank."""
    from runai_model_streamer import (  # type: ignore[import-not-found,unused-ignore]
        SafetensorsStreamer,
    )

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([f"s3://{BUCKET}/{name}" for name in job["names"]])
        stack.load_weights(streamer.get_tensors())
    return {}


def plain(job: dict[str, Any], stack: Stack, group: CpuGroup | None) -> dict[str, Any]:
    """safetensors from files that lie in the page cache, each tensor to the device and divided."""
    from safetensors import safe_open

    def weights() -> Weights:
        for name in job["names"]:
            with safe_open(os.path.join(job["directory"], name), framework="pt") as file:
                for tensor in file.keys():  # noqa: SIM118 -- it is no mapping
                    yield tensor, file.get_tensor(tensor).to(job["device"])

    stack.load_weights(weights())
    return {}


CLIENTS: dict[str, Callable[[dict[str, Any], Stack, CpuGroup | None], dict[str, Any]]] = {
    "fastload": fastload,
    "runai": runai,
    "plain": plain,
}


def main(job: dict[str, Any]) -> dict[str, Any]:
    rank, ranks = job["rank"], job["ranks"]
    torch.set_num_threads(1)
    group = _meet(rank, ranks, job["meeting_port"])
    if job["device"] == "fake":
        torch_device.open_device = lambda device: FakeDevice()
        job["device"] = "cpu"
    on_gpu = job["device"] == "cuda"
    device = torch.device(job["device"], 0) if on_gpu else torch.device("cpu")
    files = files_of(job["kind"], job["size_bytes"])
    job["names"] = [file.name for file in files]
    stack = Stack(files, rank, ranks, device)
    parameter_bytes = sum(parameter.nbytes for parameter in stack.parameters())
    if job["client"] == "fastload":
        with contextlib.closing(open_source(f"s3://{BUCKET}", load_settings({}))) as source:
            list(source.list())  # the SDK's imports take longer than the load
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    print("ready", flush=True)
    sys.stdin.readline()
    _wait(group)
    cpu_began_s, began_s = cpu_s(), time.monotonic()
    found = CLIENTS[job["client"]](job, stack, group)
    if on_gpu:
        torch.cuda.synchronize()
    ended_s, cpu_ended_s = time.monotonic(), cpu_s()
    _wait(group)
    peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else None
    stack.check(files)
    _wait(group)  # nobody is gone while others still load
    return {
        **found,
        "began_s": began_s,
        "ended_s": ended_s,
        "cpu_s": cpu_ended_s - cpu_began_s,
        "parameter_bytes": parameter_bytes,
        "gpu_peak_bytes": peak_bytes,
    }


def _meet(rank: int, ranks: int, port: int) -> CpuGroup | None:
    if ranks == 1:
        return None
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    world = torch.distributed.group.WORLD
    return CpuGroup(SimpleNamespace(rank_in_group=rank, world_size=ranks, cpu_group=world))


def _wait(group: CpuGroup | None) -> None:
    if group is not None:
        torch.distributed.barrier()


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
