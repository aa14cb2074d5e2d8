"""The command ``fastload pull``: from any source to a directory."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastload_common.cli.output import print_json, show, table
from fastload_common.cli.settings import AsJson, SetOption, settings_from
from fastload_common.errors import ConfigError
from fastload_common.units import MIB, format_size

if TYPE_CHECKING:
    from fastload_common.load.progress import Progress
    from fastload_common.pull.records import PullPlan, PullReport

__all__ = ["pull"]


def pull(
    source: Annotated[
        str, typer.Argument(help="oci://registry/repository:tag, s3://bucket/prefix, or a path.")
    ],
    destination: Annotated[Path, typer.Argument(help="A directory that is not there yet.")],
    special: Annotated[
        str,
        typer.Option(
            help="Set-id bits, capabilities, devices and pipes in layers: refuse, drop or keep."
        ),
    ] = "refuse",
    assignments: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """Pull a model, an artifact or an image into a directory; layers are unpacked."""
    from fastload_common.load.cache_root import temporary_root
    from fastload_common.load.progress import make_progress
    from fastload_common.pull import policy
    from fastload_common.pull import pull as pulling

    kinds = {kind: kind for kind in policy.SPECIALS}
    if special not in kinds:
        raise ConfigError(f"--special: expected one of {', '.join(kinds)}, got {special!r}")
    settings = settings_from(assignments)
    shown: list[Progress] = []

    def begin(plan: PullPlan) -> None:
        shown.append(make_progress(settings.progress, plan.size_bytes))

    try:
        report = pulling.pull(
            source,
            destination,
            settings,
            special=kinds[special],
            slots_directory=temporary_root() / "pull",
            advance=lambda size_bytes: shown[0].advance(size_bytes),
            begin=begin,
        )
    except KeyboardInterrupt:
        print("fastload: ended; what has come is kept: the same command goes on", file=sys.stderr)
        raise
    finally:
        for progress in shown:
            progress.close()
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        _print(report)


def _print(report: PullReport) -> None:
    printed = table("pulled", "value")
    printed.add_row("from", report.uri)
    printed.add_row("to", report.destination)
    what = [f"{report.layers} layers"] * (report.layers > 0)
    what += [f"{report.files} files"] * (report.files > 0)
    printed.add_row("what", f"{', '.join(what) or 'nothing'}, {format_size(report.size_bytes)}")
    if report.resumed_bytes:
        printed.add_row("was there already", format_size(report.resumed_bytes))
    if report.layers:
        unpacked = f"{report.entries} entries, {format_size(report.unpacked_bytes)}"
        printed.add_row("unpacked", unpacked)
    printed.add_row(
        "compared with a digest", f"{report.compared} of {report.layers + report.files}"
    )
    if report.left_out:
        printed.add_row("left out", f"{report.left_out} devices and the like")
    if report.not_owned:
        printed.add_row("not given to their owner", f"{report.not_owned}, this user may not")
    if report.streamed_layers:
        printed.add_row("as one stream", f"{report.streamed_layers}: the store serves no ranges")
    speed = report.fetched_bytes / MIB / report.wall_s if report.wall_s > 0 else 0.0
    printed.add_row("time", f"{report.wall_s:.3f} s, {speed:.1f} MiB/s fetched")
    show(printed)
