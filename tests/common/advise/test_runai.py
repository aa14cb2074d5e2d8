"""The published values for Run:ai's streamer."""

from __future__ import annotations

import pytest

from fastload_common.advise.machine import machine_of
from fastload_common.advise.runai import concurrency_of, runai_notes, runai_settings
from fastload_common.units import GIB, parse_size

PUBLISHED = {10: 3, 67: 17, 140: 35}


@pytest.mark.parametrize(("size", "readers"), PUBLISHED.items())
def test_published_concurrency(size: int, readers: int) -> None:
    assert concurrency_of(size * GIB) == readers
    assert concurrency_of(parse_size(f"{size}GiB")) == readers


def test_only_gib_makes_all_three_right() -> None:
    decimal = {size: concurrency_of(size * 1000**3) for size in PUBLISHED}
    assert decimal == {10: 3, 67: 16, 140: 33}


@pytest.mark.parametrize(
    ("size_bytes", "readers"), [(1, 1), (4 * GIB, 1), (4 * GIB + 1, 2), (8 * GIB, 2)]
)
def test_a_chunk_more_is_a_reader_more(size_bytes: int, readers: int) -> None:
    assert concurrency_of(size_bytes) == readers


def test_the_other_published_values() -> None:
    values = {setting.name: setting.value for setting in runai_settings(67 * GIB, 4)}
    assert values == {
        "RUNAI_STREAMER_CHUNK_BYTESIZE": 4294967296,
        "RUNAI_STREAMER_CONCURRENCY": 17,
        "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS": 3000,
        "RUNAI_STREAMER_S3_LOW_SPEED_LIMIT": 1048576,
        "distributed": True,
    }


def test_one_rank_shares_nothing() -> None:
    values = {setting.name: setting.value for setting in runai_settings(67 * GIB, 1)}
    assert values["distributed"] is False


def test_a_model_of_more_than_half_the_memory_is_told() -> None:
    small = machine_of("g6e.xlarge", {})
    assert runai_notes(16 * GIB, small) == ()
    (note,) = runai_notes(17 * GIB, small)
    assert "RUNAI_STREAMER_MEMORY_LIMIT" in note
    assert "17.0 GiB" in note
