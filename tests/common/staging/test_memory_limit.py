"""The staging budget over made-up kernel trees (E06)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from fastload_common.staging.memory_limit import MemoryLimit, smallest_limit, staging_budget
from fastload_common.units import GIB, MIB

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
HOST = "MemTotal: 200000000 kB\nMemAvailable: 104857600 kB\n"  # 100 GiB
UNLIMITED_V1 = "9223372036854771712\n"


def limit(tree: Mapping[str, str]) -> MemoryLimit | None:
    return smallest_limit(tree.get)


def v2(path: str, files: Mapping[str, str], mount: str = V2_MOUNT) -> dict[str, str]:
    return {
        "/proc/meminfo": HOST,
        "/proc/self/cgroup": f"0::{path}\n",
        "/proc/self/mountinfo": f"1 0 0:1 / / rw - overlay overlay rw\n{mount}\n",
        **{f"/sys/fs/cgroup{name}": text for name, text in files.items()},
    }


def v1(path: str, files: Mapping[str, str], mount: str = V1_MOUNT) -> dict[str, str]:
    return {
        "/proc/meminfo": HOST,
        "/proc/self/cgroup": f"9:cpu:/x\n4:memory:{path}\n0::/\n",
        "/proc/self/mountinfo": f"{mount}\n",
        **{f"/sys/fs/cgroup/memory{name}": text for name, text in files.items()},
    }


@pytest.mark.parametrize(
    ("tree", "size_bytes"),
    [
        pytest.param(v2("/", {"/memory.max": f"{2 * GIB}\n"}), 2 * GIB, id="v2 namespace root"),
        pytest.param(v2("/", {"/memory.max": "max\n"}), 100 * GIB, id="v2 max: what is available"),
        pytest.param(
            v2("/pod/box", {"/pod/box/memory.max": "max\n", "/pod/memory.max": f"{3 * GIB}\n"}),
            3 * GIB,
            id="v2 an ancestor is smaller",
        ),
        pytest.param(
            v2(
                "/pod/box",
                {"/pod/box/memory.max": f"{2 * GIB}\n", "/pod/memory.max": f"{3 * GIB}\n"},
            ),
            2 * GIB,
            id="v2 the leaf is smaller",
        ),
        pytest.param(
            v2("/box", {"/box/memory.max": f"{4 * GIB}\n", "/box/memory.high": f"{GIB}\n"}),
            GIB,
            id="v2 memory.high throttles first",
        ),
        pytest.param(
            v2("/../../other", {"/memory.max": f"{5 * GIB}\n"}), 5 * GIB, id="v2 outside namespace"
        ),
        pytest.param(
            v2(
                "/docker/abc",
                {"/memory.max": f"{2 * GIB}\n"},
                "31 23 0:28 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            ),
            2 * GIB,
            id="v2 mounted from its own root",
        ),
        pytest.param(v1("/", {"/memory.limit_in_bytes": f"{2 * GIB}\n"}), 2 * GIB, id="v1"),
        pytest.param(
            v1("/", {"/memory.limit_in_bytes": UNLIMITED_V1}), 100 * GIB, id="v1 unlimited"
        ),
        pytest.param(
            v1(
                "/docker/abc",
                {"/memory.limit_in_bytes": f"{6 * GIB}\n"},
                "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
            ),
            6 * GIB,
            id="v1 mounted from its own root",
        ),
        pytest.param(
            v1(
                "/a/b",
                {
                    "/a/b/memory.limit_in_bytes": UNLIMITED_V1,
                    "/a/memory.limit_in_bytes": f"{7 * GIB}\n",
                },
            ),
            7 * GIB,
            id="v1 nested",
        ),
        pytest.param(
            v1(
                "/",
                {
                    "/memory.limit_in_bytes": UNLIMITED_V1,
                    "/memory.stat": f"cache 5\nhierarchical_memory_limit {8 * GIB}\nrss 7\n",
                },
            ),
            8 * GIB,
            id="v1 hidden ancestor",
        ),
        pytest.param(
            v1("/", {"/memory.limit_in_bytes": f"{9 * GIB}\n"}) | {"/proc/meminfo": "MemFree: 1"},
            9 * GIB,
            id="no MemAvailable",
        ),
        pytest.param(
            v2("/", {"/memory.max": f"{500 * GIB}\n"}), 100 * GIB, id="limit above the machine"
        ),
    ],
)
def test_e06_smallest_limit(tree: dict[str, str], size_bytes: int) -> None:
    found = limit(tree)
    assert found is not None
    assert found.bytes == size_bytes


def test_no_kernel_files_means_no_limit() -> None:
    assert limit({}) is None
    budget = staging_budget(None, wanted_bytes=320 * MIB, read_text=lambda path: None)
    assert budget.bytes == 320 * MIB
    assert "no memory limit found" in budget.reason


def test_garbled_files_are_no_limit() -> None:
    tree = {
        "/proc/self/cgroup": "\n::\nnonsense",
        "/proc/self/mountinfo": "31 23\n - cgroup2\n",
        "/proc/meminfo": "MemAvailable:\n",
    }
    assert limit(tree) is None


def test_the_default_is_what_the_requests_need() -> None:
    budget = staging_budget(None, wanted_bytes=40 * MIB, read_text=v2("/", {}).get)
    assert budget.bytes == 40 * MIB


def test_e06_a_small_limit_is_shared_by_the_ranks() -> None:
    tree = v2("/", {"/memory.max": f"{2 * GIB}\n"})
    budget = staging_budget(None, wanted_bytes=GIB, local_world_size=8, read_text=tree.get)
    assert budget.bytes == 2 * GIB // 4 // 8
    assert budget.reason == "a quarter of 2.0 GiB (/sys/fs/cgroup/memory.max) / 8 local ranks"


def test_e06_explicit_memory_is_the_nodes_and_is_divided_exactly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree = v2("/", {"/memory.max": f"{2 * GIB}\n"})
    with caplog.at_level(logging.WARNING):
        shares = [
            staging_budget(
                256 * MIB + 1,
                wanted_bytes=GIB,
                local_rank=rank,
                local_world_size=3,
                read_text=tree.get,
            ).bytes
            for rank in range(3)
        ]
    assert sum(shares) == 256 * MIB + 1
    assert max(shares) - min(shares) <= 1
    assert caplog.records == []


def test_e06_explicit_memory_that_is_too_large_warns_with_the_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree = v2("/", {"/memory.max": f"{2 * GIB}\n"})
    with caplog.at_level(logging.WARNING):
        budget = staging_budget(4 * GIB, wanted_bytes=1, local_world_size=4, read_text=tree.get)
    assert budget.bytes == GIB
    [record] = caplog.records
    for number in ("4.0 GiB", "is 2.0 GiB", "/sys/fs/cgroup/memory.max"):
        assert number in record.getMessage()


def test_the_real_kernel_files_can_be_read() -> None:
    found = smallest_limit()
    assert found is not None
    assert 0 < found.bytes < 1 << 50
