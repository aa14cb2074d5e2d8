"""What the network does, to our errors: names, connections, TLS, silence."""

from __future__ import annotations

import errno
import socket
import ssl

from fastload_common.errors import SourceError, SourceUnavailableError
from fastload_common.source.http_message import Endpoint

__all__ = ["CLOSED", "network_error"]

CLOSED = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""What a connection that the other side has given up raises."""


def network_error(
    error: OSError, endpoint: Endpoint, timeouts_s: tuple[float, float], *, aborted: bool
) -> SourceError:
    """The error to raise for what a socket raised.

    Args:
        timeouts_s: of connecting and of reading, for the message.
        aborted: whether somebody aborted this connection; then that is the cause.
    """
    proxy = str(endpoint.proxy) if endpoint.proxy else None
    if aborted:
        return SourceUnavailableError("the request was aborted", endpoint=str(endpoint))
    if isinstance(error, ssl.SSLCertVerificationError):
        return SourceError(
            f"certificate verify failed: {error.verify_message}",
            hint="set AWS_CA_BUNDLE to the file of the authority that signed it",
            endpoint=str(endpoint),
        )
    if isinstance(error, socket.gaierror):
        name = (endpoint.proxy or endpoint).host
        what = f"the name {name} was not resolved: {error.strerror}"
        hint = "check the endpoint's name and the cluster's DNS"
    else:
        what, hint = _explain(error, *timeouts_s)
    return SourceUnavailableError(what, hint=hint, endpoint=str(endpoint), proxy=proxy)


def _explain(error: OSError, connect_timeout_s: float, read_timeout_s: float) -> tuple[str, str]:
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused", "check the endpoint's host and port"
    if isinstance(error, TimeoutError | BlockingIOError):
        return (
            f"timed out (connecting: {connect_timeout_s:g} s, silence: {read_timeout_s:g} s)",
            "FASTLOAD_CONNECT_TIMEOUT_S and FASTLOAD_READ_TIMEOUT_S set these",
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"no socket: {error.strerror}", "raise the limit of open files (ulimit -n)"
    if isinstance(error, CLOSED):
        return "the connection was closed or reset by the other side", ""
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}", "is this an https endpoint?"
    return f"the connection failed: {error.strerror or error}", ""
