"""S01: a listing is all of it, however the server cuts it into pages."""

from __future__ import annotations

import pytest

from fastload_common.errors import AccessDeniedError, SourceError, SourceUnavailableError
from fastload_common.testing.fault_server import Fault, FaultServer
from tests.common.source.conftest import IMPATIENT, OpenS3


@pytest.mark.parametrize("empty_pages", [0, 2])
def test_s01_every_page_is_read(
    fault_server: FaultServer, open_s3: OpenS3, empty_pages: int
) -> None:
    fault_server.page_keys = 10
    fault_server.empty_pages = empty_pages
    keys = [f"junk {i:03}" for i in range(45)] + [f"model-{i:05}" for i in range(58)]
    for key in keys:
        fault_server.put("bucket", f"m/{key}", b"x")
    fault_server.put("bucket", "m2/other", b"x")
    assert [row.key for row in open_s3("s3://bucket/m").list()] == keys
    assert len(fault_server.seen("GET", "bucket")) == 11 + empty_pages
    # Tokens hold characters that must come back as they were sent.
    tokens = [request.query.get("continuation-token") for request in fault_server.seen("GET")]
    assert tokens[1] == ["t+/=1"]


def test_not_recursive_asks_the_server_for_that(fault_server: FaultServer, open_s3: OpenS3) -> None:
    for key in ("a", "b/c", "b/d"):
        fault_server.put("bucket", f"m/{key}", b"x")
    assert [row.key for row in open_s3("s3://bucket/m").list(recursive=False)] == ["a"]
    assert fault_server.seen("GET")[0].query["delimiter"] == ["/"]


def test_listing_not_allowed_but_stat_is(fault_server: FaultServer, open_s3: OpenS3) -> None:
    fault_server.put("bucket", "m/key", b"0123")
    fault_server.script("GET", "bucket", [], then=Fault(status=403, code="AccessDenied"))
    source = open_s3("s3://bucket/m")
    with pytest.raises(AccessDeniedError, match="list s3://bucket/m") as caught:
        source.list()
    assert caught.value.fields["request_id"].startswith("request-")
    assert source.read(source.stat("key")) == b"0123"


def test_listing_that_never_comes(fault_server: FaultServer, open_s3: OpenS3) -> None:
    fault_server.put("bucket", "m/key", b"0123")
    fault_server.script("GET", "bucket", [Fault(stall_after_bytes=0, before_head=True)])
    # The second attempt is good.
    assert len(open_s3("s3://bucket/m", IMPATIENT).list()) == 1
    fault_server.script("GET", "bucket", [], then=Fault(status=503, code="SlowDown"))
    asked = len(fault_server.seen("GET"))
    with pytest.raises(SourceUnavailableError, match="SlowDown") as caught:
        open_s3("s3://bucket/m").list()
    # Each attempt is one request: nobody below retries too.
    assert len(fault_server.seen("GET")) - asked == caught.value.fields["attempts"] == 3


PAGES = (
    b"<!doctype html><html><head><link></head><body>Console</body></html>",
    b"<html><body>log in</body></html>",
    b"",
)


@pytest.mark.parametrize("page", PAGES)
def test_web_page_is_no_empty_listing(
    fault_server: FaultServer, open_s3: OpenS3, page: bytes
) -> None:
    fault_server.put("bucket", "m/key", b"x")
    fault_server.script("GET", "bucket", [], then=Fault(body=page))
    with pytest.raises(SourceError, match="no listing") as caught:
        open_s3("s3://bucket/m").list()
    assert type(caught.value) is SourceError
    assert "AWS_ENDPOINT_URL" in str(caught.value)
    assert caught.value.fields["endpoint"] == fault_server.endpoint
    assert len(fault_server.requests) == 1


@pytest.mark.parametrize(
    "size", ["", "<Size>-5</Size>", "<Size>x</Size>", f"<Size>{'9' * 5000}</Size>"]
)
def test_s01_row_without_a_size(fault_server: FaultServer, open_s3: OpenS3, size: str) -> None:
    fault_server.put("bucket", "m/key", b"x")
    row = f"<Contents><Key>m/key</Key>{size}</Contents>"
    xml = f"<ListBucketResult><IsTruncated>false</IsTruncated>{row}</ListBucketResult>"
    fault_server.script("GET", "bucket", [Fault(body=xml.encode())])
    with pytest.raises(SourceError) as caught:
        open_s3("s3://bucket/m").list()
    assert "s3://bucket/m" in str(caught.value)


def test_row_without_a_key_is_left_out(fault_server: FaultServer, open_s3: OpenS3) -> None:
    fault_server.put("bucket", "m/key", b"x")
    rows = (
        "<Contents><Size>5</Size></Contents>"
        "<Contents><Key>m/a</Key><ETag>e</ETag><Size>5</Size></Contents>"
    )
    xml = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
    fault_server.script("GET", "bucket", [Fault(body=xml.encode())])
    assert [row.key for row in open_s3("s3://bucket/m").list()] == ["a"]


def test_head_without_a_length(fault_server: FaultServer, open_s3: OpenS3) -> None:
    fault_server.put("bucket", "m/key", b"x")
    fault_server.script("HEAD", "bucket/m/key", [Fault(headers={"Content-Length": None})])
    with pytest.raises(SourceError, match="how large s3://bucket/m/key is"):
        open_s3("s3://bucket/m").stat("key")


def test_a_listing_without_etags_is_completed_by_a_head(
    fault_server: FaultServer, open_s3: OpenS3
) -> None:
    fault_server.put("bucket", "m/a", b"12345")
    rows = "<IsTruncated>false</IsTruncated><Contents><Key>m/a</Key><Size>5</Size></Contents>"
    xml = f"<ListBucketResult>{rows}</ListBucketResult>"
    fault_server.script("GET", "bucket", [Fault(body=xml.encode())])
    source = open_s3("s3://bucket/m")
    (found,) = source.list()
    assert found.object_id == source.stat("a")
    assert found.object_id.etag is not None


def test_what_has_no_etag_is_not_read(fault_server: FaultServer, open_s3: OpenS3) -> None:
    fault_server.put("bucket", "m/a", b"12345")
    fault_server.script("HEAD", "bucket/m/a", [Fault(headers={"ETag": None})])
    source = open_s3("s3://bucket/m")
    with pytest.raises(SourceError, match="gives no ETag for s3://bucket/m/a"):
        source.read(source.stat("a"))
