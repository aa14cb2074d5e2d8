"""One load of one model by one rank: the only place that joins all parts, and that cleans up.

    meet the host's other ranks -> list, headers -> trace (the engine's load_weights over lazy
    tensors) -> plan, together with them -> fetch and place -> finish

Adapters see this module; they know nothing of what is behind it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

import torch

from fastload_common.checkpoint.records import Checkpoint, TensorEntry
from fastload_common.clock import Clock, SystemClock
from fastload_common.config import Settings
from fastload_common.errors import FastloadError, TensorMismatchError, TraceError
from fastload_common.exchange.group import RankGroup
from fastload_common.exchange.node_exchange import NodeExchange
from fastload_common.load.caching import Caching
from fastload_common.load.cleanup import kept
from fastload_common.load.executor import Executor
from fastload_common.load.first_reads import FirstReads, choose_gap
from fastload_common.load.leaks import replace_lazy_attributes
from fastload_common.load.model_root import open_model_root
from fastload_common.load.open_model import open_checkpoint
from fastload_common.load.progress import make_progress
from fastload_common.load.report import LoadReport
from fastload_common.load.request import RankPlace, WeightSource
from fastload_common.load.sharing import join, terms_of
from fastload_common.load.sizes import choose_sizes
from fastload_common.load.verify import Verification
from fastload_common.plan.records import Plan
from fastload_common.source.base import ObjectSource
from fastload_common.source.composite import CompositeSource
from fastload_common.source.uri import is_file_uri
from fastload_common.staging.arena import Arena
from fastload_common.staging.placer import Placer
from fastload_common.trace.misfit import MISFIT_HINT, GeometryError, entry_fields
from fastload_common.trace.recorder import Recorder
from fastload_common.transfer.fetcher import Fetcher
from fastload_common.transfer.stats import TransferStats

__all__ = ["LoadSession", "RankGroup", "RankPlace", "WeightSource"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Weights = Iterable[tuple[str, torch.Tensor]]

# Raised where a checkpoint does not fit the model: eager reading would fail in the same way.
_MISFITS = (AssertionError, AttributeError, KeyError, IndexError, ValueError)
# Passed on as they are; to read whole tensors instead would need more memory.
_PASSED_ON = (FastloadError, MemoryError, torch.OutOfMemoryError)


class LoadSession:
    """Loads from one or more sources. Use as a context manager, once, from one thread.

    Args:
        sources: tensors are handed out in this order.
        settings: this process's settings.
        place: which rank this is.
        progress: whether this process may show a progress display.
        group: all ranks that load this model together, each by a session of its own at the same
            time; None: this one alone.
        clock: time; the tests inject theirs.
    """

    def __init__(
        self,
        sources: Sequence[WeightSource],
        settings: Settings,
        place: RankPlace | None = None,
        *,
        progress: bool = True,
        group: RankGroup | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._sources = tuple(sources)
        self._settings = settings
        self._place = place or RankPlace()
        self._show_progress = progress
        self._group = group
        self._exchange: NodeExchange | None = None
        self._clock = clock or SystemClock()
        self._started_s = self._clock.monotonic_s()  # the deadline counts listing and tracing too
        self._stack = ExitStack()
        self._checkpoints: list[tuple[WeightSource, Checkpoint]] = []
        self._stats = TransferStats()
        self._first_reads = FirstReads(self._clock)
        self._current: TensorEntry | None = None
        self.report = LoadReport(
            self._place.engine,
            self._place.engine_version,
            " + ".join(source.uri for source in self._sources),
            self._place.rank,
            world_size=self._place.world_size,
            settings=settings.changed(),
            clock=self._clock,
        )
        self._verification = Verification(settings.verify, self.report)
        self._caching = Caching(settings, self._place, self.report, self._clock)

    def __enter__(self) -> LoadSession:
        try:
            self._open()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(error)

    # -- what callers use -------------------------------------------------------------------

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """What was found, one for each source."""
        return tuple(checkpoint for _, checkpoint in self._checkpoints)

    def load(
        self,
        model: torch.nn.Module | None,
        consume: Callable[[Weights], T],
        eager_reason: str | None = None,
    ) -> T:
        """Let the engine load the weights, and return what its loader returned.

        Args:
            model: searched afterwards for tensors that are still lazy; may be None.
            consume: the model's ``load_weights``. Called with (name, tensor) pairs; may run a
                second time, with real tensors, if it does what a lazy tensor cannot stand for.
            eager_reason: hand out real tensors from the start, and log why.

        Raises:
            TensorMismatchError: the model refused a tensor; no weight was placed.
            FastloadError: as documented in `fastload_common.errors`.
        """
        if eager_reason is None and self._settings.trace == "eager":
            eager_reason = "FASTLOAD_TRACE=eager"
        if eager_reason is not None:
            return self._load_eagerly(consume, eager_reason)
        self._executor.expect(model)
        recorder = Recorder(self._executor)
        self._stack.callback(recorder.close)
        try:
            with self.report.phase("trace"):
                result = self._trace(recorder, consume)
            self._current = None  # which tensor a later error is about is not known
            self._place_all(recorder)
        except Exception as error:
            if isinstance(error, GeometryError):
                # Under its public name; the other bases are for the engine's own code.
                raise TensorMismatchError(error.what, hint=error.hint, **error.fields) from error
            if isinstance(error, _PASSED_ON) and not isinstance(error, TraceError):
                raise
            reason = self._untraceable(error, recorder)
            recorder.close()
            return self._load_eagerly(consume, reason)
        with self.report.phase("finish"):
            self._finish(recorder, model)
            self._end_reading()
        return result

    def tensors(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """All tensors, real, in the order in which they lie, each with memory of its own."""
        if self._exchange is not None:
            self._exchange.read_alone()
        recorder = Recorder(self._executor)
        batch: list[tuple[str, TensorEntry]] = []
        held_bytes = 0
        for name, entry in self._entries():
            size_bytes = entry.byte_range.size_bytes
            if batch and held_bytes + size_bytes > self._batch_bytes:
                yield from self._read_batch(recorder, batch)
                batch, held_bytes = [], 0
            batch.append((name, entry))
            held_bytes += size_bytes
        yield from self._read_batch(recorder, batch)
        self._end_reading()

    # -- steps ------------------------------------------------------------------------------

    def _open(self) -> None:
        settings, report = self._settings, self.report
        with report.phase("agree"):
            self._exchange = join(
                self._group, settings, self._clock, report, started_s=self._started_s
            )
        opened = [self._find(weights) for weights in self._sources]
        report.model_bytes = sum(entry.byte_range.size_bytes for _, entry in self._entries())
        remote = any(not is_file_uri(source.root) for source in opened)
        sizes = choose_sizes(settings, self._place, report.model_bytes, remote=remote)
        # The tensors of a batch stand beside the staging memory that brings them.
        self._batch_bytes = sizes.slots * sizes.chunk_bytes // 2
        arena = Arena(sizes.chunk_bytes, sizes.slots)
        self._stack.callback(arena.close)
        fetcher = Fetcher(
            opened[0] if len(opened) == 1 else CompositeSource(opened),
            arena,
            sizes.policy(settings),
            self._clock,
            self._stats,
            started_s=self._started_s,
        )
        self._stack.callback(fetcher.close)
        cached = self._caching.fetch(fetcher.fetch, arena, sizes)
        fetch = self._verification.watch(cached, sizes.chunk_bytes)
        gap_bytes = choose_gap(settings, self._first_reads, report)
        if self._exchange is not None:
            terms = terms_of(self.checkpoints, settings, arena, fetch, fetcher.close, gap_bytes)
            self._exchange.offer(terms)
        self._executor = Executor(
            fetch,
            chunk_bytes=sizes.chunk_bytes,
            merge_gap_bytes=gap_bytes,
            report=report,
            exchange=self._exchange,
            placer=Placer(arena, self._clock),
        )
        self._stack.callback(self._executor.close)
        logger.info("fastload: rank %d: %s, set: %s", report.rank, sizes, report.settings)

    def _find(self, weights: WeightSource) -> ObjectSource:
        """Open one source and read where its tensors lie."""
        source = open_model_root(
            weights.uri, self._settings, self.report, self._show_progress, self._check_others
        )
        self._stack.callback(source.close)
        checkpoint = open_checkpoint(
            self._first_reads.watch(self._caching.reads(source)),
            self._settings,
            prefer=weights.prefer,
            patterns=weights.patterns,
            phases=self.report,
            see_start=self._verification.starts(source),
        )
        self._checkpoints.append((weights, checkpoint))
        return source

    def _entries(self) -> Iterator[tuple[str, TensorEntry]]:
        for weights, checkpoint in self._checkpoints:
            for entry in checkpoint.entries.values():
                yield weights.prefix + entry.name, entry

    def _trace(self, recorder: Recorder, consume: Callable[[Weights], T]) -> T:
        def weights() -> Generator[tuple[str, torch.Tensor], None, None]:
            for name, entry in self._entries():
                self._check_others()
                self._current = entry
                self.report.tensors += 1
                yield name, recorder.lazy(entry)

        handed_out = weights()
        try:
            with recorder.recording():
                return consume(handed_out)
        finally:
            handed_out.close()

    def _place_all(self, recorder: Recorder) -> None:
        transfers = recorder.ledger.transfers
        self.report.transfers = recorder.ledger.recorded_count
        if recorder.eager_ops:
            logger.info(
                "%d values were read while tracing (%s)",
                sum(recorder.eager_ops.values()),
                ", ".join(f"{name} x{count}" for name, count in recorder.eager_ops.items()),
            )

        def start_progress(plan: Plan) -> None:
            progress = make_progress(
                self._settings.progress if self._show_progress else "off",
                plan.fetched_bytes,
                self._place.rank,
                self._clock,
            )
            self._executor.advance = progress.advance
            ending.callback(progress.close)

        with ExitStack() as ending:
            self._executor.run_all(transfers, start_progress)
        undone = sum(not transfer.done for transfer in transfers)
        if undone:
            raise TraceError(
                f"{undone} of {len(transfers)} copies were not done",
                hint="this is a fault of fastload: please report it",
            )

    def _finish(self, recorder: Recorder, model: torch.nn.Module | None) -> None:
        if model is not None:
            replace_lazy_attributes(model)
        recorder.ledger.close()
        if recorder.leaked():
            gc.collect()
        for node in recorder.leaked():
            logger.warning("%r is kept by the model outside its modules: read whole", node)
            recorder.materialize(node)
        self._executor.finish()

    def _untraceable(self, error: Exception, recorder: Recorder) -> str:
        """Decide whether reading eagerly can help; raises the error, explained, if not."""
        entry = self._current
        if entry is None and self.report.tensors == 0:
            raise error  # before the first tensor: not about tensors at all
        if entry is not None and isinstance(error, _MISFITS) and not isinstance(error, TraceError):
            raise self._misfit(entry, error) from error
        where = f"at tensor {entry.name!r}" if entry else "while its copies were done"
        if recorder.changed_by is not None:
            raise TraceError(
                f"load_weights could not be traced ({where}: {type(error).__name__}: {error}), and "
                f"cannot be run again since it changed parameters ({recorder.changed_by})",
                hint="set FASTLOAD_TRACE=eager for this model",
            ) from error
        logger.warning(
            "load_weights could not be traced (%s: %s: %s); reading eagerly instead",
            where,
            type(error).__name__,
            error,
        )
        return f"not traceable: {type(error).__name__}"

    def _misfit(self, entry: TensorEntry, error: Exception) -> TensorMismatchError:
        return TensorMismatchError(
            f"{self._place.engine} could not take tensor {entry.name!r}: "
            f"{type(error).__name__}: {error}",
            hint=MISFIT_HINT,
            **entry_fields(entry),
        )

    def _load_eagerly(self, consume: Callable[[Weights], T], reason: str) -> T:
        logger.info("weights are read whole, one after the other: %s", reason)
        self.report.eager_reason = reason
        handed_out = self.tensors()
        try:
            result = consume(handed_out)
            self._end_reading()  # also where it did not take all tensors
            return result
        except _PASSED_ON:
            raise
        except Exception as error:
            if self._current is None:
                raise
            # These tensors are real: whatever it is, it is not for being lazy.
            raise self._misfit(self._current, error) from error
        finally:
            handed_out.close()

    def _read_batch(
        self, recorder: Recorder, batch: list[tuple[str, TensorEntry]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self._check_others()
        values = self._executor.read_whole([recorder.lazy(entry) for _, entry in batch])
        values.reverse()
        for name, entry in batch:
            self._current = entry
            self.report.tensors += 1
            yield name, values.pop()  # nobody else holds it

    def _check_others(self) -> None:
        """Another rank's failure ends this load at its next step."""
        if self._exchange is not None:
            self._exchange.check()

    def _end_reading(self) -> None:
        """Before the model is used: compare what is to be compared, and let the others end."""
        if self._exchange is not None:
            self._verification.leave_out(self._exchange.objects_of_others())
        self._caching.set_aside(self._verification.finish)
        if self._exchange is not None:
            self._exchange.leave()

    def _close(self, error: BaseException | None) -> None:
        report = self.report
        report.take_transfer(self._stats.snapshot())
        with kept(error), ExitStack() as ending:
            ending.callback(self._stack.close)
            if self._exchange is not None:
                self._exchange.end(error)
        if self._exchange is not None:
            report.take_exchange(self._exchange.fetched_bytes, self._exchange.facts())
        self._caching.close(error)
        report.finish(error)
        if error is None:
            logger.info("%s", report.summary_line())
        if self._settings.report is not None:
            report.append_to(self._settings.report)
