"""Messages between a process and its receivers."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common import errors
from fastload_common.errors import FastloadError, SourceError, SourceUnavailableError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.http_message import Endpoint, Proxy
from fastload_common.transfer.wire import Get, Inbox, Message, Outbox, error_from, error_record

TEXTS = st.text(max_size=50) | st.just("\udcff\n\"'")


@given(
    messages=st.lists(st.lists(TEXTS | st.integers() | st.none(), max_size=4), max_size=8),
    cuts=st.lists(st.integers(1, 40), min_size=1),
)
def test_messages_arrive_whole_however_they_are_cut(
    messages: list[list[object]], cuts: list[int]
) -> None:
    one, other = socket.socketpair()
    with one, other:
        outbox = Outbox(one)
        outbox.add(*messages)
        assert outbox.flush()
        one.shutdown(socket.SHUT_WR)
        data = b""
        while part := other.recv(65536):
            data += part
    inbox, found, position = Inbox(), [], 0
    while position < len(data):
        size = cuts[position % len(cuts)]
        found += inbox.take(data[position : position + size])
        position += size
    assert found == messages


def test_a_full_socket_blocks_nobody_and_loses_nothing() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        outbox, inbox = Outbox(one), Inbox()
        messages = [["get", number, "x" * 1000] for number in range(200)]
        outbox.add(*messages)
        assert not outbox.flush()
        assert not outbox.is_empty
        found: list[Message] = []
        while len(found) < len(messages):
            received = inbox.receive(other)
            assert received is not None
            found += received
            outbox.flush()
        assert found == messages
        assert outbox.flush()
        assert inbox.receive(other) == []
        one.close()
        assert inbox.receive(other) is None


def test_sending_to_who_has_gone_is_an_error_and_no_signal() -> None:
    one, other = socket.socketpair()
    with one:
        other.close()
        outbox = Outbox(one)
        outbox.add(["ready"])
        with pytest.raises(OSError, match="Broken pipe"):
            outbox.flush()


KINDS = [
    kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, FastloadError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_it_was(kind: type[FastloadError]) -> None:
    error = kind("what", hint="hint", uri="s3://b/k", status=503, retry_after_s=2.5)
    if isinstance(error, SourceError):
        error.received_bytes = 17
    arrived = error_from(json.loads(json.dumps(error_record(error))))
    assert type(arrived) is kind
    assert str(arrived) == str(error)
    assert arrived.fields == error.fields
    assert vars(arrived) == vars(error)


def test_a_name_that_is_no_error_is_not_called() -> None:
    assert type(error_from(["annotations", "what", "", {}, 0])) is SourceError
    assert type(error_from(["nonsense", "what", "", {}, 0])) is SourceError


def test_an_error_with_fields_that_are_no_json_is_told() -> None:
    one, other = socket.socketpair()
    with one, other:
        outbox = Outbox(one)
        outbox.add(["failed", error_record(SourceUnavailableError("x", range=ByteRange(1, 2)))])
        outbox.flush()
        received = Inbox().receive(other)
    assert received is not None
    assert received[0][1][3] == {"range": "[1, 2)"}


@pytest.mark.parametrize(
    "endpoint",
    [
        Endpoint("::1", 9000, False),
        Endpoint("s3.example", 443, True, Proxy("proxy", 3128, "Basic secret")),
    ],
)
def test_a_get_arrives_as_it_was_and_shows_no_secret(endpoint: Endpoint) -> None:
    get = Get(
        id=7,
        object_id=ObjectId("s3://b/k\udcff", '"etag"', 100),
        byte_range=ByteRange(5, 50),
        position_bytes=4096,
        endpoint=endpoint,
        ca_file="/ca.pem" if endpoint.tls else None,
        path="/b/k%FF",
        headers={"Authorization": "the-signature"},
        fresh=True,
        urgent=True,
    )
    kind, fields = json.loads(json.dumps(get.message()))
    assert kind == "get"
    assert Get.from_message(fields) == get
    assert "signature" not in repr(get)
    assert "secret" not in repr(get)
