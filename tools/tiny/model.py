"""glm_moe_dsa for training: the function of transformers' GlmMoeDsaForCausalLM plus what that class
lacks: gradients for the indexer, the MTP layer, router balancing and NVFP4-aware training.

Callers: train.py, quantize.py (calibration), backends.py (evaluation); tests compare its logits with
transformers. Shapes: B rows, T queries, S keys, H heads, D width, E experts, N = B*T tokens.
Checkpoint names are GLM's (checkpoint.py); here every MLP is stacked: gate_up [E,2I,D], down [E,D,I],
with E = 1 for dense and shared ones.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

LATENT_EPS = 1e-6       # q_a and kv_a norms: the class default of transformers, not rms_norm_eps
INDEX_EPS = 1e-6


def maybe_compile(fn):
    """Compile on first CUDA use; eager elsewhere (decoding, CPU)."""
    compiled = []

    def run(*args):
        if not (args[0].is_cuda and torch.is_grad_enabled()):
            return fn(*args)
        if not compiled:
            compiled.append(torch.compile(fn, dynamic=False))
        return compiled[0](*args)
    return run


def rms_norm(x, weight, eps):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return y * weight


rms_norm = maybe_compile(rms_norm)


def rope(x, cos, sin):
    """Interleaved pairs in, de-interleaved halves out (as transformers does). cos/sin [B,T,1,R/2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


rope = maybe_compile(rope)


def attend(q, k, v, allowed, scale):
    """q,k [B,H,T|S,256], v [B,H,S,256], allowed [B,T,S] → out [B,H,T,256], head mean of p [B,T,S]."""
    s = (q @ k.transpose(-1, -2)).float() * scale
    p = s.masked_fill(~allowed[:, None], float("-inf")).softmax(-1)
    return p.to(v.dtype) @ v, p.detach().mean(1)


attend = maybe_compile(attend)


def index_scores(q, k, w):
    """q [B,T,h,128], k [B,S,128], w [B,T,h] → I [B,T,S] in float32."""
    s = torch.relu((q.transpose(1, 2) @ k.transpose(-1, -2)[:, None]).float() * q.shape[-1] ** -0.5)
    return (s * w.transpose(1, 2)[..., None] * q.shape[2] ** -0.5).sum(1)


index_scores = maybe_compile(index_scores)


def index_loss(scores, allowed, target, valid):
    """Cross entropy of softmax(scores) over `allowed` against the attention distribution."""
    logp = scores.masked_fill(~allowed, -1e9).log_softmax(-1)
    per_query = -(target * logp.masked_fill(~allowed, 0.0)).sum(-1)
    entropy = -(target * target.clamp_min(1e-9).log()).sum(-1)
    return ((per_query - entropy) * valid).sum() / valid.sum().clamp_min(1)


index_loss = maybe_compile(index_loss)


def select(scores, allowed, topk):
    """The top-k set of every query as a mask [B,T,S]; never more than `allowed`."""
    if scores.shape[-1] <= topk:
        return allowed
    idx = scores.masked_fill(~allowed, float("-inf")).topk(topk, dim=-1).indices
    return torch.zeros_like(allowed).scatter_(-1, idx, True) & allowed


def fake_nvfp4(w):
    """w [E,O,K] rounded to what ModelOpt's max calibration stores (one global scale per expert)."""
    blocks = w.unflatten(-1, (-1, 16))
    s2 = (w.abs().amax((-2, -1), keepdim=True) / 2688.0).unsqueeze(-1)
    sc = (blocks.abs().amax(-1, keepdim=True) / (6.0 * s2)).clamp(2 ** -9, 448.0)
    sc = sc.to(torch.float8_e4m3fn).float() * s2
    x = blocks / sc
    a = x.abs()
    r = torch.where(a < 2, (a * 2).round() / 2, torch.where(a < 4, a.round(), (a / 2).round() * 2))
    return (r.clamp_max(6.0) * x.sign() * sc).flatten(-2)


_fake_nvfp4_compiled = maybe_compile(fake_nvfp4)


class through_nvfp4(torch.autograd.Function):
    """fake_nvfp4 with a straight-through gradient."""

    @staticmethod
    def forward(ctx, w):
        with torch.enable_grad():           # lets maybe_compile see a training step
            return _fake_nvfp4_compiled(w.detach())

    @staticmethod
    def backward(ctx, g):
        return g


def swiglu(x):
    g, u = x.chunk(2, -1)
    return F.silu(g) * u


swiglu = maybe_compile(swiglu)


class _Gather(torch.autograd.Function):
    """x[N,D] → rows in expert order [N*k,D]; the gradient is a gather too, so no atomics."""

    @staticmethod
    def forward(ctx, x, order, inverse, k):
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, g):
        (inverse,) = ctx.saved_tensors
        return g[inverse].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Scatter(torch.autograd.Function):
    """y[N*k,D] in expert order → sums per token [N,D]."""

    @staticmethod
    def forward(ctx, y, order, inverse, k):
        ctx.save_for_backward(order)
        ctx.k = k
        return y[inverse].unflatten(0, (-1, k)).sum(1)

    @staticmethod
    def backward(ctx, g):
        (order,) = ctx.saved_tensors
        return g[order // ctx.k], None, None, None


class Mlp(nn.Module):
    """A stack of E gated MLPs; `calibrators` watch the activations while quantize.py calibrates."""

    def __init__(self, experts, width, inner):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, width) * width ** -0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) * 0.3 * inner ** -0.5)
        self.qat = False
        self.calibrators = None     # {"in": [E], "mid": [E]}, each with collect(tensor)

    def weights(self):
        if self.qat:
            return through_nvfp4.apply(self.gate_up), through_nvfp4.apply(self.down)
        return self.gate_up, self.down

    def note(self, e, x, mid):
        if self.calibrators is not None and x.numel():
            self.calibrators["in"][e].collect(x)
            self.calibrators["mid"][e].collect(mid)

    def single(self, x, gate_up, down, e=0):
        mid = swiglu(F.linear(x, gate_up[e]))
        self.note(e, x, mid)
        return F.linear(mid, down[e])

    def forward(self, x):
        gate_up, down = self.weights()
        return self.single(x, gate_up, down)

    def routed(self, x, experts, weights):
        """x [N,D], experts and weights [N,k] → [N,D]."""
        gate_up, down = self.weights()
        n_experts, k = gate_up.shape[0], experts.shape[1]
        if not x.is_cuda or self.calibrators is not None:
            out = torch.zeros_like(x)
            for e in range(n_experts):
                token, slot = (experts == e).nonzero(as_tuple=True)
                y = self.single(x[token], gate_up, down, e) * weights[token, slot, None]
                out.index_add_(0, token, y.to(out.dtype))
            return out
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        counts = (flat[:, None] == torch.arange(n_experts, device=x.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        xs = _Gather.apply(x.bfloat16(), order, inverse, k)
        mid = swiglu(torch._grouped_mm(xs, gate_up.bfloat16().transpose(1, 2), ends))
        y = torch._grouped_mm(mid.bfloat16(), down.bfloat16().transpose(1, 2), ends)
        y = y * weights.flatten().gather(0, order)[:, None]
        return _Scatter.apply(y, order, inverse, k)


class Moe(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, e = c["hidden_size"], c["n_routed_experts"]
        self.gate = nn.Parameter(torch.randn(e, d) * 0.02)
        self.register_buffer("bias", torch.zeros(e))
        self.experts = Mlp(e, d, c["moe_intermediate_size"])
        self.shared = Mlp(1, d, c["moe_intermediate_size"] * c["n_shared_experts"])
        self.k, self.scale = c["num_experts_per_tok"], c["routed_scaling_factor"]
        self.norm = c["norm_topk_prob"]
        self.load = None            # tokens per expert of the last forward

    def forward(self, x):
        flat = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            s = F.linear(flat.float(), self.gate.float()).sigmoid()
        experts = (s.detach() + self.bias).topk(self.k, -1).indices
        w = s.gather(1, experts)
        if self.norm:
            w = w / (w.sum(-1, keepdim=True) + 1e-20)
        self.load = (experts.flatten()[:, None] ==
                     torch.arange(len(self.bias), device=x.device)).sum(0)
        routed = self.experts.routed(flat, experts, w * self.scale).view_as(x)
        return routed + self.shared(x)


class Indexer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.dim, self.rot = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        self.wq_b = nn.Linear(c["q_lora_rank"], self.heads * self.dim, bias=False)
        self.wk = nn.Linear(c["hidden_size"], self.dim, bias=False)
        self.k_norm = nn.LayerNorm(self.dim, eps=INDEX_EPS)
        self.weights_proj = nn.Linear(c["hidden_size"], self.heads, bias=False)

    def forward(self, x, q_latent, cos, sin):
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim))
        k = self.k_norm(self.wk(x).float()).unsqueeze(2)
        q = torch.cat([rope(q[..., :self.rot], cos, sin), q[..., self.rot:]], -1)
        k = torch.cat([rope(k[..., :self.rot], cos, sin), k[..., self.rot:]], -1).squeeze(2)
        return q, k, self.weights_proj(x).float()


class Attention(nn.Module):
    def __init__(self, c, full):
        super().__init__()
        d, self.h = c["hidden_size"], c["num_attention_heads"]
        self.nope, self.rot, self.v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        self.kv_rank, self.topk = c["kv_lora_rank"], c["index_topk"]
        self.q_a_proj = nn.Linear(d, c["q_lora_rank"], bias=False)
        self.q_a_layernorm = nn.Parameter(torch.ones(c["q_lora_rank"]))
        self.q_b_proj = nn.Linear(c["q_lora_rank"], self.h * (self.nope + self.rot), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d, self.kv_rank + self.rot, bias=False)
        self.kv_a_layernorm = nn.Parameter(torch.ones(self.kv_rank))
        self.kv_b_proj = nn.Linear(self.kv_rank, self.h * (self.nope + self.v), bias=False)
        self.o_proj = nn.Linear(self.h * self.v, d, bias=False)
        self.indexer = Indexer(c) if full else None

    def forward(self, x, st, cache=None):
        """st: State of this forward (rope, masks, shared selection). x [B,T,D] normed."""
        cos, sin = st.cos, st.sin
        ql = rms_norm(self.q_a_proj(x), self.q_a_layernorm, LATENT_EPS)
        q = self.q_b_proj(ql).unflatten(-1, (self.h, self.nope + self.rot))
        kv = self.kv_a_proj_with_mqa(x)
        kr = rope(kv[..., self.kv_rank:].unsqueeze(2), cos, sin)
        latent = rms_norm(kv[..., :self.kv_rank], self.kv_a_layernorm, LATENT_EPS)
        kv = self.kv_b_proj(latent).unflatten(-1, (self.h, self.nope + self.v))
        q = torch.cat([q[..., :self.nope], rope(q[..., self.nope:], cos, sin).to(q.dtype)], -1)
        k = torch.cat([kv[..., :self.nope], kr.to(kv.dtype).expand(-1, -1, self.h, -1)], -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, kv[..., self.nope:]))
        if cache is not None:
            k, v = cache.write("k", k, st.pos), cache.write("v", v, st.pos)
        if self.indexer is not None:
            iq, ik, iw = self.indexer(x.detach(), ql.detach(), cos, sin)
            if cache is not None:
                ik = cache.write("i", ik[:, None], st.pos)[:, 0]
            st.close_group()
            st.scores = index_scores(iq, ik.to(iq.dtype), iw)
            st.chosen = select(st.scores.detach(), st.allowed, self.topk) if st.sparse else st.allowed
        out, p = attend(q, k, v, st.chosen, (self.nope + self.rot) ** -0.5)
        st.add_target(p)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class State:
    """What the layers of one forward share: positions, masks, the current selection, indexer loss."""

    def __init__(self, c, pos, allowed, sparse, valid=None):
        self.pos, self.allowed, self.sparse, self.valid = pos, allowed, sparse, valid
        half = c["qk_rope_head_dim"] // 2
        theta = c["rope_parameters"]["rope_theta"]
        inv = 1.0 / theta ** (torch.arange(half, device=pos.device, dtype=torch.float32) / half)
        angle = (pos.float()[..., None] * inv)[:, :, None]
        self.cos, self.sin = angle.cos(), angle.sin()
        self.scores = self.chosen = self.target = None
        self.members, self.losses = 0, []

    def add_target(self, p):
        if self.valid is not None:
            self.target = p if self.target is None else self.target + p
            self.members += 1

    def close_group(self):
        """The indexer of a full layer learns the mean attention of all layers that use its list."""
        if self.target is not None and self.scores is not None:
            self.losses.append(index_loss(self.scores, self.chosen, self.target / self.members,
                                          self.valid))
        self.target, self.members = None, 0


