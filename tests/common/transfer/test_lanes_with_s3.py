"""Receiver processes against the real S3 server, and through proxies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.errors import AccessDeniedError, ObjectChangedError, SourceUnavailableError
from fastload_common.ranges import ObjectId
from fastload_common.source.base import ObjectSource
from fastload_common.source.registry import open_source
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.fault_server import FaultServer
from fastload_common.testing.s3_server import S3Server
from fastload_common.testing.tunnel_proxy import TunnelProxy
from fastload_common.transfer.lanes import Done
from tests.common.transfer.lanes_bench import LanesBench, receiver_pids

CHUNK = 256 * 1024
DATA = random.Random(3).randbytes(10 * CHUNK + 12_345)


@pytest.fixture
def stored(s3_server: S3Server, s3_bucket: str, tmp_path: Path) -> str:
    """The URI of a model of one object."""
    (tmp_path / "key").write_bytes(DATA)
    s3_server.upload_dir(tmp_path, s3_bucket, "m")
    return f"s3://{s3_bucket}/m"


@pytest.fixture
def source(stored: str) -> Iterator[ObjectSource]:
    source = open_source(stored, Settings())
    yield source
    assert receiver_pids() == []


def fetch_all(bench: LanesBench, object_id: ObjectId) -> list[Done]:
    """Every byte, compared; the receipts."""
    size = object_id.size_bytes
    edges = [*range(0, size, CHUNK), size]
    ids = {s: bench.start(object_id, s, e) for s, e in itertools.pairwise(edges)}
    ends = []
    for start, attempt_id in ids.items():
        end = bench.end_of(attempt_id)
        assert isinstance(end, Done), end
        ends.append(end)
        got = bench.memory(attempt_id)
        assert got == DATA[start : start + len(got)]
        bench.slots.pop(attempt_id).release()
    return ends


@pytest.mark.s3
def test_every_byte_comes_over_few_connections(source: ObjectSource) -> None:
    bench = LanesBench(source, "processes", connections=6, slot_bytes=CHUNK)
    object_id = source.stat("key")
    ends = [end for _ in range(3) for end in fetch_all(bench, object_id)]
    assert len(bench.receivers) == 2
    assert sum(end.receipt.new_connection for end in ends) <= 6
    bench.close()


@pytest.mark.s3
def test_a_replaced_object_is_noticed_with_both_etags(
    source: ObjectSource, s3_server: S3Server, stored: str
) -> None:
    bench = LanesBench(source, "processes", slot_bytes=CHUNK)
    object_id = source.stat("key")
    assert object_id.etag is not None
    bucket = stored.split("/")[2]
    s3_server.client().put_object(Bucket=bucket, Key="m/key", Body=DATA[::-1])
    error = bench.failure(bench.start(object_id, 0, CHUNK)).error
    assert isinstance(error, ObjectChangedError)
    assert error.fields["expected_etag"] == object_id.etag
    assert error.fields["found_etag"] == source.stat("key").etag
    bench.close()


@pytest.mark.s3
def test_a_wrong_key_is_refused_without_showing_it(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(stored, Settings())
    object_id = source.stat("key")
    source.close()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-secret")
    bench = LanesBench(open_source(stored, Settings()), "processes", slot_bytes=CHUNK)
    error = bench.failure(bench.start(object_id, 0, CHUNK)).error
    assert isinstance(error, AccessDeniedError)
    assert error.fields["status"] == 403
    assert "a-wrong-secret" not in str(error) + repr(vars(error))
    bench.close()


@pytest.fixture
def secure(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultServer]:
    """The scripted server over TLS, as the environment's endpoint."""
    authority = PrivateAuthority(tmp_path_factory.mktemp("authority"))
    with FaultServer(authority.server_context("127.0.0.1")) as server:
        server.put("bucket", "m/key", DATA)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
        yield server


def test_s10_through_a_tunnel(secure: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with TunnelProxy("Basic dXNlcjpwQHNz") as proxy:  # user:p@ss
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:p%40ss@127.0.0.1:{proxy.port}")
        source = open_source("s3://bucket/m", Settings())
        bench = LanesBench(source, "processes", slot_bytes=CHUNK)
        object_id = source.stat("key")
        before = len(proxy.tunnels)
        fetch_all(bench, object_id)
        assert 1 <= len(proxy.tunnels) - before <= 4
        assert set(proxy.tunnels) == {f"127.0.0.1:{secure.port}"}
        proxy.wanted = "Basic other"
        error = bench.failure(bench.start(object_id, 0, 10, fresh=True)).error
        assert isinstance(error, AccessDeniedError)
        assert "proxy wants other credentials" in str(error)
        assert "p@ss" not in str(error) + repr(vars(error))
        bench.close()


def test_a_proxy_that_is_not_there(secure: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    bench = LanesBench(open_source("s3://bucket/m", Settings()), "processes", slot_bytes=CHUNK)
    object_id = ObjectId("s3://bucket/m/key", '"e"', len(DATA))
    error = bench.failure(bench.start(object_id, 0, 10)).error
    assert type(error) is SourceUnavailableError
    assert error.fields["proxy"] == "127.0.0.1:1"
    bench.close()
