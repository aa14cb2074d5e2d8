"""What both kinds of lanes promise, against a server that fails as it is told."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from fastload_common.config import Settings
from fastload_common.errors import (
    AccessDeniedError,
    ObjectChangedError,
    RangeMismatchError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.ranges import ObjectId
from fastload_common.source.s3 import S3Source
from fastload_common.source.uri import s3_location
from fastload_common.testing.fault_server import Fault, FaultServer
from fastload_common.transfer.lanes import Done, Failed, Progress, Restarted, Started
from tests.common.transfer.lanes_bench import LanesBench, content, receiver_pids

SIZE = 1_000_000
DATA = content(SIZE)
STALL = Fault(stall_after_bytes=40_000)

MakeLanes = Callable[..., LanesBench]


@pytest.fixture
def server(fault_server: FaultServer) -> FaultServer:
    fault_server.put("bucket", "m/key", DATA)
    return fault_server


@pytest.fixture(params=["threads", "processes"])
def make(request: pytest.FixtureRequest, server: FaultServer) -> Iterator[MakeLanes]:
    """Makes lanes of each kind; afterwards nothing of them is left."""
    made: list[LanesBench] = []

    def make_one(settings: Settings | None = None, **options: int) -> LanesBench:
        settings = settings or Settings()
        source = S3Source(s3_location("s3://bucket/m"), settings)
        made.append(LanesBench(source, request.param, settings=settings, **options))
        return made[-1]

    yield make_one
    server.release.set()
    for bench in made:
        bench.close()
    assert receiver_pids() == []
    names = [thread.name for thread in threading.enumerate()]
    assert [name for name in names if name.startswith("fastload-receive")] == []


def key(server: FaultServer) -> ObjectId:
    return ObjectId("s3://bucket/m/key", server.objects["bucket/m/key"][1], SIZE)


def test_every_byte_comes_and_the_receipt_says_so(server: FaultServer, make: MakeLanes) -> None:
    bench = make()
    ids = {
        start: bench.start(key(server), start, start + 50_000) for start in range(0, SIZE, 50_000)
    }
    for start, attempt_id in ids.items():
        end = bench.end_of(attempt_id)
        assert isinstance(end, Done)
        assert end.receipt.size_bytes == 50_000
        assert 0 < end.receipt.first_byte_s <= end.receipt.total_s
        assert bench.memory(attempt_id) == DATA[start : start + 50_000]
        started = bench.started(attempt_id)
        assert started.at_s <= end.at_s
    for request in server.seen("GET"):
        assert request.headers["if-match"] == key(server).etag
        assert request.access_key == "ENVKEY"
    opened = [e for e in bench.events if isinstance(e, Done) and e.receipt.new_connection]
    assert 1 <= len(opened) <= 4


def test_attempts_start_in_order(server: FaultServer, make: MakeLanes) -> None:
    bench = make(connections=1)
    ids = [bench.start(key(server), n * 1000, n * 1000 + 1000) for n in range(12)]
    for attempt_id in ids:
        bench.end_of(attempt_id)
    assert [e.attempt_id for e in bench.events if isinstance(e, Started)] == ids
    assert [e.attempt_id for e in bench.events if isinstance(e, Done)] == ids


def test_no_more_run_at_once_than_the_limit(server: FaultServer, make: MakeLanes) -> None:
    bench = make(connections=2)
    server.script("GET", "bucket/m/key", [STALL] * 5)
    ids = [bench.start(key(server), 0, 50_000) for _ in range(5)]
    bench.wait(lambda: len(server.seen("GET")) == 2)
    bench.events += bench.mailbox.wait(0.3)  # more would come by now
    assert len(server.seen("GET")) == 2
    assert len([e for e in bench.events if isinstance(e, Started)]) == 2
    bench.lanes.set_limit(4)
    bench.wait(lambda: len(server.seen("GET")) == 4)
    server.release.set()
    assert all(isinstance(bench.end_of(attempt_id), Failed) for attempt_id in ids)


def test_a_lower_limit_lets_run_what_runs(server: FaultServer, make: MakeLanes) -> None:
    bench = make(connections=3)
    server.script("GET", "bucket/m/key", [STALL] * 3)
    running = [bench.start(key(server), 0, 50_000) for _ in range(3)]
    for attempt_id in running:
        bench.started(attempt_id)
    bench.lanes.set_limit(1)
    waiting = bench.start(key(server), 0, 10)
    bench.lanes.cancel(running[0])
    assert bench.failure(running[0]).cancelled
    bench.events += bench.mailbox.wait(0.2)
    assert not bench.of(waiting, Started)
    bench.lanes.cancel(running[1])
    bench.lanes.cancel(running[2])
    assert isinstance(bench.end_of(waiting), Done)


def test_a_queued_attempt_is_cancelled(server: FaultServer, make: MakeLanes) -> None:
    bench = make(connections=1)
    server.script("GET", "bucket/m/key", [STALL])
    first = bench.start(key(server), 0, 50_000)
    bench.started(first)
    bench.wait(lambda: server.seen("GET"))
    # One of them waits beside the connection, the others here.
    queued = [bench.start(key(server), 0, 1000) for _ in range(4)]
    for attempt_id in reversed(queued):
        bench.lanes.cancel(attempt_id)
    for attempt_id in queued:
        failure = bench.failure(attempt_id)
        assert failure.cancelled
        assert isinstance(failure.error, SourceUnavailableError)
        assert failure.error.received_bytes == 0
        assert not bench.of(attempt_id, Started)
    assert not bench.ends(first)
    assert len(server.seen("GET")) == 1


def test_a_running_attempt_is_cancelled_and_its_memory_is_left_alone(
    server: FaultServer, make: MakeLanes
) -> None:
    bench = make()
    server.script("GET", "bucket/m/key", [STALL])
    attempt_id = bench.start(key(server), 0, 60_000)
    bench.started(attempt_id)
    bench.wait(lambda: server.seen("GET"))
    if bench.lanes.__class__.__name__ == "ProcessLanes":
        assert bench.progressed(attempt_id, 0).first_byte_s > 0
    bench.lanes.cancel(attempt_id)
    failure = bench.failure(attempt_id)
    assert failure.cancelled
    assert isinstance(failure.error, SourceUnavailableError)
    good = failure.error.received_bytes
    assert 0 <= good <= 40_000
    assert bench.memory(attempt_id)[:good] == DATA[:good]
    bench.mark(attempt_id)
    server.release.set()
    # The connection that was aborted is not used again; another attempt works.
    assert isinstance(bench.end_of(bench.start(key(server), 500, 700)), Done)
    assert bench.is_marked(attempt_id)


def test_cancelling_what_is_unknown_or_has_ended_does_nothing(
    server: FaultServer, make: MakeLanes
) -> None:
    bench = make()
    bench.lanes.cancel(77)
    attempt_id = bench.start(key(server), 0, 10)
    bench.end_of(attempt_id)
    bench.lanes.cancel(attempt_id)
    bench.events += bench.mailbox.wait(0.1)
    assert len(bench.ends(attempt_id)) == 1


@pytest.mark.parametrize(
    ("fault", "kind", "good_bytes"),
    [
        (Fault(reset_after_bytes=0, before_head=True), SourceUnavailableError, 0),
        (Fault(cut_after_bytes=20_001), SourceUnavailableError, 20_001),
        (Fault(chunked=True, cut_after_bytes=20_001), SourceUnavailableError, 20_001),
        (Fault(status=503, code="SlowDown", headers={"Retry-After": "7"}), None, 0),
        (Fault(status=403, code="AccessDenied"), AccessDeniedError, 0),
        (Fault(status=412, code="PreconditionFailed"), ObjectChangedError, 0),
        (Fault(status=404, code="NoSuchKey"), ObjectChangedError, 0),
        (Fault(status=400, code="InvalidArgument"), SourceError, 0),
    ],
)
def test_a_failure_is_typed_and_counts_good_bytes(
    server: FaultServer,
    make: MakeLanes,
    fault: Fault,
    kind: type[SourceError] | None,
    good_bytes: int,
) -> None:
    bench = make()
    server.script("GET", "bucket/m/key", [fault])
    attempt_id = bench.start(key(server), 100, 50_100)
    failure = bench.failure(attempt_id)
    error = failure.error
    assert not failure.cancelled
    assert isinstance(error, SourceError)
    assert type(error) is (kind or SourceUnavailableError)
    assert error.received_bytes == good_bytes
    assert bench.memory(attempt_id)[:good_bytes] == DATA[100 : 100 + good_bytes]
    assert error.fields["uri"] == "s3://bucket/m/key"
    assert error.fields["range"] == "[100, 50100)"
    if kind is None:
        assert error.fields["retry_after_s"] == 7.0
        assert error.fields["code"] == "SlowDown"
    assert "Signature" not in str(error) + repr(error.__dict__)
    # What failed is no reason to fail again.
    assert isinstance(bench.end_of(bench.start(key(server), 0, 10)), Done)


def test_s19_a_reply_that_is_not_the_range_is_asked_once_more(
    server: FaultServer, make: MakeLanes
) -> None:
    bench = make()
    server.script("GET", "bucket/m/key", [Fault(ignore_range=True)])
    attempt_id = bench.start(key(server), 100, 200)
    assert isinstance(bench.end_of(attempt_id), Done)
    assert bench.memory(attempt_id) == DATA[100:200]
    # Told of, where the second reply does not come within the same call of a receiver.
    assert len(bench.of(attempt_id, Started)) == 1 + len(bench.of(attempt_id, Restarted))
    assert len(server.seen("GET")) == 2
    server.script("GET", "bucket/m/key", [], then=Fault(ignore_range=True))
    error = bench.failure(bench.start(key(server), 100, 200)).error
    assert isinstance(error, RangeMismatchError)
    assert len(server.seen("GET")) == 4


def test_a_fresh_attempt_uses_no_kept_connection(server: FaultServer, make: MakeLanes) -> None:
    bench = make(connections=1)
    for fresh, is_new in ((False, True), (False, False), (True, True), (False, False)):
        end = bench.end_of(bench.start(key(server), 0, 10, fresh=fresh))
        assert isinstance(end, Done)
        assert end.receipt.new_connection == is_new


def test_s13_an_expired_token_is_renewed_and_only_that_range_asked_again(
    server: FaultServer, make: MakeLanes
) -> None:
    bench = make(connections=1)
    server.script("GET", "bucket/m/key", [None, Fault(status=400, code="ExpiredToken"), None])
    ids = [bench.start(key(server), n * 1000, n * 1000 + 1000) for n in range(3)]
    assert all(isinstance(bench.end_of(attempt_id), Done) for attempt_id in ids)
    asked = sorted(request.headers["range"] for request in server.seen("GET"))
    assert len(asked) == 4
    assert len(set(asked)) == 3
    assert not any(isinstance(event, Failed) for event in bench.events)
    # It is expired for good: one renewal, then the error.
    server.expired_keys.add("ENVKEY")
    error = bench.failure(bench.start(key(server), 0, 10)).error
    assert isinstance(error, AccessDeniedError)
    assert "expired" in str(error)
    assert len(server.seen("GET")) == 6


@pytest.mark.parametrize("hint", ["header", "body"])
def test_another_region_is_signed_for(server: FaultServer, make: MakeLanes, hint: str) -> None:
    server.regions["bucket"] = "eu-west-3"
    server.region_hint = hint
    bench = make()
    ids = [bench.start(key(server), n * 1000, n * 1000 + 1000) for n in range(8)]
    assert all(isinstance(bench.end_of(attempt_id), Done) for attempt_id in ids)
    wrong = [r for r in server.seen("GET") if r.region != "eu-west-3"]
    assert 1 <= len(wrong) <= 8
    asked = len(server.seen("GET"))
    bench.end_of(bench.start(key(server), 0, 10))
    assert len(server.seen("GET")) == asked + 1


def test_closing_ends_all_and_tells_nothing(server: FaultServer, make: MakeLanes) -> None:
    bench = make(connections=2)
    server.script("GET", "bucket/m/key", [STALL] * 4)
    ids = [bench.start(key(server), 0, 60_000) for _ in range(4)]
    bench.wait(lambda: len([e for e in bench.events if isinstance(e, Started)]) == 2)
    bench.lanes.close()
    bench.lanes.close()
    assert receiver_pids() == []
    bench.mailbox.wait(0)  # what came before the end is lost
    for attempt_id in ids:
        bench.mark(attempt_id)
    server.release.set()
    assert bench.mailbox.wait(0.2) == []
    assert all(bench.is_marked(attempt_id) for attempt_id in ids)
    with pytest.raises(RuntimeError, match="closed"):
        bench.start(key(server), 0, 10)


def test_a_forked_process_can_neither_use_nor_end_them(
    server: FaultServer, make: MakeLanes
) -> None:
    bench = make()
    bench.end_of(bench.start(key(server), 0, 10))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            bench.lanes.close()
            with pytest.raises(RuntimeError, match="parent"):
                bench.lanes.cancel(1)
            with pytest.raises(RuntimeError, match="parent"):
                bench.lanes.set_limit(2)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert isinstance(bench.end_of(bench.start(key(server), 0, 10)), Done)


def test_a_signature_that_cannot_be_made_is_the_attempts_failure(
    server: FaultServer, make: MakeLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    error = bench.failure(bench.start(key(server), 0, 10)).error
    assert isinstance(error, AccessDeniedError)
    assert "no credentials were found" in str(error)
    assert server.requests == []


def test_progress_is_told_only_for_good_replies(server: FaultServer, make: MakeLanes) -> None:
    bench = make()
    server.script("GET", "bucket/m/key", [Fault(status=503, code="SlowDown")])
    bench.failure(bench.start(key(server), 0, 10))
    assert not any(isinstance(event, Progress) for event in bench.events)
