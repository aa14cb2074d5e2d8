"""One connection of a receiver process: takes one `Get` after the other. Standard library only."""

from __future__ import annotations

import contextlib
import mmap
import ssl
import threading

from fastload_common.clock import Clock
from fastload_common.errors import FastloadError, SourceError
from fastload_common.source.http_connection import HttpConnection
from fastload_common.source.http_message import ERROR_BODY_LIMIT_BYTES, ReplyHead
from fastload_common.source.range_reply import check_range_reply
from fastload_common.source.tls import verifying_context
from fastload_common.transfer.wire import Get, Message, error_record

__all__ = ["Line", "StagingMap", "TlsContexts"]

# madvise(2), Linux 5.14; Python has no name for it. Its call holds the interpreter's lock.
_MADV_POPULATE_WRITE = 23
_POPULATE_STEP_BYTES = 1024 * 1024


class StagingMap:
    """This process's mapping of the staging memory. Its pages are reserved by the parent.

    They are mapped when they are first given out, in one call for many: a fault for each page while
    receiving would cost more.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._map = mmap.mmap(fd, size_bytes)
        # Where the system may use large pages for shared memory; elsewhere it does nothing.
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        self._is_mapped = bytearray(-(-size_bytes // mmap.PAGESIZE))
        self._lock = threading.Lock()

    def give(self, position_bytes: int, size_bytes: int) -> memoryview:
        """A part of the memory, mapped."""
        end = position_bytes + size_bytes
        if position_bytes < 0 or end > len(self._view):
            raise ValueError("not inside the staging memory")
        self._populate(position_bytes // mmap.PAGESIZE, -(-end // mmap.PAGESIZE))
        return self._view[position_bytes:end]

    def _populate(self, first: int, end: int) -> None:
        """Map the pages ``[first, end)`` that are not yet."""
        with self._lock:
            while (first := self._is_mapped.find(0, first, end)) >= 0:
                stop = self._is_mapped.find(1, first, end)
                stop = end if stop < 0 else stop
                stop = min(stop, first + _POPULATE_STEP_BYTES // mmap.PAGESIZE)
                # Without it (an old kernel) the pages come one fault at a time.
                with contextlib.suppress(OSError):
                    start_bytes, size = first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE
                    size = min(size, len(self._view) - start_bytes)
                    self._map.madvise(_MADV_POPULATE_WRITE, start_bytes, size)
                self._is_mapped[first:stop] = b"\1" * (stop - first)
                first = stop


class TlsContexts:
    """One context for each file of authorities."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts: dict[str, ssl.SSLContext] = {}

    def get(self, ca_file: str | None) -> ssl.SSLContext | None:
        if ca_file is None:
            return None
        with self._lock:
            if ca_file not in self._contexts:
                self._contexts[ca_file] = verifying_context(ca_file)
            return self._contexts[ca_file]


class Line:
    """Owned by one thread; `abort` and `progress` are for another one.

    Attributes:
        get: what runs now; set together with ``is_aborted`` by whoever guards both.
        is_aborted: whether it shall end.
    """

    def __init__(
        self,
        memory: StagingMap,
        contexts: TlsContexts,
        timeouts_s: tuple[float, float],
        clock: Clock,
    ) -> None:
        self.get: Get | None = None
        self.is_aborted = False
        self.reported = (-1, 0.0)  # the last progress that was told
        self._memory = memory
        self._contexts = contexts
        self._timeouts_s = timeouts_s
        self._clock = clock
        self._connection: HttpConnection | None = None
        self._ca_file: str | None = None
        self._first_byte_s: float | None = None

    def progress(self) -> tuple[int, float] | None:
        """Good bytes so far, and seconds to the head; None before a head that promises any."""
        connection, first_byte_s = self._connection, self._first_byte_s
        if connection is None or first_byte_s is None:
            return None
        return connection.received_bytes, first_byte_s

    def abort(self) -> None:
        """Make `run` end soon. May come too early: repeat it until it has ended."""
        self.is_aborted = True
        connection = self._connection
        if connection is not None:
            connection.abort()

    def run(self, get: Get) -> Message:
        """Make the attempt; how it ended, as a message."""
        new_connection = False
        try:
            started_s = self._clock.monotonic_s()
            buffer = self._memory.give(get.position_bytes, get.byte_range.size_bytes)
            connection = self._connect(get)
            head = self._ask(connection, get)
            new_connection = head.new_connection
            if not 200 <= head.status < 300:
                return self._refused(get, connection, head)
            first_byte_s = self._clock.monotonic_s() - started_s
            check_range_reply(get.object_id, get.byte_range, head)
            self._first_byte_s = first_byte_s
            connection.body_into(head, buffer)
            now_s = self._clock.monotonic_s()
            size_bytes, total_s = len(buffer), now_s - started_s
            return ["done", get.id, now_s, size_bytes, first_byte_s, total_s, new_connection]
        except FastloadError as error:
            error.fields.setdefault("endpoint", str(get.endpoint))
            return self._failed(get, error, new_connection)
        except Exception as error:  # noqa: BLE001 -- told to the parent, which raises it
            what = f"a receiver process failed: {type(error).__name__}: {error}"
            hint = "this is a fault of fastload: please report it"
            return self._failed(get, SourceError(what, hint=hint), new_connection)
        finally:
            self._first_byte_s = None

    def drop(self) -> None:
        """Close the connection; the next `run` makes another."""
        gone, self._connection = self._connection, None
        if gone is not None:
            gone.close()

    def _connect(self, get: Get) -> HttpConnection:
        connection = self._connection
        if (
            connection is None
            or get.fresh
            or connection.endpoint != get.endpoint
            or self._ca_file != get.ca_file
        ):
            self.drop()
            tls = self._contexts.get(get.ca_file)
            connection = HttpConnection(get.endpoint, tls, *self._timeouts_s, self._clock)
            self._ca_file = get.ca_file
            self._connection = connection
        # An abort that came before did not see it.
        if self.is_aborted:
            connection.abort()
        return connection

    @staticmethod
    def _ask(connection: HttpConnection, get: Get) -> ReplyHead:
        path, get.path = get.path, ""
        headers, get.headers = get.headers, {}
        return connection.get(path, headers)

    def _refused(self, get: Get, connection: HttpConnection, head: ReplyHead) -> Message:
        body = connection.body_capped(head, ERROR_BODY_LIMIT_BYTES).decode("latin-1")
        if self.is_aborted:
            self.drop()
        at_s = self._clock.monotonic_s()
        return ["refused", get.id, at_s, head.status, dict(head.headers), body]

    def _failed(self, get: Get, error: FastloadError, new_connection: bool) -> Message:
        self.drop()
        at_s = self._clock.monotonic_s()
        return ["failed", get.id, at_s, error_record(error), new_connection]
