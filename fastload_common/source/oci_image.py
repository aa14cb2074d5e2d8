"""One artifact or image of a registry: its manifest, its layers, and their bytes by range.

    image = OciImage(parse_reference("oci://registry/repository:tag"), settings)
    for layer in image.manifest.layers:      # resolves the reference once; the digest pins it
        blob = image.blob(layer)             # an ObjectId, whose state is the layer's digest
        image.read(blob, ByteRange(0, 512))  # small, with retries
    receiver = image.open_receiver()         # for many bytes: one connection, one attempt a call

It is what the transfer needs of a source (`OpensReceivers`, `RemoteSource`), so that layers can be
read by receiver processes, hedged and retried like any object.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from fastload_common.clock import Clock, SystemClock
from fastload_common.config import Settings
from fastload_common.errors import ChecksumMismatchError, SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Receiver, RemoteReads
from fastload_common.source.oci_manifest import (
    ACCEPT,
    MANIFEST_LIMIT_BYTES,
    Descriptor,
    Index,
    Manifest,
    choose_manifest,
    own_platform,
    parse_document,
)
from fastload_common.source.oci_places import Place
from fastload_common.source.oci_reads import OciReads, state_of
from fastload_common.source.oci_reference import (
    OciReference,
    check_digest,
    digest_of,
    is_digest,
)
from fastload_common.source.oci_session import OciSession
from fastload_common.source.range_receiver import RangeReceiver
from fastload_common.source.small_reads import SmallReads
from fastload_common.units import MIB

__all__ = ["OciImage"]

_MOST_NESTED = 4
_CONFIG_LIMIT_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class _Resolved:
    """What the reference was found to mean, and where."""

    digest: str
    manifest: Manifest
    place: Place


class OciImage:
    """For any thread. Nothing is asked before it is needed; what is open belongs to a process.

    Args:
        reference: its folder does not matter here.
        settings: timeouts, attempts, anonymous, ``oci_*``.
        clock: for waits, receipts and the life of tokens.
    """

    def __init__(
        self, reference: OciReference, settings: Settings, clock: Clock | None = None
    ) -> None:
        self._reference = reference
        self._settings = settings
        self._clock = clock or SystemClock()
        self._session = OciSession(reference, settings, self._clock)
        self._small = SmallReads(self._session.small_calls, self._receiver)
        # By process: a lock that another thread held during a fork is of no use after it.
        self._locks: dict[int, threading.Lock] = {}
        self._resolved: _Resolved | None = None
        self._reads: dict[int, OciReads] = {}

    @property
    def uri(self) -> str:
        """As it was named; safe to print."""
        return self._reference.artifact_uri

    @property
    def digest(self) -> str:
        """Of what the reference named when it was first looked at: a manifest or an index.

        Raises:
            SourceError: as `manifest`.
        """
        return self._resolve().digest

    @property
    def manifest(self) -> Manifest:
        """The manifest for the wanted platform, checked against its digest. Resolved once.

        Raises:
            ObjectMissingError: no such repository, tag or digest.
            AccessDeniedError: credentials absent, wrong or not allowed.
            ChecksumMismatchError: not what its digest says.
            SourceError: no manifest, a damaged one, or none for the platform.
        """
        return self._resolve().manifest

    def config(self) -> bytes:
        """The artifact's configuration blob, checked; empty where there is none.

        Raises:
            SourceError: it could not be read, or is too large.
        """
        config = self.manifest.config
        if config is None:
            return b""
        if config.size_bytes > _CONFIG_LIMIT_BYTES:
            raise SourceError(
                f"the configuration of {self.uri} is too large: {config.size_bytes} bytes",
                limit_bytes=_CONFIG_LIMIT_BYTES,
            )
        return self.read_whole(config)

    def blob(self, descriptor: Descriptor) -> ObjectId:
        """A layer or the configuration as an object; its ``etag`` is the digest."""
        digest = descriptor.digest
        uri = f"oci://{self._reference.registry}/{self._reference.repository}@{digest}"
        return ObjectId(uri, state_of(digest), descriptor.size_bytes)

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        """Read a small range of a blob with retries. Ranges cannot be checked against a digest.

        Raises:
            SourceError: when retries are used up or the fault is permanent.
        """
        self._reads_of_process()
        return self._small.read(object_id, byte_range)

    def read_whole(self, descriptor: Descriptor) -> bytes:
        """Read a small blob and check its digest; see `read_checked`."""
        return self.read_checked(self.blob(descriptor))

    def read_checked(self, object_id: ObjectId) -> bytes:
        """Read a small object that is a whole blob, and check its digest.

        One damaged reply must not end a load; a mirror that is wrong twice is not asked for this
        blob any more.

        Raises:
            ChecksumMismatchError: it is not what its digest says, at the registry too.
            SourceError: as `read`.
        """
        digest = object_id.etag or ""
        choice = self._reads_of_process().choice
        doubted: set[Place] = set()
        while True:
            place = choice.place(digest)
            choice.forget_senders(digest)
            data = self._small.read(object_id)
            facts = {"uri": object_id.uri, "endpoint": choice.senders(digest)}
            try:
                check_digest(data, digest, f"a blob of {self.uri}", **facts)
            except ChecksumMismatchError as error:
                if choice.place(digest) != place:
                    continue  # a part of it came from each
                if place in doubted and not choice.give_up(place, digest, error):
                    raise
                doubted.add(place)
            else:
                return data

    def doubt(self, object_id: ObjectId, error: SourceError) -> bool:
        """Have a blob that came wrong read from the next place; whether there is one."""
        digest, choice = object_id.etag or "", self._reads_of_process().choice
        if not choice.give_up(choice.place(digest), digest, error):
            return False
        choice.forget_senders(digest)
        return True

    def senders(self, object_id: ObjectId) -> str:
        """See `TellsSenders.senders`."""
        reads = self._reads.get(os.getpid())
        return reads.choice.senders((object_id.etag or "").partition("+")[0]) if reads else ""

    def open_receiver(self) -> Receiver:
        """A new connection for ranges of blobs; the caller owns it. See `Receiver`.

        A registry that ignores ranges raises `RangeMismatchError`; the range of a whole blob it can
        serve all the same, into a buffer of that size (such as a mapped file).
        """
        return self._receiver(self._settings)

    def remote_reads(self, object_id: ObjectId) -> RemoteReads:
        """See `RemoteSource.remote_reads`."""
        return self._reads_of_process()

    def facts(self) -> dict[str, str]:
        """For `doctor`; no secrets.

        Raises:
            SourceError, ConfigError: as `manifest`.
        """
        resolved = self._resolve()
        endpoint = resolved.place.endpoint
        return {
            "endpoint": str(endpoint),
            "digest": resolved.digest,
            "manifest": resolved.manifest.digest,
            "ca_bundle": self._session.ca_file(endpoint) or "none (plain HTTP)",
            "proxy": str(endpoint.proxy) if endpoint.proxy else "none",
        } | self._session.authorizer(resolved.place).facts()

    def close(self) -> None:
        """Close what this process has open; later calls open it anew."""
        self._small.close()
        self._session.close()

    def _receiver(self, settings: Settings) -> Receiver:
        return RangeReceiver(self._reads_of_process(), self._session.tls, settings, self._clock)

    def _reads_of_process(self) -> OciReads:
        resolved = self._resolve()
        pid = os.getpid()
        reads = self._reads.get(pid)
        if reads is None:
            manifest = resolved.manifest
            blobs = (*manifest.layers, *((manifest.config,) if manifest.config else ()))
            sizes = {blob.digest: blob.size_bytes for blob in blobs}
            attempts = self._settings.max_attempts
            made = OciReads(self._session, self.uri, resolved.place, sizes, attempts)
            reads = self._reads.setdefault(pid, made)
        return reads

    def _resolve(self) -> _Resolved:
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            found = self._resolved
            if found is None:
                found = self._resolved = self._session.from_any(self._resolve_at)
            return found

    def _resolve_at(self, place: Place) -> _Resolved:
        wanted = self._settings.oci_platform or own_platform()
        digest, document = self._document(place, self._reference.asked, None)
        first = digest
        for _ in range(_MOST_NESTED):
            if isinstance(document, Manifest):
                return _Resolved(first, document, place)
            chosen = choose_manifest(document, wanted, self.uri)
            digest, document = self._document(place, chosen.digest, chosen.size_bytes)
        raise SourceError(
            f"{self.uri} leads from index to index, more than {_MOST_NESTED} deep",
            hint="name the manifest's digest",
            index=first,
        )

    def _document(
        self, place: Place, asked: str, size_bytes: int | None
    ) -> tuple[str, Manifest | Index]:
        """A manifest or index, and its digest."""
        try:
            return self._fetch(place, asked, size_bytes)
        except ChecksumMismatchError:
            # One damaged reply must not end a load; what is wrong twice is how the server is.
            return self._fetch(place, asked, size_bytes)

    def _fetch(
        self, place: Place, asked: str, size_bytes: int | None
    ) -> tuple[str, Manifest | Index]:
        reply = self._session.get(
            place,
            place.path("manifests", asked),
            accept=ACCEPT,
            limit_bytes=MANIFEST_LIMIT_BYTES,
            asked=f"read the manifest of {self.uri}",
        )
        said = reply.headers.get("docker-content-digest", "")
        expected = asked if is_digest(asked) else said if is_digest(said) else ""
        digest = expected or digest_of(reply.body)
        facts = {"endpoint": str(place), "content_type": reply.headers.get("content-type")}
        check_digest(reply.body, digest, f"the manifest of {self.uri}", **facts)
        if size_bytes is not None and len(reply.body) != size_bytes:
            raise SourceError(
                f"the manifest of {self.uri} is not as large as its index says",
                digest=digest,
                expected_bytes=size_bytes,
                found_bytes=len(reply.body),
            )
        return digest, parse_document(reply.body, digest, self.uri)
