"""Does recorded transfers: plans their requests, takes the chunks, places them.

The only place where the trace, the plan, the transfer and the staging meet. Called by the
session for the whole load, and by the recorder for what must be read during the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Protocol

import torch

from fastload_common.errors import FastloadError
from fastload_common.exchange.node_exchange import NodeExchange
from fastload_common.load.garbage import old_objects_at_rest
from fastload_common.load.report import LoadReport
from fastload_common.plan.planner import ALIGNMENT_BYTES, plan_for, plan_reads
from fastload_common.plan.records import Chunk, Plan, TensorRead
from fastload_common.staging.placement import ChunkBytes, Placement
from fastload_common.staging.placer import Placer
from fastload_common.trace.evaluate import calls_of, leaves, value_of
from fastload_common.trace.lazy_tensor import LazyTensor
from fastload_common.trace.nodes import Call, ExprNode, FileNode
from fastload_common.trace.transfer import Transfer

__all__ = ["Executor", "FilledChunk", "ended"]


class FilledChunk(Protocol):
    """A chunk in a staging slot, this rank's or another one's."""

    @property
    def chunk(self) -> Chunk: ...

    @property
    def data(self) -> memoryview: ...

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


class _Leaf:
    """A part of the checkpoint in private memory, for all jobs of one run that compute with it."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.users = 0
        self._value: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """The value; its memory is given up with the last user."""
        value = self.placement.finish() if self._value is None else self._value
        self.users -= 1
        self._value = value if self.users else None
        return value


class _Leaves:
    """The leaves of one run: the same part of the same tensor once."""

    def __init__(self) -> None:
        self._known: dict[tuple[TensorRead, torch.dtype], _Leaf] = {}

    def of(self, lazies: Iterable[LazyTensor]) -> dict[int, _Leaf]:
        """The leaves that values are computed from, by the lazy tensors' ids."""
        found: dict[int, _Leaf] = {}
        for lazy in lazies:
            for key, part in leaves(lazy).items():
                if key not in found:
                    found[key] = self._get(part)
                    found[key].users += 1
        return found

    def _get(self, part: LazyTensor) -> _Leaf:
        placement = _placement(part, None)
        return self._known.setdefault((placement.read, part.dtype), _Leaf(placement))


class _Computed(_Job):
    """All copies from one expression: gather its leaves, compute it once, copy."""

    def __init__(self, transfers: list[Transfer], pool: _Leaves) -> None:
        super().__init__(transfers)
        self._leaves = pool.of(transfer.source for transfer in transfers)
        self.placements = _placements(self._leaves)

    def complete(self) -> None:
        values = {key: leaf.take() for key, leaf in self._leaves.items()}
        self._leaves = {}
        calls: list[Call] = []
        for transfer in self.transfers:
            value = value_of(transfer.source, lambda leaf: values[id(leaf)])
            transfer.destination.copy_(value)
            calls += calls_of(transfer.source)
        for call in calls:
            call.outputs = None


class _Value(_Job):
    """The value of one lazy tensor, for the trace itself."""

    def __init__(self, lazy: LazyTensor, pool: _Leaves) -> None:
        super().__init__([])
        self._lazy = lazy
        self._leaves = pool.of([lazy])
        self.placements = _placements(self._leaves)
        self.value: torch.Tensor | None = None

    def complete(self) -> None:
        values = {key: leaf.take() for key, leaf in self._leaves.items()}
        self._leaves = {}
        self.value = value_of(self._lazy, lambda leaf: values[id(leaf)])
        for call in calls_of(self._lazy):
            call.outputs = None


def _placements(found: dict[int, _Leaf]) -> list[Placement]:
    return list({id(leaf): leaf.placement for leaf in found.values()}.values())


