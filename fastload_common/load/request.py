"""What is to be loaded, and by which process of which engine. Plain records."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RankPlace", "WeightSource"]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where weights come from.

    Attributes:
        uri: ``s3://bucket/prefix``, ``file:///directory`` or a path.
        prefix: put in front of each tensor's name.
        prefer: which set of weights, if there are two: ``hf``, ``mistral`` or ``auto``.
        patterns: the engine's own globs of weight files, if it has any.
    """

    uri: str
    prefix: str = ""
    prefer: str = "hf"
    patterns: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which engine asks, and which of its processes this is.

    Attributes:
        engine, engine_version: for the report.
        rank, world_size: among all processes that load this model.
        local_rank, local_world_size: among those of this host; memory is divided by it.
    """

    engine: str = "python"
    engine_version: str = "unknown"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
