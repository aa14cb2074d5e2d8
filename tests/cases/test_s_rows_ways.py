"""Proxies on the way, listings in pages, small files, and processes that load."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

from fastload_common.errors import ConfigError, SourceUnavailableError
from fastload_common.load.metadata import fetch_metadata
from fastload_common.load.session import LoadSession, RankPlace, WeightSource
from fastload_common.source.registry import open_source
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.checkpoints import encode_file, random_tensor
from fastload_common.testing.rig import Rig
from fastload_common.testing.s3_server import S3Server
from fastload_common.testing.tunnel_proxy import TunnelProxy
from tests.cases.harness import BUCKET, MODEL, SHARDS, URI, load, load_in, ranges, settings
from tests.cases.identity import IdentityService
from tests.cases.worker import load_into_queue, read_into_queue

# S01


def _shard(number: int) -> bytes:
    return encode_file({f"t{number}": random_tensor("U8", [8], number)})


def test_s01_more_than_a_thousand_shards(rig: Rig) -> None:
    for number in range(1500):
        rig.put(BUCKET, f"big/junk-{number:04}.txt", b"x")
    for number in range(1003):
        rig.put(BUCKET, f"big/model-{number:05}.safetensors", _shard(number))
    source = open_source(f"s3://{BUCKET}/big", settings())
    found = [row.key for row in source.list() if row.key.endswith(".safetensors")]
    source.close()
    assert found == [f"model-{number:05}.safetensors" for number in range(1003)]
    assert len(rig.log.requests("LIST")) == 3
    assert all(request.headers.get("authorization") for request in rig.log.requests("LIST"))


def test_s01_a_load_takes_every_page(rig: Rig) -> None:
    rig.page_keys = 7
    numbers = range(25)
    for number in numbers:
        rig.put(BUCKET, f"many/model-{number:05}.safetensors", _shard(number))
        rig.put(BUCKET, f"many/a-junk-{number}", b"x")
    found = load(f"s3://{BUCKET}/many")
    assert found == {f"t{k}": random_tensor("U8", [8], k).data for k in numbers}
    tokens = [request.query.get("continuation-token") for request in rig.log.requests("LIST")]
    assert len(tokens) == 8
    assert None not in tokens[1:]


def test_s01_an_index_names_the_files(rig: Rig) -> None:
    weights = {name: SHARDS[int(name.split(".")[1])] for name in MODEL.tensors}
    pairs = ", ".join(f'"{name}": "{file}"' for name, file in weights.items())
    index = f'{{"metadata": {{}}, "weight_map": {{{pairs}}}}}'
    rig.put(BUCKET, "m/model.safetensors.index.json", index.encode())
    rig.put(BUCKET, "m/another.safetensors", _shard(7))
    assert MODEL.agrees(load())
    assert rig.log.gets("m/another.safetensors") == []


# S03

SMALL = {
    "config.json": b"{}",
    "configuration_x.py": b"X = 1",
    "chat_template.jinja": b"{{ messages }}",
    "tokenizer.model": b"\x00model",
    "tokenizer.json": b"{}",
    "preprocessor_config.json": b"{}",
    "1_Pooling/config.json": b"{}",
}


@pytest.mark.parametrize("apart", [False, True])
def test_s03_all_small_files_come_and_no_weights(rig: Rig, tmp_path: Path, apart: bool) -> None:
    tokenizer = "tok" if apart else "m"
    for name, data in SMALL.items():
        prefix = tokenizer if name.startswith("token") else "m"
        rig.put(BUCKET, f"{prefix}/{name}", data)
    rig.put(BUCKET, "m/pytorch_model.bin", b"weights")
    with_ = settings(cache_dir=str(tmp_path / "cache"))
    found = [fetch_metadata(URI, with_)]
    if apart:
        found.append(fetch_metadata(f"s3://{BUCKET}/tok", with_, weights=False))
    for name, data in SMALL.items():
        directory = found[-1] if name.startswith("token") else found[0]
        assert (directory / name).read_bytes() == data
    assert not (found[0] / "pytorch_model.bin").exists()
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert on_disk < 4096  # headers
    assert rig.log.gets("m/pytorch_model.bin") == []


# S10


@pytest.fixture
def behind(tls_rig: Rig, authority: PrivateAuthority, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    return tls_rig


DEAD = "http://127.0.0.1:9"


@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize(
    "excluded", ["127.0.0.0/8", "*", ".svc.cluster.local,localhost,10.0.0.0/8,*", "127.0.0.1"]
)
def test_s10_what_is_excluded_goes_past_a_dead_proxy(
    behind: Rig, monkeypatch: pytest.MonkeyPatch, excluded: str, upper: bool
) -> None:
    monkeypatch.setenv("HTTPS_PROXY" if upper else "https_proxy", DEAD)
    monkeypatch.setenv("NO_PROXY" if upper else "no_proxy", excluded)
    assert MODEL.agrees(load())


def test_s10_a_suffix_is_excluded(
    behind: Rig, proxy: TunnelProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not excluded are names that only end alike.
    proxy.leads_to = behind.port
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.local")
    monkeypatch.setenv("HTTPS_PROXY", proxy.endpoint)
    monkeypatch.setenv("NO_PROXY", "3.local,.svc.cluster.local")
    assert MODEL.agrees(load())
    assert proxy.hosts == {"s3.local"}


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_s10_every_connection_of_a_load_goes_through_the_tunnel(
    behind: Rig, proxy: TunnelProxy, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"{scheme}127.0.0.1:{proxy.port}")
    assert MODEL.agrees(load())
    assert proxy.seen == [("CONNECT", f"127.0.0.1:{behind.port}")] * behind.log.connections
    assert behind.log.connections > 2


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY"])
def test_s10_a_malformed_value_names_its_variable(
    behind: Rig, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "http://user:pass-word@proxy:port")
    with pytest.raises(ConfigError, match=variable) as caught:
        load()
    assert "pass-word" not in str(caught.value)
    assert behind.log.connections == 0


def test_s10_identities_are_never_asked_through_a_proxy(
    rig: Rig, identity: IdentityService, proxy: TunnelProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.endpoint)
    monkeypatch.setenv("NO_PROXY", f"127.0.0.1:{rig.port}")
    assert MODEL.agrees(load())
    assert set(identity.calls) == {"imds"}
    assert proxy.seen == []


def test_s10_a_pods_identity_is_never_asked_through_a_proxy(
    rig: Rig,
    identity: IdentityService,
    pod: Path,
    proxy: TunnelProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.endpoint)
    monkeypatch.setenv("NO_PROXY", f"127.0.0.1:{rig.port}")
    assert MODEL.agrees(load())
    assert set(identity.calls) == {"container"}
    assert proxy.seen == []


def test_s10_a_proxy_that_refuses_is_no_throttling(
    behind: Rig, proxy: TunnelProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy.endpoint)
    with ranges(with_=settings(max_attempts=2)) as read:
        object_id = read.source.stat(SHARDS[0])
        proxy.refuse_status = 503
        with pytest.raises(SourceUnavailableError, match="the proxy refused") as caught:
            read.read(object_id)
    text = str(caught.value)
    assert caught.value.fields["proxy"] == f"127.0.0.1:{proxy.port}"
    assert not any(word in text for word in ("SlowDown", "hrottl", "CONCURRENCY"))


# S25


@pytest.mark.parametrize(
    ("method", "whole"), [("fork", True), ("spawn", True), ("spawn", False), ("forkserver", False)]
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_s25_used_in_the_parent_then_in_children(rig: Rig, method: str, whole: bool) -> None:
    # The parent's session is in the middle of its load: receivers, connections and threads are up.
    with ranges() as read:
        running = read.fetcher.fetch(read.chunks(read.source.stat(SHARDS[0])))
        next(running).release()
        expected: object = zlib.crc32(MODEL.files[SHARDS[0]])
        target: Any = read_into_queue
        args: tuple[object, ...] = (URI, SHARDS[0], settings())
        if whole:
            expected = {name: zlib.crc32(spec.data) for name, spec in MODEL.tensors.items()}
            target, args = load_into_queue, (URI, settings())
        context: Any = multiprocessing.get_context(method)
        queue: Any = context.Queue()
        children = [context.Process(target=target, args=(*args, queue)) for _ in range(2)]
        for child in children:
            child.start()
        assert [queue.get(timeout=60) for _ in children] == [expected] * 2
        for child in children:
            child.join()
            assert child.exitcode == 0
        for filled in running:
            filled.release()
        queue.close()
        queue.join_thread()
    assert MODEL.agrees(load())
    # Those that may block on the network are told to end, and not waited for.
    for thread in threading.enumerate():
        if thread.name.startswith("fastload"):
            thread.join(30)
            assert not thread.is_alive(), thread.name
    rig.log.wait_until_unconnected()


def test_s25_what_workers_are_sent_is_plain_data(rig: Rig) -> None:
    assert MODEL.agrees(load())
    source = open_source(URI, settings())
    source.list()
    for value in (settings(), WeightSource(URI), RankPlace(), source):
        data = pickle.dumps(value)
        assert b"rig-secret-key" not in data
        pickle.loads(data)
    again = pickle.loads(pickle.dumps(source))
    assert again.stat(SHARDS[0]).size_bytes == len(MODEL.files[SHARDS[0]])
    again.close()
    source.close()


def test_s25_by_value_as_ray_sends_it(rig: Rig) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    source = open_source(URI, settings())

    def sizes() -> list[int]:
        return [row.object_id.size_bytes for row in source.list()]

    assert pickle.loads(cloudpickle.dumps(sizes))() == sizes()
    source.close()


# The real server, for what it can do


@pytest.mark.s3
def test_s01_s05_s18_a_load_from_a_real_store(
    s3_server: S3Server, s3_bucket: str, tmp_path: Path
) -> None:
    for name, data in MODEL.files.items():
        (tmp_path / name).write_bytes(data)
    s3_server.upload_dir(tmp_path, s3_bucket, "m")
    uri = f"s3://{s3_bucket}/m"
    assert MODEL.agrees(load(uri))
    with LoadSession([WeightSource(uri)], settings(memory_bytes="1MiB")) as session:
        assert MODEL.agrees(load_in(session))
