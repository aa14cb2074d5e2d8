"""Requests for ranges of blobs that another process can make, and what their refusals mean.

The state of an `ObjectId` names the blob: its digest, and for a file inside of a tar layer the
offset there. So a range of a file is signed from nothing but its object.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from fastload_common.errors import SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Refusal
from fastload_common.source.http_message import Endpoint
from fastload_common.source.oci_choice import PlaceChoice
from fastload_common.source.oci_errors import registry_error, storage_error
from fastload_common.source.oci_http import common_headers
from fastload_common.source.oci_places import Place
from fastload_common.source.oci_redirect import REDIRECTS, Way
from fastload_common.source.oci_session import MOST_REDIRECTS, OciSession
from fastload_common.source.range_reply import range_header

__all__ = ["BlobPart", "OciReads", "OciSignedRead", "state_of"]

_STATE = re.compile(r"((?:sha256|sha512):[0-9a-f]+)(?:\+([0-9]{1,19}))?")
_MOST_NEW_WAYS = 2


@dataclass(frozen=True, slots=True)
class BlobPart:
    """A blob, and where in it an object begins."""

    digest: str
    offset_bytes: int


def state_of(digest: str, offset_bytes: int | None = None) -> str:
    """The ``etag`` of an object that is a blob, or that begins in one at this offset."""
    return digest if offset_bytes is None else f"{digest}+{offset_bytes}"


class OciReads:
    """Implements `RemoteReads` for the blobs of one artifact. For any thread.

    Args:
        session: its repository.
        uri: the artifact, for messages.
        place: where its manifest came from; asked first.
        sizes: its blobs with their bytes.
        max_attempts: of the settings.

    Attributes:
        choice: who is asked for a blob.
    """

    def __init__(
        self,
        session: OciSession,
        uri: str,
        place: Place,
        sizes: Mapping[str, int],
        max_attempts: int,
    ) -> None:
        self._session = session
        self._uri = uri
        self._sizes = sizes
        places = session.places()
        self.choice = PlaceChoice(uri, places[places.index(place) :], max_attempts)
        self._lock = threading.Lock()
        self._ways: dict[tuple[Place, str], Way] = {}
        self._redirecting: set[tuple[Place, str]] = set()

    def sign(self, object_id: ObjectId, byte_range: ByteRange) -> OciSignedRead:
        """See `RemoteReads.sign`."""
        part = self._part(object_id)
        while True:
            place = self.choice.place(part.digest)
            try:
                way = self._known_way(place, part.digest)
                if way is None and (place, part.digest) in self._redirecting:
                    way = self._find_way(place, part.digest)
                return self._signed(object_id, byte_range, part, place, way)
            except SourceError as error:
                end = byte_range.end + part.offset_bytes
                if not self.choice.failed(place, part.digest, end, error):
                    raise

    def sign_now(self, object_id: ObjectId, byte_range: ByteRange) -> OciSignedRead | None:
        """See `RemoteReads.sign_now`."""
        part = self._part(object_id)
        place = self.choice.place(part.digest)
        way = self._known_way(place, part.digest)
        if way is None:
            is_direct = (place, part.digest) not in self._redirecting
            if not (is_direct and self._session.authorizer(place).can_tell_now()):
                return None
        return self._signed(object_id, byte_range, part, place, way)

    # What was learned of refusals

    def learn_way(self, place: Place, digest: str, way: Way) -> None:
        """Where a blob is; asked there until its URL ends, and for a new one after that."""
        with self._lock:
            self._redirecting.add((place, digest))
            self._ways[place, digest] = way

    def forget_way(self, place: Place, digest: str, way: Way) -> None:
        """A signed URL is refused: have the next request ask for another."""
        with self._lock:
            if self._ways.get((place, digest)) == way:
                del self._ways[place, digest]

    def _known_way(self, place: Place, digest: str) -> Way | None:
        with self._lock:
            way = self._ways.get((place, digest))
            if way is None:
                return None
            is_good = self._session.now_s() < way.good_until_s
            if way.once or not is_good:
                del self._ways[place, digest]
            return way if is_good else None

    def _find_way(self, place: Place, digest: str) -> Way | None:
        """Ask a place where a blob is, by a request for one byte; None: it is at the place."""
        asked = f"find where {digest} of {self._uri} is"
        way = self._session.locate(place, place.path("blobs", digest), asked)
        with self._lock:
            if way is None:
                self._redirecting.discard((place, digest))
            elif not way.once:
                self._ways[place, digest] = way
        return way

    def _part(self, object_id: ObjectId) -> BlobPart:
        match = _STATE.fullmatch(object_id.etag or "")
        if match is None or match.group(1) not in self._sizes:
            raise ValueError(f"{object_id.uri} is in no blob of {self._uri}")
        return BlobPart(match.group(1), int(match.group(2) or 0))

    def _signed(
        self,
        object_id: ObjectId,
        byte_range: ByteRange,
        part: BlobPart,
        place: Place,
        way: Way | None,
    ) -> OciSignedRead:
        start, end = byte_range.start + part.offset_bytes, byte_range.end + part.offset_bytes
        # Without a state: a digest names the bytes, and stores behind registries have other tags.
        stored = ObjectId(object_id.uri, None, self._sizes[part.digest])
        signed = OciSignedRead(
            self, self._session, stored, ByteRange(start, end), part.digest, place, way
        )
        self.choice.asks(part.digest, signed.endpoint)
        return signed


class OciSignedRead:
    """Implements `SignedRead`."""

    __slots__ = (
        "_authorization",
        "_digest",
        "_place",
        "_reads",
        "_session",
        "_way",
        "byte_range",
        "object_id",
    )

    def __init__(
        self,
        reads: OciReads,
        session: OciSession,
        object_id: ObjectId,
        byte_range: ByteRange,
        digest: str,
        place: Place,
        way: Way | None,
    ) -> None:
        self._reads = reads
        self._session = session
        self._digest = digest
        self._place = place
        self._way = way
        self.object_id = object_id
        self.byte_range = byte_range
        self._authorization: str | None = None
        # Not to the host of a redirect: its URL is all that it needs.
        if way is None or way.endpoint == place.endpoint:
            self._authorization = session.authorizer(place).header()

    @property
    def endpoint(self) -> Endpoint:
        return self._way.endpoint if self._way else self._place.endpoint

    @property
    def ca_file(self) -> str | None:
        return self._session.ca_file(self.endpoint)

    @property
    def path(self) -> str:
        return self._way.target if self._way else self._place.path("blobs", self._digest)

    @property
    def headers(self) -> Mapping[str, str]:
        headers = common_headers(self.endpoint) | {"Range": range_header(self.byte_range)}
        if self._authorization is not None:
            headers["Authorization"] = self._authorization
        return headers

    def judge(self, refusal: Refusal, tried: set[str]) -> SourceError | None:
        """See `SignedRead.judge`."""
        try:
            error = self._judge(refusal, tried)
        except SourceError as raised:
            error = raised
        return None if error is None or self.failed(error, tried) else error

    def failed(self, error: SourceError, tried: set[str]) -> bool:
        """See `SignedRead.failed`."""
        choice = self._reads.choice
        if not choice.failed(self._place, self._digest, self.byte_range.end, error):
            return False
        tried.clear()  # all of it was about this place
        return True

    def _judge(self, refusal: Refusal, tried: set[str]) -> SourceError | None:
        status, headers = refusal.status, refusal.headers
        if status in REDIRECTS:
            return self._follow(headers.get("location"), tried)
        asked = f"read {self.object_id.uri}"
        facts = {"endpoint": str(self.endpoint), "digest": self._digest}
        if self._way is not None:
            # Refused before its time, or after it by another clock: a new one, from the start.
            ways = sum(one.startswith("way") for one in tried)
            if status in (400, 401, 403, 404, 410) and ways < _MOST_NEW_WAYS:
                tried.add(f"way{ways}")
                self._reads.forget_way(self._place, self._digest, self._way)
                return None
            registry = str(self._place)
            return storage_error(status, headers, refusal.body, asked, registry, **facts)
        authorizer = self._session.authorizer(self._place)
        challenge = headers.get("www-authenticate", "")
        if status == 401 and authorizer.challenged(challenge, self._authorization, tried):
            return None
        if status == 403 and authorizer.refused(self._authorization, tried):
            return None
        hint = authorizer.hint()
        return registry_error(status, headers, refusal.body, asked, hint, **facts)

    def _follow(self, location: str | None, tried: set[str]) -> SourceError | None:
        hops = sum(one.startswith("hop") for one in tried)
        if hops >= MOST_REDIRECTS:
            return SourceError(f"too many redirects: could not read {self.object_id.uri}")
        tried.add(f"hop{hops}")
        way = self._session.follow(self._place, location, self.endpoint, self.path)
        self._reads.learn_way(self._place, self._digest, way)
        return None
