"""What is special about an architecture when a small configuration of it is made.

Only what `sweep_shrink` cannot know: numbers that must fit each other in a way of this family's
own, and defaults that are no valid configuration.
"""

from __future__ import annotations

from typing import Any

from fastload_common.testing.sweep_shrink import VOCAB_SIZE

__all__ = ["EXTRA"]

_QWEN4_EXP: dict[str, Any] = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
}
_GEMMA4_TEXT: dict[str, Any] = {"per_layer_config": ..., "global_head_dim": 64}

EXTRA: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {
        "config": {
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
            "mup_enabled": True,
        }
    },
    "DbrxForCausalLM": {
        "config": {
            "attn_config": {"output_attentions": ...},
            "ffn_config": {"output_attentions": ...},
        }
    },
    "EmbeddingGemma2Model": {"config": {"text_config": _GEMMA4_TEXT}},
    "FalconForCausalLM": {"config": {"ffn_hidden_size": 512}},
    "FalconH1ForCausalLM": {"config": {"mamba_d_head": 32, "mamba_n_groups": 4}},
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
    "GptOssForCausalLM": {"config": {"intermediate_size": 256, "num_key_value_heads": 4}},
    "HYV3ForCausalLM": {
        "config": {
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 48,
            "route_norm": True,
            "attention_head_dim": 32,
        }
    },
    "HunYuanDenseV1ForCausalLM": {"config": {"head_dim": 32}},
    "HunYuanMoEV1ForCausalLM": {"config": {"head_dim": 32}},
    "HunYuanVLForConditionalGeneration": {"config": {"text_config": {"head_dim": 32}}},
    "Lfm2ForCausalLM": {"config": {"block_dim": 128, "conv_dim": 128, "block_norm_eps": 1e-5}},
    "Lfm2MoeForCausalLM": {
        "config": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    },
    "Lfm2VlForConditionalGeneration": {
        "config": {"text_config": {"block_dim": 128, "conv_dim": 128, "block_norm_eps": 1e-5}}
    },
    "LongcatFlashForCausalLM": {
        "config": {
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "zero_expert_type": "identity",
            "zero_expert_num": 2,
        }
    },
    "MiniMaxM2ForCausalLM": {
        "config": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True}
    },
    "MiMoV2FlashForCausalLM": {
        "config": {
            "hybrid_layer_pattern": [0, 1],
            "moe_layer_freq": [0, 1],
            "layernorm_epsilon": 1e-5,
            "n_group": 1,
            "topk_group": 1,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "sliding_window_size": 64,
        }
    },
    "NemotronForCausalLM": {"config": {"num_key_value_heads": 2}},
    "Zamba2ForCausalLM": {
        "config": {"attention_hidden_size": 256, "attention_head_dim": 64, "num_key_value_heads": 4}
    },
    "Glm4vMoeForConditionalGeneration": {
        "config": {"text_config": {"head_dim": 32, "use_qk_norm": True}}
    },
    "Qwen3VLMoeForConditionalGeneration": {"config": {"text_config": {"norm_topk_prob": True}}},
    "Qwen3OmniMoeForConditionalGeneration": {
        "config": {"talker_config": {"text_config": {"shared_expert_intermediate_size": 48}}}
    },
    "Qwen4ExpForCausalLM": {"config": _QWEN4_EXP},
    "Qwen4ExpForConditionalGeneration": {"config": {"text_config": _QWEN4_EXP}},
    "KimiLinearForCausalLM": {"engine": {"enable_prefix_caching": True}},
    "GteModel": {"config": {"position_embedding_type": "rope"}},
    "XLMRobertaModel": {"config": {"position_embedding_type": "absolute"}},
    "NomicBertModel": {"config": {"activation_function": "swiglu"}},
    "AriaForConditionalGeneration": {
        "config": {
            "projector_patch_to_query_dict": {"4": 8},
            "max_value_projector_patch_to_query_dict": 8,
        }
    },
    "Granite4VisionForConditionalGeneration": {
        "before": {"text_config": {"model_type": "granite"}}
    },
    "NemotronHForCausalLM": {
        "config": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
    },
    "DeepseekV4ForCausalLM": {"config": {"mlp_layer_types": ["hash_moe", "moe"]}},
    "BertForMaskedLM": {"config": {"max_position_embeddings": VOCAB_SIZE}},
}
"""Architecture -> ``before`` (arguments of the first configuration), ``config`` (laid over the
small one), ``class`` (of transformers, where its name is another one)."""
