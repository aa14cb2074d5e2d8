"""What one load did and where its time went: one line for a person, one JSON line for machines.

A `LoadReport` belongs to one rank and one load. It is filled by whoever knows a number, and
frozen by `LoadReport.finish`. `report_fields` is the documented form of the JSON. Knows nothing of
sources, tensors or engines; never holds a secret.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastload_common import __version__
from fastload_common.clock import Clock, SystemClock
from fastload_common.errors import FastloadError
from fastload_common.load.report_fields import PHASES, SCHEMA, SCHEMA_VERSION
from fastload_common.units import GIB, format_size

__all__ = ["PHASES", "SCHEMA", "SCHEMA_VERSION", "LoadReport", "append_line"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Frame:
    """One open phase of one thread."""

    name: str
    started_s: float
    inner_s: float = 0.0


@dataclass
class LoadReport:
    """The report of one load by one rank.

    The clock starts when the object is made. Counters are plain attributes: set or add to
    them from the loading thread. Phases may be timed from any thread.

    Args:
        engine: name of the engine.
        engine_version: its version, or "unknown".
        uri: the model; must be safe to print.
        rank: this process, ``0 <= rank < world_size``.
        settings: settings that differ from their default (`Settings.changed`).
        clock: time; the tests inject theirs.
    """

    engine: str
    engine_version: str
    uri: str
    rank: int
    _: KW_ONLY
    world_size: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    clock: Clock = field(default_factory=SystemClock, repr=False)

    model_bytes: int = 0
    needed_bytes: int = 0
    fetched_bytes: int = 0
    refetched_bytes: int = 0
    hedges: int = 0
    hedges_won: int = 0
    hedge_wasted_bytes: int = 0
    kills: int = 0
    over_read_bytes: int = 0
    merge_gap: Mapping[str, Any] = field(default_factory=dict)
    requests: int = 0
    retries: int = 0
    latency_s: Mapping[str, Any] = field(default_factory=dict)
    new_connections: int = 0
    request_errors: Mapping[str, int] = field(default_factory=dict)
    settled_reads: int = 0
    settled_bytes: int = 0
    eager_reason: str | None = None
    tensors: int = 0
    transfers: int = 0
    verified: Mapping[str, Any] = field(default_factory=dict)
    node: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[str, Any] = field(default_factory=dict)
    node_cache: Mapping[str, Any] = field(default_factory=dict)
    pulled: Mapping[str, Any] = field(default_factory=dict)
    peak_staging_bytes: int = 0

    status: str = field(default="running", init=False)
    error: str | None = field(default=None, init=False)
    wall_s: float = field(default=0.0, init=False)
    cpu_s: float = field(default=0.0, init=False)
    phases_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(PHASES, 0.0), init=False
    )

    def __post_init__(self) -> None:
        self._started_at_s = self.clock.wall_s()
        self._started_s = self.clock.monotonic_s()
        self._started_cpu_s = self.clock.process_cpu_s()
        self._lock = threading.Lock()
        self._open = threading.local()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block as (part of) a phase.

        Times add up. A phase inside another one of the same thread is taken out of the outer
        one, so that the phases of a single-threaded load never sum to more than its duration.

        Raises:
            ValueError: the name is not in `PHASES`.
        """
        self._check(name)
        frames: list[_Frame] = self._open.__dict__.setdefault("frames", [])
        frame = _Frame(name, self.clock.monotonic_s())
        frames.append(frame)
        try:
            yield
        finally:
            frames.pop()
            elapsed_s = self.clock.monotonic_s() - frame.started_s
            self.add_seconds(name, elapsed_s - frame.inner_s)
            if frames:
                frames[-1].inner_s += elapsed_s

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add to a phase what was measured elsewhere. Safe from any thread.

        Raises:
            ValueError: the name is not in `PHASES`.
        """
        self._check(name)
        with self._lock:
            self.phases_s[name] += seconds

    def take_transfer(self, snapshot: Mapping[str, Any]) -> None:
        """Take over the numbers of `TransferStats.snapshot`; a later call replaces them.

        Does not touch ``fetched_bytes``: what arrived twice is no progress.
        """
        self.requests = snapshot["requests"]
        self.retries = snapshot["retries"]
        self.refetched_bytes = snapshot["bytes_refetched"]
        self.hedges = snapshot["hedges"]
        self.hedges_won = snapshot["hedges_won"]
        self.hedge_wasted_bytes = snapshot["hedge_bytes_wasted"]
        self.kills = snapshot["kills"]
        self.new_connections = snapshot["new_connections"]
        self.request_errors = dict(snapshot["errors"])
        self.latency_s = {
            "first_byte": dict(snapshot["first_byte_s"]),
            "total": dict(snapshot["total_s"]),
        }

    def take_exchange(self, fetched_bytes: int, facts: Mapping[str, Any]) -> None:
        """Take over the numbers of the exchange with other ranks, once."""
        self.fetched_bytes += fetched_bytes
        self.node = {**self.node, **facts}

    def finish(self, error: BaseException | None = None) -> None:
        """End the load: freeze its duration and CPU time. A second call changes nothing.

        Args:
            error: what ended the load, or None when it succeeded.
        """
        if self.status != "running":
            return
        self.wall_s = self.clock.monotonic_s() - self._started_s
        self.cpu_s = self.clock.process_cpu_s() - self._started_cpu_s
        self.status = "ok" if error is None else "failed"
        if error is not None:
            # The text of foreign errors is not ours to vouch for: it may hold a signed URL.
            known = isinstance(error, FastloadError)
            self.error = f"{type(error).__name__}: {error}" if known else type(error).__name__

    @property
    def started_s(self) -> float:
        """The clock's reading when the load began."""
        return self._started_s

    def summary_line(self) -> str:
        """One line for the log, without the engine's prefix."""
        seconds = self.wall_s or self.clock.monotonic_s() - self._started_s
        failed = self.status == "failed"
        loaded_bytes = self.fetched_bytes if failed else self.needed_bytes
        speed = _gib(loaded_bytes / seconds) if seconds > 0 else "0 B"
        some = self.hedges or self.kills
        slow = f" ({self.hedges} hedges, {self.kills} slow ones ended)" if some else ""
        head = f"FAILED ({self.error}), read" if failed else "loaded"
        parts = [
            f"fastload: rank {self.rank}/{self.world_size} {head} "
            f"{_gib(loaded_bytes)} of {_gib(self.model_bytes)} from {self.uri} "
            f"in {seconds:.2f} s ({speed}/s)",
            f"{self.requests} requests",
            f"{self.retries} retries" + slow,
            f"{format_size(self.over_read_bytes)} read but not needed",
        ]
        if self.node.get("exchange") == "on":
            received = format_size(self.node.get("received_bytes", 0))
            parts.append(f"{received} from {self.node['ranks'] - 1} other ranks of this host")
            if "node_fetched_bytes" in self.node and self.model_bytes:
                ratio = self.node["node_fetched_bytes"] / self.model_bytes
                parts.append(f"all of them fetched {ratio:.3f} of the model")
        if self.pulled:
            parts.append(_pulled(self.pulled))
        if self.node_cache:
            parts.append(f"{format_size(self.node_cache['read_bytes'])} from the node cache")
        busy = [f"{name} {self.phases_s[name]:.2f}" for name in PHASES if self.phases_s[name] > 0]
        if busy:
            parts.append("seconds: " + " ".join(busy))
        if self.verified:
            numbers = self.verified
            objects = sum(numbers[n] for n in ("compared", "without_checksum", "partly_read"))
            parts.append(f"{numbers['compared']} of {objects} objects compared with their checksum")
        if self.settled_reads:
            parts.append(f"{self.settled_reads} reads while tracing")
        if self.eager_reason:
            parts.append(f"read whole tensors: {self.eager_reason}")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, with exactly the fields of `SCHEMA`, in its order."""
        own = {
            "schema": SCHEMA_VERSION,
            "fastload_version": __version__,
            "started_at": datetime.fromtimestamp(self._started_at_s, UTC).isoformat(
                timespec="milliseconds"
            ),
            "phases_s": {name: round(value, 6) for name, value in self.phases_s.items()},
            "wall_s": round(self.wall_s, 6),
            "cpu_s": round(self.cpu_s, 6),
            "latency_s": dict(self.latency_s),
            "request_errors": dict(self.request_errors),
            "verified": dict(self.verified),
            "merge_gap": dict(self.merge_gap),
            "node": dict(self.node),
            "node_cache": dict(self.node_cache),
            "pulled": dict(self.pulled),
            "devices": dict(self.devices),
            "settings": {name: _plain(value) for name, value in self.settings.items()},
        }
        return {name: own[name] if name in own else getattr(self, name) for name in SCHEMA}

    def to_json(self) -> str:
        """The report as one line of JSON without a newline."""
        return json.dumps(self.as_dict(), ensure_ascii=True, allow_nan=False, default=str)

    def append_to(self, path: Path) -> None:
        """Append the JSON line to a file that other ranks append to as well.

        A failure is one warning: a report never ends a load.
        """
        try:
            line = self.to_json()
        except ValueError as error:
            logger.warning("fastload: the report could not be written to %s: %s", path, error)
            return
        append_line(path, line)

    @staticmethod
    def _check(name: str) -> None:
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}; phases are {', '.join(PHASES)}")


def append_line(path: Path, line: str) -> None:
    """Append a line to a file that other processes append to as well.

    One write to a descriptor opened for appending, so that lines of several processes do
    not mix. A failure is one warning.
    """
    try:
        data = (line + "\n").encode()
        # O_NONBLOCK: a pipe without a reader must fail here, not block the load.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o644)
        try:
            written_bytes = os.write(descriptor, data)
        finally:
            os.close(descriptor)
        if written_bytes != len(data):
            logger.warning(
                "fastload: the report in %s is cut: %d of %d bytes written",
                path,
                written_bytes,
                len(data),
            )
    except (OSError, ValueError) as error:
        logger.warning("fastload: the report could not be written to %s: %s", path, error)


def _gib(size_bytes: float) -> str:
    """GiB with digits that are left for small models, where a rounded 0.0 says nothing."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB / 10 else format_size(size_bytes)


def _pulled(facts: Mapping[str, Any]) -> str:
    size = format_size(facts["fetched_bytes"])
    who = {"found": "before", "waited": "by another process", "pulled": "first"}[facts["state"]]
    return f"{size} of layers pulled in {facts['pull_s']:.2f} s {who}"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
