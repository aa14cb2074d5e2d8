"""Where requests go and how they are trusted: endpoints, certificates, addressing, regions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastload_common.errors import ConfigError, SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.registry import open_source
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.rig import Fault, Redirect, Rig
from fastload_common.testing.tunnel_proxy import TunnelProxy
from tests.cases.conftest import WriteConfig
from tests.cases.harness import BUCKET, MODEL, SHARDS, URI, load, ranges, settings

HEADER = ByteRange(0, 1)


def _kinds(rig: Rig) -> set[str]:
    return {request.kind for request in rig.log.requests()}


# S04


@pytest.fixture
def decoy() -> Iterator[Rig]:
    """Another store with the same keys, which must see no request."""
    with Rig() as decoy:
        MODEL.put(decoy)
        yield decoy


@pytest.mark.parametrize("chosen", ["global", "service", "both", "profile", "profile service"])
def test_s04_all_requests_go_to_the_endpoint_that_wins(
    rig: Rig,
    decoy: Rig,
    aws_config: WriteConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    chosen: str,
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    line = f"endpoint_url = {rig.endpoint}"
    if chosen == "global":
        aws_config(f"[default]\nendpoint_url = {decoy.endpoint}\n", "")
        monkeypatch.setenv("AWS_ENDPOINT_URL", rig.endpoint)
    elif chosen == "profile":
        aws_config(f"[default]\n{line}\n", "")
    elif chosen == "profile service":
        text = f"[default]\nservices = x\nendpoint_url = {decoy.endpoint}\n"
        aws_config(f"{text}[services x]\ns3 =\n  {line}\n", "")
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", rig.endpoint)
        if chosen == "both":
            monkeypatch.setenv("AWS_ENDPOINT_URL", decoy.endpoint)
    with caplog.at_level(logging.INFO, logger="fastload_common"):
        assert MODEL.agrees(load())
    assert decoy.log.requests() == []
    assert _kinds(rig) >= {"LIST", "GET"}
    said = [line for line in caplog.messages if "endpoint" in line]
    assert len(said) == 1
    assert rig.endpoint in said[0]
    assert "path addressing" in said[0]


def test_s04_configured_endpoints_are_ignored_where_that_is_asked(
    tls_rig: Rig,
    decoy: Rig,
    proxy: TunnelProxy,
    authority: PrivateAuthority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", decoy.endpoint)
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    # Stands for the network in which AWS is.
    proxy.leads_to = tls_rig.port
    monkeypatch.setenv("HTTPS_PROXY", proxy.endpoint)
    assert MODEL.agrees(load())
    assert decoy.log.requests() == []
    assert proxy.hosts == {f"{BUCKET}.s3.amazonaws.com"}
    assert {request.bucket for request in tls_rig.log.requests()} == {BUCKET}


def test_s04_an_endpoint_with_a_path(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{rig.endpoint}/gateway")
    # To the rig, the path is the bucket; it knows no listing there, so the file has a usual name.
    rig.put("gateway", f"{BUCKET}/n/{SHARDS[0]}", MODEL.files[SHARDS[0]])
    source = open_source(f"s3://{BUCKET}/n", settings())
    data = source.read(source.stat(SHARDS[0]))
    source.close()
    assert data == MODEL.files[SHARDS[0]]
    assert {request.bucket for request in rig.log.requests()} == {"gateway"}


# S06


@pytest.mark.parametrize("given", ["AWS_CA_BUNDLE", "profile", "SSL_CERT_FILE", "unsigned"])
def test_s06_a_private_authority_is_trusted_wherever_it_is_named(
    tls_rig: Rig,
    authority: PrivateAuthority,
    aws_config: WriteConfig,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
) -> None:
    if given == "profile":
        aws_config(f"[default]\nca_bundle = {authority.bundle}\n", "")
    else:
        variable = "AWS_CA_BUNDLE" if given == "unsigned" else given
        monkeypatch.setenv(variable, str(authority.bundle))
    tls_rig.allow_unsigned = given == "unsigned"
    assert MODEL.agrees(load(with_=settings(anonymous=given == "unsigned")))
    assert {request.signed for request in tls_rig.log.requests()} == {given != "unsigned"}


def test_s06_an_unknown_authority_is_told_after_one_try(tls_rig: Rig) -> None:
    with pytest.raises(SourceError, match="certificate verify failed") as caught:
        load()
    assert not caught.value.retryable
    assert caught.value.fields["endpoint"] == tls_rig.endpoint
    assert caught.value.fields["attempts"] == 1
    assert tls_rig.log.requests() == []
    assert tls_rig.log.connections == 1


def test_s06_a_bundle_that_is_not_there_is_named_at_start(
    tls_rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "nothing.pem"
    monkeypatch.setenv("AWS_CA_BUNDLE", str(missing))
    with pytest.raises(ConfigError) as caught:
        load()
    assert str(missing) in str(caught.value)
    assert tls_rig.log.connections == 0


# S07


@pytest.fixture
def named_rig(
    tls_rig: Rig,
    proxy: TunnelProxy,
    authority: PrivateAuthority,
    monkeypatch: pytest.MonkeyPatch,
) -> Rig:
    """The TLS rig as https://s3.local, with certificates for that and one label below it."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.local")
    proxy.leads_to = tls_rig.port
    monkeypatch.setenv("HTTPS_PROXY", proxy.endpoint)
    return tls_rig


