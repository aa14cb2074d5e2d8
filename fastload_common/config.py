"""Every setting of fastload, once: name, unit, default, meaning. The only reader of `os.environ`.

`OPTIONS` is the registry; `Settings` is its frozen result; docs/configuration.md is generated
from it. Precedence: the engine's ``--model-loader-extra-config`` over ``FASTLOAD_*`` variables
over the defaults. An unknown or ill-typed key is an error that names the nearest valid one.
Nothing is ever written back to the environment.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastload_common.config_pull import PULL_OPTIONS
from fastload_common.config_values import ENV_PREFIX, Option, check_value, parse_value
from fastload_common.errors import ConfigError
from fastload_common.units import GIB, KIB, MIB, TIB

__all__ = [
    "ENV_PREFIX",
    "OPTIONS",
    "Option",
    "Settings",
    "environment",
    "load_settings",
    "provide_variables",
]

# Larger ones are slips of the pen; the system's calls for memory and waits refuse them untyped.
_DAY_S = 86_400

OPTIONS: tuple[Option, ...] = (
    Option(
        "concurrency",
        "count",
        None,
        "Requests in flight of all ranks of this node together; each rank gets an equal part, and "
        "at least one. More hides more latency; each takes a connection and a piece of staging "
        "memory. Default: what fills the link, found while loading; at most what CPUs, open files "
        "and memory allow.",
        minimum=1,
        maximum=4096,
    ),
    Option(
        "chunk_bytes",
        "bytes",
        None,
        "Size of one ranged request, and of one piece of staging memory. Larger hides the first "
        "byte better, smaller spreads better. Default: 1 to 16 MiB, by the size of the model and "
        "the memory; smaller requests near the end of a load.",
        minimum=64 * KIB,
        maximum=4 * GIB,
    ),
    Option(
        "memory_bytes",
        "bytes",
        None,
        "Host memory for staging, receiver processes included, of all ranks of this node together; "
        "each rank gets an equal part. Default: what the most requests can use, up to 4 GiB for "
        "each rank; for all ranks at most a quarter of the smallest memory limit.",
        minimum=1 * MIB,
        maximum=16 * TIB,
    ),
    Option(
        "max_bytes_per_s",
        "bytes/s",
        None,
        "Most bytes (not bits) asked for per second by all ranks of this node together, e.g. "
        "500MB; each rank gets an equal part. Unset means no cap.",
        minimum=64 * KIB,
        maximum=1 * TIB,
    ),
    Option(
        "merge_gap_bytes",
        "bytes",
        None,
        "Needed ranges closer than this become one request; the bytes between are read for nothing "
        "and reported as such. Default: 64 KiB to 4 MiB, what costs as much as a request by the "
        "latency that the load observes in its first reads.",
        maximum=1 * TIB,
    ),
    Option(
        "max_attempts",
        "count",
        10,
        "Attempts for one range before its error ends the load.",
        minimum=1,
        maximum=1000,
    ),
    Option(
        "connect_timeout_s",
        "s",
        5.0,
        "Longest wait for a connection.",
        minimum=0.001,
        maximum=_DAY_S,
    ),
    Option(
        "read_timeout_s",
        "s",
        20.0,
        "Longest silence of a connection before the range is asked again on a new one.",
        minimum=0.001,
        maximum=_DAY_S,
    ),
    Option(
        "deadline_s",
        "s",
        None,
        "Longest duration of one load as a whole; unset means no limit.",
        minimum=0.001,
        maximum=7 * _DAY_S,
    ),
    Option(
        "trace",
        "choice",
        "lazy",
        "lazy: record what load_weights copies and read only that. eager: read every tensor whole, "
        "in order (for finding faults).",
        choices=("lazy", "eager"),
    ),
    Option(
        "verify",
        "choice",
        "off",
        "Compare objects with the CRC that the store keeps of them. covered: those that this load "
        "reads completely. full: the rest of the others is read as well, only for that.",
        choices=("off", "covered", "full"),
    ),
    Option(
        "exchange",
        "choice",
        "auto",
        "auto: the ranks of one engine on one host read each byte that several of them need once, "
        "and map each other's staging memory. off: each rank reads alone.",
        choices=("auto", "off"),
    ),
    Option(
        "anonymous",
        "flag",
        False,
        "Send unsigned requests (public buckets). Credentials are then not looked for.",
    ),
    Option(
        "cache_dir",
        "path",
        None,
        "Directory for configuration and tokenizer files, and for artifacts with compressed "
        "layers, which are unpacked there, weights included. Default: "
        "$XDG_CACHE_HOME/fastload, else ~/.cache/fastload, else a directory under $TMPDIR.",
    ),
    Option(
        "cache_max_bytes",
        "bytes",
        2 * GIB,
        "Bound of the configuration and tokenizer files in cache_dir; the least recently used "
        "entries go first. What is unpacked there has no bound but the disk: docs/oci.md.",
        maximum=1024 * TIB,
    ),
    Option(
        "node_cache",
        "path",
        None,
        "Directory on a disk of this node where fetched weights are kept for the next load. Unset: "
        "off.",
    ),
    Option(
        "node_cache_max_bytes",
        "bytes",
        None,
        "Bound of node_cache; the least recently used objects go first. Default: what the disk "
        "has, but for 15 % that stay free.",
        minimum=1 * MIB,
        maximum=1024 * TIB,
    ),
    Option(
        "ignore_patterns",
        "patterns",
        ("original/**", "metal/**", ".git/**", ".cache/**"),
        "Objects never fetched, as comma-separated globs relative to the model's root.",
    ),
    Option(
        "compile_cache",
        "places",
        None,
        "Where compiled artefacts are kept: a directory of this node, s3://bucket/prefix, or both "
        "with a comma between them; the directory is asked first. Unset: off. Read by the engine's "
        "plugin from the environment, whatever the load format is.",
    ),
    Option(
        "compile_cache_signing_key_file",
        "path",
        None,
        "Ed25519 key in PEM. With a private key entries are signed, with it or a public one only "
        "entries signed with that key are used.",
    ),
    Option(
        "compile_cache_max_bytes",
        "bytes",
        10 * GIB,
        "Bound of the directory in compile_cache, and of what one entry may unpack to; the least "
        "recently used entries go first.",
        minimum=1 * MIB,
        maximum=1024 * TIB,
    ),
    Option(
        "compile_cache_deadline_s",
        "s",
        30.0,
        "Longest time that a start waits for S3 in compile_cache, and longest that an upload may "
        "take or the end of the process be delayed by one.",
        minimum=0.1,
        maximum=_DAY_S,
    ),
    Option(
        "compile_cache_force",
        "flag",
        False,
        "Use a directory in compile_cache that other users can write although entries are not "
        "signed: whoever writes there runs code in the engine.",
    ),
    Option(
        "oci_mirrors",
        "registries",
        None,
        "Asked before a registry, in this order: registry=mirror, comma-separated; a mirror is a "
        "host, with a port and a path if need be. What it does not have or refuses comes from the "
        "registry.",
    ),
    Option(
        "oci_plain_http",
        "registries",
        None,
        "Registries and mirrors that are spoken to without TLS, comma-separated hosts with their "
        "ports. Credentials then travel in the open.",
    ),
    Option(
        "oci_platform",
        "text",
        None,
        "Which manifest of an index is read: os/architecture[/variant]. Default: this machine's.",
    ),
    Option("report", "path", None, "Append the report of each load to this file, as JSON lines."),
    Option(
        "progress",
        "choice",
        "auto",
        "Progress display: bar on a terminal, line every 10 s elsewhere (auto), or one of them.",
        choices=("auto", "bar", "lines", "off"),
    ),
    *PULL_OPTIONS,
)

# Kubernetes tells every pod of the Services around it: one that is called fastload, or
# fastload-something, would otherwise keep the engine from starting.
_SERVICE_LINK = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$"
)

_BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one process. Plain data: safe to pickle, holds no secret.

    What a load makes of ``concurrency``, ``chunk_bytes``, ``memory_bytes`` and ``max_bytes_per_s``,
    set or not, is chosen by `fastload_common.load.sizes`.
    """

    concurrency: int | None = _BY_NAME["concurrency"].default
    chunk_bytes: int | None = _BY_NAME["chunk_bytes"].default
    memory_bytes: int | None = _BY_NAME["memory_bytes"].default
    max_bytes_per_s: int | None = _BY_NAME["max_bytes_per_s"].default
    merge_gap_bytes: int | None = _BY_NAME["merge_gap_bytes"].default
    max_attempts: int = _BY_NAME["max_attempts"].default
    connect_timeout_s: float = _BY_NAME["connect_timeout_s"].default
    read_timeout_s: float = _BY_NAME["read_timeout_s"].default
    deadline_s: float | None = _BY_NAME["deadline_s"].default
    trace: str = _BY_NAME["trace"].default
    verify: str = _BY_NAME["verify"].default
    exchange: str = _BY_NAME["exchange"].default
    anonymous: bool = _BY_NAME["anonymous"].default
    cache_dir: Path | None = _BY_NAME["cache_dir"].default
    cache_max_bytes: int = _BY_NAME["cache_max_bytes"].default
    node_cache: Path | None = _BY_NAME["node_cache"].default
    node_cache_max_bytes: int | None = _BY_NAME["node_cache_max_bytes"].default
    ignore_patterns: tuple[str, ...] = _BY_NAME["ignore_patterns"].default
    compile_cache: tuple[str, ...] | None = _BY_NAME["compile_cache"].default
    compile_cache_signing_key_file: Path | None = _BY_NAME["compile_cache_signing_key_file"].default
    compile_cache_max_bytes: int = _BY_NAME["compile_cache_max_bytes"].default
    compile_cache_deadline_s: float = _BY_NAME["compile_cache_deadline_s"].default
    compile_cache_force: bool = _BY_NAME["compile_cache_force"].default
    oci_mirrors: tuple[str, ...] | None = _BY_NAME["oci_mirrors"].default
    oci_plain_http: tuple[str, ...] | None = _BY_NAME["oci_plain_http"].default
    oci_platform: str | None = _BY_NAME["oci_platform"].default
    report: Path | None = _BY_NAME["report"].default
    progress: str = _BY_NAME["progress"].default
    max_concurrent_downloads: int | None = _BY_NAME["max_concurrent_downloads"].default
    max_concurrent_downloads_per_image: int | None = _BY_NAME[
        "max_concurrent_downloads_per_image"
    ].default
    concurrent_download_chunk_size: int | None = _BY_NAME["concurrent_download_chunk_size"].default
    max_concurrent_unpacks: int | None = _BY_NAME["max_concurrent_unpacks"].default
    max_concurrent_unpacks_per_image: int | None = _BY_NAME[
        "max_concurrent_unpacks_per_image"
    ].default
    discard_unpacked_layers: bool = _BY_NAME["discard_unpacked_layers"].default
    max_unpacked_bytes: int | None = _BY_NAME["max_unpacked_bytes"].default

    def __post_init__(self) -> None:
        for option in OPTIONS:
            check_value(option, getattr(self, option.name), shown=option.name)
        memory_bytes, chunk_bytes = self.memory_bytes, self.chunk_bytes
        if memory_bytes is not None and chunk_bytes is not None and memory_bytes < chunk_bytes:
            raise ConfigError(
                f"memory_bytes ({memory_bytes}) is smaller than chunk_bytes ({chunk_bytes})",
                hint="raise FASTLOAD_MEMORY_BYTES or lower FASTLOAD_CHUNK_BYTES",
            )

    def changed(self) -> dict[str, Any]:
        """The settings that are not at their default, for one log line per process."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != _BY_NAME[f.name].default
        }


def environment() -> Mapping[str, str]:
    """The process's environment, for the few callers that must pass it on (read only)."""
    return os.environ


