"""Several ranks in one process, each in a thread, or each in a process of its own; and their model.

Each rank has a model of its own that takes slices of the checkpoint's tensors, as engines do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastload_common.config import Settings, load_settings
from fastload_common.load.session import LoadSession, RankPlace, WeightSource

Weights = Iterable[tuple[str, torch.Tensor]]


class ThreadGroup:
    """Ranks that are threads of one process. Implements `RankGroup` for each of them."""

    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self.size = rank, board.size
        self._board = board

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._board.gather(self.rank, data)


class Board:
    """Where the threads of a group meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._rows: list[bytes] = [b""] * size

    def group(self, rank: int) -> ThreadGroup:
        return ThreadGroup(rank, self)

    def gather(self, rank: int, data: bytes) -> list[bytes]:
        self._rows[rank] = data
        self._barrier.wait(30)
        rows = list(self._rows)
        self._barrier.wait(30)
        return rows


class FileGroup:
    """Ranks that are processes and share a directory. Implements `RankGroup`."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._directory = directory
        self._round = 0

    def all_gather(self, data: bytes) -> list[bytes]:
        self._round += 1
        own = self._directory / f"{self._round}.{self.rank}"
        draft = self._directory / f"draft.{self.rank}"
        draft.write_bytes(data)
        draft.rename(own)
        return [self._read(self._directory / f"{self._round}.{k}") for k in range(self.size)]

    @staticmethod
    def _read(path: Path) -> bytes:
        end_s = time.monotonic() + 60
        while not path.exists():
            if time.monotonic() > end_s:
                raise TimeoutError(f"no {path.name}")
            time.sleep(0.002)
        return path.read_bytes()


@dataclass
class SlicedModel:
    """Takes what a rank of a tensor-parallel model takes: halves of rows or columns, or all."""

    rank: int
    size: int
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    fail_at: str | None = None
    error: BaseException | None = None

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kind = name.rpartition(".")[2]
        if kind == "mine":  # whole tensors of one rank, as experts are
            owner = int(name.split(".")[-2]) % self.size
            return tensor if owner == self.rank else tensor[:0]
        dim = {"rows": 0, "columns": 1}.get(kind)
        if dim is None:
            return tensor
        share = tensor.shape[dim] // self.size
        return tensor.narrow(dim, share * self.rank, share)

    def load_weights(self, weights: Weights) -> set[str]:
        for name, tensor in weights:
            if name == self.fail_at and self.error is not None:
                raise self.error
            source = self.part(name, tensor)
            target = torch.full(tuple(source.shape), 7, dtype=source.dtype)
            target.copy_(source)
            self.held[name] = target
        return set(self.held)

    def faults(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """The names of what is not what it must be."""
        return [
            name
            for name, tensor in tensors.items()
            if name not in self.held or not torch.equal(self.held[name], self.part(name, tensor))
        ]


def make_tensors(layers: int = 3, width: int = 96, size: int = 8) -> dict[str, torch.Tensor]:
    """A checkpoint with tensors of all kinds, of odd places."""
    generator = torch.Generator().manual_seed(3)
    made = {}
    for layer in range(layers):
        made[f"layers.{layer}.norm"] = torch.randn(width + 1, generator=generator)
        made[f"layers.{layer}.rows"] = torch.randn(width, width, generator=generator)
        made[f"layers.{layer}.columns"] = torch.randn(width, 2 * width, generator=generator)
        made[f"layers.{layer}.bf.columns"] = torch.randn(width, width).to(torch.bfloat16)
        for expert in range(size):
            made[f"layers.{layer}.{expert}.mine"] = torch.randn(5, width, generator=generator)
    return made


def settings_of(**more: Any) -> Settings:
    extra = {"progress": "off", "chunk_bytes": "64KiB", "memory_bytes": "2MiB"}
    return load_settings({**extra, **more}, {})


@dataclass
class Outcome:
    """How one rank's load ended."""

    rank: int
    model: SlicedModel
    session: LoadSession | None = None
    error: BaseException | None = None
    ended_s: float = 0.0

    @property
    def report(self) -> Any:
        assert self.session is not None
        return self.session.report


Consume = Callable[[SlicedModel], Callable[[Weights], object]]


def load_ranks(
    uri: str,
    size: int,
    settings: Settings | Sequence[Settings],
    *,
    models: Sequence[SlicedModel] | None = None,
    consume: Consume = lambda model: model.load_weights,
    timeout_s: float = 60,
    **options: Any,
) -> list[Outcome]:
    """Load by so many ranks, each in a thread."""
    board = Board(size)
    outcomes = [
        Outcome(k, models[k] if models is not None else SlicedModel(k, size)) for k in range(size)
    ]

    def work(rank: int) -> None:
        outcome = outcomes[rank]
        own = settings if isinstance(settings, Settings) else settings[rank]
        place = RankPlace("test", "1", rank, size, rank, size)
        try:
            outcome.session = LoadSession(
                [WeightSource(uri)], own, place, group=board.group(rank), **options
            )
            with outcome.session as session:
                session.load(None, consume(outcome.model))
        except BaseException as error:
            outcome.error = error
        outcome.ended_s = time.monotonic()

    threads = [threading.Thread(target=work, args=(k,), name=f"rank-{k}") for k in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads), "a rank did not end"
    return outcomes
