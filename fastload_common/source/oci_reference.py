"""What ``oci://registry/repository[:tag|@digest][/folder]`` names. No I/O."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastload_common.errors import ChecksumMismatchError, ConfigError, SourceError

__all__ = [
    "SCHEME",
    "OciReference",
    "check_digest",
    "digest_of",
    "hasher",
    "is_digest",
    "is_oci_uri",
    "parse_reference",
]

SCHEME = "oci://"
_HINT = "write oci://registry/repository:tag, or oci://registry/repository@sha256:..."
_REGISTRY = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*"
    r"|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
)
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"(sha256):[0-9a-f]{64}|(sha512):[0-9a-f]{128}")
_LONGEST_REPOSITORY = 255


@dataclass(frozen=True, slots=True)
class OciReference:
    """One artifact or image in a registry, and a folder of its files.

    Attributes:
        registry: host, with a port if it is not the usual one.
        repository: without the registry.
        tag: what the operator wrote, or ``latest``; None where a digest stands alone.
        digest: of the manifest or index; wins over the tag.
        folder: of the files in it; empty for all.
    """

    registry: str
    repository: str
    tag: str | None
    digest: str | None
    folder: str = ""

    @property
    def asked(self) -> str:
        """What a registry is asked for: the digest, else the tag."""
        return self.digest or self.tag or "latest"

    @property
    def artifact_uri(self) -> str:
        """Without the folder; safe to print."""
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{SCHEME}{self.registry}/{self.repository}{tag}{digest}"

    @property
    def uri(self) -> str:
        """With the folder, without a slash at its end; safe to print."""
        return f"{self.artifact_uri}/{self.folder}" if self.folder else self.artifact_uri

    def pinned(self, digest: str) -> OciReference:
        """The same with the digest that its tag has now; the tag stays, for people."""
        return replace(self, digest=digest)


def is_oci_uri(uri: str) -> bool:
    """Whether the text has the scheme ``oci``."""
    return uri[: len(SCHEME)].lower() == SCHEME


def parse_reference(uri: str) -> OciReference:
    """Parse what an operator wrote.

    Raises:
        ConfigError: it is no such URI.
    """
    if not is_oci_uri(uri):
        raise ConfigError(f"not an OCI URI: {uri}", hint=_HINT)
    registry, _, rest = uri[len(SCHEME) :].partition("/")
    if "@" in registry:
        # Not shown: a password may stand there.
        raise ConfigError(
            "what stands for the registry after oci:// holds '@'",
            hint="credentials come from config.json (docker login); " + _HINT,
        )
    if not _REGISTRY.fullmatch(registry):
        raise ConfigError(f"no registry in {uri}: {registry!r} is no host", hint=_HINT)
    match = re.fullmatch(r"([^:@]*)(?::([^@/]*))?(?:@([^/]*))?(?:/(.*))?", rest, re.DOTALL)
    if match is None:
        raise ConfigError(f"not an OCI URI: {uri}", hint=_HINT)
    repository, tag, digest, folder = match.groups()
    if tag is None and digest is None:
        repository = repository.rstrip("/")
    if not _REPOSITORY.fullmatch(repository) or len(repository) > _LONGEST_REPOSITORY:
        raise ConfigError(
            f"{repository!r} is no repository's name, in {uri}",
            hint="lower-case letters, digits and single separators only; " + _HINT,
        )
    if tag is not None and not _TAG.fullmatch(tag):
        raise ConfigError(f"{tag!r} is no tag, in {uri}", hint=_HINT)
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise ConfigError(
            f"{digest!r} is no digest, in {uri}", hint="write @sha256: and 64 hexadecimal digits"
        )
    if tag is None and digest is None:
        tag = "latest"
    return OciReference(registry.lower(), repository, tag, digest, _folder(folder or "", uri))


def _folder(text: str, uri: str) -> str:
    folder = text.strip("/")
    if folder and any(part in ("", ".", "..") for part in folder.split("/")):
        raise ConfigError(f"no folder can be named {folder!r}, in {uri}", hint=_HINT)
    return folder


def is_digest(text: str) -> bool:
    """Whether this is a digest that can be checked."""
    return _DIGEST.fullmatch(text) is not None


def hasher(digest: str) -> Any:
    """A new hash object of the digest's algorithm.

    Raises:
        SourceError: it is no digest of an algorithm that is known.
    """
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise SourceError(
            f"{digest[:100]!r} is no digest that can be checked",
            hint="sha256 and sha512 are known; push the artifact again with one of them",
        )
    make: Callable[[], Any] = hashlib.sha256 if match.group(1) else hashlib.sha512
    return make()


def digest_of(data: bytes, algorithm: str = "sha256") -> str:
    """The digest of these bytes, as registries write it."""
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


def check_digest(data: bytes, digest: str, what: str, **facts: Any) -> None:
    """Refuse bytes that are not those of the digest.

    Args:
        what: what they are, for the message.

    Raises:
        ChecksumMismatchError: they are others.
    """
    found = hasher(digest)
    found.update(data)
    value = f"{digest.partition(':')[0]}:{found.hexdigest()}"
    if value != digest:
        raise ChecksumMismatchError(
            f"{what} is not what its digest says",
            hint="the registry, or a proxy or mirror before it, serves damaged or other bytes",
            expected=digest,
            computed=value,
            size_bytes=len(data),
            **facts,
        )
