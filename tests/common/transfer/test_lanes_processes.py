"""Receiver processes that die, hang, cannot start, or lose their parent."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastload_common
from fastload_common.config import Settings
from fastload_common.errors import ConfigError, SourceError, SourceUnavailableError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.s3 import S3Source
from fastload_common.source.uri import s3_location
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.fault_server import Fault, FaultServer
from fastload_common.transfer.lanes import Done, Failed, Started
from tests.common.transfer.lanes_bench import LanesBench, content, receiver_pids, until

SIZE = 1_000_000
DATA = content(SIZE)
STALL = Fault(stall_after_bytes=40_000)
TOKEN = "the-session-token"

MakeLanes = Callable[..., LanesBench]


@pytest.fixture
def server(fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> FaultServer:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    fault_server.put("bucket", "m/key", DATA)
    return fault_server


@pytest.fixture
def make(server: FaultServer) -> Iterator[MakeLanes]:
    made: list[LanesBench] = []

    def make_one(settings: Settings | None = None, **options: int) -> LanesBench:
        settings = settings or Settings()
        source = S3Source(s3_location("s3://bucket/m"), settings)
        made.append(LanesBench(source, "processes", settings=settings, **options))
        return made[-1]

    yield make_one
    server.release.set()
    for bench in made:
        bench.close()
    assert receiver_pids() == []


def key(server: FaultServer) -> ObjectId:
    return ObjectId("s3://bucket/m/key", server.objects["bucket/m/key"][1], SIZE)


def stalled(bench: LanesBench, server: FaultServer) -> int:
    """An attempt whose reply has begun, and goes on no more."""
    server.script("GET", "bucket/m/key", [STALL])
    attempt_id = bench.start(key(server), 0, 60_000)
    bench.progressed(attempt_id, 0)
    return attempt_id


def test_a_killed_receiver_fails_what_it_ran_and_is_replaced(
    server: FaultServer, make: MakeLanes
) -> None:
    bench = make()
    attempt_id = stalled(bench, server)
    (receiver,) = bench.receivers
    os.kill(receiver.pid, signal.SIGKILL)
    failure = bench.failure(attempt_id)
    assert type(failure.error) is SourceUnavailableError
    assert not failure.cancelled
    assert "killed by SIGKILL" in str(failure.error)
    assert "memory" in failure.error.hint
    assert failure.error.received_bytes <= 40_000
    again = bench.start(key(server), 5, 60_000)
    assert isinstance(bench.end_of(again), Done)
    assert bench.memory(again) == DATA[5:60_000]
    (successor,) = bench.receivers
    assert successor.pid != receiver.pid


def test_a_killed_receivers_queue_is_not_lost(server: FaultServer, make: MakeLanes) -> None:
    bench = make(connections=6)  # two receivers
    server.script("GET", "bucket/m/key", [STALL] * 6)
    ids = [bench.start(key(server), 0, 60_000) for _ in range(6)]
    bench.wait(lambda: len(server.seen("GET")) == 6)
    queued = [bench.start(key(server), n, n + 1000) for n in range(10)]
    first, second = bench.receivers
    os.kill(first.pid, signal.SIGTERM)
    bench.wait(lambda: any(isinstance(e, Failed) for e in bench.events))
    os.kill(second.pid, signal.SIGKILL)
    for attempt_id in ids:
        assert bench.failure(attempt_id).error.retryable  # type: ignore[attr-defined]
    # Those that waited here go to the successors; those that waited there may have failed.
    for attempt_id in queued:
        end = bench.end_of(attempt_id)
        assert isinstance(end, Done) or getattr(end.error, "retryable", False)
    assert sum(isinstance(bench.end_of(attempt_id), Done) for attempt_id in queued) >= 6


def test_receivers_that_keep_dying_are_a_permanent_error(
    server: FaultServer, make: MakeLanes
) -> None:
    bench = make(connections=1)
    for _ in range(9):
        attempt_id = stalled(bench, server)
        os.kill(bench.receivers[0].pid, signal.SIGKILL)
        error = bench.failure(attempt_id).error
        assert type(error) is SourceUnavailableError
    for _ in range(2):
        final = bench.failure(bench.start(key(server), 0, 10)).error
        assert type(final) is SourceError
        assert "do not stay: 9 are gone" in str(final)
        assert "SIGKILL" in str(final)


def test_a_receiver_that_does_not_heed_a_cancel_is_ended(
    server: FaultServer, make: MakeLanes
) -> None:
    bench = make()
    attempt_id = stalled(bench, server)
    (receiver,) = bench.receivers
    os.kill(receiver.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    bench.lanes.cancel(attempt_id)
    failure = bench.failure(attempt_id)
    assert failure.cancelled
    assert "did not heed its abort" in str(failure.error)
    assert time.monotonic() - started_s > 0.9
    bench.mark(attempt_id)
    assert isinstance(bench.end_of(bench.start(key(server), 0, 10)), Done)
    assert bench.is_marked(attempt_id)


def test_an_interrupt_does_not_reach_them(server: FaultServer, make: MakeLanes) -> None:
    bench = make()
    attempt_id = stalled(bench, server)
    (receiver,) = bench.receivers
    assert os.getpgid(receiver.pid) != os.getpgid(0)
    os.kill(receiver.pid, signal.SIGINT)
    assert isinstance(bench.end_of(bench.start(key(server), 0, 10)), Done)
    assert bench.receivers[0].pid == receiver.pid
    assert not bench.ends(attempt_id)


def test_they_have_a_name_and_nothing_heavy_and_no_secret(
    server: FaultServer, make: MakeLanes
) -> None:
    bench = make()
    bench.end_of(bench.start(key(server), 0, 10))
    (receiver,) = bench.receivers
    process = Path(f"/proc/{receiver.pid}")
    assert (process / "comm").read_text() == "fastload-recv\n"
    said = (process / "environ").read_text() + (process / "cmdline").read_text()
    for secret in ("AWS_", TOKEN, "ENVKEY", "env-secret"):
        assert secret not in said
    maps = (process / "maps").read_text()
    assert "memfd:fastload-staging" in maps
    assert not any(heavy in maps for heavy in ("torch", "numpy", "cuda", "/dev/shm"))
    files = [os.readlink(fd) for fd in (process / "fd").iterdir()]
    # Its control socket, one connection, the staging memory, and nothing else that is open here.
    assert len([name for name in files if name.startswith("socket:")]) == 2
    memory = sorted(name.split()[0] for name in files if "memfd:" in name)
    assert memory == ["/memfd:fastload-recv-stderr", "/memfd:fastload-staging"]


def test_no_signature_is_shown(server: FaultServer, make: MakeLanes) -> None:
    bench = make()
    server.script("GET", "bucket/m/key", [Fault(status=403, code="AccessDenied")])
    error = bench.failure(bench.start(key(server), 0, 10)).error
    reads = bench.source.remote_reads(key(server))  # type: ignore[attr-defined]
    signed = reads.sign(key(server), ByteRange(0, 10))
    assert TOKEN in str(dict(signed.headers))
    shown = " ".join((str(error), repr(error), repr(vars(error)), repr(signed)))
    assert TOKEN not in shown
    assert "Signature" not in shown


@pytest.mark.parametrize("program", ["", "/nowhere/python", "/bin/false", "/bin/true"])
def test_a_program_that_does_not_start_is_a_typed_error(
    server: FaultServer, make: MakeLanes, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    bench = make()
    ids = [bench.start(key(server), 0, 10) for _ in range(3)]
    ends = [bench.failure(attempt_id).error for attempt_id in ids]
    # One that began and ended at once is tried twice.
    while getattr(ends[-1], "retryable", False):
        assert len(ends) < 8
        ends.append(bench.failure(bench.start(key(server), 0, 10)).error)
    assert isinstance(ends[-1], ConfigError)
    assert "receiver processes" in str(ends[-1])
    assert "sys.executable" in str(ends[-1])


def test_its_own_crash_is_told(
    server: FaultServer, make: MakeLanes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A package beside this one that cannot be imported.
    (tmp_path / "fastload_common").mkdir()
    (tmp_path / "fastload_common" / "__init__.py").write_text("raise ImportError('no such part')")
    monkeypatch.setattr(fastload_common, "__file__", f"{tmp_path}/fastload_common/__init__.py")
    bench = make()
    ends = [bench.failure(bench.start(key(server), 0, 10)).error for _ in range(3)]
    assert isinstance(ends[-1], ConfigError)
    assert "ImportError: no such part" in str(ends[-1])


def test_they_run_from_an_archive(
    server: FaultServer, make: MakeLanes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = Path(fastload_common.__file__ or "").parent
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for file in package.rglob("*.py"):
            zipped.write(file, file.relative_to(package.parent))
    monkeypatch.setattr(fastload_common, "__file__", f"{archive}/fastload_common/__init__.py")
    bench = make()
    assert isinstance(bench.end_of(bench.start(key(server), 0, 10)), Done)


def test_a_slow_signature_holds_up_nobody(
    server: FaultServer, make: MakeLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    reads = bench.source.remote_reads(key(server))  # type: ignore[attr-defined]
    gate, reached, real = threading.Event(), threading.Event(), reads.sign

    def slow(*args: Any) -> Any:
        reached.set()
        assert gate.wait(30)
        return real(*args)

    monkeypatch.setattr(reads, "sign", slow)
    attempt_id = bench.start(key(server), 0, 10)
    other = bench.start(key(server), 0, 10)
    assert reached.wait(30)
    bench.lanes.cancel(attempt_id)
    assert bench.failure(attempt_id).cancelled
    assert not bench.of(attempt_id, Started)
    gate.set()
    assert isinstance(bench.end_of(other), Done)
    assert len(server.seen("GET")) == 1


def test_closing_while_a_signature_is_made(
    server: FaultServer, make: MakeLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    reads = bench.source.remote_reads(key(server))  # type: ignore[attr-defined]
    gate, reached = threading.Event(), threading.Event()

    def slow(*_: Any) -> Any:
        reached.set()
        assert gate.wait(30)
        raise SourceUnavailableError("late")

    monkeypatch.setattr(reads, "sign", slow)
    bench.start(key(server), 0, 10)
    assert reached.wait(30)
    bench.lanes.close()
    gate.set()
    assert bench.mailbox.wait(0.2) == []


def test_a_limit_that_grows_gets_more_of_them(server: FaultServer, make: MakeLanes) -> None:
    bench = make(connections=1)
    bench.end_of(bench.start(key(server), 0, 10))
    assert len(bench.receivers) == 1
    bench.lanes.set_limit(8)
    assert len(bench.receivers) == 2
    server.script("GET", "bucket/m/key", [STALL] * 8)
    ids = [bench.start(key(server), 0, 60_000) for _ in range(8)]
    bench.wait(lambda: len([e for e in bench.events if isinstance(e, Started)]) == 9)
    server.release.set()
    assert all(isinstance(bench.end_of(attempt_id), Failed) for attempt_id in ids)


def test_a_limit_that_shrinks_strands_nothing(server: FaultServer, make: MakeLanes) -> None:
    bench = make(connections=8)
    server.script("GET", "bucket/m/key", [STALL] * 8)
    running = [bench.start(key(server), 0, 60_000) for _ in range(8)]
    bench.wait(lambda: len(server.seen("GET")) == 8)
    # Some of these wait at each of the two receivers.
    waiting = [bench.start(key(server), n, n + 10) for n in range(8)]
    bench.lanes.set_limit(1)
    server.release.set()
    assert all(isinstance(bench.end_of(attempt_id), Failed) for attempt_id in running)
    assert all(isinstance(bench.end_of(attempt_id), Done) for attempt_id in waiting)
    bench.lanes.set_limit(8)
    more = [bench.start(key(server), n, n + 10) for n in range(8)]
    assert all(isinstance(bench.end_of(attempt_id), Done) for attempt_id in more)


def test_the_authorities_file_may_be_relative(
    server: FaultServer,
    make: MakeLanes,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    authority = PrivateAuthority(tmp_path)
    with FaultServer(authority.server_context("127.0.0.1")) as secure:
        etag = secure.put("bucket", "m/key", DATA)
        monkeypatch.setenv("AWS_ENDPOINT_URL", secure.endpoint)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("AWS_CA_BUNDLE", authority.bundle.name)
        bench = make()
        object_id = ObjectId("s3://bucket/m/key", etag, SIZE)
        assert isinstance(bench.end_of(bench.start(object_id, 0, 100)), Done)
        bench.close()


def test_descriptors_that_are_used_up_are_a_typed_error(
    server: FaultServer, make: MakeLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    bench = make()
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", refuse)
        error = bench.failure(bench.start(key(server), 0, 10)).error
    assert isinstance(error, ConfigError)
    assert "Too many open files" in str(error)


def test_tls_with_a_private_authority(
    server: FaultServer,
    make: MakeLanes,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    authority = PrivateAuthority(tmp_path_factory.mktemp("authority"))
    with FaultServer(authority.server_context("127.0.0.1")) as secure:
        etag = secure.put("bucket", "m/key", DATA)
        monkeypatch.setenv("AWS_ENDPOINT_URL", secure.endpoint)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
        bench = make(slot_bytes=SIZE)
        object_id = ObjectId("s3://bucket/m/key", etag, SIZE)
        attempt_id = bench.start(object_id, 0, SIZE)
        assert isinstance(bench.end_of(attempt_id), Done)
        assert bench.memory(attempt_id) == DATA
        secure.script("GET", "bucket/m/key", [Fault(stall_after_bytes=SIZE // 2)])
        attempt_id = bench.start(object_id, 0, SIZE)
        bench.progressed(attempt_id, SIZE // 4)
        bench.lanes.cancel(attempt_id)
        failure = bench.failure(attempt_id)
        assert failure.cancelled
        assert isinstance(failure.error, SourceUnavailableError)
        good = failure.error.received_bytes
        assert SIZE // 4 <= good <= SIZE // 2
        assert bench.memory(attempt_id)[:good] == DATA[:good]
        secure.release.set()
        bench.close()
        # Nobody who trusts others gets there, and asking again does not help.
        monkeypatch.delenv("AWS_CA_BUNDLE")
        stranger = make()
        error = stranger.failure(stranger.start(object_id, 0, 10)).error
        assert type(error) is SourceError
        assert "certificate verify failed" in str(error)


def test_nothing_is_left_of_many(server: FaultServer, make: MakeLanes) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    make().close()
    bench = make()
    bench.end_of(bench.start(key(server), 0, 10))
    bench.close()
    before = descriptors()
    for _ in range(3):
        bench = make()
        bench.end_of(bench.start(key(server), 0, 10))
        os.kill(bench.receivers[0].pid, signal.SIGKILL)
        bench.end_of(bench.start(key(server), 0, 10))
        bench.close()
        until(lambda: receiver_pids() == [], "no receivers")
    assert descriptors() <= before
    until(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("fastload-")],
        "the threads end",
    )
