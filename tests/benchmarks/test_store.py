"""The store of the benchmarks: contents, conditions, listing, faults that can be repeated."""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Iterator

import pytest

from benchmarks.compiled import Programs, build, find_compiler
from benchmarks.server import Network, S3Server
from benchmarks.work import HEADER_BYTES, Work, check, objects_of
from fastload_common.units import MIB

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
ITEMS = objects_of(2, 20 * MIB)
NAME = ITEMS[0].name


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return build(tmp_path_factory.mktemp("programs"))


@pytest.fixture
def server(programs: Programs) -> Iterator[S3Server]:
    with S3Server(programs, ITEMS) as running:
        yield running


def ask(server: S3Server, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", path, headers=named)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply, body


def test_ranges_hold_what_clients_check(server: S3Server) -> None:
    start, end = HEADER_BYTES - 8, 17 * MIB
    reply, body = ask(server, f"/bucket/{NAME}", Range=f"bytes={start}-{end - 1}")
    assert reply.status == 206
    assert reply.headers["Content-Range"] == f"bytes {start}-{end - 1}/{20 * MIB}"
    assert len(body) == end - start
    check(body, start)
    check(body[16 * MIB :], start + 16 * MIB)
    with pytest.raises(AssertionError, match="wrong bytes"):
        check(body[16 * MIB :], start + 8 * MIB)


def test_an_object_is_a_safetensors_file(server: S3Server) -> None:
    _, head = ask(server, f"/bucket/{NAME}", Range=f"bytes=0-{HEADER_BYTES - 1}")
    assert struct.unpack_from("<Q", head) == (HEADER_BYTES - 8,)
    entries = json.loads(head[8:])
    data_bytes = 20 * MIB - HEADER_BYTES
    assert [entry["data_offsets"] for entry in entries.values()] == [
        [0, 16 * MIB],
        [16 * MIB, data_bytes],
    ]


def test_conditions_and_errors(server: S3Server) -> None:
    reply, _ = ask(server, f"/bucket/{NAME}", Range="bytes=0-7", If_Match='"another"')
    assert reply.status == 412
    reply, _ = ask(server, "/bucket/absent")
    assert reply.status == 404
    reply, _ = ask(server, f"/bucket/{NAME}", Range=f"bytes={21 * MIB}-")
    assert reply.status == 416
    reply, body = ask(server, "/bucket/?list-type=2&prefix=model-00002")
    assert reply.status == 200
    assert ITEMS[1].name.encode() in body
    assert NAME.encode() not in body


def test_what_was_sent_is_counted(server: S3Server) -> None:
    ask(server, f"/bucket/{NAME}", Range=f"bytes=0-{MIB - 1}")
    ask(server, "/bucket/?list-type=2")
    kept = ("requests", "bytes", "connections", "small_requests", "stalled")
    found = dict.fromkeys(kept, 0)
    while found["bytes"] < MIB:  # the last part is counted a moment after it was sent
        counters = server.take_counters()
        found = {name: found[name] + counters[name] for name in kept}
    assert list(found.values()) == [1, MIB, 2, 1, 0]
    assert server.take_counters()["requests"] == 0


def test_the_same_requests_meet_the_same_faults(programs: Programs) -> None:
    found = []
    for seed in (7, 7, 8):
        network = Network(stall_share=0.3, slow_share=0.3, slow_factor=2, seed=seed)
        with S3Server(programs, ITEMS, network) as server:
            found.append([faults_of(server, count) for count in (10, 20, 40)])
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert all(1 <= count < 40 for count in found[0][-1])


def faults_of(server: S3Server, count: int) -> tuple[int, int]:
    """How many of the first requests are slow and how many never end."""
    server.take_counters()
    for _ in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", f"/bucket/{NAME}", headers={"Range": "bytes=0-9999"})
        with connection.getresponse() as reply:
            assert reply.status == 206
        connection.close()
    counters = server.take_counters()
    return counters["slow"], counters["stalled"]


def test_a_dead_request_brings_a_head_and_no_whole_body(programs: Programs) -> None:
    with S3Server(programs, ITEMS, Network(stall_share=1)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=0.2)
        connection.request("GET", f"/bucket/{NAME}", headers={"Range": "bytes=0-9999"})
        with connection.getresponse() as reply:
            assert reply.headers["Content-Length"] == "10000"
            with pytest.raises(TimeoutError):
                reply.read()
        connection.close()


def test_requests_are_timed_by_the_store(programs: Programs) -> None:
    with S3Server(programs, ITEMS, Network(slow_share=1, slow_factor=3)) as server:
        assert server.take_counters()["request_p50_s"] is None
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        # The first one's time is there when the second one's reply comes.
        for _ in range(2):
            connection.request("GET", f"/bucket/{NAME}", headers={"Range": "bytes=0-9999"})
            assert len(connection.getresponse().read()) == 10_000
        connection.close()
        counters = server.take_counters()
    assert 0 < counters["request_p50_s"] <= counters["request_p95_s"]
    assert counters["slow_s_per_mib"] > counters["request_p50_s"]
    assert counters["other_s_per_mib"] is None


def test_work_survives_its_way_to_another_process() -> None:
    work = Work("boto", ITEMS, MIB, 3, warm=ITEMS[1], options={"environment": {"A": "1"}})
    assert Work.from_json(work.to_json()) == work
    assert sum(piece.size_bytes for piece in work.pieces(ITEMS)) == work.total_bytes == 40 * MIB
