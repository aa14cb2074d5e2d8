"""Sizes: what is written is what is meant, and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.errors import ConfigError
from fastload_common.units import GIB, KIB, MIB, TIB, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        (0, 0),
        (17, 17),
        ("16777216", 16 * MIB),
        ("512b", 512),
        ("16MiB", 16 * MIB),
        ("16mib", 16 * MIB),
        ("16 Mi", 16 * MIB),
        ("16m", 16 * MIB),
        ("16MB", 16_000_000),
        ("1.5 GiB", 3 * GIB // 2),
        ("0.5k", 512),
        (" 2 TiB ", 2 * TIB),
        ("3kb", 3000),
        ("123456789012345678901", 123456789012345678901),
    ],
)
def test_parse(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "x", "-1", -1, "1..5", "1e6", "16 XB", "MiB", True, False, "1 2", "0x10", "inf"]
)
def test_refused(text: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert "expected a size in bytes" in str(caught.value)
    assert "16MiB" in caught.value.hint


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5", "1" + "x" * 5000])
def test_endless_text_is_refused_and_not_shown_whole(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert len(caught.value.what) < 200


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (1536 * KIB, "1.5 MiB"),
        (86.5 * GIB, "86.5 GiB"),
        (5000 * TIB, "5000.0 TiB"),
        (-3 * MIB, "-3.0 MiB"),
    ],
)
def test_format(size_bytes: float, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_what_is_formatted_can_be_read_again(size_bytes: int) -> None:
    again = parse_size(format_size(size_bytes))
    # One digit after the point, of at least 1.0 of the unit.
    assert abs(again - size_bytes) <= size_bytes * 0.051


@given(st.integers(min_value=0, max_value=2**70))
def test_whole_bytes_are_exact(size_bytes: int) -> None:
    assert parse_size(str(size_bytes)) == parse_size(size_bytes) == size_bytes
