"""Where a bucket's objects are, and how requests for them are signed. Plain data, no botocore.

Resolved once by `s3_session`; everything after that (list, head, get) uses the same answer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from fastload_common.errors import ConfigError
from fastload_common.source.http_message import Endpoint

__all__ = ["S3Target", "SignedGet", "check_addressing"]


@dataclass(frozen=True, slots=True)
class S3Target:
    """One bucket as one client would reach it.

    Attributes:
        endpoint: where to connect; virtual-hosted style has the bucket in its host.
        base_path: what stands before the encoded key: ``/`` or ``/bucket/`` or more.
        region: region of the signature.
        service: service name of the signature.
        addressing: ``path`` or ``virtual``.
        credentials: how they were found (a provider's name), ``anonymous``, or ``none``.
        ca_bundle: file of certificate authorities; None for plain HTTP.
        generation: counts how often this was resolved anew.
    """

    endpoint: Endpoint
    base_path: str
    region: str
    service: str
    addressing: str
    credentials: str
    ca_bundle: str | None
    generation: int

    def path(self, key: str) -> str:
        """The request's path for a key, encoded as S3 signs it."""
        return self.base_path + _quoted(key)

    def facts(self) -> dict[str, str]:
        """For errors, the log and `doctor`; no secrets."""
        return {
            "endpoint": str(self.endpoint),
            "region": self.region,
            "credentials": self.credentials,
        }


@dataclass(frozen=True, slots=True)
class SignedGet:
    """A signed request for a range: all that a process without credentials needs to receive it.

    Valid for 15 minutes from signing. The headers hold a signature and are never shown.
    """

    target: S3Target
    path: str
    headers: Mapping[str, str] = field(repr=False)


@functools.lru_cache(maxsize=1024)
def _quoted(key: str) -> str:
    # Nothing is normalised: '//', '/./' and leading dots are parts of keys.
    return quote(key, safe="/~")


def check_addressing(s3_config: Mapping[str, Any] | None, bucket: str, **facts: Any) -> None:
    """Refuse a setting that cannot be followed, instead of overruling it in silence.

    Args:
        s3_config: the section ``s3`` of botocore's configuration.
        bucket: one that is asked for in path style, over TLS.

    Raises:
        ConfigError: virtual-hosted style was set, and the bucket's name has a dot.
    """
    if "." in bucket and (s3_config or {}).get("addressing_style") == "virtual":
        raise ConfigError(
            f"addressing_style = virtual cannot be used over TLS for the bucket {bucket}, whose "
            "name has a dot: a certificate's wildcard covers one label",
            hint="set addressing_style = path (or auto) in the section s3 of the AWS profile",
            **facts,
        )
