"""The commands ``fastload node-cache``: what the node's cache of weights holds, and its room."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from fastload_common.cli.output import print_json, show, table
from fastload_common.cli.settings import AsJson, SetOption, settings_from
from fastload_common.errors import ConfigError
from fastload_common.units import format_size, parse_size

if TYPE_CHECKING:
    from fastload_common.range_cache.place import CacheDirectory

__all__ = ["app"]

_NOTHING = "nothing is held yet"

app = typer.Typer(help="Weights that loads have left on this node's disk.", no_args_is_help=True)


@app.command("show")
def show_(assignments: SetOption = None, as_json: AsJson = False) -> None:
    """List the objects that are held, the least recently used first."""
    from fastload_common.range_cache.inspection import known

    directory, is_there = _open(assignments)
    found = [
        {
            "key": one.row.key,
            "uri": None if one.identity is None else one.identity.object_id.uri,
            "etag": None if one.identity is None else one.identity.object_id.etag,
            "object_bytes": 0 if one.identity is None else one.identity.object_id.size_bytes,
            "held_bytes": one.held_bytes,
            "disk_bytes": one.row.size_bytes,
            "used_at": datetime.datetime.fromtimestamp(one.row.used_at_s, datetime.UTC).isoformat(
                timespec="seconds"
            ),
        }
        for one in (known(directory) if is_there else ())
    ]
    if as_json:
        print_json(found)
        return
    if not is_there:
        print(_NOTHING)
        return
    rows = table("object", "held", "of", "on disk", "last used", right=("held", "of", "on disk"))
    for row in found:
        names = ("held_bytes", "object_bytes", "disk_bytes")
        sizes = (format_size(int(row[name] or 0)) for name in names)
        rows.add_row(str(row["uri"] or row["key"]), *sizes, str(row["used_at"]))
    show(str(directory.path), rows)


@app.command()
def gc(
    assignments: SetOption = None,
    max_bytes: Annotated[str | None, typer.Option(help="Instead of the setting.")] = None,
) -> None:
    """Remove the least recently used objects until the bound holds; what is in use stays."""
    directory, is_there = _open(assignments)
    bound = None if max_bytes is None else parse_size(max_bytes)
    if not is_there:
        print(_NOTHING)
        return
    removed, left_bytes = directory.collect(bound)
    print(f"removed {removed} objects, {format_size(left_bytes)} left")


@app.command()
def verify(assignments: SetOption = None) -> None:
    """Read all that is held and compare checksums; what differs is forgotten. Exit code 1 then."""
    from fastload_common.range_cache.inspection import check, known
    from fastload_common.range_cache.own_files import OddFileError

    directory, is_there = _open(assignments)
    if not is_there:
        print(_NOTHING)
        return
    damaged = 0
    for one in list(known(directory)):
        if one.identity is None:
            print(f"{one.row.key}: nobody wrote down what it is")
            continue
        try:
            good_bytes, bad_bytes = check(directory, one.identity)
        except OddFileError as error:
            print(f"{one.identity.object_id.uri}: not used, {error.reason}")
            continue
        damaged += bad_bytes
        said = f", {format_size(bad_bytes)} damaged and forgotten" if bad_bytes else ""
        print(f"{one.identity.object_id.uri}: {format_size(good_bytes)} good{said}")
    if damaged:
        raise typer.Exit(1)


def _open(assignments: list[str] | None) -> tuple[CacheDirectory, bool]:
    """The directory, and whether there is one: it is made by loads, as the user they run as."""
    from fastload_common.clock import SystemClock
    from fastload_common.range_cache.place import CacheDirectory, UnfitError

    settings = settings_from(assignments)
    if settings.node_cache is None:
        raise ConfigError(
            "there is no node cache: FASTLOAD_NODE_CACHE is not set",
            hint="set it, or give --set node_cache=/directory",
        )
    directory = CacheDirectory(settings.node_cache, settings.node_cache_max_bytes, SystemClock())
    try:
        return directory, directory.open(create=False)
    except (UnfitError, OSError) as error:
        raise ConfigError(
            f"the node cache cannot be used: {error}", hint="run it as the user who loads models"
        ) from None
