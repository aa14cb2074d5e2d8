"""The benchmark of pulls: its verdicts, and a round of it in small with the real programs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import containerd, pull
from benchmarks.paced import paced
from benchmarks.pull_images import make_image, push_many, push_windows
from fastload_common.testing.registry_server import RegistryServer, missing_programs
from fastload_common.units import MIB


def row(what: str, **figures: Any) -> dict[str, Any]:
    usual = {"fastload_s": 1.0, "skopeo_s": 2.0, "umoci_s": 2.0, "fastload_mib": 100.0}
    return {"what": what, **usual, **figures}


def test_memory_is_judged_where_it_was_the_most() -> None:
    rows = [row("round 0", ratio=0.25, equal=True), row("odd", fastload_mib=257.0)]
    wall, memory, trees = pull.bars_of(rows)
    assert (wall.passed, memory.passed, trees.passed) == (True, False, True)
    assert "(odd)" in memory.name


def test_a_tree_that_differs_is_above_the_bar() -> None:
    rows = [row("round 0", ratio=0.25, equal=True), row("round 1", ratio=0.6, equal=False)]
    assert [bar.passed for bar in pull.bars_of(rows)] == [True, True, False]


def test_the_ratio_to_ctr_has_no_bar() -> None:
    rows = [row("round 0", ratio=0.25, equal=True, ctr_s=0.5, ctr_ratio=2.0, ctr_equal=True)]
    assert all(bar.passed for bar in pull.bars_of(rows))
    wall, _ = pull.panels({"rows": rows})
    assert wall.series["wall time"]["ctr images pull"] == 0.5


def test_without_containerd_the_picture_says_why() -> None:
    rows = [row("round 0", ratio=0.25, equal=True)]
    wall, _ = pull.panels({"rows": rows, "absent": {"ctr": "containerd needs root"}})
    assert "ctr images pull" not in wall.series["wall time"]
    assert wall.notes == {"ctr images pull": "containerd needs root"}


def test_without_root_containerd_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containerd, "missing_programs", lambda *names: "")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert containerd.why_absent() == "containerd needs root"


def test_a_round_compares_three_trees_and_leaves_nothing(tmp_path: Path) -> None:
    if lacks := missing_programs("docker-registry", "skopeo", "umoci"):
        pytest.skip(lacks)
    absent = containerd.why_absent()
    size_bytes = make_image(tmp_path / "image", 0.005)
    assert size_bytes >= 10 * MIB
    mounts = Path("/proc/self/mounts").read_text("utf-8")
    opt_was_there = Path("/opt/containerd").exists()
    with RegistryServer(None, auth=False) as registry:
        registry.push_image(tmp_path / "image", pull.REPOSITORY, "latest")
        shutil.rmtree(tmp_path / "image")
        with paced(registry.host, pull.CONNECTION_BYTES_PER_S) as host:
            environ = {"FASTLOAD_OCI_PLAIN_HTTP": host, "FASTLOAD_PROGRESS": "off"}
            found = pull.one_round(tmp_path, host, environ, ctr=not absent)
    assert found["equal"]
    assert found["ratio"] > 0
    assert not list(tmp_path.iterdir())
    if not absent:
        assert found["ctr_equal"]
        # The daemon's memory counts: a pull by it is no program of 10 MiB.
        assert found["ctr_mib"] > 20
        assert Path("/proc/self/mounts").read_text("utf-8") == mounts
        assert Path("/opt/containerd").exists() == opt_was_there


def test_the_odd_images_can_be_pulled(tmp_path: Path) -> None:
    if lacks := missing_programs("docker-registry"):
        pytest.skip(lacks)
    pytest.importorskip("zstandard")
    with RegistryServer(None, auth=False) as registry:
        environ = {"FASTLOAD_OCI_PLAIN_HTTP": registry.host, "FASTLOAD_PROGRESS": "off"}
        sizes = {
            pull.WINDOWS: push_windows(registry, pull.WINDOWS, 0.0),
            pull.MANY: push_many(registry, pull.MANY, 30),
        }
        for image, size_bytes in sizes.items():
            destination = tmp_path / image.replace("/", "-")
            found = pull.measure(pull.fastload(f"{registry.host}/{image}", destination), environ)
            assert found.peak_mib > 0
            files = [path for path in destination.rglob("*") if path.is_file()]
            assert sum(path.stat().st_size for path in files) == size_bytes
