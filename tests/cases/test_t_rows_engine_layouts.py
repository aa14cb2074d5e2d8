"""Whole models on any rank of any layout of the real engine: what each rank reads of the store.

The same process is one rank after the other; every parameter is compared with the default
loader's. SGLang's layouts are cases of its adapter.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing.rig import Rig
from tests.cases.engine_checkpoints import (
    body_bytes,
    mxfp4_experts,
    put,
    rewrite,
    write_config,
    write_mtp_model,
    write_numbered,
)
from tests.cases.engine_process import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def compare(
    engine: EngineProcess, model: Path, ranks: list[int], uri: str | None = None, **more: Any
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = engine.call(
        "engine_models:compare_ranks", model=str(model), uri=uri or str(model), ranks=ranks, **more
    )
    for row in rows:
        assert row["tensors"] > 10
        assert row["missing"] == []
        assert row["different"] == []
        assert row["report"]["eager_reason"] is None
    return rows


def held_and_needed(row: dict[str, Any]) -> bool:
    needed: int = row["report"]["needed_bytes"]
    held: int = row["held_bytes"]
    return needed == held > 0


F32 = {"dtype": "float32"}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Four layers; tied embeddings or not."""
    root = tmp_path_factory.mktemp("qwen3")
    return {
        tied: write_numbered(
            root / str(tied), "qwen3", num_hidden_layers=4, tie_word_embeddings=tied
        )
        for tied in (False, True)
    }


# T01


@pytest.mark.parametrize(
    ("config_class", "more"),
    [
        # One norm for the heads of q, one for those of k; for each head; for all of them at once.
        ("Qwen3Config", {"head_dim": 16}),
        ("CohereConfig", {"use_qk_norm": True}),
        ("Olmo2Config", {}),
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_t01_norms_of_heads(
    engine: EngineProcess, tmp_path: Path, config_class: str, more: dict[str, Any], kv_heads: int
) -> None:
    """With fewer KV heads than ranks. Where the engine's loader fails, in its own words."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "hidden_size": 128}
    model = write_config(tmp_path / "m", config_class, **(heads | more))
    rows = engine.call(
        "engine_models:compare_or_refuse",
        model=str(model),
        ranks=[0, 3],
        layout={"tensor": 4},
        options=F32,
    )
    assert "refused" not in rows[0]
    for row in rows:
        if "refused" in row:
            # This vLLM looks for the norm of a head that there is only once.
            assert config_class == "CohereConfig"
            assert row["said"].startswith("TensorMismatchError: ")
            assert "k_norm" in row["said"]
            continue
        assert row["different"] == []
        assert held_and_needed(row)


# T04


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 2880 in blocks of 32: 360 of them for each of eight ranks, so 384 with padding."""
    from fastload_common.testing.tiny_models import write_tiny_model

    directory = write_tiny_model(
        tmp_path_factory.mktemp("gpt-oss"),
        "gpt_oss",
        num_local_experts=2,
        intermediate_size=2880,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        hidden_size=64,
    )
    rewrite(directory, mxfp4_experts)
    path = directory / "config.json"
    quantized = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(quantized))
    return directory


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_t04_padded_widths_of_mxfp4_experts(
    engine: EngineProcess, gpt_oss: Path, tensor: int
) -> None:
    rows = compare(engine, gpt_oss, list(range(tensor)), layout={"tensor": tensor})
    needed = [row["report"]["needed_bytes"] for row in rows]
    # Each byte of the experts is some rank's; norms, the router with its bias, and the bias of
    # the attention's output are everybody's.
    replicated = (3 * 64 + 2 * 64 + 2 + 64) * 2
    assert sum(needed) == rows[0]["report"]["model_bytes"] + (tensor - 1) * replicated
    if tensor == 8:
        # Seven ranks have 12 blocks, and the last one what is left of 90. The first one alone
        # reads the bias of the experts' outputs: the engine sets it to zero for the others.
        block_rows = 2 * 2 * 32  # of both experts, gate and up
        of_a_block = block_rows * (32 + 2) + 2 * 64 * (16 + 1) + block_rows * 2
        assert needed[1:7] == [needed[1]] * 6
        assert needed[0] == needed[1] + 2 * 64 * 2
        assert needed[7] == needed[1] - 6 * of_a_block


# T09


def test_t09_packed_projections(engine: EngineProcess, tmp_path: Path) -> None:
    """Phi-3: q, k and v are one tensor in the file and in the engine, divided differently."""
    model = write_config(tmp_path / "phi3", "Phi3Config")
    for row in compare(engine, model, [0, 1], layout={"tensor": 2}, options=F32):
        assert held_and_needed(row)
        # Norms are everybody's.
        assert row["held_bytes"] == (row["report"]["model_bytes"] + 3 * 64 * 4) // 2


def test_t09_state_spaces(engine: EngineProcess, tmp_path: Path) -> None:
    """Mamba: the loader reads what it has just filled, and convolutions are put together."""
    from fastload_common.testing.tiny_models import write_tiny_model

    model = write_tiny_model(tmp_path / "mamba2", "mamba2")
    for row in compare(engine, model, [0, 1], layout={"tensor": 2}):
        assert any(name.endswith(".mixer.A") for name in row["names"])
        assert row["report"]["needed_bytes"] < 0.6 * row["report"]["model_bytes"]


# T13


def test_t13_a_rank_asks_for_its_own_experts(
    engine: EngineProcess, engine_store: Rig, tmp_path: Path
) -> None:
    """Eight ranks, two of sixteen experts for each; the store's log counts."""
    more = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 16}
    model = write_numbered(tmp_path / "moe", "qwen3_moe", num_hidden_layers=1, **more)
    expert_bytes = 16 * 3 * 64 * 128 * 4
    rows = compare(
        engine,
        model,
        [0, 7],
        prepared(engine_store, model, "t13", 8),
        layout={"tensor": 8, "experts": True},
        options=F32,
        environ={"FASTLOAD_MERGE_GAP_BYTES": "0"},
    )
    for row in rows:
        assert held_and_needed(row)
        other_bytes = row["report"]["model_bytes"] - expert_bytes
        asked = body_bytes(engine_store, f"t13-{row['rank']}/")
        assert asked <= 1.05 * (expert_bytes / 8 + other_bytes)
        assert asked <= 1.05 * row["held_bytes"]


