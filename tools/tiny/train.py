"""Trains glm5-tiny on one GPU within a given time.

  python tools/tiny/train.py --minutes 9 --out OUT

Worker processes generate text, encode and pack it while the GPU trains. Schedule by the share t of
the time: dense attention, all indexers following it (KL to the head-averaged attention, gradients
into the indexer only); from SPARSE on, attention restricted to the selected top-k in most steps and
the KL taken over the selected set, as DeepSeek-V3.2 was trained; from QAT on, NVFP4 rounding of all
MLP weights in the forward pass. The MTP layer trains along on the same tokens. At the end: BF16
checkpoint, figures on held-out items with NVFP4-rounded weights, comparison with transformers.
"""
import argparse
import json
import multiprocessing as mp
import queue
import random
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SHORT, LONG = (72, 512), (6, 2304)      # rows x length of the two micro-batches of a step
LONG_FROM, SPARSE, QAT, DECAY = 0.06, 0.55, 0.65, 0.6
DENSE_SHARE = 0.25                      # of the steps after SPARSE, so that misses can be repaired
MTP_WEIGHT, LONG_WEIGHT, BIAS_STEP = 0.3, 0.7, 1e-3
MUON_LR = 1.4                           # times the learning rate of AdamW
CHECK_STEP, CHECK_LOSS = 300, 1.0       # AdamW is at 0.89 there; a worse Muon run is given up


def worker(kind, shape, stage, number, seed, out):
    import os
    os.nice(5)
    from tokenizers import Tokenizer

    from corpus import stream
    encoder = stream.Encoder(Tokenizer.from_file(str(HERE.parents[1] / "models/glm5-tiny/tokenizer.json")))
    rows, length = shape
    at = seed * 1_000_000_007 + number * 10_000_019
    while True:
        at += 1
        out.put(stream.block(encoder, at, length, rows, kind == "long", stage))


class Feed:
    """Fresh blocks when the workers have some, an old one otherwise; on a GPU a thread keeps a few
    blocks in pinned memory, since a copy from pageable memory would wait for the GPU."""

    def __init__(self, kind, shape, stage, n_workers, seed, first):
        self.q = mp.Queue(maxsize=48)
        self.ready = queue.Queue(maxsize=4)
        self.kept, self.fresh, self.reused = [], 0, 0
        self.rng = random.Random(seed)
        self.workers = [mp.Process(target=worker, args=(kind, shape, stage, first + i, seed, self.q),
                                   daemon=True) for i in range(n_workers)]
        for w in self.workers:
            w.start()

    def start(self, device):
        """Begin to hand out tensors; call once CUDA may be used."""
        import threading
        self.device = device
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self):
        import torch
        while True:
            block = {k: torch.from_numpy(v.astype(np.int32) if v.dtype == np.uint16 else v)
                     for k, v in self._block().items()}
            if self.device == "cuda":
                block = {k: v.pin_memory() for k, v in block.items()}
            self.ready.put(block)

    def _block(self):
        try:
            block = self.q.get(timeout=0 if self.kept else 120)
        except queue.Empty:
            self.reused += 1
            return self.rng.choice(self.kept)
        self.fresh += 1
        self.kept.append(block)
        if len(self.kept) > 3000:
            self.kept.pop(self.rng.randrange(2000))
        return block

    def next(self):
        return {k: v.to(self.device, non_blocking=True) for k, v in self.ready.get(timeout=200).items()}

    def stop(self):
        for w in self.workers:
            w.terminate()


def loss_of(h, weight, targets, w):
    """Weighted mean cross entropy; h [B,T,D], targets and w [B,T]."""
    import torch.nn.functional as F
    logits = F.linear(h, weight).flatten(0, 1)
    ce = F.cross_entropy(logits.float(), targets.flatten(), reduction="none")
    return (ce * w.flatten()).sum() / w.sum().clamp_min(1)


def micro_batch(model, block, sparse, ce):
    """Forward of one packed block → (main, mtp, indexer) losses."""
    import torch

    from model import State, causal
    ids, doc, pos = block["ids"].long(), block["doc"].int(), block["pos"].long()
    w = block["weights"].float() / 255
    valid = (doc >= 0).float()

    def ahead(x, n, fill):
        return torch.cat([x[:, n:], x.new_full((x.shape[0], n), fill)], 1)
    w1 = ahead(w, 1, 0.0) * (ahead(doc, 1, -1) == doc) * valid
    w2 = ahead(w, 2, 0.0) * (ahead(doc, 2, -1) == doc) * valid
    st = State(model.c, pos, causal(doc), sparse, valid)
    h = model.trunk(ids, st)
    main = ce(h, model.lm_head, ahead(ids, 1, 0), w1)
    loads = [m.load for m in model.moes()[:-1]]
    d = model.draft(h, ahead(ids, 1, 0), st)
    mtp = ce(d, model.lm_head, ahead(ids, 2, 0), w2)
    loads.append(model.moes()[-1].load)
    return main, mtp, sum(st.losses), loads


