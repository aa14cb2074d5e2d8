"""The benchmark of a GPU runs up to the GPU itself, checks every byte, and says what it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import bars_of
from benchmarks.gpu_models import KINDS, files_of


def test_it_runs_on_a_recorded_device(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu", "--device", "fake", "--scale", "small"),
            *("--kinds", "mixed", "--clients", "fastload", "plain", "--rounds", "0"),
            *("--out", str(out)),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert json.loads(done.stdout) == found
    assert found["note"] == "this has not run on a GPU"
    assert found["bars"] == []
    assert [row["client"] for row in found["rows"]] == ["fastload", "plain"]
    for row in found["rows"]:
        assert "failed" not in row
        assert row["gib_per_s"] > 0
    assert found["rows"][0]["host_peak_bytes"] > 0
    for rank in found["rows"][0]["ranks"]:
        [facts] = rank["devices"].values()
        assert min(facts[name] for name in ("run_bytes", "row_bytes", "spread_bytes")) > 0
    assert found["limits"]["receive"]


@pytest.mark.parametrize("kind", KINDS)
def test_models_have_their_size_and_sound_headers(kind: str) -> None:
    files = files_of(kind, 64 << 20)
    total_bytes = sum(file.size_bytes - len(file.header) for file in files)
    assert 64 << 20 <= total_bytes < 96 << 20
    for file in files:
        assert len(file.header) % 8 == 0
        entries = json.loads(file.header[8:])
        assert [tuple(entries[s.name]["shape"]) for s in file.specs] == [
            s.shape for s in file.specs
        ]


def test_bars_are_judged_by_the_smaller_limit() -> None:
    rows = [
        {"kind": kind, "client": "fastload", "memory_sampled": False, "gib_per_s": rate}
        for kind, rate in (("dim-0", 9.5), ("dim-0", 9.1), ("dim-1", 8.0), ("dim-1", 8.2))
    ]
    rows.append(
        {
            "kind": "mixed",
            "client": "fastload",
            "memory_sampled": True,
            "gib_per_s": 1.0,
            "gpu_peak_ratio": 1.005,
            "host_peak_bytes": 104,
        }
    )
    found = {
        "ran_on_a_gpu": True,
        "limits": {"to_device": {"gib_per_s": 50.0}, "receive": {"4": 8.0, "8": 10.0}},
        "rows": rows,
        "budget_bytes": 100,
    }
    assert [bar.passed for bar in bars_of(found)] == [True, False, True, True]
    assert bars_of({**found, "ran_on_a_gpu": False}) == []
