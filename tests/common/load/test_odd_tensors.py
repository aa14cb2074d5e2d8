"""Tensors without elements or dimensions, and a container without shared memory, through a load."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastload_common.config import Settings
from fastload_common.load.session import LoadSession, WeightSource

ODD = {
    "a_empty": torch.zeros(0),
    "b_matrix": torch.arange(12.0).reshape(3, 4),
    "c_empty_rows": torch.zeros(0, 4096),
    "d_scalar": torch.tensor(2.5),
    "e_scale": torch.tensor(0.5, dtype=torch.bfloat16),
    "f_step": torch.tensor(7),
    "g_vector": torch.arange(5.0),
    "z_empty_columns": torch.zeros(4096, 0),
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_f01_f02_empty_tensors_and_scalars_arrive(
    world_size: int, tmp_path: Path, settings: Settings
) -> None:
    save_file(ODD, tmp_path / "model.safetensors")
    for rank in range(world_size):
        placed: dict[str, torch.Tensor] = {}

        def load_weights(
            weights: object, rank: int = rank, placed: dict[str, torch.Tensor] = placed
        ) -> None:
            for name, weight in weights:  # type: ignore[attr-defined]
                part = weight[...] if weight.dim() else weight[()]
                if weight.dim() == 2:
                    size = weight.shape[1] // world_size
                    part = part.narrow(1, rank * size, size)
                placed[name] = torch.full(part.shape, -1, dtype=weight.dtype)
                placed[name].copy_(part)
                if not weight.dim():
                    assert placed[name].shape == ()

        with LoadSession([WeightSource(str(tmp_path))], settings) as session:
            session.load(None, load_weights)
        for name, value in ODD.items():
            size = value.shape[1] // world_size if value.dim() == 2 else 0
            expected = value.narrow(1, rank * size, size) if value.dim() == 2 else value
            assert placed[name].shape == expected.shape
            assert torch.equal(placed[name], expected), name
    assert session.report.requests == 1


SCRIPT = """
import sys, torch
from fastload_common.config import load_settings
from fastload_common.load.session import LoadSession, WeightSource
target = torch.zeros(4096, 1024)
settings = load_settings({"progress": "off", "memory_bytes": "8GiB"}, {})
with LoadSession([WeightSource(sys.argv[1])], settings) as session:
    session.load(None, lambda weights: [target.copy_(weight) for _, weight in weights])
print("sum", target.sum().item())
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs the right to make a mount namespace",
)
@pytest.mark.parametrize("mount", ["-t tmpfs -o size=64k tmpfs", "-t tmpfs -o ro tmpfs"])
def test_e04_a_load_needs_no_shared_memory(mount: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(4096, 1024)}, tmp_path / "model.safetensors")
    command = f'mount {mount} /dev/shm && exec "$0" -c "$1" "$2"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, sys.executable, SCRIPT, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"sum {4096 * 1024.0}" in done.stdout
