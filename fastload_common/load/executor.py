"""Does recorded transfers: plans their requests, takes the chunks, places them.

The only place where the trace, the plan, the transfer and the staging meet. Called by the
session for the whole load, and by the recorder for what must be read during the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from fastload_common.load.report import LoadReport
from fastload_common.plan.planner import ALIGNMENT_BYTES, plan_reads
from fastload_common.plan.records import Chunk, Plan
from fastload_common.staging.placement import ChunkBytes, Placement
from fastload_common.trace.evaluate import calls_of, leaves, value_of
from fastload_common.trace.lazy_tensor import LazyTensor
from fastload_common.trace.nodes import Call, ExprNode, FileNode
from fastload_common.trace.transfer import Transfer

__all__ = ["Executor", "FilledChunk"]


class FilledChunk(Protocol):
    """A chunk in its staging slot."""

    chunk: Chunk
    data: memoryview

    def release(self) -> None: ...


Fetch = Callable[[Iterable[Chunk]], Iterator[FilledChunk]]


class _Job:
    """What can be done once some placements are complete."""

    def __init__(self, transfers: list[Transfer]) -> None:
        self.transfers = transfers
        self.placements: list[Placement] = []
        self.missing = 0

    def complete(self) -> None:
        raise NotImplementedError


class _Direct(_Job):
    """A copy straight from the checkpoint into a real tensor."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__([transfer])
        self.placements = [_placement(transfer.source, transfer.destination)]

    def complete(self) -> None:
        self.placements[0].finish()


class _Computed(_Job):
    """All copies from one expression: gather its leaves, compute it once, copy."""

    def __init__(self, transfers: list[Transfer]) -> None:
        super().__init__(transfers)
        self._leaves: dict[int, Placement] = {}
        for transfer in transfers:
            for key, leaf in leaves(transfer.source).items():
                if key not in self._leaves:
                    self._leaves[key] = _placement(leaf, None)
        self.placements = list(self._leaves.values())

    def complete(self) -> None:
        values = {key: placement.finish() for key, placement in self._leaves.items()}
        calls: list[Call] = []
        for transfer in self.transfers:
            value = value_of(transfer.source, lambda leaf: values[id(leaf)])
            transfer.destination.copy_(value)
            calls += calls_of(transfer.source)
        for call in calls:
            call.outputs = None
        self._leaves = {}
        self.placements = []


class _Value(_Computed):
    """The value of one lazy tensor, for the trace itself."""

    def __init__(self, lazy: LazyTensor) -> None:
        super().__init__([])
        self._lazy = lazy
        self._leaves = {key: _placement(leaf, None) for key, leaf in leaves(lazy).items()}
        self.placements = list(self._leaves.values())
        self.value: torch.Tensor | None = None

    def complete(self) -> None:
        values = {key: placement.finish() for key, placement in self._leaves.items()}
        self.value = value_of(self._lazy, lambda leaf: values[id(leaf)])
        for call in calls_of(self._lazy):
            call.outputs = None


