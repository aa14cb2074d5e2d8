"""botocore for one bucket: credentials, endpoint, region, addressing, calls, signatures.

Guarantees: one resolver for listing, HEAD, PUT and ranged GETs, since the GETs go where botocore
itself would send them; clients are made when first needed, once per process, so that this object
survives fork and may be pickled; a signature is made with the credentials of that moment.

Knows botocore's public interface: sessions, clients, the ``before-send`` event.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastload_common import __version__
from fastload_common.clock import Clock
from fastload_common.config import Settings, environment
from fastload_common.errors import ConfigError, FastloadError, SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.aws_session import make_client, shared_session
from fastload_common.source.http_message import Endpoint
from fastload_common.source.proxies import find_proxy, proxy_url
from fastload_common.source.range_reply import pinned_by, range_header
from fastload_common.source.retries import SmallCalls
from fastload_common.source.s3_client_errors import client_error, fault_of
from fastload_common.source.s3_credentials import check_sendable
from fastload_common.source.s3_errors import S3Fault, is_expired_token
from fastload_common.source.s3_process_state import ProcessState
from fastload_common.source.s3_target import S3Target, SignedGet, check_addressing
from fastload_common.source.sigv4 import signed_headers
from fastload_common.source.tls import BUNDLE_HINT, verifying_context
from fastload_common.source.uri import S3Location

__all__ = ["S3Session"]

_LOG = logging.getLogger(__name__)

# The scope in a signature: .../20261130/eu-west-1/s3/aws4_request
_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^,]*/\d{8}/([^/,]+)/([^/,]+)/aws4_request")
_PROBE_KEY = "k"
_USER_AGENT = f"fastload/{__version__}"


class S3Session:
    """One bucket's botocore client and signer, lazily, per process.

    Args:
        location: the bucket; its prefix only appears in messages.
        settings: timeouts, attempts, anonymous.
        clock: for the waits between attempts.

    Attributes:
        small_calls: the patience of all small calls of this source.
    """

    def __init__(self, location: S3Location, settings: Settings, clock: Clock) -> None:
        self._location = location
        self._settings = settings
        self.small_calls = SmallCalls(settings, clock)
        self._states: dict[int, ProcessState] = {}

    def call(self, operation: str, asked: str, **parameters: Any) -> dict[str, Any]:
        """Call an operation of the client, such as ``head_object``, on this bucket, with retries.

        Raises:
            SourceError, ConfigError: mapped; ``asked`` is the message's verb phrase.
        """
        renewed: set[str] = set()
        attempts = self.small_calls.begin(asked)
        state = self.state()
        while True:
            try:
                return self._call_once(operation, asked, parameters, renewed)
            except _RenewedError:
                continue
            except FastloadError as error:
                if state.is_closed:
                    raise  # another attempt would make a client that nobody closes
                attempts.wait_or_raise(error)

    def pages(self, asked: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """All pages of ``list_objects_v2``, by IsTruncated and token, however few keys each has.

        Not botocore's paginator, so that one page is asked for again and not all of them.
        """
        token: str | None = None
        while True:
            continuing = {"ContinuationToken": token} if token is not None else {}
            page = self.call("list_objects_v2", asked, **parameters, **continuing)
            yield page
            if not page.get("IsTruncated"):
                return
            last, token = token, page.get("NextContinuationToken")
            if token is None or token == last:
                raise SourceError(
                    f"could not {asked}: the store says that there is more, but not where",
                    uri=self._location.uri,
                )

    def target(self, asked: str = "") -> S3Target:
        """Where the bucket is; resolved when first asked, and anew when it proved wrong.

        Args:
            asked: what for, as a verb phrase for the message.
        """
        state = self.state()
        with state.lock:
            if state.target is None:
                asked = asked or f"find the endpoint of {self._location.uri}"
                try:
                    state.target = self._resolve(state)
                except Exception as error:  # noqa: BLE001  (raised again, mapped)
                    # Without the cause: what it says may hold headers, and an endpoint's password.
                    raise client_error(error, asked, uri=self._location.uri) from None
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
        target = self.target()
        path, host = target.path(key), target.endpoint.authority
        headers = {"Range": range_header(byte_range), "If-Match": pinned_by(object_id)}
        if not self._settings.anonymous:
            frozen = self._frozen(target)
            headers = signed_headers(
                path,
                host,
                headers,
                access_key=frozen.access_key,
                secret_key=frozen.secret_key,
                token=frozen.token,
                region=target.region,
                service=target.service,
                wall_s=self.small_calls.clock.wall_s(),
            )
        # Not signed, because proxies may change them.
        headers["Host"] = host
        headers["Accept-Encoding"] = "identity"
        headers["User-Agent"] = _USER_AGENT
        return SignedGet(target, path, headers)

    def can_sign_now(self) -> bool:
        """Whether `sign_get` would ask nobody."""
        return self.state().can_sign_now(anonymous=self._settings.anonymous)

    def tls(self) -> ssl.SSLContext | None:
        """The context for connections to the target, shared by all; None for plain HTTP."""
        target = self.target()
        state = self.state()
        if target.ca_bundle is None:
            return None
        with state.lock:
            if state.tls is None:
                state.tls = verifying_context(target.ca_bundle)
            return state.tls

    def learn_region(self) -> str | None:
        """Ask for the bucket's region, where a reply sent us away without naming one."""
        state = self.state()
        try:
            with state.lock:
                client = self._client(state)
            state.local.region_requests = 2  # where we are, and where that sends us
            reply = client.head_bucket(Bucket=self._location.bucket)
        except Exception as error:  # noqa: BLE001  (the caller reports what sent us away)
            fault = fault_of(error)
            return fault.region if fault is not None else None
        finally:
            state.local.region_requests = 0
        found = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
        return str(found) if found else None

    def renew_for(self, fault: S3Fault, failed: S3Target, renewed: set[str]) -> bool:
        """Whether asking once more, elsewhere or with new credentials, may help; then that is set.

        Args:
            renewed: what was tried already for this request; grows.
        """
        if is_expired_token(fault.code) and "token" not in renewed:
            renewed.add("token")
            self._renew(failed, None)
            return True
        if fault.is_elsewhere and "region" not in renewed:
            renewed.add("region")
            if self.state().region not in (None, failed.region):
                return True  # another request of the same time has found it already
            region = fault.region or self.learn_region()
            if region is not None and region != failed.region:
                self._renew(failed, region)
                return True
        return False

    def close(self) -> None:
        state = self._states.pop(os.getpid(), None)
        if state is not None:
            state.is_closed = True
            if state.client is not None:
                state.client.close()

    # One process's part

    def state(self) -> ProcessState:
        """What is open in this process, to see whether it is closed."""
        # A lock or a connection pool of the parent is of no use after a fork.
        pid = os.getpid()
        return self._states.get(pid) or self._states.setdefault(pid, ProcessState())

    def _renew(self, failed: S3Target, region: str | None) -> None:
        state = self.state()
        with state.lock:
            # Several threads that failed with the same target cause one renewal.
            if state.generation == failed.generation:
                state.reset(region)

    def _call_once(
        self, operation: str, asked: str, parameters: dict[str, Any], renewed: set[str]
    ) -> dict[str, Any]:
        target = self.target(asked)
        state = self.state()
        try:
            with state.lock:
                client = self._client(state)
            reply = dict(getattr(client, operation)(Bucket=self._location.bucket, **parameters))
            self.small_calls.answered = True
            return reply
        except Exception as error:  # noqa: BLE001  (raised again, mapped)
            fault = fault_of(error)
            if fault is None and state.timeouts_s != self.small_calls.timeouts_s():
                # It was made for a store that had not answered yet; this one may be slow.
                with state.lock:
                    state.drop_client()
            if fault is not None and self.renew_for(fault, target, renewed):
                raise _RenewedError from None
            mapped = client_error(error, asked, uri=self._location.uri, **target.facts())
        # Not as the other one's consequence: its traceback holds the reply and the connection.
        raise mapped

    def _client(self, state: ProcessState) -> Any:
        """The client of this process; the caller holds the lock."""
        if state.client is None:
            from botocore import UNSIGNED
            from botocore.config import Config

            environ = environment()
            if state.session is None:
                state.session = shared_session()
            state.verify = _ca_bundle(state.session, environ.get("SSL_CERT_FILE"))
            settings = self._settings
            state.timeouts_s = self.small_calls.timeouts_s()
            # AWS_REGION is read by every AWS tool but botocore.
            region = state.region or environ.get("AWS_REGION") or None
            config: Any = Config(
                connect_timeout=state.timeouts_s[0],
                read_timeout=state.timeouts_s[1],
                # We retry ourselves: botocore retries what cannot help, such as bad certificates.
                retries={"mode": "standard", "total_max_attempts": 1},
                max_pool_connections=min(settings.concurrency or 32, 64),
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
            client.meta.events.register("before-send.s3.HeadBucket", state.only_when_asked)
            client.meta.events.register_first(
                "before-parse.s3.ListObjectsV2", state.require_listing
            )
            state.client = client
        return state.client

    def _resolve(self, state: ProcessState) -> S3Target:
        """Let botocore prepare a GET, and read off where it goes; the caller holds the lock."""
        client = self._client(state)
        bucket = self._location.bucket
        if not self._settings.anonymous and (found := state.session.get_credentials()) is not None:
            check_sendable(found.get_frozen_credentials(), found.method, uri=self._location.uri)
        client.get_object(Bucket=bucket, Key=_PROBE_KEY)
        request = state.local.request
        url = urlsplit(request.url)
        tls = url.scheme == "https"
        host = url.hostname or ""
        port = url.port or (443 if tls else 80)
        virtual = host.startswith(f"{bucket.lower()}.")
        if tls and not virtual:
            check_addressing(client.meta.config.s3, bucket, uri=self._location.uri)
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
            region=scope.group(1) if scope else _region_of(client),
            service=scope.group(2) if scope else "s3",
            addressing="virtual" if virtual else "path",
            credentials=self._method(state),
            ca_bundle=_ca_file(state.verify) if tls else None,
            generation=state.generation,
        )

    def _frozen(self, target: S3Target) -> Any:
        state = self.state()
        try:
            with state.lock:
                self._client(state)
                credentials = state.session.get_credentials()
            # Outside the lock: this may ask a token service; botocore lets one thread do it.
            frozen = credentials.get_frozen_credentials()
        except Exception as error:  # noqa: BLE001  (raised again, mapped)
            asked = f"sign a request for {self._location.uri}"
            raise client_error(error, asked, uri=self._location.uri, **target.facts()) from None
        if frozen != state.sendable:
            check_sendable(frozen, credentials.method, uri=self._location.uri, **target.facts())
            state.sendable = frozen
        return frozen

    def _method(self, state: ProcessState) -> str:
        if self._settings.anonymous:
            return "anonymous"
        try:
            found = state.session.get_credentials()
        except Exception:  # noqa: BLE001  (this is for a message about another failure)
            return "none"
        return str(found.method) if found is not None else "none"


class _RenewedError(Exception):
    """The request is to be made once more, with what was found meanwhile."""


def _region_of(client: Any) -> str:
    region = client.meta.region_name
    return "us-east-1" if region in (None, "aws-global") else str(region)


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
            hint=BUNDLE_HINT,
        )
    # Here, because botocore would take a file without certificates for a fault of the network.
    verifying_context(str(path))
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
