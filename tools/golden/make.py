#!/usr/bin/env python3
"""Makes tests/golden/data: tiny checkpoints and the logits the Hugging Face code gives for them.

    python tools/golden/make.py [--only NAME ...] [--out tests/golden/data]

Deterministic on one machine: every draw comes from the case's seed. Seeds are tried in order
until no top-k choice of the float32 run is close to a tie and float32 rounding stays small.
Versions: tools/golden/requirements.txt.
"""
import argparse
import copy
import json
import os
import re
import shutil
import sys
import tempfile
import warnings
import zlib

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import cases  # noqa: E402
import reference  # noqa: E402
import store  # noqa: E402
import weights  # noqa: E402

MIN_GAP = 3e-5          # a choice closer than this could fall either way in float32
MAX_F32_NOISE = 2e-5    # relative distance of the float32 logits from the float64 ones
MAX_SEEDS = 60


def relative(a, b):
    """Per row: norm of the difference over norm of b."""
    return np.linalg.norm(a.astype(np.float64) - b, axis=-1) / np.linalg.norm(b, axis=-1)


def base_config(case):
    cfg = copy.deepcopy(case["config"])
    for key in case.get("drop", ()):
        del cfg[key]
    return cfg


def load_plain(cfg, plain, folder):
    """The model from a folder of plain float32 tensors, loaded as the release loads it."""
    store.write(folder, {k: torch.from_numpy(v.copy()) for k, v in plain.items()})
    plain_cfg = dict(cfg)
    plain_cfg.pop("torch_dtype", None)
    plain_cfg["dtype"] = "float32"
    store.write_json(os.path.join(folder, "config.json"), plain_cfg)
    model, info = reference.load(folder)
    check_load(cfg, info)
    return model


def check_load(cfg, info):
    """Nothing missing but what the checkpoint rightly lacks; nothing extra but the MTP layer."""
    mtp = f"model.layers.{cfg['num_hidden_layers']}."
    missing = [k for k in info["missing_keys"]
               if not (cfg.get("n_shared_experts") == 0 and "shared_experts" in k)
               and not (cfg.get("tie_word_embeddings") and k == "lm_head.weight")]
    extra = [k for k in info["unexpected_keys"] if not k.startswith(mtp)]
    if missing or extra or info["mismatched_keys"] or info.get("error_msgs"):
        raise SystemExit(f"load: missing {missing} extra {extra} {info}")


def draw_tokens(case, seed):
    rng = np.random.default_rng([seed, 7])
    n = case["config"]["vocab_size"]
    return [rng.integers(0, n, length).tolist() for length in case.get("seqs", cases.SEQS)]


def attempt(case, cfg, seed, tmp):
    """One seed -> everything to record, or the reason why this seed will not do."""
    opt = {"router_bias": case.get("router_bias", (0.0, 0.15)),
           "unequal_gate_up": case.get("unequal"), "mtp_own_head": case.get("mtp_own_head"),
           "small_latents": case.get("small_latents"), "branch": case.get("branch")}
    tensors = weights.make_tensors(case["config"], opt, seed)
    stored, plain, nvfp4 = store.quantise(
        tensors, case["plan"], case.get("convention", "modelopt"), bool(case.get("unequal")),
        case.get("fp8_suffix", "_scale_inv"), bool(case.get("fused")))
    tokens = draw_tokens(case, seed)
    model = load_plain(cfg, plain, os.path.join(tmp, "plain"))
    gaps, out, per_seq = reference.Gaps(model), [], []
    for ids in tokens:
        with gaps.record(len(ids)):
            out.append(reference.logits(model, ids))
        per_seq.append((gaps.indexer, gaps.router))
    low = min(min(i.min(), r.min()) for i, r in per_seq)
    if low < MIN_GAP:
        return None, f"smallest top-k gap {low:.1e}"
    for ids, ref in zip(tokens, out):
        if not np.isfinite(ref).all():
            return None, "logits are not finite"
    result = dict(stored=stored, tokens=tokens, logits=out, gaps=per_seq, seed=seed, plain=plain)
    if nvfp4 and not case.get("no_input_scale"):
        acts = reference.Activations(model, nvfp4)
        with acts.hooked():
            again = [reference.logits(model, ids) for ids in tokens]
        worst = max(relative(a, b).max() for a, b in zip(again, out))
        assert worst < MAX_F32_NOISE, f"hooked experts differ by {worst}"
        scales = acts.input_scales()
        store.add_input_scales(stored, scales, case.get("convention", "modelopt"))
        if case.get("w4a4"):
            result["w4a4"], result["w4a4_margin"] = [], []
            for ids in tokens:
                with acts.hooked(len(ids), scales):
                    result["w4a4"].append(reference.logits(model, ids))
                result["w4a4_margin"].append(acts.margin)
    model.double()
    noise = max(relative(a, reference.logits(model, ids)).max() for a, ids in zip(out, tokens))
    if noise > MAX_F32_NOISE:
        return None, f"float32 noise {noise:.1e}"
    result["f32_noise"] = float(noise)
    return result, None


