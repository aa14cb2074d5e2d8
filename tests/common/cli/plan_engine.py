"""An engine of the tests for ``fastload plan`` that divides two matrices. Not a test itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from fastload_common.config import Settings, load_settings
from fastload_common.load.plan_job import PlanJob, Tracer
from fastload_common.load.request import RankPlace, WeightSource

ROWS, COLUMNS = 512, 1024
MATRIX_BYTES = ROWS * COLUMNS * 4
NORM_BYTES = COLUMNS * 4
MODEL_BYTES = 2 * MATRIX_BYTES + NORM_BYTES + 4

Weights = Iterable[tuple[str, torch.Tensor]]


class Model(torch.nn.Module):
    """One matrix divided by rows, one by columns, a norm that each rank has, a scalar."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.up = torch.nn.Parameter(torch.empty(ROWS // ranks, COLUMNS))
        self.down = torch.nn.Parameter(torch.empty(ROWS, COLUMNS // ranks))
        self.norm = torch.nn.Parameter(torch.ones(COLUMNS))
        self.scale = torch.nn.Parameter(torch.zeros(()))
        # An engine that builds its tables while it loads needs real ones.
        self.table = torch.arange(8)

    def load_weights(self, weights: Weights) -> None:
        assert self.up.is_meta
        assert self.table[3].item() == 3
        for name, tensor in weights:
            if name in ("up", "down"):
                parameter = getattr(self, name)
                dim = 0 if name == "up" else 1
                length = parameter.shape[dim]
                tensor = tensor.narrow(dim, self.rank * length, length)
            getattr(self, name).data.copy_(tensor)


class AsksForValues(Model):
    def load_weights(self, weights: Weights) -> None:
        super().load_weights(
            (name, torch.full((), tensor.item()) if name == "scale" else tensor)
            for name, tensor in weights
        )


class EmptyStage(Model):
    """Only the first rank has parameters of the checkpoint."""

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if not self.rank and name == "norm":
                self.norm.data.copy_(tensor)


class CannotBeTraced(Model):
    def load_weights(self, weights: Weights) -> None:
        for name, _ in weights:
            if name == "norm":
                raise RuntimeError("values of zero make no sense here")


class OtherShape(Model):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.norm = torch.nn.Parameter(torch.ones(COLUMNS + 1))


class CannotBeBuilt(Model):
    def __init__(self, rank: int, ranks: int) -> None:
        raise ZeroDivisionError("no heads are left")


class Engine:
    """A planner; see `fastload_common.load.plan_job`."""

    def __init__(
        self, model: Callable[[int, int], Model] = Model, eager: str | None = None
    ) -> None:
        self.model = model
        self.eager = eager

    def check(self) -> None:
        pass

    def prepare(self, job: PlanJob) -> Prepared:
        print("engines print to standard output")
        return Prepared(self, job)


class Prepared:
    def __init__(self, engine: Engine, job: PlanJob) -> None:
        self.engine, self.job = engine, job
        self.settings: Settings = load_settings(dict(job.settings), extra_name="--set")

    def expected_source(self) -> WeightSource:
        return WeightSource(self.job.uri)

    def trace(self, rank: int, tracer: Tracer) -> None:
        ranks = self.job.ranks
        with tracer.building():
            model = self.engine.model(rank, ranks)
            tracer.load(
                model,
                [WeightSource(self.job.uri)],
                model.load_weights,
                RankPlace(engine="the test's engine", rank=rank, world_size=ranks),
                self.engine.eager,
            )


def write_model(directory: Path) -> Path:
    """Its checkpoint: two shards and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    ones = np.ones((ROWS, COLUMNS), dtype=np.float32)
    first = {"up": ones, "norm": ones[0].copy()}
    second = {"down": ones, "scale": np.full((), 7, dtype=np.float32)}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensors in zip(names, (first, second), strict=True):
        save_file(tensors, directory / name)
    index = dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory
