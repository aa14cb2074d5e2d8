"""fastload's own settings for a model and a machine.

Most of them are best left alone, since a load finds them out while it runs; then the advice says
what it will find. What it cannot know are places: which disk is local, which bucket has the compile
cache, and how much memory the pod is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastload_common.advise.machine import Machine
from fastload_common.advise.rates import REQUEST_BYTES_PER_S, Rates
from fastload_common.advise.records import Note, Setting, Store
from fastload_common.config import OPTIONS, Settings
from fastload_common.load.request import RankPlace
from fastload_common.load.sizes import LoadSizes, choose_sizes
from fastload_common.load.sizes import Machine as LoadMachine
from fastload_common.units import GIB, MIB, format_size

__all__ = [
    "LoadChoice",
    "Places",
    "grace_s",
    "load_choice",
    "own_notes",
    "own_settings",
    "pod_memory_bytes",
    "stays_in_memory",
]

# As `load.sizes` reckons: a slot for each request, and some for what waits for its consumer.
_SLOT_BYTES = 16 * MIB
_SLACK = 1.25
_DESCRIPTORS = 65_536
_MEMORY_SHARE = 4
_MEMINFO = "/proc/meminfo"
# The cache leaves 15 % of the disk free, for the kubelet.
_CACHE_ROOM = 1.2
_GRACE_S = 15
_VARIABLES = {option.name: option.variable for option in OPTIONS}
_DEFAULTS = {option.name: option.default for option in OPTIONS}
_MOST_REQUESTS = int(next(o.maximum for o in OPTIONS if o.name == "concurrency") or 0)


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are kept, as a container sees it.

    Attributes:
        node_directory: on a local disk of the node.
        compile_prefix: ``s3://bucket/prefix`` of the compile cache, or None where there is none.
    """

    node_directory: str = "/var/cache/fastload"
    compile_prefix: str | None = None


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """How a load on a machine should ask.

    Attributes:
        wanted: requests of 16 MiB that fill the link.
        by_itself: the most that a load takes of itself, all ranks together.
        concurrency, memory_bytes: to be set, for the node; None: leave unset.
        connections: the most in flight with that, all ranks together.
        staging_bytes: what all ranks take with that.
    """

    wanted: int
    by_itself: int
    concurrency: int | None
    memory_bytes: int | None
    connections: int
    staging_bytes: int


