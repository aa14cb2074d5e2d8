"""Compressed bytes in, the archive's bytes out, in pieces of bounded size.

What it is compressed with is seen from its first bytes, as other programs do: media types are often
wrong. gzip is inflated by the quickest of the libraries that are installed.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from fastload_common.errors import ArchiveInvalidError, ConfigError
from fastload_common.units import MIB, format_size

__all__ = [
    "HEAD_BYTES",
    "LEAST_WINDOW_BYTES",
    "Inflater",
    "gzip_library",
    "open_inflater",
    "window_bytes",
]

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
HEAD_BYTES = 18
"""The longest header of a zstd frame."""
# A gzip file that was padded to some block's size is accepted, as by gzip itself.
_PADDING = b"\0"

LEAST_WINDOW_BYTES = 8 * MIB
"""What a zstd decompressor is allowed in any case: the formats' own recommendation."""
_LARGEST_WINDOW_BYTES = 32 * MIB


class Inflater(Protocol):
    """Gives the content of one blob."""

    def next_piece(self) -> bytes:
        """The next bytes, at most as many as were agreed; empty at the end.

        Raises:
            ArchiveInvalidError: damaged or cut off.
        """
        ...


class _Plain:
    """Not compressed."""

    def __init__(self, head: bytes, read: Callable[[], bytes]) -> None:
        self._head = head
        self._read = read

    def next_piece(self) -> bytes:
        if self._head:
            head, self._head = self._head, b""
            return head
        return self._read()


class _Gzip:
    """One or more gzip members."""

    def __init__(self, head: bytes, read: Callable[[], bytes], piece_bytes: int) -> None:
        self._read = read
        self._piece_bytes = piece_bytes
        self._pending = head
        self._library = gzip_library()
        self._member: Any = self._library.decompressobj(wbits=31)
        self._begun = False

    def next_piece(self) -> bytes:
        while True:
            if self._member is None and not self._begin():
                return b""
            if not self._pending:
                self._pending = self._read()
                if not self._pending:
                    raise ArchiveInvalidError("the gzip data is cut off", hint=_AGAIN)
            try:
                piece: bytes = self._member.decompress(self._pending, self._piece_bytes)
            except self._library.error as error:
                raise ArchiveInvalidError(f"damaged gzip data: {error}", hint=_AGAIN) from None
            if self._member.eof:
                self._pending = self._member.unused_data
                self._member = None
            else:
                self._pending = self._member.unconsumed_tail
            if piece:
                return piece

    def _begin(self) -> bool:
        """Whether another member follows."""
        self._pending = self._pending.lstrip(_PADDING)
        while not self._pending:
            more = self._read()
            if not more:
                return False
            self._pending = more.lstrip(_PADDING)
        while len(self._pending) < len(_GZIP) and (more := self._read()):
            self._pending += more
        if not self._pending.startswith(_GZIP):
            raise ArchiveInvalidError("something else follows the gzip data", hint=_AGAIN)
        self._member = self._library.decompressobj(wbits=31)
        return True


class _Zstd:
    """One or more zstd frames."""

    def __init__(self, head: bytes, read: Callable[[], bytes], piece_bytes: int) -> None:
        self._package = zstandard()
        self._source = _Source(head, read)
        self._buffer = bytearray(piece_bytes)
        context = self._package.ZstdDecompressor(max_window_size=window_bytes(head))
        self._reader = context.stream_reader(
            self._source, read_size=piece_bytes, read_across_frames=True
        )

    def next_piece(self) -> bytes:
        try:
            count = self._reader.readinto(self._buffer)
        except self._package.ZstdError as error:
            raise ArchiveInvalidError(f"damaged zstd data: {error}", hint=_AGAIN) from None
        return bytes(memoryview(self._buffer)[:count])


class _Source:
    """A reader as zstandard wants one."""

    def __init__(self, head: bytes, read: Callable[[], bytes]) -> None:
        self._head = head
        self._read = read

    def read(self, size_bytes: int) -> bytes:
        if self._head:
            part, self._head = self._head[:size_bytes], self._head[size_bytes:]
            return part
        data = self._read()
        if len(data) > size_bytes:
            data, self._head = data[:size_bytes], data[size_bytes:]
        return data


_AGAIN = "pull again; if it stays so, the layer was stored so"


def open_inflater(head: bytes, read: Callable[[], bytes], piece_bytes: int) -> Inflater:
    """What gives a blob's content.

    Args:
        head: its first bytes, at least 18 of them where there are so many.
        read: gives the bytes after these, piece by piece; empty at the end.
        piece_bytes: most bytes of one piece of the content.

    Raises:
        ConfigError: the blob is zstd, and no library for it is installed.
        ArchiveInvalidError: its window is too large.
    """
    if head.startswith(_GZIP):
        return _Gzip(head, read, piece_bytes)
    if _is_zstd(head):
        return _Zstd(head, read, piece_bytes)
    return _Plain(head, read)


def window_bytes(head: bytes) -> int:
    """What a decompressor of the blob with this beginning will need of memory; 0: next to nothing.

    Raises:
        ArchiveInvalidError: more than is allowed, or a damaged header.
    """
    if not _is_zstd(head):
        return 0
    package = zstandard()
    if not head.startswith(_ZSTD):
        return LEAST_WINDOW_BYTES  # a frame to be skipped stands first
    try:
        wanted_bytes = int(package.get_frame_parameters(head).window_size)
    except package.ZstdError as error:
        raise ArchiveInvalidError(f"damaged zstd data: {error}", hint=_AGAIN) from None
    if wanted_bytes > _LARGEST_WINDOW_BYTES:
        raise ArchiveInvalidError(
            f"the layer's zstd window is {format_size(wanted_bytes)}; at most "
            f"{format_size(_LARGEST_WINDOW_BYTES)} are allowed",
            hint="compress the layer without --long or --ultra",
        )
    return max(wanted_bytes, LEAST_WINDOW_BYTES)


def _is_zstd(head: bytes) -> bool:
    return head.startswith(_ZSTD) or (
        len(head) >= 4 and 0x50 <= head[0] <= 0x5F and head[1:4] == b"\x2a\x4d\x18"
    )


@functools.cache
def gzip_library() -> Any:
    """The module that inflates gzip: `isal` where it is installed, else Python's own zlib."""
    try:
        return importlib.import_module("isal.isal_zlib")
    except ImportError:
        return zlib


def zstandard() -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise ConfigError(
            "a layer is compressed with zstd, and this Python has no package for it",
            hint="pip install zstandard",
        ) from None
