"""The planner alone, each rank in a process of its own: no engine, no torch, no bytes.

Every process plans from the messages of all, as the ranks of a load do; that all found the same
plan is compared by digest.
"""

from __future__ import annotations

import binascii
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.planner_boxes import MODELS, Model
from fastload_common.plan.needs import Needs
from fastload_common.plan.node import NodePlan, plan_node
from fastload_common.plan.planner import plan_for
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange

__all__ = ["CHUNK_BYTES", "GAP_BYTES", "Shares", "divide", "own_chunks"]

CHUNK_BYTES = 8 << 20
GAP_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Shares:
    """What the ranks of a node would fetch.

    Attributes:
        model_bytes: all tensors once.
        needed_bytes: of each rank, by its own plan.
        fetched_bytes, received_bytes: of each rank.
        message_bytes: of each rank's needs.
        requests: chunks of the node.
    """

    model_bytes: int
    needed_bytes: tuple[int, ...]
    fetched_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    requests: int

    @property
    def ratio(self) -> float:
        """Bytes of the node / bytes of the model."""
        return sum(self.fetched_bytes) / self.model_bytes


def own_chunks(model: Model, plan: NodePlan, rank: int) -> list[Chunk]:
    objects = model.objects
    return [
        Chunk(objects[chunk.object_index], ByteRange(chunk.start, chunk.end), 0)
        for chunk in plan.chunks
        if rank in chunk.consumers
    ]


def divide(name: str, ranks: int, scale: float = 1.0) -> Shares:
    """Let as many processes agree.

    Raises:
        RuntimeError: they found different plans, or one of them ended.
    """
    root = Path(__file__).resolve().parents[1]
    processes: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        for rank in range(ranks):
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, name, str(rank), str(ranks), str(scale)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=root,
            )
            processes.append(stack.enter_context(process))
        messages = [_line(process) for process in processes]
        for process in processes:
            assert process.stdin is not None
            process.stdin.writelines(messages)
            process.stdin.close()
        found = [_Found(*json.loads(_line(process))) for process in processes]
    return _joined(found, [binascii.a2b_base64(row) for row in messages], _size_of(name, scale))


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a rank ended before it had planned")
    return line


def _size_of(name: str, scale: float) -> int:
    return MODELS[name](scale).size_bytes


class _Found(NamedTuple):
    digest: str
    needed_bytes: int
    fetched_bytes: int
    received_bytes: int
    requests: int


def _joined(found: Sequence[_Found], messages: Sequence[bytes], model_bytes: int) -> Shares:
    if len({row.digest for row in found}) != 1:
        raise RuntimeError("the ranks found different plans")
    return Shares(
        model_bytes,
        tuple(row.needed_bytes for row in found),
        tuple(row.fetched_bytes for row in found),
        tuple(row.received_bytes for row in found),
        tuple(map(len, messages)),
        found[0].requests,
    )


def _rank(name: str, rank: int, ranks: int, scale: float) -> None:
    model = MODELS[name](scale)
    reads = model.reads(rank, ranks)
    message = Needs.of(reads, model.objects, gap_bytes=GAP_BYTES).encode()
    print(binascii.b2a_base64(message).decode(), end="", flush=True)
    count = len(model.objects)
    needs = [Needs.decode(binascii.a2b_base64(sys.stdin.readline()), count) for _ in range(ranks)]
    plan = plan_node(needs, chunk_bytes=CHUNK_BYTES, gap_bytes=GAP_BYTES)
    # Raises if the chunks for this rank lack a byte that it needs.
    own = plan_for(reads, own_chunks(model, plan, rank))
    row = _Found(
        hashlib.sha256(repr(plan).encode()).hexdigest(),
        own.needed_bytes,
        plan.fetched_by_rank[rank],
        plan.received_by_rank[rank],
        len(plan.chunks),
    )
    print(json.dumps(row))


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
