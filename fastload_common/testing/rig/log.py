"""The rig's request log: who asked for what, when, on which connection, and how it ended."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fastload_common.clock import Clock
from fastload_common.ranges import ByteRange

__all__ = ["LoggedRequest", "RequestLog"]

COMPLETE = "complete"
REFUSED = "refused"
CUT = "cut"
RESET = "reset"
CLIENT_CLOSED = "client closed"
STOPPED = "rig stopped"
CRASHED = "rig crashed"


@dataclass(slots=True)
class LoggedRequest:
    """One request. It is in the log from its arrival on, and is filled in as it is answered.

    Whoever has received bytes finds them counted, and whoever has the last one finds the end.

    Attributes:
        kind: GET, HEAD or PUT of an object, LIST, or OTHER (of a bucket).
        bucket, key: the key of a listing is its prefix.
        headers: names in lower case.
        byte_range: as asked, cut to the object; the whole object without a Range header; None
            where there is no object.
        connection: number of its connection, from 1.
        arrived_s: by the rig's clock (monotonic), when its head was read.
        attempt: 1 + how many requests of this kind for bytes that overlap these came before.
        faults: names of the effects that its reply took.
        status: of the reply; 0 before there is one.
        sent_bytes: of the reply's body, handed to the connection so far.
        ended: None while it is answered, then ``complete``, ``refused`` (a complete error reply),
            ``cut``, ``reset``, ``client closed``, ``rig stopped`` or ``rig crashed``.
        ended_s: by the rig's clock.
        stalled: whether it stalls now.
    """

    number: int
    kind: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    byte_range: ByteRange | None
    connection: int
    arrived_s: float
    attempt: int = 1
    faults: tuple[str, ...] = ()
    status: int = 0
    sent_bytes: int = 0
    ended: str | None = None
    ended_s: float | None = None
    stalled: bool = False

    @property
    def name(self) -> str:
        return f"{self.bucket}/{self.key}"

    @property
    def signed(self) -> bool:
        return "authorization" in self.headers or "X-Amz-Signature" in self.query

    def overlaps(self, byte_range: ByteRange) -> bool:
        """Whether it asks for some of these bytes."""
        return self.byte_range is not None and self.byte_range.intersect(byte_range) is not None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: without headers, which may hold a signature."""
        row = asdict(self)
        del row["headers"]
        row["query"] = {k: v for k, v in self.query.items() if not k.startswith("X-Amz-")}
        row["byte_range"] = self.byte_range and [self.byte_range.start, self.byte_range.end]
        return row


@dataclass(slots=True)
class _Seen:
    """What came for one object and kind: how often, and each range."""

    count: int = 0
    ranges: list[ByteRange] = field(default_factory=list)


