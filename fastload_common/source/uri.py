"""Root and object URIs: text in, parts out. No I/O except to make a path absolute.

S3 URIs are taken literally, as the AWS tools take them: nothing is decoded, and ``?``, ``#``,
``%``, ``//`` are parts of the key. File URIs are percent-decoded, as RFC 8089 says.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes

from fastload_common.errors import ConfigError

__all__ = ["S3Location", "file_path", "file_uri", "parse_root", "s3_location"]

SUPPORTED = "s3://bucket/prefix, oci://registry/repository:tag, file:///directory, or a path"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ACCESS_POINT = re.compile(r"(arn:[^:/]+:s3[^:/]*:[^:/]*:[^:/]*:accesspoint[:/][^:/]+)(?:/(.*))?")


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket (or access-point ARN) and a key or prefix without slashes at its end."""

    bucket: str
    prefix: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"


def parse_root(uri: str) -> S3Location | Path:
    """Parse what an operator wrote as the root of a model.

    Raises:
        ConfigError: unknown scheme, no bucket, a file URI with a host, or ``/`` itself.
    """
    match = _SCHEME.fullmatch(uri)
    if match is None:
        return _directory(uri, uri)
    scheme, rest = match.group(1).lower(), match.group(2)
    if scheme == "s3":
        return s3_location(uri)
    if scheme == "file":
        return _directory(os.fsdecode(file_path(uri)), uri)
    if scheme == "oci":
        raise ConfigError(
            f"an artifact of a registry cannot stand here: {scheme}://{_harmless(rest)}",
            hint="name a directory or s3://bucket/prefix",
        )
    near = " (did you mean s3://?)" if scheme in ("s3a", "s3n") else ""
    raise ConfigError(
        f"unknown scheme {scheme}:// in {scheme}://{_harmless(rest)}{near}",
        hint=f"supported: {SUPPORTED}",
    )


def s3_location(uri: str) -> S3Location:
    """Split ``s3://bucket/prefix``; slashes at the end do not count.

    Raises:
        ConfigError: it is no such URI, or has no bucket.
    """
    match = _SCHEME.fullmatch(uri)
    if match is None or match.group(1).lower() != "s3":
        raise ConfigError(f"not an S3 URI: {uri}", hint="write s3://bucket/prefix")
    rest = match.group(2)
    access_point = _ACCESS_POINT.fullmatch(rest)
    if access_point is not None:
        bucket, prefix = access_point.group(1), access_point.group(2) or ""
    else:
        bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise ConfigError(f"no bucket in {uri}", hint="write s3://bucket/prefix")
    if access_point is None and not {":", "@"}.isdisjoint(bucket):
        # Not shown: a key has slashes, so no part of this is known to be harmless.
        raise ConfigError(
            "what stands for the bucket after s3:// holds ':' or '@'",
            hint="write s3://bucket/prefix; credentials come from AWS_ACCESS_KEY_ID, AWS_PROFILE "
            "or the pod's role, an endpoint from AWS_ENDPOINT_URL_S3",
        )
    return S3Location(bucket, prefix.rstrip("/"))


def is_file_uri(uri: str) -> bool:
    """Whether a source's root or an object's URI is one of the file system's."""
    return uri.startswith("file:")


def file_path(uri: str) -> Path:
    """The path that a ``file:///...`` URI names.

    Raises:
        ConfigError: it names another host or no absolute path.
    """
    match = _SCHEME.fullmatch(uri)
    host, slash, rest = (match.group(2) if match else "").partition("/")
    if host.lower() not in ("", "localhost") or not slash:
        raise ConfigError(
            f"not a file URI of this host with an absolute path: {uri}",
            hint="write file:///directory, with three slashes",
        )
    return Path(os.fsdecode(b"/" + unquote_to_bytes(rest)))


def file_uri(path: Path) -> str:
    """The ``file:///...`` URI of an absolute path; `file_path` gives the path back exactly."""
    return path.as_uri()


def _harmless(rest: str) -> str:
    """What comes after ``scheme://``, without credentials and without a query, which may sign."""
    _, at, rest = rest.rpartition("@")
    address, query, _ = rest.partition("?")
    return f"{'***@' if at else ''}{address}{'?***' if query else ''}"


def _directory(text: str, shown: str) -> Path:
    # An unset variable in somebody's command must not become "read the whole machine".
    if not text.strip():
        raise ConfigError("the model's URI is empty", hint=f"supported: {SUPPORTED}")
    try:
        path = Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError:
        raise ConfigError(f"no home directory is known for {shown}", hint="write it out") from None
    except ValueError as error:
        raise ConfigError(f"not a path: {shown!r} ({error})") from None
    if path == Path(path.anchor):
        raise ConfigError(
            f"refusing the root of the file system as a model: {shown}",
            hint="name the model's directory",
        )
    return path
