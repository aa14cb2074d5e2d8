"""Brings what the cache holds of one fetch into its staging slots, beside what the source brings.

Threads read from the disk; each checks what it read. A chunk that is held in part comes here with
what the source brought of it. What is damaged, or does not come at all, the source is asked for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastload_common.clock import Clock
from fastload_common.errors import StagingError
from fastload_common.plan.records import Chunk
from fastload_common.range_cache.coverage import Cover
from fastload_common.range_cache.node_cache import NodeCache
from fastload_common.ranges import ByteRange
from fastload_common.transfer.run import Run, Staging, StagingSlot

__all__ = ["CacheSupply"]

_log = logging.getLogger(__name__)

# Memory may come back without a word.
_POLL_S = 0.005
_WATCH_S = 0.25
_JOIN_S = 0.5


@dataclass(slots=True, eq=False)
class _Task:
    """One chunk to read.

    Attributes:
        slot: its memory; None: it has none yet.
        taken_s: when a thread began to read it.
        given_up: its bytes come from the source; whoever has its slot gives that back.
    """

    index: int
    chunk: Chunk
    cover: Cover
    slot: StagingSlot | None = None
    taken_s: float | None = None
    given_up: bool = False
    source_parts: list[ByteRange] = field(default_factory=list)


class CacheSupply:
    """Implements `Supply`, for one fetch.

    Args:
        cache: what is held.
        staging: memory for the chunks that are held whole.
        threads: that read.
        clock: for how long a read takes.
    """

    def __init__(self, cache: NodeCache, staging: Staging, threads: int, clock: Clock) -> None:
        self._cache = cache
        self._staging = staging
        self._limit = threads
        self._clock = clock
        self._changed = threading.Condition()
        self._tasks: dict[int, _Task] = {}  # by their chunk's identity, until they are done
        self._queue: deque[_Task] = deque()
        self._running: set[_Task] = set()
        self._threads: list[threading.Thread] = []
        self._run: Run | None = None
        self._over = False
        self._no_thread = ""

    def source_parts(self, chunk: Chunk) -> Sequence[ByteRange]:
        """What of a delivered chunk came from the source."""
        task = self._tasks.get(id(chunk))
        return (chunk.byte_range,) if task is None else task.source_parts

    def begin(self, run: Run) -> None:
        """See `Supply.begin`."""
        self._run = run
        for index, chunk in enumerate(run.chunks):
            cover = self._cache.cover(chunk.object_id, chunk.byte_range)
            if cover.held:
                task = _Task(index, chunk, cover, source_parts=list(cover.missing))
                self._tasks[id(chunk)] = task
                run.missing[index] = cover.missing
                if not cover.missing:
                    self._queue.append(task)
        if self._tasks:
            run.complete = self._complete

    def start(self) -> None:
        """See `Supply.start`."""
        if not self._tasks:
            return
        for number in range(min(self._limit, len(self._tasks))):
            self._employ(self._work, f"fastload-cache-{number}")
        # Without readers nothing comes; unwatched ones could keep the load for ever.
        if not self._threads or not self._employ(self._watch, "fastload-cache-watch"):
            self._cache.give_up(f"no thread to read with: {self._no_thread}")
            self._return_all()

    def end(self) -> None:
        """See `Supply.end`. A read that does not end is left behind, with its memory."""
        with self._changed:
            self._over = True
            for task in self._queue:
                if task.slot is not None:
                    task.slot.release()
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
                if thread.is_alive():
                    _log.warning("%s did not end: its disk does not answer", thread.name)
        self._threads.clear()

    def _employ(self, work: Callable[[], None], name: str) -> bool:
        thread = threading.Thread(target=work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._no_thread = str(error)
            return False
        self._threads.append(thread)
        return True

    def _complete(self, chunk: Chunk, slot: StagingSlot) -> bool:
        """See `Run.complete`."""
        task = self._tasks.get(id(chunk))
        with self._changed:
            # One with memory has been here: what was damaged has come.
            if task is None or task.given_up or task.slot is not None or self._over:
                return True
            task.slot = slot
            # After it was given up perhaps nobody reads any more, or looks whether anybody does.
            is_on = self._cache.is_on
            if is_on:
                self._queue.appendleft(task)
                self._changed.notify_all()  # others wait for other things
            else:
                task.given_up = True
        if not is_on:
            self._return(task)
        return False

    # Threads

    def _work(self) -> None:
        try:
            while (found := self._next()) is not None:
                self._do(*found)
        except BaseException as error:  # noqa: BLE001 -- raised again by the consumer
            self._its_run().fail(error)

    def _next(self) -> tuple[_Task, StagingSlot] | None:
        """A chunk to read, and its memory; those that have some come first. None: end."""
        run = self._its_run()
        while True:
            with self._changed:
                while not self._queue and not self._over:
                    self._changed.wait()
                if self._over or run.is_over:
                    return None
                if self._staging.is_closed:
                    raise StagingError("the staging memory was closed while chunks were read")
                task = self._queue.popleft()
                self._running.add(task)
            # Not under the lock: it may have to be made.
            slot = task.slot or self._staging.try_lease(task.chunk.byte_range.size_bytes)
            with self._changed:
                if slot is not None and not task.given_up:
                    task.slot = slot
                    task.taken_s = self._clock.monotonic_s()
                    return task, slot
                self._running.discard(task)
                if not task.given_up:
                    self._queue.append(task)
                    self._changed.wait(_POLL_S)
            if slot is not None:
                slot.release()

    def _do(self, task: _Task, slot: StagingSlot) -> None:
        byte_range = task.chunk.byte_range
        size_bytes = byte_range.size_bytes
        try:
            self._staging.populate(slot.position_bytes, size_bytes)
            with contextlib.closing(_View(slot.memory[:size_bytes])) as view:
                lost = self._cache.read_held(
                    task.chunk.object_id, task.cover, view.memory, byte_range.start
                )
        except BaseException:
            slot.release()
            raise
        with self._changed:
            self._running.discard(task)
            is_late = task.given_up
            task.source_parts += [] if is_late else lost
        if is_late:
            slot.release()
            return
        read_bytes = size_bytes - sum(part.size_bytes for part in task.source_parts)
        self._cache.count_chunk(read_bytes)
        if lost:
            self._its_run().ask_for(task.index, slot, lost)
        else:
            self._its_run().put(task.chunk, slot)

    def _watch(self) -> None:
        """See that reads end, and that nothing waits for a cache that is given up."""
        while True:
            with self._changed:
                if self._over:
                    return
                now_s = self._clock.monotonic_s()
                since = [task.taken_s for task in self._running if task.taken_s is not None]
            patience_s = self._cache.patience_s
            if since and now_s - min(since) > patience_s:
                self._cache.give_up(f"a read did not end within {patience_s:.0f} s")
            if not self._cache.is_on:
                self._return_all()
            with self._changed:
                if not self._over:
                    self._changed.wait(_WATCH_S)

    def _return_all(self) -> None:
        """All that is not read comes from the source."""
        run = self._its_run()
        with self._changed:
            waiting, running = list(self._queue), list(self._running)
            self._queue.clear()
            for task in (*waiting, *running):
                task.given_up = True
                self._running.discard(task)
        for task in waiting:
            self._return(task)
        for task in running:
            # Its memory may still be written to.
            task.source_parts[:] = [task.chunk.byte_range]
            run.ask_for(task.index, None, [task.chunk.byte_range])

    def _return(self, task: _Task) -> None:
        """What is held of a chunk that is not read comes from the source."""
        held = [part.wanted for part in task.cover.held]
        task.source_parts += held
        self._its_run().ask_for(task.index, task.slot, held)

    def _its_run(self) -> Run:
        assert self._run is not None
        return self._run


class _View:
    """A view of a slot, released at the end."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self.memory.release()
