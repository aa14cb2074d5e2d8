"""The commands ``fastload cache``: keys, entries, and what moves them between node and S3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastload_common.cli import cache_key
from fastload_common.cli.cache_key import read_factors
from fastload_common.cli.output import print_json, show, table
from fastload_common.cli.settings import AsJson, SetOption, settings_from
from fastload_common.errors import ConfigError, FastloadError
from fastload_common.units import format_size, parse_size

if TYPE_CHECKING:
    from fastload_common.compile_cache.manifest import Manifest
    from fastload_common.compile_cache.stores.base import Sighting, Store
    from fastload_common.compile_cache.stores.node import NodeStore
    from fastload_common.compile_cache.stores.s3 import S3Store
    from fastload_common.compile_cache.stores.tiered import TieredStore

__all__ = ["app"]

app = typer.Typer(help="What engines compiled: keys, entries, stores.", no_args_is_help=True)

Keys = Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="First digits do.")]
_SHORT = 16


app.command("key")(cache_key.key)


@app.command("list")
def list_(assignments: SetOption = None, as_json: AsJson = False) -> None:
    """List the entries of each store, also those that are of no use here."""
    found = [_facts(store, seen) for store in _stores(_open(assignments)) for seen in store.look()]
    if as_json:
        print_json(found)
        return
    names = ("key", "engine", "files", "size", "signed", "fault", "store")
    rows = table(*names, right=("files", "size"))
    for row in found:
        short, fault, store = row["key"][:_SHORT], row["fault"], row["store"]
        if row["files"] is None:
            rows.add_row(short, "", "", "", "", fault, store)
            continue
        engine = f"{row['engine']} {row['engine_version']}"
        size = format_size(row["content_bytes"])
        rows.add_row(short, engine, str(row["files"]), size, row["signed"], fault, store)
    show(rows)


@app.command("show")
def show_(key: str, assignments: SetOption = None, as_json: AsJson = False) -> None:
    """Show one entry: its factors, files, and the paths that it is bound to."""
    store, seen = _find(_open(assignments), key)
    manifest = _readable(store, seen)
    found = _facts(store, seen) | {
        "factors": manifest.factors,
        "bound": manifest.bound,
        "blob": {"sha256": manifest.blob_sha256, "bytes": manifest.blob_bytes},
        "content": {f"{f.root}/{f.name}": f.size_bytes for f in manifest.files},
    }
    if as_json:
        print_json(found)
        return
    rows = table("what", "value")
    for name in ("key", "store", "signed", "fault", "files", "content_bytes", "bound", "factors"):
        value = found[name]
        if isinstance(value, dict):
            for inner, text in sorted(value.items()):
                rows.add_row(inner, text if isinstance(text, str) else json.dumps(text))
        else:
            rows.add_row(name, str(value))
    show(rows)


@app.command()
def diff(one: str, other: str, assignments: SetOption = None) -> None:
    """Say in which factors two entries differ; each a key, a JSON file of factors, or - ."""
    from fastload_common.compile_cache.key import diff as words

    stores = None
    found = []
    for text in (one, other):
        if text == "-" or Path(text).is_file():
            found.append(read_factors(text))
            continue
        stores = stores or _open(assignments)
        found.append(_readable(*_find(stores, text)).factors)
    lines = [line.replace(" here, ", " | ").removesuffix(" there") for line in words(*found)]
    show(*(lines or ["no difference"]))


@app.command()
def verify(keys: Keys = None, assignments: SetOption = None) -> None:
    """Read entries whole and compare every digest (and signature). Exit code 1 if one is bad."""
    from fastload_common.compile_cache.bundle import check_blob
    from fastload_common.errors import BundleUnfitError

    bad = 0
    for store in _stores(_open(assignments)):
        for key in _chosen(store, keys):
            try:
                entry = store.get(key)
                if entry is not None:
                    with entry:
                        check_blob(entry.manifest, entry.blob)
                print(f"{key[:_SHORT]} {store.name}: {'good' if entry else 'gone'}")
            except (FastloadError, OSError) as error:
                bad += not isinstance(error, BundleUnfitError)
                print(f"{key[:_SHORT]} {store.name}: {error}")
    if bad:
        raise typer.Exit(1)


@app.command()
def pull(keys: Keys = None, assignments: SetOption = None) -> None:
    """Copy entries (all, or those named) from S3 into the directory."""
    node, remote = _both(_open(assignments))
    _copy(remote, node, _chosen(remote, keys))


@app.command()
def push(keys: Keys = None, assignments: SetOption = None) -> None:
    """Copy entries (all, or those named) from the directory to S3."""
    node, remote = _both(_open(assignments))
    _copy(node, remote, _chosen(node, keys))


@app.command()
def prewarm(
    assignments: SetOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what was compiled for other hardware.")
    ] = False,
) -> None:
    """Copy from S3 what this node's hardware can use. For a node agent, at boot."""
    from fastload_common.compile_cache.machine import ThisMachine, fits_machine

    node, remote = _both(_open(assignments))
    machine = ThisMachine()
    wanted = [
        manifest.key
        for manifest in remote.manifests()
        if everything or fits_machine(manifest.factors, machine)
    ]
    _copy(remote, node, wanted)


