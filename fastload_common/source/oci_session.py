"""One repository as one process reaches it: places, tokens, small requests with retries.

Plain data until it is used; what is open belongs to the process that opened it.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from fastload_common.clock import Clock
from fastload_common.config import Settings, environment
from fastload_common.errors import FastloadError, SourceError
from fastload_common.source.http_message import Endpoint
from fastload_common.source.oci_auth import Authorizer
from fastload_common.source.oci_credentials import find_credential
from fastload_common.source.oci_errors import registry_error, storage_error
from fastload_common.source.oci_http import HttpCaller, Reply
from fastload_common.source.oci_places import (
    Place,
    authorities_file,
    is_plain,
    places_of,
)
from fastload_common.source.oci_redirect import REDIRECTS, Way, follow
from fastload_common.source.oci_reference import OciReference
from fastload_common.source.proxies import find_proxy
from fastload_common.source.retries import SmallCalls
from fastload_common.source.tls import verifying_context

__all__ = ["MOST_REDIRECTS", "OciSession"]

MOST_REDIRECTS = 5

_LIMIT_BYTES = 64 * 1024
# Another place has the same: as for ranges, see `oci_choice`.
_MIRROR_ATTEMPTS = 3

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class _State:
    """What one process has open; never used after a fork."""

    def __init__(self, small_calls: SmallCalls, tls: Callable[[], ssl.SSLContext]) -> None:
        self.lock = threading.RLock()
        self.caller = HttpCaller(small_calls, tls)
        self.authorizers: dict[Place, Authorizer] = {}
        self.contexts: dict[str, ssl.SSLContext] = {}
        self.is_closed = False


class OciSession:
    """The servers that may have one repository. For any thread.

    Args:
        reference: which repository.
        settings: timeouts, attempts, anonymous, ``oci_*``.
        clock: for waits and the life of tokens.

    Attributes:
        small_calls: the patience of all small calls.
    """

    def __init__(self, reference: OciReference, settings: Settings, clock: Clock) -> None:
        self._reference = reference
        self._settings = settings
        self._clock = clock
        self.small_calls = SmallCalls(settings, clock)
        self._states: dict[int, _State] = {}

    def places(self) -> tuple[Place, ...]:
        """Mirrors in their order, and the registry."""
        return places_of(self._reference, self._settings, environment())

    def from_any(self, ask: Callable[[Place], _T]) -> _T:
        """What the first place gives that does not fail; the registry's own error counts.

        Raises:
            FastloadError: what ``ask`` raised of the last place.
        """
        *mirrors, registry = self.places()
        for mirror in mirrors:
            try:
                return ask(mirror)
            except SourceError as error:
                _LOG.warning("%s: the mirror is not used: %s", self._reference.artifact_uri, error)
        return ask(registry)

    def get(self, place: Place, path: str, *, accept: str, limit_bytes: int, asked: str) -> Reply:
        """A GET of a document, with retries, authorization and redirects; a success.

        Args:
            path: at the place.
            limit_bytes: of the document.
            asked: a verb phrase for the message.

        Raises:
            SourceError, ConfigError: mapped.
        """
        attempts = self.small_calls.begin(asked, _MIRROR_ATTEMPTS if place.is_mirror else None)
        tried: set[str] = set()
        while True:
            try:
                headers = {"Accept": accept}
                reply = self._ask(place, path, headers, limit_bytes, asked, tried)
            except FastloadError as error:
                attempts.wait_or_raise(error)
                continue
            if reply is not None:
                self.small_calls.answered = True
                return reply

    def locate(self, place: Place, path: str, asked: str) -> Way | None:
        """Where a blob is that a place redirects for; None: it is there itself. One attempt.

        Raises:
            SourceError, ConfigError: mapped.
        """
        headers = {"Range": "bytes=0-0"}
        tried: set[str] = set()
        while True:
            reply = self._ask(place, path, headers, _LIMIT_BYTES, asked, tried, follows=False)
            if reply is not None:
                break
        if reply.is_success:
            return None
        return self.follow(place, reply.headers.get("location"), place.endpoint, path)

    def authorizer(self, place: Place) -> Authorizer:
        """What makes the headers for a place, shared by all its requests of this process."""
        state = self._state()
        with state.lock:
            if place not in state.authorizers:
                registry, repository = place.registry, place.repository
                state.authorizers[place] = Authorizer(
                    place,
                    lambda: find_credential(registry, repository, environment()),
                    state.caller,
                    lambda host, port, tls: self._way_to(place, host, port, tls),
                    self._clock,
                    anonymous=self._settings.anonymous,
                )
            return state.authorizers[place]

    def follow(self, place: Place, location: str | None, endpoint: Endpoint, target: str) -> Way:
        """Where a redirect of this place leads.

        Raises:
            SourceError: nowhere we go.
        """
        return follow(
            location,
            endpoint,
            target,
            lambda host, port, tls: self._way_to(place, host, port, tls),
            self._clock.wall_s(),
        )

    def now_s(self) -> float:
        """The wall clock, by which signed URLs end."""
        return self._clock.wall_s()

    def ca_file(self, endpoint: Endpoint) -> str | None:
        """The authorities for connections to this endpoint; None for plain HTTP."""
        return authorities_file(environment()) if endpoint.tls else None

    def tls(self, ca_file: str | None) -> ssl.SSLContext | None:
        """The context for connections of this process; None for plain HTTP."""
        if ca_file is None:
            return None
        state = self._state()
        with state.lock:
            if ca_file not in state.contexts:
                state.contexts[ca_file] = verifying_context(ca_file)
            return state.contexts[ca_file]

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called in this process and nothing since has opened it anew."""
        return os.getpid() not in self._states

    def close(self) -> None:
        """Close what this process has open; later calls open it anew."""
        state = self._states.pop(os.getpid(), None)
        if state is not None:
            state.caller.close()

    def _state(self) -> _State:
        pid = os.getpid()
        found = self._states.get(pid)
        if found is None:
            found = self._states.setdefault(pid, _State(self.small_calls, self._own_tls))
        return found

    def _own_tls(self) -> ssl.SSLContext:
        context = self.tls(authorities_file(environment()))
        assert context is not None
        return context

    def _way_to(self, place: Place, host: str, port: int, tls: bool) -> Endpoint:
        """An endpoint that a registry names: in the open only where that was allowed."""
        name = f"[{host}]" if ":" in host else host
        if (
            not tls
            and place.endpoint.tls
            and not (
                is_plain(f"{name}:{port}", self._settings)
                or (port == 80 and is_plain(name, self._settings))
            )
        ):
            raise SourceError(
                f"the registry {place} leads from HTTPS to plain HTTP: {name}:{port}",
                hint=f"if that is meant, set FASTLOAD_OCI_PLAIN_HTTP={name}:{port}",
            )
        return Endpoint(host, port, tls, find_proxy(host, port, tls, environment()))

    def _ask(
        self,
        place: Place,
        path: str,
        headers: Mapping[str, str],
        limit_bytes: int,
        asked: str,
        tried: set[str],
        *,
        follows: bool = True,
    ) -> Reply | None:
        """One attempt; None: ask again, with what was learned.

        Args:
            follows: whether redirects are followed; else one is a success.
        """
        authorizer = self.authorizer(place)
        authorization = authorizer.header()
        endpoint, target = place.endpoint, path
        caller = self._state().caller
        for _ in range(MOST_REDIRECTS + 1):
            sent = dict(headers)
            # Not to another host: it is none of its business.
            if authorization is not None and endpoint == place.endpoint:
                sent["Authorization"] = authorization
            reply = caller.call(endpoint, target, sent, limit_bytes)
            if reply.status not in REDIRECTS or not follows:
                break
            way = self.follow(place, reply.headers.get("location"), endpoint, target)
            endpoint, target = way.endpoint, way.target
        else:
            raise SourceError(f"too many redirects: could not {asked}", endpoint=str(place))
        if reply.is_success or reply.status in REDIRECTS:
            return reply
        facts = {"endpoint": str(endpoint)}
        if endpoint != place.endpoint:
            sent_by = str(place)
            raise storage_error(reply.status, reply.headers, reply.body, asked, sent_by, **facts)
        challenge = reply.headers.get("www-authenticate", "")
        if reply.status == 401 and authorizer.challenged(challenge, authorization, tried):
            return None
        if reply.status == 403 and authorizer.refused(authorization, tried):
            return None
        hint = authorizer.hint()
        raise registry_error(reply.status, reply.headers, reply.body, asked, hint, **facts)
