"""What one process has of one bucket: botocore's client, the target, and hooks into the client.

Never pickled, never used after a fork.
"""

from __future__ import annotations

import io
import ssl
import threading
from collections.abc import Iterator
from typing import Any

from fastload_common.errors import SourceError
from fastload_common.source.aws_session import discard_session
from fastload_common.source.s3_target import S3Target

__all__ = ["ProcessState"]

_LISTINGS = (b"ListBucketResult", b"<Error")
_LOOKED_AT_BYTES = 1000


class ProcessState:
    """Its fields are for `S3Session`, under the lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.session: Any = None
        self.client: Any = None
        self.timeouts_s = (0.0, 0.0)  # the client's: connecting, silence
        self.verify: str | None = None
        self.target: S3Target | None = None
        self.sendable: Any = None  # the last credentials that `check_sendable` let pass
        self.tls: ssl.SSLContext | None = None
        self.region: str | None = None
        self.generation = 0
        self.local = threading.local()
        self.is_closed = False

    def reset(self, region: str | None) -> None:
        """Forget what was found; the caller holds the lock. Calls in progress go on."""
        if region is None and self.session is not None:
            discard_session(self.session)
        self.session = self.client = self.target = self.tls = self.sendable = None
        self.region = region or self.region
        self.generation += 1

    def can_sign_now(self, *, anonymous: bool) -> bool:
        """Whether the endpoint is known and no key is to be renewed; never waits."""
        if self.target is None or self.session is None or not self.lock.acquire(blocking=False):
            return False
        try:
            if anonymous:
                return True
            credentials = self.session.get_credentials()
            needs_refresh = getattr(credentials, "refresh_needed", None)
            return credentials is not None and (needs_refresh is None or not needs_refresh())
        except Exception:  # noqa: BLE001  (signing tells it)
            return False
        finally:
            self.lock.release()

    def drop_client(self) -> None:
        """Have the next call make a client; the caller holds the lock."""
        client, self.client = self.client, None
        if client is not None:
            # A call of another thread that is just taking a connection fails, and is made again.
            client.close()

    def capture(self, request: Any, **_: Any) -> Any:
        """botocore's ``before-send``: keep the request, and reply for the network."""
        from botocore.awsrequest import AWSResponse

        self.local.request = request
        nothing: Any = {}
        return AWSResponse(request.url, 200, nothing, io.BytesIO())

    def require_listing(self, response_dict: Any, **_: Any) -> None:
        """botocore's ``before-parse``: what is neither a listing nor an error is no store's reply.

        botocore would take it for an empty listing, or has made a 500 of a page with status 200.
        """
        status = response_dict["status_code"]
        start = bytes(response_dict["body"][:_LOOKED_AT_BYTES])
        is_page = b"<html" in start.lower()
        if (status == 200 or (status == 500 and is_page)) and not any(
            name in start for name in _LISTINGS
        ):
            raise SourceError(
                "the endpoint's reply is no listing",
                hint="AWS_ENDPOINT_URL must name the store's S3 interface: a console, a login page "
                "or another service may answer there",
                content_type=response_dict["headers"].get("content-type"),
            )

    def only_when_asked(self, request: Any, **_: Any) -> Any:
        """botocore's ``before-send``: let only our own HeadBucket through, and where it leads.

        botocore asks for a bucket's region by HeadBucket whenever a store sends it away without
        naming one, for ever if the answer is the same.
        """
        from botocore.awsrequest import AWSResponse

        left = getattr(self.local, "region_requests", 0)
        if left:
            self.local.region_requests = left - 1
            return None
        nothing: Any = {}
        return AWSResponse(request.url, 404, nothing, _Nothing())


class _Nothing(io.BytesIO):
    """A body for botocore to read."""

    def stream(self) -> Iterator[bytes]:
        return iter(())
