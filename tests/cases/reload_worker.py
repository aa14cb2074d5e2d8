"""An engine that generates, reloads or sleeps, and generates again. Not a test itself.

    python reload_worker.py JSON    {"engine": {...}, "steps": [{"reload": null}, {"sleep": 2}]}

prints a JSON list: the tokens at first and after each step, or the step's error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.vllm.serving_worker import generate


def do(engine: Any, step: dict[str, Any]) -> None:
    if "reload" in step:
        arguments = {} if step["reload"] is None else {"weights_path": step["reload"]}
        engine.collective_rpc("reload_weights", kwargs=arguments)
        return
    engine.sleep(level=step["sleep"])
    engine.wake_up()
    if step["sleep"] == 2:
        engine.collective_rpc("reload_weights")


def main(job: dict[str, Any]) -> None:
    from vllm import LLM

    plain = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 2}
    engine: Any = LLM(**plain | job["engine"])
    found: list[Any] = [generate(engine)]
    for step in job["steps"]:
        try:
            do(engine, step)
            found.append(generate(engine))
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