@pytest.mark.parametrize("style", [None, "auto", "path"])
@pytest.mark.parametrize("bucket", ["models.prod.example", "Upper_case", "under_score"])
def test_s07_names_that_no_certificate_covers_stay_out_of_the_host(
    named_rig: Rig,
    proxy: TunnelProxy,
    aws_config: WriteConfig,
    style: str | None,
    bucket: str,
) -> None:
    if style is not None:
        aws_config(f"[default]\ns3 =\n  addressing_style = {style}\n", "")
    MODEL.put(named_rig, bucket)
    assert MODEL.agrees(load(f"s3://{bucket}/m"))
    assert proxy.hosts == {"s3.local"}


def test_s07_region_discovery_is_addressed_alike(named_rig: Rig, proxy: TunnelProxy) -> None:
    bucket = "models.prod.example"
    MODEL.put(named_rig, bucket)
    named_rig.regions[bucket] = "eu-north-1"
    # The reply does not say where, so that HeadBucket has to ask.
    fault = Fault(Redirect(None), name=f"*{SHARDS[0]}", byte_range=HEADER, attempts=(1,))
    named_rig.faults = [fault]
    assert MODEL.agrees(load(f"s3://{bucket}/m"))
    assert proxy.hosts == {"s3.local"}
    assert {request.bucket for request in named_rig.log.requests()} == {bucket}


def test_s07_virtual_style_where_it_is_set_and_can_be(
    named_rig: Rig, proxy: TunnelProxy, aws_config: WriteConfig
) -> None:
    aws_config("[default]\ns3 =\n  addressing_style = virtual\n", "")
    assert MODEL.agrees(load())
    assert proxy.hosts == {f"{BUCKET}.s3.local"}


def test_s07_virtual_style_for_a_dotted_name_is_one_line_with_the_fix(
    named_rig: Rig, aws_config: WriteConfig
) -> None:
    aws_config("[default]\ns3 =\n  addressing_style = virtual\n", "")
    with pytest.raises(ConfigError, match="addressing_style = path") as caught:
        load("s3://models.prod.example/m")
    assert "\n" not in str(caught.value)
    assert named_rig.log.connections == 0


