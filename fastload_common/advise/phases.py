"""How long the parts of a start should take. Formulas with stated assumptions, no measurement.

Each phase is bytes divided by the slowest of what they pass; the record says which that was. What
is assumed stands in `Rates`, with its reason, and any of it can be replaced by what was measured.

========================  ==========================================================================
image, containerd alone   D = max(all / min(3 connections, link), largest layer / connection);
                          U = all layers one after the other; max(D + u, U), u the largest layer's
image, parallel           D = all / min(connections, link); U = layers over so many unpackers, the
                          largest first, at least unpacked / disk; max(D + u, U)
weights from S3           model / min(link, requests * rate of one, vCPUs * rate of one)
weights from the node     model / min(disk, vCPUs * memory rate)
compile                   as assumed; with a hit 1 s + bundle / link
========================  ==========================================================================

Not counted: until the node is there, imports, memory profiling, graph capture and warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from fastload_common.advise.image import LARGE_LAYER_BYTES, Image
from fastload_common.advise.machine import Machine
from fastload_common.advise.own import REQUEST_BYTES_PER_S, load_choice
from fastload_common.advise.records import Phase
from fastload_common.advise.soci import REGISTRY_CONNECTION_BYTES_PER_S
from fastload_common.errors import ConfigError
from fastload_common.units import GIB, MIB, format_size, parse_size

__all__ = ["Rates", "image_phases", "model_phases", "rates_with"]

# containerd downloads three layers at once and unpacks one.
_CONTAINERD_DOWNLOADS = 3
_HIT_S = 1.0
_BUNDLE_BYTES = 15 * MIB
_GB = 1000**3


@dataclass(frozen=True, slots=True)
class Rates:
    """What is assumed, in bytes per second unless the name says otherwise.

    Attributes:
        registry_connection_bytes_per_s: of one connection to the registry.
        s3_request_bytes_per_s: of one request of 16 MiB to S3 in the same region.
        tls_bytes_per_s_of_cpu: what one vCPU receives over TLS: as in `transfer.sizing`.
        unpack_bytes_per_s: compressed bytes that one stream of gzip unpacks: 100 to 150 MB/s.
        unpacked_ratio: unpacked bytes for each compressed one.
        largest_layer_share: of an image whose layers are not known: engines' images have one layer
            with torch and CUDA in it.
        ebs_bytes_per_s: gp3 at its largest setting.
        nvme_bytes_per_s_of_tb: local disks, for each 1000**4 bytes of them: types with 1 TB and
            less reach about that, large ones more.
        copy_bytes_per_s_of_cpu: from the page cache or disk into a parameter, with one vCPU.
        compile_s: torch.compile with nothing cached: 53 of the 82 s of one start of a model of
            64 GiB. It hangs on the model's code, not its size.
    """

    registry_connection_bytes_per_s: float = REGISTRY_CONNECTION_BYTES_PER_S
    s3_request_bytes_per_s: float = REQUEST_BYTES_PER_S
    tls_bytes_per_s_of_cpu: float = 0.7 * GIB
    unpack_bytes_per_s: float = 120 * 1000**2
    unpacked_ratio: float = 2.0
    largest_layer_share: float = 0.4
    ebs_bytes_per_s: float = 1000 * MIB
    nvme_bytes_per_s_of_tb: float = 1 * _GB
    copy_bytes_per_s_of_cpu: float = 1 * GIB
    compile_s: float = 53.0


def rates_with(given: Mapping[str, str]) -> Rates:
    """The assumptions with some of them replaced.

    Args:
        given: name of an assumption -> a number, or a size such as ``3GB`` where the unit is bytes.

    Raises:
        ConfigError: no such assumption, or no positive number.
    """
    names = [field.name for field in fields(Rates)]
    values: dict[str, float] = {}
    for name, text in given.items():
        if name not in names:
            raise ConfigError(f"--assume knows no {name!r}", hint=f"one of {', '.join(names)}")
        values[name] = _number(name, text)
        if not 0 < values[name] < float("inf"):
            raise ConfigError(f"--assume {name}: expected more than 0, got {text!r}")
    return replace(Rates(), **values)


def _number(name: str, text: str) -> float:
    if "bytes" in name:
        return parse_size(text)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--assume {name}: expected a number, got {text[:100]!r}") from None


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
    disk_s = total_bytes * rates.unpacked_ratio / _disk(machine, rates)
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


def _disk(machine: Machine, rates: Rates) -> float:
    if not machine.nvme_bytes:
        return rates.ebs_bytes_per_s
    return machine.nvme_bytes / 1000**4 * rates.nvme_bytes_per_s_of_tb


def model_phases(
    model_bytes: int, machine: Machine, rates: Rates, *, ranks: int, node_cache: bool
) -> tuple[Phase, ...]:
    """The weights and the compile: from S3, and from the node where it keeps them.

    Args:
        node_cache: whether the node's disk holds the model.
    """
    connections = load_choice(machine, model_bytes, ranks).connections
    phases = [
        _slowest(
            "weights, from S3",
            model_bytes,
            {
                "the link": machine.link_bytes_per_s,
                f"{connections} requests": connections * rates.s3_request_bytes_per_s,
                f"{machine.vcpus} vCPUs": machine.vcpus * rates.tls_bytes_per_s_of_cpu,
            },
        )
    ]
    if node_cache:
        phases.append(
            _slowest(
                "weights, from the node's disk",
                model_bytes,
                {
                    "the local disk": _disk(machine, rates),
                    f"{machine.vcpus} vCPUs": machine.vcpus * rates.copy_bytes_per_s_of_cpu,
                },
            )
        )
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
