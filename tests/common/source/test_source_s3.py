"""S3 as a source, against the real server: the conformance suite, processes, the request log."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from fastload_common.config import Settings
from fastload_common.errors import AccessDeniedError, ObjectMissingError
from fastload_common.ranges import ByteRange
from fastload_common.source.base import ObjectSource
from fastload_common.source.registry import open_source
from fastload_common.testing.children import read_into_queue
from fastload_common.testing.request_log import LoggingProxy
from fastload_common.testing.s3_server import S3Server
from fastload_common.testing.source_suite import SourceSuite, StoreUnderTest

pytestmark = pytest.mark.s3


@dataclass
class _Bucket:
    source: ObjectSource
    client: Any
    bucket: str
    prefix: str

    def write(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}", Body=data)

    def write_beside(self, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}2/x", Body=data)
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}-x", Body=data)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}")


@pytest.fixture(scope="module")
def client(s3_server: S3Server) -> Iterator[Any]:
    client = s3_server.client()
    yield client
    client.close()


@pytest.fixture(scope="module")
def shared_bucket(s3_server: S3Server) -> str:
    s3_server.make_bucket("source-suite")
    return "source-suite"


@pytest.fixture
def store(
    s3_server: S3Server,
    client: Any,
    shared_bucket: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[_Bucket]:
    for name, value in s3_server.environ().items():
        monkeypatch.setenv(name, value)
    prefix = f"models/{abs(hash(request.node.nodeid)):x}/a b"
    source = open_source(f"s3://{shared_bucket}/{prefix}/", Settings())
    yield _Bucket(source, client, shared_bucket, prefix)
    source.close()


class TestS3(SourceSuite):
    @pytest.fixture
    def store(self, store: _Bucket) -> StoreUnderTest:
        return store


def test_whole_bucket_as_root(s3_bucket: str, client: Any) -> None:
    client.put_object(Bucket=s3_bucket, Key="x/y", Body=b"0123")
    source = open_source(f"s3://{s3_bucket}", Settings())
    (row,) = source.list()
    assert (row.key, row.object_id.uri) == ("x/y", f"s3://{s3_bucket}/x/y")
    assert source.read(row.object_id) == b"0123"
    source.close()


def test_directory_markers_are_left_out(store: _Bucket) -> None:
    store.write("sub/", b"")
    store.write("sub/key", b"0")
    assert [row.key for row in store.source.list()] == ["sub/key"]


def test_missing_bucket_is_named(store: _Bucket) -> None:
    with pytest.raises(ObjectMissingError, match="no such bucket") as caught:
        open_source("s3://no-such-bucket-here/x", Settings()).list()
    assert caught.value.fields["uri"] == "s3://no-such-bucket-here/x"
    assert caught.value.fields["code"] == "NoSuchBucket"


def test_empty_prefix_lists_nothing(store: _Bucket) -> None:
    assert store.source.list() == []


@pytest.mark.parametrize("doing", ["list", "stat", "put", "receive"])
def test_wrong_secret_says_so_and_shows_none(
    store: _Bucket, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    store.write("key", b"0123")
    object_id = store.source.stat("key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-0123456789")
    source = open_source(store.source.root, Settings())
    receiver = source.open_receiver()
    buffer = memoryview(bytearray(4))
    actions: dict[str, Any] = {
        "list": source.list,
        "stat": lambda: source.stat("key"),
        "put": lambda: source.put_if_absent("other", b"x"),
        "receive": lambda: receiver.receive(object_id, ByteRange(0, 4), buffer),
    }
    with pytest.raises(AccessDeniedError) as caught:
        actions[doing]()
    error = caught.value
    assert error.fields["status"] == 403
    assert error.fields["credentials"] == "env"
    assert error.fields["endpoint"].startswith("http://127.0.0.1:")
    assert not error.retryable
    if doing != "stat":  # a reply to HEAD has no body to say why
        assert error.fields["code"] == "SignatureDoesNotMatch"
    for text in (str(error), repr(error), str(error.__cause__)):
        assert "wrong-secret" not in text
        assert "Signature=" not in text
    receiver.close()
    source.close()


# S25: processes


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_s25_used_in_the_parent_then_in_children(store: _Bucket, method: str) -> None:
    store.write("key", b"0123456789")
    object_id = store.source.stat("key")
    assert store.source.read(object_id) == b"0123456789"
    context: Any = multiprocessing.get_context(method)
    queue: Any = context.Queue()
    children = [
        context.Process(target=read_into_queue, args=(store.source, "key", queue)) for _ in range(2)
    ]
    for child in children:
        child.start()
    assert [queue.get(timeout=30) for _ in children] == [b"0123456789"] * 2
    for child in children:
        child.join()
        assert child.exitcode == 0
    # The parent's connection was not disturbed.
    assert store.source.read(object_id, ByteRange(2, 4)) == b"23"
    queue.close()
    queue.join_thread()


def test_s25_pickled_and_copied(store: _Bucket) -> None:
    store.write("key", b"0123456789")
    store.source.read(store.source.stat("key"))
    pickled = pickle.loads(pickle.dumps(store.source))
    for other in (pickled, copy.deepcopy(store.source)):
        assert other.root == store.source.root
        assert other.read(other.stat("key")) == b"0123456789"
        other.close()
    assert b"SECRET" not in pickle.dumps(store.source).upper()


# The request log


def test_request_log_counts_what_goes_through(
    store: _Bucket, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("key", bytes(100_000))
    with LoggingProxy(s3_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        source = open_source(store.source.root, Settings())
        (row,) = source.list()
        data = source.read(row.object_id, ByteRange(10, 50_010))
        assert len(data) == 50_000
        assert source.put_if_absent("put", b"0123")
        assert proxy.body_bytes("GET", f"/{store.bucket}/{store.prefix}/") == 50_000
        gets = [r for r in proxy.requests if r.range_header]
        assert [(r.method, r.range_header, r.status) for r in gets] == [
            ("GET", "bytes=10-50009", 206)
        ]
        assert all(request.signed for request in proxy.requests)
        assert proxy.peak_concurrency == 1
        source.close()
