"""Say what a file is that is no safetensors file, from its first bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Looks", "looks_like"]


@dataclass(frozen=True, slots=True)
class Looks:
    """What the file seems to be (completes "it looks like ...") and what to do about it."""

    what: str
    hint: str


_REPLACE = "put the real .safetensors file there"
_CONVERT = (
    "only safetensors are loaded; convert it, e.g. with transformers' "
    "save_pretrained(..., safe_serialization=True)"
)
_UNPACK = "unpack it before uploading"

_MAGIC: tuple[tuple[bytes, Looks], ...] = (
    (
        b"version https://git-lfs",
        Looks("a Git-LFS pointer; the real file was never fetched", "run git lfs pull, upload"),
    ),
    (b"PK\x03\x04", Looks("a zip archive: a PyTorch pickle under another name", _CONVERT)),
    (b"\x1f\x8b", Looks("a gzip archive", _UNPACK)),
    (b"\x28\xb5\x2f\xfd", Looks("a zstd archive", _UNPACK)),
    (b"\xfd7zXZ\x00", Looks("an xz archive", _UNPACK)),
    (b"BZh", Looks("a bzip2 archive", _UNPACK)),
    (b"GGUF", Looks("a GGUF model", "use the engine's own GGUF loader")),
    (b"\x89HDF\r\n\x1a\n", Looks("an HDF5 (Keras) file", _CONVERT)),
)
_PICKLE_PROTOCOLS = range(2, 6)
_TEXT = frozenset(b"\t\n\r") | frozenset(range(0x20, 0x7F))
# An HF cache copied without following its links leaves the link's target as text.
_LINK = b"../../blobs/"


def looks_like(prefix: bytes, size_bytes: int) -> Looks | None:
    """Recognize a file.

    Args:
        prefix: the file's first bytes; more than 512 are of no use.
        size_bytes: size of the whole file.

    Returns:
        None where nothing is recognized.
    """
    if size_bytes == 0:
        return Looks("an empty file", "the upload or download failed; repeat it")
    for magic, looks in _MAGIC:
        if prefix.startswith(magic):
            return looks
    if len(prefix) >= 2 and prefix[0] == 0x80 and prefix[1] in _PICKLE_PROTOCOLS:
        return Looks("a pickle", _CONVERT)
    if prefix[257:262] == b"ustar":
        return Looks("a tar archive", _UNPACK)
    if prefix.startswith(_LINK):
        return Looks(
            "a symbolic link of a Hugging Face cache, stored as text",
            "upload the files that the links point to (e.g. aws s3 sync follows links)",
        )
    start = prefix[:512].lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head")):
        return Looks("an HTML page, such as a login or error page", _REPLACE)
    if start.startswith(b"<?xml"):
        return Looks("an XML document, such as an error of an object store", _REPLACE)
    head = prefix[:512]
    if not any(head):
        return Looks("zeros: a hole left by an interrupted copy", _REPLACE)
    if all(byte in _TEXT for byte in head):
        return Looks(f"text that begins with {head[:40].decode('ascii')!r}", _REPLACE)
    return None
