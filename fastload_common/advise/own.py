"""fastload's own settings for a model and a machine.

Most of them are best left alone, since a load finds them out while it runs; then the advice says
what it will find. What it cannot know are places: which disk is local, which bucket has the compile
cache, and how much memory the pod is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastload_common.advise.machine import Machine
from fastload_common.advise.records import Note, Setting
from fastload_common.config import OPTIONS
from fastload_common.transfer.sizing import choose_concurrency
from fastload_common.units import GIB, MIB, format_size

__all__ = [
    "REQUEST_BYTES_PER_S",
    "Places",
    "chosen_connections",
    "own_notes",
    "own_settings",
    "pod_memory_bytes",
]

REQUEST_BYTES_PER_S = 71 * 1000**2
"""What one connection brings with requests of 16 MiB, 50 ms to the first byte and 90 MB/s; assumed
in `fastload_common.transfer.sizing`, whose sizes rest on it."""

_SLOT_BYTES = 16 * MIB
_SLACK = 1.25
_RANK_MOST_BYTES = 4 * GIB
_MEMORY_SHARE = 4
_DESCRIPTORS = 65_536
# The cache leaves 15 % of the disk free, for the kubelet.
_CACHE_ROOM = 1.2
_GRACE_S = 15
_VARIABLES = {option.name: option.variable for option in OPTIONS}
_DEFAULTS = {option.name: option.default for option in OPTIONS}


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are kept, as a container sees it.

    Attributes:
        node_directory: on a local disk of the node.
        compile_prefix: ``s3://bucket/prefix`` of the compile cache, or None where there is none.
    """

    node_directory: str = "/var/cache/fastload"
    compile_prefix: str | None = None


def chosen_connections(machine: Machine, model_bytes: int, ranks: int) -> int:
    """The most requests in flight that a load takes of itself, all ranks together."""
    most = choose_concurrency(
        cpu_count=machine.vcpus,
        descriptor_limit=_DESCRIPTORS,
        ranks=ranks,
        slots=1 << 20,
        remaining_bytes=model_bytes,
    ).maximum
    return most * ranks


def own_settings(
    model_bytes: int, machine: Machine, ranks: int, places: Places
) -> tuple[Setting, ...]:
    """The variables to set, and the ones to leave alone."""
    return (
        Setting("--load-format", "fastload", "weights go from the bucket into the parameters"),
        _concurrency(model_bytes, machine, ranks),
        Setting(
            _VARIABLES["memory_bytes"],
            None,
            f"left to the load: at most {format_size(_staging_bytes(model_bytes, machine, ranks))} "
            f"for {_ranks(ranks)}, within a quarter of the pod's memory limit: a limit of "
            f"{format_size(pod_memory_bytes(model_bytes, machine, ranks))} or more does not "
            "bound it",
        ),
        Setting(
            _VARIABLES["cache_dir"],
            "/cache/fastload",
            "configuration and tokenizer files; some MB, any writable volume (an emptyDir)",
        ),
        _node_cache(model_bytes, machine, places),
        _compile_cache(places),
        Setting("HF_HUB_OFFLINE", "1", "all files come from the bucket; nothing asks a hub"),
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
    return _MEMORY_SHARE * _staging_bytes(model_bytes, machine, ranks)


def own_notes(model_bytes: int, machine: Machine) -> tuple[Note, ...]:
    """What is unusual about this model on this machine."""
    notes = []
    if 0 < machine.nvme_bytes < model_bytes * _CACHE_ROOM:
        notes.append(
            f"the local disks ({format_size(machine.nvme_bytes)}) do not hold the model "
            f"({format_size(model_bytes)}) and room for another: each start reads from S3"
        )
    if machine.network_cards > 1:
        notes.append(
            f"{machine.name} has {machine.network_cards} network cards; a pod's address is on the "
            f"first: {machine.gbps / machine.network_cards:g} of {machine.gbps:g} Gbit/s count"
        )
    return tuple(notes)


def _concurrency(model_bytes: int, machine: Machine, ranks: int) -> Setting:
    name = _VARIABLES["concurrency"]
    most = chosen_connections(machine, model_bytes, ranks)
    wanted = math.ceil(machine.link_bytes_per_s / REQUEST_BYTES_PER_S)
    link = f"{wanted} requests of 16 MiB fill {machine.gbps / machine.network_cards:g} Gbit/s"
    if wanted <= most:
        return Setting(name, None, f"left to the load: {link}, and it goes up to {most} by itself")
    return Setting(name, wanted, f"{link}, and by itself a load stops at {most}")


def _staging_bytes(model_bytes: int, machine: Machine, ranks: int) -> int:
    each = math.ceil(chosen_connections(machine, model_bytes, ranks) / ranks)
    return min(int(each * _SLOT_BYTES * _SLACK), _RANK_MOST_BYTES) * ranks


def _node_cache(model_bytes: int, machine: Machine, places: Places) -> Setting:
    name = _VARIABLES["node_cache"]
    if machine.nvme_bytes < model_bytes * _CACHE_ROOM:
        return Setting(name, None, "no local disk that holds the model: it would be on EBS")
    return Setting(
        name,
        f"{places.node_directory}/ranges",
        f"{format_size(machine.nvme_bytes)} of local disk: the next pod on this node reads from "
        "there, at any number of ranks",
    )


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
