"""Attempts in threads of this process, each with one receiver: for local files.

Guarantees: attempts begin in the order of their start; one that is cancelled is aborted until it
ends; a receiver that was aborted, or that failed, is used no more.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable

from fastload_common.clock import Clock, SystemClock
from fastload_common.errors import RangeMismatchError, SourceError, SourceUnavailableError
from fastload_common.source.base import Receipt, Receiver
from fastload_common.transfer.lanes import Attempt, Done, Event, Failed, Post, Started

__all__ = ["ThreadLanes"]

_log = logging.getLogger(__name__)

# An abort can be missed by a receiver that is just about to block, so it is repeated.
_ABORT_REPEAT_S = 0.02
_CLOSE_PATIENCE_S = 1.0


class ThreadLanes:
    """Implements `Lanes`. Threads start when they are first needed.

    Args:
        open_receiver: called by the thread that will own the receiver; what it raises is the
            attempt's failure.
        post: takes the events, from any thread.
        concurrency: the first limit, see `set_limit`.
        clock: for the times of events.
        prepare: called with position and size before an attempt's memory is written.
    """

    def __init__(
        self,
        open_receiver: Callable[[], Receiver],
        post: Post,
        concurrency: int,
        clock: Clock | None = None,
        prepare: Callable[[int, int], None] | None = None,
    ) -> None:
        self._open_receiver = open_receiver
        self._post = post
        self._limit = concurrency
        self._clock = clock or SystemClock()
        self._prepare = prepare
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._work_came = threading.Condition(self._lock)
        self._cancel_came = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._queue: deque[Attempt] = deque()
        self._running: dict[int, _Lane] = {}
        self._lanes: list[_Lane] = []
        self._aborter: threading.Thread | None = None
        self._closed = False

    def start(self, attempt: Attempt) -> None:
        """See `Lanes.start`.

        Raises:
            RuntimeError: the lanes are closed, or belong to the process that this one was
                forked from.
        """
        self._require_own_process()
        with self._lock:
            if self._closed:
                raise RuntimeError("these lanes are closed")
            (self._queue.appendleft if attempt.urgent else self._queue.append)(attempt)
            self._employ()

    def flush(self) -> None:
        """See `Lanes.flush`: they have begun already."""

    def cancel(self, attempt_id: int) -> None:
        """See `Lanes.cancel`."""
        self._require_own_process()
        with self._lock:
            lane = self._running.get(attempt_id)
            if lane is not None:
                lane.is_cancelled = True
                self._abort_in_background()
                return
            for attempt in self._queue:
                if attempt.id == attempt_id:
                    self._queue.remove(attempt)
                    error = SourceUnavailableError("the request was cancelled before it began")
                    self._tell(Failed(attempt_id, self._clock.monotonic_s(), error, True))
                    return

    def set_limit(self, connections: int) -> None:
        """See `Lanes.set_limit`."""
        self._require_own_process()
        with self._lock:
            self._limit = connections
            self._employ()

    def close(self) -> None:
        """See `Lanes.close`. Does nothing in a forked process. Safe to call twice."""
        if os.getpid() != self._pid:
            return  # aborting would shut the parent's connections
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._work_came.notify_all()
            self._cancel_came.notify_all()
        if sys.is_finalizing():
            return  # the threads are frozen already
        for _ in range(round(_CLOSE_PATIENCE_S / _ABORT_REPEAT_S)):
            with self._lock:
                for lane in self._running.values():
                    lane.abort()
                if self._ended.wait_for(self._all_ended, _ABORT_REPEAT_S):
                    break
        if self._aborter is not None:
            self._aborter.join(_CLOSE_PATIENCE_S)
        for lane in self._lanes:
            lane.thread.join(_ABORT_REPEAT_S)
            if lane.thread.is_alive():
                _log.warning("%s did not end: its request ignores the abort", lane.thread.name)
        self._lanes.clear()

    def _all_ended(self) -> bool:
        return not any(lane.is_alive for lane in self._lanes)

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("these lanes belong to the parent process: make new ones")

    def _tell(self, event: Event) -> None:
        """Post, unless closed; the caller holds the lock."""
        if not self._closed:
            self._post(event)

    def _employ(self) -> None:
        """Have a thread for each attempt that may run now; the caller holds the lock."""
        free = min(self._limit - len(self._running), len(self._queue))
        if free <= 0:
            return
        idle = len(self._lanes) - len(self._running)
        while idle < free and len(self._lanes) < self._limit:
            lane = _Lane()
            number = len(self._lanes)
            lane.thread = threading.Thread(
                target=self._serve, args=(lane,), name=f"fastload-receive-{number}", daemon=True
            )
            try:
                lane.thread.start()
            except RuntimeError as error:
                self._cannot_start(error)
                break
            self._lanes.append(lane)
            idle += 1
        self._work_came.notify(free)

    def _cannot_start(self, error: RuntimeError) -> None:
        if self._lanes:
            _log.warning("only %d of %d threads: %s", len(self._lanes), self._limit, error)
            return
        while self._queue:
            attempt = self._queue.popleft()
            self._tell(Failed(attempt.id, self._clock.monotonic_s(), error))

    # Threads

    def _serve(self, lane: _Lane) -> None:
        try:
            while (attempt := self._next(lane)) is not None:
                event = self._attempt(lane, attempt)
                is_failed = isinstance(event, Failed)
                with self._lock:
                    del self._running[attempt.id]
                    is_aborted = lane.is_cancelled
                    if not (is_failed or is_aborted):
                        self._tell(event)
                if is_failed or is_aborted:
                    # Before it is told: then no connection is left of what has ended.
                    lane.drop()
                    with self._lock:
                        self._tell(event)
                del attempt, event  # an idle thread would keep their memory
        finally:
            lane.drop()
            with self._lock:
                lane.is_alive = False
                self._ended.notify_all()

    def _next(self, lane: _Lane) -> Attempt | None:
        """The next attempt, told to have started; None: end."""
        with self._lock:
            while not (self._queue and len(self._running) < self._limit):
                if self._closed:
                    return None
                self._work_came.wait()
            if self._closed:
                return None
            attempt = self._queue.popleft()
            lane.is_cancelled = False
            self._running[attempt.id] = lane
            self._tell(Started(attempt.id, self._clock.monotonic_s()))
            return attempt

    def _attempt(self, lane: _Lane, attempt: Attempt) -> Done | Failed:
        asked = attempt.byte_range
        try:
            if self._prepare is not None:
                self._prepare(attempt.position_bytes, asked.size_bytes)
            if attempt.fresh:
                lane.drop()
            receiver = lane.receiver
            if receiver is None:
                receiver = lane.receiver = self._open_receiver()
                # A cancel that came while it was made did not see it.
                if lane.is_cancelled:
                    receiver.abort()
            receipt = receiver.receive(attempt.object_id, asked, attempt.memory)
            _require_all(attempt, receipt)
            return Done(attempt.id, self._clock.monotonic_s(), receipt)
        except BaseException as error:  # noqa: BLE001 -- it is the attempt's end
            if isinstance(error, SourceError):
                # Never trust a count beyond what was asked: it would skip bytes.
                error.received_bytes = max(0, min(error.received_bytes, asked.size_bytes))
            is_ours = lane.is_cancelled and getattr(error, "retryable", False)
            return Failed(attempt.id, self._clock.monotonic_s(), error, is_ours)

    def _abort_in_background(self) -> None:
        """Abort what is cancelled until it ends; the caller holds the lock."""
        if self._aborter is None:
            self._aborter = threading.Thread(
                target=self._abort, name="fastload-receive-abort", daemon=True
            )
            self._aborter.start()
        self._cancel_came.notify()

    def _abort(self) -> None:
        with self._lock:
            while not self._closed:
                cancelled = [lane for lane in self._running.values() if lane.is_cancelled]
                for lane in cancelled:
                    lane.abort()
                self._cancel_came.wait(_ABORT_REPEAT_S if cancelled else None)


class _Lane:
    """One thread and its receiver. Guarded by the lanes' lock, but for the receiver's use."""

    def __init__(self) -> None:
        self.thread: threading.Thread
        self.receiver: Receiver | None = None
        self.is_cancelled = False
        self.is_alive = True

    def abort(self) -> None:
        receiver = self.receiver
        if receiver is not None:
            receiver.abort()

    def drop(self) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            try:
                receiver.close()
            except Exception:  # noqa: BLE001 -- nobody waits for this thread
                _log.warning("closing a connection failed", exc_info=True)


def _require_all(attempt: Attempt, receipt: Receipt) -> None:
    asked = attempt.byte_range
    if receipt.size_bytes != asked.size_bytes:
        raise RangeMismatchError(
            f"asked for {asked} of {attempt.object_id.uri}, "
            f"the receiver filled {receipt.size_bytes} of {asked.size_bytes} bytes"
        )
