"""Settings of SOCI's parallel pull, for nodes with Bottlerocket or Amazon Linux 2023.

Rules and where they come from:

- Downloads per image and their size: the SOCI project's page on parallel mode recommends 10 to 20
  and 8 or 16 MB for ECR. Here: as many as fill the link at `REGISTRY_CONNECTION_BYTES_PER_S`,
  within 10 and 20.
- Unpacks per image: the number of layers above 1 GB. A layer is unpacked by one stream, so more
  unpackers than large layers find nothing to do, and fewer leave a large one waiting.
- No limit over all images (-1, the default): a node that starts one server pulls one large image.
- Unpacked layers are discarded: a serving node does not push images, and its disk holds them twice
  otherwise.
"""

from __future__ import annotations

from fastload_common.advise.image import Image
from fastload_common.advise.machine import Machine
from fastload_common.advise.rates import REGISTRY_CONNECTION_BYTES_PER_S
from fastload_common.advise.records import Note, Setting
from fastload_common.units import GIB

__all__ = ["soci_notes", "soci_settings"]

_LEAST_DOWNLOADS, _MOST_DOWNLOADS = 10, 20
_CHUNK = "16mb"
# Below these, nodeadm ignores the feature gate and Bottlerocket has nothing to spare.
_LEAST_VCPUS, _LEAST_MEMORY_BYTES = 4, 7 * GIB


def soci_settings(image: Image | None, machine: Machine) -> tuple[Setting, ...]:
    """The six thresholds, by the names of SOCI's own configuration file.

    A value of None means that the system's default stays.
    """
    wanted = -(-machine.link_bytes_per_s // REGISTRY_CONNECTION_BYTES_PER_S)
    downloads = int(min(max(wanted, _LEAST_DOWNLOADS), _MOST_DOWNLOADS))
    return (
        Setting(
            "max_concurrent_downloads", -1, "no limit over all images: one large one is pulled"
        ),
        Setting(
            "max_concurrent_downloads_per_image",
            downloads,
            f"{wanted:.0f} connections of 60 MB/s fill {_gbps(machine)} Gbit/s; "
            "10 to 20 are recommended for ECR",
        ),
        Setting(
            "concurrent_download_chunk_size",
            _CHUNK,
            "a large layer comes in parts over several connections; 8 or 16 MB are recommended "
            "for ECR",
        ),
        Setting("max_concurrent_unpacks", -1, "no limit over all images"),
        _unpacks(image),
        Setting(
            "discard_unpacked_layers",
            True,
            "the node keeps no compressed copy: less is written, and the disk holds the image once",
        ),
    )


def _unpacks(image: Image | None) -> Setting:
    name = "max_concurrent_unpacks_per_image"
    large = None if image is None else image.large_layers
    if large is None:
        return Setting(
            name,
            None,
            "its layers are not known (--manifest or --layer): the system's default stays, "
            "1 on Bottlerocket, 12 on Amazon Linux 2023",
        )
    layers = f"{large} of {len(image.layer_bytes or ())} layers" if image is not None else ""
    why = f"{layers} are above 1 GB; one stream unpacks a layer, small ones fit between"
    return Setting(name, max(1, large), why)


def soci_notes(image: Image | None, machine: Machine) -> tuple[Note, ...]:
    """What to know before using those settings on this machine."""
    notes = []
    if machine.vcpus < _LEAST_VCPUS or machine.memory_bytes < _LEAST_MEMORY_BYTES:
        notes.append(
            f"SOCI: {machine.name} has {machine.vcpus} vCPUs; below 4 vCPUs or 7 GiB of memory "
            "Amazon Linux 2023 ignores FastImagePull without a word"
        )
    if image is not None and (image.large_layers or 0) > machine.vcpus:
        notes.append(
            f"SOCI: {image.large_layers} layers above 1 GB on {machine.vcpus} vCPUs: unpacking is "
            "bound by the CPUs"
        )
    if not machine.nvme_bytes:
        notes.append(
            "SOCI: no local disk: layers are written to EBS. Give that volume 600 MiB/s or more "
            "(gp3 takes up to 1000 MiB/s and 16,000 IOPS): below that, pulls get slower, not faster"
        )
    return tuple(notes)


def _gbps(machine: Machine) -> str:
    return f"{machine.gbps / machine.network_cards:g}"
