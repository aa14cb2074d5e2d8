"""Attempts on their way to receivers: signed at the last moment, given to one that has room.

What can be signed without waiting is sent by the owner's thread at once. Where keys are to be
renewed a thread of its own waits for that; its attempt may have gone another way meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from fastload_common.source.base import SignedRead
from fastload_common.transfer.receiver_crew import Crew
from fastload_common.transfer.receiver_tasks import Member, Task

__all__ = ["Dispatch"]

# So many are signed before they are sent.
_BATCH = 8


class Dispatch:
    """Attempts that no receiver has yet. All state is guarded by the lanes' lock.

    Args:
        crew: the receivers.
        lock: the lanes' lock.
        fail: told of an attempt that cannot be signed; called with the lock held.
        is_live: whether an attempt has not ended; called with the lock held.
        sent: told which receiver is given something; called with the lock held.
        stuck: told that a receiver's socket is full; called without the lock.

    Attributes:
        pending: in the order in which they go out.
        work: notified when the signing thread has something to do.
    """

    def __init__(
        self,
        crew: Crew,
        lock: threading.Lock,
        fail: Callable[[Task, BaseException], None],
        is_live: Callable[[Task], bool],
        sent: Callable[[Member], None],
        stuck: Callable[[], None],
    ) -> None:
        self._crew = crew
        self._lock = lock
        self._fail = fail
        self._is_live = is_live
        self._sent = sent
        self._stuck = stuck
        self._closed = False
        self.pending: deque[Task] = deque()
        self.work = threading.Condition(lock)

    def flush(self) -> None:
        """Send what can be signed without waiting."""
        touched: set[Member] = set()
        with self._lock:
            while self.pending:
                task = self.pending[0]
                member = self._crew.choose(task.attempt.position_bytes)
                if member is None:
                    break
                attempt = task.attempt
                try:
                    signed = task.reads.sign_now(attempt.object_id, attempt.byte_range)
                except BaseException as error:  # noqa: BLE001 -- it is the attempt's end
                    self._fail(task, error)
                    continue
                if signed is None:
                    self.work.notify()  # on the thread that may block
                    break
                self.pending.popleft()
                self._assign(task, member)
                self._send(task, signed)
                touched.add(member)
        self._flush(touched)

    def sign(self) -> None:
        """The thread that may block: signs what `flush` could not; ends with `close`."""
        while True:
            with self._lock:
                while not self._closed and not (batch := self._take_batch()):
                    self.work.wait()
                if self._closed:
                    return
            touched = {member for _, member in batch}
            while batch:
                self._hand_over(*batch.pop(0))
            self._flush(touched)

    def close(self) -> None:
        """Nothing goes out any more; the caller holds the lock."""
        self._closed = True
        self.pending.clear()
        self.work.notify_all()

    def _flush(self, members: set[Member]) -> None:
        if [member for member in members if not member.process.flush()]:
            self._stuck()

    def _take_batch(self) -> list[tuple[Task, Member]]:
        batch: list[tuple[Task, Member]] = []
        while self.pending and len(batch) < _BATCH:
            member = self._crew.choose(self.pending[0].attempt.position_bytes)
            if member is None:
                break
            batch.append((self.pending.popleft(), member))
            self._assign(*batch[-1])
        return batch

    @staticmethod
    def _assign(task: Task, member: Member) -> None:
        task.member = member
        member.tasks[task.attempt.id] = task

    def _hand_over(self, task: Task, member: Member) -> None:
        attempt = task.attempt
        try:
            signed = task.reads.sign(attempt.object_id, attempt.byte_range)
        except BaseException as error:  # noqa: BLE001 -- it is the attempt's end
            with self._lock:
                self._fail(task, error)
            return
        with self._lock:
            # Cancelled meanwhile, or its receiver is gone and another one may have it already.
            if task.member is member and not task.is_sent and self._is_live(task):
                self._send(task, signed)

    def _send(self, task: Task, signed: SignedRead) -> None:
        assert task.member is not None
        self._sent(task.member)
        task.signed = signed
        task.is_sent = True
        task.member.process.outbox.add(task.get(signed).message())
