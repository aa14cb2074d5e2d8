"""What can be wrong with a reply of the rig: frozen records, one kind of harm each.

A request may meet several of them at once; they combine:

* of `Error`, `Redirect` and `Garbage` the first one answers, and the rest does not matter but
  `FirstByte`, `Slower` and what comes before the head;
* of `FirstByte` and `Rate` the last one counts, and every `Slower` multiplies;
* of `Stall`, `Reset` and `Short` the one that is met first in the body happens;
* all others change the reply in the order of the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

__all__ = [
    "EXPIRED_TOKEN",
    "INTERNAL_ERROR",
    "KMS_DISABLED",
    "NO_SUCH_KEY",
    "SLOW_DOWN",
    "TOO_MANY_REQUESTS",
    "ACCESS_DENIED",
    "Choice",
    "Chunked",
    "Close",
    "ContentRange",
    "Effect",
    "Error",
    "Etag",
    "FirstByte",
    "Flip",
    "Garbage",
    "Headers",
    "IgnoreRange",
    "Lognormal",
    "Rate",
    "Redirect",
    "Reset",
    "Short",
    "Shorter",
    "Slower",
    "Stall",
    "Status",
    "Unframed",
]


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Seconds whose logarithm is normal: half of them below ``median_s``, a long tail above."""

    median_s: float
    sigma: float

    def draw(self, random: Random) -> float:
        return self.median_s * random.lognormvariate(0.0, self.sigma)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of ``seconds``, with ``weights`` (all alike where there are none)."""

    seconds: tuple[float, ...]
    weights: tuple[float, ...] | None = None

    def draw(self, random: Random) -> float:
        return random.choices(self.seconds, self.weights)[0]


@dataclass(frozen=True, slots=True)
class FirstByte:
    """The head comes so many seconds after the request, or as drawn anew for each request."""

    seconds: float | Lognormal | Choice


@dataclass(frozen=True, slots=True)
class Rate:
    """The body comes at so many bytes per second; 1 is one byte a second."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Slower:
    """First byte and `Rate` are so many times worse than they would be."""

    factor: float


@dataclass(frozen=True, slots=True)
class _At:
    """Where in the reply it happens.

    Attributes:
        after_bytes: of the body; negative: counted from its end, so -1 is before the last byte.
            None: before the head. A body that is not so long is not harmed.
        after_share: of the body's length, in [0, 1], instead.
    """

    after_bytes: int | None = 0
    after_share: float | None = None

    def offset(self, body_bytes: int) -> int | None:
        """Bytes of a body that go out before it happens; None: before the head.

        A number above ``body_bytes`` says that it never happens.
        """
        if self.after_share is not None:
            return int(self.after_share * body_bytes)
        if self.after_bytes is None or self.after_bytes >= 0:
            return self.after_bytes
        return max(0, body_bytes + self.after_bytes)


@dataclass(frozen=True, slots=True)
class Stall(_At):
    """Nothing more comes until the rig releases it, the client closes, or ``seconds`` are over."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Reset(_At):
    """The connection is reset."""


@dataclass(frozen=True, slots=True)
class Short(_At):
    """The connection is closed before the end; ``close_notify`` False: without TLS's farewell."""

    close_notify: bool = True


@dataclass(frozen=True, slots=True)
class Close:
    """The connection is closed after a good reply.

    Attributes:
        announced: whether the head says so. If not, the client's next request meets a closed
            connection, as after a server's idle time.
        close_notify: False leaves out TLS's farewell, as some servers do.
    """

    announced: bool = False
    close_notify: bool = True


@dataclass(frozen=True, slots=True)
class Shorter:
    """The body lacks its last bytes, and Content-Length (or the chunks) say that this is right."""

    less_bytes: int = 1


@dataclass(frozen=True, slots=True)
class Chunked:
    """Chunks instead of a Content-Length."""

    chunk_bytes: int = 10_000


@dataclass(frozen=True, slots=True)
class Unframed:
    """Neither length nor chunks: the body ends where the connection does.

    Attributes:
        close: False leaves it to the client to close, so that who reads to the end waits for ever.
    """

    close: bool = True


@dataclass(frozen=True, slots=True)
class IgnoreRange:
    """200 and the whole object, whatever range was asked."""


@dataclass(frozen=True, slots=True)
class Status:
    """Another status on a reply that is right otherwise, such as 200 with a Content-Range."""

    status: int


@dataclass(frozen=True, slots=True)
class ContentRange:
    """A Content-Range that is not the one asked for, or that tells of another total size."""

    shift_bytes: int = 0
    total_more_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Etag:
    """Another ETag than the object has; with its quotes."""

    etag: str = '"00000000000000000000000000000000"'


@dataclass(frozen=True, slots=True)
class Headers:
    """Headers set on the reply, over what it would have; None takes one away."""

    changes: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Flip:
    """One byte of the object, at this offset, has all its bits wrong. Only a checksum tells."""

    at_byte: int


@dataclass(frozen=True, slots=True)
class Garbage:
    """No HTTP at all: these bytes, then the end of the connection."""

    data: bytes = b"\x15\x03\x01\x00\x02\x02\x16 this is no reply\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Error:
    """A refusal with S3's error body.

    Attributes:
        status: from 300 on.
        code: S3's code; empty: no body.
        retry_after_s: for the header Retry-After.
        xml: more elements of the body.
    """

    status: int
    code: str = ""
    retry_after_s: int | None = None
    xml: str = ""


@dataclass(frozen=True, slots=True)
class Redirect:
    """301 or 307.

    Attributes:
        region: where the bucket is; None: the reply does not say.
        location: for the header Location.
        in_body: the region stands in the body as a 400 AuthorizationHeaderMalformed has it, and
            not in a header.
    """

    region: str | None = None
    status: int = 301
    location: str | None = None
    in_body: bool = False


Effect = (
    FirstByte
    | Rate
    | Slower
    | Stall
    | Reset
    | Short
    | Close
    | Shorter
    | Chunked
    | Unframed
    | IgnoreRange
    | Status
    | ContentRange
    | Etag
    | Headers
    | Flip
    | Garbage
    | Error
    | Redirect
)

SLOW_DOWN = Error(503, "SlowDown")
INTERNAL_ERROR = Error(500, "InternalError")
TOO_MANY_REQUESTS = Error(429, "TooManyRequests")
EXPIRED_TOKEN = Error(400, "ExpiredToken")
ACCESS_DENIED = Error(403, "AccessDenied")
NO_SUCH_KEY = Error(404, "NoSuchKey")
KMS_DISABLED = Error(400, "KMS.DisabledException")
