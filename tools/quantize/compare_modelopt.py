"""Compares `nibble quantize` with NVIDIA ModelOpt's NVFP4QTensor, bit for bit.

Makes small qwen3_moe checkpoints with hostile value distributions (ties on every rounding edge, zero blocks, zero
tensors, huge and tiny magnitudes) in BF16, F16 and F32, quantises them with nibble and every weight with ModelOpt, and
compares codes, block scales and global scales. Needs torch, safetensors and nvidia-modelopt (CPU is enough):

    pip install torch safetensors nvidia-modelopt
    python tools/quantize/compare_modelopt.py --nibble build/release/nibble
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file, save_file

HIDDEN, INTER, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 192, 80, 6, 4, 2, 32, 64
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2,
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "rope_theta": 1000000.0, "intermediate_size": 96, "moe_intermediate_size": INTER, "num_experts": EXPERTS,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB, "tie_word_embeddings": False, "max_position_embeddings": 512, "mlp_only_layers": [0],
}
# Layers that read one input get one global scale, the largest.
GROUPS = [("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj")]


def values(rows, cols, kind, generator):
    """One of several distributions, float32."""
    x = torch.randn(rows, cols, generator=generator)
    if kind == 0:
        return x * 0.02
    if kind == 1:  # heavy tails
        return x * torch.exp(2 * torch.randn(rows, cols, generator=generator)) * 1e-3
    if kind == 2:  # on and beside rounding edges of a global scale of 2^-10
        edges = torch.tensor([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])
        pick = edges[torch.randint(len(edges), (rows, cols), generator=generator)]
        scale = 2.0 ** torch.randint(-12, -2, (rows, 1), generator=generator)
        out = pick * torch.where(x < 0, -1.0, 1.0) * scale
        out[0, 0] = 2688 * 2.0**-10
        return out
    if kind == 3:  # blocks and rows of zeros, negative zeros
        x[:, :16] = 0
        x[1] = -0.0
        return x
    if kind == 4:  # blocks far below and at the top: clamped block scales
        x *= 10.0 ** torch.randint(-7, 3, (rows, 1), generator=generator)
        return x
    return x.abs() * 1e-5


def checkpoint(dtype, seed):
    g = torch.Generator().manual_seed(seed)
    t = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=g), "model.norm.weight": torch.ones(HIDDEN),
         "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=g)}
    modules = []

    def linear(name, rows, cols):
        modules.append(name)
        t[name + ".weight"] = values(rows, cols, len(modules) % 6, g)

    for layer in range(2):
        p = f"model.layers.{layer}."
        for norm, n in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN),
                        ("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM)):
            t[p + norm + ".weight"] = torch.ones(n)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            linear(p + f"self_attn.{name}_proj", heads * HEAD_DIM, HIDDEN)
        linear(p + "self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        if layer == 0:
            mlps = [(p + "mlp", 96)]
        else:
            t[p + "mlp.gate.weight"] = torch.randn(EXPERTS, HIDDEN, generator=g)
            mlps = [(p + f"mlp.experts.{e}", INTER) for e in range(EXPERTS)]
        for base, inter in mlps:
            linear(base + ".gate_proj", inter, HIDDEN)
            linear(base + ".up_proj", inter, HIDDEN)
            linear(base + ".down_proj", HIDDEN, inter)
    return {k: v.to(dtype).contiguous() for k, v in t.items()}, modules


def group_amax(tensors, module):
    base, _, last = module.rpartition(".")
    names = next((g for g in GROUPS if last in g), (last,))
    return torch.stack([tensors[f"{base}.{n}.weight"].abs().max().float() for n in names]).max()


def compare(tensors, modules, out):
    wrong = checked = 0
    for module in modules:
        weight = tensors[module + ".weight"]
        amax = group_amax(tensors, module)
        if amax == 0:
            continue  # ModelOpt divides 0 by 0 there
        scale_2 = amax / (6.0 * 448.0)
        q, scale, _ = NVFP4QTensor.quantize(weight.clone(), 16, None, scale_2)
        same = (torch.equal(q._quantized_data, out[module + ".weight"])
                and torch.equal(scale.view(torch.uint8), out[module + ".weight_scale"].view(torch.uint8))
                and torch.equal(scale_2, out[module + ".weight_scale_2"]))
        checked += weight.numel()
        if not same:
            wrong += 1
            bad = (q._quantized_data != out[module + ".weight"]).sum().item()
            print(f"DIFFERENT {module}: {bad} bytes of codes, scales "
                  f"{scale_2.item():.9g} and {out[module + '.weight_scale_2'].item():.9g}")
    return wrong, checked


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nibble", required=True, help="the program")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    failures = 0
    for dtype_name, dtype in DTYPES.items():
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as tmp:
                source, target = pathlib.Path(tmp) / "source", pathlib.Path(tmp) / "target"
                source.mkdir()
                tensors, modules = checkpoint(dtype, seed)
                save_file(tensors, source / "model.safetensors")
                (source / "config.json").write_text(json.dumps(CONFIG))
                subprocess.run([args.nibble, "quantize", "--model", source, "--out", target, "--scope", "all"],
                               check=True, stdout=subprocess.DEVNULL)
                wrong, checked = compare(tensors, modules, load_file(target / "model.safetensors"))
                failures += wrong
                print(f"{dtype_name} seed {seed}: {len(modules)} modules, {checked} weights, {wrong} different")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
