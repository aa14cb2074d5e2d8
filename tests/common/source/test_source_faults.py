"""Every way in which a reply can be wrong, one attempt at a time and through `read`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fastload_common.config import Settings
from fastload_common.errors import (
    AccessDeniedError,
    ObjectChangedError,
    ObjectMissingError,
    RangeMismatchError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Receiver
from fastload_common.testing.fault_server import Fault, FaultServer
from tests.common.source.conftest import IMPATIENT, QUICK, OpenS3, RecordingClock

DATA = bytes((i * 7) % 251 for i in range(5_000))
RANGE = ByteRange(100, 300)
NAME = "bucket/m/key"
POISON = 0xEE


@pytest.fixture
def receiver(fault_server: FaultServer, open_s3: OpenS3) -> Iterator[Receiver]:
    fault_server.put("bucket", "m/key", DATA)
    receiver = open_s3("s3://bucket/m").open_receiver()
    yield receiver
    receiver.close()


def _object_id(server: FaultServer) -> ObjectId:
    data, etag = server.objects[NAME]
    return ObjectId(f"s3://{NAME}", etag, len(data))


def _receive(
    receiver: Receiver, server: FaultServer, *faults: Fault | None, byte_range: ByteRange = RANGE
) -> bytearray:
    server.script("GET", NAME, faults)
    buffer = bytearray([POISON]) * byte_range.size_bytes
    receiver.receive(_object_id(server), byte_range, memoryview(buffer))
    return buffer


RIGHT = {"Content-Range": "bytes 100-299/5000"}
MISMATCHES = {
    "range ignored": (Fault(ignore_range=True), "does not honour Range"),
    "other range": (Fault(headers={"Content-Range": "bytes 101-300/5000"}), "another range"),
    "wider range": (Fault(headers={"Content-Range": "bytes 100-300/5000"}), "another range"),
    "no range": (Fault(headers={"Content-Range": None}), "does not say which range"),
    "not a range": (Fault(headers={"Content-Range": "items 1-2/3"}), "no answer"),
    "unsatisfied form": (Fault(headers={"Content-Range": "bytes */5000"}), "no answer"),
    "size unknown": (Fault(headers={"Content-Range": "bytes 100-299/*"}), "how large"),
    "status 204": (Fault(status=204), "no answer"),
    "length smaller": (Fault(headers={"Content-Length": "50"}), "announces 50 bytes"),
    "length larger": (Fault(headers={"Content-Length": "5000"}), "announces 5000 bytes"),
    "no etag": (Fault(headers={"ETag": None}), "no ETag"),
    "chunked and longer": (Fault(chunked=True, body=bytes(201)), "longer than the range"),
    "until close and longer": (
        Fault(headers={"Content-Length": None}, body=bytes(201)),
        "longer than the range",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_s19_reply_that_is_not_the_range(
    receiver: Receiver, fault_server: FaultServer, case: str
) -> None:
    fault, words = MISMATCHES[case]
    with pytest.raises(RangeMismatchError, match=words) as caught:
        _receive(receiver, fault_server, fault, fault)
    error = caught.value
    assert not error.retryable
    assert error.received_bytes == 0
    assert len(fault_server.seen("GET")) == 2
    assert error.fields["uri"] == f"s3://{NAME}"
    assert error.fields["range"] == "[100, 300)"
    assert error.fields["endpoint"] == fault_server.endpoint
    # The connection is not used for another reply.
    assert _receive(receiver, fault_server) == DATA[100:300]


@pytest.mark.parametrize("case", MISMATCHES)
def test_s18_one_damaged_reply_is_asked_for_once_more(
    receiver: Receiver, fault_server: FaultServer, case: str
) -> None:
    fault, _ = MISMATCHES[case]
    assert _receive(receiver, fault_server, fault) == DATA[100:300]
    assert len(fault_server.seen("GET")) == 2


def test_reply_to_another_request_on_a_kept_connection(
    receiver: Receiver, fault_server: FaultServer
) -> None:
    # It came too late to be seen as a leftover; of another object, so with another ETag.
    stray = Fault(headers={"ETag": '"another"'})
    _receive(receiver, fault_server)
    assert _receive(receiver, fault_server, stray) == DATA[100:300]
    # On a new connection it is the truth.
    fault_server.drop_connections()
    with pytest.raises(ObjectChangedError):
        _receive(receiver, fault_server, stray)
    assert len(fault_server.seen("GET")) == 4


CHANGES = {
    "other etag": Fault(headers={"ETag": '"other"'}),
    "other size": Fault(headers={"Content-Range": "bytes 100-299/5001"}),
    "412": Fault(status=412, code="PreconditionFailed"),
    "416": Fault(status=416, code="InvalidRange"),
    "404": Fault(status=404, code="NoSuchKey"),
    "410": Fault(status=410),
}


@pytest.mark.parametrize("case", CHANGES)
def test_s21_object_changed(receiver: Receiver, fault_server: FaultServer, case: str) -> None:
    with pytest.raises(ObjectChangedError) as caught:
        _receive(receiver, fault_server, CHANGES[case])
    assert not caught.value.retryable
    assert caught.value.received_bytes == 0
    assert f"s3://{NAME}" in str(caught.value)


def test_s21_change_names_both_etags(receiver: Receiver, fault_server: FaultServer) -> None:
    object_id = _object_id(fault_server)
    new = fault_server.put("bucket", "m/key", DATA[::-1])
    with pytest.raises(ObjectChangedError) as caught:
        receiver.receive(object_id, RANGE, memoryview(bytearray(200)))
    assert caught.value.fields["expected_etag"] == object_id.etag
    assert caught.value.fields["found_etag"] == new
    # A multipart ETag is quoted and compared like any other.
    multipart = fault_server.put("bucket", "m/key", DATA, etag='"0123-7"')
    pinned = ObjectId(object_id.uri, multipart, len(DATA))
    receiver.receive(pinned, RANGE, memoryview(bytearray(200)))
    assert fault_server.seen("GET")[-1].headers["if-match"] == '"0123-7"'


GOOD = {
    "plain": (Fault(), RANGE),
    "200 with the right range": (Fault(status=200), RANGE),
    "200 for the whole": (Fault(ignore_range=True), ByteRange(0, 5_000)),
    "chunked": (Fault(chunked=True), ByteRange(0, 4_500)),
    "until close": (Fault(headers={"Content-Length": None}), RANGE),
    "weak etag": (Fault(headers={"ETag": 'W/"weak"'}), RANGE),
    "closing": (Fault(headers={"Connection": "close"}), RANGE),
}


@pytest.mark.parametrize("case", GOOD)
def test_replies_that_are_accepted(
    receiver: Receiver, fault_server: FaultServer, case: str
) -> None:
    if case == "weak etag":
        fault_server.put("bucket", "m/key", DATA, etag='"weak"')
    fault, byte_range = GOOD[case]
    for _ in range(2):
        found = _receive(receiver, fault_server, fault, byte_range=byte_range)
        assert found == DATA[byte_range.start : byte_range.end]


BREAKS = {
    "closed": (Fault(cut_after_bytes=70), 70),
    "closed before the body": (Fault(cut_after_bytes=0), 0),
    "closed before the last byte": (Fault(cut_after_bytes=199), 199),
    "reset": (Fault(reset_after_bytes=70), 70),
    "reset before the body": (Fault(reset_after_bytes=0), 0),
    "reset before the head": (Fault(reset_after_bytes=0, before_head=True), 0),
    "closed before the head": (Fault(cut_after_bytes=0, before_head=True), 0),
    "silent": (Fault(stall_after_bytes=70), 70),
    "silent before the head": (Fault(stall_after_bytes=0, before_head=True), 0),
    "chunked and shorter": (Fault(chunked=True, body=DATA[100:170]), 70),
    "chunked and closed": (Fault(chunked=True, cut_after_bytes=70), 70),
    "until close and shorter": (Fault(headers={"Content-Length": None}, body=DATA[100:170]), 70),
}


@pytest.mark.parametrize("case", BREAKS)
def test_s16_s18_body_that_ends_early(
    fault_server: FaultServer, open_s3: OpenS3, case: str
) -> None:
    fault, sent_bytes = BREAKS[case]
    fault_server.put("bucket", "m/key", DATA)
    settings = IMPATIENT if "silent" in case else QUICK
    receiver = open_s3("s3://bucket/m", settings).open_receiver()
    fault_server.script("GET", NAME, [fault])
    buffer = bytearray([POISON]) * 200
    with pytest.raises(SourceUnavailableError) as caught:
        receiver.receive(_object_id(fault_server), RANGE, memoryview(buffer))
    received_bytes = caught.value.received_bytes
    # A reset may overtake bytes that were sent before it.
    assert received_bytes == sent_bytes or ("reset" in case and received_bytes <= sent_bytes)
    assert buffer[:received_bytes] == DATA[100 : 100 + received_bytes]
    assert buffer[received_bytes:] == bytes([POISON]) * (200 - received_bytes)
    assert caught.value.retryable
    # The next one goes over a new connection.
    assert _receive(receiver, fault_server) == DATA[100:300]
    receiver.close()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (Fault(status=500, code="InternalError"), SourceUnavailableError, "InternalError"),
        (Fault(status=502), SourceUnavailableError, "502"),
        (Fault(status=504), SourceUnavailableError, "504"),
        (Fault(status=429), SourceUnavailableError, "FASTLOAD_CONCURRENCY"),
        (Fault(status=400, code="RequestTimeout"), SourceUnavailableError, "RequestTimeout"),
        (Fault(status=503, code="SlowDown"), SourceUnavailableError, "SlowDown"),
        (Fault(status=403, code="AccessDenied"), AccessDeniedError, "s3:GetObject"),
        (Fault(status=403, code="SignatureDoesNotMatch"), AccessDeniedError, "secret key does not"),
        (Fault(status=403, code="RequestTimeTooSkewed"), AccessDeniedError, "clock is wrong"),
        (Fault(status=403), AccessDeniedError, "not allowed to read"),
        (Fault(status=404, code="NoSuchBucket"), ObjectMissingError, "no such bucket"),
        (Fault(status=301, code="PermanentRedirect"), SourceError, "bucket is elsewhere"),
        (Fault(status=400, code="InvalidRequest"), SourceError, "refused to read"),
        (Fault(status=501, code="NotImplemented"), SourceError, "refused to read"),
    ],
)
def test_error_replies(
    receiver: Receiver,
    fault_server: FaultServer,
    fault: Fault,
    kind: type[SourceError],
    words: str,
) -> None:
    with pytest.raises(SourceError, match=words) as caught:
        _receive(receiver, fault_server, fault, fault, fault)
    error = caught.value
    assert type(error) is kind
    assert error.received_bytes == 0
    assert error.fields["status"] == fault.status
    assert error.fields.get("code", "") == fault.code
    assert error.fields["request_id"].startswith("request-")
    assert error.fields["endpoint"] == fault_server.endpoint
    assert error.fields["credentials"] == "env"
    assert "env-secret" not in str(error)
    # An error whose body was read whole leaves the connection usable.
    assert len(fault_server.seen("GET")) <= 3
    assert _receive(receiver, fault_server) == DATA[100:300]


def test_s15_retry_after_is_passed_on(receiver: Receiver, fault_server: FaultServer) -> None:
    slow = Fault(status=503, code="SlowDown", headers={"Retry-After": "2"})
    with pytest.raises(SourceUnavailableError) as caught:
        _receive(receiver, fault_server, slow)
    assert caught.value.fields["retry_after_s"] == 2.0


def test_error_body_is_capped_and_never_data(receiver: Receiver, fault_server: FaultServer) -> None:
    for chunked in (False, True):
        huge = Fault(status=503, body=b"<Error>" + bytes(10_000_000), chunked=chunked)
        buffer = bytearray([POISON]) * 200
        fault_server.script("GET", NAME, [huge])
        with pytest.raises(SourceUnavailableError):
            receiver.receive(_object_id(fault_server), RANGE, memoryview(buffer))
        assert buffer == bytes([POISON]) * 200
    assert _receive(receiver, fault_server) == DATA[100:300]


def test_idle_connection_closed_by_the_server_is_replaced(
    receiver: Receiver, fault_server: FaultServer
) -> None:
    object_id, buffer = _object_id(fault_server), memoryview(bytearray(200))
    assert receiver.receive(object_id, RANGE, buffer).new_connection
    assert not receiver.receive(object_id, RANGE, buffer).new_connection
    fault_server.drop_connections()
    assert receiver.receive(object_id, RANGE, buffer).new_connection
    assert len(fault_server.seen("GET")) == 3
    # Once only: what also happens on a new connection is a failure.
    fault_server.script("GET", NAME, [Fault(cut_after_bytes=0, before_head=True)] * 3)
    with pytest.raises(SourceUnavailableError):
        receiver.receive(object_id, RANGE, buffer)
    assert len(fault_server.seen("GET")) == 5


@pytest.mark.parametrize("before_head", [False, True])
def test_abort_ends_a_stalled_request_at_once(
    fault_server: FaultServer, open_s3: OpenS3, before_head: bool
) -> None:
    fault_server.put("bucket", "m/key", DATA)
    source = open_s3("s3://bucket/m", Settings(read_timeout_s=60.0))
    receiver = source.open_receiver()
    fault_server.script("GET", NAME, [Fault(stall_after_bytes=0, before_head=before_head)])
    caught: list[SourceError] = []

    def work() -> None:
        try:
            receiver.receive(_object_id(fault_server), RANGE, memoryview(bytearray(200)))
        except SourceError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not fault_server.seen("GET"):
        thread.join(0.001)
    receiver.abort()
    thread.join(20)
    assert not thread.is_alive()
    assert "aborted" in str(caught[0])
    receiver.close()


# `read`: attempts


def test_s16_read_asks_for_missing_bytes_only(
    fault_server: FaultServer, open_s3: OpenS3, clock: RecordingClock
) -> None:
    fault_server.put("bucket", "m/key", DATA)
    source = open_s3("s3://bucket/m")
    faults = [Fault(cut_after_bytes=70), Fault(status=503, headers={"Retry-After": "1"})]
    fault_server.script("GET", NAME, faults)
    assert source.read(_object_id(fault_server), RANGE) == DATA[100:300]
    ranges = [request.headers["range"] for request in fault_server.seen("GET")]
    assert ranges == ["bytes=100-299", "bytes=170-299", "bytes=170-299"]
    assert 0 <= clock.waits_s[0] <= 0.1
    assert 1.0 <= clock.waits_s[1] <= 1.25
    signatures = {request.headers["authorization"] for request in fault_server.seen("GET")}
    assert len(signatures) >= 2  # each is signed anew


def test_read_gives_up_after_max_attempts(
    fault_server: FaultServer, open_s3: OpenS3, clock: RecordingClock
) -> None:
    fault_server.put("bucket", "m/key", DATA)
    fault_server.script("GET", NAME, [], then=Fault(status=503, code="SlowDown"))
    with pytest.raises(SourceUnavailableError, match="SlowDown") as caught:
        open_s3("s3://bucket/m").read(_object_id(fault_server), RANGE)
    assert caught.value.fields["attempts"] == 3
    assert len(fault_server.seen("GET")) == 3
    assert len(clock.waits_s) == 2


def test_read_does_not_repeat_what_cannot_help(
    fault_server: FaultServer, open_s3: OpenS3, clock: RecordingClock
) -> None:
    fault_server.put("bucket", "m/key", DATA)
    fault_server.script("GET", NAME, [], then=Fault(status=403, code="AccessDenied"))
    with pytest.raises(AccessDeniedError):
        open_s3("s3://bucket/m").read(_object_id(fault_server), RANGE)
    assert len(fault_server.seen("GET")) == 1
    assert clock.waits_s == []


# Keys go over the wire exactly


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("a//b", "a//b"),
        ("/lead", "/lead"),
        ("./x/../y", "./x/../y"),
        ("a b+c%2F~é", "a%20b%2Bc%252F~%C3%A9"),
        ("ü?#&=", "%C3%BC%3F%23%26%3D"),
    ],
)
def test_keys_are_encoded_and_never_normalised(
    fault_server: FaultServer, open_s3: OpenS3, key: str, path: str
) -> None:
    fault_server.put("bucket", f"m/{key}", b"0123")
    source = open_s3("s3://bucket/m")
    object_id = source.stat(key)
    assert source.read(object_id) == b"0123"
    assert fault_server.seen("GET")[-1].raw_path == f"/bucket/m/{path}"
    # botocore sends HEAD with the same path.
    assert fault_server.seen("HEAD")[-1].raw_path == f"/bucket/m/{path}"
    assert [row.key for row in source.list()] == [key]
