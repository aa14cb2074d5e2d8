"""Decides which range is asked for when, again, twice, or no more. No thread, no clock, no I/O.

Called by one thread with events and the time; calls `Lanes` and `Run`. So every timeline can be
tested to the instant. Order of calls: `begin`, then `handle` and `step` in turn, `abandon`.

Guarantees: each chunk is delivered once, when all its bytes are good; memory goes back only
when nothing writes there any more; only the missing bytes are asked again; the first permanent
error, or the one that used up its attempts, ends the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from fastload_common.errors import SourceError
from fastload_common.source.base import Receipt
from fastload_common.transfer.faults import (
    counts,
    explained,
    is_throttling,
    late_error,
    slow_error,
)
from fastload_common.transfer.hedging import Verdict
from fastload_common.transfer.judging import SILENT_S, Judge
from fastload_common.transfer.lanes import (
    Attempt,
    Done,
    Event,
    Failed,
    Lanes,
    Progress,
    Restarted,
    Started,
)
from fastload_common.transfer.parts import Part, Racer
from fastload_common.transfer.run import Run, Staging, StagingSlot
from fastload_common.transfer.stats import TransferStats
from fastload_common.transfer.tuning import Tuning
from fastload_common.transfer.work_queue import WorkQueue

__all__ = ["Scheduler"]


class Scheduler:
    """One load's requests: ``lanes`` run them, ``tuning`` holds the policies.

    Args:
        staging: memory for chunks and for hedges.
    """

    def __init__(
        self, lanes: Lanes, staging: Staging, tuning: Tuning, stats: TransferStats
    ) -> None:
        self._lanes = lanes
        self._staging = staging
        self._tuning = tuning
        self._stats = stats
        self._ids = itertools.count(1)
        self._racers: dict[int, Racer] = {}
        self._left_behind: dict[int, Racer] = {}
        self._run: Run | None = None
        self._work = WorkQueue(staging, tuning)
        self._limit = self._room = 0
        self._judge = Judge(tuning)
        self._not_before_s = -math.inf

    @property
    def starving(self) -> bool:
        """Whether the next release of memory should wake us."""
        return self._work.starving

    def begin(self, run: Run) -> None:
        """Take up a run; the last one must be abandoned or complete.

        What of it has not ended in spite of that gives its memory back when it does.
        """
        self.abandon()
        self._left_behind.update(self._racers)
        self._racers.clear()
        self._run = run
        self._work.begin(run)

    def handle(self, events: Iterable[Event], now_s: float) -> None:
        """Take note of what happened."""
        for event in events:
            racer = self._racers.get(event.attempt_id) or self._left_behind.get(event.attempt_id)
            if racer is None:
                continue
            match event:
                case Started():
                    racer.start(event.at_s)
                case Progress():
                    had_bytes = racer.received_bytes
                    racer.progress(event.at_s, event.received_bytes, event.first_byte_s)
                    self._tuning.ramp.received(now_s, racer.received_bytes - had_bytes)
                case Restarted():
                    racer.restart()
                case Done():
                    self._end(racer)
                    self._succeeded(racer, event.receipt, now_s)
                case Failed():
                    self._end(racer)
                    self._lost(racer, event, now_s)
        self._settle()

    def step(self, now_s: float) -> float:
        """Do what is due; in how many seconds it must be called again, if nothing happens."""
        run = self._run
        if run is None:
            return math.inf
        if run.is_late() and not (run.is_over or run.is_complete):
            run.fail(run.deadline_error())
        if run.is_over:
            self.abandon()
            return math.inf
        self._judge_all(now_s)
        self._fill(run, now_s)
        self._lanes.flush()
        self._tuning.ramp.busy(now_s, len(self._racers))
        self._settle()
        return self._next_s(now_s)

    def abandon(self) -> None:
        """Nothing of the run is wanted any more: end its attempts, give its memory back."""
        if self._run is None:
            return
        for racer in self._racers.values():
            self._cancel(racer)
        self._work.clear()
        self._settle()

    def forget(self) -> None:
        """The lanes are closed, so nothing writes any more: give all memory back."""
        self.abandon()
        for racer in [*self._racers.values(), *self._left_behind.values()]:
            self._end(racer)
            self._drop(racer)
            self._drop_winner(racer.part)
        self._settle()

    # Beginning requests

    def _fill(self, run: Run, now_s: float) -> None:
        tuning = self._tuning
        if tuning.limit != self._limit:
            self._limit = tuning.limit
            self._lanes.set_limit(self._limit)
        pause_s = tuning.throttle.delay_s(now_s)
        if pause_s > 0:
            self._not_before_s = max(self._not_before_s, now_s + pause_s)
        self._room = self._limit + tuning.backlog
        while len(self._racers) < self._room and now_s >= self._not_before_s:
            part = self._work.next_part(run, now_s, self._limit)
            if part is None:
                return
            delay_s = tuning.bucket.delay_s(now_s, part.missing_bytes) if tuning.bucket else 0.0
            if delay_s > 0:
                self._work.put_back(part)
                self._not_before_s = now_s + delay_s
                return
            self._start(part, now_s)

    def _start(self, part: Part, now_s: float, slot: StagingSlot | None = None) -> None:
        """Ask for what is missing: by the primary, or into a slot of its own by a hedge."""
        base_bytes = part.done_bytes
        size_bytes = part.missing_bytes
        if slot is not None and part.primary is not None:
            base_bytes += part.primary.received_bytes
            size_bytes -= part.primary.received_bytes
        racer = Racer(next(self._ids), part, base_bytes, size_bytes, slot)
        if slot is None:
            part.primary = racer
            part.chunk.writers += 1
            memory = part.memory_from(base_bytes)
            position_bytes = part.chunk.slot.position_bytes + part.start_bytes + base_bytes
        else:
            part.hedge = racer
            memory, position_bytes = slot.memory[:size_bytes], slot.position_bytes
        racer.memory = memory
        if self._tuning.bucket is not None:
            self._tuning.bucket.take(now_s, size_bytes)
        part.attempts += 1
        self._racers[racer.attempt_id] = racer
        self._stats.request_started(is_retry=part.attempts > 1)
        self._lanes.start(
            Attempt(
                racer.attempt_id,
                part.chunk.chunk.object_id,
                part.range_from(base_bytes),
                memory,
                position_bytes,
                fresh=part.fresh or slot is not None,
                urgent=slot is not None,
            )
        )

    # Slow requests

    def _judge_all(self, now_s: float) -> None:
        idle = self._work.is_empty and len(self._racers) < self._limit
        for racer, verdict in self._judge.slow(self._racers.values(), now_s, idle=idle):
            silent_s = now_s - racer.last_progress_s
            if verdict is Verdict.KILL:
                self._kill(racer, silent_s)
            elif not racer.is_hedge and racer.part.hedge is None:
                self._hedge(racer, silent_s, now_s)

    def _hedge(self, racer: Racer, silent_s: float, now_s: float) -> None:
        run, tuning = racer.part.chunk.run, self._tuning
        missing_bytes = racer.size_bytes - racer.received_bytes
        if missing_bytes <= 0 or (tuning.bucket and tuning.bucket.delay_s(now_s, missing_bytes)):
            return
        if not tuning.hedges.try_take(missing_bytes, run.delivered_bytes):
            return
        slot = self._work.spare_slot(missing_bytes)
        if slot is not None:
            self._stats.hedged()
            self._start(racer.part, now_s, slot)
            return
        tuning.hedges.settle(missing_bytes, 0)
        # Ending it costs no memory. But once: it may be the store's way to be slow.
        if silent_s > SILENT_S and not racer.part.kills:
            self._kill(racer, silent_s)

    def _kill(self, racer: Racer, silent_s: float) -> None:
        racer.killed = (
            f"no byte came for {silent_s:.1f} s"
            if silent_s > SILENT_S
            else f"{racer.received_bytes} of {racer.size_bytes} bytes came, too slowly"
        )
        racer.part.kills += 1
        self._stats.killed()
        self._cancel(racer)

    def _cancel(self, racer: Racer) -> None:
        if not racer.cancelled:
            racer.cancelled = True
            self._lanes.cancel(racer.attempt_id)

    # Ends

    def _end(self, racer: Racer) -> None:
        """Nothing is written for this racer any more."""
        self._racers.pop(racer.attempt_id, None)
        self._left_behind.pop(racer.attempt_id, None)
        racer.end()
        if not racer.is_hedge:
            racer.part.chunk.writers -= 1
            racer.part.chunk.release_if_unused()

    def _succeeded(self, racer: Racer, receipt: Receipt, now_s: float) -> None:
        part = racer.part
        tuning = self._tuning
        self._stats.request_done(receipt, is_retry=part.attempts > 1)
        tuning.observed.add(
            first_byte_s=receipt.first_byte_s,
            total_s=receipt.total_s,
            size_bytes=receipt.size_bytes,
            new_connection=receipt.new_connection,
        )
        tuning.throttle.succeeded(now_s)
        tuning.ramp.received(now_s, racer.size_bytes - racer.received_bytes)
        if racer.is_hedge:
            self._hedge_won(racer)
            return
        self._drop_winner(part)  # it was faster, but not by enough
        part.done_bytes = racer.base_bytes + racer.size_bytes
        self._race_over(part)

    def _hedge_won(self, racer: Racer) -> None:
        part = racer.part
        if part.chunk.given_up or not part.missing_bytes:
            self._drop(racer, racer.size_bytes)
        elif part.primary is not None:
            # It may still write where the bytes go: end it first.
            part.winner = racer
            self._cancel(part.primary)
        else:
            self._take(racer, racer.size_bytes)
            self._race_over(part)

    def _lost(self, racer: Racer, event: Failed, now_s: float) -> None:
        part = racer.part
        good_bytes = 0
        if isinstance(event.error, SourceError):
            # Never trust a count beyond what was asked: it would skip bytes.
            good_bytes = max(0, min(event.error.received_bytes, racer.size_bytes))
            if event.error.retryable:
                good_bytes = max(good_bytes, racer.received_bytes)
        if (bucket := self._tuning.bucket) is not None:
            bucket.give_back(racer.size_bytes - good_bytes)
        self._stats.request_failed(
            type(event.error).__name__ if not racer.cancelled else "cancelled",
            good_bytes,
            is_retry=part.attempts > 1,
        )
        if part.chunk.given_up:
            self._drop(racer)
            self._drop_winner(part)
            if not (isinstance(event.error, SourceError) and event.error.retryable):
                part.chunk.run.fail(event.error)  # a note of what ended the run
            return
        if racer.is_hedge:
            self._take(racer, good_bytes)
        else:
            part.done_bytes = max(part.done_bytes, racer.base_bytes + good_bytes)
            if part.winner is not None:
                winner, part.winner = part.winner, None
                self._take(winner, winner.size_bytes)
        if not part.missing_bytes:
            self._race_over(part)
        elif not racer.cancelled or racer.killed:
            self._failed(racer, event, good_bytes, now_s)
        elif part.primary is None and part.hedge is None:
            self._work.again(part, now_s)

    def _failed(self, racer: Racer, event: Failed, good_bytes: int, now_s: float) -> None:
        """An attempt ended before its time: ask again, or give up."""
        part, policy = racer.part, self._tuning.policy
        run = part.chunk.run
        error = slow_error(racer) if racer.killed else event.error
        if isinstance(error, SourceError):
            run.note_fault(error)
            if racer.is_hedge and part.primary is not None:
                return  # which will tell, should it be the store that refuses
        if not isinstance(error, SourceError) or not error.retryable:
            run.fail(explained(error, part))
            return
        if is_throttling(error):
            self._tuning.throttle.throttled(now_s, error.fields.get("retry_after_s"))
        if good_bytes < policy.progress_bytes and not event.innocent:
            part.counted += counts(racer, now_s, policy)
        if part.primary is not None or part.hedge is not None:
            return  # the other one runs on
        if part.counted >= policy.max_attempts:
            run.fail(explained(error, part))
            return
        delay_s = 0.0
        if not racer.killed or part.counted > 1:
            asked_s = error.fields.get("retry_after_s")
            delay_s = policy.backoff_delay_s(part.counted, self._tuning.random, asked_s)
        if (late := late_error(run, delay_s, error)) is not None:
            run.fail(late)
        else:
            self._work.again(part, now_s + delay_s)

    def _race_over(self, part: Part) -> None:
        """All its bytes are good: end whoever still runs, deliver the chunk if it is whole."""
        if part.is_over:
            return
        part.is_over = True
        if part.hedge is not None:
            self._cancel(part.hedge)
        chunk = part.chunk
        chunk.unfinished -= 1
        if not (chunk.unfinished or chunk.given_up):
            del self._work.open[chunk.index]
            chunk.run.deliver(chunk.chunk, chunk.slot)

    def _take(self, racer: Racer, good_bytes: int) -> None:
        """Use what a hedge has; its memory goes back."""
        taken_bytes = 0
        if racer.part.primary is None:
            taken_bytes = racer.part.take_from(racer, good_bytes)
        self._drop(racer, good_bytes - taken_bytes, won=taken_bytes > 0)

    def _drop_winner(self, part: Part) -> None:
        winner, part.winner = part.winner, None
        if winner is not None:
            self._drop(winner, winner.size_bytes)

    def _drop(self, racer: Racer, wasted_bytes: int = 0, *, won: bool = False) -> None:
        if racer.slot is None:
            return
        racer.slot.release()
        self._tuning.hedges.settle(racer.size_bytes, wasted_bytes)
        self._stats.hedge_ended(wasted_bytes, won=won)

    def _settle(self) -> None:
        """Let the consumer know whether anything of its run is left."""
        run = self._run
        if run is None:
            return
        run.in_flight = len(self._racers)
        if not self._racers and not self._work.open and (run.is_over or run.is_complete):
            self._run = None
            run.idle.set()

    def _next_s(self, now_s: float) -> float:
        times = []
        if self._not_before_s > now_s:
            times.append(self._not_before_s)
        elif (due_s := self._work.due_s) is not None and len(self._racers) < self._room:
            times.append(due_s)
        if self._racers:
            times.append(self._judge.next_s)
        return max(0.0, min(times, default=math.inf) - now_s)
