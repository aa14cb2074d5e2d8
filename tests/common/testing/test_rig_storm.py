"""Storms: the same for a seed, of all kinds, and curable where they say so."""

from __future__ import annotations

import contextlib
import http.client
from collections import Counter

import pytest

from fastload_common import errors
from fastload_common.errors import FastloadError
from fastload_common.testing.rig import Rig, Storm, random_faults
from fastload_common.testing.rig.fault_json import dump_faults, load_faults
from tests.common.testing.rig_client import ask_on

OBJECTS = {"bucket/a": 200_001, "bucket/b": 30_000, "bucket/c": 1_000_000}
PART_BYTES = 128 * 1024
READ_TIMEOUT_S = 0.3


class GaveUpError(Exception):
    """The client had no more tries, or a reply that no further one mends."""


def content(size_bytes: int) -> bytes:
    return bytes((i * 11 + i // 241) % 256 for i in range(size_bytes))


CONTENT = {name: content(size) for name, size in OBJECTS.items()}


class Client:
    """The simplest that outlives what passes: one connection, and only the missing bytes again."""

    def __init__(self, rig: Rig, tries: int) -> None:
        self._rig = rig
        self._tries = tries
        self._connection: http.client.HTTPConnection | None = None

    def read(self, name: str, etag: str) -> bytes:
        size = OBJECTS[name]
        edges = range(0, size, PART_BYTES)
        return b"".join(
            self._part(name, etag, start, min(start + PART_BYTES, size)) for start in edges
        )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _part(self, name: str, etag: str, start: int, end: int) -> bytes:
        got = bytearray()
        for _ in range(self._tries):
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._receive(name, etag, start, end, got)
            if len(got) == end - start:
                return bytes(got)
            # Always a new connection, so that no try meets one that the server has closed.
            self.close()
        raise GaveUpError(name, start, end, len(got))

    def _receive(self, name: str, etag: str, start: int, end: int, got: bytearray) -> None:
        self.close()
        self._connection = http.client.HTTPConnection(
            "127.0.0.1", self._rig.port, timeout=READ_TIMEOUT_S
        )
        first = start + len(got)
        wanted = f"bytes {first}-{end - 1}/{OBJECTS[name]}"
        headers = {"Range": f"bytes={first}-{end - 1}", "If-Match": etag}
        self._connection.request("GET", f"/{name}", headers=headers)
        reply = self._connection.getresponse()
        if reply.status >= 500 or reply.status == 429:
            return
        if reply.status not in (200, 206) or reply.headers["Content-Range"] != wanted:
            raise GaveUpError(name, reply.status)
        if reply.headers["ETag"] != etag or reply.headers["Content-Length"] not in (
            None,
            str(end - first),
        ):
            raise GaveUpError(name, "changed")
        while len(got) < end - start and (piece := reply.read1(end - start - len(got))):
            got += piece


def weather(storm: Storm, rig: Rig, etags: dict[str, str]) -> str:
    """What a load of all objects comes to."""
    rig.arrange(storm.faults)
    client = Client(rig, storm.tries)
    try:
        for name in OBJECTS:
            assert client.read(name, etags[name]) == CONTENT[name], storm
    except GaveUpError:
        return "error"
    finally:
        client.close()
    return "bytes"


def test_a_simple_client_comes_to_what_each_storm_says() -> None:
    with Rig() as rig:
        rig.allow_unsigned = True
        etags = {
            name: rig.put("bucket", name.partition("/")[2], data).etag
            for name, data in CONTENT.items()
        }
        met: Counter[str] = Counter()
        for seed in range(12):
            storm = random_faults(seed, OBJECTS, uncurable_share=0.4)
            came_to = weather(storm, rig, etags)
            assert storm.outcome in (came_to, "either"), storm
            met += Counter(rig.log.summary()["faults"])
        assert met.total() > 50
        rig.log.wait_until_unconnected()


def test_a_storm_is_that_of_its_seed() -> None:
    assert random_faults(7, OBJECTS) == random_faults(7, OBJECTS)
    assert len({str(random_faults(seed, OBJECTS).faults) for seed in range(100)}) == 100


def test_storms_are_of_all_kinds() -> None:
    storms = [random_faults(seed, OBJECTS, tls=True) for seed in range(1000)]
    outcomes = Counter(storm.outcome for storm in storms)
    assert outcomes["bytes"] > 800
    assert outcomes["error"] > 50
    assert outcomes["either"] > 10
    kinds = {type(fault.effect).__name__ for storm in storms for fault in storm.faults}
    assert kinds >= {
        "Chunked",
        "Close",
        "ContentRange",
        "Error",
        "Etag",
        "FirstByte",
        "Garbage",
        "IgnoreRange",
        "Rate",
        "Redirect",
        "Reset",
        "Short",
        "Shorter",
        "Slower",
        "Stall",
        "Status",
        "Unframed",
    }
    # Data that is silently wrong is no part of it: only a checksum would tell.
    assert "Flip" not in kinds


def test_errors_of_a_storm_are_errors_of_ours() -> None:
    for seed in range(300):
        storm = random_faults(seed, OBJECTS, uncurable_share=0.5)
        assert storm.curable == (not storm.errors)
        for name in storm.errors:
            assert issubclass(getattr(errors, name), FastloadError)


def test_what_passes_is_gone_at_the_last_try() -> None:
    unusual = {"Chunked", "Unframed", "Close", "Status", "FirstByte", "Rate"}
    for seed in range(300):
        for fault in random_faults(seed, OBJECTS, uncurable_share=0.0, max_tries=4).faults:
            if fault.attempts is None:
                assert type(fault.effect).__name__ in unusual
            else:
                assert not callable(fault.attempts)
                assert max(fault.attempts) < 4


def test_a_storm_can_be_written_down() -> None:
    for seed in range(100):
        storm = random_faults(seed, OBJECTS, uncurable_share=0.5)
        assert tuple(load_faults(dump_faults(storm.faults))) == storm.faults
        assert str(storm).startswith(f"storm {seed} ({storm.outcome}): [{{")


def test_one_try_outlives_nothing() -> None:
    with pytest.raises(ValueError, match="1 tries"):
        random_faults(0, OBJECTS, max_tries=1)


def test_the_client_here_reads_what_is_there() -> None:
    with Rig() as rig, contextlib.closing(http.client.HTTPConnection("127.0.0.1", rig.port)) as c:
        rig.allow_unsigned = True
        rig.put("bucket", "a", CONTENT["bucket/a"])
        assert ask_on(c, "/bucket/a").body == CONTENT["bucket/a"]
