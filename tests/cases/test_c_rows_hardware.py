"""The compile cache where hardware differs: other devices, other GPUs, other instruction sets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastload_common.compile_cache import machine
from fastload_common.compile_cache.machine import machine_factors
from fastload_vllm import compile_factors
from tests.cases.cache_node import Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# C02


def parallel(**changes: Any) -> SimpleNamespace:
    """As vLLM's configuration of ranks has it: two ranks of the first replica."""
    base = {
        "local_world_size": 2,
        "nnodes_within_dp": 1,
        "node_rank_within_dp": 0,
        "distributed_executor_backend": "mp",
        "data_parallel_rank_local": None,
        "data_parallel_index": 0,
        "assigned_physical_gpu_ids": None,
    }
    return SimpleNamespace(**base | changes)


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({}, [0, 1]),
        ({"data_parallel_rank_local": 1, "data_parallel_index": 5}, [2, 3]),
        ({"data_parallel_index": 1}, [2, 3]),
        ({"data_parallel_index": 1, "distributed_executor_backend": "ray"}, [0, 1]),
        ({"data_parallel_index": 1, "nnodes_within_dp": 2}, [0, 1]),
        ({"assigned_physical_gpu_ids": [6, 7]}, [6, 7]),
        ({"assigned_physical_gpu_ids": [4, 5, 6, 7], "data_parallel_rank_local": 1}, [6, 7]),
    ],
    ids=str,
)
def test_c02_devices_are_those_that_the_ranks_will_take(
    changes: dict[str, Any], devices: list[int]
) -> None:
    assert compile_factors._devices(parallel(**changes)) == devices


def test_c02_what_was_compiled_on_one_device_is_not_used_on_another(node: Node) -> None:
    first = {"layout.ranks": ["0_0"], "layout.devices": [0]}
    second = {"layout.ranks": ["0_0"], "layout.devices": [1]}
    assert node.start(**first).status == "miss"
    other = node.start(**second)
    assert other.status == "miss"
    assert other.differing == ["layout.devices: [1] here, [0] there"]
    # Both have their entries now.
    assert node.start(**first).status == node.start(**second).status == "hit"


def test_c02_on_a_cpu_no_device_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("a driver was asked")

    monkeypatch.setattr(machine, "list_gpus", asked)
    found = machine_factors(kind="cpu")
    assert found["hardware.kind"] == "cpu"
    with pytest.raises(AssertionError, match="driver"):
        machine_factors(kind="cuda")


# C12

KINDS: dict[str, dict[str, Any]] = {
    "A100": {"hardware.gpus": ["A100"], "hardware.gpu_architectures": ["sm_80"]},
    "H100": {"hardware.gpus": ["H100"], "hardware.gpu_architectures": ["sm_90"]},
    "B200": {"hardware.gpus": ["B200"], "hardware.gpu_architectures": ["sm_120"]},
    "driver": {
        "hardware.gpus": ["H100"],
        "hardware.gpu_architectures": ["sm_90"],
        "hardware.gpu_driver": "580.1",
    },
    "CUDA 12.8": {"software.cuda": "12.8"},
    "CUDA 13": {"software.cuda": "13.0"},
    "Triton": {"software.triton": "triton 3.10.0"},
    "AVX2": {"hardware.cpu_isa": ["avx2"]},
    "AVX-512": {"hardware.cpu_isa": ["avx2", "avx512f", "avx512vl"]},
}


def test_c12_each_kind_of_node_has_its_own_entry_beside_the_others(node: Node) -> None:
    """A pool of all of them with one directory: nobody takes, and nobody drives out, another's."""
    published = {name: node.start(**kind) for name, kind in KINDS.items()}
    assert {outcome.status for outcome in published.values()} == {"miss"}
    assert len({outcome.key for outcome in published.values()}) == len(KINDS)
    again = {name: node.start(**kind) for name, kind in KINDS.items()}
    assert {outcome.status for outcome in again.values()} == {"hit"}
    assert {name: o.key for name, o in again.items()} == {
        name: o.key for name, o in published.items()
    }


def test_c12_a_cpu_of_fewer_instruction_sets_takes_nothing_and_says_why(node: Node) -> None:
    node.start(**KINDS["AVX-512"])
    other = node.start(**KINDS["AVX2"])
    assert other.status == "miss"
    assert other.differing == [
        "hardware.cpu_isa: lacks avx512f avx512vl here, has avx512f avx512vl there"
    ]