def rate(t, peak):
    """Warm-up, flat, then linear to 2 % of the peak."""
    if t < 0.02:
        return peak * (0.05 + 0.95 * t / 0.02)
    return peak if t < DECAY else peak * max(0.02, 1 - 0.98 * (t - DECAY) / (1 - DECAY))


class Optimizer:
    """Muon for the matrices of attention and MLPs, AdamW for the rest (all, if muon is false)."""

    def __init__(self, model, muon, device):
        import torch

        from muon import Muon
        named = dict(model.named_parameters())
        self.index = [p for n, p in named.items() if ".indexer." in n]
        rest = {n: p for n, p in named.items() if ".indexer." not in n}
        matrices = {n: p for n, p in rest.items() if p.dim() > 1 and muon
                    and n not in ("embed", "lm_head") and not n.endswith("mlp.gate")}
        self.rest = [p for n, p in rest.items() if n not in matrices]
        self.muon = Muon([(p, p.shape[-2] // 2 if n.endswith("gate_up") else p.shape[-2])
                          for n, p in matrices.items()]) if muon else None
        self.adam = torch.optim.AdamW(
            [{"params": [p for p in self.rest if p.dim() > 1], "weight_decay": 0.05},
             {"params": [p for p in self.rest if p.dim() < 2], "weight_decay": 0.0},
             {"params": self.index, "weight_decay": 0.0}],
            lr=0.0, betas=(0.9, 0.95), eps=1e-10, fused=device == "cuda")

    def step(self, lr):
        import torch
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        torch.nn.utils.clip_grad_norm_(self.index, 1.0)
        for g in self.adam.param_groups:
            g["lr"] = lr
        self.adam.step()
        if self.muon:
            self.muon.step(lr * MUON_LR)


def train(model, feeds, seconds, peak, muon, device, log, start_at=0.0, max_steps=None, begin=None):
    """→ figures, or None when a Muon run is behind at CHECK_STEP."""
    import torch
    opt = Optimizer(model, muon, device)
    ce = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of
    rng = random.Random(7)
    begin, step, tokens, sums, window = begin or time.time(), 0, 0, {}, time.time()
    while True:
        t = start_at + (1 - start_at) * (time.time() - begin) / seconds
        if t >= 1 or step == max_steps:
            break
        model.set_qat(t >= QAT)
        sparse = t >= SPARSE and rng.random() >= DENSE_SHARE
        loads = None
        kinds = ["short"] + (["long"] if t >= LONG_FROM else [])
        for kind in kinds:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                main, mtp, kl, load = micro_batch(model, feeds[kind].next(), sparse, ce)
                scale = (LONG_WEIGHT if not start_at else 1.0) if kind == "long" else 1.0
                loss = scale * (main + MTP_WEIGHT * mtp + kl)
            loss.backward()
            loads = load if loads is None else [a + b for a, b in zip(loads, load)]
            for name, v in (("main", main), ("mtp", mtp), ("kl", kl)):
                sums.setdefault(kind + " " + name, []).append(v.detach())
            tokens += np.prod(SHORT if kind == "short" else LONG)
        lr = rate(t, peak) * (1 if not start_at else min(1, (step + 1) / 60))
        opt.step(lr)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            if t < 0.95:
                for m, n in zip(model.moes(), loads):
                    m.bias += BIAS_STEP * (n.float().mean() - n).sign()
        step += 1
        if step % 100 == 0 or step in (1, 2, 5, 20):
            means = {k: f"{torch.stack(v).mean().item():.3f}" for k, v in sums.items()}
            spread = max((n.max() / n.float().mean()).item() for n in loads)
            log(f"t {t:.3f} step {step} {tokens / 1e6:.1f}M tok {(time.time() - window):.1f}s "
                f"lr {lr:.1e} {means} load max/mean {spread:.2f} "
                f"fresh {feeds['short'].fresh}/{feeds['short'].fresh + feeds['short'].reused} "
                f"{feeds['long'].fresh}/{feeds['long'].fresh + feeds['long'].reused}")
            if muon and not start_at and step == CHECK_STEP and float(means["short main"]) > CHECK_LOSS:
                return None
            sums, window = {}, time.time()
    return {"steps": step, "tokens": int(tokens), "seconds": round(time.time() - begin, 1)}


def compare_with_transformers(folder, model, tokenizer, log, device, docs=6):
    """Largest relative difference per position between transformers' logits and ours, float32."""
    import torch

    import backends
    import checkpoint
    from corpus import stream
    from model import State, Tiny
    plain = Tiny(model.c).eval()
    checkpoint.from_names(plain, checkpoint.load_dequantised(folder))
    hf = backends.load_transformers(folder)
    rng, worst, agree = random.Random(3), 0.0, []
    for i in range(docs):
        text = stream.document(rng, stream._LONG if i % 2 else stream._SHORT)
        ids = torch.tensor([tokenizer.encode(text).ids])
        pos = torch.arange(ids.shape[1])[None]
        with torch.no_grad():
            ours = plain.logits(plain.trunk(ids, State(model.c, pos, pos[..., None] >= pos[:, None], True)))
            theirs = hf(ids).logits
        diff = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max().item()
        agree.append((ours.argmax(-1) == theirs.argmax(-1)).float().mean().item())
        worst = max(worst, diff)
        log(f"transformers: {ids.shape[1]} tokens, largest relative difference {diff:.2e}, "
            f"same argmax {agree[-1]:.4f}")
    return {"max_rel_diff": worst, "same_argmax": min(agree)}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--out", required=True)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--lr", type=float, default=1.5e-3)
    p.add_argument("--workers", type=int, default=14)
    p.add_argument("--resume", metavar="FOLDER", help="checkpoint to continue from, BF16 or NVFP4")
    p.add_argument("--start-at", type=float, default=0.0, help="point of the schedule to start at, 0 … 1")
    p.add_argument("--stage", type=int, choices=(1, 2), default=1, help="mix of skills (corpus/stream.py)")
    p.add_argument("--max-steps", type=int)
    p.add_argument("--adamw", action="store_true", help="AdamW for all parameters")
    p.add_argument("--parts", metavar="FOLDER", help="also write the checkpoint there, packed (pack.py)")
    p.add_argument("--no-compare", action="store_true", help="skip the comparison with transformers")
    p.add_argument("--eval-share", type=float, default=1.0)
    p.add_argument("--small", action="store_true", help="tiny blocks, for a test on a CPU")
    a = p.parse_args()
    out = Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    logfile = (out / "train.log").open("a")

    def log(text):
        print(text, flush=True)
        print(text, file=logfile, flush=True)
    if a.small:
        global SHORT, LONG
        SHORT, LONG = (4, 256), (1, 1024)
    n_long = max(1, a.workers // 3)
    feeds = {"short": Feed("short", SHORT, a.stage, max(1, a.workers - n_long), a.seed, 0),
             "long": Feed("long", LONG, a.stage, n_long, a.seed, 1000)}

    import torch
    import torch._dynamo
    from tokenizers import Tokenizer

    import backends
    import checkpoint
    import eval as evaluation
    import evalset
    import pack
    from model import Tiny, fake_nvfp4
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = json.loads((HERE / "config.json").read_text())
    for f in feeds.values():
        f.start(device)

    def fresh_model():
        model = Tiny(config)
        if a.resume:
            checkpoint.from_names(model, checkpoint.load_dequantised(a.resume))
        return model.to(device)
    model, begin = fresh_model(), time.time()
    log(f"{sum(q.numel() for q in model.parameters()) / 1e6:.1f} M parameters on "
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, seed {a.seed}")
    args = (a.minutes * 60, a.lr)
    figures = train(model, feeds, *args, not a.adamw, device, log, a.start_at, a.max_steps)
    if figures is None:
        log("Muon is behind: again with AdamW")
        model = fresh_model()
        figures = train(model, feeds, *args, False, device, log, a.start_at, a.max_steps, begin)
    log(f"trained: {figures}")
    for f in feeds.values():
        f.stop()
    checkpoint.save_sharded(checkpoint.to_bf16(checkpoint.to_names(model)), out / "bf16")
    (out / "bf16" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if a.parts:
        pack.pack(out / "bf16", a.parts)
    tokenizer = Tokenizer.from_file(str(HERE.parents[1] / "models/glm5-tiny/tokenizer.json"))
    checkpoint.from_names(model, checkpoint.load_dequantised(out / "bf16"))
    model.eval()
    model.set_qat(False)
    with torch.no_grad():
        for mlp, _, _ in model.mlps():
            mlp.gate_up.copy_(fake_nvfp4(mlp.gate_up))
            mlp.down.copy_(fake_nvfp4(mlp.down))
    counts = {k: max(1, round(n * a.eval_share)) for k, n in evaluation.COUNTS.items()}
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        results = evaluation.run(backends.TinyBackend(model, tokenizer), tokenizer, counts, 0, 3, log)
    log(evalset.table(results))
    figures |= {"results": results}
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    if a.no_compare:
        return
    figures["transformers"] = compare_with_transformers(out / "bf16", model, tokenizer, log, device)
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    mp.set_start_method("spawn")
    main()