class RequestLog:
    """All requests since the start, or since `clear`. Thread-safe.

    Attributes:
        peak_in_flight: most requests at one time that had arrived and not ended.
        peak_connections: most connections that were open at one time.
        connections: how many were opened.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._requests: list[LoggedRequest] = []
        self._seen: dict[tuple[str, str], _Seen] = defaultdict(_Seen)
        self._in_flight = 0
        self._open = 0
        self._number = 0
        self.connections = 0
        self.peak_in_flight = 0
        self.peak_connections = 0

    def requests(self, kind: str | None = None, key: str | None = None) -> list[LoggedRequest]:
        """The requests in order of arrival, of one kind and for one key if so asked."""
        with self._changed:
            return [
                request
                for request in self._requests
                if kind in (None, request.kind) and key in (None, request.key)
            ]

    def gets(self, key: str | None = None) -> list[LoggedRequest]:
        return self.requests("GET", key)

    @property
    def bytes_sent(self) -> int:
        """Bytes of the bodies of all replies to GET that went out, errors' bodies included."""
        return sum(request.sent_bytes for request in self.gets())

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def open_connections(self) -> int:
        return self._open

    def stalled(self) -> list[LoggedRequest]:
        """The requests whose replies stall now."""
        return [request for request in self.requests() if request.stalled]

    def clear(self) -> None:
        """Forget all requests, so that attempts count from 1 again, and the peaks."""
        with self._changed:
            self._requests.clear()
            self._seen.clear()
            self.connections = self._open
            self.peak_in_flight = self._in_flight
            self.peak_connections = self._open

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Block until the condition holds; it is looked at whenever something happened.

        Args:
            timeout_s: real seconds, so that a test that hangs ends.

        Raises:
            TimeoutError: it does not.
        """
        with self._changed:
            if not self._changed.wait_for(condition, timeout_s):
                raise TimeoutError(f"still not after {timeout_s} s: {self!r}")

    def wait_until_idle(self, timeout_s: float = 10.0) -> None:
        """Block until no request is in flight."""
        self.wait_for(lambda: self._in_flight == 0, timeout_s)

    def wait_until_unconnected(self, timeout_s: float = 10.0) -> None:
        """Block until no connection is open: a client that leaks one makes this raise."""
        self.wait_for(lambda: self._open == 0, timeout_s)

    def summary(self) -> dict[str, Any]:
        """Counts for a report."""
        rows = self.requests()
        ends_s = [row.ended_s for row in rows if row.ended_s is not None]
        with self._changed:
            return {
                "requests": dict(Counter(row.kind for row in rows)),
                "ended": dict(Counter(row.ended or "in flight" for row in rows)),
                "status": dict(Counter(str(row.status) for row in rows)),
                "faults": dict(Counter(name for row in rows for name in row.faults)),
                "bytes_sent": sum(row.sent_bytes for row in rows if row.kind == "GET"),
                "in_flight": self._in_flight,
                "peak_in_flight": self.peak_in_flight,
                "open_connections": self._open,
                "peak_connections": self.peak_connections,
                "connections": self.connections,
                "first_arrival_s": rows[0].arrived_s if rows else None,
                "last_end_s": max(ends_s, default=None),
            }

    def __repr__(self) -> str:
        return (
            f"<RequestLog: {len(self._requests)} requests, {self._in_flight} in flight, "
            f"{self._open} connections open>"
        )

    # For the rig's connections.

    def connected(self) -> int:
        """Count a connection; returns its number."""
        with self._changed:
            self.connections += 1
            self._open += 1
            self.peak_connections = max(self.peak_connections, self._open)
            self._number += 1
            self._changed.notify_all()
            return self._number

    def disconnected(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def begin(
        self,
        kind: str,
        bucket: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        byte_range: ByteRange | None,
        connection: int,
    ) -> LoggedRequest:
        """Log a request that has just arrived."""
        with self._changed:
            request = LoggedRequest(
                number=len(self._requests) + 1,
                kind=kind,
                bucket=bucket,
                key=key,
                query=query,
                headers=headers,
                byte_range=byte_range,
                connection=connection,
                arrived_s=self._clock.monotonic_s(),
            )
            seen = self._seen[kind, request.name]
            if kind == "GET" and byte_range is not None and byte_range.size_bytes:
                request.attempt = 1 + sum(map(request.overlaps, seen.ranges))
                seen.ranges.append(byte_range)
            else:
                seen.count += 1
                request.attempt = seen.count
            self._requests.append(request)
            self._in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
            self._changed.notify_all()
            return request

    def note(self, request: LoggedRequest, sent_bytes: int) -> None:
        """More of the body goes out; negative: it did not, after all."""
        with self._changed:
            request.sent_bytes += sent_bytes
            self._changed.notify_all()

    def set_stalled(self, request: LoggedRequest, stalled: bool) -> None:
        with self._changed:
            request.stalled = stalled
            self._changed.notify_all()

    def end(self, request: LoggedRequest, how: str) -> None:
        """Note how it ended; again, if it came otherwise."""
        with self._changed:
            if request.ended == how:
                return
            if request.ended is None:
                self._in_flight -= 1
            request.ended = how
            request.ended_s = self._clock.monotonic_s()
            self._changed.notify_all()
