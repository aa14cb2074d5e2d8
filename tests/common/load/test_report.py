"""The report: phases add up on an injected clock, the JSON is the documented schema."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fastload_common.errors import SourceUnavailableError
from fastload_common.load.report import PHASES, SCHEMA, LoadReport
from fastload_common.source.base import Receipt
from fastload_common.transfer.stats import TransferStats
from fastload_common.units import GIB, MIB


class ManualClock:
    """A clock that moves only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.cpu_s = 7.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return 1_800_000_000.25

    def process_cpu_s(self) -> float:
        return self.cpu_s

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.now_s += timeout_s
        return event.is_set()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def report(clock: ManualClock) -> LoadReport:
    return LoadReport("vllm", "0.32.0", "s3://models/tiny", 1, world_size=2, clock=clock)


def test_a_phase_entered_again_adds_up(report: LoadReport, clock: ManualClock) -> None:
    for _ in range(3):
        with report.phase("fetch"):
            clock.now_s += 0.5
        with report.phase("place"):
            clock.now_s += 0.25
    report.add_seconds("place", 1.0)
    assert report.phases_s["fetch"] == 1.5
    assert report.phases_s["place"] == 1.75


def test_an_inner_phase_is_taken_out_of_the_outer_one(
    report: LoadReport, clock: ManualClock
) -> None:
    with report.phase("trace"):
        clock.now_s += 1
        with report.phase("fetch"):
            clock.now_s += 2
            with report.phase("fetch"):
                clock.now_s += 4
        clock.now_s += 8
    assert report.phases_s["trace"] == 9
    assert report.phases_s["fetch"] == 6
    assert sum(report.phases_s.values()) == 15


def test_a_phase_that_fails_is_counted_and_its_error_goes_on(
    report: LoadReport, clock: ManualClock
) -> None:
    def fail() -> None:
        with report.phase("headers"):
            clock.now_s += 3
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert report.phases_s["headers"] == 3


def test_an_unknown_phase_is_refused(report: LoadReport) -> None:
    with pytest.raises(ValueError, match="phases are pull, list, headers"):
        report.add_seconds("download", 1.0)
    with pytest.raises(ValueError, match="unknown phase 'download'"), report.phase("download"):
        pass


def test_phases_of_other_threads_are_not_taken_out(report: LoadReport, clock: ManualClock) -> None:
    def other() -> None:
        with report.phase("fetch"):
            clock.now_s += 5

    with report.phase("place"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert report.phases_s["place"] == 5
    assert report.phases_s["fetch"] == 5


def test_json_has_exactly_the_fields_of_the_schema(report: LoadReport) -> None:
    report.settings = {"concurrency": 4, "report": Path("/tmp/r"), "ignore_patterns": ("a", "b")}
    report.latency_s = {"p50_s": 0.01}
    report.finish()
    entry = json.loads(report.to_json())
    assert list(entry) == list(SCHEMA)
    assert list(entry["phases_s"]) == list(PHASES)
    kinds: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "object": (dict,),
        "string or null": (str, type(None)),
    }
    for name, (kind, _) in SCHEMA.items():
        assert isinstance(entry[name], kinds[kind]), name
    assert entry["settings"] == {
        "concurrency": 4,
        "report": "/tmp/r",
        "ignore_patterns": ["a", "b"],
    }
    assert entry["started_at"] == "2027-01-15T08:00:00.250+00:00"


