"""Random weights under the names the public checkpoints use, for the six families.

Callers: make.py. Weights are scaled so that activations are O(1): with the customary std of 0.02
the epsilon of the norms and the rounding of the formats would hide mistakes.
"""
import numpy as np

MLA = ("glm_moe_dsa", "glm4_moe_lite", "deepseek_v3", "deepseek_v32")
# Gain of the matrices that write into the residual stream: large enough that every mistake in a
# branch shows, small enough that BF16 rounding in one branch stays near 0.1 % of the stream.
BRANCH = 0.4
DSA = ("glm_moe_dsa", "deepseek_v32")


class Maker:
    """Draws named tensors from one seeded generator, in a fixed order."""

    def __init__(self, seed, branch):
        self.branch = branch   # gain of the matrices that write into the residual stream
        self.rng = np.random.default_rng(seed)
        self.tensors = {}

    def linear(self, name, rows, cols, gain=1.0):
        w = self.rng.standard_normal((rows, cols)) * (gain / np.sqrt(cols))
        self.tensors[name + ".weight"] = w.astype(np.float32)

    def vector(self, name, n, mean, std):
        self.tensors[name] = (mean + std * self.rng.standard_normal(n)).astype(np.float32)

    def norm(self, name, n):
        self.vector(name + ".weight", n, 1.0, 0.2)


def indexer_full(cfg, layer):
    """True when the layer owns an indexer (the list, else the pattern, else freq/offset)."""
    if layer >= cfg["num_hidden_layers"] or cfg["model_type"] == "deepseek_v32":
        return True
    if cfg.get("indexer_types"):
        return cfg["indexer_types"][layer] == "full"
    if cfg.get("index_topk_pattern"):
        return cfg["index_topk_pattern"][layer] in ("F", "full")
    freq, offset = cfg.get("index_topk_freq", 1), cfg.get("index_skip_topk_offset", 2)
    return max(layer - offset + 1, 0) % freq == 0


def is_sparse(cfg, layer):
    if cfg["model_type"] == "qwen3_moe":
        return (layer not in (cfg.get("mlp_only_layers") or [])
                and (layer + 1) % cfg.get("decoder_sparse_step", 1) == 0)
    if layer >= cfg["num_hidden_layers"]:
        return True
    if cfg.get("mlp_layer_types"):
        return cfg["mlp_layer_types"][layer] == "sparse"
    return layer >= cfg["first_k_dense_replace"]


def n_experts(cfg):
    return cfg.get("n_routed_experts") or cfg["num_experts"]


def _mla(m, cfg, p, layer, opt):
    hidden, heads = cfg["hidden_size"], cfg["num_attention_heads"]
    nope, rope = cfg["qk_nope_head_dim"], cfg["qk_rope_head_dim"]
    v, kv_lora, q_lora = cfg["v_head_dim"], cfg["kv_lora_rank"], cfg["q_lora_rank"]
    # Small latents make the epsilon of their norms (1e-6, not rms_norm_eps) visible.
    latent = 0.03 if opt.get("small_latents") else 1.0
    if q_lora is None:
        m.linear(p + "q_proj", heads * (nope + rope), hidden, 1.6)
    else:
        m.linear(p + "q_a_proj", q_lora, hidden, latent)
        m.norm(p + "q_a_layernorm", q_lora)
        m.linear(p + "q_b_proj", heads * (nope + rope), q_lora, 1.6)
    m.linear(p + "kv_a_proj_with_mqa", kv_lora + rope, hidden, 1.2)
    m.tensors[p + "kv_a_proj_with_mqa.weight"][:kv_lora] *= latent
    m.norm(p + "kv_a_layernorm", kv_lora)
    m.linear(p + "kv_b_proj", heads * (nope + v), kv_lora, 1.3)
    m.linear(p + "o_proj", hidden, heads * v, m.branch)
    if cfg.get("attention_bias"):
        if q_lora is not None:
            m.vector(p + "q_a_proj.bias", q_lora, 0, 0.3)
        m.vector(p + "kv_a_proj_with_mqa.bias", kv_lora + rope, 0, 0.3)
        m.vector(p + "o_proj.bias", hidden, 0, 0.3)
    if cfg["model_type"] in DSA and indexer_full(cfg, layer):
        ih, idim = cfg["index_n_heads"], cfg["index_head_dim"]
        m.linear(p + "indexer.wq_b", ih * idim, q_lora, 1.5)
        m.linear(p + "indexer.wk", idim, hidden, 0.01 if opt.get("small_latents") else 1.5)
        m.norm(p + "indexer.k_norm", idim)
        m.vector(p + "indexer.k_norm.bias", idim, 0, 0.3)
        m.linear(p + "indexer.weights_proj", ih, hidden, 1.5)