class Layer(nn.Module):
    def __init__(self, c, full, sparse_mlp):
        super().__init__()
        d, self.eps = c["hidden_size"], c["rms_norm_eps"]
        self.input_layernorm = nn.Parameter(torch.ones(d))
        self.post_attention_layernorm = nn.Parameter(torch.ones(d))
        self.self_attn = Attention(c, full)
        self.mlp = Moe(c) if sparse_mlp else Mlp(1, d, c["intermediate_size"])

    def forward(self, x, st, cache=None):
        x = x + self.self_attn(rms_norm(x, self.input_layernorm, self.eps), st, cache)
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm, self.eps))


class Cache:
    """Keys, values and indexer keys of one layer, [B,heads,S_max,dim], written at each row's position."""

    def __init__(self, capacity):
        self.capacity, self.t = capacity, {}

    def write(self, name, x, pos):
        if name not in self.t:
            shape = (*x.shape[:2], self.capacity, x.shape[3])
            self.t[name] = torch.zeros(shape, dtype=x.dtype, device=x.device)
        at = pos[:, None, :, None].expand_as(x)
        self.t[name].scatter_(2, at, x)
        return self.t[name]


class Tiny(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, d, n = c, c["hidden_size"], c["num_hidden_layers"]
        self.embed = nn.Parameter(torch.randn(c["vocab_size"], d) * 0.05)
        self.layers = nn.ModuleList(Layer(c, c["indexer_types"][i] == "full",
                                          c["mlp_layer_types"][i] == "sparse") for i in range(n))
        self.norm = nn.Parameter(torch.ones(d))
        self.lm_head = nn.Parameter(torch.randn(c["vocab_size"], d) * 0.02)
        self.mtp = Layer(c, True, True)
        self.enorm, self.hnorm, self.mtp_norm = (nn.Parameter(torch.ones(d)) for _ in range(3))
        self.eh_proj = nn.Linear(2 * d, d, bias=False)
        for layer in [*self.layers, self.mtp]:
            nn.init.normal_(layer.self_attn.o_proj.weight, std=0.3 / math.sqrt(1024))

    def mlps(self):
        """Every Mlp with the checkpoint prefix of its module and whether it is a list of experts."""
        for i, layer in enumerate([*self.layers, self.mtp]):
            p = f"model.layers.{i}.mlp"
            if isinstance(layer.mlp, Moe):
                yield layer.mlp.experts, p + ".experts", True
                yield layer.mlp.shared, p + ".shared_experts", False
            else:
                yield layer.mlp, p, False

    def moes(self):
        return [m.mlp for m in [*self.layers, self.mtp] if isinstance(m.mlp, Moe)]

    def trunk(self, ids, st, caches=None):
        """Final-normed hidden states [B,T,D]."""
        x = F.embedding(ids, self.embed)
        for i, layer in enumerate(self.layers):
            x = layer(x, st, caches[i] if caches else None)
        st.close_group()
        return rms_norm(x, self.norm, self.c["rms_norm_eps"])

    def draft(self, h, next_ids, st):
        """MTP hidden states: h [B,T,D] of the trunk, next_ids = the token after each position."""
        eps = self.c["rms_norm_eps"]
        e = rms_norm(F.embedding(next_ids, self.embed), self.enorm, eps)
        y = self.eh_proj(torch.cat([e, rms_norm(h, self.hnorm, eps)], -1))
        st.scores = None
        y = self.mtp(y, st)
        st.close_group()
        return rms_norm(y, self.mtp_norm, eps)

    def logits(self, h):
        return F.linear(h, self.lm_head)

    def set_qat(self, on):
        for m, _, _ in self.mlps():
            m.qat = on


def causal(doc):
    """allowed [B,T,T]: same document, not the future. doc [B,T]."""
    t = doc.shape[1]
    tri = torch.ones(t, t, dtype=torch.bool, device=doc.device).tril()
    return (doc[:, :, None] == doc[:, None, :]) & tri


@torch.no_grad()
def generate(model, prompts, max_new, stops, sparse=True):
    """Greedy decoding of a list of id lists; rows may differ in length. → lists without the stop."""
    device, c = model.embed.device, model.c
    n, longest = len(prompts), max(map(len, prompts))
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    ids = torch.zeros(n, longest, dtype=torch.long, device=device)
    for i, p in enumerate(prompts):
        ids[i, :len(p)] = torch.tensor(p, device=device)
    capacity = longest + max_new
    caches = [Cache(capacity) for _ in model.layers]
    key = torch.arange(capacity, device=device)
    pos = torch.arange(longest, device=device)[None].expand(n, -1)
    h = model.trunk(ids, State(c, pos, key[None, None] <= pos[..., None], sparse), caches)
    h = h[torch.arange(n, device=device), lengths - 1]
    stop = torch.tensor(stops, device=device)
    out, done = [], torch.zeros(n, dtype=torch.bool, device=device)
    for step in range(max_new):
        token = model.logits(h).float().argmax(-1)
        done |= torch.isin(token, stop)
        out.append(torch.where(done, -1, token))
        if step % 8 == 7 and bool(done.all()):
            break
        pos = (lengths + step)[:, None]
        st = State(c, pos, key[None, None] <= pos[..., None], sparse)
        h = model.trunk(token[:, None], st, caches)[:, 0]
    rows = torch.stack(out, 1).tolist()
    return [[t for t in r if t >= 0] for r in rows]
