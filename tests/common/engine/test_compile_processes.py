"""A start with a compile cache beside forks, children and threads, and at the end of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastload_common.engine.compile_start import CompileStart
from fastload_common.engine.fork_guard import no_fork
from fastload_common.testing.s3_server import S3Server
from tests.common.compile_cache.artefacts import write_keys
from tests.common.engine.compile_engine import Server
from tests.house.tree import ROOT

pytestmark = pytest.mark.s3

PROGRAM = "tests.common.engine.compile_forks"


@pytest.fixture
def server(tmp_path: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server(monkeypatch, tmp_path / "node", f"s3://{s3_bucket}/p")
    server.settings["FASTLOAD_COMPILE_CACHE"] = server.uri  # all of it comes from S3
    return server


def run(server: Server, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", PROGRAM, *arguments],
        cwd=ROOT,
        env=os.environ | server.settings | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_ranks_that_are_forked_while_an_entry_is_fetched_are_not_stuck(
    server: Server, s3_server: S3Server, s3_bucket: str
) -> None:
    """They read from S3 as well; a module half imported in the parent would be so for ever."""
    s3_server.client().put_object(Bucket=s3_bucket, Key="m/x", Body=b"1")
    server.start()
    processes = [
        run(
            server,
            *("fork", f"s3://{s3_bucket}/m", delay_s, "0.02"),
            FASTLOAD_CACHE_DIR=str(server.place / delay_s),
        )
        for delay_s in ("0.05", "0.15", "0.3")
    ]
    for row in [row for process in processes for row in ended(process)]:
        assert "error" not in row, row
        assert (row["parent"], row["measured"], row["child"]) == ("hit", "hit", "hit")
        assert row["listed"] == 1
        assert row["completed"] is False, "what was begun in the parent is the parent's"
        assert row["waited_s"] < 10


@pytest.mark.parametrize("is_remote", [True, False], ids=["s3", "directory"])
def test_nothing_is_imported_while_the_process_may_fork(
    server: Server, tmp_path: Path, is_remote: bool
) -> None:
    private, _ = write_keys(tmp_path)
    if not is_remote:
        server.settings["FASTLOAD_COMPILE_CACHE"] = str(server.node)
    signing = {"FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE": str(private)}
    server.start({"layout.tensor": 0}, signing)
    found = ended(run(server, "modules", **signing))
    assert found["status"] == ["hit", "miss"]
    assert found["published"] == ["stored"]
    assert found["later"] == []


@pytest.mark.parametrize("what", ["publish", "spawn"])
def test_a_process_that_ends_at_once_has_published(server: Server, what: str) -> None:
    """As the main process, and as one that multiprocessing has started."""
    process = run(server, what)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.strip(), err) == (0, "leaving", "")
    assert server.last_line()["published"] == {server.uri: "stored"}
    with server.process({"FASTLOAD_CACHE_DIR": str(server.place / "other")}):
        start = server.begin()
        assert start is not None
        outcome = start.wait()
        start.directories.close()
    assert (outcome.status, outcome.content_bytes > 2 << 20) == ("hit", True)


def test_threads_that_begin_at_once_have_a_directory_each(server: Server) -> None:
    server.start()
    together = threading.Barrier(8)

    def begin(_: int) -> CompileStart:
        together.wait(60)
        start = server.begin()
        assert start is not None
        assert start.wait().status == "hit"
        return start

    with server.process(), ThreadPoolExecutor(8) as pool:
        starts = list(pool.map(begin, range(8)))
    assert len({start.directories.base for start in starts}) == 8
    for start in starts:
        assert start.finish(60)
        start.directories.close()


def test_a_fork_waits_for_what_must_not_be_split() -> None:
    entered, go_on, forked = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with no_fork():
            entered.set()
            go_on.wait(60)

    def fork() -> None:
        # Only handlers of a fork, which is all that is looked at, and no second process.
        subprocess.run(["/bin/true"], check=True, preexec_fn=_nothing)
        forked.set()

    threads = [threading.Thread(target=work), threading.Thread(target=fork)]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    assert not forked.wait(0.2)
    go_on.set()
    assert forked.wait(60)
    for thread in threads:
        thread.join()


def _nothing() -> None:
    pass
