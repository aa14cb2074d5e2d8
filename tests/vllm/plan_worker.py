"""Plans several models with the real vLLM, which is imported once. Not a test itself.

    python plan_worker.py JSON
    [["s3://...", "--tp", "2"], ...]

Each plan is printed as the command prints it, as JSON on a line behind ``RESULT``.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

import torch

from fastload_common.cli.main import main


def plans(jobs: list[list[str]]) -> None:
    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader
    import vllm.model_executor.models.registry  # noqa: F401 - what the plans' processes need

    torch.set_num_threads(1)
    for job in jobs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main(["plan", *job, "--json"])
        found = json.loads(printed.getvalue()) if code == 0 else None
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    plans(json.loads(sys.argv[1]))
