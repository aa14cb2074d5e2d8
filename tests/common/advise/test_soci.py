"""SOCI's thresholds, and the files in which nodes read them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from fastload_common.advise.formats import al2023_user_data, bottlerocket_toml
from fastload_common.advise.image import Image
from fastload_common.advise.machine import machine_of
from fastload_common.advise.records import Value
from fastload_common.advise.soci import soci_notes, soci_settings
from fastload_common.units import GIB

GB = 1000**3
BIG = Image("big", 12 * GB, (5 * GB, 4 * GB, 2 * GB, GB, 100))


def values(image: Image | None, instance_type: str = "g6e.12xlarge") -> dict[str, Value | None]:
    machine = machine_of(instance_type, {})
    return {setting.name: setting.value for setting in soci_settings(image, machine)}


def test_the_six_thresholds() -> None:
    assert values(BIG) == {
        "max_concurrent_downloads": -1,
        "max_concurrent_downloads_per_image": 20,
        "concurrent_download_chunk_size": "16mb",
        "max_concurrent_unpacks": -1,
        "max_concurrent_unpacks_per_image": 3,
        "discard_unpacked_layers": True,
    }


@pytest.mark.parametrize(
    ("layers", "unpacks"), [((5 * GB,) * 7, 7), ((5 * GB,), 1), ((10, 20), 1), ((), 1)]
)
def test_as_many_unpacks_as_large_layers(layers: tuple[int, ...], unpacks: int) -> None:
    image = Image("i", sum(layers), layers)
    assert values(image)["max_concurrent_unpacks_per_image"] == unpacks


def test_unknown_layers_leave_the_default() -> None:
    for image in (None, Image("i", 10 * GB, None)):
        assert values(image)["max_concurrent_unpacks_per_image"] is None
        assert "unpacks" not in bottlerocket_toml(soci_settings(image, machine_of("g5.xlarge", {})))


@pytest.mark.parametrize(
    ("instance_type", "downloads"), [("g5.xlarge", 10), ("g5.2xlarge", 11), ("g5.4xlarge", 20)]
)
def test_as_many_downloads_as_fill_the_link_within_ten_and_twenty(
    instance_type: str, downloads: int
) -> None:
    found = values(None, instance_type)["max_concurrent_downloads_per_image"]
    assert found == downloads


def test_bottlerocket_reads_it_as_it_is_meant() -> None:
    text = bottlerocket_toml(soci_settings(BIG, machine_of("g6e.12xlarge", {})))
    settings = tomllib.loads(text)["settings"]
    assert settings["container-runtime"] == {"snapshotter": "soci"}
    plugin = settings["container-runtime-plugins"]["soci-snapshotter"]
    assert plugin["pull-mode"] == "parallel-pull-unpack"
    assert plugin["parallel-pull-unpack"] == {
        "max-concurrent-downloads-per-image": 20,
        "concurrent-download-chunk-size": "16mb",
        "max-concurrent-unpacks-per-image": 3,
        "discard-unpacked-layers": True,
    }


def parts(user_data: str) -> dict[str, str]:
    """Type -> body of each part of a MIME document."""
    boundary = re.search(r'boundary="(.+)"', user_data)
    assert boundary is not None
    body, end = user_data.rsplit(f"--{boundary[1]}--", 1)
    assert end == "\n"
    found = {}
    for part in body.split(f"--{boundary[1]}\n")[1:]:
        head, _, text = part.partition("\n\n")
        found[head.removeprefix("Content-Type: ").partition(";")[0]] = text
    return found


def test_amazon_linux_switches_the_feature_on() -> None:
    found = parts(al2023_user_data(soci_settings(BIG, machine_of("g6e.12xlarge", {}))))
    config = yaml.safe_load(found["application/node.eks.aws"])
    assert config["apiVersion"] == "node.eks.aws/v1alpha1"
    assert config["spec"]["featureGates"] == {"FastImagePull": True}


@pytest.mark.skipif(shutil.which("sed") is None, reason="there is no sed")
def test_amazon_linux_changes_only_its_thresholds(tmp_path: Path) -> None:
    """The script runs on a file such as the AMI has, indented or not."""
    config = tmp_path / "config.toml"
    config.write_text(
        '[content_store]\ntype = "containerd"\n[pull_modes.parallel_pull_unpack]\n'
        "  enable = true\n  max_concurrent_downloads_per_image = 10\n"
        'concurrent_download_chunk_size = "8mb"\n  max_concurrent_unpacks_per_image = 12\n'
        "discard_unpacked_layers = false\nmax_concurrent_unpacks = 7\n"
    )
    found = parts(al2023_user_data(soci_settings(BIG, machine_of("g6e.12xlarge", {}))))
    script = found["text/x-shellscript"].replace(
        "/etc/soci-snapshotter-grpc/config.toml", str(config)
    )
    subprocess.run(["bash", "-c", script], check=True, timeout=60)
    assert tomllib.loads(config.read_text()) == {
        "content_store": {"type": "containerd"},
        "pull_modes": {
            "parallel_pull_unpack": {
                "enable": True,
                "max_concurrent_downloads_per_image": 20,
                "concurrent_download_chunk_size": "16mb",
                "max_concurrent_unpacks_per_image": 3,
                "discard_unpacked_layers": True,
                "max_concurrent_unpacks": 7,
            }
        },
    }


def test_notes() -> None:
    def notes(image: Image | None, **given: float) -> str:
        numbers = {"vcpus": 8, "memory_bytes": 64 * GIB, "gbps": 10.0, "nvme_bytes": GB, **given}
        return " ".join(soci_notes(image, machine_of(None, numbers)))

    assert notes(BIG) == ""
    assert "600 MiB/s" in notes(BIG, nvme_bytes=0)
    assert "ignores FastImagePull" in notes(BIG, vcpus=3)
    assert "3 layers above 1 GB on 2 vCPUs" in notes(BIG, vcpus=2)
