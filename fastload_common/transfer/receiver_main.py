"""A receiver process: `main` is all it does. Standard library only; it holds no credentials.

Its first thread listens to the parent, tells it of progress and aborts what is cancelled; each
connection has a thread that blocks in the network. It ends when its parent hangs up or is gone, at
once and without a word: everything it has belongs to the system or to the parent.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from collections import deque
from typing import Any, NoReturn

from fastload_common.clock import SystemClock
from fastload_common.transfer.receiver_line import Line, StagingMap, TlsContexts
from fastload_common.transfer.wire import Get, Inbox, Message, Outbox, error_record

__all__ = ["main"]

_NAME = "fastload-recv"  # at most 15 characters
_TICK_S = 0.05
_PARENT_CHECK_S = 1.0
_CRASHED = 70
_HELLO_BYTES = 64 * 1024
_STACK_BYTES = 512 * 1024


def main(control_fd: int) -> NoReturn:
    """Serve until the parent ends.

    Args:
        control_fd: one end of a socket pair; the parent has the other.
    """
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
        comm.write(_NAME)
    peer = socket.socket(fileno=control_fd)
    try:
        _Receiver(peer).serve()
    except BaseException as error:  # noqa: BLE001 -- told to the parent
        _crash(peer, error)


class _Receiver:
    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._clock = SystemClock()
        self._outbox = Outbox(peer)
        self._inbox = Inbox()
        self._changed = threading.Condition()  # guards all below, and the order of messages
        self._waiting: deque[Get] = deque()
        self._running: dict[int, Line] = {}
        self._limit = 0
        self._threads = 0
        self._idle = 0
        self._alive_s = 0.0

    def serve(self) -> NoReturn:
        data, fds, _, _ = socket.recv_fds(self._peer, _HELLO_BYTES, 1)
        if not data:
            os._exit(0)
        (_, hello), *more = self._inbox.take(data)
        self._memory = StagingMap(fds[0], hello["size_bytes"])
        os.close(fds[0])
        self._timeouts_s = (hello["connect_timeout_s"], hello["read_timeout_s"])
        self._parent = int(hello["pid"])
        self._contexts = TlsContexts()
        threading.stack_size(_STACK_BYTES)
        threading.excepthook = lambda args: _crash(self._peer, args.exc_value)
        self._send(["ready"])
        for message in more:
            self._handle(message)
        self._listen()

    def _listen(self) -> NoReturn:
        poller = select.poll()
        told_s = checked_s = self._clock.monotonic_s()
        while True:
            events = select.POLLIN | (0 if self._outbox.is_empty else select.POLLOUT)
            poller.register(self._peer, events)
            is_busy = self._running or self._waiting
            ready = poller.poll((_TICK_S if is_busy else _PARENT_CHECK_S) * 1000)
            for _, what in ready:
                if what & ~select.POLLOUT:
                    messages = self._inbox.receive(self._peer)
                    if messages is None:
                        os._exit(0)
                    for message in messages:
                        self._handle(message)
            now_s = self._clock.monotonic_s()
            if now_s - told_s >= _TICK_S:
                told_s = now_s
                self._tick(now_s)
            if now_s - checked_s >= _PARENT_CHECK_S:
                checked_s = now_s
                # A sibling that was forked from the parent may hold its end of the socket.
                if os.getppid() != self._parent:
                    os._exit(0)
            self._flush()

    def _handle(self, message: Message) -> None:
        kind, value = message
        with self._changed:
            if kind == "get":
                get = Get.from_message(value)
                (self._waiting.appendleft if get.urgent else self._waiting.append)(get)
            elif kind == "limit":
                self._limit = value
            elif kind == "cancel":
                self._cancel(value)
            self._employ()

    def _employ(self) -> None:
        """Have a thread for each attempt that may run now; the caller holds the lock."""
        free = min(self._limit - len(self._running), len(self._waiting))
        if free <= 0:
            return
        self._changed.notify(free)
        while self._idle < free and self._threads < self._limit:
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError:
                if not self._threads:
                    raise
                break  # a limit of the system: those that are there serve all
            self._threads += 1
            self._idle += 1

    def _cancel(self, attempt_id: int) -> None:
        for get in self._waiting:
            if get.id == attempt_id:
                self._waiting.remove(get)
                self._outbox.add(_cancelled(attempt_id, self._clock.monotonic_s()))
                return
        line = self._running.get(attempt_id)
        if line is not None:
            line.abort()

    def _work(self) -> None:
        line = Line(self._memory, self._contexts, self._timeouts_s, self._clock)
        ended: list[Message] = []
        while True:
            get = self._next(line, ended)
            ended = [line.run(get)]

    def _next(self, line: Line, ended: list[Message]) -> Get:
        """Tell how the last attempt ended, and wait for the next one."""
        with self._changed:
            if line.get is not None:
                del self._running[line.get.id]
                line.get = None
                if line.is_aborted:
                    line.drop()
                self._idle += 1
            while not (self._waiting and len(self._running) < self._limit):
                if ended:
                    self._outbox.add(*ended)
                    ended = []
                    self._changed.release()
                    try:
                        self._flush()
                    finally:
                        self._changed.acquire()
                    continue
                self._changed.wait()
            self._idle -= 1
            get = self._waiting.popleft()
            line.get, line.is_aborted, line.reported = get, False, (-1, 0.0)
            self._running[get.id] = line
            # One message for the end of one and the start of the next.
            self._outbox.add(*ended, ["started", get.id, self._clock.monotonic_s()])
        self._flush()
        return get

    def _tick(self, now_s: float) -> None:
        """Tell what has come since the last time; abort once more what did not end."""
        rows = []
        with self._changed:
            for attempt_id, line in self._running.items():
                if line.is_aborted:
                    line.abort()
                    continue
                progress = line.progress()
                if progress is not None and progress != line.reported:
                    line.reported = progress
                    rows.append([attempt_id, *progress])
            if rows:
                self._outbox.add(["progress", now_s, rows])
            elif now_s - self._alive_s >= _PARENT_CHECK_S and (self._running or self._waiting):
                self._outbox.add(["alive"])
            else:
                return
            self._alive_s = now_s

    def _send(self, message: Message) -> None:
        self._outbox.add(message)
        self._flush()

    def _flush(self) -> None:
        try:
            self._outbox.flush()
        except OSError:
            os._exit(0)  # the parent has hung up


def _cancelled(attempt_id: int, at_s: float) -> Message:
    from fastload_common.errors import SourceUnavailableError

    record = error_record(SourceUnavailableError("the request was cancelled before it began"))
    return ["failed", attempt_id, at_s, record, False]


def _crash(peer: socket.socket, error: Any) -> NoReturn:
    """Tell the parent, as far as that still works, and end."""
    try:
        import traceback

        text = "".join(traceback.format_exception(error))[-4000:]
        outbox = Outbox(peer)
        outbox.add(["crashed", text])
        outbox.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
    finally:
        os._exit(_CRASHED)
