"""CRCs of pieces, put together: the same as over all bytes at once."""

from __future__ import annotations

import sys
import zlib
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.checksums import combine as combine_module
from fastload_common.checksums.algorithms import (
    ALGORITHMS,
    CRC32,
    CRC32C,
    CRC64NVME,
    Algorithm,
    Checksum,
    crc_function,
)
from fastload_common.checksums.combine import combine
from fastload_common.errors import ConfigError

# The check values of the algorithms' specifications.
CHECK = {CRC64NVME: 0xAE8B14860A799888, CRC32C: 0xE3069283, CRC32: 0xCBF43926}


def bitwise(algorithm: Algorithm, data: bytes) -> int:
    """The definition, one bit at a time."""
    ones = (1 << algorithm.width_bits) - 1
    value = ones
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ algorithm.polynomial if value & 1 else value >> 1
    return value ^ ones


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_the_functions_compute_what_the_specifications_say(algorithm: Algorithm) -> None:
    for data in (b"123456789", memoryview(bytearray(b"123456789"))):
        assert crc_function(algorithm)(data) == CHECK[algorithm]
    assert bitwise(algorithm, b"123456789") == CHECK[algorithm]
    assert crc_function(algorithm)(b"") == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_two_pieces(algorithm: Algorithm, first: bytes, second: bytes) -> None:
    crc = crc_function(algorithm)
    combined = combine(algorithm, crc(first), crc(second), len(second))
    assert combined == crc(first + second) == bitwise(algorithm, first + second)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
@given(pieces=st.lists(st.binary(max_size=40), max_size=8))
def test_many_pieces(algorithm: Algorithm, pieces: list[bytes]) -> None:
    crc = crc_function(algorithm)
    value = 0
    for piece in pieces:
        value = combine(algorithm, value, crc(piece), len(piece))
    assert value == crc(b"".join(pieces))


@given(
    first=st.integers(0, 2**64 - 1),
    second=st.integers(0, 2**64 - 1),
    size_bytes=st.integers(1, 2**50),
)
def test_lengths_that_no_test_can_read(first: int, second: int, size_bytes: int) -> None:
    """Against the other implementation."""
    checksums = pytest.importorskip("awscrt.checksums")
    if not hasattr(checksums, "combine_crc64nvme"):
        pytest.skip("this awscrt cannot combine")
    assert combine(CRC64NVME, first, second, size_bytes) == checksums.combine_crc64nvme(
        first, second, size_bytes
    )
    low = 2**32 - 1
    for algorithm, theirs in (
        (CRC32C, checksums.combine_crc32c),
        (CRC32, checksums.combine_crc32),
    ):
        ours = combine(algorithm, first & low, second & low, size_bytes)
        assert ours == theirs(first & low, second & low, size_bytes)


def test_the_work_grows_with_the_logarithm_of_the_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products = mock.Mock(side_effect=combine_module._product)
    monkeypatch.setattr(combine_module, "_product", products)
    combine_module._power_of_x.cache_clear()
    combine(CRC64NVME, 1, 2, 2**60 - 1)
    assert products.call_count == 2 * 60 + 1
    products.reset_mock()
    combine(CRC64NVME, 3, 4, 2**60 - 1)
    assert products.call_count == 1  # the power is kept


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        combine(CRC32, 1, 2, -1)


def test_values_are_shown_with_all_digits() -> None:
    assert str(Checksum(CRC64NVME, 0xAB)) == "0x00000000000000ab"
    assert str(Checksum(CRC32, 0xAB)) == "0x000000ab"


def test_crc32_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt", None)
    monkeypatch.delitem(sys.modules, "awscrt.checksums", raising=False)
    assert crc_function(CRC32) is zlib.crc32
    for algorithm in (CRC64NVME, CRC32C):
        with pytest.raises(ConfigError, match=rf"{algorithm.name} .*pip install awscrt"):
            crc_function(algorithm)


def test_a_package_that_is_too_old_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    checksums = pytest.importorskip("awscrt.checksums")
    monkeypatch.delattr(checksums, "crc64nvme")
    with pytest.raises(ConfigError, match=r"awscrt, 0\.22 or newer"):
        crc_function(CRC64NVME)
