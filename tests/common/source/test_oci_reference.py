"""What an oci:// URI names, and where that is."""

from __future__ import annotations

import pytest

from fastload_common.config import Settings
from fastload_common.errors import ChecksumMismatchError, ConfigError, SourceError
from fastload_common.source.oci_places import authorities_file, places_of
from fastload_common.source.oci_reference import (
    check_digest,
    digest_of,
    is_oci_uri,
    parse_reference,
)
from fastload_common.source.registry import open_source
from fastload_common.source.uri import parse_root

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("uri", "parts", "canonical"),
    [
        ("oci://r.example/m", ("r.example", "m", "latest", None, ""), "oci://r.example/m:latest"),
        ("OCI://R.Example:5000/a/b:v1", ("r.example:5000", "a/b", "v1", None, ""), None),
        ("oci://r/m@" + DIGEST, ("r", "m", None, DIGEST, ""), "oci://r/m@" + DIGEST),
        ("oci://r/m:v@" + DIGEST + "/sub", ("r", "m", "v", DIGEST, "sub"), None),
        ("oci://r/m:v/sub/folder/", ("r", "m", "v", None, "sub/folder"), "oci://r/m:v/sub/folder"),
        ("oci://[::1]:5000/m:v", ("[::1]:5000", "m", "v", None, ""), "oci://[::1]:5000/m:v"),
        ("oci://r/a-b__c.d/e:v", ("r", "a-b__c.d/e", "v", None, ""), "oci://r/a-b__c.d/e:v"),
        ("oci://r/m:v/", ("r", "m", "v", None, ""), "oci://r/m:v"),
        ("oci://r/m/", ("r", "m", "latest", None, ""), "oci://r/m:latest"),
    ],
)
def test_references(uri: str, parts: tuple[object, ...], canonical: str | None) -> None:
    found = parse_reference(uri)
    assert (found.registry, found.repository, found.tag, found.digest, found.folder) == parts
    assert canonical is None or found.uri == canonical
    assert parse_reference(found.uri) == found
    assert is_oci_uri(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "oci://",
        "oci://r",
        "oci://r/",
        "oci:///m",
        "oci://r/M:v",
        "oci://r/a//b",
        "oci://r/m:",
        "oci://r/m:-v",
        "oci://r/m:" + "t" * 129,
        "oci://r/m@sha256:12",
        "oci://r/m@md5:" + "0" * 32,
        "oci://r/m@" + DIGEST.upper(),
        "oci://r/m:v/../x",
        "oci://r_x/m",
        "oci://r/" + "a" * 256,
        "oci://r/m:v\n",
        "oci://r/../m:v",
    ],
)
def test_what_is_no_reference_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="oci://"):
        parse_reference(uri)


def test_a_password_in_a_reference_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_reference("oci://user:hunter2@registry/m:v")
    assert "hunter2" not in str(caught.value)
    assert "docker login" in str(caught.value)


def test_a_pinned_reference_keeps_its_tag_and_folder() -> None:
    pinned = parse_reference("oci://r/m:v/sub").pinned(DIGEST)
    assert pinned.uri == f"oci://r/m:v@{DIGEST}/sub"
    assert pinned.asked == DIGEST


def test_a_registry_is_opened_by_its_scheme_and_is_no_place_for_other_things() -> None:
    source = open_source("oci://r.example/m:v/sub", Settings())
    assert source.root == "oci://r.example/m:v/sub"
    source.close()
    with pytest.raises(ConfigError, match="registry"):
        parse_root("oci://r.example/m:v")


def test_digests() -> None:
    assert digest_of(b"") == (
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )
    check_digest(b"x", digest_of(b"x"), "it")
    check_digest(b"x", digest_of(b"x", "sha512"), "it")
    with pytest.raises(ChecksumMismatchError, match="it is not what its digest says"):
        check_digest(b"y", digest_of(b"x"), "it")
    with pytest.raises(SourceError, match="no digest"):
        check_digest(b"y", "md5:00", "it")


# Where it is


def test_mirrors_come_first_and_the_registry_last() -> None:
    settings = Settings(
        oci_mirrors=("r.example=m1.example:5000", "other=x", "R.example=https://m2.example/proxy"),
        oci_plain_http=("m1.example:5000",),
    )
    places = places_of(parse_reference("oci://r.example/a/b:v"), settings, {})
    assert [str(place) for place in places] == [
        "http://m1.example:5000",
        "https://m2.example",
        "https://r.example",
    ]
    assert [place.path("blobs", "D") for place in places] == [
        "/v2/a/b/blobs/D?ns=r.example",
        "/v2/proxy/a/b/blobs/D?ns=r.example",
        "/v2/a/b/blobs/D",
    ]
    assert [place.is_mirror for place in places] == [True, True, False]


def test_docker_hub_is_where_it_is_and_has_a_library() -> None:
    (place,) = places_of(parse_reference("oci://docker.io/alpine"), Settings(), {})
    assert place.repository == "library/alpine"
    assert place.registry == "docker.io"
    assert place.endpoint.host != "docker.io"
    (place,) = places_of(parse_reference("oci://docker.io/ai/smol"), Settings(), {})
    assert place.repository == "ai/smol"


@pytest.mark.parametrize("mirror", ["m.example", "=m", "r=", "r=user:secret@m", "r=m?x"])
def test_what_is_no_mirror_is_refused(mirror: str) -> None:
    with pytest.raises(ConfigError, match="oci_mirrors") as caught:
        places_of(parse_reference("oci://r/m"), Settings(oci_mirrors=(mirror,)), {})
    assert "secret" not in str(caught.value)


def test_a_proxy_stands_before_a_registry() -> None:
    environ = {"HTTPS_PROXY": "http://p.example:3128", "NO_PROXY": "near.example"}
    (far,) = places_of(parse_reference("oci://r.example/m"), Settings(), environ)
    (near,) = places_of(parse_reference("oci://near.example/m"), Settings(), environ)
    assert str(far.endpoint.proxy) == "p.example:3128"
    assert near.endpoint.proxy is None


def test_the_authorities_are_those_of_s3_or_the_systems(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    file = tmp_path_factory.mktemp("ca") / "bundle.pem"
    file.write_text("x")
    named = {"AWS_CA_BUNDLE": str(file), "SSL_CERT_FILE": "/nowhere"}
    assert authorities_file(named) == str(file)
    assert authorities_file({})
    with pytest.raises(ConfigError, match="/nowhere"):
        authorities_file({"SSL_CERT_FILE": "/nowhere"})