def short(values):
    """Per-position floats to two digits; null where there was no choice to make."""
    return [None if not np.isfinite(v) else float(f"{v:.2g}") for v in values]


def compact(meta):
    """Indented JSON, but one line per list of numbers."""
    text = json.dumps(meta, indent=1)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda m: re.sub(r"\s+", "", m[0]), text)


def record(case, cfg, r, folder):
    """Writes the case folder: the checkpoint, tokens.json, logits_N.npy, case.json."""
    shutil.rmtree(folder, ignore_errors=True)
    stored = store.fuse_experts(r["stored"]) if case.get("fused") else r["stored"]
    store.write(folder, stored, case.get("shards", 1))
    full = dict(cfg)
    if case.get("quant_config"):
        full["quantization_config"] = case["quant_config"]
    store.write_json(os.path.join(folder, "config.json"), full)
    if case.get("hf_quant"):
        store.write_json(os.path.join(folder, "hf_quant_config.json"), case["hf_quant"])
    if case.get("generation"):
        store.write_json(os.path.join(folder, "generation_config.json"), case["generation"])
    with open(os.path.join(folder, "tokens.json"), "w", encoding="utf-8") as f:
        json.dump(r["tokens"], f)
    for i, ref in enumerate(r["logits"]):
        np.save(os.path.join(folder, f"logits_{i}.npy"), ref)
    kinds = {}
    for name in r["plain"]:
        kind = store.kind_of(case["plan"], name)
        kinds[kind] = kinds.get(kind, 0) + 1
    meta = {
        "name": case["name"], "family": cfg["model_type"], "covers": case["covers"],
        "tolerance": {"float32": 1e-4, "bf16": 1e-2},
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__}, "
                     "float32, eager, CPU, dequantised weights",
        "seed": r["seed"], "tensors_per_kind": kinds,
        "convention": case.get("convention", "modelopt") if "nvfp4" in kinds else None,
        "fused_experts": bool(case.get("fused")), "f32_noise": r["f32_noise"],
        "min_gap": float(min(min(i.min(), g.min()) for i, g in r["gaps"]))
        if any(np.isfinite(i).any() or np.isfinite(g).any() for i, g in r["gaps"]) else None,
        "sequences": [{"tokens": len(t), "gap_indexer": short(i), "gap_router": short(g)}
                      for t, (i, g) in zip(r["tokens"], r["gaps"])],
    }
    if "w4a4" in r:
        for i, ref in enumerate(r["w4a4"]):
            np.save(os.path.join(folder, f"logits_w4a4_{i}.npy"), ref)
            meta["sequences"][i]["w4a4_margin"] = short(r["w4a4_margin"][i])
        meta["w4a4_distance"] = float(np.median(np.concatenate(
            [relative(a, b) for a, b in zip(r["w4a4"], r["logits"])])))
    with open(os.path.join(folder, "case.json"), "w", encoding="utf-8") as f:
        f.write(compact(meta) + "\n")
    return meta


def verify_saved(case, cfg, r, folder):
    """Where Hugging Face can load the folder itself (no quantisation), the logits must agree."""
    if case.get("quant_config") or case.get("hf_quant"):
        return "not loadable by HF as stored"
    model, info = reference.load(folder)
    check_load(cfg, info)
    worst = max(relative(reference.logits(model, ids), ref).max()
                for ids, ref in zip(r["tokens"], r["logits"]))
    if worst > 1e-6:
        raise SystemExit(f"{case['name']}: reloaded logits differ by {worst}")
    return f"reloaded, {worst:.0e}"


def make_case(case, out):
    cfg = base_config(case)
    first = zlib.crc32(case["name"].encode()) % 100000
    with tempfile.TemporaryDirectory() as tmp:
        for seed in range(first, first + MAX_SEEDS):
            result, why = attempt(case, cfg, seed, tmp)
            if result:
                break
            print(f"  {case['name']} seed {seed}: {why}", flush=True)
        else:
            raise SystemExit(f"{case['name']}: no seed of {MAX_SEEDS} will do")
        folder = os.path.join(out, case["name"])
        meta = record(case, cfg, result, folder)
        how = verify_saved(case, cfg, result, folder)
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    std = np.concatenate(result["logits"]).std()
    print(f"{case['name']:28s} {size / 1e3:7.0f} kB  seed {result['seed']}  logits std {std:.2f}  "
          f"min gap {meta['min_gap'] or float('inf'):.1e}  noise {meta['f32_noise']:.1e}  {how}",
          flush=True)
    return size


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--only", nargs="*", help="names of cases; default all")
    ap.add_argument("--out", default=os.path.join(here, "..", "..", "tests", "golden", "data"))
    args = ap.parse_args()
    if not transformers.__version__.startswith("5.17."):
        raise SystemExit(f"transformers 5.17.* needed, found {transformers.__version__}")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    names = [c["name"] for c in cases.CASES]
    for name in args.only or ():
        if name not in names:
            raise SystemExit(f"no case named {name}; there are: {', '.join(names)}")
    total = sum(make_case(c, args.out) for c in cases.CASES
                if not args.only or c["name"] in args.only)
    print(f"{total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
