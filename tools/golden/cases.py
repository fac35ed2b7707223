"""The table of golden cases: which configuration, how stored, what it is there to catch.

Callers: make.py. A plan is a list of (regex on the tensor name, kind); the first match wins.
"""
import configs as c

BF16, F16, F32 = [("", "bf16")], [("", "f16")], [("", "f32")]
ROUTED = r"\.mlp\.experts\.\d+\.\w+_proj\.weight$"
SHARED = r"\.mlp\.shared_experts\.\w+_proj\.weight$"
DENSE = r"\.mlp\.(gate|up|down)_proj\.weight$"
ATTN = r"\.self_attn\.\w+_proj(_with_mqa)?\.weight$"

SEQS = (33, 90)


def mtp(n):
    return rf"^model\.layers\.{n}\."


def modelopt_hf(exclude, algo="NVFP4"):
    """hf_quant_config.json of the ModelOpt convention."""
    return {"producer": {"name": "modelopt", "version": "0.42.0"},
            "quantization": {"quant_algo": algo, "kv_cache_quant_algo": None, "group_size": 16,
                             "exclude_modules": exclude}}


def modelopt_cfg(ignore):
    """quantization_config in config.json of the ModelOpt convention."""
    tensor = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    return {"quant_method": "modelopt", "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"weights": tensor, "input_activations": dict(tensor),
                                          "targets": ["Linear"]}},
            "ignore": ignore, "producer": {"name": "modelopt", "version": "0.46.0"}}


def compressed_cfg(ignore, targets=("Linear",), activations=True, fp8_targets=None):
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
               "symmetric": True, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}
    group = {"targets": list(targets), "weights": weights,
             "input_activations": dict(weights, dynamic="local") if activations else None,
             "output_activations": None, "format": "nvfp4-pack-quantized"}
    cfg = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
           "config_groups": {"group_0": group}, "ignore": ignore,
           "quantization_status": "compressed"}
    if fp8_targets:
        w8 = {"num_bits": 8, "type": "float", "strategy": "block", "symmetric": True,
              "dynamic": False, "block_structure": [128, 128]}
        a8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128,
              "symmetric": True, "dynamic": True}
        cfg["format"] = "mixed-precision"
        cfg["config_groups"]["group_1"] = {
            "targets": list(fp8_targets), "weights": w8, "input_activations": a8,
            "output_activations": None, "format": "float-quantized"}
    return cfg


def fp8_cfg(not_convert):
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128], "modules_to_not_convert": not_convert}


def case(name, config, plan, covers, **opt):
    return dict(name=name, config=config, plan=plan, covers=covers, **opt)


