"""What a dry run is asked and what it finds: plain records, and what an engine must offer.

Imports neither torch nor an engine: the command line and the adapters know each other by this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastload_common.config import Settings
from fastload_common.load.request import RankPlace, WeightSource
from fastload_common.ranges import ObjectId

__all__ = ["Planner", "PlanJob", "PreparedPlan", "RankTrace", "Tracer"]


@dataclass(frozen=True, slots=True)
class PlanJob:
    """A model and a layout.

    Attributes:
        uri: ``s3://bucket/prefix`` or a directory.
        tensor_parallel, pipeline_parallel: ranks of each kind.
        expert_parallel: whether experts are spread over the ranks instead of cut.
        settings: names and values as in the engine's extra configuration.
        engine_arguments: further arguments of the engine, by its own names.
    """

    uri: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank would read.

    Attributes:
        rank: of those that load the model.
        objects: the shards, sorted by URI; the same for every rank.
        data_starts: for each object, where its header ends.
        needs: what it needs of them, encoded (`plan.needs`), near ranges merged.
        exact: the same with the gaps left out.
        shared: whether these are told to the peers; a rank that reads whole tensors one after
            the other reads alone.
        model_bytes: of all tensors.
        needed_bytes: of all its reads.
        chunk_bytes, merge_gap_bytes: with which it would plan.
        alone_fetched_bytes, alone_requests: what it would fetch without peers.
        early_needed_bytes, early_fetched_bytes, early_requests: of these, what is read while
            tracing, for a value; never shared.
        tensors, transfers: counts.
        notes: what could not be known without the weights, and what was assumed.
    """

    rank: int
    objects: tuple[ObjectId, ...]
    data_starts: tuple[int, ...]
    needs: bytes
    exact: bytes
    shared: bool
    model_bytes: int
    needed_bytes: int
    chunk_bytes: int
    merge_gap_bytes: int
    alone_fetched_bytes: int
    alone_requests: int
    early_needed_bytes: int
    early_fetched_bytes: int
    early_requests: int
    tensors: int
    transfers: int
    notes: tuple[str, ...]


class Tracer(Protocol):
    """Given to an engine for one rank."""

    def building(self) -> AbstractContextManager[None]:
        """Inside it models are built without their memory."""
        ...

    def note(self, text: str) -> None:
        """Something that whoever reads the plan should know."""
        ...

    def load(
        self,
        model: Any,
        sources: Iterable[WeightSource],
        consume: Callable[[Any], object],
        place: RankPlace,
        eager_reason: str | None = None,
    ) -> None:
        """Run the model's ``load_weights``, as `LoadSession.load` does; to be called once."""
        ...


class PreparedPlan(Protocol):
    """An engine that knows the model's configuration.

    Attributes:
        settings: in force for the load.
    """

    settings: Settings

    def expected_source(self) -> WeightSource:
        """Where the weights will most likely be read: opened once for all ranks."""
        ...

    def trace(self, rank: int, tracer: Tracer) -> None:
        """Become that rank, build its model, and load it with the tracer. In its own process."""
        ...


class Planner(Protocol):
    """An engine, as entry points of the group ``fastload.planners`` offer it."""

    def check(self) -> None:
        """Raise `EngineUnsupportedError` where the engine is not installed. Quick."""
        ...

    def prepare(self, job: PlanJob) -> PreparedPlan:
        """Import the engine and build its configuration. In a process of its own."""
        ...
