"""Lanes with everything around them, driven as their owner drives them."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastload_common.config import Settings
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ObjectSource, RemoteSource
from fastload_common.staging.arena import Arena, Slot
from fastload_common.transfer.lanes import Attempt, Done, Event, Failed, Lanes, Progress, Started
from fastload_common.transfer.mailbox import Mailbox
from fastload_common.transfer.process_lanes import ProcessLanes
from fastload_common.transfer.receiver_process import ReceiverProcess, ReceiverSetup
from fastload_common.transfer.thread_lanes import ThreadLanes

__all__ = ["LanesBench", "children", "content", "receiver_pids", "until"]

PATIENCE_S = 30.0  # real time; only a failing test waits so long
PATTERN = 0xA5


class LanesBench:
    """One owner: starts attempts, collects events, keeps the memory until they have ended."""

    def __init__(
        self,
        source: ObjectSource,
        kind: str,
        *,
        connections: int = 4,
        slots: int = 40,
        slot_bytes: int = 64 * 1024,
        settings: Settings | None = None,
    ) -> None:
        self.source = source
        self.settings = settings or Settings()
        self.arena = Arena(slot_bytes, slots)
        self.mailbox = Mailbox()
        self.events: list[Event] = []
        self.slots: dict[int, Slot] = {}
        self.ids = itertools.count(1)
        self.lanes: Lanes
        if kind == "threads":
            self.lanes = ThreadLanes(
                source.open_receiver,
                self.mailbox.post,
                connections,
                prepare=self.arena.populate,
            )
        else:
            self.lanes = ProcessLanes(self._reads_of, self.setup, self.mailbox, connections)

    @property
    def setup(self) -> ReceiverSetup:
        timeouts_s = self.settings.connect_timeout_s, self.settings.read_timeout_s
        return ReceiverSetup(self.arena.fd, self.arena.size_bytes, *timeouts_s)

    def _reads_of(self, object_id: ObjectId) -> Any:
        assert isinstance(self.source, RemoteSource)
        return self.source.remote_reads(object_id)

    def start(self, object_id: ObjectId, start: int, end: int, *, fresh: bool = False) -> int:
        slot = self.arena.try_lease(end - start)
        assert slot is not None
        slot.memory[:] = bytes(end - start)
        attempt_id = next(self.ids)
        self.slots[attempt_id] = slot
        byte_range = ByteRange(start, end)
        position = slot.position_bytes
        self.lanes.start(Attempt(attempt_id, object_id, byte_range, slot.memory, position, fresh))
        self.lanes.flush()
        return attempt_id

    def wait(self, is_there: Callable[[], object], what: str = "an event") -> None:
        """Handle events until it is true."""
        end_s = time.monotonic() + PATIENCE_S
        while not is_there():
            if time.monotonic() > end_s:
                raise AssertionError(f"waited too long for {what}; {self.state()}")
            self.events += self.mailbox.wait(0.05)
            self.lanes.flush()

    def state(self) -> str:
        """What the lanes have to do, for the message of a test that fails."""
        lanes = self.lanes
        if not isinstance(lanes, ProcessLanes):
            return str(self.events[-10:])
        tasks = {
            number: (task.member and task.member.process.pid, task.is_sent, task.is_cancelled)
            for number, task in lanes._tasks.items()
        }
        receivers = [
            (m.process.pid, m.share, list(m.tasks), m.process.is_ready, m.why_ended)
            for m in lanes._crew.members
        ]
        pending = [task.attempt.id for task in lanes._dispatch.pending]
        return f"tasks {tasks}, pending {pending}, receivers {receivers}, {self.events[-5:]}"

    def end_of(self, attempt_id: int) -> Done | Failed:
        """Wait for an attempt's end."""
        self.wait(lambda: self.ends(attempt_id), f"the end of {attempt_id}")
        (end,) = self.ends(attempt_id)
        return end

    def started(self, attempt_id: int) -> Started:
        self.wait(lambda: self.of(attempt_id, Started), f"the start of {attempt_id}")
        (event,) = self.of(attempt_id, Started)
        assert isinstance(event, Started)
        return event

    def progressed(self, attempt_id: int, size_bytes: int) -> Progress:
        """Wait until so many bytes were told."""

        def told() -> list[Progress]:
            found = [e for e in self.of(attempt_id, Progress) if isinstance(e, Progress)]
            return [event for event in found if event.received_bytes >= size_bytes]

        self.wait(told, f"progress of {attempt_id}")
        return told()[0]

    def of(self, attempt_id: int, kind: type[Event]) -> list[Event]:
        return [e for e in self.events if isinstance(e, kind) and e.attempt_id == attempt_id]

    def ends(self, attempt_id: int) -> list[Done | Failed]:
        return [
            e for e in self.events if isinstance(e, Done | Failed) and e.attempt_id == attempt_id
        ]

    def failure(self, attempt_id: int) -> Failed:
        end = self.end_of(attempt_id)
        assert isinstance(end, Failed), end
        return end

    def memory(self, attempt_id: int) -> bytes:
        return bytes(self.slots[attempt_id].memory)

    def mark(self, attempt_id: int) -> None:
        """Fill an ended attempt's memory, to see that nobody writes there any more."""
        self.slots[attempt_id].memory[:] = bytes([PATTERN]) * len(self.slots[attempt_id].memory)

    def is_marked(self, attempt_id: int) -> bool:
        return set(self.memory(attempt_id)) == {PATTERN}

    @property
    def receivers(self) -> list[ReceiverProcess]:
        assert isinstance(self.lanes, ProcessLanes)
        return [member.process for member in self.lanes._crew.members]

    def close(self) -> None:
        self.lanes.close()
        self.mailbox.close()
        for slot in self.slots.values():
            slot.release()
        self.arena.close()
        self.source.close()


def content(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes in which no two places look alike."""
    return bytes((i * 7 + i // 251 + seed * 31) % 256 for i in range(size_bytes))


def until(is_true: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait, in real time, for what another process does."""
    end_s = time.monotonic() + patience_s
    waited = threading.Event()
    while not is_true():
        if time.monotonic() > end_s:
            raise AssertionError(f"waited too long: {what}")
        waited.wait(0.01)


def children(parent: int) -> dict[int, str]:
    """Living children of a process (zombies included), with their names."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                name = stat[stat.index("(") + 1 : stat.rindex(")")]
                if int(stat[stat.rindex(")") + 2 :].split()[1]) == parent:
                    found[int(entry.name)] = name
    return found


def receiver_pids(parent: int | None = None) -> list[int]:
    """Receiver processes of a process, by their name, once they have one."""
    found = children(os.getpid() if parent is None else parent)
    return [pid for pid, name in found.items() if name == "fastload-recv"]
