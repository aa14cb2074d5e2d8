"""botocore for one bucket: credentials, endpoint, region, addressing, calls, signatures.

Guarantees: one resolver for listing, HEAD, PUT and ranged GETs, since the GETs go where botocore
itself would send them; clients are made when first needed, once per process, so that this object
survives fork and may be pickled; a signature is made with the credentials of that moment.

Knows botocore's public interface: sessions, clients, the ``before-send`` event, `S3SigV4Auth`.
"""

from __future__ import annotations

import io
import logging
import os
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastload_common import __version__
from fastload_common.config import Settings, environment
from fastload_common.errors import ConfigError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.aws_session import discard_session, make_client, shared_session
from fastload_common.source.http_message import Endpoint
from fastload_common.source.proxies import find_proxy, proxy_url
from fastload_common.source.range_reply import if_match, range_header
from fastload_common.source.s3_client_errors import client_error, fault_of
from fastload_common.source.s3_errors import is_expired_token
from fastload_common.source.s3_target import S3Target, SignedGet
from fastload_common.source.uri import S3Location

__all__ = ["S3Session"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

# The scope in a signature: .../20261130/eu-west-1/s3/aws4_request
_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^,]*/\d{8}/([^/,]+)/([^/,]+)/aws4_request")
_PROBE_KEY = "k"


