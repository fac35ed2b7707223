"""Checkpoints with the faults that loaders meet in the field, each made out of a good golden case.

Caller: test_loading.py. Every builder takes an empty folder, fills it and returns what must happen:
`refused` with patterns that the message must match, or `loads` with the logits it must give and
patterns that must be printed. The numbers C01.. are those of the list of field cases.
"""
import json
import os
import pathlib
import re
import shutil
import sys

import numpy as np

import stfile
from compare import DATA

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools",
                                "golden"))
import formats  # noqa: E402

BUILDERS = {}


def refused(*patterns):
    return {"outcome": "refused", "patterns": patterns}


def loads(base, sign=1, printed=()):
    """Logits equal `sign` times those of the base case; `printed` must occur in the output."""
    return {"outcome": "loads", "base": base, "sign": sign, "patterns": printed}


def builder(function):
    BUILDERS[function.__name__] = function
    return function


class Folder:
    """A good case opened for changes; save() writes it as one file, with no index."""

    def __init__(self, base, target):
        self.base, self.target = DATA / base, pathlib.Path(target)
        self.tensors = stfile.read_folder(self.base)
        self.json = {p.name: json.loads(p.read_text()) for p in self.base.glob("*.json")
                     if p.name.endswith("config.json")}

    @property
    def config(self):
        return self.json["config.json"]

    def save(self):
        stfile.write_file(self.target / "model.safetensors", self.tensors)
        self.save_json()

    def save_json(self):
        for name, value in self.json.items():
            (self.target / name).write_text(json.dumps(value, indent=1))

    def plain(self, base):
        """float32 weight of module `base`, whatever it is stored as; its scales are dropped."""
        t = self.tensors
        if base + ".weight_packed" in t:
            parts = [t.pop(base + s) for s in (".weight_packed", ".weight_scale",
                                               ".weight_global_scale")]
            t.pop(base + ".input_global_scale", None)
            w = formats.nvfp4_compressed_decode(*map(stfile.array, parts[:2]),
                                                stfile.floats(parts[2])[0])
        elif t[base + ".weight"][0] == "U8":
            parts = [t.pop(base + s) for s in (".weight", ".weight_scale", ".weight_scale_2")]
            t.pop(base + ".input_scale", None)
            w = formats.nvfp4_modelopt_decode(*map(stfile.array, parts[:2]),
                                              stfile.floats(parts[2])[()])
        else:
            w = stfile.floats(t.pop(base + ".weight"))
        t[base + ".weight"] = stfile.f32(w)
        return w

    def modules(self, pattern):
        found = {re.sub(r"\.weight(_packed)?$", "", n) for n in self.tensors
                 if re.search(r"\.weight(_packed)?$", n)}
        return sorted(m for m in found if re.search(pattern, m))


NVFP4 = "glm5-nvfp4-mlp"            # ModelOpt, 5 experts, layer 0 dense, MTP layer 3
COMPRESSED = "glm5-odd-compressed"  # compressed-tensors, 3 experts, layer 0 dense, I 96, H 256
SHARDED = "glm5-bf16"               # three shards


@builder
def c01_input_scales_missing(target):
    f = Folder(NVFP4, target)
    for e in (1, 3):
        for p in ("gate_proj", "up_proj"):
            del f.tensors[f"model.layers.1.mlp.experts.{e}.{p}.input_scale"]
    f.save()
    return refused(r"layers?[ .]1\b", r"\b1\b.*\b3\b", "input_scale")


@builder
def c02_dead_expert(target):
    f = Folder(COMPRESSED, target)
    p = "model.layers.1.mlp."
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        f.tensors[f"{p}experts.2.{leaf}.input_global_scale"] = stfile.f32([0.0])
    bias = stfile.floats(f.tensors[p + "gate.e_score_correction_bias"]).copy()
    bias[2] = -50
    f.tensors[p + "gate.e_score_correction_bias"] = stfile.f32(bias)
    f.save()
    return refused(r"experts\.2\b", "input_global_scale")


@builder
def c04_multiplier_rewritten_as_divisor(target):
    f = Folder(NVFP4, target)
    for name in [n for n in f.tensors if n.endswith(".weight_scale_2")]:
        base = name[: -len(".weight_scale_2")]
        one = np.float32(1)
        f.tensors[base + ".weight_packed"] = f.tensors.pop(base + ".weight")
        for old, new in ((".weight_scale_2", ".weight_global_scale"),
                         (".input_scale", ".input_global_scale")):
            s = stfile.floats(f.tensors.pop(base + old))
            f.tensors[base + new] = stfile.f32([one / s])
    del f.json["hf_quant_config.json"]
    f.save()
    return loads(NVFP4)


@builder
def c05_scale_nobody_reads(target):
    f = Folder(NVFP4, target)
    name = "model.layers.1.mlp.experts.0.down_proj.weight_scale_3"
    f.tensors[name] = stfile.f32(0.5, ())
    f.save()
    return loads(NVFP4, printed=(re.escape(name),))