def load_choice(machine: Machine, model_bytes: int, ranks: int) -> LoadChoice:
    """Ask the load itself what it would take, and set only what keeps it from filling the link."""
    wanted = math.ceil(machine.link_bytes_per_s / REQUEST_BYTES_PER_S)
    sizes = _sizes(machine, model_bytes, ranks, Settings())
    by_itself = sizes.concurrency * ranks
    # A model of fewer MiB is not worth so many.
    useful = min(wanted, -(-model_bytes // MIB))
    concurrency = memory_bytes = None
    if by_itself < useful:
        concurrency = min(wanted, _MOST_REQUESTS)
        sizes = _sizes(machine, model_bytes, ranks, Settings(concurrency=concurrency))
        # Without memory for them the load would take smaller requests, which fill less.
        enough_bytes = -(-int(concurrency * _SLOT_BYTES * _SLACK) // GIB) * GIB + GIB
        settings = Settings(concurrency=concurrency, memory_bytes=enough_bytes)
        larger = _sizes(machine, model_bytes, ranks, settings)
        if larger.chunk_bytes > sizes.chunk_bytes or larger.concurrency > sizes.concurrency:
            sizes, memory_bytes = larger, enough_bytes
    return LoadChoice(
        wanted,
        by_itself,
        concurrency,
        memory_bytes,
        sizes.concurrency * ranks,
        sizes.memory_bytes * ranks,
    )


def _sizes(machine: Machine, model_bytes: int, ranks: int, settings: Settings) -> LoadSizes:
    """What one rank takes, where the container may have all memory of the machine."""
    memory = f"MemAvailable: {machine.memory_bytes // 1024} kB\n"
    here = LoadMachine(
        machine.vcpus, _DESCRIPTORS, lambda file: memory if str(file) == _MEMINFO else None
    )
    place = RankPlace(local_rank=0, local_world_size=ranks, rank=0, world_size=ranks)
    return choose_sizes(settings, place, model_bytes, machine=here)


def own_settings(
    model_bytes: int,
    machine: Machine,
    ranks: int,
    places: Places,
    rates: Rates,
    store: Store = Store.S3,
) -> tuple[Setting, ...]:
    """The variables to set, and the ones to leave alone."""
    choice = load_choice(machine, model_bytes, ranks)
    return (
        Setting("--load-format", "fastload", f"weights go from {store.place} into the parameters"),
        _concurrency(choice, machine),
        _memory(choice, ranks),
        Setting(
            _VARIABLES["cache_dir"],
            "/cache/fastload",
            "configuration and tokenizer files; some MB, any writable volume (an emptyDir)",
        ),
        _node_cache(model_bytes, machine, places, rates, store),
        _compile_cache(places),
        Setting("HF_HUB_OFFLINE", "1", f"all files come from {store.place}; nothing asks a hub"),
        Setting(
            "terminationGracePeriodSeconds",
            grace_s(),
            f"an upload to the compile cache may take {_DEFAULTS['compile_cache_deadline_s']:g} s "
            "at the end of a pod",
        ),
    )


def grace_s() -> int:
    """What a pod should be given to end: the deadline of an upload, and time for the engine."""
    return math.ceil(float(_DEFAULTS["compile_cache_deadline_s"])) + _GRACE_S


def pod_memory_bytes(model_bytes: int, machine: Machine, ranks: int) -> int:
    """The memory limit above which a load is not bound by it."""
    return _MEMORY_SHARE * load_choice(machine, model_bytes, ranks).staging_bytes


def own_notes(model_bytes: int, machine: Machine, store: Store = Store.S3) -> tuple[Note, ...]:
    """What is unusual about this model on this machine."""
    notes = []
    if 0 < machine.nvme_bytes < model_bytes * _CACHE_ROOM:
        notes.append(
            f"the local disks ({format_size(machine.nvme_bytes)}) do not hold the model "
            f"({format_size(model_bytes)}) and room for another: each start reads from {store}"
        )
    if machine.network_cards > 1:
        notes.append(
            f"{machine.name} has {machine.network_cards} network cards; a pod's address is on the "
            f"first: {machine.gbps / machine.network_cards:g} of {machine.gbps:g} Gbit/s count"
        )
    return tuple(notes)


def _concurrency(choice: LoadChoice, machine: Machine) -> Setting:
    name = _VARIABLES["concurrency"]
    link = (
        f"{choice.wanted} requests of 16 MiB fill {machine.gbps / machine.network_cards:g} Gbit/s"
    )
    if choice.concurrency is None:
        why = f"left to the load: {link}, and it goes up to {choice.by_itself} by itself"
        return Setting(name, None, why)
    return Setting(
        name, choice.concurrency, f"{link}, and by itself it stops at {choice.by_itself}"
    )


def _memory(choice: LoadChoice, ranks: int) -> Setting:
    name = _VARIABLES["memory_bytes"]
    size = format_size(choice.staging_bytes)
    limit = format_size(_MEMORY_SHARE * choice.staging_bytes)
    share = f"for {_ranks(ranks)}; give the pod {limit} or more, a load takes a quarter at most"
    if choice.memory_bytes is None:
        return Setting(name, None, f"left to the load: at most {size} {share}")
    return Setting(name, choice.memory_bytes, f"so many requests need {size} {share}")


def stays_in_memory(model_bytes: int, machine: Machine) -> bool:
    """Whether the kernel may well still have it when the next pod starts: half of the memory."""
    return model_bytes <= machine.memory_bytes // 2


def _node_cache(
    model_bytes: int, machine: Machine, places: Places, rates: Rates, store: Store
) -> Setting:
    name = _VARIABLES["node_cache"]
    if machine.nvme_bytes < model_bytes * _CACHE_ROOM:
        return Setting(name, None, "no local disk that holds the model: it would be on EBS")
    disk = rates.disk_bytes_per_s(machine)
    speeds = f"the local disks give about {format_size(disk)}/s, {store} {_link(machine)}/s"
    if disk < machine.link_bytes_per_s and not stays_in_memory(model_bytes, machine):
        return Setting(
            name, None, f"{speeds}, and memory does not hold the model: {store} is faster"
        )
    where = (
        "from the kernel's memory as long as it is there"
        if disk < machine.link_bytes_per_s
        else "at any number of ranks"
    )
    return Setting(
        name,
        f"{places.node_directory}/ranges",
        f"the next pod on this node reads from there, {where}; {speeds}",
    )


def _link(machine: Machine) -> str:
    return format_size(machine.link_bytes_per_s)


def _compile_cache(places: Places) -> Setting:
    name = _VARIABLES["compile_cache"]
    directory = f"{places.node_directory}/compile"
    if places.compile_prefix is None:
        return Setting(
            name,
            directory,
            "what one pod compiled the next one on this node takes; with --compile-prefix new "
            "nodes take it from S3",
        )
    return Setting(
        name,
        f"{directory},{places.compile_prefix}",
        "what one pod compiled all others take: the node's directory first, then S3",
    )


def _ranks(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