def test_s07_an_address_as_endpoint(
    tls_rig: Rig, authority: PrivateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    assert MODEL.agrees(load())
    hosts = {request.headers["host"] for request in tls_rig.log.requests()}
    assert hosts == {f"127.0.0.1:{tls_rig.port}"}


# S08


def _regions(rig: Rig) -> list[str]:
    found = []
    for request in rig.log.requests():
        scope = request.headers.get("authorization", "").partition("Credential=")[2]
        found.append(scope.split("/")[2])
    return found


def test_s08_a_bucket_elsewhere_is_signed_for_once_and_remembered(rig: Rig) -> None:
    rig.regions[BUCKET] = "eu-north-1"
    assert MODEL.agrees(load())
    regions = _regions(rig)
    # Once by the listing, and once by the first of our own requests.
    assert regions.count("us-east-1") <= 2 + (settings().concurrency or 0)
    assert regions[-1] == "eu-north-1"
    assert all(
        request.status == 301
        for request in rig.log.requests()
        if not request.sent_bytes or request.status >= 300
    )


@pytest.mark.parametrize(
    "away",
    [
        Redirect("eu-north-1"),
        Redirect("eu-north-1", in_body=True),
        Redirect("eu-north-1", status=307),
        Redirect(None),
    ],
)
def test_s08_every_form_of_being_sent_away_is_followed(rig: Rig, away: Redirect) -> None:
    rig.regions[BUCKET] = "eu-north-1"
    rig.faults = [Fault(away, byte_range=HEADER, attempts=(1,))]
    stored = rig.store.objects(BUCKET)[f"m/{SHARDS[0]}"]
    object_id = ObjectId(f"{URI}/{SHARDS[0]}", stored.etag, stored.size_bytes)
    with ranges() as read:
        assert read.source.read(object_id, HEADER) == MODEL.files[SHARDS[0]][:1]
        assert read.read(object_id) == MODEL.files[SHARDS[0]]
    gets = [region for region in _regions(rig) if region == "us-east-1"]
    assert len(gets) <= 2  # the range, and the question where the bucket is
    assert _regions(rig)[-1] == "eu-north-1"


@pytest.mark.parametrize("region", ["eu-north-1", None])
def test_s08_a_reply_to_head_has_no_body(rig: Rig, region: str | None) -> None:
    rig.regions[BUCKET] = "eu-north-1"
    rig.faults = [Fault(Redirect(region), methods=("HEAD",), attempts=(1,))]
    source = open_source(URI, settings())
    assert source.stat(SHARDS[0]).size_bytes == len(MODEL.files[SHARDS[0]])
    source.close()
    assert _regions(rig)[-1] == "eu-north-1"


def test_s08_without_a_hint_the_error_says_so(rig: Rig) -> None:
    rig.faults = [Fault(Redirect(None), name=f"*{SHARDS[0]}")]
    with pytest.raises(SourceError, match="elsewhere than in region us-east-1") as caught:
        load()
    assert not caught.value.retryable
    assert caught.value.fields["status"] == 301
    assert len(rig.log.gets(f"m/{SHARDS[0]}")) == 1


def test_s08_credentials_are_not_sent_where_a_reply_points(rig: Rig) -> None:
    with Rig() as elsewhere:
        MODEL.put(elsewhere)
        location = f"{elsewhere.endpoint}/{BUCKET}/m/{SHARDS[0]}"
        rig.faults = [
            Fault(Redirect(None, status, location), methods=("GET", "HEAD", "LIST"), name=name)
            for status, name in ((307, "*00001*"), (301, "*"))
        ]
        with pytest.raises(SourceError, match="elsewhere"):
            load()
        assert elsewhere.log.requests() == []
        assert elsewhere.log.connections == 0


def test_s08_the_region_is_named_where_we_are_sent_away_again(rig: Rig) -> None:
    rig.faults = [Fault(Redirect("eu-north-1"), name=f"*{SHARDS[0]}")]
    with pytest.raises(SourceError, match="to region eu-north-1"):
        load()
    # Once where we were, once where we were sent.
    assert len(rig.log.gets(f"m/{SHARDS[0]}")) == 2