@builder
def c05_scale_misspelt(target):
    f = Folder(NVFP4, target)
    base = "model.layers.1.mlp.experts.0.down_proj."
    f.tensors[base + "weight_scale2"] = f.tensors.pop(base + "weight_scale_2")
    f.save()
    return refused(re.escape(base + "weight_scale_2"), re.escape(base + "weight_scale2"))


@builder
def c06_cache_scales_under_projections(target):
    f = Folder("qwen3-nvfp4", target)
    for leaf in ("k_proj.k_scale", "v_proj.v_scale"):
        f.tensors["model.layers.0.self_attn." + leaf] = stfile.f32(0.5, ())
    f.json["hf_quant_config.json"]["quantization"]["kv_cache_quant_algo"] = "FP8"
    f.save()
    return loads("qwen3-nvfp4", printed=(r"k_scale", r"v_scale"))


@builder
def c08_regular_expressions_in_ignore(target):
    f = Folder(COMPRESSED, target)
    for m in f.modules(r"shared_experts"):
        f.plain(m)
    f.config["quantization_config"]["ignore"] = [
        "lm_head", "re:.*self_attn.*", "re:.*mlp\\.gate$", "re:.*shared_experts.*"]
    f.save()
    return loads(COMPRESSED)


@builder
def c09_one_layer_of_experts_plain(target):
    f = Folder(NVFP4, target)
    for m in f.modules(r"layers\.1\.mlp\.experts\."):
        f.plain(m)
    f.json["hf_quant_config.json"]["quantization"]["exclude_modules"] = [
        "lm_head", "model.layers.1.mlp.experts*", "*self_attn*"]
    f.save()
    return loads(NVFP4)


@builder
def c10_draft_layer_plain_and_unlisted(target):
    f = Folder(NVFP4, target)
    q = f.json["hf_quant_config.json"]["quantization"]
    q["exclude_modules"] = [m for m in q["exclude_modules"] if "layers.3" not in m]
    f.save()
    return loads(NVFP4)


@builder
def c10_draft_layer_declared_but_absent(target):
    f = Folder(NVFP4, target)
    f.tensors = {k: v for k, v in f.tensors.items() if not k.startswith("model.layers.3.")}
    f.save()
    return loads(NVFP4)


@builder
def c11_rope_theta_nested(target):
    f = Folder("lite-bf16", target)
    theta = f.config.pop("rope_theta")
    del f.config["rope_scaling"]
    f.config["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    f.save()
    return loads("lite-bf16")


@builder
def c11_no_rope_theta_anywhere(target):
    f = Folder(SHARDED, target)
    f.config["rope_parameters"] = {"rope_type": "default"}
    f.save()
    return refused(r"config\.json", "rope_theta")


@builder
def c12_position_scaling_of_unknown_kind(target):
    f = Folder(SHARDED, target)
    f.config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 1e6, "factor": 4.0}
    f.save()
    return refused(r"config\.json", "longrope")


@builder
def c13_shard_absent(target):
    shutil.copytree(DATA / SHARDED, target, dirs_exist_ok=True)
    os.remove(target / "model-00002-of-00003.safetensors")
    return refused(r"model-00002-of-00003\.safetensors")


def _lone_tensor(target, end):
    f = Folder(SHARDED, target)
    f.save_json()
    stfile.write_raw(target / "model.safetensors",
                     {"t": {"dtype": "F32", "shape": [32, 8], "data_offsets": [0, end]}},
                     bytes(end))
    return refused(r"model\.safetensors", r"\bt\b")


@builder
def c14_span_longer_than_shape(target):
    return _lone_tensor(target, 65536)


@builder
def c14_span_shorter_than_shape(target):
    return _lone_tensor(target, 4)


@builder
def c15_index_is_stale(target):
    f = Folder(SHARDED, target)
    f.save()
    names = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    weight_map = {n: names[i % 4] for i, n in enumerate(f.tensors)}
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}))
    return refused(r"model-0000\d-of-00004\.safetensors",
                   r"(?<![-\w])model\.safetensors(?!\.index)")


@builder
def c16_tied_with_equal_head(target):
    f = Folder("qwen3-tied-f32", target)
    f.tensors["lm_head.weight"] = f.tensors["model.embed_tokens.weight"]
    f.save()
    return loads("qwen3-tied-f32")


@builder
def c16_tied_with_other_head(target):
    """The stored head is used, and that is printed: here it is the negated embedding."""
    f = Folder("qwen3-tied-f32", target)
    f.tensors["lm_head.weight"] = stfile.f32(-stfile.floats(
        f.tensors["model.embed_tokens.weight"]))
    f.save()
    return loads("qwen3-tied-f32", sign=-1, printed=(r"lm_head",))


@builder
def c17_shared_layer_without_indexer(target):
    f = Folder("glm52-types-f32", target)
    assert not any("layers.2.self_attn.indexer" in n for n in f.tensors)
    f.save()
    return loads("glm52-types-f32")


@builder
def c17_full_layer_without_indexer(target):
    f = Folder("glm52-types-f32", target)
    f.tensors = {k: v for k, v in f.tensors.items() if "layers.1.self_attn.indexer" not in k}
    f.save()
    return refused(r"model\.layers\.1\.self_attn\.indexer")