# T17


def prepared(rig: Rig, model: Path, name: str, ranks: int) -> str:
    """The model once for each rank, so that the log tells who read what."""
    for rank in range(ranks):
        put(rig, model, f"{name}-{rank}")
    return f"s3://engine/{name}-{{rank}}"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("partition", ["1,3", "1,1,2"])
def test_t17_a_stage_reads_its_own_layers(
    engine: EngineProcess, engine_store: Rig, qwen3: dict[bool, Path], tied: bool, partition: str
) -> None:
    stages = partition.count(",") + 1
    name = f"t17-{tied}-{stages}"
    environ = {"VLLM_PP_LAYER_PARTITION": partition, "FASTLOAD_MERGE_GAP_BYTES": "0"}
    rows = compare(
        engine,
        qwen3[tied],
        list(range(stages)),
        prepared(engine_store, qwen3[tied], name, stages),
        layout={"pipeline": stages},
        options=F32,
        environ=environ,
    )
    for rank, row in enumerate(rows):
        assert held_and_needed(row)
        asked = body_bytes(engine_store, f"{name}-{rank}/")
        assert row["held_bytes"] <= asked <= 1.01 * row["held_bytes"]
    embedding_bytes = 512 * 128 * 4
    total = sum(row["held_bytes"] for row in rows)
    # Tied embeddings are wanted at both ends; everything else by one stage only.
    assert total == rows[0]["report"]["model_bytes"] + tied * embedding_bytes


# T18

