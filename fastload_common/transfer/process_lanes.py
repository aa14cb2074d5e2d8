"""Attempts in receiver processes: signed here, made there, written straight into staging memory.

Guarantees: an attempt has ended (`Done`, `Failed`) only when no process writes into its memory any
more; a receiver that dies fails what it ran, retryably, and another one takes its place; nothing
that may block on the network (a signature, what follows a refusal) runs on the owner's thread.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

from fastload_common.clock import Clock, SystemClock
from fastload_common.errors import RangeMismatchError, SourceUnavailableError
from fastload_common.ranges import ObjectId
from fastload_common.source.base import Receipt, Refusal, RemoteReads
from fastload_common.source.second_chance import may_be_chance
from fastload_common.transfer.lanes import (
    Attempt,
    Done,
    Event,
    Failed,
    Progress,
    Restarted,
    Started,
)
from fastload_common.transfer.mailbox import Mailbox
from fastload_common.transfer.receiver_crew import Crew
from fastload_common.transfer.receiver_dispatch import Dispatch
from fastload_common.transfer.receiver_process import ReceiverSetup
from fastload_common.transfer.receiver_tasks import Background, Member, Task
from fastload_common.transfer.wire import Message, error_from

__all__ = ["ProcessLanes"]

# A cancelled request that has not ended by then is ended with its process.
_CANCEL_PATIENCE_S = 1.0
_WATCH_S = 0.1
_JUDGES = 4


class ProcessLanes:
    """Implements `Lanes` for objects whose requests can be signed for another process.

    Receivers and threads start with the first attempt.

    Args:
        reads_of: what signs requests for an object.
        setup: what receivers are told.
        mailbox: takes the events; the thread that waits in it owns these lanes.
        connections: the first limit, see `set_limit`.
        clock: for the times of events.
        cpu_count: decides with the limit how many receivers there are.
    """

    def __init__(
        self,
        reads_of: Callable[[ObjectId], RemoteReads],
        setup: ReceiverSetup,
        mailbox: Mailbox,
        connections: int,
        clock: Clock | None = None,
        cpu_count: int | None = None,
    ) -> None:
        self._reads_of = reads_of
        self._mailbox = mailbox
        self._limit = connections
        self._clock = clock or SystemClock()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._trouble = threading.Condition(self._lock)  # for the thread that watches
        self._tasks: dict[int, Task] = {}
        self._crew = Crew(setup, cpu_count or len(os.sched_getaffinity(0)), self._clock)
        self._dispatch = Dispatch(
            self._crew, self._lock, self._fail, self._is_live, self._sent, self._stuck
        )
        self._judges = Background("fastload-judge", _JUDGES)
        self._has_threads = False
        self._closed = False
        self._is_unwatched = False

    # The port; all by the owner's thread.

    def start(self, attempt: Attempt) -> None:
        """See `Lanes.start`.

        Raises:
            RuntimeError: the lanes are closed, or belong to the process that this one was
                forked from.
        """
        self._require_own_process()
        task = Task(attempt, self._reads_of(attempt.object_id))
        with self._lock:
            if self._closed:
                raise RuntimeError("these lanes are closed")
            self._tasks[attempt.id] = task
            if attempt.urgent:
                self._dispatch.pending.appendleft(task)
            else:
                self._dispatch.pending.append(task)
        self._staff()

    def flush(self) -> None:
        """See `Lanes.flush`. What can be signed without waiting goes out now."""
        self._dispatch.flush()

    def cancel(self, attempt_id: int) -> None:
        """See `Lanes.cancel`."""
        self._require_own_process()
        with self._lock:
            task = self._tasks.get(attempt_id)
            if task is None or task.is_cancelled:
                return
            task.is_cancelled, member = True, task.member
            if member is None or not task.is_sent:
                self._fail(task, task.cancelled_error())
                return
            member.process.outbox.add(["cancel", attempt_id])
            task.overdue_s = self._clock.monotonic_s() + _CANCEL_PATIENCE_S
            self._trouble.notify()
        member.process.flush()

    def set_limit(self, connections: int) -> None:
        """See `Lanes.set_limit`."""
        self._require_own_process()
        if connections == self._limit:
            return
        self._limit = connections
        if self._crew.members:
            self._staff()
            with self._lock:
                self._crew.share_out(connections)
                self._dispatch.work.notify()
            self._crew.flush()

    def close(self) -> None:
        """See `Lanes.close`. Does nothing in a forked process. Safe to call twice."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tasks.clear()
            self._dispatch.close()
            self._trouble.notify_all()
        self._judges.close()
        for member in self._crew.members:
            self._mailbox.unwatch(member.process.peer)
        self._crew.close()

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("these lanes belong to the parent process: make new ones")

    # Receivers, by the owner's thread

    def _staff(self) -> None:
        """Have the threads, and as many receivers as the limit wants."""
        if not self._has_threads:
            self._has_threads = True
            for name, target in (("sign", self._dispatch.sign), ("watch", self._watch)):
                threading.Thread(target=target, name=f"fastload-{name}", daemon=True).start()
        if not self._crew.lacks(self._limit):
            if self._crew.is_gone:
                with self._lock:
                    self._fail_pending()
            return
        for member in self._crew.hire(self._limit):
            self._mailbox.watch(member.process.peer, functools.partial(self._read, member))
        with self._lock:
            self._crew.share_out(self._limit)
            if self._crew.is_gone:
                self._fail_pending()
            self._dispatch.work.notify()
            self._trouble.notify()
        self._crew.flush()

    def _read(self, member: Member) -> list[Event]:
        """What a receiver has said; called by the mailbox."""
        messages = member.process.read()
        if messages is None:
            return self._bury(member)
        events: list[Event] = []
        with self._lock:
            member.heard_s = self._clock.monotonic_s()
            for message in messages:
                self._take(member, message, events)
        return events

    def _bury(self, member: Member) -> list[Event]:
        """A receiver has hung up: fail what it had, and have another one."""
        self._mailbox.unwatch(member.process.peer)
        is_gone = self._crew.lay_off(member)
        events: list[Event] = []
        with self._lock:
            if is_gone:
                events = self._settle(member)
            self._trouble.notify()
        if not self._closed:
            self._staff()
        return events

    def _settle(self, member: Member) -> list[Event]:
        """The ends of what a receiver had that is gone; the caller holds the lock."""
        events: list[Event] = []
        for task in list(member.tasks.values()):
            if task.is_sent:
                error = SourceUnavailableError(
                    f"the receiver process of this request is gone: {self._crew.why(member)}",
                    hint=self._crew.advice(member),
                )
                events.append(self._end(task, error, innocent=True))
            else:
                task.detach()
                self._dispatch.pending.appendleft(task)
        member.process.close()
        self._dispatch.work.notify()
        return events

    def _take(self, member: Member, message: Message, events: list[Event]) -> None:
        """One message of a receiver; the caller holds the lock."""
        kind, *values = message
        if kind == "progress":
            at_s, rows = values
            for attempt_id, received_bytes, first_byte_s in rows:
                task = member.tasks.get(attempt_id)
                if task is not None:
                    good_bytes = min(received_bytes, task.attempt.byte_range.size_bytes)
                    events.append(Progress(attempt_id, at_s, good_bytes, first_byte_s))
        elif kind == "ready":
            member.process.is_ready = True
        elif kind == "alive":
            pass  # that it was heard is all
        elif kind == "crashed":
            member.process.crash = values[0]
        else:
            task = member.tasks.get(values[0])
            if task is not None:
                self._take_step(task, kind, values, events)

    def _take_step(self, task: Task, kind: str, values: Message, events: list[Event]) -> None:
        attempt_id, at_s, *rest = values
        if kind == "started":
            if not task.is_started:
                task.is_started = True
                events.append(Started(attempt_id, at_s))
        elif kind == "done":
            size_bytes, first_byte_s, total_s, new_connection = rest
            asked = task.attempt.byte_range
            if size_bytes == asked.size_bytes:
                self._forget(task)
                receipt = Receipt(size_bytes, first_byte_s, total_s, new_connection)
                events.append(Done(attempt_id, at_s, receipt))
            else:
                what = f"asked for {asked}, the receiver filled {size_bytes} bytes"
                events.append(self._end(task, RangeMismatchError(what)))
        elif kind == "failed":
            record, new_connection = rest
            error = task.explained(error_from(record))
            if task.is_cancelled:
                task.blame(error)
                events.append(self._end(task, error))
            elif may_be_chance(
                error, task.tried, new_connection=new_connection
            ) or task.goes_elsewhere(error):
                self._ask_again(task)
            else:
                events.append(self._end(task, error))
        elif kind == "refused":
            if task.is_cancelled:
                events.append(self._end(task, task.cancelled_error()))
                return
            task.detach()
            status, headers, body = rest
            refusal = Refusal(status, headers, body.encode("latin-1"))
            self._judges.submit(functools.partial(self._judge, task, refusal))

    # Ends; the caller holds the lock.

    def _is_live(self, task: Task) -> bool:
        return self._tasks.get(task.attempt.id) is task

    def _forget(self, task: Task) -> None:
        task.detach()
        self._tasks.pop(task.attempt.id, None)

    def _end(self, task: Task, error: BaseException, *, innocent: bool = False) -> Failed:
        self._forget(task)
        is_ours = task.is_cancelled and getattr(error, "retryable", False)
        now_s = self._clock.monotonic_s()
        return Failed(task.attempt.id, now_s, task.explained(error), is_ours, innocent)

    def _fail(self, task: Task, error: BaseException) -> None:
        """Tell of an attempt's end, from any thread, unless it has ended already."""
        if self._tasks.get(task.attempt.id) is task:
            if task in self._dispatch.pending:
                self._dispatch.pending.remove(task)
            self._mailbox.post(self._end(task, error))

    def _fail_pending(self) -> None:
        for task in list(self._dispatch.pending):
            self._fail(task, self._crew.broken_error())

    def _ask_again(self, task: Task) -> None:
        task.detach()
        task.is_started = False
        if self._tasks.get(task.attempt.id) is task:
            # What has come is not the beginning of what will.
            self._mailbox.post(Restarted(task.attempt.id, self._clock.monotonic_s()))
            self._dispatch.pending.appendleft(task)
            self._dispatch.work.notify()

    # Threads of these lanes

    def _judge(self, task: Task, refusal: Refusal) -> None:
        """Decide what a refusal means; on a thread that may block."""
        try:
            assert task.signed is not None
            error: BaseException | None = task.signed.judge(refusal, task.tried)
        except BaseException as failure:  # noqa: BLE001 -- it is the attempt's end
            error = failure
        with self._lock:
            if error is None and self._crew.is_gone:
                error = self._crew.broken_error()
            if error is not None:
                self._fail(task, error)
            else:
                self._ask_again(task)

    def _sent(self, member: Member) -> None:
        """A receiver is given an attempt; the caller holds the lock."""
        member.is_asked(self._clock.monotonic_s())
        if self._is_unwatched:
            self._trouble.notify()

    def _stuck(self) -> None:
        with self._lock:
            self._trouble.notify()

    def _watch(self) -> None:
        """Look after what should have happened by now."""
        with self._lock:
            while not self._closed:
                again_s = self._look_after()
                self._is_unwatched = again_s is None
                self._trouble.wait(again_s)

    def _look_after(self) -> float | None:
        """When to look again; None: when something is to be. The caller holds the lock."""
        again_s = self._crew.look_after(self._clock.monotonic_s())
        for member in self._crew.take_reaped():
            for event in self._settle(member):
                self._mailbox.post(event)
        return again_s if not self._crew.has_unreaped else _WATCH_S
