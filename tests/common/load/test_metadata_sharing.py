"""The metadata directory with many processes, little room, or no place to write."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.errors import ConfigError
from fastload_common.load import content_store
from fastload_common.load.metadata import fetch_metadata
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.local import LocalSource
from fastload_common.testing.fake_clock import FakeClock
from tests.common.load.metadata_models import (
    entries,
    forget_entries,
    left_overs,
    make_model,
    names_in,
)

pytestmark = pytest.mark.torch


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


# -- many processes, little room -------------------------------------------------------------

FETCH = """
import sys
from pathlib import Path
from fastload_common.config import Settings
from fastload_common.load.metadata import fetch_metadata
model, cache, max_bytes = sys.argv[1:]
settings = Settings(cache_dir=Path(cache), cache_max_bytes=int(max_bytes))
print(fetch_metadata(model, settings), flush=True)
sys.stdin.read()
"""


def start_fetching(model: Path, settings: Settings) -> subprocess.Popen[str]:
    """A process that fetches, prints the path, and stays until its standard input closes."""
    arguments = [str(model), str(settings.cache_dir), str(settings.cache_max_bytes)]
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate("")
    assert process.returncode == 0
    return output.strip()


def test_many_processes_start_at_once(tmp_path: Path, settings: Settings) -> None:
    model = make_model(tmp_path / "m")
    processes = [start_fetching(model, settings) for _ in range(4)]
    paths = {finish(process) for process in processes}
    assert len(paths) == 1
    assert names_in(Path(paths.pop())) == names_in(fetch_metadata(str(model), settings))
    assert len(entries(settings)) == 1
    assert left_overs(settings) == []


def test_e05_fifty_models_stay_below_the_bound(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path / "cache", cache_max_bytes=100_000)
    for number in range(50):
        model = make_model(tmp_path / f"m{number}", config=f'{{"number": {number}}}')
        (model / "vocab.txt").write_bytes(b"x" * 20_000)
        found = fetch_metadata(str(model), settings)
        forget_entries()
    sizes = [sum(f.stat().st_size for f in e.rglob("*") if f.is_file()) for e in entries(settings)]
    assert 2 <= len(sizes) <= 4
    assert sum(sizes) <= 100_000
    assert found in entries(settings)
    assert left_overs(settings) == []


def test_what_another_process_uses_is_not_evicted(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path / "cache", cache_max_bytes=1)
    other = start_fetching(make_model(tmp_path / "a"), settings)
    assert other.stdout is not None
    used = Path(other.stdout.readline().strip())
    fetch_metadata(str(make_model(tmp_path / "b", config="{}")), settings)
    assert used.is_dir()
    finish(other)
    forget_entries()
    fetch_metadata(str(make_model(tmp_path / "c", config="[]")), settings)
    assert not used.exists()


def test_e05_what_a_dead_process_left_is_removed(tmp_path: Path, settings: Settings) -> None:
    assert settings.cache_dir is not None
    work = settings.cache_dir / "metadata" / "work"
    (work / "dead").mkdir(parents=True)
    (work / "dead" / "config.json").write_text("half")
    (work / "name-1").write_text("half")
    alive = content_store.ContentStore(tmp_path / "cache" / "metadata", 1)
    with alive.draft() as draft:
        draft.write("config.json", b"{}")
        fetch_metadata(str(make_model(tmp_path / "m")), settings)
        assert [path.name for path in work.iterdir()] == [draft.path.name]
    assert left_overs(settings) == []


def test_more_than_the_bound_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(cache_dir=tmp_path / "cache", cache_max_bytes=10)
    fetch_metadata(str(make_model(tmp_path / "m")), settings)
    [warning] = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "more than FASTLOAD_CACHE_MAX_BYTES (10 B)" in warning.getMessage()


def test_files_are_written_as_they_come(tmp_path: Path, settings: Settings) -> None:
    """Never all bodies in memory: what is not being read has been written."""
    model = make_model(tmp_path / "m")
    for number in range(60):
        (model / f"part-{number}.json").write_text("{}")
    source = CountingSource(model, lambda: len(list((tmp_path / "cache").rglob("part-*.json"))))
    fetch_metadata(str(model), settings, open_root=lambda *_: source)
    assert source.begun == 60
    assert source.most_unwritten <= 16


class CountingSource(LocalSource):
    """Counts the parts that were asked for and are not written yet."""

    def __init__(self, directory: Path, count_written: Callable[[], int]) -> None:
        super().__init__(directory)
        self._count_written = count_written
        self._lock = threading.Lock()
        self.begun = 0
        self.most_unwritten = 0

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        if "/part-" in object_id.uri:
            with self._lock:
                self.begun += 1
                unwritten = self.begun - self._count_written()
                self.most_unwritten = max(self.most_unwritten, unwritten)
        return super().read(object_id, byte_range)


def test_a_stopped_process_with_the_lock_delays_and_does_not_hang(
    tmp_path: Path, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    model, temporary = make_model(tmp_path / "m"), tmp_path / "tmp"
    fetch_metadata(str(model), settings)
    clock = FakeClock(auto=True)
    started_s = clock.monotonic_s()
    with open(tmp_path / "cache" / "metadata" / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        found = fetch_metadata(
            str(model), settings, environ={"TMPDIR": str(temporary)}, clock=clock
        )
    assert found.is_relative_to(temporary)
    assert content_store.LOCK_LIMIT_S <= clock.monotonic_s() - started_s < 11
    [warning] = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "has held its lock for 10 s" in warning.getMessage()


def no_space(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = content_store.Draft.write
    left = [times]

    def write(self: content_store.Draft, name: str, data: bytes) -> None:
        if name == "tokenizer.json" and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, name, data)

    monkeypatch.setattr(content_store.Draft, "write", write)


def test_e05_no_space_makes_room_first(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fetch_metadata(str(make_model(tmp_path / "old", config="{}")), settings)
    forget_entries()
    no_space(1, monkeypatch)
    found = fetch_metadata(str(make_model(tmp_path / "new")), settings)
    assert not old.exists()
    assert entries(settings) == [found]
    assert left_overs(settings) == []


def test_e05_no_space_at_all_goes_to_the_temporary_directory(
    tmp_path: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    no_space(2, monkeypatch)
    model = make_model(tmp_path / "m")
    temporary = tmp_path / "tmp"
    found = fetch_metadata(str(model), settings, environ={"TMPDIR": str(temporary)})
    assert found.is_relative_to(temporary)
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert str(settings.cache_dir) in warnings[0].getMessage()
    assert left_overs(settings) == []


def test_e03_a_read_only_root_goes_to_the_temporary_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    settings = Settings(cache_dir=tmp_path / "file" / "cache")
    temporary = tmp_path / "tmp"
    model = make_model(tmp_path / "m")
    found = fetch_metadata(str(model), settings, environ={"TMPDIR": str(temporary)})
    assert found.is_relative_to(temporary)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_e03_nothing_writable_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Settings(cache_dir=tmp_path / "file" / "cache")
    model = make_model(tmp_path / "m")
    with pytest.raises(ConfigError, match="FASTLOAD_CACHE_DIR"):
        fetch_metadata(str(model), settings, environ={"TMPDIR": str(tmp_path / "file")})


def test_somebody_elses_temporary_directory_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Settings(cache_dir=tmp_path / "file" / "cache")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (temporary / f"fastload-{os.geteuid()}").symlink_to(elsewhere)
    model = make_model(tmp_path / "m")
    found = fetch_metadata(str(model), settings, environ={"TMPDIR": str(temporary)})
    assert found.resolve().is_relative_to(temporary.resolve())
    assert list(elsewhere.iterdir()) == []
