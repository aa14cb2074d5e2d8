"""Which proxy, if any, stands before an endpoint: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY.

One answer for every kind of request. Lower-case variables win, as in curl. NO_PROXY takes names
(with everything below them), addresses, networks (``10.0.0.0/8``) and ``*``.
Not supported: a proxy that is itself spoken to over TLS, and SOCKS.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from fastload_common.errors import ConfigError
from fastload_common.source.http_message import Proxy

__all__ = ["find_proxy", "proxy_url"]


def find_proxy(host: str, port: int, tls: bool, environ: Mapping[str, str]) -> Proxy | None:
    """The proxy for connections to this endpoint.

    Raises:
        ConfigError: the variable's value is no proxy URL that we can use; names the variable.
    """
    if _excluded(host, port, environ.get("no_proxy") or environ.get("NO_PROXY") or ""):
        return None
    for name in ("https_proxy" if tls else "http_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            if value := environ.get(variable, "").strip():
                return _parse(value, variable)
    return None


def proxy_url(proxy: Proxy, environ: Mapping[str, str], tls: bool) -> str:
    """The URL of the proxy as the variable has it, for a client that takes URLs. Holds secrets."""
    for name in ("https_proxy" if tls else "http_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            if value := environ.get(variable, "").strip():
                return value if "://" in value else f"http://{value}"
    return f"http://{proxy}"


def _parse(value: str, variable: str) -> Proxy:
    # Never the value in a message: it may hold a password.
    hint = "write http://host:port, or http://user:password@host:port"
    url = urlsplit(value if "://" in value else f"http://{value}")
    try:
        port = url.port or 80
    except ValueError:
        raise ConfigError(f"{variable} has no valid port", hint=hint) from None
    if url.scheme != "http":
        raise ConfigError(f"{variable}: a proxy with the scheme {url.scheme}://", hint=hint)
    if not url.hostname:
        raise ConfigError(f"{variable} names no host", hint=hint)
    authorization = None
    if url.username is not None:
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return Proxy(url.hostname, port, authorization)


def _excluded(host: str, port: int, no_proxy: str) -> bool:
    host = host.lower().rstrip(".")
    for item in no_proxy.lower().replace(" ", ",").split(","):
        if not item:
            continue
        if item == "*" or _in_network(host, item):
            return True
        name, _, item_port = item.partition(":")
        if item_port and item_port != str(port):
            continue
        name = name.removeprefix("*").strip(".")
        if name and (host == name or host.endswith("." + name)):
            return True
    return False


def _in_network(host: str, item: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(item.strip("[]"), strict=False)
    except ValueError:
        return False
