"""Counters and percentiles."""

from __future__ import annotations

import json
import random
import threading

import pytest

from fastload_common.source.base import Receipt
from fastload_common.transfer.stats import LatencyHistogram, TransferStats


def test_an_empty_report() -> None:
    nothing = {"p50": 0, "p90": 0, "p99": 0, "max": 0}
    assert TransferStats().snapshot() == {
        "requests": 0,
        "retries": 0,
        "bytes_received": 0,
        "bytes_refetched": 0,
        "new_connections": 0,
        "hedges": 0,
        "hedges_won": 0,
        "hedge_bytes_wasted": 0,
        "kills": 0,
        "first_byte_s": nothing,
        "total_s": nothing,
        "errors": {},
    }


def test_everything_is_counted_once() -> None:
    stats = TransferStats()
    stats.request_started(is_retry=False)
    stats.request_failed("SourceUnavailableError", 30, is_retry=False)
    stats.request_started(is_retry=True)
    stats.request_done(Receipt(70, 0.1, 0.2, new_connection=True), is_retry=True)
    stats.request_started(is_retry=False)
    stats.request_done(Receipt(100, 0.1, 0.2, new_connection=False), is_retry=False)
    found = stats.snapshot()
    assert (found["requests"], found["retries"], found["new_connections"]) == (3, 1, 1)
    assert (found["bytes_received"], found["bytes_refetched"]) == (200, 70)
    assert found["errors"] == {"SourceUnavailableError": 1}
    assert found["total_s"]["max"] == 0.2
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("scale_s", [1e-4, 0.05, 3.0, 500.0])
def test_percentiles_are_right_to_five_percent(scale_s: float) -> None:
    draw = random.Random(7)
    samples = sorted(draw.lognormvariate(0, 1) * scale_s for _ in range(5000))
    histogram = LatencyHistogram()
    for sample in samples:
        histogram.add(sample)
    for percent in (1, 50, 90, 99, 100):
        exact = samples[max(0, -(-5000 * percent // 100) - 1)]
        assert exact <= histogram.percentile_s(percent) * 1.0000001
        assert histogram.percentile_s(percent) <= exact * 1.0500001


def test_extreme_durations_have_a_bucket() -> None:
    histogram = LatencyHistogram()
    for seconds in (0.0, 1e-9, 1e9):
        histogram.add(seconds)
    assert histogram.percentile_s(1) == 1e-5
    assert histogram.snapshot()["max"] == 1e9


def test_threads_lose_no_count() -> None:
    stats = TransferStats()

    def count() -> None:
        for _ in range(2000):
            stats.request_started(is_retry=False)
            stats.request_done(Receipt(1, 0.1, 0.1, new_connection=False), is_retry=False)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = stats.snapshot()
    assert (found["requests"], found["bytes_received"]) == (8000, 8000)
