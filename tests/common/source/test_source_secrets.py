"""What must never be shown, whatever goes wrong: credentials, signatures, passwords in URLs."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import HTTPClientError

from fastload_common.errors import AccessDeniedError, ConfigError, FastloadError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.s3_client_errors import client_error
from fastload_common.source.uri import parse_root
from fastload_common.testing.fault_server import FaultServer
from tests.common.source.conftest import OpenS3


def _everything_said(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(vars(error))


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\x00", "é"])
@pytest.mark.parametrize(
    "variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
)
def test_credential_with_a_line_break_is_named_and_not_shown(
    fault_server: FaultServer,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    ending: str,
) -> None:
    monkeypatch.setenv(variable, f"c0nfidential{ending}".replace("\x00", "\x7f"))
    source = open_s3("s3://bucket/m")
    receiver = source.open_receiver()
    object_id = ObjectId("s3://bucket/m/key", '"e"', 4)
    actions: list[Callable[[], Any]] = [
        source.list,
        lambda: receiver.receive(object_id, ByteRange(0, 4), memoryview(bytearray(4))),
    ]
    for action in actions:
        with pytest.raises(AccessDeniedError, match=variable) as caught:
            action()
        said = _everything_said(caught.value)
        assert "c0nfidential" not in said
        assert "Signature" not in said
        assert caught.value.fields["credentials"] == "env"
    assert fault_server.requests == []
    receiver.close()


def test_credentials_renewed_into_bad_ones_are_not_shown_either(
    fault_server: FaultServer, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_s3("s3://bucket/m")
    fault_server.put("bucket", "m/key", b"0123")
    source.list()
    fault_server.expired_keys.add("ENVKEY")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "c0nfidential\n")
    with pytest.raises(AccessDeniedError, match="AWS_SESSION_TOKEN holds a line break") as caught:
        source.list()
    assert "c0nfidential" not in _everything_said(caught.value)


def test_what_cannot_be_sent_is_not_quoted() -> None:
    inner = ValueError("Invalid header value b'AWS4-HMAC-SHA256 ... Signature=c0nfidential'")
    error = client_error(HTTPClientError(error=inner), "list s3://bucket")
    assert "c0nfidential" not in str(error)
    assert not error.retryable


def test_password_of_an_endpoint_is_not_shown(
    fault_server: FaultServer, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault_server.stop()
    for endpoint in (fault_server.endpoint, "http://bad host"):
        with_password = endpoint.replace("://", "://user:c0nfidential@")
        monkeypatch.setenv("AWS_ENDPOINT_URL", with_password)
        with pytest.raises(FastloadError) as caught:
            open_s3("s3://bucket/m").list()
        assert "c0nfidential" not in _everything_said(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "https://bucket.s3.amazonaws.com/m?X-Amz-Credential=c0nfidential&X-Amz-Signature=c0nfidential",
        "https://user:c0nfidential@host/m",
        "hf://user:c0n/f@c0nfidential@host/m?x",
        "https://user:c0nfidential?c0n@host/m",
        "s3a://KEY:c0nfidential@bucket/m",
        "s3://KEY:c0nfidential@bucket/m",
        "s3://KEY:c0nfi/c0nfidential@bucket/m",
        "S3://c0nfidential@bucket",
        "s3://KEY:c0nfidential",
    ],
)
def test_credentials_in_a_uri_are_not_shown(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_root(uri)
    assert "c0n" not in _everything_said(caught.value)
    assert "s3://" in str(caught.value)  # what to write instead
