"""CONNECT: what is asked of a proxy, and what its refusals mean. No I/O."""

from __future__ import annotations

from fastload_common.errors import AccessDeniedError, SourceUnavailableError
from fastload_common.source.http_message import Endpoint, Proxy, ReplyHead, serialize_request

__all__ = ["check_tunnel", "connect_request"]


def connect_request(endpoint: Endpoint, proxy: Proxy) -> bytes:
    """The request for a tunnel to the endpoint."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    authority = f"{host}:{endpoint.port}"
    headers = {"Host": authority}
    if proxy.authorization is not None:
        headers["Proxy-Authorization"] = proxy.authorization
    return serialize_request("CONNECT", authority, headers)


def check_tunnel(head: ReplyHead, endpoint: Endpoint, proxy: Proxy) -> None:
    """Accept a reply that opens the tunnel.

    Raises:
        AccessDeniedError: the proxy wants other credentials.
        SourceUnavailableError: it refuses.
    """
    if head.status == 407:
        raise AccessDeniedError(
            "the proxy wants other credentials",
            hint="set them in HTTPS_PROXY: http://user:password@host:port",
            proxy=str(proxy),
            endpoint=str(endpoint),
        )
    if not 200 <= head.status < 300:
        raise SourceUnavailableError(
            "the proxy refused to connect to the endpoint",
            hint="add the endpoint to NO_PROXY if it can be reached directly",
            proxy=str(proxy),
            endpoint=str(endpoint),
            status=head.status,
        )