class Executor:
    """Resolves transfers and lazy tensors.

    Args:
        fetch: brings chunks, in any order; one call at a time.
        chunk_bytes: largest request (rounded down to the planner's alignment).
        merge_gap_bytes: see `plan_reads`.
        report: counters and phases.
        advance: told how many needed bytes were placed, for the progress display.
    """

    def __init__(
        self,
        fetch: Fetch,
        *,
        chunk_bytes: int,
        merge_gap_bytes: int,
        report: LoadReport,
        advance: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self._fetch = fetch
        self._chunk_bytes = chunk_bytes - chunk_bytes % ALIGNMENT_BYTES
        self._merge_gap_bytes = merge_gap_bytes
        self._report = report
        self.advance = advance
        self._timed = False

    def run(self, transfers: Iterable[Transfer]) -> None:
        """Do transfers that the trace needs now; counted as settled reads."""
        jobs = _jobs(transfers)
        plan = self._plan(jobs)
        self._report.settled_reads += len(jobs)
        self._report.settled_bytes += plan.needed_bytes
        self._execute(jobs, plan)

    def run_all(self, transfers: Iterable[Transfer], on_plan: Callable[[Plan], None]) -> None:
        """Do the whole load, with its phases timed.

        Args:
            on_plan: told the plan before the first request.
        """
        with self._report.phase("plan"):
            jobs = _jobs(transfers)
            plan = self._plan(jobs)
        on_plan(plan)
        self._timed = True
        try:
            with self._report.phase("fetch"):
                self._execute(jobs, plan)
        finally:
            self._timed = False

    def read(self, lazy: LazyTensor) -> torch.Tensor:
        """The value of a lazy tensor, in memory of its own."""
        job = _Value(lazy)
        plan = self._plan([job])
        self._report.settled_reads += 1
        self._report.settled_bytes += plan.needed_bytes
        self._execute([job], plan)
        assert job.value is not None
        return job.value

    def read_whole(self, lazies: list[LazyTensor]) -> list[torch.Tensor]:
        """Whole tensors, in memory of their own, fetched together (the eager way)."""
        jobs = [_Value(lazy) for lazy in lazies]
        with self._report.phase("fetch"):
            self._execute(jobs, self._plan(jobs))
        return [job.value for job in jobs if job.value is not None]

    def _plan(self, jobs: list[_Job] | list[_Value]) -> Plan:
        plan = plan_reads(
            [placement.read for job in jobs for placement in job.placements],
            chunk_bytes=self._chunk_bytes,
            merge_gap_bytes=self._merge_gap_bytes,
        )
        report = self._report
        report.needed_bytes += plan.needed_bytes
        report.over_read_bytes += plan.fetched_bytes - plan.needed_bytes
        return plan

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self._report.phase(name) if self._timed else nullcontext()

    def _execute(self, jobs: list[_Job] | list[_Value], plan: Plan) -> None:
        owners: list[tuple[_Job, Placement]] = []
        for job in jobs:
            owners += [(job, placement) for placement in job.placements]
            job.missing = len(job.placements)
        missing = list(plan.chunk_counts)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            with self._phase("place"):
                for job in jobs:
                    if not job.missing:
                        self._complete(job)
                for (job, _), count in zip(owners, missing, strict=True):
                    if not count:
                        self._count_down(job)
            index = {id(chunk): k for k, chunk in enumerate(plan.chunks)}
            for filled in self._fetch(plan.chunks) if plan.chunks else ():
                with self._phase("place"):
                    try:
                        data = ChunkBytes(filled.data, filled.chunk.byte_range.start)
                        self._place(data, plan.readers[index[id(filled.chunk)]], owners, missing)
                        del data
                    finally:
                        filled.release()
                self._report.fetched_bytes += filled.chunk.byte_range.size_bytes
                self.advance(filled.chunk.byte_range.size_bytes)

    def _place(
        self,
        data: ChunkBytes,
        readers: list[int],
        owners: list[tuple[_Job, Placement]],
        missing: list[int],
    ) -> None:
        for reader in readers:
            job, placement = owners[reader]
            placement.take(data)
            missing[reader] -= 1
            if not missing[reader]:
                self._count_down(job)

    def _count_down(self, job: _Job) -> None:
        job.missing -= 1
        if not job.missing:
            self._complete(job)

    def _complete(self, job: _Job) -> None:
        job.complete()
        for transfer in job.transfers:
            transfer.done = True


def _jobs(transfers: Iterable[Transfer]) -> list[_Job]:
    """Direct copies one by one, copies out of the same expression together; order kept."""
    rows: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        node = transfer.source.node
        # Transfers are alive, so the ids of two of them or of their calls differ.
        key = id(node.call) if isinstance(node, ExprNode) else id(transfer)
        rows.setdefault(key, []).append(transfer)
    return [
        _Computed(group) if isinstance(group[0].source.node, ExprNode) else _Direct(group[0])
        for group in rows.values()
    ]


def _placement(lazy: LazyTensor, destination: torch.Tensor | None) -> Placement:
    node = lazy.node
    assert isinstance(node, FileNode)
    return Placement(node.read(lazy.view_in_node, lazy.dtype.itemsize), lazy.dtype, destination)
