"""Decides SGLang's arguments and prints the key of what they compile. Not a test itself.

    python key_worker.py JSON
    [{"arguments": {...}, "variables": {...}}, ...]

prints one JSON object a line for each job, after the word RESULT: the key and all factors.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

USUAL = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "tp_size": 2,
    "page_size": 1,
}


def key(arguments: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs

    from fastload_common.compile_cache.factors import check_factors
    from fastload_common.compile_cache.key import key_of
    from fastload_sglang.compile_factors import factors_of
    from fastload_sglang.compile_ranks import ranks_here

    decided: Any = ServerArgs(**{**USUAL, **arguments})
    decided.resolve_once()
    factors = check_factors(factors_of(decided, ranks_here(decided)))
    return {"key": key_of(factors), "factors": factors}


def main(jobs: list[dict[str, Any]]) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # The engine sets variables of its own when it is imported, and when it decides.
    key({"model_path": jobs[0]["arguments"]["model_path"]})
    before = dict(os.environ)
    for job in jobs:
        os.environ.update(job.get("variables", {}))
        try:
            found = key(job["arguments"])
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        finally:
            os.environ.clear()
            os.environ.update(before)
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
