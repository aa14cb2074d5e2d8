"""One rank of the real vLLM that loads one model with one load format, and nothing else.

    python -m benchmarks.clients.engine_rank JSON
    {"rank": 0, "ranks": 2, "port": 1234, "model": "s3://...", "load_format": "...", "extra": {}}

Prints what the load took as a line of JSON behind `RESULT`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from benchmarks.clients.run import end_with_parent
from benchmarks.cost import cpu_s

RESULT = "RESULT "


def main(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    rank, ranks = job["rank"], job["ranks"]
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["VLLM_DIST_IDENT"] = f"node-{job['port']}"
    torch.set_num_threads(1)
    config = EngineArgs(
        model=job["model"],
        load_format=job["load_format"],
        model_loader_extra_config=job["extra"],
        tensor_parallel_size=ranks,
        enforce_eager=True,
        max_model_len=64,
        distributed_executor_backend="mp",
    ).create_engine_config()
    with set_current_vllm_config(config):
        address = f"tcp://127.0.0.1:{job['port']}"
        init_distributed_environment(ranks, rank, address, rank, backend="gloo")
        initialize_model_parallel(ranks)
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config)
            loader = get_model_loader(config.load_config)
            torch.distributed.barrier()
            began_s, cpu_began_s = time.monotonic(), cpu_s()
            loader.load_weights(model, config.model_config)
    with torch.no_grad():
        # Equal between loaders: the same weights came.
        total = sum(float(p.double().abs().sum()) for p in model.parameters())
    return {
        "began_s": began_s,
        "ended_s": time.monotonic(),
        "cpu_s": cpu_s() - cpu_began_s,
        "sum": total,
    }


if __name__ == "__main__":
    end_with_parent()
    print("\n" + RESULT + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
