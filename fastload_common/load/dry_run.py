"""A load that reads headers only: which bytes would one rank read?

The engine's own `load_weights` runs over lazy tensors as in a real load (`load.session`); instead
of fetching what was recorded, it is counted. What needs a value gets zeros, and a note says so.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from fastload_common.checkpoint.records import Checkpoint, TensorEntry
from fastload_common.config import Settings
from fastload_common.errors import OutOfBudgetError, TensorMismatchError
from fastload_common.load.first_reads import usual_gap
from fastload_common.load.leaks import replace_lazy_attributes
from fastload_common.load.model_root import open_readable_root
from fastload_common.load.off_memory import off_memory
from fastload_common.load.open_model import open_checkpoint
from fastload_common.load.plan_job import RankTrace
from fastload_common.load.request import RankPlace, WeightSource
from fastload_common.load.sizes import choose_sizes
from fastload_common.plan.geometry import View, dense_strides_like
from fastload_common.plan.needs import Needs
from fastload_common.plan.planner import ALIGNMENT_BYTES, plan_reads
from fastload_common.plan.records import TensorRead
from fastload_common.ranges import ObjectId
from fastload_common.source.uri import is_file_uri
from fastload_common.trace.evaluate import leaves
from fastload_common.trace.lazy_tensor import LazyTensor
from fastload_common.trace.misfit import MISFIT_HINT, GeometryError, entry_fields
from fastload_common.trace.nodes import FileNode
from fastload_common.trace.recorder import Recorder
from fastload_common.trace.transfer import Transfer
from fastload_common.units import MIB

__all__ = ["DryTracer", "open_model"]

Opened = Mapping[WeightSource, tuple[Checkpoint, bool]]

_NAMES_SHOWN = 4
# What a weight loader raises when a checkpoint does not fit the model (as `load.session` has it).
_MISFITS = (AssertionError, AttributeError, KeyError, IndexError, ValueError)
_FALLBACK_CHUNK_BYTES = 16 * MIB


def open_model(source: WeightSource, settings: Settings) -> tuple[Checkpoint, bool]:
    """Read the headers; also tells whether the bytes come from a store."""
    with ExitStack() as stack:
        opened = open_readable_root(source.uri, settings)
        stack.callback(opened.close)
        checkpoint = open_checkpoint(
            opened, settings, prefer=source.prefer, patterns=source.patterns
        )
        return checkpoint, not is_file_uri(opened.root)


class DryTracer:
    """One rank's load; see `plan_job.Tracer`.

    Args:
        settings: as the real load would have them.
        opened: checkpoints that are open already.

    Attributes:
        result: once `load` has returned.
    """

    def __init__(self, settings: Settings, opened: Opened) -> None:
        self._settings = settings
        self._opened = opened
        self.result: RankTrace | None = None
        self._notes: list[str] = []

    def building(self) -> AbstractContextManager[None]:
        return off_memory()

    def note(self, text: str) -> None:
        self._notes.append(text)

    def load(
        self,
        model: torch.nn.Module | None,
        sources: Iterable[WeightSource],
        consume: Callable[[Any], object],
        place: RankPlace,
        eager_reason: str | None = None,
    ) -> None:
        """Trace, and leave what was found in `result`.

        Raises:
            TensorMismatchError: a tensor does not fit the model.
            FastloadError: the checkpoint cannot be opened.
        """
        pairs = [
            (source, *(self._opened.get(source) or open_model(source, self._settings)))
            for source in sources
        ]
        books = _Books([(s.prefix, checkpoint) for s, checkpoint, _ in pairs], self._notes)
        if eager_reason is None and self._settings.trace == "eager":
            eager_reason = "FASTLOAD_TRACE=eager"
        reads: list[TensorRead] = []
        if eager_reason is None:
            try:
                reads = _trace(books, model, consume)
            except GeometryError as error:
                raise TensorMismatchError(error.what, hint=error.hint, **error.fields) from error
            except Exception as error:
                if isinstance(error, _MISFITS) and books.current and not books.early_names:
                    raise TensorMismatchError(
                        f"{place.engine} could not take tensor {books.current.name!r}: "
                        f"{type(error).__name__}: {error}",
                        hint=MISFIT_HINT,
                        **entry_fields(books.current),
                    ) from error
                eager_reason = f"not traceable ({type(error).__name__}: {error})"
        remote = any(remote for *_, remote in pairs)
        chunk_bytes = self._chunk_bytes(place, books, remote=remote)
        self.result = books.result(
            place.rank, reads, eager_reason, chunk_bytes, usual_gap(self._settings)
        )

    def _chunk_bytes(self, place: RankPlace, books: _Books, *, remote: bool) -> int:
        try:
            sizes = choose_sizes(self._settings, place, books.model_bytes, remote=remote)
        except OutOfBudgetError:
            books.notes.append("this machine has too little memory for so many ranks")
            return self._settings.chunk_bytes or _FALLBACK_CHUNK_BYTES
        return sizes.chunk_bytes - sizes.chunk_bytes % ALIGNMENT_BYTES


class _Books:
    """The tensors of a load, and what is read of them while tracing. A `Resolver`."""

    def __init__(self, checkpoints: Sequence[tuple[str, Checkpoint]], notes: list[str]) -> None:
        self._checkpoints = checkpoints
        self.notes = notes
        self.current: TensorEntry | None = None
        self.early: list[list[TensorRead]] = []
        self.early_names: Counter[str] = Counter()
        self.tensors = 0
        self.transfers = 0
        shards = {shard.object_id: shard.header_bytes for _, c in checkpoints for shard in c.shards}
        self.objects: list[ObjectId] = sorted(shards, key=lambda object_id: object_id.uri)
        self.data_starts = [shards[object_id] for object_id in self.objects]
        self.model_bytes = sum(entry.byte_range.size_bytes for _, entry in self.entries())

    def entries(self) -> Iterator[tuple[str, TensorEntry]]:
        for prefix, checkpoint in self._checkpoints:
            for entry in checkpoint.entries.values():
                yield prefix + entry.name, entry

    def run(self, transfers: Iterable[Transfer]) -> None:
        """Copies that the trace must see done: counted; their memory stays what it is."""
        self._count(transfer.source for transfer in transfers)

    def read(self, lazy: LazyTensor) -> torch.Tensor:
        """A value that the trace must have: zeros."""
        self._count([lazy])
        sizes = tuple(lazy.shape)
        view = View(sizes, dense_strides_like(sizes, lazy.view_in_node.strides), 0)
        raw = torch.zeros(max(1, view.span) * lazy.dtype.itemsize, dtype=torch.uint8, device="cpu")
        return raw.view(lazy.dtype).as_strided(view.sizes, view.strides)

    def _count(self, lazies: Iterable[LazyTensor]) -> None:
        found: list[TensorRead] = []
        for lazy in lazies:
            for part in leaves(lazy).values():
                assert isinstance(part.node, FileNode)
                self.early_names[part.node.entry.name] += 1
                found.append(part.node.read(part.view_in_node, part.dtype.itemsize))
        self.early.append(found)

    def whole(self) -> list[TensorRead]:
        """All tensors, as an eager load reads them."""
        return [
            TensorRead(entry.object_id, entry.byte_range.start, 1, View((size,), (1,), 0))
            for _, entry in self.entries()
            if (size := entry.byte_range.size_bytes)
        ]

    def result(
        self,
        rank: int,
        reads: list[TensorRead],
        eager_reason: str | None,
        chunk_bytes: int,
        merge_gap_bytes: int,
    ) -> RankTrace:
        if eager_reason is not None:
            self.notes.append(f"assumed: every tensor is read whole, by each rank: {eager_reason}")
            reads = self.whole()
        if self.early_names:
            names = ", ".join(list(self.early_names)[:_NAMES_SHOWN])
            more = ", ..." if len(self.early_names) > _NAMES_SHOWN else ""
            self.notes.append(
                f"values of {len(self.early_names)} tensors are asked for while tracing "
                f"({names}{more}): counted as read, assumed to be zeros"
            )
        early = [
            plan_reads(some, chunk_bytes=chunk_bytes, merge_gap_bytes=merge_gap_bytes)
            for some in self.early
        ]
        alone = plan_reads(reads, chunk_bytes=chunk_bytes, merge_gap_bytes=merge_gap_bytes)
        needs = Needs.of(reads, self.objects, gap_bytes=merge_gap_bytes)
        exact = Needs.of(reads, self.objects, gap_bytes=0)
        early_needed = sum(plan.needed_bytes for plan in early)
        early_fetched = sum(plan.fetched_bytes for plan in early)
        early_requests = sum(len(plan.chunks) for plan in early)
        return RankTrace(
            rank=rank,
            objects=tuple(self.objects),
            data_starts=tuple(self.data_starts),
            needs=needs.encode(),
            exact=exact.encode(),
            shared=eager_reason is None,
            model_bytes=self.model_bytes,
            needed_bytes=alone.needed_bytes + early_needed,
            chunk_bytes=chunk_bytes,
            merge_gap_bytes=merge_gap_bytes,
            alone_fetched_bytes=alone.fetched_bytes + early_fetched,
            alone_requests=len(alone.chunks) + early_requests,
            early_needed_bytes=early_needed,
            early_fetched_bytes=early_fetched,
            early_requests=early_requests,
            tensors=self.tensors,
            transfers=self.transfers,
            notes=tuple(self.notes),
        )


def _trace(
    books: _Books, model: torch.nn.Module | None, consume: Callable[[Any], object]
) -> list[TensorRead]:
    """Run `load_weights` over lazy tensors; which parts of the checkpoint its copies take."""
    recorder = Recorder(books, dry=True)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, entry in books.entries():
            books.tensors += 1
            books.current = entry
            yield name, recorder.lazy(entry)

    with recorder.recording():
        consume(weights())
    books.transfers = recorder.ledger.recorded_count
    reads = list(dict.fromkeys(_reads(recorder.ledger.transfers)))
    if model is not None:
        replace_lazy_attributes(model)
    recorder.ledger.close()
    if recorder.leaked():
        gc.collect()
    for node in recorder.leaked():
        recorder.materialize(node)
    return reads


def _reads(transfers: Iterable[Transfer]) -> Iterator[TensorRead]:
    for transfer in transfers:
        for part in leaves(transfer.source).values():
            assert isinstance(part.node, FileNode)
            yield part.node.read(part.view_in_node, part.dtype.itemsize)
