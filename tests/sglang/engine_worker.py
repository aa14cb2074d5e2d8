"""Starts SGLang's `Engine`, without a server, and generates. Not a test itself.

    python engine_worker.py JSON
    {arguments of Engine}

prints one JSON object on its last line: greedy tokens of each prompt.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPTS = [[10, 20, 30, 40, 50], [7] * 9]
SAMPLING = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


def main(arguments: dict[str, Any]) -> None:
    import sglang

    engine: Any = sglang.Engine(
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        disable_radix_cache=True,
        max_total_tokens=2048,
        **arguments,
    )
    tokens = [
        engine.generate(input_ids=prompt, sampling_params=SAMPLING)["output_ids"]
        for prompt in PROMPTS
    ]
    engine.shutdown()
    print("RESULT " + json.dumps(tokens), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
