"""S10: proxies, for every kind of request alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastload_common.errors import (
    AccessDeniedError,
    ConfigError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.http_message import Proxy
from fastload_common.source.proxies import find_proxy
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.fault_server import FaultServer
from fastload_common.testing.tunnel_proxy import TunnelProxy
from tests.common.source.conftest import OpenS3


@pytest.fixture
def proxy() -> Iterator[TunnelProxy]:
    with TunnelProxy(plain_status=504) as proxy:
        yield proxy


@pytest.fixture
def tls_server(
    authority: PrivateAuthority, fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultServer]:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    with FaultServer(authority.server_context("127.0.0.1")) as server:
        server.put("bucket", "m/key", b"0123456789")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY"])
def test_s10_tunnel_for_every_request(
    tls_server: FaultServer,
    proxy: TunnelProxy,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    proxy.wanted = "Basic dXNlcjpwQHNz"  # user:p@ss
    monkeypatch.setenv(variable, f"http://user:p%40ss@127.0.0.1:{proxy.port}")
    source = open_s3("s3://bucket/m")
    assert len(source.list()) == 1
    assert source.read(source.stat("key"), ByteRange(2, 4)) == b"23"
    # One tunnel for botocore's connection, one for ours.
    assert proxy.seen == [("CONNECT", f"127.0.0.1:{tls_server.port}")] * 2
    assert source.describe().facts["proxy"] == f"127.0.0.1:{proxy.port}"
    assert "p@ss" not in str(source.describe())
    source.close()


@pytest.mark.parametrize("excluded", ["127.0.0.0/8", "*", "localhost,127.0.0.1", ".x, 127.0.0.1"])
@pytest.mark.parametrize("variable", ["NO_PROXY", "no_proxy"])
def test_s10_excluded_endpoint_is_asked_directly(
    tls_server: FaultServer,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
    excluded: str,
    variable: str,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, excluded)
    source = open_s3("s3://bucket/m")
    assert len(source.list()) == 1
    assert source.read(source.stat("key"), ByteRange(2, 4)) == b"23"
    assert source.describe().facts["proxy"] == "none"


def test_s10_plain_requests_name_the_whole_url(
    fault_server: FaultServer, proxy: TunnelProxy, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"127.0.0.1:{proxy.port}")
    receiver = open_s3("s3://bucket/m").open_receiver()
    object_id = ObjectId("s3://bucket/m/key", '"e"', 10)
    with pytest.raises(SourceUnavailableError) as caught:
        receiver.receive(object_id, ByteRange(0, 4), memoryview(bytearray(4)))
    assert caught.value.fields["status"] == 504
    assert proxy.seen == [("GET", f"{fault_server.endpoint}/bucket/m/key")]
    receiver.close()


def test_s10_refusals_are_the_proxys(
    tls_server: FaultServer, proxy: TunnelProxy, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:secret@127.0.0.1:{proxy.port}")
    receiver = open_s3("s3://bucket/m").open_receiver()
    object_id = ObjectId("s3://bucket/m/key", '"e"', 10)
    proxy.wanted = "Basic other"
    with pytest.raises(AccessDeniedError, match="proxy wants other credentials") as denied:
        receiver.receive(object_id, ByteRange(0, 4), memoryview(bytearray(4)))
    assert "secret" not in str(denied.value)
    proxy.wanted, proxy.refuse_status = None, 503
    with pytest.raises(SourceUnavailableError, match="proxy refused") as refused:
        receiver.receive(object_id, ByteRange(0, 4), memoryview(bytearray(4)))
    assert "SlowDown" not in str(refused.value)
    assert "CONCURRENCY" not in str(refused.value)
    receiver.close()
    port = proxy.port
    proxy.stop()
    with pytest.raises(SourceUnavailableError, match="refused") as gone:
        receiver.receive(object_id, ByteRange(0, 4), memoryview(bytearray(4)))
    assert gone.value.fields["proxy"] == f"127.0.0.1:{port}"
    with pytest.raises(SourceError) as listing:
        open_s3("s3://bucket/m").list()
    assert "secret" not in str(listing.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("http://host:port", "no valid port"),
        ("http://:3128", "names no host"),
        ("https://proxy:3128", "scheme https"),
        ("socks5://proxy:1080", "scheme socks5"),
    ],
)
def test_s10_malformed_value_names_the_variable(
    tls_server: FaultServer,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    words: str,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", value)
    with pytest.raises(ConfigError, match=words) as caught:
        open_s3("s3://bucket/m").list()
    assert "HTTPS_PROXY" in str(caught.value)


@pytest.mark.parametrize(
    ("no_proxy", "host", "direct"),
    [
        (".svc.cluster.local", "s3.ns.svc.cluster.local", True),
        ("svc.cluster.local", "s3.ns.svc.cluster.local", True),
        ("*.cluster.local", "s3.ns.svc.cluster.local", True),
        ("cluster.local:9000", "s3.cluster.local", True),
        ("cluster.local:9001", "s3.cluster.local", False),
        ("mycluster.local", "cluster.local", False),
        ("cluster.local", "mycluster.local", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("fd00::/8", "fd00::1", True),
        ("[fd00::1]", "fd00::1", True),
        ("", "s3.local", False),
        ("S3.LOCAL", "s3.local", True),
    ],
)
def test_s10_exclusions(no_proxy: str, host: str, direct: bool) -> None:
    environ = {"https_proxy": "proxy:3128", "NO_PROXY": no_proxy}
    found = find_proxy(host, 9000, True, environ)
    assert (found is None) == direct
    assert direct or found == Proxy("proxy", 3128)
    # The other scheme's variable does not count.
    assert find_proxy(host, 9000, False, environ) is None
