"""The seconds: each formula by hand, and what bounds it."""

from __future__ import annotations

from typing import Any

import pytest

from fastload_common.advise.image import Image
from fastload_common.advise.machine import Machine, machine_of
from fastload_common.advise.phases import image_phases, model_phases
from fastload_common.advise.rates import Rates, rates_with
from fastload_common.errors import ConfigError
from fastload_common.units import GIB, MIB

GB = 1000**3
MB = 1000**2


def machine(**given: Any) -> Machine:
    numbers = {
        "vcpus": 48,
        "memory_bytes": 384 * GIB,
        "gbps": 80.0,  # 10 GB/s
        "nvme_bytes": 4000 * GB,
        **given,
    }
    return machine_of(None, numbers)


def seconds(image: Image, *, unpacks: int = 3, downloads: int = 20, **given: Any) -> list[float]:
    found = image_phases(image, machine(**given), Rates(), downloads=downloads, unpacks=unpacks)
    return [phase.seconds for phase in found]


def test_an_image_of_three_layers() -> None:
    image = Image("i", 9 * GB, (3 * GB, 3 * GB, 3 * GB))
    alone, parallel = seconds(image)
    # Three connections of 60 MB/s: 50 s; the last layer 3 GB / 120 MB/s = 25 s; or all: 75 s.
    assert alone == pytest.approx(max(50 + 25, 75))
    # Twenty connections: 7.5 s; all three layers at once: 25 s.
    assert parallel == pytest.approx(7.5 + 25)


def test_one_layer_is_bound_by_one_connection_and_one_stream() -> None:
    image = Image("i", 6 * GB, (6 * GB,))
    alone, parallel = seconds(image)
    assert alone == pytest.approx(100 + 50)
    assert parallel == pytest.approx(5 + 50)


def test_fewer_unpackers_than_layers_take_turns() -> None:
    image = Image("i", 12 * GB, (3 * GB,) * 4)
    _, parallel = seconds(image, unpacks=1)
    assert parallel == pytest.approx(4 * 25)
    _, parallel = seconds(image, unpacks=3)
    assert parallel == pytest.approx(2 * 25)
    _, parallel = seconds(image, unpacks=4)
    assert parallel == pytest.approx(10 + 25)


def test_more_unpackers_than_cpus_are_of_no_use() -> None:
    image = Image("i", 12 * GB, (3 * GB,) * 4)
    assert seconds(image, unpacks=4, vcpus=2)[1] == pytest.approx(2 * 25)


def test_a_slow_disk_bounds_the_unpacking() -> None:
    image = Image("i", 9 * GB, (3 * GB, 3 * GB, 3 * GB))
    (_, parallel) = image_phases(
        image, machine(nvme_bytes=200 * GB), Rates(), downloads=20, unpacks=3
    )
    assert parallel.seconds == pytest.approx(18 / 0.2)
    assert parallel.bound == "the disk"


def test_a_slow_link_bounds_both() -> None:
    image = Image("i", 9 * GB, (3 * GB, 3 * GB, 3 * GB))
    alone, parallel = seconds(image, gbps=0.8)
    assert alone == parallel == pytest.approx(90 + 25)


def test_layers_that_are_not_known_are_assumed() -> None:
    known = Image("i", 10 * GB, (4 * GB, *[GB] * 6))
    assert seconds(Image("i", 10 * GB, None)) == seconds(known)
    # What was not named beside the large ones counts for the download.
    assert seconds(Image("i", 10 * GB, (4 * GB,))) == seconds(known)


def test_the_seconds_of_an_image_are_near_what_was_published() -> None:
    """10.8 GB: 112.9 s with containerd alone, 45.1 s with parallel fetch and unpack.

    Its layers and machine were not published, so this is no proof, but no contradiction either.
    """
    image = Image("i", int(10.8 * GB), None)
    alone, parallel = seconds(image, unpacks=12, gbps=100.0)
    assert alone == pytest.approx(112.9, rel=0.1)
    assert parallel == pytest.approx(45.1, rel=0.1)


def phases(model_bytes: int, *, ranks: int = 1, **given: Any) -> dict[str, Any]:
    found = model_phases(model_bytes, machine(**given), Rates(), ranks=ranks, node_cache=True)
    return {phase.name: phase for phase in found}


def test_weights_over_the_link() -> None:
    phase = phases(100 * GB)["weights, from S3"]
    assert phase.seconds == pytest.approx(10)
    assert phase.bound == "the link"


def test_weights_by_few_cpus() -> None:
    phase = phases(100 * GB, vcpus=8)["weights, from S3"]
    assert phase.seconds == pytest.approx(100 * GB / (8 * 0.7 * GIB))
    assert phase.bound == "8 vCPUs"


def test_weights_by_few_requests() -> None:
    # A small model is not worth more requests than it has MiB.
    phase = phases(10 * MIB)["weights, from S3"]
    assert phase.bound == "10 requests"
    assert phase.seconds == pytest.approx(MIB / (71 * MB))


def test_weights_from_the_disk() -> None:
    phase = phases(100 * GB)["weights, from the node's disk"]
    assert phase.seconds == pytest.approx(25)
    assert phase.bound == "the local disk"


def test_weights_from_the_kernels_memory() -> None:
    phase = phases(100 * GB)["weights, from the node's memory"]
    assert phase.seconds == pytest.approx(100 * GB / (48 * GIB))
    assert "weights, from the node's memory" not in phases(200 * GIB)


def test_compile() -> None:
    found = phases(GB)
    assert found["compile, nothing cached"].seconds == 53
    assert found["compile, from the cache"].seconds == pytest.approx(1 + 15 * MIB / (10 * GB))


def test_assumptions_can_be_replaced() -> None:
    rates = rates_with({"compile_s": "12.5", "ebs_bytes_per_s": "600MiB", "unpacked_ratio": "3"})
    assert rates.compile_s == 12.5
    assert rates.ebs_bytes_per_s == 600 * MIB
    assert rates.unpacked_ratio == 3
    assert rates.s3_request_bytes_per_s == Rates().s3_request_bytes_per_s


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("compile", "1", "one of .*compile_s"),
        ("compile_s", "0", "more than 0"),
        ("compile_s", "-3", "more than 0"),
        ("compile_s", "nan", "more than 0"),
        ("compile_s", "inf", "more than 0"),
        ("compile_s", "fast", "expected a number"),
        ("ebs_bytes_per_s", "fast", "expected a size"),
        ("ebs_bytes_per_s", "0", "more than 0"),
    ],
)
def test_assumptions_that_make_no_sense(name: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        rates_with({name: text})
