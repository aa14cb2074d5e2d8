"""fastload's own settings for a machine, and the whole advice."""

from __future__ import annotations

from typing import Any

import pytest

from fastload_common.advise.advice import Advice, advise
from fastload_common.advise.formats import kubernetes_env, shell_env
from fastload_common.advise.image import Image
from fastload_common.advise.machine import machine_of
from fastload_common.advise.own import (
    Places,
    grace_s,
    load_choice,
    own_notes,
    own_settings,
    pod_memory_bytes,
)
from fastload_common.advise.rates import Rates
from fastload_common.advise.records import Setting
from fastload_common.config import OPTIONS, Settings, load_settings
from fastload_common.errors import ConfigError
from fastload_common.load.request import RankPlace
from fastload_common.load.sizes import Machine as LoadMachine
from fastload_common.load.sizes import choose_sizes
from fastload_common.units import GIB, MIB

GB = 1000**3
VARIABLES = {option.variable: option.name for option in OPTIONS}


def own(instance_type: str, model_bytes: int = 61 * GIB, ranks: int = 1, **given: Any) -> Any:
    machine = machine_of(instance_type, given)
    found = own_settings(model_bytes, machine, ranks, Places(compile_prefix="s3://b/p"), Rates())
    return {setting.name: setting for setting in found}


def whole(instance_type: str = "g6e.12xlarge", **given: Any) -> Advice:
    arguments: dict[str, Any] = {
        "model_bytes": 61 * GIB,
        "image": Image("i", 10 * GB, (4 * GB,)),
        "tensor_parallel": 4,
        "places": Places(),
        "rates": Rates(),
    }
    return advise(machine_of(instance_type, {}), **(arguments | given))


@pytest.mark.parametrize("name", ["g5.xlarge", "g6e.12xlarge", "p5.48xlarge"])
def test_what_is_advised_is_what_fastload_takes(name: str) -> None:
    given = {
        VARIABLES[setting.name]: str(setting.value)
        for setting in own(name).values()
        if setting.name in VARIABLES and setting.value is not None
    }
    assert {"cache_dir", "compile_cache"} <= set(given)
    settings = load_settings(given, extra_name="advise")
    assert settings.compile_cache == ("/var/cache/fastload/compile", "s3://b/p")
    assert set(own(name)) - set(VARIABLES) == {
        "--load-format",
        "HF_HUB_OFFLINE",
        "terminationGracePeriodSeconds",
    }


@pytest.mark.parametrize("name", ["g5.xlarge", "g6e.12xlarge", "p5.48xlarge", "p6-b200.48xlarge"])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_with_what_is_advised_a_load_fills_the_link(name: str, ranks: int) -> None:
    """The load's own choice, in a pod with no more memory than advised."""
    machine = machine_of(name, {})
    choice = load_choice(machine, 140 * GIB, ranks)
    limit = pod_memory_bytes(140 * GIB, machine, ranks)
    here = LoadMachine(
        machine.vcpus,
        65_536,
        lambda file: f"MemAvailable: {limit // 1024} kB\n" if file == "/proc/meminfo" else None,
    )
    settings = Settings(concurrency=choice.concurrency, memory_bytes=choice.memory_bytes)
    place = RankPlace(local_rank=0, local_world_size=ranks, rank=0, world_size=ranks)
    sizes = choose_sizes(settings, place, 140 * GIB, machine=here)
    assert sizes.concurrency * ranks == choice.connections
    assert sizes.memory_bytes * ranks == choice.staging_bytes == limit // 4
    assert choice.connections >= choice.wanted or machine.vcpus <= 4


def test_requests_are_left_to_the_load_where_it_gets_far_enough() -> None:
    found = own("g6e.12xlarge")
    assert found["FASTLOAD_CONCURRENCY"].value is None
    assert "177 requests of 16 MiB fill 100 Gbit/s" in found["FASTLOAD_CONCURRENCY"].why
    assert found["FASTLOAD_MEMORY_BYTES"].value is None


def test_a_link_beyond_its_own_bound_gets_numbers() -> None:
    found = own("p6-b200.48xlarge", ranks=8)
    assert found["FASTLOAD_CONCURRENCY"].value == 705
    assert "by itself it stops at 512" in found["FASTLOAD_CONCURRENCY"].why
    assert found["FASTLOAD_MEMORY_BYTES"].value is None
    # One rank takes no more than 4 GiB of itself, which hold fewer requests.
    found = own("p6-b200.48xlarge", ranks=1)
    assert found["FASTLOAD_CONCURRENCY"].value == 705
    assert found["FASTLOAD_MEMORY_BYTES"].value == 15 * GIB


def test_no_more_is_advised_than_fastload_takes() -> None:
    found = own("p6-b200.48xlarge", gbps=1e9)["FASTLOAD_CONCURRENCY"].value
    assert load_settings({"concurrency": str(found)}, extra_name="advise").concurrency == 4096


def test_a_small_model_is_not_worth_so_many_requests() -> None:
    assert own("p6-b200.48xlarge", 100 * MIB)["FASTLOAD_CONCURRENCY"].value is None


