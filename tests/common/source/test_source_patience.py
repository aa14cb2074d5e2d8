"""How long small calls go on: busy stores, endpoints that are not there, the load's deadline."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from fastload_common.config import Settings
from fastload_common.errors import (
    AccessDeniedError,
    DeadlineError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.source.retries import Attempts, SmallCalls
from fastload_common.source.s3 import S3Source
from fastload_common.source.uri import s3_location
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.fault_server import Fault, FaultServer
from tests.common.source.conftest import OpenS3, RecordingClock

SLOW_DOWN = Fault(status=503, code="SlowDown")
DATA = b"0123456789"
CALLS: dict[str, tuple[str, str, Callable[[S3Source], object]]] = {
    "list": ("GET", "bucket", lambda source: source.list()),
    "stat": ("HEAD", "bucket/m/key", lambda source: source.stat("key")),
    "read": ("GET", "bucket/m/key", lambda source: source.read(source.stat("key"))),
    "put": ("PUT", "bucket/m/new", lambda source: source.put_if_absent("new", b"x")),
}


@pytest.mark.parametrize("call", CALLS)
def test_s15_busy_store_is_asked_again_patiently(
    fault_server: FaultServer, open_s3: OpenS3, clock: RecordingClock, call: str
) -> None:
    method, name, action = CALLS[call]
    fault_server.put("bucket", "m/key", DATA)
    fault_server.script(method, name, [SLOW_DOWN] * 9)
    action(open_s3("s3://bucket/m", Settings()))
    assert len(clock.waits_s) == 9
    ceilings_s = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    assert all(0 <= w <= c for w, c in zip(clock.waits_s, ceilings_s, strict=True))


def test_s15_busy_store_ends_it_in_the_end(
    fault_server: FaultServer, open_s3: OpenS3, clock: RecordingClock
) -> None:
    fault_server.put("bucket", "m/key", DATA)
    fault_server.script("GET", "bucket", [], then=SLOW_DOWN)
    with pytest.raises(SourceUnavailableError, match="SlowDown") as caught:
        open_s3("s3://bucket/m", Settings(max_attempts=12)).list()
    assert caught.value.fields["attempts"] == 12
    assert len(clock.waits_s) == 11


def test_s15_retry_after_is_waited_for_and_bounded(
    fault_server: FaultServer, open_s3: OpenS3, clock: RecordingClock
) -> None:
    fault_server.put("bucket", "m/key", DATA)
    faults = [Fault(status=503, code="SlowDown", headers={"Retry-After": s}) for s in ("7", "9999")]
    fault_server.script("GET", "bucket", faults)
    open_s3("s3://bucket/m", Settings()).list()
    assert 7 <= clock.waits_s[0] <= 7.25
    assert 60 <= clock.waits_s[1] <= 60.5


def test_resets_of_a_busy_store_are_counted_by_themselves(
    fault_server: FaultServer, open_s3: OpenS3
) -> None:
    fault_server.put("bucket", "m/key", DATA)
    reset = Fault(reset_after_bytes=0, before_head=True)
    fault_server.script("GET", "bucket", [SLOW_DOWN] * 6 + [reset] * 3 + [SLOW_DOWN] * 2)
    assert len(open_s3("s3://bucket/m", Settings()).list()) == 1


def test_s24_endpoint_that_never_answers_is_told_within_10_s() -> None:
    # Each attempt of a black hole takes as long as its timeout.
    clock = FakeClock(auto=True)
    calls = SmallCalls(Settings(), clock)
    for timeout_s in calls.timeouts_s():
        attempts = calls.begin("list s3://bucket")
        started_s = clock.monotonic_s()

        def fail_for_ever(attempts: Attempts = attempts, timeout_s: float = timeout_s) -> None:
            while True:
                clock.advance(timeout_s)
                attempts.wait_or_raise(SourceUnavailableError("timed out"))

        with pytest.raises(SourceUnavailableError) as caught:
            fail_for_ever()
        assert clock.monotonic_s() - started_s <= 10
        assert caught.value.fields["attempts"] >= 2


def test_s24_after_the_first_answer_the_settings_count(
    fault_server: FaultServer, open_s3: OpenS3
) -> None:
    calls = SmallCalls(Settings(), FakeClock(auto=True))
    assert calls.timeouts_s() == (3.0, 4.0)
    assert SmallCalls(Settings(read_timeout_s=0.5), FakeClock()).timeouts_s() == (3.0, 0.5)
    assert SmallCalls(Settings(deadline_s=2.0), FakeClock()).timeouts_s() == (2.0, 2.0)
    with pytest.raises(AccessDeniedError):
        calls.begin("x").wait_or_raise(AccessDeniedError("denied", status=403))
    assert calls.timeouts_s() == (5.0, 20.0)
    # Through the source: a client made in haste is replaced when a silence ends a later call.
    fault_server.put("bucket", "m/key", DATA)
    source = open_s3("s3://bucket/m", Settings(read_timeout_s=30.0))
    source.list()
    session = source._session
    assert session.state().timeouts_s == (3.0, 4.0)
    fault_server.script("HEAD", "bucket/m/key", [Fault(reset_after_bytes=0, before_head=True)])
    source.stat("key")
    assert session.state().timeouts_s == (5.0, 30.0)


def test_s24_accepted_and_never_answered(
    fault_server: FaultServer, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setattr("fastload_common.source.retries._FIRST_READ_TIMEOUT_S", 0.2)
        monkeypatch.setattr("fastload_common.source.retries._FIRST_ANSWER_S", 0.5)
        with pytest.raises(SourceUnavailableError, match="not reached") as caught:
            open_s3("s3://bucket/m", Settings()).list()
        # With the settings' 20 s, five times, this test would take minutes.
        assert caught.value.fields["attempts"] <= 2
        assert caught.value.fields["endpoint"] == endpoint


@pytest.mark.parametrize("call", CALLS)
def test_deadline_counts_from_opening_and_ends_small_calls(
    fault_server: FaultServer, clock: RecordingClock, call: str
) -> None:
    method, name, action = CALLS[call]
    fault_server.put("bucket", "m/key", DATA)
    fault_server.script(method, name, [], then=SLOW_DOWN)
    fake = FakeClock(auto=True)
    source = S3Source(s3_location("s3://bucket/m"), Settings(deadline_s=3.0), fake)
    started_s = fake.monotonic_s()
    with pytest.raises(DeadlineError, match="within 3 s") as caught:
        action(source)
    assert fake.monotonic_s() - started_s <= 3.0
    assert "status=503" in caught.value.fields["last_fault"]
    # Nothing more is asked afterwards.
    fake.advance(3.0)
    asked = len(fault_server.requests)
    with pytest.raises(DeadlineError):
        source.list()
    assert len(fault_server.requests) == asked
    source.close()


def test_deadline_shortens_the_wait_for_a_silent_header_read(
    fault_server: FaultServer, open_s3: OpenS3
) -> None:
    fault_server.put("bucket", "m/key", DATA)
    source = open_s3("s3://bucket/m", Settings(deadline_s=1.0, max_attempts=1))
    object_id = source.stat("key")
    fault_server.script("GET", "bucket/m/key", [], then=Fault(stall_after_bytes=3))
    with pytest.raises(SourceUnavailableError, match=r"silence: 1 s|may take 1 s"):
        source.read(object_id)


def test_wrong_answers_are_not_repeated(
    fault_server: FaultServer, open_s3: OpenS3, clock: RecordingClock
) -> None:
    fault_server.put("bucket", "m/key", DATA)
    fault_server.script("GET", "bucket", [], then=Fault(status=501, code="NotImplemented"))
    with pytest.raises(SourceError, match="refused"):
        open_s3("s3://bucket/m").list()
    assert clock.waits_s == []
