"""What is special about an architecture when a small configuration of it is made.

Only what `sweep_shrink` cannot know: numbers that must fit each other in a way of this family's
own, and defaults that are no valid configuration.
"""

from __future__ import annotations

from typing import Any

from fastload_common.testing.sweep_shrink import VOCAB_SIZE

__all__ = ["EXTRA"]

_GEMMA4_TEXT: dict[str, Any] = {"per_layer_config": ..., "global_head_dim": 64}

EXTRA: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"config": {"score_func": "sigmoid", "n_group": 1, "topk_group": 1}},
    "DbrxForCausalLM": {"config": {"output_attentions": ...}},
    "EmbeddingGemma2Model": {"config": _GEMMA4_TEXT},
    "FalconForCausalLM": {"config": {"ffn_hidden_size": 512}},
    "FalconH1ForCausalLM": {"config": {"mamba_d_ssm": 128, "mamba_n_heads": 4}},
    "FalconMambaForCausalLM": {"config": {"intermediate_size": 256}},
    "MambaForCausalLM": {"config": {"intermediate_size": 256}},
    "Mamba2ForCausalLM": {"config": {"num_heads": 8}},
    "Gemma4ForCausalLM": {"config": _GEMMA4_TEXT},
    "Gemma4ForConditionalGeneration": {"config": {"text_config": _GEMMA4_TEXT}},
    "Gemma4UnifiedForConditionalGeneration": {"config": {"text_config": _GEMMA4_TEXT}},
    "DiffusionGemmaForBlockDiffusion": {"config": {"text_config": _GEMMA4_TEXT}},
    "Gemma3nForCausalLM": {
        "config": {
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    },
    "Glm4MoeForCausalLM": {"config": {"head_dim": 32}},
    "Glm4MoeLiteForCausalLM": {"config": {"first_k_dense_replace": 1, "num_key_value_heads": 4}},
    "Glm5NextForConditionalGeneration": {"config": {"text_config": {"num_key_value_heads": 4}}},
    "GPTJForCausalLM": {"config": {"rotary_dim": 16}},
    "GptOssForCausalLM": {"config": {"intermediate_size": 256}},
    "HYV3ForCausalLM": {"config": {"first_k_dense_replace": 1}},
    "HunYuanDenseV1ForCausalLM": {"config": {"head_dim": 32}},
    "HunYuanMoEV1ForCausalLM": {"config": {"head_dim": 32}},
    "HunYuanVLForConditionalGeneration": {"config": {"text_config": {"head_dim": 32}}},
    "Lfm2ForCausalLM": {"config": {"block_dim": 128, "conv_dim": 128, "block_norm_eps": 1e-5}},
    "Lfm2MoeForCausalLM": {"config": {"layer_types": ["conv", "full_attention"]}},
    "LongcatFlashForCausalLM": {"config": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True}},
    "MiniMaxM2ForCausalLM": {"config": {"rotary_dim": 16}},
    "MiMoV2FlashForCausalLM": {
        "config": {"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1]}
    },
    "NemotronForCausalLM": {"config": {"num_key_value_heads": 2}},
    "Zamba2ForCausalLM": {"config": {"attention_hidden_size": 256}},
    "BertForMaskedLM": {"config": {"max_position_embeddings": VOCAB_SIZE}},
}
"""Architecture -> ``before`` (arguments of the first configuration), ``config`` (laid over the
small one), ``class`` (of transformers, where its name is another one)."""
