"""What a registry is told about who asks: its challenge, tokens, and their renewal.

A token is fetched once for all requests to a repository, used until shortly before its end, and
kept in memory only. Credentials go to the token service that the registry names and, for basic
authentication, to the registry; never to a store that it redirects to.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from fastload_common.clock import Clock
from fastload_common.errors import AccessDeniedError, SourceError
from fastload_common.source.http_message import Endpoint
from fastload_common.source.oci_credentials import Credential
from fastload_common.source.oci_errors import registry_error
from fastload_common.source.oci_http import HttpCaller, Reply
from fastload_common.source.oci_places import Place

__all__ = ["Authorizer", "Challenge", "parse_challenges"]

_LOG = logging.getLogger(__name__)
_CLIENT = "fastload"
_TOKEN_LIMIT_BYTES = 256 * 1024
# What the specification says where the service does not.
_DEFAULT_LIFE_S = 60.0
_MARGIN_S = 30.0
_MARGIN_SHARE = 0.25
# The first refusal tells how to ask, one more may be a token's or a credential's early end.
_MOST_RENEWALS = 2
_CHALLENGE = re.compile(
    r'([A-Za-z0-9_.-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))|([A-Za-z][A-Za-z0-9_-]*)'
)


@dataclass(frozen=True, slots=True)
class Challenge:
    """One way in which a server wants to be told who asks. ``scheme`` is in lower case."""

    scheme: str
    parameters: Mapping[str, str] = field(default_factory=dict)


def parse_challenges(text: str) -> list[Challenge]:
    """Parse a WWW-Authenticate header, which may hold several challenges."""
    found: list[tuple[str, dict[str, str]]] = []
    for match in _CHALLENGE.finditer(text):
        name, quoted, plain, scheme = match.groups()
        if scheme is not None:
            found.append((scheme.lower(), {}))
        elif found:
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
            found[-1][1].setdefault(name.lower(), value)
    return [Challenge(scheme, parameters) for scheme, parameters in found]


@dataclass(frozen=True, slots=True)
class _Token:
    header: str = field(repr=False)
    good_until_s: float = 0.0


class Authorizer:
    """Makes the Authorization headers for one repository at one place. For any thread.

    Args:
        place: whose credentials they are.
        find: looks for credentials; None: there are none.
        caller: asks the token service.
        make_endpoint: from host, port and whether TLS is used.
        clock: for the tokens' life.
        anonymous: no credentials are looked for.
    """

    def __init__(
        self,
        place: Place,
        find: Callable[[], Credential | None],
        caller: HttpCaller,
        make_endpoint: Callable[[str, int, bool], Endpoint],
        clock: Clock,
        *,
        anonymous: bool,
    ) -> None:
        self._place = place
        self._find = find
        self._caller = caller
        self._make_endpoint = make_endpoint
        self._clock = clock
        self._anonymous = anonymous
        self._lock = threading.RLock()
        self._challenge: Challenge | None = None
        self._credential: Credential | None = None
        self._has_looked = False
        self._token: _Token | None = None
        self._told: set[str] = set()

    def header(self) -> str | None:
        """What to send now; None: nothing, as far as is known. May ask the token service.

        Raises:
            AccessDeniedError: the credentials are refused, or cannot be sent.
            SourceError, ConfigError: the token service or a helper does not answer as it must.
        """
        with self._lock:
            if self._challenge is None:
                return None
            if self._challenge.scheme == "basic":
                credential = self._known()
                return _sendable(credential.basic, credential) if credential else None
            if self._token is None or self._clock.monotonic_s() >= self._token.good_until_s:
                self._token = self._fetch(self._challenge)
            return self._token.header

    def can_tell_now(self) -> bool:
        """Whether `header` would ask nobody."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._challenge is None:
                return True
            if self._challenge.scheme == "basic":
                return self._has_looked or self._anonymous
            token = self._token
            return token is not None and self._clock.monotonic_s() < token.good_until_s
        finally:
            self._lock.release()

    def challenged(self, text: str, sent: str | None, tried: set[str]) -> bool:
        """Take note of a 401; whether asking again with what `header` then gives may help.

        Args:
            text: the WWW-Authenticate header.
            sent: the Authorization header of the request.
            tried: what was done about earlier refusals of it; grows.
        """
        known = [c for c in parse_challenges(text) if c.scheme in ("bearer", "basic")]
        renewals = sum(one.startswith("auth") for one in tried)
        if not known or renewals >= _MOST_RENEWALS:
            return False
        tried.add(f"auth{renewals}")
        with self._lock:
            present = self._token.header if self._token else None
            if present is not None and present != sent:
                return True  # another request of the same time has renewed it
            if sent is not None:
                # A helper may give other credentials by now.
                self._has_looked, self._credential = False, None
            self._token = None
            # Bearer where there is a choice: a password is then sent once, not with each request.
            self._challenge = min(known, key=lambda one: one.scheme != "bearer")
            if self._challenge.scheme == "basic":
                credential = self._known()
                return credential is not None and credential.basic is not None
            return True

    def refused(self, sent: str | None, tried: set[str]) -> bool:
        """Take note of a 403, which some registries answer to an old token; as `challenged`."""
        if sent is None or "refused" in tried:
            return False
        tried.add("refused")
        with self._lock:
            known, token = self._credential, self._token
            if token is not None:
                if token.header == sent:
                    self._token, self._has_looked = None, False
                return True
            self._has_looked = False
            return self._known() != known

    def hint(self) -> str:
        """What to do where access is denied."""
        registry = self._place.registry
        if self._anonymous:
            return "it is not public: unset FASTLOAD_ANONYMOUS and log in (docker login)"
        with self._lock:
            if not self._has_looked:
                return f"is the repository's name right, and may these credentials read {registry}?"
            if self._credential is None:
                return (
                    f"no credentials for {registry} were found: docker login {registry}, or mount "
                    "the pull secret and set DOCKER_CONFIG to its directory"
                )
            return f"the credentials for {registry} come from {self._credential.origin}"

    def facts(self) -> dict[str, str]:
        """For `doctor`; no secrets."""
        with self._lock:
            scheme = self._challenge.scheme if self._challenge else "none asked for"
            found = self._credential.origin if self._credential else "none"
        return {"authentication": scheme, "registry_credentials": found}

    def _known(self) -> Credential | None:
        """The caller holds the lock, and so waits for a helper once."""
        if self._anonymous:
            return None
        if not self._has_looked:
            self._credential = self._find()
            self._has_looked = True
        return self._credential

    def _fetch(self, challenge: Challenge) -> _Token:
        credential = self._known()
        if credential is not None and credential.registry_token:
            header = _sendable(f"Bearer {credential.registry_token}", credential)
            return _Token(header or "", float("inf"))
        reply, realm = self._ask(challenge, credential)
        asked = f"get a token for {self._place.registry}/{self._place.repository}"
        facts = {"token_service": str(realm)}
        if not reply.is_success:
            hint = self.hint()
            raise registry_error(reply.status, reply.headers, reply.body, asked, hint, **facts)
        try:
            said = json.loads(reply.body)
            text = said.get("token") or said["access_token"]
            life_s = float(said.get("expires_in") or _DEFAULT_LIFE_S)
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # Without the cause: it may quote the token.
            raise SourceError(
                f"could not {asked}: the service's reply holds none",
                hint="does a proxy or a login page answer in its place?",
                **facts,
            ) from None
        life_s -= min(_MARGIN_S, life_s * _MARGIN_SHARE)
        header = _sendable(f"Bearer {text}", None, **facts)
        return _Token(header or "", self._clock.monotonic_s() + life_s)

    def _ask(self, challenge: Challenge, credential: Credential | None) -> tuple[Reply, Endpoint]:
        realm = urlsplit(challenge.parameters.get("realm", ""))
        try:
            port = realm.port
        except ValueError:
            port = None
        if realm.scheme not in ("http", "https") or not realm.hostname or realm.username:
            raise SourceError(
                f"the registry {self._place} names no token service that can be asked",
                hint="its WWW-Authenticate header must hold an http(s) realm",
            )
        tls = realm.scheme == "https"
        endpoint = self._make_endpoint(realm.hostname, port or (443 if tls else 80), tls)
        scope = f"repository:{self._place.repository}:pull"
        fields = {"scope": challenge.parameters.get("scope") or scope}
        if service := challenge.parameters.get("service"):
            fields["service"] = service
        path = realm.path or "/"
        if credential is not None:
            self._tell_of(endpoint)
        if credential is not None and credential.identity_token:
            fields |= {
                "grant_type": "refresh_token",
                "client_id": _CLIENT,
                "refresh_token": credential.identity_token,
            }
            form = urlencode(fields).encode()
            target = f"{path}?{realm.query}" if realm.query else path
            return self._caller.call(endpoint, target, {}, _TOKEN_LIMIT_BYTES, form), endpoint
        headers = {}
        if credential is not None and (basic := _sendable(credential.basic, credential)):
            headers["Authorization"] = basic
        query = "&".join(part for part in (realm.query, urlencode(fields)) if part)
        reply = self._caller.call(endpoint, f"{path}?{query}", headers, _TOKEN_LIMIT_BYTES)
        return reply, endpoint

    def _tell_of(self, realm: Endpoint) -> None:
        """Say once that another host is given the credentials, since its registry names it."""
        host, own = realm.authority, self._place.endpoint.authority
        if host == own or host in self._told:
            return
        self._told.add(host)
        _LOG.info("the registry %s has its tokens given by %s: credentials go there", own, host)


def _sendable(header: str | None, credential: Credential | None, **facts: str) -> str | None:
    """The header, unless it cannot be one; a character of it is never shown."""
    if header is None or (header.isascii() and header.isprintable()):
        return header
    origin = credential.origin if credential else "the token service"
    raise AccessDeniedError(
        f"the token from {origin} holds a line break or an unprintable character",
        hint="store it again without one",
        **facts,
    )
