"""Chunks in, filled staging slots out: the seam between the loader and the network.

How the bytes are received stands behind `Fetcher.fetch` and nowhere else: a thread decides
(`pump`, `scheduler`), receiver processes or threads receive (`lanes`).

Must not know: tensors, safetensors, ranks.
"""

from __future__ import annotations

import random as random_module
import weakref
from collections.abc import Callable, Generator, Iterable
from types import TracebackType

from fastload_common.clock import Clock
from fastload_common.errors import OutOfBudgetError
from fastload_common.plan.records import Chunk
from fastload_common.source.base import OpensReceivers
from fastload_common.transfer.handover import quick_handover
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.pump import Pump
from fastload_common.transfer.routed_lanes import open_lanes
from fastload_common.transfer.run import Filled, Run, Staging, StagingSlot, Supply
from fastload_common.transfer.scheduler import Scheduler
from fastload_common.transfer.stats import TransferStats
from fastload_common.transfer.tuning import make_tuning

__all__ = ["Fetcher", "Filled", "Staging", "StagingSlot", "Supply"]


class Fetcher:
    """Fetches chunks into staging memory, many at once, with retries.

    Threads and processes start with the first `fetch` and keep their connections until `close`. A
    fetcher that is dropped without `close` ends them too, and never keeps the interpreter from
    ending.

    Args:
        source: signs requests, or opens receivers; not closed by the fetcher.
        arena: staging memory; not closed by the fetcher.
        policy: concurrency, attempts, waits, deadline.
        clock: time for back-off and deadline.
        stats: counts every request.
        random: draws from ``[0, 1)`` for the jitter.
        started_s: the clock's reading when the load began; the deadline counts from it.
            Default: now.
    """

    def __init__(
        self,
        source: OpensReceivers,
        arena: Staging,
        policy: TransferPolicy,
        clock: Clock,
        stats: TransferStats,
        *,
        random: Callable[[], float] = random_module.random,
        started_s: float | None = None,
    ) -> None:
        self._slot_bytes = arena.slot_bytes
        self._clock = clock
        self._limit_s = policy.deadline_s
        started_s = clock.monotonic_s() if started_s is None else started_s
        self._deadline_s = None if policy.deadline_s is None else started_s + policy.deadline_s
        tuning = make_tuning(policy, clock, random)
        self._pump = Pump(
            lambda mailbox: open_lanes(source, arena, policy, mailbox, clock),
            lambda lanes: Scheduler(lanes, arena, tuning, stats),
            clock,
        )
        # Runs when the fetcher is collected, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, self._pump.stop)

    def fetch(
        self, chunks: Iterable[Chunk], supply: Supply | None = None
    ) -> Generator[Filled, None, None]:
        """Fetch all chunks; yields each as it arrives, not in the order given.

        Requests begin in the order given, at the first ``next``. Memory bounds how many are
        filled and not yet released, so the consumer must release while it iterates: with all
        slots in its hands it would wait for ever. When the iterator ends, is closed or raises,
        no request is in flight and every slot is back, except those the consumer holds.

        One fetch at a time; it may be called from any one thread.

        Args:
            chunks: not empty ranges, each at most the arena's slot size.
            supply: brings some of their bytes itself.

        Raises:
            OutOfBudgetError: a chunk is larger than a slot (at once, before any request).
            SourceError: the first one that is permanent or has used up its attempts, as it
                was raised; further failures are its notes.
            DeadlineError: the load's deadline has passed.
        """
        queued = list(chunks)
        for chunk in queued:
            if not 0 < chunk.byte_range.size_bytes <= self._slot_bytes:
                raise OutOfBudgetError(
                    f"a chunk of {chunk.byte_range.size_bytes} bytes was planned for staging "
                    f"slots of {self._slot_bytes} bytes",
                    hint="this is a fault of fastload: please report it",
                    object=chunk.object_id.uri,
                    range=str(chunk.byte_range),
                )
        return self._fetch(queued, supply)

    def close(self) -> None:
        """End all requests, threads, processes and connections. Safe to call twice."""
        self._pump.close()
        self._finalizer.detach()

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _fetch(self, chunks: list[Chunk], supply: Supply | None) -> Generator[Filled, None, None]:
        if not chunks:
            return
        run = Run(chunks, self._clock, deadline_s=self._deadline_s, limit_s=self._limit_s)
        with quick_handover():
            yield from self._filled(run, supply)

    def _filled(self, run: Run, supply: Supply | None) -> Generator[Filled, None, None]:
        if supply is not None:
            supply.begin(run)
        self._pump.begin(run)
        try:
            if supply is not None:
                supply.start()
            for _ in run.chunks:
                yield run.next_filled()
        finally:
            self._pump.finish(run)
            if supply is not None:
                supply.end()
