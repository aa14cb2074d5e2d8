"""The table of machines, and machines that are not in it."""

from __future__ import annotations

import re

import pytest

from fastload_common.advise.machine import known_types, machine_of, table_origin
from fastload_common.errors import ConfigError
from fastload_common.units import GIB


def test_a_type_of_the_table() -> None:
    machine = machine_of("p5.48xlarge", {})
    assert machine.vcpus == 192
    assert machine.memory_bytes == 2048 * GIB
    assert machine.gbps == 3200
    assert machine.nvme_bytes == 30_400 * 1000**3
    assert (machine.gpus, machine.gpu) == (8, "h100")


def test_a_pod_has_the_link_of_one_network_card() -> None:
    assert machine_of("p5.48xlarge", {}).link_bytes_per_s == 100e9 / 8
    assert machine_of("g6e.12xlarge", {}).link_bytes_per_s == 100e9 / 8
    assert machine_of("g5.xlarge", {}).link_bytes_per_s == 2.5e9 / 8


@pytest.mark.parametrize("name", known_types())
def test_every_row_makes_sense(name: str) -> None:
    machine = machine_of(name, {})
    assert 4 <= machine.vcpus <= 192
    assert machine.memory_bytes >= 16 * GIB
    assert 2 <= machine.link_bytes_per_s * 8 / 1e9 <= 400
    assert machine.gpus in (1, 2, 4, 8)
    assert machine.nvme_bytes > 0


def test_the_table_says_where_it_comes_from_and_when() -> None:
    assert re.search(r"Karpenter documentation.* As of \d{4}-\d{2}-\d{2}\.$", table_origin())


def test_a_number_that_is_given_wins() -> None:
    machine = machine_of("g5.xlarge", {"gbps": 10.0, "nvme_bytes": 0, "vcpus": None})
    assert machine.gbps == 10.0
    assert machine.nvme_bytes == 0
    assert machine.vcpus == 4


def test_an_unknown_type_names_near_ones_and_the_options() -> None:
    with pytest.raises(ConfigError) as raised:
        machine_of("g6e.13xlarge", {})
    message = str(raised.value)
    assert "'g6e.13xlarge' is not in the table" in message
    assert "g6e.12xlarge" in message
    assert "--vcpus, --memory, --gbps" in message


def test_only_what_is_missing_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="--gbps") as raised:
        machine_of("zz.large", {"vcpus": 8, "memory_bytes": GIB})
    assert "--vcpus" not in str(raised.value)


def test_an_unknown_type_with_its_numbers() -> None:
    machine = machine_of("zz.large", {"vcpus": 8, "memory_bytes": 64 * GIB, "gbps": 25.0})
    assert machine.name == "zz.large"
    assert machine.network_cards == 1
    assert machine.nvme_bytes == 0


def test_no_type_and_no_numbers() -> None:
    with pytest.raises(ConfigError, match="no instance type was given"):
        machine_of(None, {})


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"vcpus": 0}, "--vcpus"),
        ({"gbps": -1.0}, "--gbps"),
        ({"gbps": float("inf")}, "--gbps"),
        ({"gbps": float("nan")}, "--gbps"),
        ({"gpus": -1}, "--gpus"),
        ({"memory_bytes": 0}, "--memory"),
        ({"network_cards": 0}, "--network-cards"),
    ],
)
def test_numbers_that_make_no_sense(given: dict[str, float], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        machine_of("g5.xlarge", given)
