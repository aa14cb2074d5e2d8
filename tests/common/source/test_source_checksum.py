"""Which headers are a checksum of the whole object, and what is asked for them."""

from __future__ import annotations

import base64
import logging

import pytest

from fastload_common.checksums.algorithms import CRC32, CRC32C, CRC64NVME, Checksum
from fastload_common.errors import SourceUnavailableError
from fastload_common.source.s3_checksum import checksum_in
from fastload_common.testing.fault_server import Fault, FaultServer
from tests.common.source.conftest import OpenS3

CRC64 = base64.b64encode(bytes(range(1, 9))).decode()
WIDE = Checksum(CRC64NVME, 0x0102030405060708)
FULL = {"x-amz-checksum-type": "FULL_OBJECT"}


def test_a_full_object_checksum_of_each_algorithm() -> None:
    for algorithm in (CRC64NVME, CRC32C, CRC32):
        value = int.from_bytes(range(1, 1 + algorithm.value_bytes), "big")
        text = base64.b64encode(value.to_bytes(algorithm.value_bytes, "big")).decode()
        headers = {f"x-amz-checksum-{algorithm.name.lower()}": text}
        assert checksum_in(FULL | headers) == Checksum(algorithm, value)


def test_the_widest_of_several_is_taken() -> None:
    headers = {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-crc64nvme": CRC64}
    assert checksum_in(FULL | headers) == WIDE


def test_a_type_that_is_not_named_is_believed_of_an_upload_in_one_piece() -> None:
    said = {"x-amz-checksum-crc64nvme": CRC64}
    assert checksum_in(said | {"etag": '"0123456789abcdef"'}) == WIDE
    assert checksum_in(said | {"etag": '"0123456789abcdef-3"'}) is None
    assert checksum_in(FULL | said | {"etag": '"0123456789abcdef-3"'}) == WIDE


@pytest.mark.parametrize(
    "headers",
    [
        {},
        FULL,
        {"x-amz-checksum-type": "COMPOSITE", "x-amz-checksum-crc64nvme": CRC64},
        {"x-amz-checksum-type": "of another kind", "x-amz-checksum-crc64nvme": CRC64},
        {"x-amz-checksum-crc64nvme": f"{CRC64}-2"},
        FULL | {"x-amz-checksum-crc64nvme": f"{CRC64}-2"},
        FULL | {"x-amz-checksum-crc64nvme": ""},
        FULL | {"x-amz-checksum-crc64nvme": CRC64[:-1]},
        FULL | {"x-amz-checksum-crc64nvme": CRC64.replace("A", "*")},
        FULL | {"x-amz-checksum-crc64nvme": "é"},
        FULL | {"x-amz-checksum-crc64nvme": "AAAAAA=="},
        FULL | {"x-amz-checksum-crc32": CRC64},
        FULL | {"x-amz-checksum-sha256": CRC64},
    ],
)
def test_anything_else_is_none(headers: dict[str, str]) -> None:
    assert checksum_in(headers) is None


def test_the_request_is_pinned_and_asks_for_checksums(
    fault_server: FaultServer, open_s3: OpenS3
) -> None:
    etag = fault_server.put("bucket", "a/key with space", b"0123")
    source = open_s3("s3://bucket/a")
    object_id = source.stat("key with space")
    assert source.stored_checksum(object_id) is None
    request = fault_server.seen("HEAD", "bucket/a/key with space")[-1]
    assert request.headers["x-amz-checksum-mode"] == "ENABLED"
    assert request.headers["if-match"] == etag


def test_a_store_that_is_busy_is_asked_again(fault_server: FaultServer, open_s3: OpenS3) -> None:
    fault_server.put("bucket", "key", b"0123")
    source = open_s3("s3://bucket")
    object_id = source.stat("key")
    kept: dict[str, str | None] = {**FULL, "x-amz-checksum-crc64nvme": CRC64}
    fault_server.script("HEAD", "bucket/key", [Fault(status=503)], then=Fault(headers=kept))
    assert source.stored_checksum(object_id) == WIDE


def test_a_store_that_does_not_answer_is_an_error(
    fault_server: FaultServer, open_s3: OpenS3
) -> None:
    fault_server.put("bucket", "key", b"0123")
    source = open_s3("s3://bucket")
    object_id = source.stat("key")
    fault_server.script("HEAD", "bucket/key", [], then=Fault(status=503))
    with pytest.raises(SourceUnavailableError) as caught:
        source.stored_checksum(object_id)
    assert caught.value.fields["uri"] == "s3://bucket/key"


def test_a_refusal_is_said_once(
    fault_server: FaultServer, open_s3: OpenS3, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_s3("s3://bucket")
    with caplog.at_level(logging.WARNING):
        for key in ("a", "b"):
            fault_server.put("bucket", key, b"0123")
            object_id = source.stat(key)
            fault_server.script("HEAD", f"bucket/{key}", [], then=Fault(status=403))
            assert source.stored_checksum(object_id) is None
    assert len(caplog.records) == 1
    assert "s3://bucket/a" in caplog.text
