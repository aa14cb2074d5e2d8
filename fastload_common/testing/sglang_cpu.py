"""What SGLang needs to run on a machine without a GPU. For tests and the demo.

``python -m fastload_common.testing.sglang_cpu`` makes every interpreter of this environment
call `install` when it starts: SGLang's processes unpickle functions of the engine before they
call any plugin, so no later moment will do. Three things are put right, each when it is first
asked for, and none where the real thing is installed:

- triton, which is 0.9 GB and never runs here: the engine's own stand-in, which it uses on macOS;
- torchvision: the registry's build is for CUDA, and its operators cannot be loaded beside a CPU
  build of torch; the two that its Python code describes are declared;
- ``vllm._custom_ops``: without CPU kernels of its own, SGLang imports a name from there that it
  then never calls.

Imports only the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["ARGUMENTS", "install", "variables"]

ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-radix-cache", "--max-total-tokens", "2048"),
    "--sleep-on-idle",
)
"""Of the command line, for a server on the CPU that leaves its cores to others while it waits."""

_LEAF = "vllm._custom_ops"


def install() -> None:
    """Answer for what is missing, in this process. Idempotent."""
    if not any(isinstance(finder, _Missing) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Missing())


def variables(ranks: int) -> dict[str, str]:
    """Of the environment, for a server on the CPU that asks no hub."""
    found = {
        "HF_HUB_OFFLINE": "1",
        # A CUDA build of torch brings NCCL, which the engine would take for a sign of devices.
        "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so.2",
    }
    if ranks > 1:
        # One core a rank; the engine's own choice needs a NUMA node for each.
        cores = sorted(os.sched_getaffinity(0))
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(ranks)
        )
    return found


class _Missing(MetaPathFinder):
    """Sees the first import of each; every other one passes by."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top == "triton" and (PathFinder.find_spec("triton") is None):
            return ModuleSpec(fullname, _StandIn(), is_package=True)
        if top in self._seen:
            return None
        if top == "torchvision":
            self._seen.add(top)
            _declare_vision_operators()
        elif top == "sglang":
            self._seen.add(top)
            _offer_rotary_embedding()
        return None


class _StandIn(Loader):
    """Makes modules of triton from the engine's own stand-in."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        stubs = _engine_stubs()
        module: ModuleType = stubs._MockModule(spec.name)
        known: dict[str, dict[str, Any]] = {
            "triton": {
                "__version__": "3.0.0",
                "cdiv": stubs._cdiv,
                "next_power_of_2": stubs._next_power_of_2,
                "Config": stubs._Config,
            },
            "triton.language": {"constexpr": _Constant},
            "triton.runtime.cache": {"triton_key": stubs._triton_key},
            "triton.compiler.compiler": {"triton_key": stubs._triton_key},
        }
        for name, value in known.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: whatever is asked of it is made then."""


class _Constant:
    """Stands for a value in a kernel's signature."""

    def __init__(self, value: object = None) -> None:
        self.value = value


def _engine_stubs() -> Any:
    """The engine's module, by its path: importing the engine from here would go in circles."""
    name = "_fastload_engine_stubs"
    if name not in sys.modules:
        found = PathFinder.find_spec("sglang")
        if found is None or found.origin is None:
            raise ImportError("SGLang is not installed")
        file = Path(found.origin).with_name("_platform_stubs.py")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _declare_vision_operators() -> None:
    import torch

    if torch.version.cuda:
        return
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


_kept: list[object] = []
"""A library's operators go when it does."""


def _offer_rotary_embedding() -> None:
    if _LEAF in sys.modules or PathFinder.find_spec("vllm") is not None:
        return

    def never_called(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError("a kernel of vLLM was called, and vLLM is not installed")

    # Only the leaf: whoever asks whether vLLM is installed must get the right answer.
    leaf = ModuleType(_LEAF)
    leaf.rotary_embedding = never_called  # type: ignore[attr-defined]
    sys.modules[_LEAF] = leaf


if __name__ == "__main__":
    # The name sorts behind the one that puts an editable fastload on the path.
    hook = Path(sysconfig.get_paths()["purelib"]) / "fastload_sglang_cpu.pth"
    hook.write_text("import fastload_common.testing.sglang_cpu as f; f.install()\n")
    print(hook)
