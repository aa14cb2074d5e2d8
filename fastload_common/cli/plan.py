"""The command ``fastload plan``: who would read what, without reading a weight."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fastload_common.cli.adapters import load_part
from fastload_common.cli.output import print_json, show, table
from fastload_common.cli.settings import AsJson, SetOption, parse_assignments, settings_from
from fastload_common.errors import ConfigError
from fastload_common.source.oci_reference import is_oci_uri
from fastload_common.source.uri import parse_root
from fastload_common.units import format_size

if TYPE_CHECKING:
    from fastload_common.cli.plan_numbers import NodeNumbers
    from fastload_common.load.plan_job import PlanJob, Planner, RankTrace

__all__ = ["plan"]

_GROUP = "fastload.planners"
# What an engine may know under that name, though it is no directory.
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_EMPTY_STAGE = "needs no weights: the pipeline has more stages than the model can fill"


def plan(
    uri: Annotated[str, typer.Argument(help="s3://, oci:// or a directory.")],
    engine: Annotated[str, typer.Option(help="Whose model code to run.")] = "vllm",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel ranks.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Spread experts over the ranks.")] = False,
    gbps: Annotated[float, typer.Option(min=0.001, help="Link of the node, 10^9 bit/s.")] = 100.0,
    chunk_bytes: Annotated[
        str | None, typer.Option(help="As --set chunk_bytes=: size of one request.")
    ] = None,
    engine_args: Annotated[
        str, typer.Option(metavar="JSON", help="Further arguments of the engine, by its names.")
    ] = "{}",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with a picture.")
    ] = None,
    assignments: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """Print which bytes each rank of a node would read. Reads headers only.

    The engine's own code runs for every rank, on a model without memory, so it must be installed
    here; no device is needed but the one that this build of the engine wants.
    """
    planner = _planner(engine)
    planner.check()
    _check_place(uri, assignments)
    _check_page(html)
    from fastload_common.cli.plan_numbers import numbers_of
    from fastload_common.load.dry_ranks import trace_ranks
    from fastload_common.load.plan_job import PlanJob

    settings = parse_assignments(assignments)
    if chunk_bytes is not None:
        settings["chunk_bytes"] = chunk_bytes
    job = PlanJob(uri, tp, pp, ep, settings, _engine_arguments(engine_args))
    quiet = not logging.getLogger("fastload_common").isEnabledFor(logging.DEBUG)
    with _stoppable(), _progress() as say:
        found = trace_ranks(planner, job, quiet=quiet, say=say)
    traces = [_with_stage_note(trace, pp) for trace in found]
    node = numbers_of(traces, gbps=gbps)
    title = _title(job, engine)
    if html is not None:
        from fastload_common.cli.plan_html import plan_page

        _write_page(html, plan_page(title, node, traces))
    if as_json:
        print_json(_as_dict(job.uri, engine, node, traces))
    else:
        _print(title, node, traces)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Turn the signals that would end the program into an exception: children and files go, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # nothing may cut the clean-up short
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {
        number: handler
        for number in numbers
        if (handler := signal.getsignal(number)) is signal.SIG_DFL
    }
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says what is done on standard error, if somebody looks at it; also from a child."""
    if not sys.stderr.isatty():
        yield lambda line: None
        return
    # The engine's process has its own standard error.
    with open(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as terminal:
        yield lambda line: print(f"fastload: {line}", file=terminal, flush=True)


def _planner(engine: str) -> Planner:
    """The engine's planner.

    Raises:
        ConfigError: there is none of that name.
        EngineUnsupportedError: it cannot be imported.
    """
    return cast("Planner", load_part(_GROUP, engine, "planner", "or name another --engine"))


def _check_place(uri: str, assignments: list[str] | None) -> None:
    """Refuse what cannot be a model's place, before an engine is imported for it.

    Raises:
        ConfigError: it is neither a directory, nor an s3:// or oci:// URI, nor an id of a hub.
        SourceError: an artifact that an engine would have to unpack first; a plan does not.
    """
    if is_oci_uri(uri):
        from fastload_common.load.model_root import open_readable_root

        open_readable_root(uri, settings_from(assignments)).close()
        return
    place = parse_root(uri)
    if isinstance(place, Path) and not place.is_dir() and not _HUB_ID.fullmatch(uri):
        raise ConfigError(
            f"no such directory: {uri}", hint="name a directory, an s3:// or an oci:// URI"
        )


def _check_page(file: Path | None) -> None:
    """Refuse a file that cannot be written, before there is anything to write.

    Raises:
        ConfigError: it is a directory, its directory is not there, or the user may not.
    """
    if file is None:
        return
    if file.is_dir():
        raise ConfigError(f"{file} cannot be written: it is a directory")
    if not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written: there is no directory {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{file} cannot be written: permission denied")


def _write_page(file: Path, page: str) -> None:
    try:
        # Names of files need not be text.
        file.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error


def _title(job: PlanJob, engine: str) -> str:
    # A name of a file may have bytes that are no text: they become escapes.
    place = job.uri.encode("utf-8", "backslashreplace").decode("utf-8")
    stages = f", PP={job.pipeline_parallel}" if job.pipeline_parallel > 1 else ""
    return f"{place} on {engine}, TP={job.tensor_parallel}{stages}" + ", EP" * job.expert_parallel


def _with_stage_note(trace: RankTrace, stages: int) -> RankTrace:
    if stages == 1 or trace.needed_bytes:
        return trace
    return replace(trace, notes=(*trace.notes, _EMPTY_STAGE))


def _engine_arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--engine-args is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--engine-args must be a JSON object, got {type(found).__name__}")
    return found


def _notes(traces: Sequence[RankTrace]) -> dict[str, list[int]]:
    """Each note with its ranks."""
    notes: dict[str, list[int]] = {}
    for trace in traces:
        for note in trace.notes:
            notes.setdefault(note, []).append(trace.rank)
    return notes


def _as_dict(
    uri: str, engine: str, node: NodeNumbers, traces: Sequence[RankTrace]
) -> dict[str, Any]:
    return {
        "uri": uri,
        "engine": engine,
        "model_bytes": node.model_bytes,
        "chunk_bytes": node.chunk_bytes,
        "merge_gap_bytes": node.merge_gap_bytes,
        "gbps": node.gbps,
        "node": {
            "needed_bytes": node.needed_bytes,
            "fetched_bytes": node.fetched_bytes,
            "requests": node.requests,
            "over_read_bytes": node.over_read_bytes,
            "shared_bytes": node.shared_bytes,
            "model_ratio": node.model_ratio,
            "seconds": node.seconds,
            "alone_fetched_bytes": node.alone_fetched_bytes,
            "alone_requests": node.alone_requests,
            "alone_ratio": node.alone_ratio,
            "alone_seconds": node.alone_seconds,
        },
        "ranks": [
            {
                "rank": rank.rank,
                "needed_bytes": rank.needed_bytes,
                "fetched_bytes": rank.fetched_bytes,
                "requests": rank.requests,
                "over_read_bytes": rank.over_read_bytes,
                "received_bytes": rank.received_bytes,
                "alone_fetched_bytes": rank.alone_fetched_bytes,
                "alone_requests": rank.alone_requests,
                "eager": rank.eager,
                "tensors": trace.tensors,
                "copies": trace.transfers,
            }
            for rank, trace in zip(node.ranks, traces, strict=True)
        ],
        "notes": [{"ranks": ranks, "note": note} for note, ranks in _notes(traces).items()],
    }


def _print(title: str, node: NodeNumbers, traces: Sequence[RankTrace]) -> None:
    columns = ("needs", "fetches", "requests", "over-read", "from peers", "alone")
    printed = table("rank", *columns, right=columns)
    for rank in node.ranks:
        printed.add_row(
            str(rank.rank),
            format_size(rank.needed_bytes),
            format_size(rank.fetched_bytes),
            str(rank.requests),
            format_size(rank.over_read_bytes),
            format_size(rank.received_bytes),
            format_size(rank.alone_fetched_bytes),
        )
    printed.add_row(
        "node",
        format_size(node.needed_bytes),
        format_size(node.fetched_bytes),
        str(node.requests),
        format_size(node.over_read_bytes),
        format_size(sum(rank.received_bytes for rank in node.ranks)),
        format_size(node.alone_fetched_bytes),
    )
    show(title, "", printed, "")
    show(
        f"the node fetches {node.model_ratio:.3f} of the model's {format_size(node.model_bytes)}; "
        f"without exchange {node.alone_ratio:.3f}",
        f"at {node.gbps:g} Gbit/s: {node.seconds:.2f} s; without exchange "
        f"{node.alone_seconds:.2f} s",
    )
    for note, ranks in _notes(traces).items():
        who = "all ranks" if len(ranks) == len(traces) else f"ranks {', '.join(map(str, ranks))}"
        show(f"note ({who}): {note}")
