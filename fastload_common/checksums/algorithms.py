"""The CRCs that object stores keep of whole objects, and how to compute them.

CRC32 comes with Python. The other two come from ``awscrt``, which is an optional dependency and
is imported when the first of them is needed. Both release the interpreter's lock.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Protocol

from fastload_common.errors import ConfigError

__all__ = [
    "ALGORITHMS",
    "CRC32",
    "CRC32C",
    "CRC64NVME",
    "Algorithm",
    "Checksum",
    "CrcFunction",
    "crc_function",
]


class CrcFunction(Protocol):
    """The CRC of ``data``, or of what ``value`` is the CRC of and then ``data``."""

    def __call__(self, data: bytes | bytearray | memoryview, value: int = 0, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One CRC of the usual kind: reflected, all bits set at the start, inverted at the end.

    Attributes:
        name: as S3 spells it.
        width_bits: of its value.
        polynomial: reflected, without its highest power.
    """

    name: str
    width_bits: int
    polynomial: int

    @property
    def value_bytes(self) -> int:
        return self.width_bits // 8

    def show(self, value: int) -> str:
        """A value for messages: hexadecimal, all digits."""
        return f"0x{value:0{self.value_bytes * 2}x}"


CRC64NVME = Algorithm("CRC64NVME", 64, 0x9A6C9329AC4BC9B5)
CRC32C = Algorithm("CRC32C", 32, 0x82F63B78)
CRC32 = Algorithm("CRC32", 32, 0xEDB88320)

ALGORITHMS: tuple[Algorithm, ...] = (CRC64NVME, CRC32C, CRC32)
"""The widest first: where a store has several values, the first of these is compared."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """A value together with what it is."""

    algorithm: Algorithm
    value: int

    def __str__(self) -> str:
        return self.algorithm.show(self.value)


def crc_function(algorithm: Algorithm) -> CrcFunction:
    """The function that computes an algorithm's value over a contiguous buffer.

    Raises:
        ConfigError: ``awscrt`` is needed and is not installed, or is too old.
    """
    if algorithm == CRC32:
        # Of the two at hand the quicker one.
        return zlib.crc32
    try:
        from awscrt import checksums

        found: CrcFunction = getattr(checksums, algorithm.name.lower())
    except (ImportError, AttributeError):
        raise ConfigError(
            f"computing {algorithm.name} checksums needs the package awscrt, 0.22 or newer",
            hint="pip install awscrt cloudpickle, or set FASTLOAD_VERIFY=off",
        ) from None
    return found
