"""The ranks of this node, as the process that starts them knows them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastload_common.config import environment
from fastload_sglang import compat

__all__ = ["Ranks", "ranks_here"]

_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
_ONE_DEVICE = "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Those of one node.

    Attributes:
        names: of each, for the key.
        devices: its number of each, as the code that it compiles names it.
        threads: of each on a CPU: generated code is made for their number.
    """

    names: list[str]
    devices: list[int]
    threads: list[int]


def ranks_here(server_args: Any) -> Ranks:
    """From decided arguments.

    Raises:
        EngineUnsupportedError: this SGLang has other arguments.
    """
    view = compat.RESOLVING.get()(server_args)
    environ = environment()
    pipeline, tensor = _ranges(view.nnodes, view.node_rank, view.pp_size, view.tp_size)
    # Ordinary replicas are engines of their own on this node; those that share attention are
    # ranks of the tensor-parallel group already.
    replicas = 1 if view.enable_dp_attention else max(1, int(view.dp_size))
    places = [(p, t) for p in pipeline for t in tensor]
    names = [f"dp{d} pp{p} tp{t}" for d in range(replicas) for p, t in places]
    if environ.get(_ONE_DEVICE, "").lower() in ("1", "true"):
        devices = [0] * len(names)
    else:
        step = int(view.gpu_id_step)
        devices = [int(view.base_gpu_id) + step * n for n in range(len(names))]
    return Ranks(names, devices, _threads(environ, len(names)))


def _ranges(nodes: int, node: int, pipeline: int, tensor: int) -> tuple[range, range]:
    """Pipeline and tensor ranks of a node: SGLang deals stages to nodes, or nodes to a stage."""
    stages = max(pipeline // nodes, 1)
    nodes_of_stage = max(nodes // pipeline, 1)
    first = stages * (node // nodes_of_stage)
    each = tensor // nodes_of_stage
    begin = each * (node % nodes_of_stage)
    return range(first, first + stages), range(begin, begin + each)


def _threads(environ: Mapping[str, str], ranks: int) -> list[int]:
    """How many cores each has, where they are not on a GPU."""
    bound = environ.get(_BIND, "")
    if bound in ("", "all"):
        return [len(os.sched_getaffinity(0))]
    counts = [sum(map(_count, part.split(","))) for part in bound.split("|")]
    return counts[:ranks]


def _count(part: str) -> int:
    first, _, last = part.partition("-")
    return int(last) - int(first) + 1 if last else 1
