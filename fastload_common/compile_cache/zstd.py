"""zstd, from the standard library (Python 3.14) or the package `zstandard`; one interface.

The same bytes give the same compressed bytes with the same release of zstd.
"""

from __future__ import annotations

import importlib
from typing import Any, BinaryIO, Protocol

from fastload_common.errors import ConfigError

__all__ = ["Compressor", "Reader", "compressor", "reader"]

_LEVEL = 3
"""Quick enough to be no part of a start; artefacts shrink to a quarter or less."""

_LARGEST_WINDOW_BYTES = 128 << 20


class Compressor(Protocol):
    """Makes one frame."""

    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class Reader(Protocol):
    """Reads the content of one frame."""

    def read(self, size: int, /) -> bytes: ...


def compressor() -> Compressor:
    """A new frame, with a checksum at its end.

    Raises:
        ConfigError: neither is installed.
    """
    native, package = _find()
    if native is not None:
        options = {
            native.CompressionParameter.compression_level: _LEVEL,
            native.CompressionParameter.checksum_flag: 1,
        }
        made: Compressor = native.ZstdCompressor(options=options)
        return made
    made = package.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
    return made


def reader(stream: BinaryIO) -> Reader:
    """Decompress a stream piece by piece, within a bound of memory.

    Raises:
        ConfigError: neither is installed.
    """
    native, package = _find()
    if native is not None:
        return native.ZstdFile(stream)  # type: ignore[no-any-return]
    made: Reader = package.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES).stream_reader(
        stream, read_across_frames=False, closefd=False
    )
    return made


def errors() -> tuple[type[Exception], ...]:
    """What reading a damaged stream raises."""
    native, package = _find()
    return (native.ZstdError if native is not None else package.ZstdError, EOFError)


def _find() -> tuple[Any, Any]:
    for number, name in enumerate(("compression.zstd", "zstandard")):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return (module, None) if number == 0 else (None, module)
    raise ConfigError(
        "the compile cache needs zstd, and this Python has none",
        hint="pip install zstandard",
    )
