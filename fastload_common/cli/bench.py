"""The command ``fastload bench``: how fast this machine reads what stands under a URI."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload_common.checkpoint.patterns import matches_any
from fastload_common.cli.output import print_json, show, table
from fastload_common.cli.settings import AsJson, SetOption, Uri, settings_from
from fastload_common.clock import Clock, SystemClock
from fastload_common.config import Settings
from fastload_common.errors import ObjectMissingError
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange
from fastload_common.source.uri import is_file_uri
from fastload_common.units import GIB, format_size

if TYPE_CHECKING:
    from fastload_common.source.base import ListedObject, ObjectSource

__all__ = ["BenchResult", "bench", "measure"]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One reading of everything.

    Attributes:
        cpu_s: CPU seconds of this process, all threads.
        transfer: `TransferStats.snapshot`.
    """

    uri: str
    objects: int
    size_bytes: int
    wall_s: float
    cpu_s: float
    peak_staging_bytes: int
    concurrency: int
    chunk_bytes: int
    transfer: dict[str, Any]

    @property
    def gib_per_s(self) -> float:
        return self.size_bytes / GIB / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_s / (self.size_bytes / GIB) if self.size_bytes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "uri": self.uri,
            "objects": self.objects,
            "size_bytes": self.size_bytes,
            "wall_s": round(self.wall_s, 6),
            "gib_per_s": round(self.gib_per_s, 6),
            "cpu_s": round(self.cpu_s, 6),
            "cpu_s_per_gib": round(self.cpu_s_per_gib, 6),
            "peak_staging_bytes": self.peak_staging_bytes,
            "concurrency": self.concurrency,
            "chunk_bytes": self.chunk_bytes,
            **self.transfer,
        }


def bench(uri: Uri, assignments: SetOption = None, as_json: AsJson = False) -> None:
    """Read everything under a URI into memory and print how fast that went."""
    from fastload_common.source.registry import open_source

    settings = settings_from(assignments)
    with contextlib.closing(open_source(uri, settings)) as source:
        result = measure(source, settings, SystemClock())
    if as_json:
        print_json(result.as_dict())
    else:
        _print(result)


def measure(source: ObjectSource, settings: Settings, clock: Clock) -> BenchResult:
    """Read every object once into staging memory and drop it. The listing is not timed.

    Raises:
        ObjectMissingError: nothing to read.
        SourceError: a read failed for good.
    """
    from fastload_common.load.request import RankPlace
    from fastload_common.load.sizes import choose_sizes
    from fastload_common.staging.arena import Arena
    from fastload_common.transfer.fetcher import Fetcher
    from fastload_common.transfer.stats import TransferStats

    objects = [item for item in source.list() if _wanted(item, settings.ignore_patterns)]
    if not objects:
        raise ObjectMissingError(
            f"{source.root}: nothing to read", hint="see what stands there with your S3 tool"
        )
    total_bytes = sum(item.object_id.size_bytes for item in objects)
    sizes = choose_sizes(settings, RankPlace(), total_bytes, remote=not is_file_uri(source.root))
    chunks = _chunks(objects, sizes.chunk_bytes)
    arena = Arena(sizes.chunk_bytes, min(sizes.slots, len(chunks)))
    stats = TransferStats()
    size_bytes = 0
    policy = sizes.policy(settings)
    started_s, started_cpu_s = clock.monotonic_s(), clock.process_cpu_s()
    with contextlib.closing(arena), Fetcher(source, arena, policy, clock, stats) as fetcher:
        for filled in fetcher.fetch(chunks):
            size_bytes += len(filled.data)
            filled.release()
        wall_s = clock.monotonic_s() - started_s
    # After the receivers have ended: only then their seconds count.
    cpu_s = clock.process_cpu_s() - started_cpu_s
    return BenchResult(
        uri=source.root,
        objects=len(objects),
        size_bytes=size_bytes,
        wall_s=wall_s,
        cpu_s=cpu_s,
        peak_staging_bytes=arena.peak_leased_bytes,
        concurrency=sizes.concurrency,
        chunk_bytes=sizes.chunk_bytes,
        transfer=stats.snapshot(),
    )


def _wanted(item: ListedObject, ignore_patterns: Sequence[str]) -> bool:
    return item.object_id.size_bytes > 0 and not matches_any(item.key, ignore_patterns)


def _chunks(objects: Sequence[ListedObject], chunk_bytes: int) -> list[Chunk]:
    """All bytes of all objects, cut so that each piece fits a slot."""
    return [
        Chunk(item.object_id, byte_range, byte_range.size_bytes)
        for item in objects
        for byte_range in ByteRange(0, item.object_id.size_bytes).pieces(chunk_bytes)
    ]


def _print(result: BenchResult) -> None:
    numbers = result.transfer
    printed = table("measured", "value")
    printed.add_row("read", f"{result.objects} objects, {format_size(result.size_bytes)}")
    printed.add_row("time", f"{result.wall_s:.3f} s")
    printed.add_row("speed", f"{result.gib_per_s:.3f} GiB/s")
    printed.add_row("CPU", f"{result.cpu_s_per_gib:.3f} s/GiB")
    printed.add_row(
        "requests",
        f"{numbers['requests']} of at most {format_size(result.chunk_bytes)}, "
        f"{result.concurrency} in flight, {numbers['retries']} retries, "
        f"{numbers['new_connections']} connections",
    )
    for name, key in (("first byte", "first_byte_s"), ("whole request", "total_s")):
        times = ", ".join(f"{k} {v * 1000:.1f}" for k, v in numbers[key].items())
        printed.add_row(name, f"{times} ms")
    for kind, count in numbers["errors"].items():
        printed.add_row(kind, f"{count} times, asked again")
    printed.add_row("staging", f"{format_size(result.peak_staging_bytes)} at most")
    show(result.uri, printed)
