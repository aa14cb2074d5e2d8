"""Records of the lanes of receiver processes, and threads for what may block. No decisions."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fastload_common.errors import SourceError, SourceUnavailableError
from fastload_common.source.base import RemoteReads, SignedRead
from fastload_common.transfer.lanes import Attempt
from fastload_common.transfer.receiver_process import ReceiverProcess
from fastload_common.transfer.wire import Get

__all__ = ["Background", "Member", "Task"]


@dataclass(slots=True, eq=False)
class Task:
    """One attempt until it has ended. Guarded by the lanes' lock.

    Attributes:
        reads: signs for it.
        tried: what was done about earlier replies.
        signed: the present request.
        member: the receiver that it was given to.
        is_sent: whether that receiver may be writing into its memory.
        is_started: whether that was told.
        is_cancelled: whether it shall end.
        overdue_s: when a cancelled one must have ended.
    """

    attempt: Attempt
    reads: RemoteReads
    tried: set[str] = field(default_factory=set)
    signed: SignedRead | None = None
    member: Member | None = None
    is_sent: bool = False
    is_started: bool = False
    is_cancelled: bool = False
    overdue_s: float | None = None

    def get(self, signed: SignedRead) -> Get:
        """The attempt as its receiver is told of it."""
        attempt = self.attempt
        return Get(
            id=attempt.id,
            object_id=signed.object_id,
            byte_range=signed.byte_range,
            position_bytes=attempt.position_bytes,
            endpoint=signed.endpoint,
            # The receiver is in another directory.
            ca_file=signed.ca_file and os.path.abspath(signed.ca_file),
            path=signed.path,
            headers=signed.headers,
            fresh=attempt.fresh or "reply" in self.tried,
            urgent=attempt.urgent,
        )

    def goes_elsewhere(self, error: BaseException) -> bool:
        """Whether the next request is to be made at once, since it goes to somebody else."""
        if self.signed is None or not isinstance(error, SourceError):
            return False
        return self.signed.failed(error, self.tried)

    def blame(self, error: BaseException) -> None:
        """It was ended from here. Where not a byte had come, that counts against who was asked."""
        if isinstance(error, SourceError) and error.retryable and not error.received_bytes:
            self.goes_elsewhere(error)

    def detach(self) -> None:
        """No receiver has it any more."""
        if self.member is not None:
            self.member.tasks.pop(self.attempt.id, None)
        self.member = None
        self.is_sent = False

    def explained(self, error: BaseException) -> BaseException:
        """The error with what it is about, and with a count that can be trusted."""
        if isinstance(error, SourceError):
            error.fields |= {
                "uri": self.attempt.object_id.uri,
                "range": str(self.attempt.byte_range),
            }
            size_bytes = self.attempt.byte_range.size_bytes
            error.received_bytes = max(0, min(error.received_bytes, size_bytes))
        return error

    def cancelled_error(self) -> BaseException:
        return self.explained(SourceUnavailableError("the request was cancelled"))


@dataclass(slots=True, eq=False)
class Member:
    """A receiver process and what it has to do. Guarded by the lanes' lock.

    Attributes:
        tasks: what was given to it and has not ended, by attempt.
        share: how many of them it may run at once.
        started_s: when it was started.
        why_ended: set when we ended it on purpose.
        heard_s: when it last said something, or had to.
    """

    process: ReceiverProcess
    started_s: float
    tasks: dict[int, Task] = field(default_factory=dict)
    share: int = 0
    why_ended: str = ""
    heard_s: float = 0.0

    def is_asked(self, now_s: float) -> None:
        """It is given something; if it had nothing, its silence begins now."""
        if not any(task.is_sent for task in self.tasks.values()):
            self.heard_s = now_s

    def is_deaf(self, now_s: float, patience_s: float) -> bool:
        """Whether it has work and has said nothing for so long."""
        is_silent = self.process.is_ready and now_s > self.heard_s + patience_s
        return is_silent and any(task.is_sent for task in self.tasks.values())

    @property
    def room(self) -> int:
        """How many more it may be given: a few wait there, so that no connection idles."""
        if not self.share or self.why_ended:
            return 0
        share = self.share
        waiting = share // 4 if share >= 8 else 2 if share >= 4 else 1
        return share + waiting - len(self.tasks)


class Background:
    """A few threads for calls that may block; made when needed, never waited for.

    Args:
        name: of the threads.
        most: how many of them.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._outstanding = 0

    def submit(self, call: Callable[[], None]) -> None:
        """Run this soon; it must not raise."""
        with self._lock:
            self._outstanding += 1
            if self._outstanding > self._threads and self._threads < self._most:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._threads += 1
        self._calls.put(call)

    def close(self) -> None:
        """Let the threads end after what they are doing."""
        for _ in range(self._most):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            finally:
                del call  # it holds an attempt, and with it staging memory
                with self._lock:
                    self._outstanding -= 1