def test_the_numbers_of_the_transfer_are_taken_over(report: LoadReport) -> None:
    stats = TransferStats()
    receipt = Receipt(size_bytes=100, first_byte_s=0.5, total_s=2.0, new_connection=True)
    stats.request_started(is_retry=False)
    stats.request_failed("SourceUnavailableError", 40, is_retry=False)
    stats.request_started(is_retry=True)
    stats.request_done(receipt, is_retry=True)
    report.take_transfer(stats.snapshot())
    entry = json.loads(report.to_json())
    assert (entry["requests"], entry["retries"], entry["new_connections"]) == (2, 1, 1)
    assert entry["refetched_bytes"] == 100
    assert entry["request_errors"] == {"SourceUnavailableError": 1}
    assert entry["latency_s"]["first_byte"]["max"] == 0.5
    assert entry["latency_s"]["total"] == {"p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0}


def test_finish_freezes_time_once(report: LoadReport, clock: ManualClock) -> None:
    clock.now_s += 2
    clock.cpu_s += 1.5
    report.finish()
    clock.now_s += 100
    report.finish(RuntimeError("late"))
    entry = report.as_dict()
    assert (entry["wall_s"], entry["cpu_s"], entry["status"]) == (2, 1.5, "ok")
    assert entry["error"] is None


def test_summary_line_of_a_good_load(report: LoadReport, clock: ManualClock) -> None:
    report.model_bytes, report.needed_bytes = 8 * GIB, 4 * GIB
    report.fetched_bytes = 4 * GIB + 3 * MIB
    report.requests, report.retries, report.over_read_bytes = 512, 3, 3 * MIB
    report.add_seconds("fetch", 1.5)
    clock.now_s += 2
    report.finish()
    assert report.summary_line() == (
        "fastload: rank 1/2 loaded 4.00 GiB of 8.00 GiB from s3://models/tiny in 2.00 s "
        "(2.00 GiB/s), 512 requests, 3 retries, 3.0 MiB read but not needed, seconds: fetch 1.50"
    )


def test_summary_line_of_a_small_model_keeps_its_digits(
    report: LoadReport, clock: ManualClock
) -> None:
    report.model_bytes = report.needed_bytes = 6 * MIB
    clock.now_s += 3
    report.finish()
    assert "loaded 6.0 MiB of 6.0 MiB" in report.summary_line()
    assert "in 3.00 s (2.0 MiB/s)" in report.summary_line()


def test_summary_line_of_a_failed_load_names_the_error(report: LoadReport) -> None:
    report.finish(SourceUnavailableError("s3://models/tiny/a: no reply", hint="look at the net"))
    line = report.summary_line()
    assert "FAILED (SourceUnavailableError: s3://models/tiny/a: no reply" in line
    assert "\n" not in line
    assert report.as_dict()["status"] == "failed"


def test_the_text_of_a_foreign_error_is_not_kept(report: LoadReport) -> None:
    report.finish(RuntimeError("GET https://host/key?X-Amz-Signature=feed"))
    assert report.error == "RuntimeError"
    assert "Signature" not in report.to_json() + report.summary_line()


def test_summary_line_says_why_tensors_were_read_whole(report: LoadReport) -> None:
    report.eager_reason = "online quantization"
    report.settled_reads = 2
    report.finish()
    assert "read whole tensors: online quantization" in report.summary_line()
    assert "2 reads while tracing" in report.summary_line()


def test_append_adds_one_line_per_load(report: LoadReport, tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    report.finish()
    report.append_to(path)
    report.append_to(path)
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0]) == json.loads(lines[1]) == report.as_dict()


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    code = (
        "import sys; from pathlib import Path;"
        "from fastload_common.load.report import LoadReport;"
        "r = LoadReport('vllm', '1', 's3://b/' + 'm' * 9000, int(sys.argv[1])); r.finish();"
        "[r.append_to(Path(sys.argv[2])) for _ in range(50)]"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(path)]) for rank in range(3)
    ]
    assert [child.wait() for child in children] == [0, 0, 0]
    ranks = [json.loads(line)["rank"] for line in path.read_text().splitlines()]
    assert sorted(ranks) == [0] * 50 + [1] * 50 + [2] * 50


@pytest.mark.parametrize("kind", ["missing directory", "directory", "pipe without reader"])
def test_a_failing_report_is_one_warning(
    kind: str, report: LoadReport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path
    if kind == "missing directory":
        path = tmp_path / "absent" / "report.jsonl"
    if kind == "pipe without reader":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    report.finish()
    with caplog.at_level(logging.WARNING):
        report.append_to(path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text


def test_a_number_that_json_cannot_hold_is_one_warning(
    report: LoadReport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report.latency_s = {"p50_s": float("nan")}
    report.append_to(tmp_path / "r")
    assert len(caplog.records) == 1
    assert not (tmp_path / "r").exists()