@builder
def c18_experts_one_by_one_float(target):
    """I 96, H 256, every expert as its own float32 matrices."""
    f = Folder(COMPRESSED, target)
    for m in f.modules(r"\.experts\."):
        f.plain(m)
    f.save()
    return loads(COMPRESSED)


@builder
def c18_experts_stacked_float(target):
    """The same weights stacked as gate_up_proj [E,2I,H] and down_proj [E,H,I]."""
    f = Folder(COMPRESSED, target)
    base = "model.layers.1.mlp.experts"
    n = f.config["n_routed_experts"]
    w = {(e, p): f.plain(f"{base}.{e}.{p}_proj") for e in range(n)
         for p in ("gate", "up", "down")}
    f.tensors = {k: v for k, v in f.tensors.items() if not k.startswith(base + ".")}
    f.tensors[base + ".gate_up_proj"] = stfile.f32(
        [np.concatenate([w[e, "gate"], w[e, "up"]]) for e in range(n)])
    f.tensors[base + ".down_proj"] = stfile.f32([w[e, "down"] for e in range(n)])
    f.save()
    return loads(COMPRESSED)


@builder
def c18_stack_split_into_experts(target):
    f = Folder("glm5-fused-bf16", target)
    base = "model.layers.1.mlp.experts"
    _, (n, two_i, h), gate_up = f.tensors.pop(base + ".gate_up_proj")
    _, _, down = f.tensors.pop(base + ".down_proj")
    inter, one, half = two_i // 2, len(down) // n, len(gate_up) // n // 2
    for e in range(n):
        p, at = f"{base}.{e}.", 2 * e * half
        f.tensors[p + "gate_proj.weight"] = "BF16", [inter, h], gate_up[at:at + half]
        f.tensors[p + "up_proj.weight"] = "BF16", [inter, h], gate_up[at + half:at + 2 * half]
        f.tensors[p + "down_proj.weight"] = "BF16", [h, inter], down[e * one:(e + 1) * one]
    f.save()
    return loads("glm5-fused-bf16")


# ---- beyond the list: neighbours of the same faults


@builder
def unknown_family(target):
    f = Folder(SHARDED, target)
    f.config.update(model_type="glm5_next", architectures=["Glm5NextForConditionalGeneration"])
    f.save()
    return refused("glm5_next")


@builder
def file_cut_short(target):
    shutil.copytree(DATA / "glm52-bf16", target, dirs_exist_ok=True)
    path = target / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    return refused(r"model\.safetensors")


@builder
def header_longer_than_file(target):
    shutil.copytree(DATA / "glm52-bf16", target, dirs_exist_ok=True)
    with open(target / "model.safetensors", "r+b") as file:
        file.write(b"\xff" * 7 + b"\x7f")
    return refused(r"model\.safetensors")


def _bad_scale(target, suffix, value, base=NVFP4, module="model.layers.2.mlp.experts.1.up_proj"):
    f = Folder(base, target)
    name = module + suffix
    dtype, shape, raw = f.tensors[name]
    if dtype == "F8_E4M3":
        f.tensors[name] = dtype, shape, raw[:5] + bytes([value]) + raw[6:]
    else:
        f.tensors[name] = stfile.f32(np.full(shape, value))
    f.save()
    return refused(re.escape(module))


@builder
def block_scale_nan(target):
    return _bad_scale(target, ".weight_scale", 0x7F)


@builder
def block_scale_negative(target):
    return _bad_scale(target, ".weight_scale", 0xB8)


@builder
def global_scale_zero(target):
    return _bad_scale(target, ".weight_scale_2", 0.0)


@builder
def global_scale_infinite(target):
    return _bad_scale(target, ".weight_scale_2", np.inf)


@builder
def global_divisor_zero(target):
    return _bad_scale(target, ".weight_global_scale", 0.0, COMPRESSED,
                      "model.layers.1.mlp.experts.1.up_proj")


@builder
def fp8_scale_nan(target):
    return _bad_scale(target, ".weight_scale_inv", np.nan, "glm53-fp8",
                      "model.layers.0.self_attn.o_proj")


@builder
def fp8_scale_rows_floored(target):
    """576 rows are 4.5 blocks: a file with 4 scale rows is wrong, not 4 blocks."""
    f = Folder("glm53-fp8", target)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    scale = stfile.floats(f.tensors[name])
    assert scale.shape[0] == 5
    f.tensors[name] = stfile.f32(scale[:4])
    f.save()
    return refused(re.escape(name))


@builder
def expert_of_wrong_shape(target):
    f = Folder("lite-bf16", target)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    dtype, (h, i), raw = f.tensors[name]
    f.tensors[name] = dtype, [i, h], raw
    f.save()
    return refused(re.escape(name))


@builder
def expert_missing(target):
    f = Folder("lite-bf16", target)
    del f.tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    f.save()
    return refused(r"model\.layers\.1\.mlp\.experts\.3\.down_proj")