MTP = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}])
def test_t17_t18_layers_that_predict_more_tokens(
    engine: EngineProcess, engine_store: Rig, tmp_path: Path, layout: dict[str, int]
) -> None:
    """A draft in the target's own checkpoint; both are read from the store, each its own part."""
    model = write_mtp_model(tmp_path / "mtp")
    uri = put(engine_store, model, "t18-mtp")
    ranks = max(layout.values(), default=1)
    rows = engine.call(
        "engine_drafts:compare_drafts",
        wanted={"model": str(model), "speculative": MTP},
        asked={"model": uri, "speculative": MTP},
        ranks=list(range(ranks)),
        layout=layout,
    )
    for row in rows:
        assert row["target_equal"]
        assert row["draft_equal"]
        for part in ("target", "draft"):
            report = row[f"{part}_report"]
            assert report["uri"] == uri
            assert report["needed_bytes"] == row[f"{part}_held_bytes"] > 0
    if not layout:
        [row] = rows
        # Nothing of one is in the other, but the embeddings, of which the draft takes the last
        # in the file; its head is its own.
        assert row["target_held_bytes"] + row["draft_held_bytes"] == row["model_bytes"]


@pytest.mark.parametrize("draft_from", ["s3", "directory"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_t18_a_draft_has_its_own_place(
    engine: EngineProcess,
    engine_store: Rig,
    qwen3: dict[bool, Path],
    tmp_path: Path,
    draft_from: str,
    tensor: int,
) -> None:
    draft = write_numbered(tmp_path / "draft", "qwen3", num_hidden_layers=1)
    uris = [put(engine_store, qwen3[False], "t18-target"), put(engine_store, draft, "t18-draft")]
    place = uris[1] if draft_from == "s3" else str(draft)
    common = {"method": "draft_model", "num_speculative_tokens": 2}
    rows = engine.call(
        "engine_drafts:compare_drafts",
        wanted={"model": str(qwen3[False]), "speculative": common | {"model": str(draft)}},
        asked={"model": uris[0], "speculative": common | {"model": place}},
        ranks=list(range(tensor)),
        layout={"tensor": tensor},
    )
    for row in rows:
        assert row["target_equal"]
        assert row["draft_equal"]
        assert row["target_report"]["uri"] == uris[0]
        assert row["draft_report"]["uri"] == place
        assert row["draft_report"]["needed_bytes"] == row["draft_held_bytes"]


def test_t18_a_draft_without_safetensors(
    engine: EngineProcess, engine_store: Rig, qwen3: dict[bool, Path], tmp_path: Path
) -> None:
    """The error says what to do, and what it says works."""
    import torch
    from safetensors.torch import load_file

    draft = write_numbered(tmp_path / "draft", "qwen3", num_hidden_layers=1)
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    for path in draft.glob("*.safetensors*"):
        path.unlink()
    uri = put(engine_store, qwen3[False], "t18-target")
    speculative = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(draft)}
    call = "engine_drafts:refused"
    said = engine.call(call, model=uri, load_format="fastload", speculative=speculative)
    assert said.startswith("NoWeightsError")
    assert str(draft) in said
    assert "safetensors" in said
    own = {"draft_load_config": {"load_format": "auto"}}
    said = engine.call(call, model=uri, load_format="fastload", speculative=speculative | own)
    assert said == "loaded"


# T22


def test_t22_a_rank_of_a_node_is_not_a_rank_of_the_world(engine: EngineProcess) -> None:
    """Memory and requests are shares of a node's, so that is what counts: RANK=9, LOCAL_RANK=1."""
    place = engine.call("engine_ranks:place_of", rank=9, local_rank=1, nodes=2, tensor=16)
    assert (place["rank"], place["world_size"]) == (9, 16)
    assert (place["local_rank"], place["local_world_size"]) == (1, 8)


def test_t22_replicas_on_one_node(engine: EngineProcess) -> None:
    places = [
        engine.call("engine_ranks:place_of", rank=rank, local_rank=rank, tensor=2, data=2)
        for rank in range(4)
    ]
    assert [place["rank"] for place in places] == [0, 1, 2, 3]
    assert [place["local_rank"] for place in places] == [0, 1, 2, 3]
    assert {place["local_world_size"] for place in places} == {4}
