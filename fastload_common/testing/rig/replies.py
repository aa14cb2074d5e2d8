"""Replies: what S3 would say, and the same with harm done to it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from xml.sax.saxutils import escape

from fastload_common.ranges import ByteRange
from fastload_common.testing.rig.effects import (
    Chunked,
    Close,
    ContentRange,
    Error,
    Etag,
    Flip,
    Headers,
    IgnoreRange,
    Redirect,
    Shorter,
    Status,
    Unframed,
)
from fastload_common.testing.rig.faults import Plan
from fastload_common.testing.rig.objects import Content, Held, StoredObject

__all__ = ["Reply", "checksum_headers", "error_reply", "object_reply", "xml_reply"]

# Stands for a header that is taken away.
_ABSENT = "\0"


@dataclass(slots=True)
class Reply:
    """A reply before it is sent.

    Attributes:
        headers: names in lower case; without those of the framing.
        content: of the body; the reply's part of it is ``part``.
        flip_at: offset in ``content`` of a byte that goes out wrong.
        chunk_bytes: chunks instead of a Content-Length.
        framed: False: neither; the body ends with the connection.
        closes: who ends the connection after it: nobody, the server, or ``client``.
    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    content: Content = field(default_factory=lambda: Held(b""))
    part: ByteRange = field(default_factory=lambda: ByteRange(0, 0))
    flip_at: int | None = None
    chunk_bytes: int | None = None
    framed: bool = True
    closes: str = ""

    def head(self, number: int, wall_s: float) -> bytes:
        """Status line and headers, with the blank line."""
        headers = {
            "x-amz-request-id": f"RIG{number:013}",
            "date": formatdate(wall_s, usegmt=True),
            "server": "rig",
        }
        if self.chunk_bytes is not None:
            headers["transfer-encoding"] = "chunked"
        elif self.framed:
            headers["content-length"] = str(self.part.size_bytes)
        headers |= self.headers
        try:
            phrase = HTTPStatus(self.status).phrase
        except ValueError:
            phrase = "Unknown"
        lines = [f"HTTP/1.1 {self.status} {phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items() if value != _ABSENT]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def harm(self, plan: Plan) -> None:
        """Change what the plan's effects change of a head and of its framing.

        An error stays one: it takes only what belongs to the framing and `Headers`.
        """
        if self.status < 300:
            self._harm_object(plan)
        for effect in plan.effects:
            match effect:
                case Headers():
                    changed = {
                        k.lower(): _ABSENT if v is None else v for k, v in effect.changes.items()
                    }
                    self.headers |= changed
                case Chunked():
                    self.chunk_bytes = effect.chunk_bytes
                case Unframed():
                    self.framed, self.closes = False, "server" if effect.close else "client"
                case Close():
                    self.closes = "server"
                    if effect.announced:
                        self.headers["connection"] = "close"
                case _:
                    pass
        if self.chunk_bytes is not None and self.closes == "client":
            self.closes = ""  # chunks have an end: the client need not close to find it

    def _harm_object(self, plan: Plan) -> None:
        for effect in plan.effects:
            match effect:
                case Status():
                    self.status = effect.status
                case Etag():
                    self.headers["etag"] = effect.etag
                case Shorter():
                    end = max(self.part.start, self.part.end - effect.less_bytes)
                    self.part = ByteRange(self.part.start, end)
                case Flip():
                    self.flip_at = effect.at_byte
                case _:
                    pass


def object_reply(stored: StoredObject, asked: ByteRange | None, ranged: bool, plan: Plan) -> Reply:
    """The object, or the part that was asked for.

    Args:
        asked: None: nothing that it has.
        ranged: whether the request had a Range header.
    """
    size = stored.size_bytes
    headers = {
        "etag": stored.etag,
        "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "accept-ranges": "bytes",
        "content-type": "binary/octet-stream",
    } | stored.version_header()
    if plan.last(IgnoreRange):
        asked, ranged = ByteRange(0, size), False
    if asked is None:
        reply = error_reply(Error(416, "InvalidRange"), "")
        reply.headers["content-range"] = f"bytes */{size}"
        return reply
    if ranged:
        wrong = plan.last(ContentRange) or ContentRange()
        first, last = asked.start + wrong.shift_bytes, asked.end - 1 + wrong.shift_bytes
        headers["content-range"] = f"bytes {first}-{last}/{size + wrong.total_more_bytes}"
    return Reply(206 if ranged else 200, headers, stored.content, asked)


def checksum_headers(stored: StoredObject) -> dict[str, str]:
    """What S3 adds where x-amz-checksum-mode is ENABLED and the whole object is asked for."""
    if not stored.checksums:
        return {}
    found = {f"x-amz-checksum-{name}": value for name, value in stored.checksums.items()}
    return found | {"x-amz-checksum-type": "FULL_OBJECT"}


def xml_reply(status: int, document: bytes) -> Reply:
    """A whole document."""
    headers = {"content-type": "application/xml"}
    return Reply(status, headers, Held(document), ByteRange(0, len(document)))


def error_reply(error: Error | Redirect, resource: str) -> Reply:
    """A refusal with S3's error body."""
    if isinstance(error, Redirect):
        return _redirect_reply(error, resource)
    if not error.code:
        reply = Reply(error.status)
    else:
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{escape(error.code)}</Code>'
            f"<Message>{escape(error.code)} says the rig</Message>{error.xml}"
            f"<Resource>{escape(resource)}</Resource></Error>"
        )
        reply = xml_reply(error.status, text.encode())
    if error.retry_after_s is not None:
        reply.headers["retry-after"] = str(error.retry_after_s)
    return reply


def _redirect_reply(redirect: Redirect, resource: str) -> Reply:
    if redirect.in_body:
        xml = f"<Region>{redirect.region}</Region>"
        return error_reply(Error(400, "AuthorizationHeaderMalformed", xml=xml), resource)
    code = "TemporaryRedirect" if redirect.status == 307 else "PermanentRedirect"
    reply = error_reply(Error(redirect.status, code), resource)
    if redirect.region is not None:
        reply.headers["x-amz-bucket-region"] = redirect.region
    if redirect.location is not None:
        reply.headers["location"] = redirect.location
    return reply