def _gqa(m, cfg, p):
    hidden, dim = cfg["hidden_size"], cfg["head_dim"]
    q, kv = cfg["num_attention_heads"] * dim, cfg["num_key_value_heads"] * dim
    bias = cfg.get("attention_bias")
    for name, rows, cols in (("q_proj", q, hidden), ("k_proj", kv, hidden),
                             ("v_proj", kv, hidden), ("o_proj", hidden, q)):
        m.linear(p + name, rows, cols, m.branch if name == "o_proj" else 1.4)
        # glm4_moe has biases on q, k and v only; qwen3_moe puts one on o as well.
        if bias and not (name == "o_proj" and cfg["model_type"] == "glm4_moe"):
            m.vector(p + name + ".bias", rows, 0, 0.4)
    if cfg["model_type"] == "qwen3_moe" or cfg.get("use_qk_norm"):
        m.norm(p + "q_norm", dim)
        m.norm(p + "k_norm", dim)


def _mlp(m, p, hidden, inner, up_gain=1.2):
    m.linear(p + "gate_proj", inner, hidden, 1.5)
    m.linear(p + "up_proj", inner, hidden, up_gain)
    m.linear(p + "down_proj", hidden, inner, m.branch)


def _moe(m, cfg, p, opt):
    hidden, inner, experts = cfg["hidden_size"], cfg["moe_intermediate_size"], n_experts(cfg)
    m.linear(p + "gate", experts, hidden, 1.5)
    if cfg["model_type"] != "qwen3_moe":
        mean, std = opt.get("router_bias", (0.0, 0.15))
        m.vector(p + "gate.e_score_correction_bias", experts, mean, std)
    for e in range(experts):
        # Unequal gate/up scales come from weights of truly different magnitude.
        up = 1.2 * (0.25 + 0.4 * e if opt.get("unequal_gate_up") else 1.0)
        _mlp(m, f"{p}experts.{e}.", hidden, inner, up)
    shared = cfg.get("n_shared_experts") or 0
    if shared:
        _mlp(m, p + "shared_experts.", hidden, inner * shared)


def make_tensors(cfg, opt, seed):
    """All tensors of the checkpoint, float32, unquantised, keyed by published name."""
    m = Maker(seed, opt.get("branch") or BRANCH)
    hidden, vocab = cfg["hidden_size"], cfg["vocab_size"]
    m.tensors["model.embed_tokens.weight"] = m.rng.standard_normal((vocab, hidden)).astype("f4")
    n_mtp = cfg.get("num_nextn_predict_layers") or 0
    for layer in range(cfg["num_hidden_layers"] + n_mtp):
        p = f"model.layers.{layer}."
        m.norm(p + "input_layernorm", hidden)
        m.norm(p + "post_attention_layernorm", hidden)
        if cfg["model_type"] in MLA:
            _mla(m, cfg, p + "self_attn.", layer, opt)
        else:
            _gqa(m, cfg, p + "self_attn.")
        if is_sparse(cfg, layer):
            _moe(m, cfg, p + "mlp.", opt)
        else:
            _mlp(m, p + "mlp.", hidden, cfg["intermediate_size"])
        if layer >= cfg["num_hidden_layers"]:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                m.norm(p + name, hidden)
            m.linear(p + "eh_proj", hidden, 2 * hidden)
            if opt.get("mtp_own_head"):
                m.tensors[p + "embed_tokens.weight"] = m.tensors["model.embed_tokens.weight"]
                m.linear(p + "shared_head.head", vocab, hidden)
    m.norm("model.norm", hidden)
    if not cfg.get("tie_word_embeddings"):
        m.linear("lm_head", vocab, hidden, 2.0)
    return m.tensors
