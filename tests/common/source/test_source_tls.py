"""S06: certificates, and bodies over TLS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.errors import ConfigError, SourceError, SourceUnavailableError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.s3 import S3Source
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.fault_server import Fault, FaultServer
from tests.common.source.conftest import IMPATIENT, OpenS3

WriteConfig = Callable[[str, str], None]


@pytest.fixture
def tls_server(
    authority: PrivateAuthority, fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultServer]:
    """The scripted server over TLS, with a certificate by a private authority."""
    with FaultServer(authority.server_context("localhost", "127.0.0.1")) as server:
        server.put("bucket", "m/key", b"0123456789")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


def _read_only(source: S3Source) -> None:
    object_id = source.stat("key")
    assert len(source.list()) == 1
    assert source.read(object_id, ByteRange(2, 4)) == b"23"


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
@pytest.mark.parametrize("anonymous", [False, True])
def test_s06_authority_from_the_environment(
    tls_server: FaultServer,
    authority: PrivateAuthority,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    anonymous: bool,
) -> None:
    monkeypatch.setenv(variable, str(authority.bundle))
    tls_server.allow_unsigned = True
    source = open_s3("s3://bucket/m", Settings(anonymous=anonymous))
    _read_only(source)
    assert source.describe().facts["ca_bundle"] == str(authority.bundle)


def test_s06_authority_from_the_profile(
    tls_server: FaultServer, authority: PrivateAuthority, open_s3: OpenS3, aws_config: WriteConfig
) -> None:
    aws_config(f"[default]\nca_bundle = {authority.bundle}\n", "")
    _read_only(open_s3("s3://bucket/m"))


def test_s06_unknown_authority_is_said_at_once(tls_server: FaultServer, open_s3: OpenS3) -> None:
    source = open_s3("s3://bucket/m")
    object_id = ObjectId("s3://bucket/m/key", '"e"', 10)
    for action in (source.list, lambda: source.read(object_id)):
        with pytest.raises(SourceError, match="certificate verify failed") as caught:
            action()
        assert type(caught.value) is SourceError
        assert not caught.value.retryable
        assert "AWS_CA_BUNDLE" in str(caught.value)
        assert tls_server.endpoint in str(caught.value)
    assert caught.value.fields["attempts"] == 1


def test_s06_bundle_that_does_not_exist(
    tls_server: FaultServer, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "nothing.pem"))
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        open_s3("s3://bucket/m").list()
    (tmp_path / "empty.pem").write_text("not a certificate")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "empty.pem"))
    with pytest.raises(ConfigError, match="CA bundle") as caught:
        open_s3("s3://bucket/m").read(ObjectId("s3://bucket/m/key", '"e"', 10))
    assert caught.value.fields["ca_bundle"] == str(tmp_path / "empty.pem")


def test_tls_large_bodies_and_broken_ones(
    tls_server: FaultServer,
    authority: PrivateAuthority,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    data = bytes(i % 251 for i in range(300_000))
    etag = tls_server.put("bucket", "m/large", data)
    object_id = ObjectId("s3://bucket/m/large", etag, len(data))
    source = open_s3("s3://bucket/m", IMPATIENT)
    assert source.read(object_id) == data
    for fault in (Fault(cut_after_bytes=100_000), Fault(stall_after_bytes=100_000)):
        tls_server.script("GET", "bucket/m/large", [fault])
        receiver = source.open_receiver()
        buffer = bytearray(len(data))
        with pytest.raises(SourceUnavailableError) as caught:
            receiver.receive(object_id, ByteRange(0, len(data)), memoryview(buffer))
        assert caught.value.received_bytes == 100_000
        assert buffer[:100_000] == data[:100_000]
        receiver.close()


def test_plain_http_to_a_tls_port(
    tls_server: FaultServer, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", tls_server.endpoint.replace("https", "http"))
    receiver = open_s3("s3://bucket/m").open_receiver()
    object_id = ObjectId("s3://bucket/m/key", '"e"', 10)
    with pytest.raises(SourceUnavailableError):
        receiver.receive(object_id, ByteRange(0, 4), memoryview(bytearray(4)))
    receiver.close()


def test_bytes_left_over_under_tls_do_not_reach_the_next_reply(
    tls_server: FaultServer,
    authority: PrivateAuthority,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    source = open_s3("s3://bucket/m")
    object_id = source.stat("key")
    receiver = source.open_receiver()
    stray = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nEV"
    tls_server.script(
        "GET", "bucket/m/key", [Fault(headers={"Content-Length": "2"}, body=b"23" + stray)]
    )
    connections = []
    for _ in range(3):
        buffer = bytearray(2)
        receipt = receiver.receive(object_id, ByteRange(2, 4), memoryview(buffer))
        assert buffer == b"23"
        connections.append(receipt.new_connection)
    # The second one saw the leftovers before it asked; the third kept a clean connection, tickets
    # or not.
    assert connections == [True, True, False]
    assert len(tls_server.seen("GET")) == 3
    receiver.close()


@pytest.mark.parametrize("content", ["", "not a certificate\n"])
def test_s06_bundle_without_certificates_is_named(
    tls_server: FaultServer,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: str,
) -> None:
    bundle = tmp_path / "empty.pem"
    bundle.write_text(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with pytest.raises(ConfigError, match="no certificates could be loaded") as caught:
        open_s3("s3://bucket/m").list()
    assert str(bundle) in str(caught.value)
    assert "AWS_CA_BUNDLE" in str(caught.value)
