"""One argument after the other is changed: the key changes exactly when what is compiled would."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastload_sglang import compile_arguments as facts
from tests.sglang.server import environment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
    ),
]

WORKER = Path(__file__).with_name("key_worker.py")

_DRAFT = {
    "speculative_algorithm": "STANDALONE",
    "speculative_draft_model_path": "{model}",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
}

OTHER: dict[str, dict[str, Any]] = {
    "tensor-parallel size": {"tp_size": 1},
    "replicas": {"dp_size": 2},
    "first device": {"base_gpu_id": 1},
    "type of numbers": {"dtype": "float16"},
    "type of the cache": {"kv_cache_dtype": "fp8_e5m2"},
    "longest sequence": {"context_length": 96},
    "tokens in a batch": {"chunked_prefill_size": 1024},
    "tokens of a prefill": {"max_prefill_tokens": 1024},
    "sequences in a batch": {"max_running_requests": 4},
    "tokens in a block": {"page_size": 16},
    "quantization": {"quantization": "fp8"},
    "override": {"json_model_override_args": '{"rope_theta": 5000.0}'},
    "overlap": {"disable_overlap_schedule": True},
    "hidden states": {"enable_return_hidden_states": True},
    "whole model": {"enable_torch_compile": True},
    "mixed batches": {"enable_mixed_chunk": True},
    "type of the head": {"enable_fp32_lm_head": True},
    "LoRA rank": {"enable_lora": True, "max_lora_rank": 16, "lora_target_modules": ["q_proj"]},
    "more of LoRA": {"enable_lora": True, "max_lora_rank": 32, "lora_target_modules": ["q_proj"]},
    "adapters": {"enable_lora": True, "max_lora_rank": 32, "lora_target_modules": ["o_proj"]},
    "draft": _DRAFT,
    "tokens of a draft": {**_DRAFT, "speculative_num_steps": 3, "speculative_num_draft_tokens": 4},
    "another draft": {**_DRAFT, "speculative_draft_model_path": "{changed}"},
    "role": {"disaggregation_mode": "prefill"},
}

SAME: dict[str, dict[str, Any]] = {
    "address": {"host": "0.0.0.0", "port": 31234, "nccl_port": 31235},
    "secrets": {"api_key": "one", "admin_api_key": "two"},
    "name": {"served_model_name": "mine"},
    "logs": {"log_level": "debug", "log_requests": True, "enable_metrics": True},
    "seed": {"random_seed": 7},
    "sizes of pools": {"max_total_tokens": 4096, "mem_fraction_static": 0.5},
    "order of requests": {"schedule_policy": "lpm", "schedule_conservativeness": 0.5},
    "patience": {"watchdog_timeout": 17.0, "dist_timeout": 100},
    "place of downloads": {"download_dir": "/tmp/elsewhere"},
    "warm-up": {"skip_server_warmup": True},
    "idle": {"sleep_on_idle": True},
    "what a CPU cannot do": {"sampling_backend": "flashinfer"},
    "way of loading": {"load_format": "safetensors", "model_loader_extra_config": "{}"},
}

OTHER_VARIABLES = {
    "of the engine": {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"},
    "of Inductor": {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"},
    "cores of a rank": {"SGLANG_CPU_OMP_THREADS_BIND": "0-1|2-3"},
}

SAME_VARIABLES = {
    "which cores": {"SGLANG_CPU_OMP_THREADS_BIND": "4|6"},
    "a start": {"SGLANG_RUN_ID": "another"},
    "places": {"HOME": "/tmp", "FLASHINFER_WORKSPACE_BASE": "/x", "TRITON_CACHE_DIR": "/y"},
    "ours": {"FASTLOAD_CONCURRENCY": "7", "SGLANG_PLUGINS": "fastload,other"},
}


class Keys:
    """Answers of the worker, which decides all arguments in one process."""

    def __init__(self, work: Path) -> None:
        from fastload_common.testing.tiny_models import write_tiny_model

        self.model = work / "model"
        write_tiny_model(self.model, "qwen3")
        moved = shutil.copytree(self.model, work / "another" / "place")
        (moved / "README.md").write_text("More words.")
        changed = shutil.copytree(self.model, work / "changed")
        config = json.loads((changed / "config.json").read_text())
        (changed / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
        jobs: dict[str, dict[str, Any]] = {
            "as it is": {},
            "once more": {},
            "moved": {"arguments": {"model_path": str(moved)}},
            "changed": {"arguments": {"model_path": str(changed)}},
        }
        for name, arguments in (OTHER | SAME).items():
            jobs[name] = {"arguments": arguments}
        for name, variables in (OTHER_VARIABLES | SAME_VARIABLES).items():
            jobs[name] = {"variables": variables}
        for size in (2048, 4096):
            whole = {"enable_torch_compile": True, "max_total_tokens": size}
            jobs[f"whole model, {size} tokens"] = {"arguments": whole}
        self.found = self._ask(work, jobs)

    def _ask(self, work: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        usual = {"model_path": "{model}"}
        asked = json.dumps(
            [{**job, "arguments": {**usual, **job.get("arguments", {})}} for job in jobs.values()]
        )
        for name, path in (("model", self.model), ("changed", work / "changed")):
            asked = asked.replace(f"{{{name}}}", str(path))
        done = subprocess.run(
            [sys.executable, str(WORKER), asked],
            env={**environment(work), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=400,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert len(lines) == len(jobs), done.stdout[-5000:]
        answers = [json.loads(line.removeprefix("RESULT ")) for line in lines]
        return dict(zip(jobs, answers, strict=True))

    def __getitem__(self, name: str) -> str:
        assert "key" in self.found[name], self.found[name]
        return str(self.found[name]["key"])


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.mark.parametrize("name", ["changed", *OTHER, *OTHER_VARIABLES])
def test_another_artefact_has_another_key(keys: Keys, name: str) -> None:
    others = {keys[other] for other in keys.found if other != name}
    assert keys[name] not in others


@pytest.mark.parametrize("name", ["once more", "moved", *SAME, *SAME_VARIABLES])
def test_the_same_artefact_has_the_same_key(keys: Keys, name: str) -> None:
    assert keys[name] == keys["as it is"], keys.found[name]


def test_pools_are_shapes_where_the_whole_model_is_compiled(keys: Keys) -> None:
    sizes = {keys[f"whole model, {size} tokens"] for size in (2048, 4096)}
    assert len({*sizes, keys["whole model"]}) == 3


def test_every_listed_argument_is_one(keys: Keys) -> None:
    """What is listed for an older release may be gone from a newer one, but not much of it."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    known = namespace_of(ServerArgs)
    listed = {*facts.IGNORED, *facts.KEPT, *facts.NAMED, *facts.CONTENT, *facts.POOL_SIZES}
    assert listed - set(known) == set()
    assert set(facts.TABLES) | set(facts.IGNORED_NAMESPACES) <= set(known.values())
    assert not facts.IGNORED & {*facts.KEPT, *facts.NAMED, *facts.CONTENT, *facts.POOL_SIZES}


def test_nothing_secret_is_in_a_key(keys: Keys) -> None:
    text = json.dumps(keys.found["secrets"]) + json.dumps(keys.found["address"])
    for word in ('"one"', '"two"', "31234", str(keys.model)):
        assert word not in text
