"""Turns float32 tensors into a checkpoint as a user would have it, and back into plain float32.

Callers: make.py. A plan says how each tensor is stored; `quantise` returns both the stored tensors
and the exact float32 values they stand for (what the reference implementation is given).
"""
import json
import os
import re

import numpy as np
import torch
from safetensors.torch import save_file

import formats

PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
ALWAYS_F32 = "e_score_correction_bias"


def kind_of(plan, name):
    """First matching rule of the plan: a list of (regex, kind), the last one a catch-all."""
    if name.endswith(ALWAYS_F32):
        return "f32"
    for pattern, kind in plan:
        if re.search(pattern, name):
            return kind
    raise KeyError(f"no rule of the plan covers {name}")


def _f8(codes):
    return torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn)


def _scalar(x, shape):
    return torch.tensor(float(x), dtype=torch.float32).reshape(shape)


def _partner_amax(tensors, name, whole_stack=False):
    """gate_proj and up_proj are exported with one amax for both, as ModelOpt does.

    With whole_stack all experts of the layer share it: a stacked tensor has one global scale.
    """
    if whole_stack and ".experts." in name:
        base, leaf = re.match(r"(.*\.experts\.)\d+\.(\w+)_proj\.weight", name).groups()
        group = "down" if leaf == "down" else "gate|up"
        return max(np.abs(w).max() for k, w in tensors.items()
                   if re.fullmatch(re.escape(base) + rf"\d+\.({group})_proj\.weight", k))
    amax = np.abs(tensors[name]).max()
    for a, b in (("gate_proj", "up_proj"), ("up_proj", "gate_proj")):
        if f".{a}." in name:
            amax = max(amax, np.abs(tensors[name.replace(f".{a}.", f".{b}.")]).max())
    return amax


def _quantise_nvfp4(stored, name, w, convention, amax):
    base = name[: -len(".weight")]
    if convention == "compressed":
        packed, scale, glob = formats.nvfp4_compressed(w, amax)
        stored[base + ".weight_packed"] = torch.from_numpy(packed)
        stored[base + ".weight_scale"] = _f8(scale)
        stored[base + ".weight_global_scale"] = _scalar(glob, (1,))
        return formats.nvfp4_compressed_decode(packed, scale, glob)
    packed, scale, scale_2 = formats.nvfp4_modelopt(w, amax)
    stored[name] = torch.from_numpy(packed)
    stored[base + ".weight_scale"] = _f8(scale)
    stored[base + ".weight_scale_2"] = _scalar(scale_2, ())
    return formats.nvfp4_modelopt_decode(packed, scale, scale_2)


def quantise(tensors, plan, convention="modelopt", unequal=False, fp8_suffix="_scale_inv",
             whole_stack=False):
    """-> (stored {name: torch tensor}, plain {name: float32 array}, names of NVFP4 modules)."""
    stored, plain, nvfp4 = {}, {}, []
    for name, w in tensors.items():
        kind = kind_of(plan, name)
        if kind == "nvfp4":
            amax = None if unequal else _partner_amax(tensors, name, whole_stack)
            plain[name] = _quantise_nvfp4(stored, name, w, convention, amax)
            nvfp4.append(name[: -len(".weight")])
        elif kind == "fp8":
            codes, scale = formats.fp8_block(w)
            stored[name] = _f8(codes)
            stored[name + fp8_suffix] = torch.from_numpy(scale)
            plain[name] = formats.fp8_block_decode(codes, scale)
        else:
            stored[name] = torch.from_numpy(w).to(PLAIN[kind])
            plain[name] = stored[name].float().numpy()
    return stored, plain, nvfp4


def add_input_scales(stored, scales, convention):
    """scales: {module: input_scale}, the multiplier form (activation amax / 2688)."""
    for base, s in scales.items():
        if convention == "compressed":
            stored[base + ".input_global_scale"] = _scalar(np.float32(1) / np.float32(s), (1,))
        else:
            stored[base + ".input_scale"] = _scalar(s, ())


# Suffix of a per-expert tensor -> suffix of the stacked one (ModelOpt's spelling).
STACKED = {"weight": "", "weight_scale": "_weight_scale", "weight_scale_2": "_weight_scale_2",
           "input_scale": "_input_scale"}


def fuse_experts(stored):
    """Per-expert tensors -> experts.gate_up_proj [E,2I,H] and experts.down_proj [E,H,I].

    NVFP4 stacks have block scales [E,2I,H/16] and one scalar for each kind of global scale.
    """
    out, parts = {}, {}
    for name, t in stored.items():
        m = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)", name)
        if m:
            parts.setdefault((m[1], STACKED[m[4]]), {})[int(m[2]), m[3]] = t
        else:
            out[name] = t
    for (base, suffix), part in parts.items():
        n = 1 + max(e for e, _ in part)
        if not next(iter(part.values())).dim():
            gate_up = [t for (_, leaf), t in part.items() if leaf != "down"]
            down = [t for (_, leaf), t in part.items() if leaf == "down"]
            if suffix == "_weight_scale_2" and len({float(t) for t in gate_up}) != 1:
                raise ValueError(f"{base}: global scales differ within the stack")
            out[f"{base}.gate_up_proj{suffix}"] = max(gate_up)
            out[f"{base}.down_proj{suffix}"] = max(down)
            continue
        raw = {k: t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
               for k, t in part.items()}
        back = next(iter(part.values())).dtype
        out[f"{base}.gate_up_proj{suffix}"] = torch.stack(
            [torch.cat([raw[e, "gate"], raw[e, "up"]]) for e in range(n)]).view(back)
        out[f"{base}.down_proj{suffix}"] = torch.stack(
            [raw[e, "down"] for e in range(n)]).view(back)
    return out


def write(folder, stored, shards=1):
    """model.safetensors, or shards of about equal size with model.safetensors.index.json."""
    os.makedirs(folder, exist_ok=True)
    names = list(stored)
    stored = {k: v.contiguous() for k, v in stored.items()}
    if shards == 1:
        save_file({k: v.clone() for k, v in stored.items()},
                  os.path.join(folder, "model.safetensors"), {"format": "pt"})
        return
    total = sum(t.numel() * t.element_size() for t in stored.values())
    weight_map, part, used = {}, [[] for _ in range(shards)], 0
    for name in names:
        t = stored[name]
        i = min(shards - 1, used * shards // total)
        part[i].append(name)
        used += t.numel() * t.element_size()
    for i, members in enumerate(part):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({k: stored[k].clone() for k in members}, os.path.join(folder, file),
                  {"format": "pt"})
        weight_map.update({k: file for k in members})
    write_json(os.path.join(folder, "model.safetensors.index.json"),
               {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1)
        f.write("\n")
