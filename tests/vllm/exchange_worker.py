"""One rank that loads models with fastload, and nothing else. Not a test itself.

    python exchange_worker.py JSON
    {"rank": 0, "world_size": 2, "port": 1234, "models": ["s3://..."]}

Each load writes its line to ``FASTLOAD_REPORT``. What the engine does with weights after they are
loaded is left out: some of these models need a GPU for that.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from fastload_vllm.planning import offer_no_kernel


def engine_config(model: str, ranks: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model,
        load_format="fastload",
        tensor_parallel_size=ranks,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        distributed_executor_backend="mp",
    ).create_engine_config()


def load(config: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(vllm_config=config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)


def main(job: dict[str, Any]) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    rank, ranks = job["rank"], job["world_size"]
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["VLLM_DIST_IDENT"] = f"exchange-{job['port']}"  # as the CPU worker does
    torch.set_num_threads(1)
    configs = [engine_config(model, ranks) for model in job["models"]]
    with set_current_vllm_config(configs[0]):
        address = f"tcp://127.0.0.1:{job['port']}"
        init_distributed_environment(ranks, rank, address, rank, backend="gloo")
        initialize_model_parallel(ranks)
    offer_no_kernel()
    for config in configs:
        load(config)
        print("RESULT " + json.dumps(config.model_config.model_weights), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
