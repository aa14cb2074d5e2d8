"""One rank of the sweep: loads models as it is told, line by line, and says what came out.

Run as a script, not a test. Its first argument is JSON: rank, world_size, port. It reads one
JSON command a line and answers each with one JSON line; the engine's own output goes to
stderr. It outlives what fails; only a crash ends it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.sweep.engine import Engine, Loaded, describe
from tests.sweep.making import make


class Rank:
    def __init__(self, place: dict[str, Any]) -> None:
        self.engine = Engine(place["rank"], place["world_size"], place["port"])
        self.expected: Loaded | None = None

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, f"do_{command['op']}")(command)  # type: ignore[no-any-return]

    def do_make(self, command: dict[str, Any]) -> dict[str, Any]:
        return make(self.engine, command["case"], Path(command["directory"]))

    def do_default(self, command: dict[str, Any]) -> dict[str, Any]:
        self.expected = None
        self.expected = self.engine.load(command, "auto")
        return {"ok": True, **self.expected.facts()}

    def do_fastload(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.expected is not None
        actual = self.engine.load(command, "fastload")
        return {"ok": True, "report": actual.report, **self.expected.compare(actual)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    rank = Rank(json.loads(sys.argv[1]))
    gc.freeze()
    answers.write(json.dumps({"ok": True, "engine": describe()}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        print(f"=== {line.strip()}", file=sys.stderr, flush=True)
        try:
            answer = rank.do(command)
        except BaseException as error:
            traceback.print_exc()
            text = " ".join(str(error).split()) or "no message"
            answer = {"ok": False, "error": f"{type(error).__name__}: {text[:300]}"}
            if isinstance(error, SystemExit | KeyboardInterrupt):
                raise
        # The engine collects twice a load, which is most of a small load's time: what is there by
        # now stays, and need not be looked at again.
        gc.collect()
        gc.freeze()
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