CASES = [
    # ---- glm_moe_dsa ------------------------------------------------------------------------
    case("glm5-bf16", c.glm_moe_dsa(), BF16,
         ["GLM-5: indexer in every layer, index_topk 8 far below the context",
          "indexer rope interleaved, indexer vector [rope|nope], MLA [nope|rope]",
          "rope_theta only in rope_parameters; head_dim 64 is not the rope width 16",
          "small latents: the latent norms and the indexer LayerNorm have eps 1e-6, not 1e-5",
          "BF16, three shards with an index",
          "MTP layer present (no own head) and ignored; bos_token_id absent, three eos ids"],
         small_latents=True, shards=3,
         generation={"eos_token_id": [120, 126, 127], "pad_token_id": 120, "temperature": 1.0,
                     "top_p": 0.95}),
    case("glm52-bf16", c.glm52(num_hidden_layers=8, first_k_dense_replace=3,
                               mlp_layer_types=["dense"] * 3 + ["sparse"] * 5,
                               n_routed_experts=4, intermediate_size=48, kv_lora_rank=16,
                               num_attention_heads=2, num_key_value_heads=2,
                               index_topk=12, num_nextn_predict_layers=0), BF16,
         ["GLM-5.2: index_topk_freq 4, offset 3, 8 layers, indexers in 0 1 2 6 only",
          "no indexer_types in the file: schedule from freq/offset",
          "head_dim 192 is not the rope width", "rope theta 8e6",
          "correction biases near 7 that need float32 (7.0 in BF16)"],
         router_bias=(7.0, 0.1), branch=0.25),
    case("glm52-types-f32", c.glm52(
            num_hidden_layers=4, indexer_types=["full", "full", "shared", "full"],
            index_topk=64, dtype="float32", hidden_size=32, n_routed_experts=4, vocab_size=96,
            eos_token_id=[90, 94, 95], pad_token_id=90, num_attention_heads=2,
            num_key_value_heads=2, intermediate_size=48, num_nextn_predict_layers=0,
            rms_norm_eps=1e-3), F32,
         ["indexer_types list decides (layer 2 reuses layer 1)", "F32 weights",
          "contexts of 1, 2, 63, 64, 65 and 130 tokens around index_topk 64 and the page size",
          "rms_norm_eps 1e-3", "no MTP layer"],
         drop=["index_topk_freq", "index_skip_topk_offset"], seqs=(1, 2, 63, 64, 65, 130)),
    case("glm5-nvfp4-mlp", c.glm_moe_dsa(
            first_k_dense_replace=1, num_hidden_layers=3, rope_theta=10000, index_topk=16,
            hidden_size=64, moe_intermediate_size=48, n_routed_experts=5),
         [(mtp(3), "bf16"), (ROUTED, "nvfp4"), (SHARED, "nvfp4"), (DENSE, "nvfp4"), ("", "bf16")],
         ["NVFP4 ModelOpt convention: dense MLP, shared and routed experts",
          "described by hf_quant_config.json only", "W4A4 reference recorded as well",
          "a stale top-level rope_theta 10000 beside rope_parameters",
          "MTP layer in BF16, listed in exclude_modules"],
         hf_quant=modelopt_hf(["lm_head", "model.embed_tokens", "model.layers.3*",
                               "model.layers.*.self_attn*"]),
         w4a4=True),
    case("glm52-nvfp4-routed", c.glm52(
            num_hidden_layers=5, index_topk_pattern="FFSSF", first_k_dense_replace=2,
            mlp_layer_types=["dense"] * 2 + ["sparse"] * 3, index_topk=4, n_routed_experts=4),
         [(mtp(5), "bf16"), (r"layers\.3" + ROUTED, "bf16"), (ROUTED, "nvfp4"), ("", "bf16")],
         ["NVFP4 ModelOpt: routed experts only, layer 3's experts left BF16",
          "gate and up with different weight_scale_2", "index_topk_pattern FFSSF over freq/offset",
          "config.json and hf_quant_config.json both present; MTP layer BF16 listed nowhere",
          "index_topk 4", "two shards"],
         hf_quant=modelopt_hf(["lm_head", "*self_attn*", "model.layers.0.*", "model.layers.1.*",
                               "model.layers.3.mlp.experts*", "*shared_experts*"]),
         quant_config=modelopt_cfg(["lm_head", "*self_attn*", "model.layers.0.*",
                                    "model.layers.1.*", "model.layers.3.mlp.experts*",
                                    "*shared_experts*"]),
         unequal=True, shards=2),
    case("glm53-fp8", c.glm52(
            num_hidden_layers=1, indexer_types=["full"], mlp_layer_types=["sparse"],
            first_k_dense_replace=0, hidden_size=136,
            num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=512,
            qk_nope_head_dim=192, qk_rope_head_dim=64, qk_head_dim=256, v_head_dim=256,
            index_head_dim=128, index_n_heads=8, index_topk=12, moe_intermediate_size=144,
            n_routed_experts=3, num_nextn_predict_layers=0),
         [(r"weights_proj", "bf16"), (r"\.mlp\.gate\.", "bf16"), (ROUTED, "fp8"), (SHARED, "fp8"),
          (DENSE, "fp8"), (ATTN, "fp8"), (r"indexer\.(wq_b|wk)\.weight", "fp8"), ("", "bf16")],
         ["FP8 128x128 blocks with partial blocks on both axes (H 136, I 144)",
          "real head geometry 512/64/192/256/128; kv_a_proj_with_mqa of 576 rows = 4.5 blocks",
          "indexer wq_b and wk FP8, weights_proj BF16 (list spells it indexers_proj)"],
         drop=["index_topk_freq", "index_skip_topk_offset"], seqs=(37, 71),
         quant_config=fp8_cfg(["lm_head", "model.embed_tokens",
                               "model.layers.0.self_attn.indexers_proj",
                               "model.layers.0.self_attn.indexer.k_norm",
                               "model.layers.0.mlp.gate"])),
    case("glm52-mixed-compressed", c.glm52(
            num_hidden_layers=3, index_topk_freq=2, index_skip_topk_offset=2, hidden_size=144,
            moe_intermediate_size=64, num_nextn_predict_layers=0, n_routed_experts=4),
         [(r"layers\.0\.", "bf16"), (ROUTED, "nvfp4"), (SHARED, "nvfp4"),
          (ATTN, "fp8"), ("", "bf16")],
         ["compressed-tensors mixed precision: all experts NVFP4, attention FP8 block",
          "FP8 scales named weight_scale, global scales of shape [1] that divide",
          "re: entries in the ignore list, layer 0 wholly BF16"],
         convention="compressed", fp8_suffix="_scale",
         quant_config=compressed_cfg(
             ["lm_head", "re:.*layers\\.0\\..*", "re:.*mlp\\.gate$", "re:.*indexer.*"],
             targets=["re:.*mlp\\..*"], fp8_targets=["re:.*self_attn\\..*"])),
    case("glm5-odd-compressed", c.glm_moe_dsa(
            num_hidden_layers=2, hidden_size=256, moe_intermediate_size=96, intermediate_size=96,
            num_attention_heads=3, num_key_value_heads=3, n_routed_experts=3,
            num_experts_per_tok=2, n_shared_experts=2, vocab_size=131, index_n_heads=8,
            num_nextn_predict_layers=0, routed_scaling_factor=1.0, norm_topk_prob=False),
         [(ROUTED, "nvfp4"), (SHARED, "nvfp4"), (DENSE, "nvfp4"), ("", "bf16")],
         ["compressed-tensors NVFP4 (divide convention)", "I 96, H 256, 3 heads, 3 experts top 2",
          "two shared experts in one matrix", "vocabulary 131", "norm_topk_prob false"],
         convention="compressed",
         quant_config=compressed_cfg(["lm_head", "re:.*self_attn.*", "re:.*mlp\\.gate$"])),
    case("glm5-fused-bf16", c.glm_moe_dsa(num_nextn_predict_layers=0, n_routed_experts=5,
                                          num_hidden_layers=2, moe_intermediate_size=40), BF16,
         ["fused expert tensors experts.gate_up_proj [E,2I,H] and experts.down_proj [E,H,I]"],
         fused=True),
    case("glm5-fused-nvfp4", c.glm_moe_dsa(
            num_nextn_predict_layers=0, n_routed_experts=4, num_hidden_layers=2,
            moe_intermediate_size=48),
         [(ROUTED, "nvfp4"), ("", "bf16")],
         ["fused NVFP4 experts: gate_up_proj U8 [E,2I,H/2] with gate_up_proj_weight_scale, "
          "gate_up_proj_weight_scale_2 and gate_up_proj_input_scale (one scalar per stack)"],
         fused=True,
         hf_quant=modelopt_hf(["lm_head", "*self_attn*", "*shared_experts*", "model.layers.0.*"])),
    # ---- glm4_moe_lite ----------------------------------------------------------------------
    case("lite-bf16", c.glm4_moe_lite(), BF16,
         ["GLM-4.7-Flash: MLA without indexer, 5 heads, v 32 differs from nope 24",
          "scoring_func absent, scaling 1.8, partial_rotary_factor 1.0 present",
          "small latents: the latent norms have eps 1e-6, not 1e-5",
          "rope_theta at top level, rope_scaling null", "MTP layer ignored"],
         small_latents=True),
    case("lite-nvfp4-all", c.glm4_moe_lite(
            num_nextn_predict_layers=0,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000,
                             "partial_rotary_factor": 1.0}),
         [(ROUTED, "nvfp4"), (SHARED, "nvfp4"), (DENSE, "nvfp4"),
          (r"(q_a|q_b|kv_a|o)_proj(_with_mqa)?\.weight", "nvfp4"), ("", "bf16")],
         ["NVFP4 ModelOpt on MLP and attention (q_a, q_b, kv_a, o; kv_b BF16)",
          "quantization_config only", "rope_parameters spelling"],
         drop=["rope_theta", "rope_scaling", "partial_rotary_factor"],
         quant_config=modelopt_cfg(["lm_head", "*kv_b_proj"])),
    case("lite-halfsplit-f16", c.glm4_moe_lite(
            rope_interleave=False, num_nextn_predict_layers=0, dtype="float16",
            num_hidden_layers=2, n_group=2, topk_group=1, n_routed_experts=8), F16,
         ["rope_interleave false: half-split pairs in MLA", "F16 weights",
          "two groups of experts, one kept"]),
    # ---- glm4_moe ---------------------------------------------------------------------------
    case("glm45air-bf16", c.glm4_moe(), BF16,
         ["GLM-4.5-Air: GQA 6/2, use_qk_norm false, biases on q k v and none on o",
          "partial rotary 0.5 half-split, top-level rope_theta", "scaling 1.0",
          "MTP layer with its own embed_tokens and shared_head.head, ignored"],
         mtp_own_head=True),
    case("glm46-nvfp4a16-compressed", c.glm4_moe(
            hidden_size=64, head_dim=32, use_qk_norm=True, first_k_dense_replace=2,
            routed_scaling_factor=2.5, num_hidden_layers=4, max_position_embeddings=202752,
            num_nextn_predict_layers=0,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000,
                             "partial_rotary_factor": 0.5}),
         [(ROUTED, "nvfp4"), (SHARED, "nvfp4"), (DENSE, "nvfp4"), (ATTN, "nvfp4"), ("", "bf16")],
         ["GLM-4.6: per-head q/k RMSNorm after the bias", "NVFP4A16 compressed-tensors without "
          "input_global_scale, attention quantised too (NVFP4 weights with BF16 biases)",
          "partial_rotary_factor only inside rope_parameters"],
         convention="compressed", no_input_scale=True,
         drop=["rope_theta", "rope_scaling", "partial_rotary_factor"],
         quant_config=compressed_cfg(["lm_head", "re:.*mlp\\.gate$"], activations=False)),
    case("glm4-nobias-w4a4", c.glm4_moe(
            hidden_size=64, head_dim=32,
            attention_bias=False, use_qk_norm=True, n_shared_experts=2, norm_topk_prob=False,
            num_hidden_layers=2, num_nextn_predict_layers=0),
         [(ROUTED, "nvfp4"), (SHARED, "nvfp4"), (DENSE, "nvfp4"), ("", "bf16")],
         ["attention_bias false with q/k norm", "two shared experts, norm_topk_prob false",
          "compressed-tensors NVFP4 with input_global_scale; W4A4 reference recorded as well"],
         convention="compressed", w4a4=True,
         quant_config=compressed_cfg(["lm_head", "re:.*self_attn.*", "re:.*mlp\\.gate$"])),
    # ---- deepseek_v3 ------------------------------------------------------------------------
    case("v3-yarn-bf16", c.deepseek_v3(num_hidden_layers=2, num_nextn_predict_layers=0), BF16,
         ["YaRN factor 40 from rope_scaling {type: yarn}, softmax scale times m squared",
          "12 experts in 4 groups keep 2", "rms eps 1e-6"]),
    case("v3-yarn-fp8", c.deepseek_v3(
            rope_parameters={"rope_type": "yarn", "rope_theta": 10000, **c.YARN, "mscale": 0.707,
                             "factor": 8, "original_max_position_embeddings": 64},
            max_position_embeddings=512, hidden_size=144, n_shared_experts=2,
            num_nextn_predict_layers=0, num_hidden_layers=2, n_routed_experts=8),
         [(ROUTED, "fp8"), (SHARED, "fp8"), (DENSE, "fp8"), (ATTN, "fp8"), ("", "bf16")],
         ["FP8 blocks in expert, dense and attention matrices", "YaRN in rope_parameters with "
          "mscale 0.707 against mscale_all_dim 1 (cos/sin are scaled), contexts past the original "
          "64 positions", "two shared experts"],
         drop=["rope_theta", "rope_scaling"], quant_config=fp8_cfg(["lm_head"])),
    case("v3-noq-bf16", c.deepseek_v3(
            q_lora_rank=None, n_shared_experts=0, rope_scaling=None, n_group=1, topk_group=1,
            num_hidden_layers=2, n_routed_experts=6, num_nextn_predict_layers=0,
            first_k_dense_replace=0), BF16,
         ["q_lora_rank null: one q_proj", "no shared expert", "no scaling, one group",
          "no dense layer"]),
    # ---- deepseek_v32 -----------------------------------------------------------------------
    case("v32-bf16", c.deepseek_v32(num_nextn_predict_layers=0, num_hidden_layers=2), BF16,
         ["indexer rope half-split while MLA rope is interleaved", "YaRN in MLA and indexer",
          "groups 4 keep 2", "index_topk 8"]),
    case("v32-nvfp4", c.deepseek_v32(
            rope_parameters={"rope_type": "yarn", "rope_theta": 10000, **c.YARN},
            n_routed_experts=8, index_topk=10, first_k_dense_replace=2,
            num_nextn_predict_layers=0),
         [(ROUTED, "nvfp4"), (SHARED, "nvfp4"), (DENSE, "nvfp4"),
          (r"o_proj\.weight", "nvfp4"), ("", "bf16")],
         ["NVFP4 ModelOpt: experts, dense MLP and o_proj (as nvidia/DeepSeek-V3.2-NVFP4)",
          "quantization_config and hf_quant_config.json", "YaRN spelled in rope_parameters"],
         drop=["rope_theta", "rope_scaling"],
         hf_quant=modelopt_hf(["lm_head", "*.indexer*", "*q_a_proj*", "*q_b_proj*", "*kv_a_proj*",
                               "*kv_b_proj*"]),
         quant_config=modelopt_cfg(["lm_head", "*.indexer*", "*q_a_proj*", "*q_b_proj*",
                                    "*kv_a_proj*", "*kv_b_proj*"])),
    # ---- qwen3_moe --------------------------------------------------------------------------
    case("qwen3-bf16", c.qwen3_moe(), BF16,
         ["softmax router over all experts, top 3 renormalised", "per-head q/k norm",
          "head_dim 24 given (not hidden/heads), MTP key absent"], seqs=(37, 130)),
    case("qwen3-tied-f32", c.qwen3_moe(
            norm_topk_prob=False, tie_word_embeddings=True, num_hidden_layers=4,
            decoder_sparse_step=2, mlp_only_layers=[3], attention_bias=True,
            torch_dtype="float32", num_experts=4, num_attention_heads=4, vocab_size=97,
            intermediate_size=56), F32,
         ["tied embeddings without lm_head", "norm_topk_prob false", "decoder_sparse_step 2 and "
          "mlp_only_layers [3]: only layer 1 is sparse", "bias on q k v and o", "vocabulary 97"]),
    case("qwen3-fused-f16", c.qwen3_moe(torch_dtype="float16", num_hidden_layers=2,
                                        moe_intermediate_size=40), F16,
         ["fused expert tensors in F16", "I 40"], fused=True),
    case("qwen3-nvfp4", c.qwen3_moe(head_dim=32, num_experts=6, num_experts_per_tok=2),
         [(ROUTED, "nvfp4"), (ATTN, "nvfp4"), (r"lm_head", "nvfp4"), ("", "bf16")],
         ["NVFP4 ModelOpt on experts, all of attention and lm_head", "gate/up scales differ",
          "hf_quant_config.json only"],
         hf_quant=modelopt_hf(["model.embed_tokens", "*mlp.gate"]), unequal=True),
    case("qwen3-fp8", c.qwen3_moe(hidden_size=136, moe_intermediate_size=72, num_experts=3,
                                  num_experts_per_tok=2, num_hidden_layers=2),
         [(ROUTED, "fp8"), (ATTN, "fp8"), ("", "bf16")],
         ["FP8 blocks, H 136 and I 72 (partial blocks)"],
         quant_config=fp8_cfg(["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"])),
]
