"""One resolver for every request: endpoints, regions, addressing, TLS."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pytest

from fastload_common.clock import SystemClock
from fastload_common.config import Settings
from fastload_common.errors import ConfigError, SourceError, SourceUnavailableError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.http_errors import network_error
from fastload_common.source.http_message import Endpoint
from fastload_common.source.s3 import S3Source
from fastload_common.source.s3_session import S3Session
from fastload_common.source.uri import s3_location
from fastload_common.testing.fault_server import Fault, FaultServer
from tests.common.source.conftest import QUICK, OpenS3

WriteConfig = Callable[[str, str], None]


def _session(uri: str) -> S3Session:
    return S3Session(s3_location(uri), QUICK, SystemClock())


def _use_everything(source: S3Source) -> None:
    """One request of each kind."""
    assert len(source.list()) == 1
    object_id = source.stat("key")
    assert source.read(object_id, ByteRange(2, 4)) == b"23"
    assert not source.put_if_absent("key", b"x")


# S04: which endpoint


@pytest.fixture
def other_server(fault_server: FaultServer) -> Iterator[FaultServer]:
    """A second endpoint; ``fault_server`` is the one that AWS_ENDPOINT_URL names."""
    with FaultServer() as other:
        for server in (fault_server, other):
            server.put("bucket", "m/key", b"0123456789")
        yield other


def test_s04_global_variable(fault_server: FaultServer, open_s3: OpenS3) -> None:
    fault_server.put("bucket", "m/key", b"0123456789")
    source = open_s3("s3://bucket/m")
    _use_everything(source)
    assert source.describe().facts["endpoint"] == fault_server.endpoint


def test_s04_service_variable_wins(
    fault_server: FaultServer,
    other_server: FaultServer,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", other_server.endpoint)
    _use_everything(open_s3("s3://bucket/m"))
    assert fault_server.requests == []


@pytest.mark.parametrize("in_service_section", [False, True])
def test_s04_profile(
    fault_server: FaultServer,
    other_server: FaultServer,
    open_s3: OpenS3,
    aws_config: WriteConfig,
    monkeypatch: pytest.MonkeyPatch,
    in_service_section: bool,
) -> None:
    line = f"endpoint_url = {other_server.endpoint}\n"
    if in_service_section:
        aws_config(f"[default]\nservices = x\n[services x]\ns3 =\n  {line}", "")
    else:
        aws_config(f"[default]\n{line}", "")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    _use_everything(open_s3("s3://bucket/m"))
    assert fault_server.requests == []
    # The environment wins over the profile's general line, as in the AWS tools.
    monkeypatch.setenv("AWS_ENDPOINT_URL", fault_server.endpoint)
    if not in_service_section:
        _use_everything(open_s3("s3://bucket/m"))
        assert len(fault_server.requests) == 4


def test_s04_ignored_endpoints(fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    target = _session("s3://bucket/m").target()
    assert str(target.endpoint) == "https://bucket.s3.amazonaws.com"


def test_s04_endpoint_with_a_path(
    fault_server: FaultServer, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{fault_server.endpoint}/gateway")
    # To this server, the path is the bucket.
    fault_server.put("gateway", "bucket/m/key", b"0123456789")
    source = open_s3("s3://bucket/m")
    object_id = source.stat("key")
    assert source.read(object_id) == b"0123456789"
    paths = {request.raw_path for request in fault_server.requests}
    assert paths == {"/gateway/bucket/m/key"}


@pytest.mark.parametrize("value", ["127.0.0.1:9000", "not a url", "http://"])
def test_endpoint_that_is_no_url(
    open_s3: OpenS3, fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", value)
    with pytest.raises(ConfigError, match="endpoint") as caught:
        open_s3("s3://bucket/m").list()
    assert "AWS_ENDPOINT_URL" in str(caught.value)


# S07: addressing


@pytest.mark.parametrize(
    ("endpoint", "bucket", "url"),
    [
        (None, "bucket", "https://bucket.s3.eu-west-1.amazonaws.com/k"),
        (None, "models.prod.example", "https://s3.eu-west-1.amazonaws.com/models.prod.example/k"),
        (None, "Upper_case", "https://s3.eu-west-1.amazonaws.com/Upper_case/k"),
        ("https://s3.local", "models.prod", "https://s3.local/models.prod/k"),
        ("https://10.1.2.3:9000", "bucket", "https://10.1.2.3:9000/bucket/k"),
        ("http://10.1.2.3:9000", "bucket", "http://10.1.2.3:9000/bucket/k"),
        ("http://[fd00::1]:9000", "bucket", "http://[fd00::1]:9000/bucket/k"),
        ("https://s3.local:443", "models.prod", "https://s3.local/models.prod/k"),
    ],
)
def test_s07_addressing(
    fault_server: FaultServer,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str | None,
    bucket: str,
    url: str,
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    if endpoint is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    target = _session(f"s3://{bucket}/m").target()
    assert f"{target.endpoint}{target.path('k')}" == url
    assert target.region == "eu-west-1"
    assert target.addressing == ("virtual" if f"//{bucket}." in url else "path")


def test_s07_explicit_virtual_cannot_be_for_a_dotted_bucket(
    fault_server: FaultServer, aws_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws_config("[default]\ns3 =\n  addressing_style = virtual\n", "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.local")
    # A certificate for *.s3.local would not cover it; botocore alone overrules the setting.
    with pytest.raises(ConfigError, match="addressing_style = path"):
        _session("s3://models.prod/m").target()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://s3.local")
    assert _session("s3://models.prod/m").target().addressing in ("path", "virtual")


@pytest.mark.parametrize("style", ["virtual", "path"])
def test_s07_explicit_style(
    fault_server: FaultServer,
    aws_config: WriteConfig,
    monkeypatch: pytest.MonkeyPatch,
    style: str,
) -> None:
    aws_config(f"[default]\ns3 =\n  addressing_style = {style}\n", "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://s3.local:9000")
    target = _session("s3://bucket/m").target()
    assert target.addressing == style
    assert target.path("a/b") == ("/a/b" if style == "virtual" else "/bucket/a/b")


def test_access_point(fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    arn = "arn:aws:s3:eu-west-1:123456789012:accesspoint/reader"
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    location = s3_location(f"s3://{arn}/a/b")
    assert (location.bucket, location.prefix) == (arn, "a/b")
    target = _session(location.uri).target()
    assert target.endpoint.host == "reader-123456789012.s3-accesspoint.eu-west-1.amazonaws.com"
    assert target.path("a/b") == "/a/b"


# S08: regions


@pytest.mark.parametrize("hint", ["header", "body"])
def test_s08_range_in_another_region_is_asked_there_once(
    fault_server: FaultServer, open_s3: OpenS3, hint: str
) -> None:
    etag = fault_server.put("bucket", "m/key", b"0123456789")
    fault_server.regions["bucket"] = "eu-north-1"
    fault_server.region_hint = hint
    source = open_s3("s3://bucket/m")
    object_id = ObjectId("s3://bucket/m/key", etag, 10)
    receiver = source.open_receiver()
    for _ in range(2):
        buffer = bytearray(4)
        receiver.receive(object_id, ByteRange(2, 6), memoryview(buffer))
        assert buffer == b"2345"
    regions = [request.region for request in fault_server.seen("GET")]
    assert regions == ["us-east-1", "eu-north-1", "eu-north-1"]
    assert source.describe().facts["region"] == "eu-north-1"
    # Listing and HEAD have learnt it too.
    source.list()
    source.stat("key")
    assert {request.region for request in fault_server.requests[3:]} == {"eu-north-1"}
    receiver.close()


def test_s08_listing_first(fault_server: FaultServer, open_s3: OpenS3) -> None:
    fault_server.put("bucket", "m/key", b"0123456789")
    fault_server.regions["bucket"] = "eu-north-1"
    source = open_s3("s3://bucket/m")
    (row,) = source.list()
    assert source.read(row.object_id) == b"0123456789"
    # botocore was sent on for the listing, and we for the first range: once each.
    regions = [request.region for request in fault_server.seen("GET")]
    assert regions == ["us-east-1", "eu-north-1", "us-east-1", "eu-north-1"]


def test_s08_no_hint_is_an_error_that_names_the_region(
    fault_server: FaultServer, open_s3: OpenS3
) -> None:
    etag = fault_server.put("bucket", "m/key", b"0123456789")
    fault_server.regions["bucket"] = "eu-north-1"
    fault_server.region_hint = "none"
    source = open_s3("s3://bucket/m")
    with pytest.raises(SourceError, match="elsewhere than in region us-east-1") as caught:
        source.read(ObjectId("s3://bucket/m/key", etag, 10))
    assert type(caught.value) is SourceError
    assert "127.0.0.1:9" not in str(caught.value).replace(fault_server.endpoint, "")
    assert len(fault_server.seen("GET")) == 1
    with pytest.raises(SourceError, match="elsewhere"):
        source.list()


def test_s08_no_redirect_loop(fault_server: FaultServer, open_s3: OpenS3) -> None:
    etag = fault_server.put("bucket", "m/key", b"0123456789")
    # Says "there" and, asked there, says "elsewhere" again.
    fault_server.regions["bucket"] = "nowhere-1"
    source = open_s3("s3://bucket/m")
    object_id = ObjectId("s3://bucket/m/key", etag, 10)
    original = fault_server._policy_fault

    def again(request: object) -> object:
        fault = original(request)  # type: ignore[arg-type]
        region = getattr(request, "region", "")
        fault_server.regions["bucket"] = f"{region}x"
        return fault

    fault_server._policy_fault = again  # type: ignore[assignment,method-assign]
    with pytest.raises(SourceError, match="the bucket is in region"):
        source.read(object_id)
    assert len(fault_server.seen("GET")) == 2


def test_s08_sent_to_where_we_are(fault_server: FaultServer, open_s3: OpenS3) -> None:
    etag = fault_server.put("bucket", "m/key", b"0123456789")
    again = Fault(
        status=301, code="PermanentRedirect", headers={"x-amz-bucket-region": "us-east-1"}
    )
    fault_server.script("GET", "bucket/m/key", [], then=again)
    with pytest.raises(SourceError, match="from region us-east-1 to region us-east-1"):
        open_s3("s3://bucket/m").read(ObjectId("s3://bucket/m/key", etag, 10))


def test_no_descriptor_left_says_so() -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    endpoint = Endpoint("host", 80, tls=False)
    assert "ulimit -n" in str(network_error(error, endpoint, (1.0, 1.0), aborted=False))


def test_region_that_is_none(open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "not a region")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
    with pytest.raises(ConfigError, match=r"not a region.*AWS_REGION"):
        open_s3("s3://bucket/m").list()


@pytest.mark.parametrize("anonymous", [False, True])
def test_no_region_at_all(
    fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch, anonymous: bool
) -> None:
    monkeypatch.delenv("AWS_REGION")
    settings = Settings(anonymous=anonymous)
    target = S3Session(s3_location("s3://bucket/m"), settings, SystemClock()).target()
    assert str(target.endpoint) == fault_server.endpoint
    assert target.region == "us-east-1"


def test_bucket_name_that_is_none(fault_server: FaultServer, open_s3: OpenS3) -> None:
    with pytest.raises(ConfigError, match="bucket"):
        open_s3("s3://no spaces allowed/m").list()


# S24: nobody there


def test_s24_refused_and_unresolved(
    open_s3: OpenS3, fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault_server.stop()
    object_id = ObjectId("s3://bucket/m/key", '"e"', 10)
    buffer = memoryview(bytearray(4))
    seen = []
    for endpoint in (fault_server.endpoint, "http://no-such-name.invalid:9000"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        source = open_s3("s3://bucket/m", Settings(max_attempts=1))
        receiver = source.open_receiver()
        with pytest.raises(SourceUnavailableError) as caught:
            receiver.receive(object_id, ByteRange(0, 4), buffer)
        seen.append(str(caught.value))
        assert caught.value.fields["endpoint"] == endpoint
        with pytest.raises(SourceUnavailableError, match="not reached"):
            source.list()
        receiver.close()
    assert "refused" in seen[0]
    assert "no-such-name.invalid was not resolved" in seen[1]
