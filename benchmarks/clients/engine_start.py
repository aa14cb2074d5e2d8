"""One start of vLLM, torch.compile on, and a few tokens; for `benchmarks.compile_engine`.

python -m benchmarks.clients.engine_start '{"model": "s3://...", ...arguments of LLM}'
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

__all__ = ["RESULT"]

RESULT = "RESULT "
_PROMPTS = [[10, 20, 30, 40, 50], [7] * 9]


def main(arguments: dict[str, Any]) -> None:
    begun_s = time.monotonic()
    from vllm import LLM, SamplingParams

    engine = LLM(**arguments)
    started_s = time.monotonic()
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in _PROMPTS],
        SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
        use_tqdm=False,
    )
    found = {
        "start_s": round(started_s - begun_s, 2),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }
    engine.llm_engine.engine_core.shutdown()
    print(RESULT + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
