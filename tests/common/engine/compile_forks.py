"""Processes that fork, spawn or end while a start with a compile cache is under way.

python -m tests.common.engine.compile_forks fork URI SECONDS...   one line of JSON
python -m tests.common.engine.compile_forks publish            publish, and end at once
python -m tests.common.engine.compile_forks spawn              the same in a spawned child
python -m tests.common.engine.compile_forks modules            modules imported while restoring
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from fastload_common.compile_cache.lifecycle import CompileCache
from fastload_common.engine.compile_counters import Counted
from fastload_common.engine.compile_start import CompileStart
from tests.common.compile_cache.artefacts import FACTORS
from tests.common.engine.compile_engine import LAYOUT, compile_all

_CHILD_S = 20.0
_VARIABLES = ("ENGINE_CACHE", "TORCHINDUCTOR_CACHE_DIR")


def begin(factors: Mapping[str, Any] | None = None) -> CompileStart:
    start = CompileStart.begin("engine", lambda: {**FACTORS, **(factors or {})}, LAYOUT)
    assert start is not None
    return start


def live() -> str:
    """A whole start; how it was measured."""
    start = begin()
    start.wait()
    verdict = start.complete([compile_all()])
    assert verdict is not None
    assert start.finish(60)
    return verdict.measured


def fork_once(delay_s: float, uri: str) -> dict[str, Any]:
    """Begin, fork at some moment, and go on in both; what the child has said, if it has."""
    for name in _VARIABLES:
        os.environ.pop(name, None)
    start = begin()
    threading.Event().wait(delay_s)
    reader, writer = os.pipe()
    began_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(in_child(start, uri)).encode())
        except BaseException as error:
            os.write(writer, json.dumps({"error": repr(error)}).encode())
        os._exit(0)
    fork_s = time.monotonic() - began_s
    os.close(writer)
    outcome = start.wait()
    verdict = start.complete([compile_all()])
    assert verdict is not None
    assert start.finish(60)
    said = b""
    if select.select([reader], [], [], _CHILD_S)[0]:
        said = os.read(reader, 65536)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    start.directories.close()
    found = json.loads(said) if said else {"error": "the child hangs"}
    return {"parent": outcome.status, "measured": verdict.measured, "fork_s": fork_s, **found}


def in_child(start: CompileStart, uri: str) -> dict[str, Any]:
    """What ranks do: read from S3; and what a start of their own would do."""
    from fastload_common.config import load_settings
    from fastload_common.source.registry import open_source

    began_s = time.monotonic()
    start.wait()
    completed = start.complete([Counted(1)])
    waited_s = time.monotonic() - began_s
    with closing(open_source(uri, load_settings())) as source:
        listed = len(list(source.list()))
    for name in _VARIABLES:
        os.environ.pop(name, None)
    measured = live()
    return {
        "waited_s": waited_s,
        "completed": completed is not None,
        "listed": listed,
        "child": measured,
    }


def fork(uri: str, delays_s: list[float]) -> list[dict[str, Any]]:
    return [fork_once(delay_s, uri) for delay_s in delays_s]


def publish() -> None:
    """Compile 2 MiB, publish, and return without waiting for it."""
    from pathlib import Path

    start = begin()
    start.wait()
    made = compile_all()
    noise = Path(os.environ["ENGINE_CACHE"], "compiled/noise")
    noise.write_bytes(random.Random(1).randbytes(2 << 20))
    start.complete([made])
    print("leaving", flush=True)


def spawn() -> int:
    child = multiprocessing.get_context("spawn").Process(target=publish)
    child.start()
    child.join(120)
    return child.exitcode or 0


def modules() -> dict[str, Any]:
    """Names of modules that were imported after the part in which nothing may fork.

    By a start that finds an entry, and by one that publishes.
    """
    known: set[str] = set()
    real = CompileCache.restore

    def restore(self: Any, *arguments: Any, **named: Any) -> Any:
        known.update(sys.modules)
        return real(self, *arguments, **named)

    CompileCache.restore = restore  # type: ignore[method-assign]
    status: list[str] = []
    published: list[str] = []
    for number in range(2):
        start = begin({"layout.tensor": number})
        status.append(start.wait().status)
        start.complete([Counted(1)])
        start.finish(60)
        published += start.outcome.published.values()
    return {"status": status, "published": published, "later": sorted(set(sys.modules) - known)}


def main() -> int:
    """See the module."""
    what, *rest = sys.argv[1:]
    if what == "fork":
        print(json.dumps(fork(rest[0], [float(text) for text in rest[1:]])))
    elif what == "modules":
        print(json.dumps(modules()))
    elif what == "publish":
        publish()
    else:
        return spawn()
    return 0


if __name__ == "__main__":
    sys.exit(main())
