"""What the rig says where nothing is wrong: objects, conditions, listings, checksums, versions."""

from __future__ import annotations

import base64
import zlib

import pytest

from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.rig import Generated, Rig, checksum
from tests.common.testing.rig_client import DATA, KEY, NAME, ask, boto_client, connect, part

CHECKED = {"x-amz-checksum-mode": "ENABLED"}


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-299", 100, 300),
        ("bytes=99990-", 99_990, 100_000),
        ("bytes=-10", 99_990, 100_000),
        ("bytes=99990-200000", 99_990, 100_000),
    ],
)
def test_ranges(rig: Rig, text: str, start: int, end: int) -> None:
    answer = ask(rig, headers={"Range": text})
    assert (answer.status, answer.body) == (206, DATA[start:end])
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/100000"
    assert answer.headers["content-length"] == str(end - start)


def test_whole_object_and_head(rig: Rig) -> None:
    whole, head = ask(rig), ask(rig, method="HEAD")
    assert (whole.status, whole.body) == (200, DATA)
    assert (head.status, head.body) == (200, b"")
    assert whole.headers["etag"] == head.headers["etag"]
    assert head.headers["content-length"] == "100000"


def test_range_beyond_the_end(rig: Rig) -> None:
    answer = ask(rig, headers={"Range": "bytes=100000-100001"})
    assert answer.status == 416
    assert answer.headers["content-range"] == "bytes */100000"
    assert b"<Code>InvalidRange</Code>" in answer.body


def test_missing_objects_and_buckets(rig: Rig) -> None:
    assert b"<Code>NoSuchKey</Code>" in ask(rig, "/bucket/other").body
    assert b"<Code>NoSuchBucket</Code>" in ask(rig, "/other/key").body
    assert ask(rig, "/bucket/other", method="HEAD").status == 404


def test_if_match(rig: Rig) -> None:
    old = ask(rig).headers["etag"]
    assert ask(rig, headers={"If-Match": old}).status == 200
    rig.put("bucket", "m/key", DATA[::-1])
    assert ask(rig, headers={"If-Match": old} | part(0, 5)).status == 412


def test_host_header_names_the_bucket(rig: Rig) -> None:
    for host in ("bucket.s3.localhost:1234", "bucket.s3.us-east-1.amazonaws.com"):
        assert ask(rig, "/m/key", {"Host": host}).body == DATA
    assert [r.name for r in rig.log.gets()] == [NAME, NAME]
    assert ask(rig, "/m/key", {"Host": "other.s3.localhost"}).status == 404


def test_put_with_condition(rig: Rig) -> None:
    once = {"If-None-Match": "*"}
    assert ask(rig, "/bucket/new", once, method="PUT", body=b"one").status == 200
    assert ask(rig, "/bucket/new", once, method="PUT", body=b"two").status == 412
    assert ask(rig, "/bucket/new").body == b"one"
    assert ask(rig, "/bucket/new", method="PUT", body=b"two").status == 200
    assert ask(rig, "/bucket/new").body == b"two"


def test_checksums_have_known_values() -> None:
    # The check values of the catalogues of CRCs, over the digits from 1 to 9.
    digits = b"123456789"
    assert base64.b64decode(checksum("crc32", digits)).hex() == "cbf43926"
    assert base64.b64decode(checksum("crc32c", digits)).hex() == "e3069283"
    assert base64.b64decode(checksum("crc64nvme", digits)).hex() == "ae8b14860a799888"


@pytest.mark.parametrize("algorithm", ["crc64nvme", "crc32c", "crc32"])
def test_checksum_is_shown_when_it_is_asked_for(rig: Rig, algorithm: str) -> None:
    given = {f"x-amz-checksum-{algorithm}": checksum(algorithm, b"content")}
    assert ask(rig, "/bucket/c", given, method="PUT", body=b"content").status == 200
    head = ask(rig, "/bucket/c", CHECKED, method="HEAD")
    assert head.headers[f"x-amz-checksum-{algorithm}"] == given[f"x-amz-checksum-{algorithm}"]
    assert head.headers["x-amz-checksum-type"] == "FULL_OBJECT"
    for headers in ({}, CHECKED | part(0, 3)):
        assert "x-amz-checksum-type" not in ask(rig, "/bucket/c", headers).headers
    refused = ask(rig, "/bucket/c", given, method="PUT", body=b"contents")
    assert b"<Code>BadDigest</Code>" in refused.body


def test_no_checksum_where_none_was_given(rig: Rig) -> None:
    assert "x-amz-checksum-type" not in ask(rig, headers=CHECKED, method="HEAD").headers


def test_a_checksum_that_the_test_gives(rig: Rig) -> None:
    rig.put("bucket", "wrong", b"abc", checksums={"crc32": "AAAAAA=="})
    rig.put("bucket", "right", b"abc", checksums=["crc32"])
    shown = [
        ask(rig, f"/bucket/{key}", CHECKED, method="HEAD").headers["x-amz-checksum-crc32"]
        for key in ("wrong", "right")
    ]
    assert shown == ["AAAAAA==", base64.b64encode(zlib.crc32(b"abc").to_bytes(4, "big")).decode()]
    with pytest.raises(ValueError, match="checksums' text"):
        rig.put("bucket", "large", Generated(10), checksums=["crc32"])


