"""The receiver processes of some lanes: how many, which has room, what when one dies."""

from __future__ import annotations

import logging
import math
import os
import sys
import weakref

from fastload_common.clock import Clock, SystemClock
from fastload_common.errors import ConfigError, FastloadError, SourceError
from fastload_common.transfer.receiver_process import (
    ReceiverProcess,
    ReceiverSetup,
    process_count,
    shares,
)
from fastload_common.transfer.receiver_tasks import Member
from fastload_common.units import MIB

__all__ = ["Crew"]

_log = logging.getLogger(__name__)

# Killed ones, such as for want of memory, are replaced so often; those that never began, once.
_MOST_DEATHS = 8
_MOST_FALSE_STARTS = 1
_START_PATIENCE_S = 30.0
# One that has work says something once a second.
_DEAF_S = 15.0
_LOOK_S, _LOOK_SOON_S = 1.0, 0.1
_END_PATIENCE_S = 0.5
_KILL_PATIENCE_S = 2.0


class Crew:
    """Hires, counts and ends receivers. `hire`, `lay_off` and `close` are for the owner's thread.

    Args:
        setup: what receivers are told.
        cpu_count: decides with the limit how many there are.
        clock: for when they were started.

    Attributes:
        members: receivers that work; replaced, never changed, so that any thread may look.
        broken: why there will be no others.
    """

    def __init__(self, setup: ReceiverSetup, cpu_count: int, clock: Clock) -> None:
        self.members: list[Member] = []
        self.broken: FastloadError | None = None
        self._setup = setup
        self._cpu_count = cpu_count
        self._clock = clock
        self._deaths = 0
        self._false_starts = 0
        self._unreaped: list[Member] = []
        self._homes: dict[int, Member] = {}  # by MiB of the memory
        # Ends them at the interpreter's exit, too, where nobody has closed the lanes.
        self._processes: list[ReceiverProcess] = []
        self._finalizer = weakref.finalize(self, _end_all, self._processes, os.getpid())

    @property
    def is_gone(self) -> bool:
        """Whether there is no receiver, and will be none."""
        return self.broken is not None and not self.members

    def lacks(self, limit: int) -> bool:
        """Whether `hire` would hire any."""
        return self.broken is None and len(self.members) < process_count(limit, self._cpu_count)

    def hire(self, limit: int) -> list[Member]:
        """Start receivers until there are enough for the limit; the new ones."""
        hired: list[Member] = []
        while self.lacks(limit):
            try:
                process = ReceiverProcess(self._setup)
            except FastloadError as error:
                self.broken = error
                if self.members:
                    _log.warning("only %d receiver processes: %s", len(self.members), error)
                break
            self._processes.append(process)
            hired.append(Member(process, self._clock.monotonic_s()))
            self.members = [*self.members, hired[-1]]
        return hired

    def share_out(self, limit: int) -> None:
        """Divide the limit among the receivers, and queue it for them."""
        if not self.members:
            return
        for member, share in zip(self.members, shares(limit, len(self.members)), strict=True):
            if member.share != share:
                member.share = share
                # One without a share gets nothing new, but ends what it has.
                member.process.outbox.add(["limit", max(1, share)])

    def flush(self) -> None:
        """Send what is queued for the receivers."""
        for member in self.members:
            member.process.flush()

    def choose(self, position_bytes: int) -> Member | None:
        """The receiver for an attempt that writes there; None if none has room.

        One with an idle connection that has written there before, since it has mapped those pages;
        else the one that has the most room for its share.
        """
        place = position_bytes // MIB
        known = self._homes.get(place)
        if known in self.members and known.room > 0 and len(known.tasks) < known.share:
            return known
        best: Member | None = None
        least = math.inf
        for member in self.members:
            if member.room > 0 and (load := len(member.tasks) / member.share) < least:
                best, least = member, load
        if best is not None:
            self._homes[place] = best
        return best

    def look_after(self, now_s: float) -> float | None:
        """End receivers that do not do what they were told; when to look again, if at all."""
        again_s: float | None = None
        for member in self.members:
            cancelled = [task.overdue_s for task in member.tasks.values() if task.overdue_s]
            if member.tasks:
                again_s = again_s or _LOOK_S
            if cancelled or not member.process.is_ready:
                again_s = _LOOK_SOON_S
            if not member.process.outbox.is_empty:
                again_s = _LOOK_SOON_S
                member.process.flush()
            if not member.why_ended:
                if any(now_s > overdue_s for overdue_s in cancelled):
                    member.why_ended = "a request did not heed its abort"
                elif not member.process.is_ready and now_s > member.started_s + _START_PATIENCE_S:
                    member.why_ended = f"it did not start within {_START_PATIENCE_S:g} s"
                elif member.is_deaf(now_s, _DEAF_S):
                    member.why_ended = f"it has said nothing for {_DEAF_S:g} s"
                if member.why_ended:
                    _log.warning("a receiver process is ended: %s", member.why_ended)
                    member.process.kill()
        return again_s

    def lay_off(self, member: Member) -> bool:
        """A receiver has hung up: end it, and count that; whether it is gone."""
        self.members = [other for other in self.members if other is not member]
        member.process.kill()
        is_gone = member.process.wait(_KILL_PATIENCE_S)
        if is_gone:
            self._processes.remove(member.process)
        else:
            _log.warning("receiver process %d does not end", member.process.pid)
            self._unreaped.append(member)
        if not member.why_ended or not member.process.is_ready:
            self._deaths += 1
            _log.warning("a receiver process is gone: %s", self.why(member))
        if not member.process.is_ready:
            self._false_starts += 1
        if self.broken is None:
            self._give_up(member)
        return is_gone

    def _give_up(self, member: Member) -> None:
        """Hire no more if too many are gone."""
        if self._false_starts > _MOST_FALSE_STARTS:
            self.broken = ConfigError(
                f"the receiver processes do not start: {sys.executable}: {self.why(member)}",
                hint="they run this interpreter's own program (sys.executable) with the files of "
                "this package",
            )
        elif self._deaths > _MOST_DEATHS:
            self.broken = SourceError(
                f"the receiver processes do not stay: {self._deaths} are gone, the last one: "
                f"{self.why(member)}",
                hint=self.advice(member),
            )

    @property
    def has_unreaped(self) -> bool:
        return bool(self._unreaped)

    def take_reaped(self) -> list[Member]:
        """Those that did not end at once, but have now."""
        gone = [member for member in self._unreaped if member.process.wait(0)]
        for member in gone:
            self._unreaped.remove(member)
            self._processes.remove(member.process)
        return gone

    def why(self, member: Member) -> str:
        """Why a receiver is gone."""
        return member.why_ended or member.process.end_said()

    def advice(self, member: Member) -> str:
        """What to do about it."""
        if member.why_ended or not member.process.was_killed:
            return ""
        return "was it killed for want of memory? see dmesg, or the container's memory limit"

    def broken_error(self) -> FastloadError:
        """A new error that says why there are no receivers."""
        assert self.broken is not None
        return type(self.broken)(self.broken.what, hint=self.broken.hint, **self.broken.fields)

    def close(self) -> None:
        """End all receivers, and wait until they are gone."""
        self._finalizer()
        self.members = []


def _end_all(processes: list[ReceiverProcess], pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked process has copies of its parent's
    clock = SystemClock()
    for process in processes:
        process.hang_up()
    for patience_s in (_END_PATIENCE_S, _KILL_PATIENCE_S):
        end_s = clock.monotonic_s() + patience_s
        left = [one for one in processes if not one.wait(max(0.0, end_s - clock.monotonic_s()))]
        for process in left:
            process.kill()
        if not left:
            break
    for process in processes:
        if process in left:
            _log.warning("receiver process %d does not end", process.pid)
        process.close()
    processes.clear()
