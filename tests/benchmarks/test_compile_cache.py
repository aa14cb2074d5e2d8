"""The benchmark of the compile cache runs and judges; its times are not judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compile_cache import BUCKET, MISS, Bench, bars_of, panels, summarize
from fastload_common.testing.s3_server import S3Server


@pytest.mark.s3
def test_a_start_of_each_kind(s3_server: S3Server, tmp_path: Path) -> None:
    s3_server.make_bucket(BUCKET)
    s3_server.client().put_object(Bucket=BUCKET, Key="object", Body=bytes(12000))
    bench = Bench(tmp_path, s3_server, 12000)
    published = bench.call("publish", signed=True, node=False)["published"]
    assert list(published.values()) == ["stored"]
    hit = bench.call("start", signed=True, node=True)
    assert (hit["status"], hit["wrong"]) == ("hit", 0)
    assert hit["overhead_s"] >= hit["begin_s"] > 0
    assert bench.call("start", signed=True, node=False, key=MISS)["status"] == "miss"
    assert len(bench.read("object")["read_s"]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["key.pem"]


def test_a_hit_is_compared_with_the_plain_read_of_its_round() -> None:
    rows = [
        {
            "case": case,
            "signed": False,
            "stores": "S3",
            "overhead_s": overhead_s,
            "read_s": read_s,
            "begin_s": 0.1,
            "cpu_s": 0.2,
        }
        for case, overhead_s, read_s in [
            *(("hit", 1.5, 0.2), ("hit", 9.0, 8.5), ("hit", 2.0, 1.2)),
            *(("miss", 0.4, 0.2), ("miss", 0.6, 8.5), ("miss", 0.7, 1.2)),
        ]
    ]
    cases = summarize(rows)
    assert cases["hit, unsigned, S3"]["over_read_s"] == 0.8
    bars = {bar.name: (bar.value, bar.passed) for bar in bars_of(cases)}
    assert bars == {
        "s - size / bandwidth, hit, unsigned, S3": (0.8, True),
        "s, miss, unsigned, S3": (0.6, False),
    }
    assert panels({"cases": cases})[0].rows == list(cases)