def test_versions(rig: Rig) -> None:
    rig.store.versioned.add("bucket")
    first = rig.put("bucket", "v", b"first").version
    second = rig.put("bucket", "v", b"second").version
    assert ask(rig, "/bucket/v").headers["x-amz-version-id"] == second
    assert ask(rig, f"/bucket/v?versionId={first}").body == b"first"
    rig.store.delete("bucket", "v")
    assert ask(rig, "/bucket/v").status == 404
    assert ask(rig, f"/bucket/v?versionId={second}").body == b"second"


def test_generated_content(rig: Rig) -> None:
    content = Generated(20_000_000, seed=3)
    rig.put("bucket", "large", content)
    # Over the end of its block of eight MiB and a few bytes.
    answer = ask(rig, "/bucket/large", part(8_300_000, 8_500_000))
    assert answer.body == content.read(8_300_000, 8_500_000)
    assert len({answer.body[i : i + 50] for i in range(0, 200_000, 50)}) == 4_000
    assert Generated(20_000_000, seed=4).read(0, 100) != content.read(0, 100)
    assert len(content.read()) == 20_000_000


def test_s01_listing_in_pages(rig: Rig) -> None:
    keys = [f"many/a+b &<{i:05}>" for i in range(2_003)]
    for key in keys:
        rig.put("bucket", key, b"x")
    client = boto_client(rig.endpoint)
    pages = list(client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix="many/"))
    client.close()
    assert [len(page["Contents"]) for page in pages] == [1000, 1000, 3]
    assert [row["Key"] for page in pages for row in page["Contents"]] == keys
    assert {row["Size"] for page in pages for row in page["Contents"]} == {1}
    assert [r.key for r in rig.log.requests("LIST")] == ["many/"] * 3


def test_listing_with_folders(rig: Rig) -> None:
    for key in ("f/a", "f/b/1", "f/b/2", "f/c/1", "f/d"):
        rig.put("bucket", key, b"x")
    rig.page_keys = 2
    client = boto_client(rig.endpoint)
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket="bucket", Prefix="f/", Delimiter="/", StartAfter="f/a"
    )
    rows = [
        [row["Prefix"] for row in page.get("CommonPrefixes", [])]
        + [row["Key"] for row in page.get("Contents", [])]
        for page in pages
    ]
    client.close()
    assert rows == [["f/b/", "f/c/"], ["f/d"]]


def test_a_token_that_was_not_encoded_is_refused(rig: Rig) -> None:
    rig.page_keys = 1
    rig.put("bucket", "m/other", b"x")
    listing = ask(rig, "/bucket?list-type=2").body.decode()
    token = listing.partition("<NextContinuationToken>")[2].partition("<")[0]
    assert token.startswith("+/=")
    target = f"/bucket?list-type=2&continuation-token={token}"
    assert b"<Code>InvalidArgument</Code>" in ask(rig, target).body


def test_boto3_stores_and_reads(rig: Rig) -> None:
    rig.allow_unsigned = False
    client = boto_client(rig.endpoint)
    client.create_bucket(Bucket="made")
    client.put_object(Bucket="made", Key="a b+c/ü", Body=b"content")
    reply = client.get_object(Bucket="made", Key="a b+c/ü", Range="bytes=1-3")
    assert reply["Body"].read() == b"ont"
    assert client.head_object(Bucket="made", Key="a b+c/ü")["ContentLength"] == 7
    assert client.get_bucket_location(Bucket="made")["LocationConstraint"] is None
    client.head_bucket(Bucket="made")
    client.delete_object(Bucket="made", Key="a b+c/ü")
    with pytest.raises(client.exceptions.NoSuchKey):
        client.get_object(Bucket="made", Key="a b+c/ü")
    client.close()


def test_boto3_stores_in_chunks_over_tls(authority: PrivateAuthority) -> None:
    # Over TLS it sends its own chunks, with the checksum behind them.
    with Rig(keys=[KEY], tls=authority.server_context("127.0.0.1")) as rig:
        client = boto_client(rig.endpoint, verify=str(authority.bundle))
        rig.store.make_bucket("b")
        client.put_object(Bucket="b", Key="k", Body=b"content" * 1000)
        assert client.get_object(Bucket="b", Key="k")["Body"].read() == b"content" * 1000
        client.close()


def test_a_kept_connection_is_one(rig: Rig) -> None:
    connection = connect(rig)
    for _ in range(3):
        connection.request("GET", f"/{NAME}")
        assert connection.getresponse().read() == DATA
    connection.close()
    assert {r.connection for r in rig.log.gets()} == {1}
    rig.log.wait_until_unconnected()
    assert (rig.log.connections, rig.log.peak_connections) == (1, 1)
