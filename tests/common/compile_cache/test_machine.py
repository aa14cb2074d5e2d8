"""What the machine says of itself, on machines that are told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fastload_common.compile_cache.machine import (
    ThisMachine,
    TorchBuild,
    fits_machine,
    machine_factors,
)
from fastload_common.compile_cache.nvml import Gpu
from tests.house.tree import ROOT

CPUINFO = "processor : 0\nflags\t\t: fpu ht {}\n\nprocessor : 1\nflags\t\t: fpu ht {}\n"


@dataclass
class ToldMachine:
    """Says what it is told to say."""

    files: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: {"torch": "2.13.0"})
    build: TorchBuild = field(default_factory=lambda: TorchBuild("abc"))
    devices: list[Gpu] = field(default_factory=list)
    driver: str | None = None

    def text(self, path: str) -> str:
        return self.files.get(path, "")

    def version(self, distribution: str) -> str | None:
        return self.versions.get(distribution)

    def torch_build(self) -> TorchBuild:
        return self.build

    def gpus(self) -> list[Gpu]:
        return self.devices

    def gpu_driver(self) -> str | None:
        return self.driver

    def python(self) -> str:
        return "CPython 3.11.7"

    def libc(self) -> str:
        return "glibc 2.36"

    def architecture(self) -> str:
        return "x86_64"


H200 = Gpu("NVIDIA H200", "sm_90")


def test_instruction_sets_are_those_that_each_cpu_has_and_code_can_use() -> None:
    machine = ToldMachine({"/proc/cpuinfo": CPUINFO.format("avx2 avx512f sep", "avx2")})
    assert machine_factors(machine)["hardware.cpu_isa"] == ["avx2"]
    assert machine_factors(ToldMachine())["hardware.cpu_isa"] == []


def test_the_length_of_vectors_counts_where_there_are_such() -> None:
    arm = {
        "/proc/cpuinfo": "Features\t: fp asimd sve bf16\n",
        "/proc/sys/abi/sve_default_vector_length": "32\n",
    }
    found = machine_factors(ToldMachine(arm))["hardware.cpu_isa"]
    assert found == ["asimd", "bf16", "sve", "sve_length=32"]


def test_gpus_count_each_kind_once_and_only_where_they_are_used() -> None:
    machine = ToldMachine(
        devices=[H200, H200], driver="570.1", build=TorchBuild("abc", "12.8", None)
    )
    found = machine_factors(machine)
    assert found["hardware.kind"] == "cuda"
    assert found["hardware.gpus"] == ["NVIDIA H200"]
    assert found["hardware.gpu_architectures"] == ["sm_90"]
    assert found["hardware.gpu_driver"] == "570.1"
    assert "hardware.gpus" not in machine_factors(machine, kind="cpu")
    machine.devices = []
    assert machine_factors(machine)["hardware.kind"] == "cpu"


def test_triton_and_other_compilers_are_named_where_they_are_installed() -> None:
    machine = ToldMachine(
        versions={"torch": "2", "pytorch-triton": "3.9", "flashinfer-python": "1"}
    )
    found = machine_factors(machine)
    assert found["software.triton"] == "pytorch-triton 3.9"
    assert found["software.packages"] == {"flashinfer-python": "1"}


def test_an_agent_without_torch_knows_what_fits() -> None:
    machine = ToldMachine({"/proc/cpuinfo": CPUINFO.format("avx2", "avx2")}, {}, TorchBuild())
    factors = {"hardware.kind": "cpu", "hardware.machine": "x86_64", "hardware.cpu_isa": ["avx2"]}
    assert fits_machine(factors, machine)
    assert not fits_machine({**factors, "hardware.cpu_isa": ["avx2", "avx512f"]}, machine)
    assert not fits_machine({**factors, "hardware.machine": "aarch64"}, machine)
    gpu = {
        **factors,
        "hardware.kind": "cuda",
        "hardware.gpus": ["NVIDIA H200"],
        "hardware.gpu_architectures": ["sm_90"],
        "hardware.gpu_driver": "570.1",
    }
    assert not fits_machine(gpu, machine)
    machine.devices, machine.driver = [H200], "570.1"
    assert fits_machine(gpu, machine)


def test_this_machine_is_asked_without_importing_torch() -> None:
    code = (
        "import sys; from fastload_common.compile_cache.machine import machine_factors as m;"
        "f = m(); print(f['software.torch'], f['software.torch_build'], 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    torch = pytest.importorskip("torch")
    assert done.stdout.split() == [torch.__version__, torch.version.git_version, "False"]


def test_the_version_file_of_torch_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.13.0+cu128'\n"
        "cuda: Optional[str] = '12.8'\ngit_version = 'abc'\nhip: Optional[str] = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert ThisMachine().torch_build() == TorchBuild("abc", "12.8", None)