class Executor:
    """Resolves transfers and lazy tensors.

    Args:
        fetch: brings chunks, in any order; one call at a time.
        chunk_bytes: largest request (rounded down to the planner's alignment).
        merge_gap_bytes: see `plan_reads`.
        report: counters and phases.
        exchange: what the whole load is divided with; None: this rank fetches all it needs.
        advance: told how many needed bytes were placed, for the progress display.
        placer: brings chunks to their targets; None: by plain copies.
    """

    def __init__(
        self,
        fetch: Fetch,
        *,
        chunk_bytes: int,
        merge_gap_bytes: int,
        report: LoadReport,
        exchange: NodeExchange | None = None,
        advance: Callable[[int], None] = lambda size_bytes: None,
        placer: Placer | None = None,
    ) -> None:
        self._fetch = fetch
        self._chunk_bytes = chunk_bytes - chunk_bytes % ALIGNMENT_BYTES
        self._merge_gap_bytes = merge_gap_bytes
        self._report = report
        self._exchange = exchange
        self.advance = advance
        self._placer = placer or Placer()
        self._timed = False

    def expect(self, model: torch.nn.Module | None) -> None:
        """A load into this model follows: prepare its devices beside the trace."""
        if model is not None:
            devices = {parameter.device for parameter in model.parameters()}
            self._placer.expect(devices, self._report.model_bytes)

    def finish(self) -> None:
        """Wait for the engine's own work on what was loaded."""
        self._placer.synchronize()

    def close(self) -> None:
        """Give back what placing holds; its numbers go into the report."""
        self._placer.close()
        self._report.peak_staging_bytes = self._placer.peak_staging_bytes
        self._report.devices = self._placer.facts

    def run(self, transfers: Iterable[Transfer]) -> None:
        """Do transfers that the trace needs now; counted as settled reads."""
        self._settle(_jobs(transfers))

    def run_all(self, transfers: Iterable[Transfer], on_plan: Callable[[Plan], None]) -> None:
        """Do the whole load, with its phases timed.

        Args:
            on_plan: told the plan before the first request.
        """
        with self._report.phase("plan"), old_objects_at_rest():
            jobs = _jobs(transfers)
            owners = _owners(jobs)
            filling: Iterator[FilledChunk] | None = None
            if self._exchange is None:
                plan = self._plan(owners)
            else:
                plan = self._agree(owners, self._exchange)
                filling = self._exchange.fetch()
        on_plan(plan)
        self._timed = True
        try:
            with self._report.phase("fetch"):
                self._execute(jobs, owners, plan, filling)
        finally:
            self._timed = False

    def read(self, lazy: LazyTensor) -> torch.Tensor:
        """The value of a lazy tensor, in memory of its own."""
        job = _Value(lazy, _Leaves())
        self._settle([job])
        assert job.value is not None
        return job.value

    def read_whole(self, lazies: list[LazyTensor]) -> list[torch.Tensor]:
        """Whole tensors, in memory of their own, fetched together (the eager way)."""
        pool = _Leaves()
        jobs = [_Value(lazy, pool) for lazy in lazies]
        owners = _owners(jobs)
        with self._report.phase("fetch"):
            self._execute(jobs, owners, self._plan(owners))
        return [job.value for job in jobs if job.value is not None]

    def _settle(self, jobs: Sequence[_Job]) -> None:
        owners = _owners(jobs)
        plan = self._plan(owners)
        self._report.settled_reads += len(jobs)
        self._report.settled_bytes += plan.needed_bytes
        self._execute(jobs, owners, plan)

    def _plan(self, owners: list[_Owned]) -> Plan:
        plan = plan_reads(
            [placement.read for placement, _ in owners],
            chunk_bytes=self._chunk_bytes,
            merge_gap_bytes=self._merge_gap_bytes,
        )
        report = self._report
        report.needed_bytes += plan.needed_bytes
        report.over_read_bytes += plan.fetched_bytes - plan.needed_bytes
        return plan

    def _agree(self, owners: list[_Owned], exchange: NodeExchange) -> Plan:
        """The plan of this rank's part of what the ranks of this host fetch together."""
        reads = [placement.read for placement, _ in owners]
        with self._report.phase("agree"):
            chunks = exchange.agree(reads)
        try:
            plan = plan_for(reads, chunks)
        except ValueError as error:
            # Not a ValueError: that would be taken for the model's code, and read eagerly.
            raise FastloadError(
                f"what this rank needs is not in what was agreed with the others: {error}",
                hint="this is a fault of fastload: please report it, and set FASTLOAD_EXCHANGE=off",
            ) from error
        report = self._report
        report.needed_bytes += plan.needed_bytes
        report.over_read_bytes += sum(
            chunk.byte_range.size_bytes
            for chunk, readers in zip(plan.chunks, plan.readers, strict=True)
            if not readers
        )
        return plan

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self._report.phase(name) if self._timed else nullcontext()

    def _execute(
        self,
        jobs: Sequence[_Job],
        owners: list[_Owned],
        plan: Plan,
        filling: Iterator[FilledChunk] | None = None,
    ) -> None:
        """Do jobs.

        Args:
            filling: brings the plan's chunks, and counts them; None: they are fetched here.
        """
        alone = filling is None
        if filling is None:
            filling = self._fetch(plan.chunks) if plan.chunks else iter(())
        for job in jobs:
            job.missing = len(job.placements)
        missing = list(plan.chunk_counts)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            with self._phase("place"):
                for job in jobs:
                    if not job.missing:
                        self._complete(job)
                for (_, waiting), count in zip(owners, missing, strict=True):
                    if not count:
                        self._count_down(waiting)
            index = {id(chunk): k for k, chunk in enumerate(plan.chunks)}
            with ended(filling), self._placer.run(lambda: self._phase("place")):
                for filled in filling:
                    with self._phase("place"):
                        try:
                            data = ChunkBytes(filled.data, filled.chunk.byte_range.start)
                            readers = plan.readers[index[id(filled.chunk)]]
                            self._place(data, readers, owners, missing)
                            del data
                        finally:
                            self._placer.let_go(filled.release)
                    if alone:
                        self._report.fetched_bytes += filled.chunk.byte_range.size_bytes
                    self.advance(filled.chunk.byte_range.size_bytes)

    def _place(
        self,
        data: ChunkBytes,
        readers: list[int],
        owners: list[_Owned],
        missing: list[int],
    ) -> None:
        for reader in readers:
            placement, waiting = owners[reader]
            self._placer.take(placement, data)
            missing[reader] -= 1
            if not missing[reader]:
                self._count_down(waiting)

    def _count_down(self, waiting: list[_Job]) -> None:
        for job in waiting:
            job.missing -= 1
            if not job.missing:
                self._complete(job)

    def _complete(self, job: _Job) -> None:
        job.complete()
        for transfer in job.transfers:
            transfer.done = True


