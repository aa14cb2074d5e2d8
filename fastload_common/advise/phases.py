"""How long the parts of a start should take. Formulas with stated assumptions, no measurement.

Each phase is bytes divided by the slowest of what they pass; the record says which that was. What
is assumed stands in `Rates`, with its reason, and any of it can be replaced by what was measured.

========================  ==========================================================================
image, containerd alone   D = max(all / min(3 connections, link), largest layer / connection);
                          U = all layers one after the other; max(D + u, U), u the largest layer's
image, parallel           D = all / min(connections, link); U = layers over so many unpackers, the
                          largest first, at least unpacked / disk; max(D + u, U)
weights from the store    model / min(link, requests * rate of one, vCPUs * rate of one)
weights from the node     model / min(disk, vCPUs * memory rate); from its memory without the disk
compile                   as assumed; with a hit 1 s + bundle / link
========================  ==========================================================================

Not counted: until the node is there, imports, memory profiling, graph capture and warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastload_common.advise.image import LARGE_LAYER_BYTES, Image
from fastload_common.advise.machine import Machine
from fastload_common.advise.own import load_choice, stays_in_memory
from fastload_common.advise.rates import Rates
from fastload_common.advise.records import Phase, Store
from fastload_common.units import MIB, format_size

__all__ = ["image_phases", "model_phases"]

# containerd downloads three layers at once and unpacks one.
_CONTAINERD_DOWNLOADS = 3
_HIT_S = 1.0
_BUNDLE_BYTES = 15 * MIB


def image_phases(
    image: Image, machine: Machine, rates: Rates, *, downloads: int, unpacks: int
) -> tuple[Phase, ...]:
    """The image: as containerd pulls it by default, and in parallel.

    Args:
        downloads: connections of the parallel pull.
        unpacks: layers that it unpacks at once.
    """
    layers = _layers(image, rates)
    alone = _image(
        "image, containerd's defaults",
        layers,
        machine,
        rates,
        link=min(
            _CONTAINERD_DOWNLOADS * rates.registry_connection_bytes_per_s, machine.link_bytes_per_s
        ),
        layer_bytes_per_s=rates.registry_connection_bytes_per_s,
        unpackers=1,
    )
    link = min(downloads * rates.registry_connection_bytes_per_s, machine.link_bytes_per_s)
    parallel = _image(
        "image, parallel pull",
        layers,
        machine,
        rates,
        link=link,
        layer_bytes_per_s=link,
        unpackers=min(unpacks, machine.vcpus),
    )
    return alone, parallel


def _layers(image: Image, rates: Rates) -> list[int]:
    """The layers, largest first. What is not named of an image is assumed to be layers of 1 GB."""
    if image.layer_bytes is None:
        named = [int(image.total_bytes * rates.largest_layer_share)]
    else:
        named = sorted(image.layer_bytes, reverse=True)
    rest_bytes = image.total_bytes - sum(named)
    whole, left_bytes = divmod(rest_bytes, LARGE_LAYER_BYTES)
    rest = [LARGE_LAYER_BYTES] * whole + [left_bytes] * (left_bytes > 0)
    return sorted(named + rest, reverse=True)


def _image(
    name: str,
    layers: list[int],
    machine: Machine,
    rates: Rates,
    *,
    link: float,
    layer_bytes_per_s: float,
    unpackers: int,
) -> Phase:
    total_bytes = sum(layers)
    largest_bytes = max(layers, default=0)
    download_s = max(total_bytes / link, largest_bytes / layer_bytes_per_s)
    last_s = largest_bytes / rates.unpack_bytes_per_s
    streams_s = _makespan(layers, unpackers) / rates.unpack_bytes_per_s
    disk_s = total_bytes * rates.unpacked_ratio / rates.disk_bytes_per_s(machine)
    unpack_s = max(streams_s, disk_s)
    seconds = max(download_s + last_s, unpack_s)
    bound = (
        ("download and the largest layer" if download_s > last_s else "the largest layer's unpack")
        if download_s + last_s >= unpack_s
        else ("unpacking" if streams_s >= disk_s else "the disk")
    )
    formula = (
        f"max(download {download_s:.1f} s + largest layer {last_s:.1f} s, "
        f"unpack {unpack_s:.1f} s with {unpackers})"
    )
    return Phase(name, seconds, formula, bound)


def _makespan(layers: list[int], unpackers: int) -> float:
    """Bytes of the busiest unpacker, if each takes the largest layer that is left."""
    loads = [0] * max(1, unpackers)
    for size_bytes in layers:
        loads[loads.index(min(loads))] += size_bytes
    return max(loads)


def model_phases(
    model_bytes: int,
    machine: Machine,
    rates: Rates,
    *,
    ranks: int,
    node_cache: bool,
    store: Store = Store.S3,
) -> tuple[Phase, ...]:
    """The weights and the compile: from the store, and from the node where it keeps them.

    Args:
        node_cache: whether the node's disk holds the model.
    """
    connections = load_choice(machine, model_bytes, ranks).connections
    request = (
        rates.registry_connection_bytes_per_s
        if store is Store.REGISTRY
        else rates.s3_request_bytes_per_s
    )
    phases = [
        _slowest(
            f"weights, from {store}",
            model_bytes,
            {
                "the link": machine.link_bytes_per_s,
                f"{connections} requests": connections * request,
                f"{machine.vcpus} vCPUs": machine.vcpus * rates.tls_bytes_per_s_of_cpu,
            },
        )
    ]
    if node_cache:
        copying = {f"{machine.vcpus} vCPUs": machine.vcpus * rates.copy_bytes_per_s_of_cpu}
        disk = {"the local disk": rates.disk_bytes_per_s(machine)}
        phases.append(_slowest("weights, from the node's disk", model_bytes, disk | copying))
        if stays_in_memory(model_bytes, machine):
            phases.append(_slowest("weights, from the node's memory", model_bytes, copying))
    hit_s = _HIT_S + _BUNDLE_BYTES / machine.link_bytes_per_s
    phases.append(Phase("compile, nothing cached", rates.compile_s, "assumed", "the model's code"))
    phases.append(
        Phase("compile, from the cache", hit_s, "1 s + 15 MiB / the link", "unpacking the bundle")
    )
    return tuple(phases)


def _slowest(name: str, size_bytes: int, ways: Mapping[str, float]) -> Phase:
    bound = min(ways, key=lambda way: ways[way])
    rate = ways[bound]
    formula = f"{format_size(size_bytes)} / {format_size(rate)}/s"
    return Phase(name, size_bytes / rate, formula, bound)
