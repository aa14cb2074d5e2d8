"""Processes that publish and restore at the same time, some of them killed. One line of JSON.

python -m tests.cases.cache_worker kills DIRECTORY ROUNDS
python -m tests.cases.cache_worker pairs DIRECTORY PAIRS
python -m tests.cases.cache_worker start DIRECTORY
python -m tests.cases.cache_worker leave SCRATCH PLACES
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from fastload_common.clock import SystemClock
from fastload_common.compile_cache.lifecycle import CompileCache
from fastload_common.compile_cache.stores.node import NodeStore
from fastload_common.compile_cache.unpack import unpack
from fastload_common.config import Settings
from fastload_common.errors import FastloadError
from tests.common.compile_cache.artefacts import FACTORS, package, read_trees, write_trees

FILES = 12
BOUND_BYTES = 1 << 24


def trees_of(number: int) -> dict[str, dict[str, bytes]]:
    """Artefacts, all of which name their maker."""
    body = random.Random(number).randbytes(6000)
    tree = {f"d{n % 3}/f{n}": b"%06d" % number + body for n in range(FILES)}
    return {"inductor": tree}


def makers(roots: dict[str, Path]) -> set[bytes]:
    return {data[:6] for tree in read_trees(roots).values() for data in tree.values()}


def in_child(task: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        task()
        code = 0
    except BaseException as error:  # the parent counts exit codes
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def publish(directory: Path, number: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        made = package(write_trees(Path(scratch), trees_of(number)))
        NodeStore(directory, max_bytes=BOUND_BYTES).put(made)


def say_and_publish(ready: int, directory: Path, number: int) -> None:
    os.write(ready, b"x")
    publish(directory, number)


def read(directory: Path) -> str:
    """``miss``, or who made what was found; raises if it is mixed or not whole."""
    with tempfile.TemporaryDirectory() as scratch:
        store = NodeStore(directory, max_bytes=BOUND_BYTES)
        entry = store.get(package({}).manifest.key)
        if entry is None:
            return "miss"
        roots = {"inductor": Path(scratch) / "inductor"}
        with entry:
            unpack(entry.manifest, entry.blob, roots)
        found = makers(roots)
        assert len(found) == 1, f"mixed: {found}"
        assert sum(map(len, read_trees(roots).values())) == FILES
        return found.pop().decode()


def read_once(directory: Path) -> None:
    read(directory)


def kills(directory: Path, rounds: int) -> dict[str, object]:
    """Kill a writer at a random moment, over and over; whatever is then there must be whole."""
    chance = random.Random(7)
    seen, killed = {"miss": 0, "hit": 0}, 0
    for number in range(rounds):
        ready_r, ready_w = os.pipe()

        pid = in_child(partial(say_and_publish, ready_w, directory, number))
        os.read(ready_r, 1)
        threading.Event().wait(chance.uniform(0, 0.02))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        os.close(ready_r)
        os.close(ready_w)
        found = read(directory)
        seen["miss" if found == "miss" else "hit"] += 1
        if found != "miss" and number % 2:
            store = NodeStore(directory, max_bytes=BOUND_BYTES)
            store.collect(0)  # and from the beginning
    publish(directory, rounds)
    return {"killed": killed, **seen, "last": read(directory)}


def pairs(directory: Path, count: int) -> dict[str, object]:
    """Two processes publish the same key while two read it."""
    failed = 0
    for number in range(count):
        place = directory / str(number)
        pids = [
            in_child(partial(publish, place, 2 * number)),
            in_child(partial(publish, place, 2 * number + 1)),
            in_child(partial(read_once, place)),
            in_child(partial(read_once, place)),
        ]
        failed += sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
        assert int(read(place)) // 2 == number
    return {"failed": failed, "pairs": count}


def leave(directory: Path, place: str) -> NoReturn:
    """Publish, say so, and end at once, as a process does that has nothing more to do."""
    settings = Settings(compile_cache=tuple(place.split(",")), compile_cache_deadline_s=2.0)
    cache = CompileCache.open(settings, SystemClock())
    assert cache is not None
    roots = write_trees(directory / "made")
    outcome = cache.restore(FACTORS, {name: directory / "none" / name for name in roots})
    cache.publish(outcome, roots)
    print("leaving", flush=True)
    sys.exit(0)


def start(directory: Path) -> dict[str, object]:
    """What a server's start and warm-up do: restore, compile, publish, end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        settings = Settings(compile_cache=(str(directory),), compile_cache_max_bytes=BOUND_BYTES)
        cache = CompileCache.open(settings, SystemClock())
        assert cache is not None
        roots = write_trees(Path(scratch), {"inductor": {"a": random.Random(1).randbytes(5 << 20)}})
        outcome = cache.restore(FACTORS, roots)
        cache.publish(outcome, roots)
        done = cache.close()
    left = [str(path) for path in directory.glob("v1/drafts/*")]
    return {"done": done, "left": left, **outcome.record()}


def main() -> None:
    """See the module."""
    what, directory, *rest = sys.argv[1:]
    try:
        if what == "leave":
            leave(Path(directory), rest[0])
        if what == "start":
            found = start(Path(directory))
        else:
            found = {"kills": kills, "pairs": pairs}[what](Path(directory), int(rest[0]))
    except FastloadError as error:
        found = {"error": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
