"""The other ranks of this host: what they said, who failed, and how to wait for them.

One thread (``fastload-peers``) reads all sockets and never blocks; anybody may send, and never
blocks either. Whoever waits is told of another rank's end at once. The first failure counts.

    a rank says DONE, then closes: it has ended well
    a rank says FAILED: its load has ended, and this one's ends with `PeerError`
    a socket ends without either, or the process behind it does: it is gone

Must not know: plans, chunks, memory other than its descriptors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastload_common.clock import Clock
from fastload_common.errors import DeadlineError, FastloadError
from fastload_common.exchange.frames import Frame, Inbox, Outbox
from fastload_common.exchange.meeting import Met
from fastload_common.exchange.processes import close_in_children, watch
from fastload_common.exchange.words import (
    ARENA_FORM,
    FILLED_FORM,
    TAKEN_FORM,
    Failure,
    Told,
    Word,
)

__all__ = ["Line", "Peers"]

_log = logging.getLogger(__name__)

# The injected clock may be a fake: whoever waits looks at it this often, in real time.
_POLL_S = 0.1
_PATIENCE_S = 30.0  # between two lines that say who is waited for
_FAREWELL_S = 1.0  # for what must still be sent
_FAREWELL_STEP_S = 0.01
_JOIN_S = 2.0


@dataclass(slots=True)
class Line:
    """One other rank and what it has told so far.

    Attributes:
        arena: descriptor and size of its staging memory; the descriptor is this line's own.
        is_done: it needs nothing more.
        is_open: more may come.
        process: descriptor that is readable once its process has ended, this line's own; or None.
    """

    rank: int
    pid: int
    peer: socket.socket
    outbox: Outbox = field(init=False)
    inbox: Inbox = field(init=False)
    process: int | None = field(init=False)
    arena: tuple[int, int] | None = None
    told: Told | None = None
    is_done: bool = False
    is_open: bool = True

    def __post_init__(self) -> None:
        self.peer.setblocking(False)
        self.outbox, self.inbox = Outbox(self.peer), Inbox(self.peer)
        self.process = watch(self.peer)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def close(self) -> None:
        self.is_open = False
        self.outbox.close()
        self.inbox.close()
        self.peer.close()
        if self.process is not None:
            os.close(self.process)
            self.process = None
        if self.arena is not None:
            fd, size_bytes = self.arena
            self.arena = (-1, size_bytes)
            if fd >= 0:
                os.close(fd)


class Peers:
    """Owns the lines of one load until `close`.

    Args:
        met: the ranks of this host.
        clock: for the deadline and for saying who is waited for.
        on_filled: told (rank, chunk number, position) by the thread; must not block.
        on_taken: told (rank, chunk number) by the thread; must not block.
        deadline_s: reading of the clock at which the load must have ended; None: never.
        limit_s: the duration that led to it, for the message.

    Attributes:
        rank: this one.
        ranks: all of this host, ascending.
        changed: notified whenever anything has changed that somebody may wait for.
        waited_s: how long this rank has waited for others.
    """

    def __init__(
        self,
        met: Met,
        clock: Clock,
        *,
        on_filled: Callable[[int, int, int], None],
        on_taken: Callable[[int, int], None],
        deadline_s: float | None = None,
        limit_s: float | None = None,
    ) -> None:
        self.rank, self._pid = met.own.rank, met.own.pid
        self.lines = {card.rank: Line(card.rank, card.pid, peer) for card, peer in met.lines}
        close_in_children(line.peer for line in self.lines.values())
        self.ranks = tuple(sorted([self.rank, *self.lines]))
        self.changed = threading.Condition()
        self.waited_s = 0.0
        self._clock = clock
        self._on_filled = on_filled
        self._on_taken = on_taken
        self._deadline_s, self._limit_s = deadline_s, limit_s
        self._failure: Failure | None = None
        self._death: FastloadError | None = None
        self._ending = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()  # guards the descriptor against a wake after its end
        self._wake_closed = False
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="fastload-peers", daemon=True)
        self._thread.start()

    # -- for any thread ---------------------------------------------------------------------

    def send(self, rank: int, word: Word, payload: bytes = b"", fd: int | None = None) -> None:
        """Tell one rank. To one that has gone nothing is sent, and that is no error."""
        if not self.lines[rank].outbox.send(word, payload, fd):
            self._wake()

    def tell(self, word: Word, payload: bytes = b"", fd: int | None = None) -> None:
        """Tell all others."""
        for rank in self.lines:
            self.send(rank, word, payload, fd)

    def check(self) -> None:
        """Raise if another rank has failed.

        Raises:
            PeerError: one has; always for the first that did.
            FastloadError: the thread has ended.
        """
        if self._death is not None:
            raise self._death
        if self._failure is not None:
            raise self._failure.error()

    def wait(
        self,
        is_there: Callable[[], bool],
        whom: Callable[[], Sequence[int]],
        what: str,
        *,
        counted: bool = True,
    ) -> None:
        """Wait until something is there.

        Args:
            is_there: called with `changed` held, often.
            whom: the ranks that are waited for; called with `changed` held.
            what: for the log: "waiting for *what* rank 3".
            counted: whether this is only for others.

        Raises:
            PeerError: another rank has failed.
            DeadlineError: the load's deadline has passed.
        """
        began_s = said_s = self._clock.monotonic_s()
        try:
            while True:
                with self.changed:
                    self.check()
                    if is_there():
                        return
                    self.changed.wait(_POLL_S)
                now_s = self._clock.monotonic_s()
                is_late = self._deadline_s is not None and now_s >= self._deadline_s
                if not is_late and now_s - said_s < _PATIENCE_S:
                    continue
                said_s = now_s
                with self.changed:
                    names = self._names(whom())
                if is_late:
                    raise self._late(what, names)
                if names:
                    waited_s = now_s - began_s
                    _log.warning("waiting for %s %s, for %.0f s now", what, names, waited_s)
        finally:
            if counted:
                self.waited_s += self._clock.monotonic_s() - began_s

    def accuse(self, rank: int, text: str) -> None:
        """A rank said what makes no sense: that ends the load."""
        self._fail(Failure(rank, self.lines[rank].pid, FastloadError.__name__, text))

    def close(self, error: BaseException | None = None) -> None:
        """End the thread and the sockets; with an error, tell it to all first. Safe to call twice.

        Waits a second at most for what must still be sent.
        """
        if self._closed:
            return
        self._closed = True
        if error is not None:
            self.tell(Word.FAILED, Failure.of(self.rank, self._pid, error).encode())
        self._ending.set()
        self._wake()
        self._thread.join(_FAREWELL_S + _JOIN_S)
        if self._thread.is_alive():
            _log.warning("%s did not end in time", self._thread.name)
            return
        with self._wake_lock:
            self._wake_closed = True
            os.close(self._wake_fd)
        for line in self.lines.values():
            line.close()

    # -- the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_fd, selectors.EVENT_READ, None)
                masks = dict.fromkeys(self.lines, selectors.EVENT_READ)
                for line in self.lines.values():
                    selector.register(line.peer, selectors.EVENT_READ, line)
                    if line.process is not None:
                        selector.register(line.process, selectors.EVENT_READ, line)
                while not self._ending.is_set():
                    self._turn(selector, masks)
                self._say_farewell()
        except BaseException as error:  # noqa: BLE001 -- raised again by whoever waits
            _log.error("the exchange with other ranks has ended: %r", error)
            with self.changed:
                self._death = FastloadError(
                    f"the exchange with other ranks has ended: {type(error).__name__}",
                    hint="set FASTLOAD_EXCHANGE=off, and tell us",
                )
                self._death.__cause__ = error
                self.changed.notify_all()

    def _turn(self, selector: selectors.BaseSelector, masks: dict[int, int]) -> None:
        for rank, line in self.lines.items():
            full = line.is_open and not line.outbox.is_empty
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if full else 0)
            if line.is_open and mask != masks[rank]:
                selector.modify(line.peer, mask, line)
                masks[rank] = mask
        ended, speaking = [], set()
        for key, events in selector.select(1.0):
            line = key.data
            if line is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            elif key.fileobj is not line.peer:
                ended.append(line)
            else:
                if events & selectors.EVENT_WRITE:
                    line.outbox.flush()
                if events & selectors.EVENT_READ:
                    speaking.add(line.rank)
                    if not self._read(line):
                        _forget(selector, line)
        for line in ended:
            # What it said before its end is all in its socket, and counts.
            if line.is_open and line.rank not in speaking:
                self._lose(line)
                _forget(selector, line)

    def _read(self, line: Line) -> bool:
        """Take what one rank said; whether more may come."""
        try:
            frames = line.inbox.receive()
            for frame in frames or ():
                self._hear(line, frame)
        except Exception as error:  # noqa: BLE001 -- told to all
            # Whatever it is (RecursionError of a parser, too), what that rank said did it. It is
            # listened to no longer, but told why.
            self.accuse(line.rank, f"it said what makes no sense ({error})")
            line.is_open = False
            return False
        if frames is not None:
            return True
        self._lose(line)
        return False

    def _lose(self, line: Line) -> None:
        """A rank is gone: well, if it was done."""
        line.outbox.close()
        with self.changed:
            line.is_open = False
            self.changed.notify_all()
        if not line.is_done:
            self._fail(Failure(line.rank, line.pid))

    def _hear(self, line: Line, frame: Frame) -> None:
        kind, payload = frame
        word = Word(kind)
        if word is Word.FILLED:
            number, position = _unpack(FILLED_FORM, payload)
            self._on_filled(line.rank, number, position)
        elif word is Word.TAKEN:
            (number,) = _unpack(TAKEN_FORM, payload)
            self._on_taken(line.rank, number)
        elif word is Word.FAILED:
            self._fail(Failure.decode(payload))
        else:
            with self.changed:
                if word is Word.DONE:
                    line.is_done = True
                elif word is Word.NEEDS:
                    line.told = Told.decode(payload)
                elif word is Word.ARENA and line.inbox.fds and line.arena is None:
                    line.arena = (line.inbox.fds.popleft(), _unpack(ARENA_FORM, payload)[0])
                else:
                    raise ValueError("memory without a descriptor")
                self.changed.notify_all()

    def _fail(self, failure: Failure) -> None:
        with self.changed:
            if self._failure is None:
                self._failure = failure
            self.changed.notify_all()

    def _say_farewell(self) -> None:
        """Send what is left, as long as the others take it; a second at most, of real time."""
        pause = threading.Event()
        for _ in range(round(_FAREWELL_S / _FAREWELL_STEP_S)):
            sent = [line.outbox.flush() for line in self.lines.values()]
            if all(sent):
                return
            pause.wait(_FAREWELL_STEP_S)

    def _wake(self) -> None:
        with self._wake_lock:
            if not self._wake_closed:
                os.eventfd_write(self._wake_fd, 1)

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(self.lines[rank].name for rank in ranks)

    def _late(self, what: str, names: str) -> DeadlineError:
        return DeadlineError(
            f"the load was not finished after {self._limit_s} s: waiting for {what} "
            f"{names or 'this rank itself'}",
            hint="raise FASTLOAD_DEADLINE_S, or see why that rank is slow",
        )


def _forget(selector: selectors.BaseSelector, line: Line) -> None:
    """Listen to a rank no longer."""
    selector.unregister(line.peer)
    if line.process is not None:
        selector.unregister(line.process)


def _unpack(form: struct.Struct, payload: bytes) -> tuple[int, ...]:
    try:
        return form.unpack(payload)
    except struct.error as error:
        raise ValueError(str(error)) from None
