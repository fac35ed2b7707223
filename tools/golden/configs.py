"""config.json of the six families as the hub has them, at toy sizes. Callers: cases.py."""


def glm_moe_dsa(**over):
    """GLM-5 style: indexer in every layer, rope theta only inside rope_parameters."""
    cfg = {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
        "dtype": "bfloat16", "num_hidden_layers": 3, "hidden_size": 48,
        "num_attention_heads": 3, "num_key_value_heads": 3,
        "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "qk_head_dim": 40, "v_head_dim": 32,
        "head_dim": 64, "attention_bias": False, "attention_dropout": 0.0,
        "index_n_heads": 6, "index_head_dim": 32, "index_topk": 8,
        "indexer_rope_interleave": True, "rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "max_position_embeddings": 202752,
        "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "intermediate_size": 80, "moe_intermediate_size": 32,
        "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 128,
        "tie_word_embeddings": False, "eos_token_id": [120, 126, 127], "pad_token_id": 120,
        "num_nextn_predict_layers": 1, "initializer_range": 0.02, "use_cache": True,
        "ep_size": 1, "pretraining_tp": 1, "transformers_version": "5.4.0",
    }
    cfg.update(over)
    return cfg


def glm52(**over):
    """GLM-5.2 style: index_topk_freq / index_skip_topk_offset, head_dim 192, theta 8e6."""
    base = {
        "head_dim": 192, "index_topk_freq": 4, "index_skip_topk_offset": 3,
        "index_topk_pattern": None, "index_share_for_mtp_iteration": True,
        "moe_router_dtype": "float32", "max_position_embeddings": 1048576,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
        "transformers_version": "5.12.0",
    }
    base.update(over)
    return glm_moe_dsa(**base)


def glm4_moe_lite(**over):
    cfg = {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
        "dtype": "bfloat16", "num_hidden_layers": 2, "hidden_size": 80,
        "num_attention_heads": 5, "num_key_value_heads": 5,
        "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32,
        "attention_bias": False, "attention_dropout": 0.0, "partial_rotary_factor": 1.0,
        "rope_theta": 1000000, "rope_scaling": None, "rope_interleave": True,
        "max_position_embeddings": 202752, "first_k_dense_replace": 1,
        "intermediate_size": 112, "moe_intermediate_size": 32,
        "n_routed_experts": 6, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 128,
        "tie_word_embeddings": False, "eos_token_id": [120, 126, 127], "pad_token_id": 120,
        "num_nextn_predict_layers": 1,
    }
    cfg.update(over)
    return cfg


def glm4_moe(**over):
    cfg = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
        "torch_dtype": "bfloat16", "num_hidden_layers": 3, "hidden_size": 48,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "attention_bias": True, "attention_dropout": 0.0, "use_qk_norm": False,
        "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None,
        "max_position_embeddings": 131072, "first_k_dense_replace": 1,
        "intermediate_size": 112, "moe_intermediate_size": 32,
        "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 128,
        "tie_word_embeddings": False, "eos_token_id": [120, 126, 127], "pad_token_id": 120,
        "num_nextn_predict_layers": 1, "use_cache": True,
    }
    cfg.update(over)
    return cfg


YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096}


def deepseek_v3(**over):
    cfg = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16", "num_hidden_layers": 3, "hidden_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 32, "kv_lora_rank": 48,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24,
        "attention_bias": False, "attention_dropout": 0.0,
        "rope_theta": 10000, "rope_scaling": {"type": "yarn", **YARN},
        "max_position_embeddings": 163840, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "intermediate_size": 112, "moe_intermediate_size": 32,
        "n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "n_group": 4, "topk_group": 2, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 128,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "num_nextn_predict_layers": 1, "ep_size": 1, "use_cache": True,
    }
    cfg.update(over)
    return cfg


def deepseek_v32(**over):
    base = {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "index_n_heads": 6, "index_head_dim": 32, "index_topk": 8,
    }
    base.update(over)
    return deepseek_v3(**base)


def qwen3_moe(**over):
    cfg = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16", "num_hidden_layers": 2, "hidden_size": 48,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
        "attention_bias": False, "attention_dropout": 0.0,
        "rope_theta": 1000000.0, "rope_scaling": None, "max_position_embeddings": 40960,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 3,
        "intermediate_size": 160, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "num_experts": 8, "num_experts_per_tok": 3,
        "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 128,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "output_router_logits": False, "router_aux_loss_coef": 0.001, "use_cache": True,
    }
    cfg.update(over)
    return cfg
