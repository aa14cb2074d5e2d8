"""Blobs of a store that serves no ranges: one stream for each, several at once.

The stream goes into a map of the spool's file, and its readers follow what has come. When it breaks
off it must begin anew, since such a store knows no other way.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import ssl
import threading
import traceback
from collections.abc import Callable, Sequence

from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.errors import SourceError
from fastload_common.pull.spool import Spool
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Refusal, RemoteSource
from fastload_common.source.http_connection import HttpConnection
from fastload_common.source.http_message import ERROR_BODY_LIMIT_BYTES
from fastload_common.source.range_reply import check_range_reply
from fastload_common.source.tls import verifying_context
from fastload_common.transfer.policy import TransferPolicy

__all__ = ["stream_all"]

# How often it is looked at what has come; between two looks it stays mapped.
_LOOK_S = 0.05
_MOST_STREAMS = 8


def stream_all(
    source: RemoteSource,
    wanted: Sequence[tuple[ObjectId, Spool]],
    settings: Settings,
    clock: Clock,
    stopped: threading.Event,
    *,
    threads: int,
    advance: Callable[[int], None],
) -> None:
    """Fetch whole blobs.

    Args:
        stopped: set by others to end it without an error.
        threads: streams at once; at most 8 are.
        advance: told how many bytes have come for the first time; from one thread at a time.

    Raises:
        SourceError: the first one that is permanent, or has used up its attempts.
        OSError: the disk.
    """
    streams = _Streams(source, wanted, settings, clock, stopped, advance)
    running = [
        threading.Thread(target=streams.work, name=f"fastload-stream-{number}", daemon=True)
        for number in range(max(1, min(threads, _MOST_STREAMS)))
    ]
    for thread in running:
        thread.start()
    try:
        for thread in running:
            thread.join()
    except BaseException:
        stopped.set()
        raise
    if streams.errors and not stopped.is_set():
        raise streams.errors[0]


class _Streams:
    """What the threads share."""

    def __init__(
        self,
        source: RemoteSource,
        wanted: Sequence[tuple[ObjectId, Spool]],
        settings: Settings,
        clock: Clock,
        stopped: threading.Event,
        advance: Callable[[int], None],
    ) -> None:
        self._source = source
        self._pending = list(reversed(wanted))
        self._settings = settings
        self._clock = clock
        self._stopped = stopped
        self._advance = advance
        self._lock = threading.Lock()
        self.errors: list[BaseException] = []

    def work(self) -> None:
        """Fetch one after the other until none is left, or one has failed."""
        while True:
            with self._lock:
                if not self._pending or self.errors or self._stopped.is_set():
                    return
                object_id, spool = self._pending.pop()
            try:
                _Stream(
                    self._source,
                    object_id,
                    spool,
                    self._settings,
                    self._clock,
                    self._stopped,
                    self._count,
                ).run()
            except BaseException as error:  # noqa: BLE001 - raised again by `stream_all`
                with self._lock:
                    self.errors.append(error)
                return

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self._advance(size_bytes)


class _Stream:
    """One blob."""

    def __init__(
        self,
        source: RemoteSource,
        object_id: ObjectId,
        spool: Spool,
        settings: Settings,
        clock: Clock,
        stopped: threading.Event,
        advance: Callable[[int], None],
    ) -> None:
        self._source = source
        self._object_id = object_id
        self._spool = spool
        self._settings = settings
        self._clock = clock
        self._stopped = stopped
        self._advance = advance
        self._tls: dict[str | None, ssl.SSLContext | None] = {None: None}
        self._furthest = 0
        self._policy = TransferPolicy(
            concurrency=1,
            max_attempts=settings.max_attempts,
            connect_timeout_s=settings.connect_timeout_s,
            read_timeout_s=settings.read_timeout_s,
        )

    def run(self) -> None:
        for attempt in range(1, self._settings.max_attempts + 1):
            try:
                self._once()
                return
            except SourceError as error:
                if self._stopped.is_set():
                    return
                error.fields |= {"uri": self._object_id.uri, "attempts": attempt}
                if not error.retryable or attempt == self._settings.max_attempts:
                    raise
                told_s = error.fields.get("retry_after_s")
                failures = 0 if error.received_bytes >= self._policy.progress_bytes else attempt
                delay_s = self._policy.backoff_delay_s(
                    failures, random.random, told_s if isinstance(told_s, int | float) else None
                )
                if self._clock.wait(self._stopped, delay_s):
                    return

    def _once(self) -> None:
        """One stream from the start.

        Raises:
            SourceError: it broke off, or was refused.
        """
        size_bytes = self._object_id.size_bytes
        self._spool.is_rewritten |= self._spool.present_bytes > 0
        descriptor = os.open(self._spool.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # Where the disk is full, writing to the map of a hole would end the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, size_bytes)
            mapped = mmap.mmap(descriptor, size_bytes)
            try:
                self._receive(mapped)
            except BaseException as error:
                _let_go(error)
                raise
            finally:
                # Should somebody hold a part of it still, it is unmapped with that.
                with contextlib.suppress(BufferError):
                    mapped.close()
        finally:
            os.close(descriptor)

    def _receive(self, mapped: mmap.mmap) -> None:
        everything = ByteRange(0, self._object_id.size_bytes)
        reads = self._source.remote_reads(self._object_id)
        assert reads is not None
        tried: set[str] = set()
        while True:
            signed = reads.sign(self._object_id, everything)
            connection = HttpConnection(
                signed.endpoint,
                self._context(signed.ca_file),
                self._settings.connect_timeout_s,
                self._settings.read_timeout_s,
                self._clock,
            )
            try:
                head = connection.get(signed.path, signed.headers)
                if 200 <= head.status < 300:
                    check_range_reply(signed.object_id, signed.byte_range, head)
                    with memoryview(mapped) as view, _Watch(self, connection, mapped):
                        connection.body_into(head, view)
                    return
                body = connection.body_capped(head, ERROR_BODY_LIMIT_BYTES)
            except SourceError as error:
                if not self._stopped.is_set():
                    signed.failed(error, tried)  # the next stream may be from elsewhere
                raise
            finally:
                connection.close()
            refused = signed.judge(Refusal(head.status, head.headers, body), tried)
            if refused is not None:
                raise refused

    def _context(self, ca_file: str | None) -> ssl.SSLContext | None:
        if ca_file not in self._tls:
            assert ca_file is not None
            self._tls[ca_file] = verifying_context(ca_file)
        return self._tls[ca_file]

    def seen(self, mapped: mmap.mmap, end: int) -> None:
        """So many bytes are there."""
        start = self._furthest
        if end > start:
            with memoryview(mapped) as view:
                self._spool.note(start, view[start:end])
            self._furthest = end
            self._advance(end - start)
        # The pages stay in the page cache; only the map of them goes, which counts as our memory.
        whole = end - end % mmap.PAGESIZE
        if whole:
            mapped.madvise(mmap.MADV_DONTNEED, 0, whole)


def _let_go(error: BaseException | None) -> None:
    """What an error's tracebacks hold of the map."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Watch:
    """Looks at a body while it comes, in a thread."""

    def __init__(self, stream: _Stream, connection: HttpConnection, mapped: mmap.mmap) -> None:
        self._stream = stream
        self._connection = connection
        self._mapped = mapped
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fastload-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        stream = self._stream
        try:
            while not stream._clock.wait(self._over, _LOOK_S):
                if stream._stopped.is_set():
                    self._connection.abort()
                    return
                stream.seen(self._mapped, self._connection.received_bytes)
            stream.seen(self._mapped, self._connection.received_bytes)
        except BaseException as error:  # noqa: BLE001 - raised again by the receiving thread
            self._error = error
            self._connection.abort()
