"""The rig: an S3-speaking server on loopback that does harm where a test asks for it.

It checks signatures, logs every request and serves more than a client can take.

    with Rig() as rig:
        rig.put("bucket", "model/a", data)
        rig.faults = [Fault(Stall(after_bytes=1000), name="bucket/model/*", attempts=(1,))]
        run_client(rig.environ())
        assert [r.attempt for r in rig.log.gets("model/a")] == [1, 2]
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fastload_common.clock import Clock, SystemClock
from fastload_common.testing.loopback import LoopbackServer
from fastload_common.testing.rig.connection import RigConnection
from fastload_common.testing.rig.faults import Fault, Plan, plan_reply
from fastload_common.testing.rig.log import LoggedRequest, RequestLog
from fastload_common.testing.rig.objects import Content, StoredObject
from fastload_common.testing.rig.pace import Pace
from fastload_common.testing.rig.replies import Reply
from fastload_common.testing.rig.requests import Asked
from fastload_common.testing.rig.service import Service
from fastload_common.testing.rig.sigv4 import AccessKey
from fastload_common.testing.rig.store import Store
from fastload_common.testing.rig.watch import HangUpWatch

__all__ = ["Rig"]

_DEFAULT_KEY = AccessKey("RIGACCESSKEY", "rig-secret-key")


class Rig(LoopbackServer):
    """The server. Use as a context manager, or call `start` and `stop`.

    Args:
        clock: for all delays, limits, times in the log and signature times.
        keys: whose signatures are good; the first one is in `environ`.
        tls: a server's context, for HTTPS; see `certificates`.
        link_bytes_per_s: all replies together; None: no limit.
        page_keys: most rows in a page of a listing.
        region: the server's own, for `environ`. Signatures for any region are good where
            `regions` does not say otherwise.
        domains: where ``bucket.domain`` in the Host header names a bucket.

    Attributes:
        faults: may be set at any time; each request meets those that are set when it arrives.
        log: of all requests.
        keys: by access key; may be changed at any time.
        allow_unsigned: else unsigned requests are refused.
        max_skew_s: how far a signature's time may be from ours.
        clock_offset_s: how far our time is from the clock's, as a client with a wrong clock sees.
        regions: bucket to region: signatures for another one get 301 with the right one.
        store: the objects; `put` is its shorter form.
        crashes: errors of the rig itself; `stop` raises the first one.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        keys: Sequence[AccessKey] = (_DEFAULT_KEY,),
        tls: ssl.SSLContext | None = None,
        link_bytes_per_s: float | None = None,
        page_keys: int = 1000,
        region: str = "us-east-1",
        domains: Sequence[str] = ("s3.localhost",),
    ) -> None:
        super().__init__(RigConnection, tls)
        self.clock: Clock = clock or SystemClock()
        self.log = RequestLog(self.clock)
        self.faults: Sequence[Fault] = ()
        self.keys = {key.access_key: key for key in keys}
        self._first_key = keys[0] if keys else None
        self.region = region
        self.page_keys = page_keys
        self.domains = (*domains, f"s3.{region}.amazonaws.com", "s3.amazonaws.com")
        self.allow_unsigned = False
        self.max_skew_s = 900.0
        self.clock_offset_s = 0.0
        self.regions: dict[str, str] = {}
        self.store = Store()
        self._service = Service(self)
        self.crashes: list[Exception] = []
        self.stopping = False
        self.link: Pace | None = None
        self._lock = threading.Lock()
        self._connections: set[RigConnection] = set()
        self._watch: HangUpWatch | None = None
        self._started_s = self.clock.monotonic_s()
        self.limit_link(link_bytes_per_s)

    # What a test arranges.

    def put(
        self,
        bucket: str,
        key: str,
        data: bytes | Content,
        *,
        etag: str | None = None,
        checksums: Collection[str] | Mapping[str, str] = (),
    ) -> StoredObject:
        """Store an object, making the bucket.

        Args:
            etag: with its quotes; else as S3 makes it, or for other content one of its size.
            checksums: algorithms of `objects.CHECKSUMS` to be reckoned (data in bytes only), or
                algorithm to text.
        """
        stored = self.store.put(bucket, key, data, etag=etag, checksums=checksums)
        assert stored is not None
        return stored

    def limit_link(self, bytes_per_s: float | None) -> None:
        """Set or lift the limit of all replies together; for replies that begin from now on."""
        now_s = self.clock.monotonic_s()
        self.link = None if bytes_per_s is None else Pace(bytes_per_s, now_s)

    def expire(self, access_key: str) -> None:
        """From now on this key's session token has expired."""
        key = self.keys[access_key]
        self.keys[access_key] = replace(key, expires_wall_s=float("-inf"))

    def arrange(self, faults: Sequence[Fault]) -> None:
        """Begin anew with these faults: an empty log, attempts from 1, seconds from 0."""
        self.faults = tuple(faults)
        self.log.clear()
        self.restart_time()

    def restart_time(self) -> None:
        """Count the seconds of `Fault.from_s` and ``until_s`` from now on."""
        self._started_s = self.clock.monotonic_s()

    def release(self) -> None:
        """Let go on all replies that stall now."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.release()

    def environ(self) -> dict[str, str]:
        """The ``AWS_*`` variables by which any S3 client finds and may use this server."""
        found = {
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        key = self._first_key
        if key is not None:
            found["AWS_ACCESS_KEY_ID"] = key.access_key
            found["AWS_SECRET_ACCESS_KEY"] = key.secret_key
            if key.token is not None:
                found["AWS_SESSION_TOKEN"] = key.token
        return found

    def start(self) -> None:
        self.stopping = False
        self._watch = HangUpWatch()
        super().start()
        self.restart_time()

    def stop(self) -> None:
        """End all connections, stalled ones too, and wait for their threads.

        Raises:
            Exception: what went wrong in the rig itself.
        """
        self.stopping = True
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.hang_up()
        super().stop()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        if self.crashes:
            raise self.crashes.pop(0)

    # For its connections.

    def attach(self, connection: RigConnection) -> int:
        """A connection has begun; returns its number."""
        with self._lock:
            self._connections.add(connection)
            if self.stopping:
                connection.hang_up()
            elif self._watch is not None:
                self._watch.add(connection.descriptor, connection.hang_up)
        return self.log.connected()

    def detach(self, connection: RigConnection) -> None:
        """A connection ends; its socket is still open."""
        with self._lock:
            self._connections.discard(connection)
        if self._watch is not None:
            self._watch.remove(connection.descriptor)
        self.log.disconnected()

    def begin(self, asked: Asked, connection: int) -> LoggedRequest:
        """Log a request that has arrived."""
        return self._service.begin(asked, connection)

    def answer(
        self, request: LoggedRequest, asked: Asked, body: bytes, trailer: Mapping[str, str]
    ) -> tuple[Plan, Reply]:
        """The reply to a request, with all harm that is done to it."""
        since_start_s = self.clock.monotonic_s() - self._started_s
        plan = plan_reply(self.faults, request, since_start_s)
        return plan, self._service.answer(plan, request, asked, body, trailer)
