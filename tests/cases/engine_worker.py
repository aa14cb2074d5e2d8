"""The engine's side of `engine_process`: a loop over calls. Run as a script; not a test itself."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any, TextIO


def main() -> None:
    # What the engine prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tests.cases import engine_ranks

    engine_ranks.prepare()
    for line in sys.stdin:
        _answer(answers, json.loads(line))
    os._exit(0)


def _answer(answers: TextIO, asked: dict[str, Any]) -> None:
    module, _, function = asked["function"].partition(":")
    try:
        called = getattr(importlib.import_module(f"tests.cases.{module}"), function)
        said = {"returned": called(**asked["arguments"])}
    except Exception:
        said = {"raised": traceback.format_exc()}
    answers.write(json.dumps(said) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
