"""Plain clients for the tests of the rig, on the standard library and botocore's signer."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.rig import AccessKey, Rig

DATA = bytes((i * 7 + i // 251) % 256 for i in range(100_000))
NAME = "bucket/m/key"
KEY = AccessKey("KEY", "the-secret")
# A reply that comes at all comes at once; this only ends a test that hangs.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


def connect(rig: Rig, tls: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
    if tls is None:
        return http.client.HTTPConnection("127.0.0.1", rig.port, timeout=PATIENCE_S)
    return http.client.HTTPSConnection("127.0.0.1", rig.port, timeout=PATIENCE_S, context=tls)


def ask(
    rig: Rig,
    target: str = f"/{NAME}",
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    body: bytes | None = None,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """One request on a connection of its own.

    Raises:
        OSError, http.client.HTTPException: there is no whole reply.
    """
    with contextlib.closing(connect(rig, tls)) as connection:
        return ask_on(connection, target, headers, method=method, body=body)


def ask_on(
    connection: http.client.HTTPConnection,
    target: str = f"/{NAME}",
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    body: bytes | None = None,
) -> Answer:
    connection.request(method, target, body=body, headers=dict(headers or {}))
    reply = connection.getresponse()
    read = reply.read()
    found = {name.lower(): value for name, value in reply.getheaders()}
    return Answer(reply.status, found, read)


def part(start: int, end: int) -> dict[str, str]:
    return {"Range": f"bytes={start}-{end - 1}"}


@contextlib.contextmanager
def sent(
    rig: Rig, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[socket.socket]:
    """A raw connection on which a GET of the object has been sent."""
    with contextlib.ExitStack() as stack:
        raw = socket.create_connection(("127.0.0.1", rig.port), timeout=PATIENCE_S)
        if tls is not None:
            raw = tls.wrap_socket(raw, server_hostname="127.0.0.1", suppress_ragged_eofs=False)
        stack.enter_context(raw)
        lines = [f"GET /{NAME} HTTP/1.1", "Host: rig"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        raw.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        yield raw


def trusting(authority: PrivateAuthority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.bundle))


def receive(raw: socket.socket, size_bytes: int) -> bytes:
    """So many bytes, or fewer where the connection ends before."""
    parts = bytearray()
    while len(parts) < size_bytes and (piece := raw.recv(size_bytes - len(parts))):
        parts += piece
    return bytes(parts)


def receive_head(raw: socket.socket) -> str:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = raw.recv(1)
        assert byte, f"the connection ended in the head: {head!r}"
        head += byte
    return head.decode()


def sign(
    rig: Rig,
    method: str,
    target: str,
    *,
    key: AccessKey = KEY,
    region: str = "us-east-1",
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
) -> dict[str, str]:
    """Headers of a request that botocore has signed."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    credentials = Credentials(key.access_key, key.secret_key, key.token)
    request = AWSRequest(method, rig.endpoint + target, dict(headers or {}), body)
    request.context["payload_signing_enabled"] = True
    S3SigV4Auth(credentials, "s3", region).add_auth(request)
    return dict(request.prepare().headers.items())


def boto_client(endpoint: str, key: AccessKey = KEY, verify: str | None = None) -> Any:
    """A boto3 client that tries once."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=key.access_key,
        aws_secret_access_key=key.secret_key,
        aws_session_token=key.token,
        verify=verify,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            proxies={},
            retries={"total_max_attempts": 1},
        ),
    )


def ends(rig: Rig) -> list[str | None]:
    """How each GET ended."""
    rig.log.wait_until_idle()
    return [request.ended for request in rig.log.gets()]
