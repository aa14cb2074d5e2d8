"""What is assumed of registries, S3, CPUs and disks, each with its reason. Can be replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from fastload_common.advise.machine import Machine
from fastload_common.errors import ConfigError
from fastload_common.units import GIB, MIB, parse_size

__all__ = ["REGISTRY_CONNECTION_BYTES_PER_S", "REQUEST_BYTES_PER_S", "Rates", "rates_with"]

REQUEST_BYTES_PER_S = 71 * 1000**2
"""What one connection brings with requests of 16 MiB, 50 ms to the first byte and 90 MB/s; assumed
in `fastload_common.transfer.sizing`, whose sizes rest on it."""

REGISTRY_CONNECTION_BYTES_PER_S = 60 * 1000**2
"""What one connection to a registry brings; assumed, a few hundred Mbit/s are seen of ECR."""

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

    def disk_bytes_per_s(self, machine: Machine) -> float:
        """The local disks together, or EBS where there are none."""
        if not machine.nvme_bytes:
            return self.ebs_bytes_per_s
        return machine.nvme_bytes / 1000**4 * self.nvme_bytes_per_s_of_tb


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
