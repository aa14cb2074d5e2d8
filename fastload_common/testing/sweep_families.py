"""What is special about an architecture when a small configuration of it is made.

Only what `sweep_shrink` cannot know: numbers that must fit each other in a way of this family's
own, and defaults that are no valid configuration.
"""

from __future__ import annotations

from typing import Any

from fastload_common.testing.sweep_shrink import VOCAB_SIZE

__all__ = ["special"]

_DEEPSEEK_V3: dict[str, Any] = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}
_QWEN4_EXP: dict[str, Any] = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
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
            "attn_config": {"output_attentions": ..., "rope_theta": 10000.0},
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
    "Gemma4ForConditionalGeneration": {
        "before": {"vision_config": {}},
        "config": {"text_config": _GEMMA4_TEXT},
    },
    "Gemma4UnifiedForConditionalGeneration": {
        "before": {"vision_config": {}},
        "config": {"text_config": _GEMMA4_TEXT},
    },
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
    "NomicBertModel": {
        "config": {
            "activation_function": "swiglu",
            "mlp_fc1_bias": False,
            "mlp_fc2_bias": False,
            "qkv_proj_bias": False,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_base": 10000,
            "rotary_emb_interleaved": False,
            "max_trained_positions": 256,
        }
    },
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
    "DeepseekV3ForCausalLM": {"config": _DEEPSEEK_V3},
    "DeepseekV32ForCausalLM": {"config": _DEEPSEEK_V3},
    "GlmMoeDsaForCausalLM": {"config": _DEEPSEEK_V3},
    "DeepseekV4ForCausalLM": {"config": {"mlp_layer_types": ["hash_moe", "moe"]}},
    "BertForMaskedLM": {"config": {"max_position_embeddings": VOCAB_SIZE}},
}
"""Architecture -> what is special, as in `special`."""

_BAILING: dict[str, Any] = {
    "head_dim": 32,
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 48,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "n_group": 1,
    "topk_group": 1,
}

# Their configuration's class is not in transformers, but one that is has its fields.
LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "BailingMoeForCausalLM": ("Qwen3MoeForCausalLM", _BAILING),
    "BailingMoeV2ForCausalLM": ("Qwen3MoeForCausalLM", _BAILING),
    "BertSpladeSparseEmbeddingModel": ("BertForMaskedLM", {}),
    "BgeM3EmbeddingModel": ("XLMRobertaModel", {"position_embedding_type": "absolute"}),
    "DeepseekForCausalLM": ("DeepseekV2ForCausalLM", {"moe_layer_freq": 1}),
    "DeepseekV3BidirectionalModel": ("DeepseekV3ForCausalLM", {}),
    "ExaoneForCausalLM": (
        "LlamaForCausalLM",
        {"layer_norm_epsilon": 1e-5, "activation_function": "silu"},
    ),
    "ExaoneMoEForCausalLM": ("ExaoneMoeForCausalLM", {}),
    "GteNewModel": (
        "BertModel",
        {"layer_norm_type": "layer_norm", "rope_theta": 10000.0, "position_embedding_type": "rope"},
    ),
    "HF_ColBERT": ("BertModel", {"dim": 32}),
    "IQuestCoderForCausalLM": ("LlamaForCausalLM", {}),
    "InternLM2ForCausalLM": ("LlamaForCausalLM", {"bias": False}),
    "InternLM2ForRewardModel": ("LlamaForCausalLM", {"bias": False}),
    "InternLM3ForCausalLM": ("LlamaForCausalLM", {"qkv_bias": False, "bias": False}),
    "InternS1ForConditionalGeneration": ("InternVLForConditionalGeneration", {}),
    "LLaMAForCausalLM": ("LlamaForCausalLM", {}),
    "LlamaBidirectionalForSequenceClassification": ("LlamaForCausalLM", {"pooling": "avg"}),
    "LlamaBidirectionalModel": ("LlamaForCausalLM", {"pooling": "avg"}),
    "MiMoForCausalLM": ("Qwen2ForCausalLM", {}),
    "MiniCPMForCausalLM": (
        "LlamaForCausalLM",
        {"scale_emb": 1.0, "scale_depth": 1.4, "dim_model_base": 128},
    ),
    "NemotronHPuzzleForCausalLM": ("NemotronHForCausalLM", {}),
    "OrionForCausalLM": ("LlamaForCausalLM", {}),
    "PanguEmbeddedForCausalLM": ("LlamaForCausalLM", {"bias": True}),
    "PanguUltraMoEForCausalLM": (
        "DeepseekV3ForCausalLM",
        {"sandwich_norm": True, "router_enable_expert_bias": True},
    ),
    "PhiMoEForCausalLM": ("MixtralForCausalLM", {"attention_bias": True, "lm_head_bias": True}),
    "Qwen2ForProcessRewardModel": ("Qwen2ForCausalLM", {"num_labels": 2}),
    "Qwen2ForRewardModel": ("Qwen2ForCausalLM", {"num_labels": 1}),
    "Rnj1ForCausalLM": ("Gemma3ForCausalLM", {}),
    "SarvamMLAForCausalLM": (
        "DeepseekV3ForCausalLM",
        {
            "num_experts": 4,
            "num_shared_experts": 1,
            "moe_layer_freq": 1,
            "moe_shared_expert_intermediate_size": 48,
        },
    ),
    "SarvamMoEForCausalLM": ("Qwen3MoeForCausalLM", _BAILING),
    "SolarForCausalLM": (
        "LlamaForCausalLM",
        {"bskcn_1": [0], "bskcn_2": [0], "bskcn_3": [1], "bskcn_4": [1], "bskcn_tv": [0.9, 0.8]},
    ),
    "Step1ForCausalLM": ("LlamaForCausalLM", {}),
    "TeleChat2ForCausalLM": (
        "LlamaForCausalLM",
        {
            "n_head": 4,
            "n_layer": 2,
            "ffn_hidden_size": 176,
            "layer_norm_epsilon": 1e-5,
            "bias": False,
        },
    ),
    "TeleChat3ForCausalLM": ("LlamaForCausalLM", {}),
    "TeleFLMForCausalLM": (
        "LlamaForCausalLM",
        {"use_mup": True, "mup_scale_factor": 1.0, "output_mult": 1.0, "input_mult": 1.0},
    ),
    "TransformersForCausalLM": ("LlamaForCausalLM", {}),
    "TransformersMoEForCausalLM": ("Qwen3MoeForCausalLM", {}),
    "TransformersEmbeddingModel": ("Qwen3Model", {}),
    "TransformersMoEEmbeddingModel": ("Qwen3MoeModel", {}),
    "TransformersMultiModalForCausalLM": ("LlavaForConditionalGeneration", {}),
    "TransformersForSequenceClassification": ("Qwen3ForSequenceClassification", {}),
    "VoyageQwen3BidirectionalEmbedModel": ("Qwen3ForCausalLM", {"num_labels": 32}),
}
"""Architecture -> (class of transformers, what is laid over its small configuration)."""


def special(architecture: str) -> dict[str, Any]:
    """What is special about an architecture.

    Returns:
        ``class`` (of transformers, where its name is another one), ``before`` (arguments of the
        first configuration), ``config`` (laid over the small one), ``engine`` (arguments of the
        engine); each may be absent.
    """
    if architecture not in LIKE:
        return EXTRA.get(architecture, {})
    like, changes = LIKE[architecture]
    known = EXTRA.get(like, {})
    return {**known, "class": like, "config": {**known.get("config", {}), **changes}}
