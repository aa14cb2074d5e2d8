"""A small engine for the storm: compiles, serves one answer, and checks all that it finds.

python -m tests.faults.compile_server JOB    lines of JSON; the last one is the result

Its artefacts are files that name their key, the compilation that made them, and their own digest,
and an index, written last, with the digests of all. They are written in pieces, so that somebody
who looks at the wrong moment finds half of one. It uses `CompileStart` as the engines' hooks do.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastload_common.clock import SystemClock
from fastload_common.compile_cache import bundle, unpack
from fastload_common.compile_cache.stores import node
from fastload_common.compile_cache.stores.s3 import S3Store
from fastload_common.engine.cache_roots import CacheRoot
from fastload_common.engine.compile_counters import (
    Counted,
    count_torch,
    graphs_of,
    torch_compile_s,
)
from fastload_common.engine.compile_place import Place
from fastload_common.engine.compile_start import CompileStart
from fastload_common.source.early import import_for_s3
from tests.common.compile_cache.artefacts import FACTORS

LAYOUT = (
    CacheRoot("graphs", ("STORM_CACHE",), "~/.cache/storm", below=("compiled", "kernels")),
    CacheRoot("inductor", ("TORCHINDUCTOR_CACHE_DIR",), "/tmp/torchinductor_{user}"),
)
FILES = tuple(f"{part}/d{n % 3}/f{n}" for n in range(8) for part in ("compiled", "kernels"))
INDEX = "compiled/index.json"
MOMENTS = ("compile", "unpack", "place", "pack", "store", "upload", "seal")
"""At which a process says that it is there, to be killed."""

NOBODY = 65534

_PIECES = 4
_PIECE_S = 0.0005
_SLOW_S = 0.002


class WrongArtefactError(Exception):
    """It is of another key, of another compilation, or not whole."""


class SkewedClock(SystemClock):
    """Of a machine whose date is wrong."""

    def __init__(self, offset_s: float) -> None:
        self._offset_s = offset_s

    def wall_s(self) -> float:
        return super().wall_s() + self._offset_s


def say(what: str, **more: Any) -> None:
    os.write(1, (json.dumps({"at": what, **more}) + "\n").encode())


def answer_of(key: int) -> int:
    """What the server answers; the same whether it was compiled or found."""
    return int.from_bytes(hashlib.sha256(str(key).encode()).digest()[:4], "big")


# Artefacts


def write_slowly(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    step = -(-len(data) // _PIECES)
    with open(path, "wb", buffering=0) as stream:
        for start in range(0, len(data), step):
            stream.write(data[start : start + step])
            time.sleep(_PIECE_S)


def artefact(key: int, build: str, name: str, size_bytes: int) -> bytes:
    head = json.dumps({"key": key, "build": build, "name": name}).encode() + b"\n"
    body = head + random.Random(f"{key} {build} {name}").randbytes(size_bytes)
    return body + hashlib.sha256(body).digest()


def check(key: int, name: str, data: bytes) -> str:
    """The build that made it.

    Raises:
        WrongArtefactError: see there.
    """
    body, digest = data[:-32], data[-32:]
    if hashlib.sha256(body).digest() != digest:
        raise WrongArtefactError(f"{name} is not whole: {len(data)} bytes")
    head = json.loads(body.partition(b"\n")[0])
    if (head["key"], head["name"]) != (key, name):
        raise WrongArtefactError(f"{name} is {head}, wanted of key {key}")
    return str(head["build"])


def find(directory: Path, key: int) -> int:
    """How many artefacts are there; all, each of this key and of one compilation, or none."""
    there = sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".py"
    )
    if not there:
        return 0
    if INDEX not in there:
        raise WrongArtefactError(f"{len(there)} artefacts of an unfinished compilation: {there[0]}")
    index = json.loads((directory / INDEX).read_bytes())
    if index["key"] != key or sorted([*index["files"], INDEX]) != there:
        raise WrongArtefactError(f"the index of {index['key']} does not name what is there")
    for name, digest in index["files"].items():
        data = (directory / name).read_bytes()
        build = check(key, name, data)
        if hashlib.sha256(data).hexdigest() != digest or build != index["build"]:
            raise WrongArtefactError(f"{name} is of another compilation")
    return len(there)


def make(directory: Path, key: int, size_bytes: int) -> int:
    build = f"{os.getpid()}-{time.monotonic_ns()}"
    digests = {}
    for name in FILES:
        data = artefact(key, build, name, size_bytes)
        write_slowly(directory / name, data)
        digests[name] = hashlib.sha256(data).hexdigest()
    index = json.dumps({"key": key, "build": build, "files": digests}).encode()
    write_slowly(directory / INDEX, index)
    return len(FILES) + 1


def run_torch(key: int) -> Counted:
    """A real torch.compile of three lines."""
    import torch

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * (key + 2)
        return torch.relu(y) + y.sum()

    values = torch.arange(-8.0, 8.0)
    with torch.no_grad():
        found = torch.compile(function)(values)
        if not torch.equal(found, function(values)):
            raise WrongArtefactError("what was compiled computes something else")
    details = count_torch()
    compiled, loaded = graphs_of(details)
    return Counted(compiled, loaded, torch_compile_s(), details)


# Moments


def tell_moments() -> None:
    """Say where the process is, and make that last a little."""
    hook(unpack, "_write", "unpack")
    hook(unpack, "_place", "place")
    hook(bundle, "_read_whole", "pack")
    hook(node, "_write_durably", "store")
    hook(S3Store, "_write", "upload")
    hook(Place, "seal", "seal")


def hook(holder: Any, name: str, moment: str) -> None:
    real: Callable[..., Any] = getattr(holder, name)
    told: list[bool] = []

    def around(*arguments: Any, **named: Any) -> Any:
        if not told:
            told.append(True)
            say(moment)
        time.sleep(_SLOW_S)
        result = real(*arguments, **named)
        time.sleep(_SLOW_S)
        return result

    setattr(holder, name, around)


# A start


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """See the module.

    Args:
        job: ``key``, ``bytes`` of an artefact, ``weights_s`` to load them, ``skew_s`` of the clock,
            ``torch``: compile a function as well; ``user``: another one; ``fallback``: where the
            engine compiles without a cache.
    """
    key, made = int(job["key"]), 0
    say("begin")
    began_s = time.monotonic()
    start = CompileStart.begin(
        "storm",
        lambda: {**FACTORS, "layout.tensor": key},
        LAYOUT,
        clock=SkewedClock(job["skew_s"]),
    )
    begin_s = time.monotonic() - began_s
    threading.Event().wait(job["weights_s"])
    if start is not None:
        start.wait()
    directory = Path(os.environ.get("STORM_CACHE") or job["fallback"])
    found = find(directory, key)
    if not found:
        say("compile")
        made = make(directory, key, job["bytes"])
    ranks = [Counted(made, found, float(made > 0))]
    if job["torch"]:
        ranks.append(run_torch(key))
    verdict = start.complete(ranks) if start is not None else None
    say("serving", answer=answer_of(key))
    is_done = start.finish(60) if start is not None else True
    return {
        "answer": answer_of(key),
        "began": start is not None,
        "begin_s": begin_s,
        "done": is_done,
        "measured": verdict.measured if verdict is not None else "none",
        "counters": verdict.counters if verdict is not None else {},
        "outcome": start.outcome.record() if start is not None else {},
    }


def become(user: int) -> None:
    """Go on as another user, who may not be able to read what is not imported yet."""
    import cryptography.hazmat.primitives.serialization
    import zstandard

    assert cryptography.hazmat.primitives.serialization
    assert zstandard
    import_for_s3()
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def main() -> int:
    """See the module."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    job = json.loads(sys.argv[1])
    tell_moments()
    if job["user"] is not None:
        become(job["user"])
    try:
        say("end", **serve(job))
    except WrongArtefactError as error:
        say("end", fault=str(error))
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
