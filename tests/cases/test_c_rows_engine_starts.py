"""The compile cache and the real vLLM with torch.compile: five starts for all cases."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases.engine_starts import Node, Start

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ENGINE: dict[str, Any] = {
    "enforce_eager": False,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "gpu_memory_utilization": 0.2,
}
POD = {
    "HOSTNAME": "pod-9",
    "VLLM_PLUGINS": "fastload",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "5999",
    "VLLM_RAY_BUNDLE_INDICES": "1,2",
    "VLLM_LOG_STATS_INTERVAL": "7",
    "VLLM_API_KEY": "secret",
    "FASTLOAD_CONCURRENCY": "3",
}
COMPILED = {".so", ".o", ".cpp", ".cubin", ".ptx", ".hsaco", ".ll"}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The starts by name, and what ``fastload cache key`` says of the first."""
    from fastload_common.testing.tiny_models import write_tiny_model

    root = tmp_path_factory.mktemp("c")
    model = write_tiny_model(root / "model", "qwen3")
    moved = shutil.copytree(model, root / "moved" / "revision")
    node = Node(root / "node")
    mine = {"model": str(model), "load_format": "fastload"} | ENGINE
    found: dict[str, Any] = {"cold": node.start(**mine | {"load_format": "auto"})}
    node.forget()
    found["inductor"] = node.start({"TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1"}, **mine)
    node.wipe()
    found["pod"] = node.start(POD, **mine | {"model": str(moved)})
    node.wipe()
    node.make_useless(root / "useless")
    found["useless"] = node.start(**mine)
    found["changed"] = node.start(**mine | {"max_num_batched_tokens": 128})
    found["key"] = key_by_hand(node, str(model))
    return found


def key_by_hand(node: Node, model: str) -> Any:
    given = {name: value for name, value in ENGINE.items() if name != "enforce_eager"}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = ["-m", "fastload_common.cli.main", "cache", "key", model, "--json", "--"]
    done = subprocess.run(
        [sys.executable, *command, *options],
        # Where no cache is switched on.
        env=os.environ | node.variables | {"FASTLOAD_COMPILE_CACHE": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_c15_a_bundle_is_whole_though_inductor_found_all_in_its_own_cache(
    starts: dict[str, Any],
) -> None:
    cold, warm, pod = starts["cold"], starts["inductor"], starts["pod"]
    assert cold.report["measured"] == "miss"
    assert cold.report["compiled"] >= 1
    # Nothing is compiled where only the engine's own directory is empty; and with a remote cache
    # that nobody has set up the engine starts all the same.
    assert warm.report["measured"] == "warm", warm.report
    assert set(warm.report["published"].values()) == {"stored"}
    # What that start published is enough for an empty disk.
    assert pod.report["measured"] == "hit", pod.log[-5000:]
    assert pod.report["compiled"] == 0
    assert cold.tokens == warm.tokens == pod.tokens


def test_c17_no_compiler_runs_where_all_but_the_bundle_is_gone(starts: dict[str, Any]) -> None:
    assert [call for call in starts["cold"].compilers if not of_header(call)], "none is seen"
    # What is missed: torch keeps its precompiled header beside its default cache directory,
    # whatever it is told.
    assert [call for call in starts["pod"].compilers if not of_header(call)] == []


def of_header(call: str) -> bool:
    return "header.hpp" in call or ".h.gch" in call


@pytest.mark.parametrize("name", ["cold", "inductor", "pod"])
def test_c17_nothing_compiled_lies_outside_fastloads_directory(
    starts: dict[str, Any], name: str
) -> None:
    start: Start = starts[name]
    assert [file for file in start.left if Path(file).suffix in COMPILED] == []


def test_c03_c05_c21_another_pod_with_the_model_elsewhere_hits_what_the_default_loader_left(
    starts: dict[str, Any],
) -> None:
    assert starts["pod"].report["key"] == starts["cold"].report["key"]
    assert starts["pod"].report["measured"] == "hit"


def test_c13_a_restored_entry_that_the_engine_does_not_use_is_no_hit(
    starts: dict[str, Any],
) -> None:
    start: Start = starts["useless"]
    assert start.report["status"] == "hit"
    assert start.report["measured"] == "unused"
    assert start.report["compiled"] >= 1
    assert start.report["loaded"] == 0
    assert "compile cache: unused, as measured: 0 artefacts found" in start.log
    assert start.tokens == starts["cold"].tokens
    # What it compiled instead takes the place of what was of no use.
    assert set(start.report["published"].values()) == {"stored"}


def test_c07_a_changed_limit_is_a_miss_that_says_so_and_has_the_same_tokens(
    starts: dict[str, Any],
) -> None:
    start: Start = starts["changed"]
    assert start.report["status"] == "miss"
    # Inductor may find in the operator's directory what did not change.
    assert start.report["measured"] in ("miss", "warm")
    assert start.report["nearest_key"] == starts["cold"].report["key"]
    words = "limits.max_num_batched_tokens: 128 here, 64 there"
    assert words in start.report["differing"]
    assert words in start.log
    assert start.tokens == starts["cold"].tokens


def test_c03_the_command_says_the_key_of_the_engines_core(starts: dict[str, Any]) -> None:
    assert starts["key"]["key"] == starts["cold"].report["key"]
