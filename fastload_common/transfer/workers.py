"""Threads that receive: each owns one receiver and serves one run after the other."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable

from fastload_common.clock import Clock
from fastload_common.errors import RangeMismatchError, SourceError, StagingError
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange
from fastload_common.source.base import OpensReceivers, Receiver
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.run import Filled, Run, Staging
from fastload_common.transfer.stats import TransferStats

__all__ = ["Worker", "WorkerPool"]

_log = logging.getLogger(__name__)

# An abort can be missed by a receiver that is just about to block, so it is repeated.
_ABORT_REPEAT_S = 0.02
_IDLE_TIMEOUT_S = 0.8
_JOIN_TIMEOUT_S = 2.0


class _StoppedError(Exception):
    """The run was halted; the worker goes back to waiting."""


class Worker:
    """Fills chunks, one at a time, over one receiver that it keeps between runs."""

    def __init__(
        self,
        source: OpensReceivers,
        staging: Staging,
        policy: TransferPolicy,
        clock: Clock,
        stats: TransferStats,
        random: Callable[[], float],
    ) -> None:
        self._source = source
        self._staging = staging
        self._policy = policy
        self._clock = clock
        self._stats = stats
        self._random = random
        self._receiver: Receiver | None = None
        self._run: Run | None = None

    def work(self, inbox: queue.SimpleQueue[Run | None]) -> None:
        """The thread's main function; ends when it gets None."""
        try:
            while (run := inbox.get()) is not None:
                if run.enter():
                    self._serve(run)
                run = None  # else an idle thread would keep the last run's memory
        finally:
            self._drop_receiver()

    def abort(self, run: Run) -> None:
        """Make this worker's present request fail, if it is one of this run. Any thread."""
        receiver = self._receiver
        if receiver is not None and self._run is run:
            receiver.abort()

    def _serve(self, run: Run) -> None:
        self._run = run
        try:
            while run.reserve():
                slot = self._staging.lease(run.stop, run.largest_bytes)
                if slot is None:
                    if run.stop.is_set():
                        break
                    raise StagingError("the staging memory was closed while chunks were fetched")
                filled = Filled(run.take(), slot)
                try:
                    self._fill(run, filled.chunk, filled.data)
                except BaseException:
                    filled.release()
                    raise
                run.deliver(filled)
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 -- raised again by the consumer
            run.fail(error)
        finally:
            self._run = None
            if run.stop.is_set():
                self._drop_receiver()  # it may have been aborted
            run.leave()

    def _fill(self, run: Run, chunk: Chunk, data: memoryview) -> None:
        """Fetch one chunk, asking again for what is missing until it is there."""
        received_bytes = attempts = counted = 0
        while received_bytes < len(data):
            if run.stop.is_set():
                raise _StoppedError
            remaining_s = run.remaining_s()
            if remaining_s is not None and remaining_s <= 0:
                raise run.deadline_error()
            attempts += 1
            error = self._attempt(chunk, data, received_bytes, is_retry=attempts > 1)
            if error is None:
                return
            if error.retryable and run.stop.is_set():
                raise _StoppedError from error  # the abort's doing, or overtaken by it
            progress_bytes = error.received_bytes
            received_bytes += progress_bytes
            counted += progress_bytes < self._policy.progress_bytes
            if not error.retryable or counted >= self._policy.max_attempts:
                raise _explained(error, chunk, attempts, received_bytes)
            run.note_fault(error)
            self._back_off(run, error, counted)

    def _attempt(
        self, chunk: Chunk, data: memoryview, received_bytes: int, *, is_retry: bool
    ) -> SourceError | None:
        missing = ByteRange(chunk.byte_range.start + received_bytes, chunk.byte_range.end)
        self._stats.request_started(is_retry=is_retry)
        try:
            if self._receiver is None:
                self._receiver = self._source.open_receiver()
            receipt = self._receiver.receive(chunk.object_id, missing, data[received_bytes:])
            if receipt.size_bytes != missing.size_bytes:
                raise RangeMismatchError(
                    f"asked for {missing} of {chunk.object_id.uri}, "
                    f"the receiver filled {receipt.size_bytes} of {missing.size_bytes} bytes"
                )
        except SourceError as error:
            # Never trust a count beyond what was asked: it would skip bytes.
            error.received_bytes = max(0, min(error.received_bytes, missing.size_bytes))
            self._stats.request_failed(
                type(error).__name__, error.received_bytes, is_retry=is_retry
            )
            return error
        self._stats.request_done(receipt, is_retry=is_retry)
        return None

    def _back_off(self, run: Run, error: SourceError, counted: int) -> None:
        delay_s = self._policy.backoff_delay_s(
            counted, self._random, error.fields.get("retry_after_s")
        )
        remaining_s = run.remaining_s()
        if remaining_s is not None and delay_s >= remaining_s:
            # Waiting out the deadline would change nothing.
            raise run.deadline_error() from error
        if delay_s > 0 and self._clock.wait(run.stop, delay_s):
            raise _StoppedError

    def _drop_receiver(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            try:
                receiver.close()
            except Exception:  # noqa: BLE001 -- nobody waits for this thread
                _log.warning("closing a connection failed", exc_info=True)


def _explained(error: SourceError, chunk: Chunk, attempts: int, received: int) -> SourceError:
    error.fields.setdefault("attempts", attempts)
    error.add_note(
        f"while fetching {chunk.byte_range} of {chunk.object_id.uri}: {received} of "
        f"{chunk.byte_range.size_bytes} bytes had arrived after {attempts} attempts"
    )
    return error


class WorkerPool:
    """Starts workers when they are first needed, hands them runs, ends them.

    Nothing here refers to the `Fetcher`, so that an abandoned one can be collected while its
    threads wait.
    """

    def __init__(self, make_worker: Callable[[], Worker], staging: Staging, limit: int) -> None:
        self._make_worker = make_worker
        self._staging = staging
        self._limit = limit
        self._inbox: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._run: Run | None = None
        self._closed = False

    def begin(self, run: Run, chunk_count: int) -> None:
        """Let up to ``limit`` workers serve the run.

        Raises:
            RuntimeError: another run is not finished, the pool is closed, or it was made
                before a fork: then its threads and connections belong to the parent.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("this fetcher belongs to the parent process: make a new one")
        with self._lock:
            if self._closed:
                raise RuntimeError("this fetcher is closed")
            if self._run is not None:
                raise RuntimeError("one fetch at a time: close the iterator of the earlier one")
            self._run = run
            wanted = min(self._limit, chunk_count)
            try:
                while len(self._threads) < wanted:
                    self._start_thread()
            except RuntimeError as error:
                if not self._threads:
                    self._run = None
                    raise
                _log.warning("only %d of %d threads: %s", len(self._threads), wanted, error)
        for _ in range(wanted):
            self._inbox.put(run)

    def finish(self, run: Run) -> None:
        """End the run, complete or not: no request is left, every slot is back.

        A request that does not heed its abort within a second is left to its thread, which
        releases the slot when it returns.
        """
        try:
            if not run.is_complete:
                self._halt(run)
                self._abort_until_idle(run)
        finally:
            run.halt()
            run.release_undelivered()
            run.attach_notes()
            with self._lock:
                if self._run is run:
                    self._run = None

    def stop(self) -> None:
        """Tell all threads to end; does not wait for them. Safe to call twice."""
        if os.getpid() != self._pid:
            return  # aborting would shut the parent's connections
        with self._lock:
            if self._closed:
                return
            self._closed = True
            run = self._run
        if run is not None:
            run.fail(RuntimeError("the fetcher was closed while chunks were fetched"))
            self._halt(run)
        for _ in self._threads:
            self._inbox.put(None)

    def close(self) -> None:
        """End all threads and connections."""
        self.stop()
        run = self._run
        if run is not None:
            self._abort_until_idle(run)
            run.release_undelivered()
        patience_s = _JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(patience_s)
            if thread.is_alive():
                patience_s = 0.0  # the others had the same time
                _log.warning("%s did not end: its request ignores the abort", thread.name)
        self._threads.clear()

    def _start_thread(self) -> None:
        worker = self._make_worker()
        thread = threading.Thread(
            target=worker.work,
            args=(self._inbox,),
            name=f"fastload-receive-{len(self._threads)}",
            daemon=True,
        )
        thread.start()
        self._workers.append(worker)
        self._threads.append(thread)

    def _halt(self, run: Run) -> None:
        run.halt()
        self._staging.wake()
        for worker in self._workers:
            worker.abort(run)

    def _abort_until_idle(self, run: Run) -> None:
        if sys.is_finalizing():
            return  # the threads are frozen already
        for _ in range(round(_IDLE_TIMEOUT_S / _ABORT_REPEAT_S)):
            if run.wait_idle(_ABORT_REPEAT_S):
                return
            for worker in self._workers:
                worker.abort(run)
        _log.warning("a request did not end within %.1f s of its abort", _IDLE_TIMEOUT_S)
