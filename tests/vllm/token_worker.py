"""Generates greedy tokens with the real engine, one model after the other, in one process.

Run as a script; not a test itself. Reads a JSON job from its argument:

    {"tensor_parallel_size": 1, "cases": [{"name": "...", "model": "...", "load_format": "..."}]}

Prints one JSON line for each case: the generated token ids of each prompt.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

# Token ids of the byte-level tokenizer of the tiny models.
PROMPTS = [[10, 20, 30, 40, 50], [7] * 9, list(range(60, 90))]


def generate(case: dict[str, str], tensor_parallel_size: int) -> list[list[int]]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine: Any = LLM(
        model=case["model"],
        load_format=case["load_format"],
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        disable_log_stats=True,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tokens = []
    for prompt in PROMPTS:
        # Alone: what is computed together depends on when requests arrive, and where two tokens are
        # nearly as likely the same weights give one or the other.
        [output] = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return tokens


def main() -> None:
    job = json.loads(sys.argv[1])
    for case in job["cases"]:
        tokens = generate(case, job["tensor_parallel_size"])
        print("RESULT " + json.dumps({"name": case["name"], "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