def test_weights_are_kept_on_a_disk_that_holds_them() -> None:
    assert own("g6e.12xlarge")["FASTLOAD_NODE_CACHE"].value == "/var/cache/fastload/ranges"
    assert own("p5.48xlarge", 3000 * GB)["FASTLOAD_NODE_CACHE"].value is not None
    assert own("g5.xlarge", 230 * GB)["FASTLOAD_NODE_CACHE"].value is None
    assert own("g5.xlarge", nvme_bytes=0)["FASTLOAD_NODE_CACHE"].value is None


def test_weights_are_not_kept_where_s3_is_faster_and_memory_too_small() -> None:
    # 3.8 TB of disks, about 3.8 GB/s, beside a link of 12.5 GB/s, and 384 GiB of memory.
    found = own("g6e.12xlarge", 200 * GIB)["FASTLOAD_NODE_CACHE"]
    assert found.value is None
    assert "S3 is faster" in found.why
    assert "the kernel's memory" in own("g6e.12xlarge", 190 * GIB)["FASTLOAD_NODE_CACHE"].why
    quick = own_settings(
        200 * GIB,
        machine_of("g6e.12xlarge", {}),
        4,
        Places(),
        Rates(nvme_bytes_per_s_of_tb=4 * GB),
    )
    assert {s.name: s.value for s in quick}["FASTLOAD_NODE_CACHE"] is not None


def test_a_disk_slower_than_s3_is_told() -> None:
    (note,) = [note for note in whole().notes if "dropped" in note]
    assert "node cache takes 17.2 s, S3 5.2" in note
    assert not [note for note in whole("p5.48xlarge").notes if "dropped" in note]


def test_without_a_prefix_the_compile_cache_is_the_nodes() -> None:
    machine = machine_of("g6e.12xlarge", {})
    found = {s.name: s for s in own_settings(GIB, machine, 1, Places("/node"), Rates())}
    assert found["FASTLOAD_COMPILE_CACHE"].value == "/node/compile"
    assert "--compile-prefix" in found["FASTLOAD_COMPILE_CACHE"].why


def test_pods_get_more_than_the_deadline_of_an_upload() -> None:
    assert grace_s() > Settings().compile_cache_deadline_s
    assert own("g5.xlarge")["terminationGracePeriodSeconds"].value == grace_s()


def test_notes() -> None:
    assert own_notes(GIB, machine_of("g6e.12xlarge", {})) == ()
    (cards,) = own_notes(GIB, machine_of("p5.48xlarge", {}))
    assert "100 of 3200 Gbit/s" in cards
    (disk,) = own_notes(300 * GB, machine_of("g5.xlarge", {}))
    assert "each start reads from S3" in disk


def test_totals_are_the_phases_that_follow_one_another() -> None:
    advice = whole()
    seconds = {phase.name: phase.seconds for phase in advice.phases}
    new, next_pod = advice.totals
    assert new.seconds == pytest.approx(
        seconds["image, parallel pull"]
        + seconds["weights, from S3"]
        + seconds["compile, from the cache"]
    )
    assert next_pod.seconds == pytest.approx(
        seconds["weights, from the node's memory"] + seconds["compile, from the cache"]
    )


def test_the_next_pod_reads_from_s3_where_the_disk_is_too_small() -> None:
    advice = whole("g5.xlarge", model_bytes=300 * GB, tensor_parallel=1)
    seconds = {phase.name: phase.seconds for phase in advice.phases}
    assert "weights, from the node's disk" not in seconds
    assert advice.totals[1].seconds == pytest.approx(
        seconds["weights, from S3"] + seconds["compile, from the cache"]
    )


def test_without_an_image_there_is_no_total_of_a_new_node() -> None:
    advice = whole(image=None)
    assert [total.name for total in advice.totals] == ["next pod of that node"]
    assert not any("image" in phase.name for phase in advice.phases)
    assert advice.soci


def test_without_a_model_only_the_node_is_advised() -> None:
    advice = whole(model_bytes=None)
    assert (advice.fastload, advice.runai, advice.totals) == ((), (), ())
    assert [phase.name for phase in advice.phases] == [
        "image, containerd's defaults",
        "image, parallel pull",
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tensor_parallel": 8}, "g6e.12xlarge has 4 GPUs"),
        ({"tensor_parallel": 0}, "--tp: expected at least 1"),
        ({"model_bytes": 0}, "at least one byte"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        whole("g6e.12xlarge", **given)


def test_variables_are_printed_and_nothing_else() -> None:
    settings = (
        Setting("A_B", "it's 1 $HOME", ""),
        Setting("N", 5, ""),
        Setting("UNSET", None, ""),
        Setting("--flag", "x", ""),
        Setting("camelCase", 3, ""),
        Setting("YES", True, ""),
    )
    assert shell_env(settings) == "A_B='it'\"'\"'s 1 $HOME'\nN=5\nYES=true\n"
    assert kubernetes_env(settings) == (
        'env:\n  - name: A_B\n    value: "it\'s 1 $HOME"\n  - name: N\n    value: "5"\n'
        '  - name: YES\n    value: "true"\n'
    )
