"""Where attempts run: the port between who decides (the scheduler) and who receives.

The scheduler starts and cancels attempts and is told events; it never blocks on the network. Two
kinds of lanes stand behind the port: receiver processes for HTTP, threads for everything else.

An attempt owns its memory from `Lanes.start` until its `Done` or `Failed` event: exactly one of
them comes, also after a `Lanes.cancel`, and only when nothing writes there any more.

All times are readings of the monotonic clock, which is one for all processes of a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Receipt

__all__ = [
    "Attempt",
    "Done",
    "Event",
    "Failed",
    "Lanes",
    "Post",
    "Progress",
    "Restarted",
    "Started",
]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request for a range.

    Attributes:
        id: unique among the attempts of one `Lanes`.
        object_id: pinned state.
        byte_range: not empty.
        memory: where the bytes go; exactly as long as the range.
        position_bytes: where that memory is in the arena's file.
        fresh: must not use a kept connection.
        urgent: goes before all that wait for a connection.
    """

    id: int
    object_id: ObjectId
    byte_range: ByteRange
    memory: memoryview
    position_bytes: int
    fresh: bool = False
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """A connection has taken the attempt up; before that it waited in a queue."""

    attempt_id: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """So many good bytes are there, from the start of the range; ``first_byte_s`` as in `Receipt`.

    ``received_bytes`` may be 0: the reply's head has come.
    """

    attempt_id: int
    at_s: float
    received_bytes: int
    first_byte_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """All bytes are there, and the reply was what was asked."""

    attempt_id: int
    at_s: float
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt has ended without all its bytes; ``error.received_bytes`` of them are good.

    ``cancelled``: because `Lanes.cancel` was called, as far as is known. ``innocent``: whatever
    ended it had nothing to do with this request.
    """

    attempt_id: int
    at_s: float
    error: BaseException
    cancelled: bool = False
    innocent: bool = False


@dataclass(frozen=True, slots=True)
class Restarted:
    """It is asked once more from its start, in place of what came so far; it waits for that."""

    attempt_id: int
    at_s: float


Event = Started | Progress | Restarted | Done | Failed

Post = Callable[[Event], None]
"""Takes an event, from any thread, at once."""


class Lanes(Protocol):
    """Runs attempts. One thread calls all methods, except where it says "any thread"."""

    def start(self, attempt: Attempt) -> None:
        """Queue an attempt. Does not block, raises nothing that an attempt can cause."""
        ...

    def flush(self) -> None:
        """Let what was queued begin; call it after one or more `start`, and after events."""
        ...

    def cancel(self, attempt_id: int) -> None:
        """End an attempt soon, queued or running. Unknown or ended ones are ignored."""
        ...

    def set_limit(self, connections: int) -> None:
        """Run at most so many attempts at once from now on; those that run go on."""
        ...

    def close(self) -> None:
        """End everything: attempts, connections, threads, processes. Posts nothing afterwards.

        Returns when no memory is written any more, or says in the log what did not end.
        """
        ...
