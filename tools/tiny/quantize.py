"""BF16 checkpoint → NVFP4 in the ModelOpt convention, with NVIDIA ModelOpt's own quantiser.

  python tools/tiny/quantize.py BF16_FOLDER OUT_FOLDER

Every routed expert, shared expert and dense MLP (the MTP layer's too) becomes NVFP4, all else stays
BF16, e_score_correction_bias F32. Weights: NVFP4QTensor with max calibration; gate and up share one
amax, as ModelOpt's exporter makes them. Activations: ModelOpt's MaxCalibrator over held-in documents.
ModelOpt's whole-model path is not used because transformers' class has no MTP layer.
Needs nvidia-modelopt, torch, tokenizers, safetensors, jinja2.
"""
import argparse
import json
import random
from importlib.metadata import version
from pathlib import Path

import torch
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.quantization.calib import MaxCalibrator
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from tokenizers import Tokenizer

import checkpoint
from corpus import stream
from model import State, Tiny, causal

HERE = Path(__file__).parent
BLOCK, AMAX_TO_SCALE = 16, 6.0 * 448.0


@torch.no_grad()
def calibrate(model, tokenizer, documents, seed):
    """→ {module name: activation amax} for every linear layer of every MLP."""
    for mlp, _, _ in model.mlps():
        n = mlp.gate_up.shape[0]
        mlp.calibrators = {k: [MaxCalibrator() for _ in range(n)] for k in ("in", "mid")}
    rng = random.Random(seed)
    for i in range(documents):
        text = stream.document(rng, stream._LONG if i % 24 == 23 else stream.STAGES[1])
        ids = torch.tensor([tokenizer.encode(text).ids])
        pos = torch.arange(ids.shape[1])[None]
        st = State(model.c, pos, causal(torch.zeros_like(ids)), True)
        h = model.trunk(ids, st)
        model.draft(h[:, :-1], ids[:, 1:], State(model.c, pos[:, :-1], causal(torch.zeros_like(ids[:, 1:])),
                                                True))
    out = {}
    for mlp, prefix, many in model.mlps():
        maxima = {k: [c.compute_amax() for c in v] for k, v in mlp.calibrators.items()}
        for e in range(mlp.gate_up.shape[0]):
            q = f"{prefix}.{e}" if many else prefix
            for part, key in (("gate_proj", "in"), ("up_proj", "in"), ("down_proj", "mid")):
                amax = maxima[key][e]
                if amax is None:        # an expert no calibration token chose: the layer's maximum
                    amax = max(a for a in maxima[key] if a is not None)
                out[f"{q}.{part}"] = float(amax)
        mlp.calibrators = None
    return out


def quantise(tensors, amax):
    """ModelOpt tensors for every module in `amax`, the others as they are."""
    out = {}
    for name, t in tensors.items():
        module = name.removesuffix(".weight")
        if module not in amax:
            out[name] = t
            continue
        parent, part = module.rsplit(".", 1)
        group = ("gate_proj", "up_proj") if part != "down_proj" else ("down_proj",)
        w_amax = max(tensors[f"{parent}.{g}.weight"].float().abs().max() for g in group)
        scale_2 = w_amax / AMAX_TO_SCALE
        q, scale, scale_2 = NVFP4QTensor.quantize(t.clone(), BLOCK, weights_scaling_factor_2=scale_2)
        out[name] = q._quantized_data
        out[name + "_scale"], out[name + "_scale_2"] = scale, scale_2.float()
        out[module + ".input_scale"] = torch.tensor(amax[module] / AMAX_TO_SCALE)
    return out


def write_configs(folder, config):
    """hf_quant_config.json, and the same in config.json as ModelOpt's converter writes it."""
    last = config["num_hidden_layers"]
    quant = {"producer": {"name": "modelopt", "version": version("nvidia-modelopt")},
             "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": BLOCK,
                              "exclude_modules": ["lm_head", "model.embed_tokens", "model.layers.*.self_attn*",
                                                  "model.layers.*.mlp.gate", f"model.layers.{last}.eh_proj"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quant, indent=4) + "\n")
    config = config | {"quantization_config": convert_hf_quant_config_format(quant)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("bf16")
    p.add_argument("out")
    p.add_argument("--documents", type=int, default=48, help="for activation maxima")
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--tokenizer", default=str(HERE.parents[1] / "models/glm5-tiny/tokenizer.json"))
    a = p.parse_args()
    out = Path(a.out)
    config = json.loads((HERE / "config.json").read_text())
    tensors = checkpoint.load_raw(a.bf16)
    model = Tiny(config).eval()
    checkpoint.from_names(model, checkpoint.dequantise(tensors))
    amax = calibrate(model, Tokenizer.from_file(a.tokenizer), a.documents, a.seed)
    result = quantise(tensors, amax)
    checkpoint.save_sharded(result, out)
    write_configs(out, config)
    (out / "chat_template.jinja").write_text((HERE / "chat_template.jinja").read_text())
    for f in ("generation_config.json", "tokenizer_config.json"):
        (out / f).write_text((HERE / f).read_text())
    n4 = sum(t.numel() for t in result.values() if t.dtype == torch.uint8)
    total = sum(t.numel() * t.element_size() for t in result.values())
    print(f"{len(amax)} modules in NVFP4 ({2 * n4 / 1e6:.1f} M weights), {len(result)} tensors, {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
