"""Replies that are not what was asked, and refusals."""

from __future__ import annotations

import contextlib
import http.client

import pytest

from fastload_common.testing.rig import (
    ACCESS_DENIED,
    EXPIRED_TOKEN,
    KMS_DISABLED,
    NO_SUCH_KEY,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    Chunked,
    Close,
    ContentRange,
    Error,
    Etag,
    Fault,
    Flip,
    Garbage,
    Headers,
    IgnoreRange,
    Redirect,
    Rig,
    Short,
    Shorter,
    Status,
    Unframed,
)
from tests.common.testing.rig_client import (
    DATA,
    ask,
    ask_on,
    connect,
    ends,
    part,
    receive,
    receive_head,
    sent,
)

SIZE = len(DATA)


def test_s19_range_ignored(rig: Rig) -> None:
    rig.faults = [Fault(IgnoreRange())]
    answer = ask(rig, headers=part(100, 200))
    assert (answer.status, answer.body) == (200, DATA)
    assert "content-range" not in answer.headers


def test_s19_200_with_the_right_content_range(rig: Rig) -> None:
    rig.faults = [Fault(Status(200))]
    answer = ask(rig, headers=part(100, 200))
    assert (answer.status, answer.body) == (200, DATA[100:200])
    assert answer.headers["content-range"] == f"bytes 100-199/{SIZE}"


def test_s19_wrong_content_range(rig: Rig) -> None:
    rig.faults = [Fault(ContentRange(shift_bytes=1)), Fault(Etag('"x"'), attempts=(2,))]
    assert ask(rig, headers=part(100, 200)).headers["content-range"] == f"bytes 101-200/{SIZE}"
    rig.faults = [Fault(ContentRange(total_more_bytes=1))]
    answer = ask(rig, headers=part(100, 200))
    assert answer.headers["content-range"] == f"bytes 100-199/{SIZE + 1}"
    assert answer.body == DATA[100:200]


def test_s21_changed_etag(rig: Rig) -> None:
    rig.faults = [Fault(Etag('"other"'))]
    assert ask(rig).headers["etag"] == '"other"'


def test_other_headers(rig: Rig) -> None:
    rig.faults = [Fault(Headers({"ETag": None, "Content-Length": "5"}))]
    answer = ask(rig)
    assert "etag" not in answer.headers
    assert answer.body == DATA[:5]


def test_s18_length_smaller_than_the_range(rig: Rig) -> None:
    rig.faults = [Fault(Shorter(10))]
    answer = ask(rig, headers=part(0, 100))
    assert (answer.headers["content-length"], answer.body) == ("90", DATA[:90])
    assert answer.headers["content-range"] == f"bytes 0-99/{SIZE}"


def test_s18_chunked(rig: Rig) -> None:
    rig.faults = [Fault(Chunked(chunk_bytes=7000))]
    answer = ask(rig)
    assert answer.body == DATA
    assert answer.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in answer.headers
    rig.faults = [Fault(Chunked()), Fault(Shorter(10))]
    assert ask(rig).body == DATA[:-10]
    rig.faults = [Fault(Chunked()), Fault(Short(50_000))]
    with pytest.raises(http.client.IncompleteRead):
        ask(rig)


def test_body_that_ends_with_the_connection(rig: Rig) -> None:
    rig.faults = [Fault(Unframed())]
    answer = ask(rig)
    assert answer.body == DATA
    assert not {"content-length", "transfer-encoding"} & set(answer.headers)


@pytest.mark.parametrize("order", [1, -1])
def test_a_chunked_reply_needs_nobody_to_close(rig: Rig, order: int) -> None:
    rig.faults = [Fault(Unframed(close=False)), Fault(Chunked(1000))][::order]
    with contextlib.closing(connect(rig)) as connection:
        for _ in range(2):
            assert ask_on(connection).body == DATA
    assert ends(rig) == ["complete", "complete"]
    assert rig.log.connections == 1


def test_body_that_only_the_client_ends(rig: Rig) -> None:
    rig.faults = [Fault(IgnoreRange()), Fault(Unframed(close=False))]
    with sent(rig, part(0, 10)) as raw:
        assert "200 OK" in receive_head(raw)
        assert receive(raw, SIZE) == DATA
        raw.setblocking(False)
        with pytest.raises(BlockingIOError):
            raw.recv(1)
    rig.log.wait_until_unconnected()
    assert ends(rig) == ["client closed"]


def test_garbage(rig: Rig) -> None:
    rig.faults = [Fault(Garbage(b"what?\r\n\r\n"))]
    with sent(rig) as raw:
        assert receive(raw, 100) == b"what?\r\n\r\n"


def test_one_wrong_byte(rig: Rig) -> None:
    rig.faults = [Fault(Flip(150))]
    body = ask(rig, headers=part(100, 200)).body
    assert [i for i in range(100) if body[i] != DATA[100 + i]] == [50]
    assert ask(rig, headers=part(151, 200)).body == DATA[151:200]


def test_closing_after_a_good_reply(rig: Rig) -> None:
    rig.faults = [Fault(Close(announced=True), attempts=(1,)), Fault(Close(), attempts=(2,))]
    connection = connect(rig)
    assert ask_on(connection).headers["connection"] == "close"
    # http.client has opened another one by itself.
    assert "connection" not in ask_on(connection).headers
    rig.log.wait_until_unconnected()
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        ask_on(connection)
    connection.close()
    assert ends(rig) == ["complete", "complete"]


@pytest.mark.parametrize(
    "error",
    [
        SLOW_DOWN,
        TOO_MANY_REQUESTS,
        EXPIRED_TOKEN,
        ACCESS_DENIED,
        NO_SUCH_KEY,
        KMS_DISABLED,
        Error(500, "InternalError", retry_after_s=2),
        Error(503),
    ],
)
def test_errors(rig: Rig, error: Error) -> None:
    # A status of its own does not turn an error into data.
    rig.faults = [Fault(error, methods=("GET", "HEAD")), Fault(Status(200))]
    answer, head = ask(rig), ask(rig, method="HEAD")
    assert (answer.status, head.status, head.body) == (error.status, error.status, b"")
    if error.code:
        assert f"<Code>{error.code}</Code>".encode() in answer.body
    else:
        assert answer.body == b""
    expected = None if error.retry_after_s is None else str(error.retry_after_s)
    assert answer.headers.get("retry-after") == expected
    assert ends(rig) == ["refused"]


def test_s08_redirects(rig: Rig) -> None:
    rig.faults = [Fault(Redirect("eu-north-1"), methods=("GET", "HEAD"))]
    assert ask(rig, method="HEAD").headers["x-amz-bucket-region"] == "eu-north-1"
    answer = ask(rig)
    assert answer.status == 301
    assert b"<Code>PermanentRedirect</Code>" in answer.body
    rig.faults = [Fault(Redirect())]
    assert not {"x-amz-bucket-region", "location"} & set(ask(rig).headers)
    rig.faults = [Fault(Redirect("eu-north-1", in_body=True))]
    answer = ask(rig)
    assert (answer.status, b"<Region>eu-north-1</Region>" in answer.body) == (400, True)
    rig.faults = [Fault(Redirect(status=307, location="http://127.0.0.1:9/x"))]
    answer = ask(rig)
    assert (answer.status, answer.headers["location"]) == (307, "http://127.0.0.1:9/x")
    assert b"<Code>TemporaryRedirect</Code>" in answer.body
