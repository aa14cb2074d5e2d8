"""The key of the compile cache: complete, and free of what differs from pod to pod."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fastload_common.compile_cache.content import model_content, model_content_of
from fastload_common.compile_cache.factors import check_factors, pick_variables
from fastload_common.compile_cache.key import diff, key_of
from fastload_common.compile_cache.machine import machine_factors
from fastload_common.errors import FactorsInvalidError

CONFIG = b'{"architectures": ["Qwen3"], "hidden_size": 64, "_name_or_path": "%s"}'

FACTORS: dict[str, Any] = {
    **machine_factors(kind="cpu"),
    "engine.name": "vllm",
    "engine.version": "0.32.0",
    "engine.source": "1" * 64,
    "engine.variables": {"VLLM_USE_AOT_COMPILE": "0"},
    "model.content": model_content({"config.json": CONFIG % b"a"}),
    "model.quantization": "fp8",
    "dtype.model": "bfloat16",
    "dtype.kv_cache": "auto",
    "limits.max_model_len": 4096,
    "limits.max_num_batched_tokens": 8192,
    "layout.tensor": 2,
    "layout.pipeline": 2,
    "layout.pipeline_partition": [16, 16],
    "layout.ranks": [0, 1],
    "layout.devices": [0, 1],
    "speculative.method": "eagle",
    "speculative.tokens": 3,
    "lora.enabled": True,
    "lora.targets": ["q_proj"],
    "multimodal.limits": {"image": 1},
    "attention.backend": "FLASH_ATTN",
    "compilation.graph_sizes": [1, 2, 4],
    "compilation.settings": {"mode": 3, "custom_ops": ["none"]},
}


# C03

NOISE = {
    "HOSTNAME": "pod-7",
    "POD_IP": "10.0.0.7",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
    "VLLM_RAY_BUNDLE_INDICES": "0,1",
    "VLLM_HOST_IP": "10.0.0.7",
    "VLLM_PORT": "1234",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_API_KEY": "secret",
    "VLLM_PLUGINS": "fastload",
    "VLLM_CACHE_ROOT": "/cache",
    "FASTLOAD_CONCURRENCY": "7",
    "HOME": "/tmp/home",
    "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
    "AWS_ENDPOINT_URL": "https://example.invalid",
}


@pytest.mark.parametrize("variable", NOISE)
def test_c03_what_differs_from_pod_to_pod_changes_no_key(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_of({**FACTORS, **machine_factors(kind="cpu")})
    monkeypatch.setenv(variable, NOISE[variable])
    assert key_of({**FACTORS, **machine_factors(kind="cpu")}) == before
    with pytest.raises(FactorsInvalidError):
        key_of({**FACTORS, "engine.variables": {variable: NOISE[variable]}})


@pytest.mark.parametrize("variable", [name for name in NOISE if name.startswith("VLLM_")])
def test_c03_nobody_can_pick_such_a_variable_by_mistake(variable: str) -> None:
    with pytest.raises(FactorsInvalidError, match=variable):
        pick_variables(NOISE, [variable])


def test_c03_a_miss_says_which_factor_differs() -> None:
    other = check_factors({**FACTORS, "engine.variables": {"VLLM_USE_AOT_COMPILE": "1"}})
    assert diff(check_factors(FACTORS), other) == [
        "engine.variables.VLLM_USE_AOT_COMPILE: 0 here, 1 there"
    ]


# C05


def test_c05_the_same_model_elsewhere_has_the_same_content(tmp_path: Path) -> None:
    first = tmp_path / "first" / "m"
    first.mkdir(parents=True)
    (first / "config.json").write_bytes(CONFIG % b"s3://a/m")
    (first / "modeling_x.py").write_text("class X: ...")
    (first / "model.safetensors").write_bytes(b"weights")
    (first / "README.md").write_text("one")
    second = shutil.copytree(first, tmp_path / "second" / "revision-1")
    (second / "config.json").write_bytes(CONFIG.replace(b", ", b",\n  ") % b"/mnt/m")
    (second / "README.md").write_text("other words")
    (second / "model.safetensors").write_bytes(b"fine-tuned weights")
    assert model_content_of(first) == model_content_of(second)
    assert set(model_content_of(first)) == {"config.json", "modeling_x.py"}


@pytest.mark.parametrize(
    "changed",
    [
        {"config.json": b'{"architectures": ["Llama"], "hidden_size": 64}'},
        {"config.json": b'{"architectures": ["Qwen3"], "hidden_size": 65}'},
        {"modeling_x.py": b"class X:\n    a = 1\n"},
        {"code/deep.py": b"x = 1"},
        {"hf_quant_config.json": b'{"quant": "fp8"}'},
        {"quantize_config.json": b"{}"},
        {"preprocessor_config.json": b'{"size": 1}'},
    ],
    ids=str,
)
def test_c05_another_model_at_the_same_path_has_another_content(changed: dict[str, bytes]) -> None:
    model = {"config.json": CONFIG % b"m", "modeling_x.py": b"class X: ..."}
    before = key_of({**FACTORS, "model.content": model_content(model)})
    assert key_of({**FACTORS, "model.content": model_content({**model, **changed})}) != before


def test_c05_a_path_can_not_be_given_for_the_content() -> None:
    with pytest.raises(FactorsInvalidError, match="path or URL"):
        key_of({**FACTORS, "model.content": {"config.json": "s3://a/m"}})
    with pytest.raises(FactorsInvalidError, match=r"no config\.json"):
        model_content({"README.md": b""})


# C07, C02 and C12: one thing at a time. The artefact would be another one in each of these.

SINGLE_CHANGES: list[tuple[str, str, Any]] = [
    ("engine version", "engine.version", "0.32.1"),
    ("a local edit in the engine", "engine.source", "2" * 64),
    ("a variable that changes code", "engine.variables", {"VLLM_USE_AOT_COMPILE": "1"}),
    ("model", "model.content", {"config.json": "3" * 64}),
    ("override of its configuration", "model.overrides", {"rope_theta": 1}),
    ("quantization", "model.quantization", "awq"),
    ("dtype", "dtype.model", "float16"),
    ("dtype of the KV cache", "dtype.kv_cache", "fp8"),
    ("longest sequence", "limits.max_model_len", 8192),
    ("largest batch", "limits.max_num_batched_tokens", 4096),
    ("tensor parallel", "layout.tensor", 4),
    ("partition of the pipeline", "layout.pipeline_partition", [15, 17]),
    ("other ranks on this node", "layout.ranks", [2, 3]),
    ("other devices", "layout.devices", [1, 0]),
    ("tokens of a draft", "speculative.tokens", 4),
    ("targets of LoRA", "lora.targets", ["q_proj", "k_proj"]),
    ("items of an input", "multimodal.limits", {"image": 2}),
    ("attention backend", "attention.backend", "FLASHINFER"),
    ("sizes of graphs", "compilation.graph_sizes", [1, 2, 4, 8]),
    ("a custom operator", "compilation.settings", {"mode": 3, "custom_ops": ["all"]}),
    ("torch", "software.torch", "2.13.1"),
    ("a build of torch", "software.torch_build", "f" * 40),
    ("CUDA 12.8 and 13", "software.cuda", "13.0"),
    ("Triton", "software.triton", "triton 3.10.0"),
    ("Python", "software.python", "CPython 3.12.1"),
    ("C library", "software.libc", "musl 1.2"),
    ("sm_80, sm_90, sm_120", "hardware.gpu_architectures", ["sm_120"]),
    ("driver", "hardware.gpu_driver", "580.1"),
    ("AVX-512 and AVX2", "hardware.cpu_isa", ["avx2"]),
    ("processor", "hardware.machine", "aarch64"),
]


@pytest.mark.parametrize(("what", "name", "value"), SINGLE_CHANGES, ids=lambda v: str(v)[:30])
def test_c07_c12_each_single_change_is_another_key_and_is_named(
    what: str, name: str, value: Any
) -> None:
    changed = {**FACTORS, name: value}
    assert key_of(changed) != key_of(FACTORS), what
    words = diff(check_factors(changed), check_factors(FACTORS))
    assert len(words) == 1, words
    assert words[0].startswith(name)


def test_c07_c12_all_of_them_are_different_keys() -> None:
    keys = {key_of(FACTORS), *(key_of({**FACTORS, name: v}) for _, name, v in SINGLE_CHANGES)}
    assert len(keys) == len(SINGLE_CHANGES) + 1
