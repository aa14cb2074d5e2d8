"""Makes a small configuration of a large one, whatever the architecture.

Works on the plain dictionary of a configuration: known names get small values that fit each
other (hidden size = heads × head size), lists with an entry a layer are cut, token ids move
below the vocabulary's end. Knows no architecture; what is special about one is in
`sweep_families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["SMALL", "VOCAB_SIZE", "merged", "shrunk"]

VOCAB_SIZE = 509
"""A prime: padded for every number of ranks, and to every multiple."""

HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 176
EXPERTS = 4
LAYERS = 2


def _each(names: str, value: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


SMALL: dict[str, int] = {
    **_each(
        (
            "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth "
            "num_decoder_layers encoder_num_layers num_encoder_layers depths_num "
            "num_local_layers text_layers vision_layers audio_layers"
        ),
        LAYERS,
    ),
    **_each(
        "hidden_size d_model n_embd embed_dim dim model_dim word_embed_proj_dim hidden_dim "
        "projection_dim out_hidden_size output_dim text_hidden_size encoder_hidden_size "
        "projection_hidden_size lru_width embedding_size cross_attention_hidden_size",
        HIDDEN,
    ),
    **_each(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads attention_heads num_query_heads",
        HEADS,
    ),
    **_each(
        "num_key_value_heads num_kv_heads n_kv_heads multi_query_group_num "
        "num_global_key_value_heads swa_num_key_value_heads",
        KV_HEADS,
    ),
    **_each("head_dim attention_head_dim kv_channels global_head_dim", HEAD_DIM),
    **_each(
        "intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size d_ff mlp_dim "
        "intermediate_size_mlp feed_forward_size shared_intermediate_size dense_intermediate_size "
        "block_ff_dim",
        INTERMEDIATE,
    ),
    **_each("moe_intermediate_size expert_ffn_hidden_size expert_dim", 48),
    **_each(
        "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts",
        EXPERTS,
    ),
    **_each(
        "num_experts_per_tok num_experts_per_token moe_top_k moe_topk top_k_experts "
        "num_experts_per_topk moe_k",
        2,
    ),
    **_each("n_group topk_group num_expert_group", 1),
    **_each("n_shared_experts num_shared_experts", 1),
    # At least one layer with experts.
    **_each("first_k_dense_replace num_dense_layers n_dense_layers moe_layer_start_index", 1),
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_sequence_length": 256,
    "max_source_positions": 64,
    "max_target_positions": 64,
    # Multi-head latent attention.
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "qk_head_dim": 48,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 16,
    # State-space and linear attention.
    "mamba_d_state": 16,
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_n_groups": 4,
    "mamba_d_ssm": 256,
    "mamba_dt_rank": 8,
    "time_step_rank": 8,
    "n_groups": 4,
    "mamba_expand": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    # Images and sound.
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
    "num_mel_bins": 16,
    "sliding_window": 64,
    "attention_chunk_size": 64,
}
"""Name of a number in a configuration -> its small value."""

_FIRST_TOKEN_ID = 8

MROPE_SECTION = (4, 6, 6)

# Of no use in a configuration that is read again, or of another version.
_MADE_ANEW = frozenset(
    {"torch_dtype", "dtype", "transformers_version", "architectures", "_name_or_path"}
)


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """Give a copy with small numbers, in all configurations within the configuration too."""
    return _shrunk(config, [_FIRST_TOKEN_ID])


def _shrunk(config: Mapping[str, Any], next_id: list[int]) -> dict[str, Any]:
    layers = [value for name, value in config.items() if SMALL.get(name) == LAYERS]
    out: dict[str, Any] = {}
    for name, value in config.items():
        if name in _MADE_ANEW:
            continue
        if isinstance(value, Mapping):
            out[name] = _shrunk(value, next_id)
        elif type(value) is int and name in SMALL:
            out[name] = min(value, SMALL[name]) if value > 0 else value
        elif type(value) is int and _is_token_id(name) and value >= VOCAB_SIZE:
            next_id[0] += 1
            out[name] = next_id[0]
        elif isinstance(value, (list, tuple)):
            out[name] = _shrunk_list(name, list(value), layers)
        else:
            out[name] = value
    return out


def _shrunk_list(name: str, values: list[Any], layers: list[int]) -> list[Any]:
    if _is_token_id(name):
        return [number % VOCAB_SIZE for number in values if type(number) is int]
    if name == "mrope_section":
        return list(MROPE_SECTION)
    if len(values) > LAYERS and len(values) in layers:
        return _one_of_each(values, LAYERS)
    return values


def _one_of_each(values: list[Any], count: int) -> list[Any]:
    """A few entries of a long list: as many different ones as there is room for, in order."""
    kinds = [value for index, value in enumerate(values) if value not in values[:index]]
    return (kinds + [kinds[-1]] * count)[:count]


def _is_token_id(name: str) -> bool:
    return name.endswith("_id") or ("token" in name and ("id" in name or "index" in name))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay changes over a configuration, level by level; a change to ``...`` takes the entry out."""
    out = dict(base)
    for name, value in changes.items():
        if value is ...:
            out.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(out.get(name), Mapping):
            out[name] = merged(out[name], value)
        else:
            out[name] = value
    return out
