"""Whatever fails: `begin`, `wait` and `complete` raise nothing, and the engine compiles."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fastload_common.compile_cache.lifecycle import CompileCache, Outcome
from fastload_common.engine.compile_start import CompileStart
from fastload_common.engine.compile_verdict import Verdict
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.rig import (
    ACCESS_DENIED,
    INTERNAL_ERROR,
    SLOW_DOWN,
    Effect,
    Fault,
    Rig,
    Stall,
)
from tests.cases.harness import use
from tests.common.compile_cache.artefacts import FACTORS
from tests.common.engine.compile_engine import (
    COUNT,
    LAYOUT,
    Server,
    compile_all,
    warnings,
)

SECRET = "s3cr3t-of-a-foreign-error"
URI = "s3://bucket/cache"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch, tmp_path / "node")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with Rig() as rig:
        rig.put("bucket", "there", b"")
        use(rig, monkeypatch)
        yield rig


def fail(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def break_down() -> NoReturn:
    raise RuntimeError(SECRET)


# There is no cache


@pytest.mark.parametrize(
    ("factors", "told"),
    [
        (lambda: {**FACTORS, "dtype.modle": "float16"}, "did you mean dtype.model?"),
        (lambda: {name: FACTORS[name] for name in list(FACTORS)[1:]}, "without engine.name"),
        (lambda: {**FACTORS, "model.task": "/a/path"}, "a path or URL"),
        (lambda: None, "not used: TypeError"),
        (break_down, "not used: RuntimeError"),
    ],
    ids=["unknown", "missing", "place", "none", "foreign"],
)
def test_factors_that_cannot_be_made(
    server: Server, caplog: pytest.LogCaptureFixture, factors: Callable[[], Any], told: str
) -> None:
    with server.process():
        assert CompileStart.begin("engine", factors, LAYOUT) is None
        assert "ENGINE_CACHE" not in os.environ, "the engine keeps its own place"
    assert len(warnings(caplog)) == 1
    assert told in warnings(caplog)[0]
    assert SECRET not in caplog.text
    assert not server.node.exists()


def test_without_zstd(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with server.process():
        assert server.begin() is None
    assert "pip install zstandard" in warnings(caplog)[0]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE": "/nowhere/key.pem"}, "cannot read"),
        ({"FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE": "/dev/null"}, "holds no Ed25519 key"),
        ({"FASTLOAD_COMPILE_CACHE": "relative"}, "is relative"),
        ({"FASTLOAD_COMPILE_CACHE": "gs://bucket/x"}, "gs"),
        ({"FASTLOAD_COMPILE_CACHE_DEADLINE_S": "soon"}, "FASTLOAD_COMPILE_CACHE_DEADLINE_S"),
        ({"FASTLOAD_UNKNOWN": "1"}, "FASTLOAD_UNKNOWN"),
        ({"FASTLOAD_CACHE_DIR": "/proc/x", "TMPDIR": "/proc/y"}, "FASTLOAD_CACHE_DIR"),
    ],
    ids=["key-gone", "key-empty", "relative", "scheme", "number", "unknown", "no-place"],
)
def test_settings_that_cannot_be_used(
    server: Server, caplog: pytest.LogCaptureFixture, variables: dict[str, str], told: str
) -> None:
    with server.process(variables):
        assert server.begin() is None
        assert "ENGINE_CACHE" not in os.environ
    assert len(warnings(caplog)) == 1
    assert told in warnings(caplog)[0]


def test_a_key_file_that_this_user_may_not_read(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    key = tmp_path / "key.pem"
    key.write_text(SECRET)
    real = open

    def opened(path: Any, *arguments: Any, **named: Any) -> Any:
        if path == key:
            raise PermissionError(errno.EACCES, "Permission denied", str(key))
        return real(path, *arguments, **named)

    with server.process({"FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE": str(key)}):
        monkeypatch.setattr("builtins.open", opened)
        assert server.begin() is None
        monkeypatch.setattr("builtins.open", real)
    assert "Permission denied" in warnings(caplog)[0]
    assert SECRET not in caplog.text


def test_a_process_that_may_have_no_more_threads(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with server.process(), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert server.begin() is None
        assert compile_all().compiled == COUNT
    assert len(warnings(caplog)) == 1
    server.start()


# S3


@pytest.mark.parametrize("effect", [ACCESS_DENIED, SLOW_DOWN, INTERNAL_ERROR], ids=str)
def test_a_store_that_refuses(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, effect: Effect
) -> None:
    server = Server(monkeypatch, tmp_path / "node", URI, compile_cache_deadline_s=5)
    rig.arrange([Fault(effect, methods=("GET", "HEAD", "PUT", "LIST"))])
    start, verdict = server.start()
    assert (verdict.measured, verdict.compiled) == ("miss", COUNT)
    assert start.outcome.published[str(server.node)] == "stored"
    assert start.outcome.published[URI] not in ("", "stored")
    assert len(warnings(caplog)) == 1
    line = server.last_line()
    assert line["published"] == start.outcome.published
    assert any(URI in note for note in line["notes"])
    rig.arrange([])
    assert server.start()[1].measured == "hit"


def test_a_store_that_hangs_is_waited_for_until_the_deadline(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(monkeypatch, tmp_path / "node", URI, compile_cache_deadline_s=30)
    rig.arrange([Fault(Stall(), methods=("GET", "HEAD", "PUT", "LIST"))])
    clock = FakeClock()
    with server.process(), ThreadPoolExecutor(1) as pool:
        start = server.begin(clock=clock)
        assert start is not None
        waiting = pool.submit(start.wait)
        clock.wait_for_waiters(2)
        clock.advance(29)
        assert not waiting.done()
        clock.advance(2)
        outcome = waiting.result(30)
        assert (outcome.status, outcome.restore_s) == ("miss", 31)
        assert "could not ask" in outcome.reason
        rig.arrange([])
        rig.release()
        assert start.complete([compile_all()]) is not None
        assert start.finish(60)
        start.directories.close()
    assert outcome.published[str(server.node)] == "stored"
    assert server.last_line()["waited_s"] == 31
    assert len(warnings(caplog)) == 1


def test_a_disk_that_hangs_is_given_up_and_nothing_is_published(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asleep = threading.Event()

    def hang(*_: object) -> Outcome:
        assert asleep.wait(60)
        return Outcome("hit", "0" * 64)

    monkeypatch.setattr(CompileCache, "restore", hang)
    clock = FakeClock()
    with server.process(), ThreadPoolExecutor(1) as pool:
        start = server.begin(clock=clock)
        assert start is not None
        waiting = pool.submit(start.wait)
        clock.wait_for_waiters(1)
        clock.advance(121)
        assert waiting.result(30).status == "failed"
        asleep.set()
        start._restored.wait(60)
        verdict = start.complete([compile_all()])
        assert start.finish(60)
        start.directories.close()
    assert verdict is not None
    assert verdict.measured == "miss"
    assert start.outcome.status == "failed", "what came too late is not told as a hit"
    assert start.outcome.published == {}
    assert server.last_line()["notes"] == ["restoring took longer than 120 s"]
    assert len(warnings(caplog)) == 1


# Disks


def test_a_cache_directory_that_cannot_be_made(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "temporary").mkdir()
    variables = {"FASTLOAD_CACHE_DIR": "/proc/x", "TMPDIR": str(tmp_path / "temporary")}
    start, verdict = server.start(variables=variables)
    assert verdict.measured == "miss"
    assert start.directories.base.is_relative_to(tmp_path / "temporary")
    assert server.start(variables=variables)[1].measured == "hit"
    assert warnings(caplog) == []


def test_a_node_directory_that_cannot_be_made(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    start, verdict = server.start(variables={"FASTLOAD_COMPILE_CACHE": "/proc/x"})
    assert verdict.measured == "miss"
    assert list(start.outcome.published) == ["/proc/x"]
    assert len(warnings(caplog)) == 1
    assert server.start()[1].measured == "warm", "what was compiled is not lost"


@pytest.mark.parametrize(
    "place",
    [
        "compile_cache.unpack.tempfile.mkdtemp",
        "compile_cache.unpack.os.fchmod",
        "compile_cache.unpack.os.rename",
    ],
)
def test_no_room_to_unpack(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    server.start()
    shutil.rmtree(server.cache)
    with server.process():
        with monkeypatch.context() as patch:
            patch.setattr(f"fastload_common.{place}", fail)
            start = server.begin()
            assert start is not None
            assert start.wait().status == "miss"
        verdict = start.complete([compile_all()])
        assert start.finish(60)
        start.directories.close()
    assert verdict is not None
    assert (verdict.measured, verdict.compiled) == ("miss", COUNT)
    assert "No space left" in start.outcome.reason
    assert start.outcome.published == {str(server.node): "it is there already"}
    assert len(warnings(caplog)) == 1
    assert list(server.cache.rglob(".fastload-unpacking-*")) == []
    assert server.start()[1].measured == "hit"


def test_no_room_for_anything_after_warm_up(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server.process({"FASTLOAD_REPORT": "/dev/full"}):
        start = server.begin()
        assert start is not None
        start.wait()
        made = compile_all()
        with monkeypatch.context() as patch:
            patch.setattr("fastload_common.engine.compile_place.tempfile.mkstemp", fail)
            patch.setattr("fastload_common.compile_cache.stores.node.tempfile.mkdtemp", fail)
            patch.setattr(Path, "write_text", fail)
            verdict = start.complete([made])
            assert start.finish(60)
        start.directories.close()
    assert verdict is not None
    assert verdict.measured == "miss"
    told = warnings(caplog)
    assert [text.split(":")[1].strip() for text in told] == [
        "noting what was compiled failed",
        "compile cache",
        "the report could not be written to /dev/full",
    ]
    assert server.start()[1].measured == "miss", "what is not sealed is not found again"
    assert server.start()[1].measured == "hit"


def test_publishing_that_fails_leaves_the_report(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server.process():
        start = server.begin()
        assert start is not None
        start.wait()
        made = compile_all()

        def broken(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(SECRET)

        monkeypatch.setattr(start._cache, "publish", broken)
        assert start.complete([made]) is None
        assert start.finish(60)
        start.directories.close()
    assert warnings(caplog) == ["fastload: compile cache: not published: RuntimeError"]
    assert SECRET not in caplog.text
    assert server.last_line()["measured"] == "miss"


def test_counters_that_cannot_be_read(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with server.process():
        start = server.begin()
        assert start is not None
        start.wait()
        found: Verdict | None = start.complete(None)  # type: ignore[arg-type]
        start.directories.close()
    assert found is None
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"compile_s": []}', '{"compile_s": "x"}'])
def test_facts_that_say_nothing_cost_a_number(server: Server, damage: str) -> None:
    server.start()
    with server.process():
        start = server.begin()
        assert start is not None
        start.wait()
        (start.directories.base / "fastload/start.json").write_text(damage)
        verdict = start.complete([compile_all()])
        assert start.finish(60)
        start.directories.close()
    assert verdict is not None
    assert (verdict.measured, verdict.saved_s) == ("hit", None)


def test_a_directory_of_somebody_else_is_left_alone(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the next best place, below TMPDIR, is for."""
    (server.cache / "compile").mkdir(parents=True)
    (server.cache / "compile").chmod(0o777)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    start, verdict = server.start()
    assert verdict.measured == "miss"
    assert start.directories.base.is_relative_to(tmp_path / "temporary")
    assert list((server.cache / "compile").iterdir()) == []