@app.command()
def gc(
    assignments: SetOption = None,
    max_bytes: Annotated[str | None, typer.Option(help="Instead of the setting.")] = None,
) -> None:
    """Remove what dead writers left in the directory, and the least recently used entries."""
    stores = _open(assignments)
    if stores.node is None:
        raise ConfigError("there is no directory in FASTLOAD_COMPILE_CACHE to clear")
    bound = None if max_bytes is None else parse_size(max_bytes)
    removed, left_bytes = stores.node.collect(bound)
    print(f"removed {removed} entries, {format_size(left_bytes)} left")


def _open(assignments: list[str] | None) -> TieredStore:
    from fastload_common.clock import SystemClock
    from fastload_common.compile_cache.opening import open_stores
    from fastload_common.compile_cache.trust import load_keys

    settings = settings_from(assignments)
    if not settings.compile_cache:
        raise ConfigError(
            "there is no compile cache: FASTLOAD_COMPILE_CACHE is not set",
            hint="set it, or give --set compile_cache=/directory,s3://bucket/prefix",
        )
    keys = load_keys(settings.compile_cache_signing_key_file)
    return open_stores(settings, keys, SystemClock())


def _stores(stores: TieredStore) -> list[Store]:
    return [store for store in (stores.node, stores.remote) if store is not None]


def _both(stores: TieredStore) -> tuple[NodeStore, S3Store]:
    if stores.node is None or stores.remote is None:
        raise ConfigError(
            "this needs a directory and a prefix in S3",
            hint="FASTLOAD_COMPILE_CACHE=/directory,s3://bucket/prefix",
        )
    return stores.node, stores.remote


def _chosen(store: Store, wanted: list[str] | None) -> list[str]:
    keys = store.keys()
    if not wanted:
        return keys
    return [key for key in keys if any(key.startswith(text.lower()) for text in wanted)]


def _find(stores: TieredStore, text: str) -> tuple[Store, Sighting]:
    """The nearest entry of use; else the nearest one."""
    found: list[tuple[Store, Sighting]] = []
    for store in _stores(stores):
        chosen = _chosen(store, [text])
        if len(chosen) > 1:
            raise ConfigError(
                f"{text} are the first digits of {len(chosen)} keys", hint="give more"
            )
        found += [(store, seen) for seen in store.look(chosen)]
    if not found:
        raise ConfigError(f"no entry has the key {text}", hint="fastload cache list")
    return min(found, key=lambda each: (each[1].manifest is None, bool(each[1].fault)))


def _readable(store: Store, seen: Sighting) -> Manifest:
    if seen.manifest is None:
        raise ConfigError(
            f"the entry {seen.key[:_SHORT]} in {store.name} cannot be shown: {seen.fault}",
            hint="fastload cache verify says why",
        )
    return seen.manifest


def _copy(source: Store, target: Store, keys: list[str]) -> None:
    from fastload_common.compile_cache.bundle import check_blob
    from fastload_common.compile_cache.stores.base import Package

    there = set(target.keys())
    failed = 0
    for key in keys:
        if key in there:
            print(f"{key[:_SHORT]}: it is there already")
            continue
        try:
            entry = source.get(key)
            if entry is None:
                continue
            with entry:
                check_blob(entry.manifest, entry.blob)
                package = Package(entry.manifest, entry.envelope, entry.blob)
                published = target.put(package)
        except (FastloadError, OSError) as error:
            failed += 1
            print(f"{key[:_SHORT]}: {error}")
            continue
        size = format_size(entry.manifest.blob_bytes)
        print(f"{key[:_SHORT]}: {f'copied, {size}' if published.stored else published.reason}")
    if failed:
        raise typer.Exit(1)


def _facts(store: Store, seen: Sighting) -> dict[str, Any]:
    manifest = seen.manifest
    found = {"key": seen.key, "store": store.name, "fault": seen.fault}
    if manifest is None:
        rest = ("engine", "engine_version", "files", "content_bytes", "signed")
        return found | dict.fromkeys(rest)
    return found | {
        "engine": manifest.factors.get("engine.name", ""),
        "engine_version": manifest.factors.get("engine.version", ""),
        "files": len(manifest.files),
        "content_bytes": manifest.content_bytes,
        "signed": "no" if manifest.signature is None else manifest.signature.key_id,
    }
