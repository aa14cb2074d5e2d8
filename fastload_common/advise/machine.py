"""The machine that is to be started: CPUs, memory, link, local disks, GPUs. From a table, or given.

The table, ``instance_types.json``, says where its numbers come from and of which day they are. It
holds EC2 types with NVIDIA GPUs only; any number of it can be replaced.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from fastload_common.errors import ConfigError
from fastload_common.units import GIB

__all__ = ["Machine", "known_types", "machine_of", "table_origin"]

_BYTES_PER_GBPS = 1000**3 // 8
_GB = 1000**3
_NEAREST = 3


@dataclass(frozen=True, slots=True)
class Machine:
    """What of a machine decides how fast a server starts on it.

    Attributes:
        name: the instance type, or what else it is called.
        vcpus: hardware threads.
        memory_bytes: of the host.
        gbps: Gbit/s of all network cards together, as they are sustained.
        network_cards: a pod's address is on the first card, so a load has that part of ``gbps``.
        nvme_bytes: local disks together; 0 for none.
        gpus: their number.
        gpu: what they are called; empty for none.
    """

    name: str
    vcpus: int
    memory_bytes: int
    gbps: float
    network_cards: int
    nvme_bytes: int
    gpus: int
    gpu: str

    @property
    def link_bytes_per_s(self) -> float:
        """What one pod can receive: the link of one network card."""
        return self.gbps * _BYTES_PER_GBPS / self.network_cards


def known_types() -> tuple[str, ...]:
    """The instance types of the table, in its order."""
    return tuple(_table()["types"])


def table_origin() -> str:
    """Where the table's numbers come from, and of which day they are."""
    return f"{_table()['source']} As of {_table()['date']}."


def machine_of(name: str | None, given: Mapping[str, Any]) -> Machine:
    """The machine of that name, with the given numbers in place of the table's.

    Args:
        name: an instance type, or None where all numbers are given.
        given: attributes of `Machine`; those that are None are not given.

    Raises:
        ConfigError: the type is not in the table and not all numbers that count are given, or a
            number makes no sense.
    """
    known: dict[str, Any] = _row(name) if name is not None else {}
    numbers: dict[str, Any] = known | {
        key: value for key, value in given.items() if value is not None
    }
    missing = [key for key in ("vcpus", "memory_bytes", "gbps") if key not in numbers]
    if missing:
        raise _unknown(name, missing)
    unsaid: dict[str, Any] = {"network_cards": 1, "nvme_bytes": 0, "gpus": 0, "gpu": ""}
    numbers = unsaid | numbers
    for key in ("vcpus", "memory_bytes", "gbps", "network_cards"):
        if not 0 < numbers[key] < math.inf:
            raise ConfigError(f"{_option(key)}: expected more than 0, got {numbers[key]}")
    if numbers["gpus"] < 0:
        raise ConfigError(f"--gpus: expected 0 or more, got {numbers['gpus']}")
    return Machine(name=name or "this machine", **numbers)


def _row(name: str) -> dict[str, Any]:
    values = _table()["types"].get(name)
    if values is None:
        return {}
    row = dict(zip(_table()["columns"], values, strict=True))
    return {
        "vcpus": row["vcpus"],
        "memory_bytes": row["memory_gib"] * GIB,
        "gbps": float(row["gbps"]),
        "network_cards": row["network_cards"],
        "nvme_bytes": row["nvme_gb"] * _GB,
        "gpus": row["gpus"],
        "gpu": row["gpu"],
    }


def _unknown(name: str | None, missing: list[str]) -> ConfigError:
    options = ", ".join(_option(key) for key in missing)
    if name is None:
        return ConfigError(
            "no instance type was given, and not all numbers of a machine",
            hint=f"give --instance-type, or {options}",
        )
    near = difflib.get_close_matches(name, known_types(), _NEAREST)
    like = f"one of the table ({', '.join(near)}), or " if near else ""
    return ConfigError(
        f"instance type {name!r} is not in the table of {len(known_types())} types",
        hint=f"give {like}its numbers: {options} (and --nvme, --gpus, --network-cards)",
    )


def _option(key: str) -> str:
    return {"memory_bytes": "--memory", "nvme_bytes": "--nvme"}.get(
        key, "--" + key.replace("_", "-")
    )


@cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("instance_types.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
