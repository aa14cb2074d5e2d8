"""Who loads a model together, as the adapter sees it; without the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastload_vllm import compat
from fastload_vllm.group import loading_group

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stands for vLLM: a world, the ranks of this pipeline stage, a parallel configuration."""

    def place(world: int, stage: int, parallel: dict[str, Any] | None) -> None:
        facts = {
            "pipeline_parallel_size": 1,
            "world_size_across_dp": world,
            "enable_elastic_ep": False,
        }
        config = parallel and SimpleNamespace(parallel_config=SimpleNamespace(**facts | parallel))
        groups = {
            name: SimpleNamespace(rank_in_group=0, world_size=size, cpu_group=name)
            for name, size in (("world", world), ("stage", stage))
        }
        names = {
            "CURRENT_CONFIG": config,
            "WORLD_GROUP": groups["world"],
            "TP_GROUP": groups["stage"],
        }
        for name, value in names.items():
            found = SimpleNamespace(get=lambda value=value: lambda: value)
            monkeypatch.setattr(compat, name, found)

    return place


TARGET, DRAFT = SimpleNamespace(runner="auto"), SimpleNamespace(runner="draft")


@pytest.mark.parametrize(
    ("model", "world", "stage", "parallel", "size"),
    [
        (TARGET, 1, 1, {"a": 1}, None),
        (TARGET, 8, 8, {"a": 1}, 8),
        (DRAFT, 8, 8, {"a": 1}, 8),
        # Pipeline stages share tied embeddings; only the last one has a draft model.
        (TARGET, 8, 4, {"pipeline_parallel_size": 2}, 8),
        (DRAFT, 8, 4, {"pipeline_parallel_size": 2}, 4),
        (DRAFT, 2, 1, {"pipeline_parallel_size": 2}, None),
        # A launcher's world of two engines, each of four ranks.
        (TARGET, 8, 4, {"world_size_across_dp": 4}, 4),
        (TARGET, 8, 4, {"enable_elastic_ep": True}, 4),
        (TARGET, 8, 8, None, None),
    ],
)
def test_the_ranks_that_surely_load_the_same_model(
    engine: Callable[..., None],
    model: Any,
    world: int,
    stage: int,
    parallel: dict[str, Any] | None,
    size: int | None,
) -> None:
    engine(world, stage, parallel)
    found = loading_group(model)
    assert (found and found.size) == size


GATHER = """
import json, sys
from types import SimpleNamespace
import torch
from fastload_common.engine.cpu_group import CpuGroup

rank, path = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{path}", rank=rank, world_size=3
)
world = torch.distributed.group.WORLD
group = CpuGroup(SimpleNamespace(rank_in_group=rank, world_size=3, cpu_group=world))
with torch.device("meta"):
    first = group.all_gather(bytes(range(rank * 100)))
    second = group.all_gather(b"")
print(json.dumps([[len(part) for part in first], first[2][150] , [part.hex() for part in second]]))
torch.distributed.destroy_process_group()
"""


def test_bytes_of_any_length_come_in_order(tmp_path: Path) -> None:
    """Over gloo, while the default device is another one, as it is while models are built."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GATHER, str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [json.loads(text) for text in said] == [[[0, 100, 200], 150, ["", "", ""]]] * 3
