"""One rank that loads models with the default loader and with fastload, and compares them.

Run as a module, once for each rank; not a test itself. Reads a JSON job from its argument:

    {"rank": 0, "world_size": 2, "port": 1234, "reports": "path",
     "cases": [{"name": "...", "directory": "...", "uri": "s3://..."}]}

Prints one JSON line for each case: how many tensors were compared, and which differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import torch

from tests.bits import bytes_of


def start(rank: int, world_size: int, port: int) -> None:
    """Make the process groups, as the engine's CPU worker does."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.accelerator.empty_cache = lambda: None  # the CPU worker does the same
    torch.set_num_threads(1)
    with set_current_vllm_config(engine_config(sys.argv[2], "auto", world_size)):
        init_distributed_environment(
            world_size, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo"
        )
        initialize_model_parallel(world_size)


def engine_config(model: str, load_format: str, world_size: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model,
        load_format=load_format,
        tensor_parallel_size=world_size,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        distributed_executor_backend="mp",
    ).create_engine_config()


def load(model: str, load_format: str, world_size: int) -> torch.nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = engine_config(model, load_format, world_size)
    # The engine fills these once it knows its devices; nothing here depends on them.
    with set_current_vllm_config(config):
        module: torch.nn.Module = get_model(vllm_config=config)
    config.compilation_config.static_forward_context.clear()
    return module


def state_of(module: torch.nn.Module) -> dict[str, tuple[str, str, str]]:
    """Name of each parameter, buffer and tensor attribute -> dtype, shape, digest of its bytes."""
    tensors: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules():
        for table in (part._parameters, part._buffers, vars(part)):
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{path}.{name}"] = value
    return {name: _digest(value) for name, value in tensors.items()}


def _digest(tensor: torch.Tensor) -> tuple[str, str, str]:
    assert type(tensor).__name__ != "LazyTensor"
    digest = hashlib.sha256(bytes_of(tensor)).hexdigest()
    return str(tensor.dtype), str(tuple(tensor.shape)), digest


def compare(case: dict[str, str], world_size: int) -> dict[str, Any]:
    expected = state_of(load(case["directory"], "auto", world_size))
    actual = state_of(load(case["uri"], "fastload", world_size))
    return {
        "name": case["name"],
        "tensors": len(expected),
        "missing": sorted(set(expected) ^ set(actual)),
        "different": sorted(n for n in expected if n in actual and expected[n] != actual[n]),
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    os.environ["LOCAL_RANK"] = str(job["rank"])
    os.environ["VLLM_DIST_IDENT"] = f"equivalence-{job['port']}"  # as the CPU worker does
    start(job["rank"], job["world_size"], job["port"])
    for case in job["cases"]:
        print("RESULT " + json.dumps(compare(case, job["world_size"])), flush=True)


if __name__ == "__main__":
    main()
