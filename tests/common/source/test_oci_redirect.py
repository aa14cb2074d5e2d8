"""Where redirects lead, and how long their URLs are good for."""

from __future__ import annotations

import pytest

from fastload_common.errors import SourceError
from fastload_common.source.http_message import Endpoint
from fastload_common.source.oci_redirect import Way, follow, good_until_s

NOW_S = 1_700_000_000.0  # 2023-11-14T22:13:20Z
HERE = Endpoint("r.example", 443, True)


def lead(location: str | None, endpoint: Endpoint = HERE) -> Way:
    return follow(location, endpoint, "/v2/m/blobs/d", Endpoint, NOW_S)


@pytest.mark.parametrize(
    ("query", "end_s"),
    [
        ("X-Amz-Date=20231114T221320Z&X-Amz-Expires=600&X-Amz-Signature=s", 600),
        ("x-amz-date=20231114T221220Z&x-amz-expires=600", 540),
        ("X-Goog-Date=20231114T221320Z&X-Goog-Expires=300", 300),
        ("Expires=1700000100&Signature=s&Key-Pair-Id=k", 100),
        ("sv=2022&se=2023-11-14T23%3A13%3A20Z&sig=s", 3600),
        ("X-Amz-Date=20231114T221320Z&X-Amz-Expires=604800", 3600),  # believed for an hour
        ("X-Amz-Date=20231114T211320Z&X-Amz-Expires=600", -3000),  # over already
    ],
)
def test_a_signed_url_is_left_before_its_end(query: str, end_s: float) -> None:
    found = good_until_s(query, NOW_S)
    assert found is not None
    assert found <= NOW_S + end_s
    assert found >= NOW_S + end_s - 30
    if 0 < end_s < 120:
        assert found == NOW_S + end_s * 0.75


@pytest.mark.parametrize(
    "query",
    [
        "",
        "token=abc",
        "X-Amz-Expires=600",
        "X-Amz-Date=yesterday&X-Amz-Expires=600",
        "X-Amz-Date=20231114T221320Z&X-Amz-Expires=-1",
        "Expires=1e9",
        "Expires=%D9%A1",
        "se=tomorrow",
    ],
)
def test_a_life_that_is_not_told_is_not_guessed(query: str) -> None:
    assert good_until_s(query, NOW_S) is None
    assert lead(f"https://s.example/b?{query}").once


def test_where_a_redirect_leads() -> None:
    way = lead("https://s.example:8443/b/a%2Fb?X-Sig=a%2Bb&c=d+e#f")
    assert way.endpoint == Endpoint("s.example", 8443, True)
    assert way.target == "/b/a%2Fb?X-Sig=a%2Bb&c=d+e"
    assert lead("/other/place").endpoint == HERE
    assert lead("other").target == "/v2/m/blobs/other"
    assert lead("//s.example/x").endpoint == Endpoint("s.example", 443, True)
    assert lead("https://[::1]/ü x").target == "/%C3%BC%20x"


@pytest.mark.parametrize(
    "location",
    [None, "", "ftp://s/x", "https://user:pw@s/x", "https://s:port/x", "file:///x"],
)
def test_where_nobody_goes(location: str | None) -> None:
    with pytest.raises(SourceError) as caught:
        lead(location)
    assert "pw" not in str(caught.value)


def test_a_way_shows_no_signature() -> None:
    assert "sig" not in repr(lead("https://s.example/b?X-Amz-Signature=sig"))