def ended(filling: Iterator[FilledChunk]) -> AbstractContextManager[object]:
    """Ends the requests of an iterator with this block, also where it is left early.

    An error's traceback would keep them otherwise, and only one fetch runs at a time.
    """
    return closing(filling) if isinstance(filling, Generator) else nullcontext()


def _jobs(transfers: Iterable[Transfer]) -> list[_Job]:
    """Direct copies one by one, copies out of the same expression together; order kept."""
    rows: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        node = transfer.source.node
        # Transfers are alive, so the ids of two of them or of their calls differ.
        key = id(node.call) if isinstance(node, ExprNode) else id(transfer)
        rows.setdefault(key, []).append(transfer)
    pool = _Leaves()
    return [
        _Computed(group, pool) if isinstance(group[0].source.node, ExprNode) else _Direct(group[0])
        for group in rows.values()
    ]


_Owned = tuple[Placement, list[_Job]]


def _owners(jobs: Sequence[_Job]) -> list[_Owned]:
    """Each placement with the jobs that wait for it, in the order of the jobs."""
    found: dict[int, _Owned] = {}
    for job in jobs:
        for placement in job.placements:
            found.setdefault(id(placement), (placement, []))[1].append(job)
    return list(found.values())


def _placement(lazy: LazyTensor, destination: torch.Tensor | None) -> Placement:
    node = lazy.node
    assert isinstance(node, FileNode)
    return Placement(node.read(lazy.view_in_node, lazy.dtype.itemsize), lazy.dtype, destination)
