"""Where an artifact may be had: mirrors first, then its registry. Settings in, addresses out."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from fastload_common.config import Settings
from fastload_common.errors import ConfigError
from fastload_common.source.http_message import Endpoint
from fastload_common.source.oci_reference import OciReference
from fastload_common.source.proxies import find_proxy
from fastload_common.source.tls import BUNDLE_HINT

__all__ = ["Place", "authorities_file", "endpoint_of", "is_plain", "places_of"]

DOCKER_HUB = "docker.io"
_DOCKER_HUB_HOST = "registry-1.docker.io"
_MIRROR_HINT = (
    "write registry=mirror, such as FASTLOAD_OCI_MIRRORS=registry.example=mirror.example:5000/proxy"
)
_MIRROR = re.compile(r"([^=/\s]+)=(?:https?://)?([^=/\s@?#]+)(/[^=\s@?#]*)?")


@dataclass(frozen=True, slots=True)
class Place:
    """One server that may have the artifact.

    Attributes:
        registry: what its credentials are filed under.
        endpoint: where it is.
        repository: what the artifact's repository is called there.
        namespace: the registry that it is a mirror of; None for the registry itself.
    """

    registry: str
    endpoint: Endpoint
    repository: str
    namespace: str | None = None

    @property
    def is_mirror(self) -> bool:
        return self.namespace is not None

    def path(self, kind: str, asked: str) -> str:
        """Of a request: ``kind`` is ``manifests`` or ``blobs``."""
        namespace = f"?ns={quote(self.namespace)}" if self.namespace else ""
        return f"/v2/{self.repository}/{kind}/{asked}{namespace}"

    def __str__(self) -> str:
        return str(self.endpoint)


def places_of(
    reference: OciReference, settings: Settings, environ: Mapping[str, str]
) -> tuple[Place, ...]:
    """The places to ask, in order; the registry itself is the last one.

    Raises:
        ConfigError: a mirror or a proxy is not set right.
    """
    repository = reference.repository
    if reference.registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    places = []
    for text in settings.oci_mirrors or ():
        match = _MIRROR.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"oci_mirrors: not a mirror: {text.split('@')[-1]}", hint=_MIRROR_HINT
            )
        registry, host, path = match.group(1).lower(), match.group(2).lower(), match.group(3) or ""
        if registry != reference.registry:
            continue
        folder = path.strip("/")
        endpoint = endpoint_of(host, settings, environ)
        name = f"{folder}/{repository}" if folder else repository
        places.append(Place(host, endpoint, name, reference.registry))
    host = _DOCKER_HUB_HOST if reference.registry == DOCKER_HUB else reference.registry
    endpoint = endpoint_of(host, settings, environ)
    return (*places, Place(reference.registry, endpoint, repository))


def endpoint_of(host: str, settings: Settings, environ: Mapping[str, str]) -> Endpoint:
    """Where a registry's host, with its port if it has one, is spoken to."""
    tls = not is_plain(host, settings)
    url = urlsplit(f"//{host}")
    try:
        port = url.port or (443 if tls else 80)
    except ValueError:
        raise ConfigError(f"{host} has no valid port", hint="write host:port") from None
    name = url.hostname or ""
    return Endpoint(name, port, tls, find_proxy(name, port, tls, environ))


def is_plain(host: str, settings: Settings) -> bool:
    """Whether the operator wants this host, with its port if it has one, without TLS."""
    return host.lower() in {one.lower() for one in settings.oci_plain_http or ()}


def authorities_file(environ: Mapping[str, str]) -> str:
    """The certificate authorities to trust: those that S3 is verified with, else the system's.

    Raises:
        ConfigError: the file that a variable names is not there.
    """
    for variable in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        if found := environ.get(variable):
            path = Path(found).expanduser()
            if not path.is_file():
                raise ConfigError(
                    f"the CA bundle {found} does not exist or is no file", hint=BUNDLE_HINT
                )
            return str(path)
    system = ssl.get_default_verify_paths()
    for known in (system.cafile, system.openssl_cafile, "/etc/ssl/certs/ca-certificates.crt"):
        if known and Path(known).is_file():
            return str(known)
    from botocore.httpsession import get_cert_path

    return str(get_cert_path(True))
