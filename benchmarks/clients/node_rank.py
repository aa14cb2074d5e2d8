"""One rank of a node, in a process of its own: loads its slices of every tensor of the store.

    python -m benchmarks.clients.node_rank JSON
    {"rank": 0, "ranks": 2, "port": 1234}

Of three tensors two are divided by rows and one by columns, as in a dense transformer at tensor
parallel; every sixteenth is needed by all ranks. Without an engine: the loader that an engine
would call, a gloo group as an engine has, and ``load_weights`` as weight loaders are.
Prints what the load took as JSON on its last line.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.clients.run import end_with_parent
from benchmarks.cost import cpu_s
from benchmarks.work import BUCKET, HEADER_BYTES, word_at
from fastload_common.config import load_settings
from fastload_common.engine.cpu_group import CpuGroup
from fastload_common.load.request import RankPlace, WeightSource
from fastload_common.load.session import LoadSession
from fastload_common.range_cache.writer import finish_writes
from fastload_common.source.registry import open_source

COLUMNS = 4096
_TENSOR_BYTES = 16 << 20  # as native/content.c cuts objects


class Slices:
    """Parameters of one rank, and where each came from."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.parameters: list[tuple[int, int, torch.Tensor]] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            number = int(name.rpartition(".")[2])
            matrix = tensor.view(-1, COLUMNS)
            dim = None if number % 16 == 15 else 1 if number % 3 == 2 else 0
            first_column = 0
            start = HEADER_BYTES + number * _TENSOR_BYTES
            if dim is not None:
                length = matrix.shape[dim] // self.ranks
                matrix = matrix.narrow(dim, self.rank * length, length)
                first_column = self.rank * length if dim else 0
                start += 0 if dim else self.rank * length * COLUMNS * 2
            parameter = torch.empty(matrix.shape, dtype=matrix.dtype)
            parameter.copy_(matrix)
            self.parameters.append((start, first_column, parameter))

    def check(self) -> None:
        """Compare the first and the last word of the first and the last row of each."""
        for start, first_column, parameter in self.parameters:
            rows, columns = parameter.shape
            words = parameter.view(torch.int64)
            for row in (0, rows - 1):
                for word in (0, columns // 4 - 1):
                    offset = start + (row * COLUMNS + first_column) * 2 + word * 8
                    got = struct.pack("<q", int(words[row, word]))
                    if got != word_at(offset):
                        raise AssertionError(f"wrong bytes at {offset}")


def main(job: dict[str, Any]) -> dict[str, Any]:
    rank, ranks = job["rank"], job["ranks"]
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{job['port']}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    world = torch.distributed.group.WORLD
    group = CpuGroup(SimpleNamespace(rank_in_group=rank, world_size=ranks, cpu_group=world))
    place = RankPlace(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    slices = Slices(rank, ranks)
    with contextlib.closing(open_source(f"s3://{BUCKET}", load_settings({}))) as source:
        list(source.list())  # the SDK's imports take longer than the load
    torch.distributed.barrier()
    cpu_began_s, began_s = cpu_s(), time.monotonic()
    with LoadSession(
        [WeightSource(f"s3://{BUCKET}")], load_settings({}), place, progress=False, group=group
    ) as session:
        session.load(None, slices.load_weights)
    ended_s, cpu_ended_s = time.monotonic(), cpu_s()
    slices.check()
    report = session.report
    torch.distributed.barrier()  # nobody is gone while others still load
    finish_writes(60)
    return {
        "began_s": began_s,
        "ended_s": ended_s,
        "cpu_s": cpu_ended_s - cpu_began_s,
        "needed_bytes": report.needed_bytes,
        "model_bytes": report.model_bytes,
        "phases_s": report.as_dict()["phases_s"],
        # Without the directory: results are for others, too.
        "node_cache": {k: v for k, v in report.as_dict()["node_cache"].items() if k != "directory"},
    }


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
