"""Embeds sentences with the real engine. Run as a script: ``MODEL LOAD_FORMAT``.

Prints one line: RESULT and the embeddings, as the hexadecimal form of their floats.
"""

from __future__ import annotations

import json
import sys

SENTENCES = [
    "Model weights come from object storage.",
    "A quick brown fox.",
    "Wo sind die Gewichte?",
]


def main() -> None:
    from vllm import LLM

    model, load_format = sys.argv[1:3]
    engine = LLM(
        model=model,
        load_format=load_format,
        runner="pooling",
        enforce_eager=True,
        max_model_len=128,
        disable_log_stats=True,
    )
    outputs = engine.embed(SENTENCES, use_tqdm=False)
    rows = [[float(value).hex() for value in output.outputs.embedding] for output in outputs]
    print("RESULT " + json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
