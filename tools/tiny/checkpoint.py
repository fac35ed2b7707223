"""Checkpoint files of glm5-tiny: GLM tensor names, BF16 or ModelOpt NVFP4, sharded safetensors.

Callers: train.py, quantize.py, backends.py, tests. The MTP layer is stored as layer index
num_hidden_layers, as GLM does (transformers ignores it).
"""
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])
KEEP_F32 = ("e_score_correction_bias",)


def views(model):
    """Every tensor of a Tiny under its GLM name, as views of the model's storage."""
    layers = [*model.layers, model.mtp]
    last = f"model.layers.{len(layers) - 1}."
    out = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm,
           "lm_head.weight": model.lm_head, last + "enorm.weight": model.enorm,
           last + "hnorm.weight": model.hnorm, last + "eh_proj.weight": model.eh_proj.weight,
           last + "shared_head.norm.weight": model.mtp_norm}
    for i, layer in enumerate(layers):
        p = f"model.layers.{i}."
        for name, t in layer.named_parameters():
            if not name.startswith("mlp."):
                out[p + (name if name.endswith((".weight", ".bias")) else name + ".weight")] = t
        if hasattr(layer.mlp, "gate"):
            out[p + "mlp.gate.weight"] = layer.mlp.gate
            out[p + "mlp.gate.e_score_correction_bias"] = layer.mlp.bias
    for mlp, prefix, many in model.mlps():
        inner = mlp.down.shape[2]
        for e in range(mlp.gate_up.shape[0]):
            q = f"{prefix}.{e}" if many else prefix
            out[q + ".gate_proj.weight"] = mlp.gate_up.data[e, :inner]
            out[q + ".up_proj.weight"] = mlp.gate_up.data[e, inner:]
            out[q + ".down_proj.weight"] = mlp.down.data[e]
    return out


def to_names(model):
    """Copies of every tensor under its GLM name, float32 on the CPU."""
    return {k: v.detach().float().cpu().contiguous().clone() for k, v in views(model).items()}


@torch.no_grad()
def from_names(model, tensors):
    """Fill a Tiny from tensors under GLM names (already dequantised)."""
    want = views(model)
    missing = sorted(set(want) - set(tensors))
    if missing:
        raise ValueError(f"checkpoint lacks {len(missing)} tensors, first {missing[0]}")
    for name, view in want.items():
        if view.shape != tensors[name].shape:
            raise ValueError(f"{name}: found {tuple(tensors[name].shape)}, expected {tuple(view.shape)}")
        view.copy_(tensors[name])


def to_bf16(tensors):
    return {k: v if k.endswith(KEEP_F32) or v.dtype != torch.float32 else v.bfloat16()
            for k, v in tensors.items()}


def save_sharded(tensors, folder, max_bytes=15_500_000):
    """Write model-0000x-of-0000n.safetensors and the index; shards stay under max_bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards, size = [{}], 0
    for name, t in tensors.items():
        n = t.numel() * t.element_size() + 160      # 160: its share of the JSON header
        if size + n > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = t.contiguous()
        size += n
    where = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(folder / file), metadata={"format": "pt"})
        where |= {name: file for name in shard}
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def load_raw(folder):
    """All tensors of a sharded checkpoint as stored."""
    folder = Path(folder)
    files = sorted(set(json.loads((folder / "model.safetensors.index.json").read_text())
                       ["weight_map"].values()))
    out = {}
    for f in files:
        out |= load_file(str(folder / f))
    return out


def dequantise(tensors):
    """ModelOpt NVFP4 → float32; other tensors widened to float32."""
    out = {}
    for name, t in tensors.items():
        if name.endswith(("_scale", "_scale_2")):
            continue
        if t.dtype == torch.uint8:
            codes = torch.stack([t & 15, t >> 4], -1).flatten(-2).long()
            scale = tensors[name + "_scale"].float() * tensors[name + "_scale_2"]
            t = (E2M1[codes].unflatten(-1, (-1, 16)) * scale.unsqueeze(-1)).flatten(-2)
        out[name] = t.float()
    return out


def load_dequantised(folder):
    return dequantise(load_raw(folder))


def copy_side_files(source, folder):
    """tokenizer.json, template and configs that travel with the weights."""
    for f in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json",
              "generation_config.json"):
        shutil.copyfile(Path(source) / f, Path(folder) / f)