class S3Session:
    """One bucket's botocore client and signer, lazily, per process.

    Args:
        location: the bucket; its prefix only appears in messages.
        settings: timeouts, attempts, anonymous.
    """

    def __init__(self, location: S3Location, settings: Settings) -> None:
        self._location = location
        self._settings = settings
        self._states: dict[int, _State] = {}

    def call(self, operation: str, asked: str, **parameters: Any) -> dict[str, Any]:
        """Call an operation of the client, such as ``head_object``, on this bucket.

        Raises:
            SourceError, ConfigError: mapped; ``asked`` is the message's verb phrase.
        """

        def run(client: Any) -> dict[str, Any]:
            reply = getattr(client, operation)(Bucket=self._location.bucket, **parameters)
            return dict(reply)

        return self._mapped(asked, run)

    def pages(self, asked: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """All pages of ``list_objects_v2``, by IsTruncated and token, however few keys each has."""

        def run(client: Any) -> list[dict[str, Any]]:
            paginator = client.get_paginator("list_objects_v2")
            return list(paginator.paginate(Bucket=self._location.bucket, **parameters))

        yield from self._mapped(asked, run)

    def target(self) -> S3Target:
        """Where the bucket is; resolved when first asked, and again after `renew`."""
        state = self._state()
        with state.lock:
            if state.target is None:
                asked = f"find the endpoint of {self._location.uri}"
                try:
                    state.target = self._resolve(state)
                except Exception as error:
                    raise client_error(error, asked, uri=self._location.uri) from error
                _LOG.info(
                    "%s: endpoint %s, region %s, %s addressing, credentials: %s",
                    self._location.uri,
                    state.target.endpoint,
                    state.target.region,
                    state.target.addressing,
                    state.target.credentials,
                )
            return state.target

    def sign_get(self, object_id: ObjectId, key: str, byte_range: ByteRange) -> SignedGet:
        """Sign a request for a range, with the credentials of this moment.

        Raises:
            SourceError, ConfigError: no credentials, or they could not be refreshed.
        """
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        target = self.target()
        path = target.path(key)
        headers = {"Range": range_header(byte_range)}
        if object_id.etag is not None:
            headers["If-Match"] = if_match(object_id.etag)
        if not self._settings.anonymous:
            frozen = self._frozen(target)
            request = AWSRequest("GET", f"{target.endpoint}{path}", headers=headers)
            S3SigV4Auth(frozen, target.service, target.region).add_auth(request)
            headers = {str(name): str(value) for name, value in request.headers.items()}
        # Not signed, because proxies may change them.
        headers |= {
            "Host": target.endpoint.authority,
            "Accept-Encoding": "identity",
            "User-Agent": f"fastload/{__version__}",
        }
        return SignedGet(target, path, headers)

    def tls(self) -> ssl.SSLContext | None:
        """The context for connections to the target, shared by all; None for plain HTTP."""
        target = self.target()
        state = self._state()
        if target.ca_bundle is None:
            return None
        with state.lock:
            if state.tls is None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                try:
                    context.load_verify_locations(target.ca_bundle)
                except (OSError, ssl.SSLError) as error:
                    raise ConfigError(
                        f"the CA bundle could not be loaded: {error}", ca_bundle=target.ca_bundle
                    ) from error
                state.tls = context
            return state.tls

    def renew(self, failed: S3Target, region: str | None = None) -> None:
        """Find everything anew after a request with this target failed for what it is.

        Several threads that failed with the same target cause one renewal.

        Args:
            region: where the store says that the bucket is.
        """
        state = self._state()
        with state.lock:
            if state.generation == failed.generation:
                state.reset(region)

    def learn_region(self) -> str | None:
        """Ask for the bucket's region, where a reply sent us away without naming one."""
        asked = f"find the region of {self._location.uri}"
        try:
            reply = self._mapped(
                asked, lambda client: client.head_bucket(Bucket=self._location.bucket)
            )
        except Exception:  # noqa: BLE001  (the caller reports the reply that sent us away)
            return None
        found = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
        return str(found) if found else None

    def close(self) -> None:
        state = self._states.pop(os.getpid(), None)
        if state is not None and state.client is not None:
            state.client.close()

    def __reduce__(self) -> tuple[type[S3Session], tuple[S3Location, Settings]]:
        return (S3Session, (self._location, self._settings))

    # One process's part

    def _state(self) -> _State:
        # A lock or a connection pool of the parent is of no use after a fork.
        pid = os.getpid()
        return self._states.get(pid) or self._states.setdefault(pid, _State())

    def _mapped(self, asked: str, run: Callable[[Any], _T]) -> _T:
        """Run with the client; once more with new credentials if the token had expired."""
        for last in (False, True):
            state = self._state()
            with state.lock:
                generation = state.generation
                facts = state.target.facts() if state.target is not None else {}
                try:
                    client = self._client(state)
                except Exception as error:
                    raise client_error(error, asked, uri=self._location.uri) from error
            try:
                return run(client)
            except Exception as error:
                fault = fault_of(error)
                if not last and fault is not None and is_expired_token(fault.code):
                    with state.lock:
                        if state.generation == generation:
                            state.reset(None)
                    continue
                facts = facts or {"endpoint": client.meta.endpoint_url}
                facts.setdefault("region", client.meta.region_name)
                facts.setdefault("credentials", self._method(state))
                raise client_error(error, asked, uri=self._location.uri, **facts) from error
        raise AssertionError("unreachable")

    def _client(self, state: _State) -> Any:
        """The client of this process; the caller holds the lock."""
        if state.client is None:
            from botocore import UNSIGNED
            from botocore.config import Config

            environ = environment()
            if state.session is None:
                state.session = shared_session()
            state.verify = _ca_bundle(state.session, environ.get("SSL_CERT_FILE"))
            settings = self._settings
            # AWS_REGION is read by every AWS tool but botocore.
            region = state.region or environ.get("AWS_REGION") or None
            config: Any = Config(
                connect_timeout=settings.connect_timeout_s,
                read_timeout=settings.read_timeout_s,
                retries={"mode": "standard", "total_max_attempts": settings.max_attempts},
                max_pool_connections=min(settings.concurrency, 64),
                user_agent_extra=f"fastload/{__version__}",
                signature_version=UNSIGNED if settings.anonymous else None,
            )
            parameters = {"service_name": "s3", "region_name": region, "verify": state.verify}
            client = make_client(state.session, **parameters, config=config)
            proxies = _proxies(client.meta.endpoint_url)
            if proxies is not None:
                config = config.merge(Config(proxies=proxies))
                client = make_client(state.session, **parameters, config=config)
            # We never GET through the client: this event shows where it would, and how signed.
            client.meta.events.register("before-send.s3.GetObject", state.capture)
            state.client = client
        return state.client

    def _resolve(self, state: _State) -> S3Target:
        """Let botocore prepare a GET, and read off where it goes; the caller holds the lock."""
        client = self._client(state)
        bucket = self._location.bucket
        client.get_object(Bucket=bucket, Key=_PROBE_KEY)
        request = state.captured.request
        url = urlsplit(request.url)
        tls = url.scheme == "https"
        host = url.hostname or ""
        port = url.port or (443 if tls else 80)
        virtual = host.startswith(f"{bucket.lower()}.")
        if virtual and tls and "." in bucket:
            raise ConfigError(
                f"a certificate cannot cover the host {host}: the bucket's name has dots",
                hint="set addressing_style = path (or auto) in the profile's s3 section",
                uri=self._location.uri,
            )
        authorization = request.headers.get("Authorization", b"")
        if isinstance(authorization, bytes):
            authorization = authorization.decode("latin-1")
        scope = _SCOPE.match(authorization)
        if scope is None and not self._settings.anonymous:
            raise ConfigError(
                "this bucket wants signatures other than AWS Signature Version 4",
                hint="multi-region access points and SigV2 are not supported",
                uri=self._location.uri,
            )
        if scope is not None and scope.group(2) == "s3express":
            raise ConfigError("directory buckets are not supported", uri=self._location.uri)
        return S3Target(
            endpoint=Endpoint(host, port, tls, find_proxy(host, port, tls, environment())),
            base_path=url.path.removesuffix(_PROBE_KEY),
            region=scope.group(1) if scope else client.meta.region_name,
            service=scope.group(2) if scope else "s3",
            addressing="virtual" if virtual else "path",
            credentials=self._method(state),
            ca_bundle=_ca_file(state.verify) if tls else None,
            generation=state.generation,
        )

    def _frozen(self, target: S3Target) -> Any:
        state = self._state()
        asked = f"sign a request for {self._location.uri}"
        try:
            with state.lock:
                self._client(state)
                credentials = state.session.get_credentials()
            # Outside the lock: this may ask a token service; botocore lets one thread do it.
            return credentials.get_frozen_credentials()
        except Exception as error:
            raise client_error(error, asked, uri=self._location.uri, **target.facts()) from error

    def _method(self, state: _State) -> str:
        if self._settings.anonymous:
            return "anonymous"
        try:
            found = state.session.get_credentials()
        except Exception:  # noqa: BLE001  (this is for a message about another failure)
            return "none"
        return str(found.method) if found is not None else "none"


class _State:
    """What one process has of one bucket. Never pickled, never used after a fork."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.session: Any = None
        self.client: Any = None
        self.verify: str | None = None
        self.target: S3Target | None = None
        self.tls: ssl.SSLContext | None = None
        self.region: str | None = None
        self.generation = 0
        self.captured = threading.local()

    def reset(self, region: str | None) -> None:
        """Forget what was found; the caller holds the lock. Calls in progress go on."""
        if region is None and self.session is not None:
            discard_session(self.session)
        self.session = self.client = self.target = self.tls = None
        self.region = region or self.region
        self.generation += 1

    def capture(self, request: Any, **_: Any) -> Any:
        """botocore's ``before-send``: keep the request, and reply for the network."""
        from botocore.awsrequest import AWSResponse

        self.captured.request = request
        nothing: Any = {}
        return AWSResponse(request.url, 200, nothing, io.BytesIO())


def _ca_bundle(session: Any, ssl_cert_file: str | None) -> str | None:
    """The configured file, as botocore finds it; else what other TLS programs are told."""
    found = session.get_config_variable("ca_bundle")
    found = found or environment().get("REQUESTS_CA_BUNDLE") or ssl_cert_file
    if not found:
        return None
    path = Path(found).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"the CA bundle {found} does not exist or is no file",
            hint="AWS_CA_BUNDLE, the profile's ca_bundle, REQUESTS_CA_BUNDLE or SSL_CERT_FILE "
            "names it",
        )
    return str(path)


def _ca_file(verify: str | None) -> str:
    from botocore.httpsession import get_cert_path

    return verify or str(get_cert_path(True))


def _proxies(endpoint_url: str) -> dict[str, str] | None:
    """What botocore must be told so that it takes the way that we take; None: nothing."""
    if not any(name.lower().endswith("_proxy") for name in environment()):
        return None
    url = urlsplit(endpoint_url)
    tls = url.scheme == "https"
    host, port = url.hostname or "", url.port or (443 if tls else 80)
    proxy = find_proxy(host, port, tls, environment())
    return {url.scheme: proxy_url(proxy, environment(), tls)} if proxy is not None else {}
