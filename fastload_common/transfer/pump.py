"""The thread that turns events into decisions: it waits, tells the scheduler, does what is due.

Nothing here refers to the `Fetcher`, so that an abandoned one can be collected while its thread
waits.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from fastload_common.clock import Clock
from fastload_common.transfer.lanes import Lanes
from fastload_common.transfer.mailbox import Mailbox
from fastload_common.transfer.run import Run
from fastload_common.transfer.scheduler import Scheduler

__all__ = ["Pump"]

_log = logging.getLogger(__name__)

# The injected clock may be a fake, and memory may come back without a word: look again this often.
_POLL_S = 0.1
_IDLE_TIMEOUT_S = 0.8
_JOIN_TIMEOUT_S = 2.0


class Pump:
    """Starts its thread, lanes and all with the first run; ends them with `stop` or `close`.

    Args:
        open_lanes: makes the lanes, on the pump's thread.
        make_scheduler: makes the scheduler over them.
        clock: what the scheduler is told of time.
    """

    def __init__(
        self,
        open_lanes: Callable[[Mailbox], Lanes],
        make_scheduler: Callable[[Lanes], Scheduler],
        clock: Clock,
    ) -> None:
        self._open_lanes = open_lanes
        self._make_scheduler = make_scheduler
        self._clock = clock
        self._mailbox: Mailbox | None = None
        self._thread: threading.Thread | None = None
        # A generator may be collected, and call `finish`, wherever this thread allocates.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._next: Run | None = None
        self._run: Run | None = None
        self._starving = False
        self._closed = False
        self._death: BaseException | None = None

    def begin(self, run: Run) -> None:
        """Have a run served.

        Raises:
            RuntimeError: another run is not finished, this is closed, or it was made before a
                fork: then its threads and connections belong to the parent.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("this fetcher belongs to the parent process: make a new one")
        with self._lock:
            if self._closed:
                raise RuntimeError("this fetcher is closed") from self._death
            if self._run is not None:
                raise RuntimeError("one fetch at a time: close the iterator of the earlier one")
            if self._mailbox is None:
                self._mailbox = Mailbox()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, args=(self._mailbox,), name="fastload-pump", daemon=True
                )
                self._thread.start()
            run.released = self._released
            self._run = self._next = run
        self._mailbox.wake()

    def finish(self, run: Run) -> None:
        """End the run, complete or not: no request is left, every slot is back.

        A request that does not heed its end within a second is left behind; its memory comes
        back when it returns.
        """
        if sys.is_finalizing():
            return  # our thread is frozen, perhaps with a lock in its hands
        try:
            run.halt()
            self._wake()
            if not run.idle.wait(_IDLE_TIMEOUT_S):
                _log.warning("a request did not end within %.1f s", _IDLE_TIMEOUT_S)
        finally:
            run.release_undelivered()
            run.attach_notes()
            with self._lock:
                if self._run is run:
                    self._run = None

    def stop(self) -> None:
        """Tell the thread to end everything; does not wait for it. Safe to call twice."""
        if os.getpid() != self._pid:
            return  # the parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
            run = self._run
            if self._thread is None and self._mailbox is not None:
                self._mailbox.close()
        if run is not None:
            run.fail(RuntimeError("the fetcher was closed while chunks were fetched"))
        self._wake()

    def close(self) -> None:
        """End all requests, connections and the thread."""
        self.stop()
        thread, run = self._thread, self._run
        if thread is None or os.getpid() != self._pid or thread is threading.current_thread():
            return
        if not sys.is_finalizing():
            thread.join(_JOIN_TIMEOUT_S)
            if thread.is_alive():
                _log.warning("%s did not end in time", thread.name)
        if run is not None:
            run.release_undelivered()

    def _wake(self) -> None:
        if self._mailbox is not None:
            self._mailbox.wake()

    def _released(self) -> None:
        # Only when somebody waits for it: a wake-up costs a system call.
        if self._starving:
            self._wake()

    def _work(self, mailbox: Mailbox) -> None:
        lanes: Lanes | None = None
        scheduler: Scheduler | None = None
        try:
            lanes = self._open_lanes(mailbox)
            scheduler = self._make_scheduler(lanes)
            while not self._closed:
                self._turn(mailbox, scheduler)
        except BaseException as error:  # noqa: BLE001 -- raised again by the consumer
            self._die(error)
        finally:
            if lanes is not None:
                lanes.close()
            if scheduler is not None:
                scheduler.forget()
            mailbox.close()
            run = self._run
            if run is not None:
                run.idle.set()

    def _turn(self, mailbox: Mailbox, scheduler: Scheduler) -> None:
        now_s = self._clock.monotonic_s()
        run = self._next
        if run is not None:
            self._next = None
            scheduler.begin(run)
        due_s = scheduler.step(now_s)
        self._starving = scheduler.starving
        # A release between the step and this line is seen by the poll.
        events = mailbox.wait(min(due_s, _POLL_S if self._run is not None else 1.0))
        scheduler.handle(events, self._clock.monotonic_s())

    def _die(self, error: BaseException) -> None:
        """Our own fault, or one of the lanes: nothing goes on, and the consumer must know."""
        with self._lock:
            self._closed = True
            self._death = error
            run = self._run
        if run is not None:
            run.fail(error)
        else:
            _log.error("receiving has ended: %r", error)
