"""What this machine and its software say of themselves, without importing torch.

`Machine` is the only place that looks; everything else is told. GPUs are asked through the
driver's management library, which makes no context, so a process may fork afterwards.
"""

from __future__ import annotations

import platform
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Protocol

from fastload_common.compile_cache.nvml import Gpu, list_gpus

__all__ = ["CPU_ISA", "Machine", "ThisMachine", "TorchBuild", "fits_machine", "machine_factors"]

# Every set that a compiler takes up by itself with -march=native (Inductor's C++ uses it), and
# those that Inductor or the engines' kernels ask for. Names as in /proc/cpuinfo.
_ISA_NAMES = (
    "pni ssse3 sse4_1 sse4_2 sse4a popcnt cx16 lahf_lm movbe abm aes pclmulqdq sha_ni gfni "
    "avx avx2 bmi1 bmi2 fma fma4 f16c xop tbm vaes vpclmulqdq avx_vnni avx_vnni_int8 "
    "avx_vnni_int16 avx_ifma avx_ne_convert avx10 adx "
    "avx512f avx512cd avx512bw avx512dq avx512vl avx512ifma avx512vbmi avx512_vbmi2 "
    "avx512_vnni avx512_bitalg avx512_vpopcntdq avx512_bf16 avx512_fp16 avx512_vp2intersect "
    "amx_tile amx_int8 amx_bf16 amx_fp16 amx_complex apx_f "
    "asimd asimdhp asimddp asimdrdm asimdfhm fphp fcma jscvt atomics crc32 sha1 sha2 sha3 "
    "sha512 sve sve2 svei8mm svebf16 svef32mm i8mm bf16 sme sme2 dotprod"
)
CPU_ISA = frozenset(_ISA_NAMES.split())

# Compilers beside torch and Triton whose output a bundle may hold.
PACKAGES = (
    "apache-tvm-ffi",
    "cuda-python",
    "deep-gemm",
    "deep_gemm",
    "flash-attn",
    "flashinfer-python",
    "flashinfer-cubin",
    "intel-extension-for-pytorch",
    "nvidia-cutlass-dsl",
    "sgl-kernel",
    "sgl-kernel-cpu",
    "tilelang",
    "xgrammar",
)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What torch says of how it was built."""

    commit: str | None = None
    cuda: str | None = None
    hip: str | None = None


class Machine(Protocol):
    """What is asked of a machine."""

    def text(self, path: str) -> str:
        """A file of the system; empty where it is not there."""
        ...

    def version(self, distribution: str) -> str | None:
        """Version of an installed distribution."""
        ...

    def torch_build(self) -> TorchBuild: ...

    def gpus(self) -> list[Gpu]: ...

    def gpu_driver(self) -> str | None: ...

    def python(self) -> str: ...

    def libc(self) -> str: ...

    def architecture(self) -> str: ...


class ThisMachine:
    """The real one."""

    def __init__(self) -> None:
        self._gpus: tuple[list[Gpu], str | None] | None = None

    def text(self, path: str) -> str:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def version(self, distribution: str) -> str | None:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def torch_build(self) -> TorchBuild:
        try:
            spec = util.find_spec("torch")
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.origin is None:
            return TorchBuild()
        text = self.text(str(Path(spec.origin).parent / "version.py"))
        return TorchBuild(_told("git_version", text), _told("cuda", text), _told("hip", text))

    def gpus(self) -> list[Gpu]:
        return self._asked()[0]

    def gpu_driver(self) -> str | None:
        return self._asked()[1]

    def python(self) -> str:
        suffix = sysconfig.get_config_var("EXT_SUFFIX") or ""
        return f"{platform.python_implementation()} {platform.python_version()} {suffix}".strip()

    def libc(self) -> str:
        name, version = platform.libc_ver()
        # musl is not told by the standard library; its loader has the architecture in its name.
        return f"{name} {version}".strip() or f"unknown, platform {sysconfig.get_platform()}"

    def architecture(self) -> str:
        return platform.machine()

    def _asked(self) -> tuple[list[Gpu], str | None]:
        if self._gpus is None:
            self._gpus = list_gpus()
        return self._gpus


def machine_factors(machine: Machine | None = None, *, kind: str | None = None) -> dict[str, Any]:
    """The factors that need no engine.

    Args:
        machine: whom to ask.
        kind: the device that the engine uses; by default what torch was built for, if the machine
            has it.

    Returns:
        Factors for `check_factors`, with those of the engine added.
    """
    machine = machine or ThisMachine()
    build = machine.torch_build()
    gpus = machine.gpus() if kind != "cpu" else []
    if kind is None:
        kind = "rocm" if build.hip else "cuda" if build.cuda and gpus else "cpu"
    found: dict[str, Any] = {
        "software.torch": machine.version("torch"),
        "software.torch_build": build.commit,
        "software.cuda": build.cuda,
        "software.hip": build.hip,
        "software.triton": _triton(machine),
        "software.packages": {
            name: version for name in PACKAGES if (version := machine.version(name)) is not None
        },
        "software.python": machine.python(),
        "software.libc": machine.libc(),
        "hardware.kind": kind,
        "hardware.machine": machine.architecture(),
        "hardware.cpu_isa": _cpu_isa(machine),
    }
    if kind == "cuda":
        found |= {
            "hardware.gpus": sorted({gpu.name for gpu in gpus}),
            "hardware.gpu_architectures": sorted({gpu.architecture for gpu in gpus}),
            "hardware.gpu_driver": machine.gpu_driver(),
        }
    elif kind == "rocm":
        found["hardware.gpu_driver"] = machine.text("/sys/module/amdgpu/version").strip() or None
    return {name: value for name, value in found.items() if value is not None}


def fits_machine(factors: Mapping[str, Any], machine: Machine | None = None) -> bool:
    """Whether artefacts with these factors could be used on this hardware, whatever is installed.

    For a node agent, whose own image has another torch than the engine's, or none.
    """
    machine = machine or ThisMachine()
    here: dict[str, Any] = {
        "hardware.machine": machine.architecture(),
        "hardware.cpu_isa": _cpu_isa(machine),
    }
    if factors.get("hardware.kind") == "cuda":
        gpus = machine.gpus()
        here |= {
            "hardware.gpus": sorted({gpu.name for gpu in gpus}),
            "hardware.gpu_architectures": sorted({gpu.architecture for gpu in gpus}),
            "hardware.gpu_driver": machine.gpu_driver(),
        }
    return all(factors.get(name) == value for name, value in here.items())


def _triton(machine: Machine) -> str | None:
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-cpu"):
        version = machine.version(name)
        if version is not None:
            return f"{name} {version}"
    return None


def _cpu_isa(machine: Machine) -> list[str]:
    """Of all CPUs together only what each has: code may run on any of them."""
    text = machine.text("/proc/cpuinfo")
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    sets = [CPU_ISA.intersection(line.split()) for line in set(lines)]
    found = sorted(frozenset.intersection(*sets)) if sets else []
    if "sve" in found:
        length = machine.text("/proc/sys/abi/sve_default_vector_length").strip()
        found.append(f"sve_length={length or 'unknown'}")
    return found


def _told(name: str, text: str) -> str | None:
    """A constant of torch's version file, which is not imported."""
    match = re.search(rf"^{name}\s*(?::[^=]*)?=\s*'([^'\n]+)'", text, re.MULTILINE)
    return match.group(1) if match else None
