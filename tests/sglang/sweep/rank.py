"""One rank of the sweep over SGLang's models; see `tests.sweep.rank`."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

from fastload_common.units import GIB
from tests.sglang.sweep.checkpoints import make
from tests.sglang.sweep.engine import Engine
from tests.sweep.engine import Loaded

MEMORY_BYTES = 6 * GIB


class Rank:
    """Does what it is told, and says what came out."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.engine = Engine(place["rank"], place["world_size"], place["port"])
        self.expected: Loaded | None = None

    def make(self, command: dict[str, Any]) -> dict[str, Any]:
        make(command["architecture"], Path(command["directory"]))
        return {}

    def default(self, command: dict[str, Any]) -> dict[str, Any]:
        self.expected = None
        self.expected = self.engine.load(command, "auto")
        return self.expected.facts()

    def fastload(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.expected is not None
        actual = self.engine.load(command, "fastload")
        return {"report": actual.report, **self.expected.compare(actual)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Some models make tables of gigabytes, whatever their configuration says.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    place = json.loads(sys.argv[1])
    if place["world_size"] > 1:
        # The engine wants a NUMA node for each rank, or to be told.
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            "0" for _ in range(place["world_size"])
        )
    rank = Rank(place)
    answers.write(json.dumps({"ok": True}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        print(f"=== {line.strip()}", file=sys.stderr, flush=True)
        try:
            answer = {"ok": True, **getattr(rank, command["op"])(command)}
        except Exception as error:
            traceback.print_exc()
            text = " ".join(str(error).split()) or "no message"
            answer = {"ok": False, "error": f"{type(error).__name__}: {text[:300]}"}
        gc.collect()
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
