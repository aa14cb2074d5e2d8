"""The sweep over SGLang's architectures: the default loader against fastload, bit for bit.

    python -m tests.sglang.sweep.run --help

Resumable: what the results file has is not done again.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.sweep.ranks import Ranks, RanksLostError
from tests.sweep.results import Result, Results

WORLD_SIZES = (1, 2)
BAD = ("different", "failed", "lost")

SUBSET: tuple[str, ...] = (
    "LlamaForCausalLM",  # fused projections
    "Qwen3MoeForCausalLM",  # experts one by one
    "DeepseekV3ForCausalLM",  # loaded in threads
    "GPT2LMHeadModel",  # transposed in the checkpoint
    "Gemma3ForCausalLM",  # tied embeddings
    "Glm4vForConditionalGeneration",  # a tower
    "Phi3ForCausalLM",  # fused in the checkpoint
    "DeepseekV3ForCausalLM draft",
    "Glm4MoeForCausalLM draft-apart",  # in a file that the index does not name
    "LlamaForCausalLM modelopt-fp8",
)
"""Those of every test run."""


UNFIT = ("Qwen3ASRForConditionalGeneration",)
"""Those that take 16 GB, whatever their configuration says."""


def all_names() -> list[str]:
    """Architectures of SGLang's registry of which transformers can make a checkpoint, and more."""
    from sglang.srt.models.registry import ModelRegistry

    from fastload_common.testing.sweep_checkpoints import has_class
    from tests.sglang.sweep.checkpoints import DRAFTS, QUANTIZED

    found = sorted(name for name in ModelRegistry.models if has_class(name) and name not in UNFIT)
    return [*found, *DRAFTS, *QUANTIZED]


def sweep(names: Iterable[str], directory: Path, results: Results) -> None:
    """Load each model with one rank and, if the engine can, with two."""
    names = list(names)
    for world_size in WORLD_SIZES:
        layout = f"tp{world_size}"
        with Ranks(world_size, directory, "tests.sglang.sweep.rank") as ranks:
            for name in names:
                first = results.get(name, "tp1")
                if results.get(name, layout) or (
                    world_size > 1 and (first is None or first.outcome != "same")
                ):
                    continue
                result = Result(name, layout)
                try:
                    _run(ranks, name, directory / "models" / name.replace(" ", "+"), result)
                except RanksLostError as error:
                    result.fail("lost", str(error))
                results.add(result)
                print(result.line(), flush=True)


def _run(ranks: Ranks, name: str, model: Path, result: Result) -> None:
    steps = [("default", "refused"), ("fastload", "failed")]
    if ranks.world_size == 1:
        steps.insert(0, ("make", "unmade"))
    for operation, outcome in steps:
        command = {"op": operation, "directory": str(model), "architecture": name}
        answers = ranks.ask(command, timeout_s=240)
        for answer in answers:
            if not answer["ok"]:
                result.fail(outcome, answer["error"])
                return
        if operation != "make":
            getattr(result, f"take_{operation}")(answers)


def page(results: Results, names: list[str]) -> str:
    """The results as a Markdown page."""
    found = {name: [results.get(name, f"tp{size}") for size in WORLD_SIZES] for name in names}
    lines = [_INTRODUCTION, *(f"- {line}" for line in summary(results, names)), ""]
    lines += ["| name | tp1 | tp2 | notes |", "|---|---:|---:|---|"]
    for name, pair in found.items():
        if pair[0] is not None and pair[0].outcome == "same":
            cells = [str(r.tensors) if r and r.outcome == "same" else "-" for r in pair]
            told = [f"read eagerly: {r.eager}" for r in pair if r and r.eager]
            told += [f"{r.layout}: {r.outcome}: {_cell(r.reason)}" for r in pair if r and r.reason]
            lines.append(f"| {name} | {cells[0]} | {cells[1]} | {'; '.join(dict.fromkeys(told))} |")
    lines += ["", "## Not loaded by the engine here, and why", "", "| name | reason |", "|---|---|"]
    for name, (first, *_) in found.items():
        if first is None or first.outcome != "same":
            why = "not run" if first is None else f"{first.outcome}: {_cell(first.reason)}"
            lines.append(f"| {name} | {why} |")
    return "\n".join(lines) + "\n"


_INTRODUCTION = """# Sweep over SGLang's architectures

Written by `make sweep-sglang`; do not edit. Small random checkpoints, one an architecture of
SGLang's registry that transformers can write, each loaded by SGLang's default loader and by
fastload, with one rank and with two. Every parameter, buffer and tensor attribute is compared bit
for bit, right after `load_weights` and again after SGLang's post-processing where this machine
can do it. In the table: tensors compared over all ranks.
"""


def summary(results: Results, names: list[str]) -> list[str]:
    """The counts, then what is bad."""
    found = [r for name in names for size in WORLD_SIZES if (r := results.get(name, f"tp{size}"))]
    same = Counter(r.layout for r in found if r.outcome == "same")
    lines = [f"{layout}: {count} architectures the same" for layout, count in same.items()]
    lines.append(f"tensors compared: {sum(r.tensors for r in found)}")
    lines.append(f"tensors that differ: {sum(r.different for r in found)}")
    return lines + [r.line() for r in found if r.outcome in BAD]


def _cell(text: str) -> str:
    text = re.sub(r"(?<!\w)/[\w./+-]{4,}", "...", text)  # of the machine that ran it
    return text[:160].replace("|", "/").replace("<", "&lt;")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument("--directory", type=Path, help="for models, logs and results; kept")
    parser.add_argument("--page", type=Path, help="write the results to this Markdown file")
    parser.add_argument("--again", action="store_true", help="what failed before is done again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastload-sweep-") as temporary:
        directory: Path = options.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("SGLANG_CACHE_DIR", str(directory / "cache"))
        results = Results(directory / "results.jsonl", again=options.again)
        names = options.names or all_names()
        sweep(names, directory, results)
        lines = summary(results, names)
        print("\n".join(lines))
        if options.page:
            options.page.write_text(page(results, names), encoding="utf-8")
        found = [results.get(name, f"tp{size}") for name in names for size in WORLD_SIZES]
        return 1 if any(r is not None and r.outcome in BAD for r in found) else 0


if __name__ == "__main__":
    sys.exit(main())
