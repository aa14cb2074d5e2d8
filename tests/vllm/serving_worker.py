"""Starts the real engine on one model, generates, reloads, generates. Not a test itself.

    python serving_worker.py JSON
    {"engine": {arguments of LLM}, "reload": [null, "s3://..."]}

prints one JSON object on its last line: the tokens before and after each reload.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPTS = [[10, 20, 30, 40, 50], [7] * 9]


def generate(engine: Any) -> list[list[int]]:
    from vllm import SamplingParams

    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(job: dict[str, Any]) -> None:
    from vllm import LLM

    engine: Any = LLM(
        **{"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 2} | job["engine"]
    )
    tokens = [generate(engine)]
    for path in job["reload"]:
        arguments = {} if path is None else {"weights_path": path}
        engine.collective_rpc("reload_weights", kwargs=arguments)
        tokens.append(generate(engine))
    engine.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps(tokens), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