def provide_variables(values: Mapping[str, str]) -> None:
    """Set variables that children and libraries of this process read; what was set is replaced."""
    os.environ.update(values)


def load_settings(
    extra_config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    extra_name: str = "model-loader-extra-config",
) -> Settings:
    """Read the settings of this process.

    Args:
        extra_config: the engine's ``--model-loader-extra-config``; wins over the environment.
        environ: variables to read instead of `os.environ` (tests).
        extra_name: what messages call ``extra_config``.

    Raises:
        ConfigError: unknown key, ill-typed or out-of-range value, or two that contradict.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or _SERVICE_LINK.search(variable):
            continue
        option = _find(variable[len(ENV_PREFIX) :].lower(), shown=variable, prefix=ENV_PREFIX)
        if text.strip() != "":
            values[option.name] = parse_value(option, text, shown=variable)
    for key, value in (extra_config or {}).items():
        option = _find(key, shown=f"{extra_name} key {key!r}", prefix="")
        values[option.name] = parse_value(option, value, shown=f"{extra_name} {key!r}")
    return Settings(**values)


def _find(name: Any, *, shown: str, prefix: str) -> Option:
    option = _BY_NAME.get(name) if isinstance(name, str) else None
    if option is not None:
        return option
    names = [option.variable if prefix else option.name for option in OPTIONS]
    wanted = prefix + name.upper() if prefix else str(name)
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"unknown setting {shown}", hint=f"{hint}valid: {', '.join(names)}")
