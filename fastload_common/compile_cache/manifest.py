"""What is in a bundle, and the one form in which that is written and signed.

    fastload-compile-cache 1
    {one line of canonical JSON}
    unsigned                         or: ed25519 <key id> <signature>
    <SHA-256 of all of the above>

Every byte is covered by the last line. The first word and the last two lines are so in each
version, so that damage can be told from another version. Whoever decodes gets a manifest whose
names, modes and sizes may be used as they are: relative, without links, within the limits, each
once.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from fastload_common.compile_cache.factors import Factors
from fastload_common.compile_cache.key import KEY_FORM, canonical, is_key
from fastload_common.compile_cache.trust import Keys, Signature
from fastload_common.errors import BundleInvalidError, BundleUnfitError
from fastload_common.units import GIB, MIB, format_size

__all__ = ["LIMITS", "FileRecord", "Limits", "Manifest", "decode_manifest", "encode_manifest"]

_NAME = b"fastload-compile-cache "
_MAGIC = _NAME + b"1\n"
_DIGEST_LINE_BYTES = 65
_ROOT = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_SIGNED = re.compile(rb"ed25519 ([0-9a-f]{16}) ([0-9a-f]{128})")
_MODES = (0o644, 0o755)
_LONGEST_PART_BYTES = 255
_LONGEST_NAME_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Limits:
    """What a bundle may ask for; checked before anything is written.

    Attributes:
        content_bytes: all files together, unpacked.
        files: files and directories.
        manifest_bytes: the manifest itself.
        blob_bytes: the compressed archive.
    """

    content_bytes: int = 10 * GIB
    files: int = 200_000
    manifest_bytes: int = 64 * MIB
    blob_bytes: int = 4 * GIB


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file.

    Attributes:
        root: name of the directory that it was in.
        name: its path in there, ``/`` between parts.
        mode: 0o644 or 0o755.
        mtime_ns: build tools compare it with those of other files.
    """

    root: str
    name: str
    size_bytes: int
    sha256: str
    mode: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A bundle's description. The same trees under the same key give the same manifest.

    Attributes:
        key: digest of the factors.
        factors: see `check_factors`.
        roots: names of the directories, sorted; some may be empty.
        files: in the order of the archive.
        directories: root and name of those that hold nothing.
        bound: place -> path that is written inside of files: the bundle fits only where that place
            has that path. Empty: it can be unpacked anywhere.
        blob_sha256, blob_bytes: of the compressed archive.
        fastload_version: who packed it; decides nothing.
    """

    key: str
    factors: Factors
    roots: tuple[str, ...]
    files: tuple[FileRecord, ...]
    directories: tuple[tuple[str, str], ...]
    bound: dict[str, str]
    blob_sha256: str
    blob_bytes: int
    fastload_version: str
    signature: Signature | None = field(default=None, compare=False)

    @property
    def content_bytes(self) -> int:
        return sum(record.size_bytes for record in self.files)


def encode_manifest(manifest: Manifest, keys: Keys | None) -> bytes:
    """Write and, where there is a private key, sign it.

    Raises:
        BundleUntrustedError: a key is set, and it is the public one.
    """
    payload = {
        "key": manifest.key,
        "form": KEY_FORM,
        "factors": manifest.factors,
        "roots": list(manifest.roots),
        "files": [
            [f.root, f.name, f.size_bytes, f.sha256, f.mode, f.mtime_ns] for f in manifest.files
        ],
        "directories": [list(row) for row in manifest.directories],
        "bound": manifest.bound,
        "blob": {"sha256": manifest.blob_sha256, "bytes": manifest.blob_bytes, "codec": "zstd"},
        "fastload_version": manifest.fastload_version,
    }
    message = _MAGIC + canonical(payload) + b"\n"
    line = b"unsigned\n"
    if keys is not None:
        signature = keys.sign(message)
        line = f"ed25519 {signature.key_id} {signature.value.hex()}\n".encode()
    body = message + line
    return body + hashlib.sha256(body).hexdigest().encode() + b"\n"


def decode_manifest(
    data: bytes, *, keys: Keys | None = None, key: str | None = None, limits: Limits = LIMITS
) -> Manifest:
    """Read and check everything about it.

    Args:
        data: the whole file.
        keys: if given, only what is signed with them.
        key: what was asked for.

    Raises:
        BundleInvalidError: damaged, or not what a manifest may be.
        BundleUnfitError: sound, but of another version, or more than the limits allow.
        BundleUntrustedError: it is not signed as it must be.
    """
    if len(data) > limits.manifest_bytes:
        raise BundleInvalidError(f"the manifest has {format_size(len(data))}")
    body, line = data[:-_DIGEST_LINE_BYTES], data[-_DIGEST_LINE_BYTES:]
    if not body.startswith(_NAME):
        raise BundleInvalidError("this is no manifest of the compile cache, or its start is gone")
    if line != hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise BundleInvalidError("the manifest is damaged: its digest is another one")
    message, last = _parted(body)
    signature = _signature(last)
    if keys is not None:
        keys.verify(message, signature)
    text = message[len(_MAGIC) : -1]
    if not message.startswith(_MAGIC):
        raise BundleUnfitError("the manifest has a form that this version of fastload cannot read")
    if b"\n" in text:
        raise BundleInvalidError("the manifest has more lines than it may have")
    try:
        payload = json.loads(text)
        if canonical(payload) != text:
            raise BundleInvalidError("the manifest is not in its one form")
        manifest = _built(payload, signature)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BundleInvalidError(
            f"the manifest does not say what it must: {type(error).__name__}"
        ) from None
    _check(manifest, limits)
    if key is not None and manifest.key != key:
        raise BundleInvalidError("the manifest is that of another key", key=manifest.key)
    return manifest


def _parted(body: bytes) -> tuple[bytes, bytes]:
    """What is signed, and the line of the signature."""
    start = body.rfind(b"\n", 0, -1) + 1
    if not body.endswith(b"\n") or start == 0:
        raise BundleInvalidError("the manifest has fewer lines than it must have")
    return body[:start], body[start:-1]


def _signature(line: bytes) -> Signature | None:
    if line == b"unsigned":
        return None
    match = _SIGNED.fullmatch(line)
    if match is None:
        raise BundleInvalidError("the manifest's signature has another form")
    return Signature(match.group(1).decode(), bytes.fromhex(match.group(2).decode()))


def _built(payload: dict[str, Any], signature: Signature | None) -> Manifest:
    """The record, with the types that it must have."""
    blob = payload["blob"]
    if payload["form"] != KEY_FORM or blob["codec"] != "zstd":
        raise BundleUnfitError(
            "the entry is of another version of fastload",
            fastload_version=_typed(payload["fastload_version"], str),
        )
    factors = payload["factors"]
    digest = hashlib.sha256(canonical({"form": KEY_FORM, "factors": factors})).hexdigest()
    if payload["key"] != digest:
        raise BundleInvalidError("the manifest's key is not that of its factors")
    return Manifest(
        key=payload["key"],
        factors=_typed(factors, dict),
        roots=tuple(_typed(name, str) for name in payload["roots"]),
        files=tuple(_record(row) for row in payload["files"]),
        directories=tuple(
            (_typed(root, str), _typed(name, str)) for root, name in payload["directories"]
        ),
        bound={place: _typed(path, str) for place, path in payload["bound"].items()},
        blob_sha256=_typed(blob["sha256"], str),
        blob_bytes=_typed(blob["bytes"], int),
        fastload_version=_typed(payload["fastload_version"], str),
        signature=signature,
    )


def _record(row: list[Any]) -> FileRecord:
    root, name, size_bytes, sha256, mode, mtime_ns = row
    return FileRecord(
        _typed(root, str),
        _typed(name, str),
        _typed(size_bytes, int),
        _typed(sha256, str),
        _typed(mode, int),
        _typed(mtime_ns, int),
    )


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _check(manifest: Manifest, limits: Limits) -> None:
    """Refuse what no bundle may be."""
    if min((f.size_bytes for f in manifest.files), default=0) < 0 or manifest.blob_bytes < 0:
        raise BundleInvalidError("the bundle has a file of a negative size")
    if list(manifest.roots) != sorted(set(manifest.roots)):
        raise BundleInvalidError("the bundle's roots are not sorted, or one comes twice")
    for root in manifest.roots:
        if not _ROOT.fullmatch(root):
            raise BundleInvalidError(f"the bundle has a root {root!r}")
    if not is_key(manifest.blob_sha256):
        raise BundleInvalidError("the archive's digest is none")
    for record in manifest.files:
        if record.mode not in _MODES:
            raise BundleInvalidError(f"{record.name!r} has mode {record.mode:#o}")
        if not is_key(record.sha256):
            raise BundleInvalidError(f"the digest of {record.name!r} is none")
        if not -(2**63) <= record.mtime_ns < 2**63:
            raise BundleInvalidError(f"the time of {record.name!r} is none")
    _check_names(manifest)
    _check_size(manifest, limits)


def _check_size(manifest: Manifest, limits: Limits) -> None:
    """Refuse more than this process may unpack; another one may."""
    count = len(manifest.files) + len(manifest.directories)
    if count > limits.files:
        raise BundleUnfitError(f"the bundle has {count} files", limit=limits.files)
    if manifest.content_bytes > limits.content_bytes:
        raise BundleUnfitError(
            f"the bundle would unpack to {format_size(manifest.content_bytes)}",
            hint="raise FASTLOAD_COMPILE_CACHE_MAX_BYTES if that is right",
            limit=format_size(limits.content_bytes),
        )
    if manifest.blob_bytes > limits.blob_bytes:
        raise BundleUnfitError(f"the archive has {format_size(manifest.blob_bytes)}")


def _check_names(manifest: Manifest) -> None:
    files = [(record.root, record.name) for record in manifest.files]
    names = [*files, *manifest.directories]
    if len(set(names)) != len(names):
        raise BundleInvalidError("the bundle has a name twice")
    parents: set[tuple[str, str]] = set()
    for root, name in names:
        check_name(name)
        if root not in manifest.roots:
            raise BundleInvalidError(f"{name!r} is in a root that is not named", root=root)
        parts = name.split("/")
        parents.update((root, "/".join(parts[:n])) for n in range(1, len(parts)))
    if not parents.isdisjoint(names):
        raise BundleInvalidError("the bundle has a file, or an empty directory, with files in it")


def check_name(name: str) -> None:
    """Refuse a name that could lead out of its directory, or that no file system has.

    Raises:
        BundleInvalidError: it is such.
    """
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise BundleInvalidError(f"the name {name!r} is not UTF-8") from None
    parts = encoded.split(b"/")
    if (
        b"\0" in encoded
        or len(encoded) > _LONGEST_NAME_BYTES
        or any(part in (b"", b".", b"..") or len(part) > _LONGEST_PART_BYTES for part in parts)
    ):
        raise BundleInvalidError(f"the bundle has a file {name[:100]!r}, which may not be")
