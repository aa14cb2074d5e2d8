"""The whole advice for one model, one image and one machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fastload_common.advise.image import Image
from fastload_common.advise.machine import Machine
from fastload_common.advise.own import Places, own_notes, own_settings
from fastload_common.advise.phases import image_phases, model_phases
from fastload_common.advise.rates import Rates
from fastload_common.advise.records import Note, Phase, Setting, Store
from fastload_common.advise.runai import runai_notes, runai_settings
from fastload_common.advise.soci import soci_notes, soci_settings
from fastload_common.errors import ConfigError

__all__ = ["Advice", "Total", "advise"]

_UNPACKS_OF_AL2023 = 12


@dataclass(frozen=True, slots=True)
class Total:
    """The phases of one kind of start together."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set, and what to expect.

    Attributes:
        fastload, runai, soci: settings; empty where the model or the image is not known.
        phases: parts of a start.
        totals: those that follow one another, for a new node and for one that has run a pod.
        notes: what the numbers do not say.
    """

    fastload: tuple[Setting, ...]
    runai: tuple[Setting, ...]
    soci: tuple[Setting, ...]
    phases: tuple[Phase, ...]
    totals: tuple[Total, ...]
    notes: tuple[Note, ...]


def advise(
    machine: Machine,
    *,
    model_bytes: int | None,
    image: Image | None,
    tensor_parallel: int,
    places: Places,
    rates: Rates,
    store: Store = Store.S3,
) -> Advice:
    """Choose the settings and reckon the seconds.

    Args:
        model_bytes: all weight files; None: nothing is said about loading.
        image: None: SOCI's settings without the image's own, and no seconds for it.
        tensor_parallel: ranks on the node.
        store: where the model is.

    Raises:
        ConfigError: no bytes, no ranks, or more ranks than GPUs.
    """
    _check(machine, model_bytes, tensor_parallel)
    soci = soci_settings(image, machine)
    phases: list[Phase] = []
    notes: list[Note] = []
    own: tuple[Setting, ...] = ()
    runai: tuple[Setting, ...] = ()
    if image is not None:
        phases += image_phases(image, machine, rates, **_limits(soci))
    if model_bytes is not None:
        own = own_settings(model_bytes, machine, tensor_parallel, places, rates, store)
        runai = runai_settings(model_bytes, tensor_parallel)
        keeps = any(setting.name.endswith("NODE_CACHE") and setting.value for setting in own)
        phases += model_phases(
            model_bytes, machine, rates, ranks=tensor_parallel, node_cache=keeps, store=store
        )
        notes += own_notes(model_bytes, machine, store) + runai_notes(model_bytes, machine)
        if store is Store.REGISTRY:
            notes.append("Run:ai's streamer reads no registry: its settings are for a copy in S3")
            notes.append(
                "if layers with weights are compressed, a load unpacks the artifact first: "
                "FASTLOAD_CACHE_DIR then needs twice its size, on a disk that stays (docs/oci.md)"
            )
    notes += soci_notes(image, machine)
    notes += _slow_disk(phases, store)
    return Advice(own, runai, soci, tuple(phases), _totals(phases, store), tuple(notes))


def _check(machine: Machine, model_bytes: int | None, tensor_parallel: int) -> None:
    if model_bytes is not None and model_bytes < 1:
        raise ConfigError(f"expected a model of at least one byte, got {model_bytes}")
    if tensor_parallel < 1:
        raise ConfigError(f"--tp: expected at least 1, got {tensor_parallel}")
    if machine.gpus and tensor_parallel > machine.gpus:
        raise ConfigError(
            f"--tp {tensor_parallel}: {machine.name} has {machine.gpus} GPUs",
            hint="a smaller --tp, or a larger machine",
        )


def _limits(soci: tuple[Setting, ...]) -> dict[str, int]:
    values = {setting.name: setting.value for setting in soci}
    unpacks = values["max_concurrent_unpacks_per_image"]
    return {
        "downloads": int(values["max_concurrent_downloads_per_image"] or 1),
        "unpacks": _UNPACKS_OF_AL2023 if unpacks is None else int(unpacks),
    }


def _slow_disk(phases: list[Phase], store: Store) -> list[Note]:
    seconds = {phase.name: phase.seconds for phase in phases}
    disk_s = seconds.get("weights, from the node's disk")
    store_s = seconds.get(f"weights, from {store}")
    if disk_s is None or store_s is None or disk_s <= store_s:
        return []
    return [
        f"once the kernel has dropped the model, the node cache takes {disk_s:.1f} s, "
        f"{store} {store_s:.1f}: leave it unset if pods of one node start far apart"
    ]


def _totals(phases: list[Phase], store: Store) -> tuple[Total, ...]:
    seconds = {phase.name: phase.seconds for phase in phases}
    ways = {
        "new node, with these settings": (
            ("image, parallel pull",),
            (f"weights, from {store}",),
            ("compile, from the cache",),
        ),
        "next pod of that node": (
            (
                "weights, from the node's memory",
                "weights, from the node's disk",
                f"weights, from {store}",
            ),
            ("compile, from the cache",),
        ),
    }
    totals = []
    for name, steps in ways.items():
        known = [
            next((seconds[step] for step in choices if step in seconds), None) for choices in steps
        ]
        if None not in known:
            totals.append(Total(name, sum(value for value in known if value is not None)))
    return tuple(totals)
