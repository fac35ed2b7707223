"""Runs the Hugging Face implementation: float32 logits, distances from ties, NVFP4 activations.

Callers: make.py. The model is always loaded with AutoModelForCausalLM.from_pretrained from a
folder, eager attention, eager experts.
"""
import contextlib

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import formats

NO_TIE = float("inf")


def load(folder):
    """-> (model, load report). Float32 on the CPU, exactly what the release loads."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager",
        experts_implementation="eager", output_loading_info=True)
    return model.eval(), info


@torch.no_grad()
def logits(model, ids):
    out = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return out.to(torch.float32).numpy()


class Gaps:
    """Records, per position, the smallest gap between the last score taken and the first left out.

    Indexer gaps are relative to the largest |score| of the row. Router gaps (groups and experts)
    are differences of sigmoid scores, or for softmax routers relative to the row's largest
    probability. Positions where everything is taken have no gap (infinity).
    """

    def __init__(self, model):
        self.softmax = model.config.model_type == "qwen3_moe"
        self.indexers = [m for n, m in model.named_modules() if n.endswith(".indexer")]

    @contextlib.contextmanager
    def record(self, n):
        self.indexer, self.router = np.full(n, NO_TIE), np.full(n, NO_TIE)
        state = {"in_indexer": False}
        hooks = []
        for m in self.indexers:
            hooks.append(m.register_forward_pre_hook(lambda *a: state.update(in_indexer=True)))
            hooks.append(m.register_forward_hook(lambda *a: state.update(in_indexer=False)))
        f_topk, t_topk = torch.topk, torch.Tensor.topk

        def function(x, k, *a, **kw):      # torch.topk: only the routers call it this way
            self._note(self.router, x, k, relative=self.softmax)
            return f_topk(x, k, *a, **kw)

        def method(x, k, *a, **kw):        # Tensor.topk: indexers, and the top 2 within a group
            if state["in_indexer"]:
                self._note(self.indexer, x[0], k, relative=True)
            return t_topk(x, k, *a, **kw)

        torch.topk, torch.Tensor.topk = function, method
        try:
            yield self
        finally:
            torch.topk, torch.Tensor.topk = f_topk, t_topk
            for h in hooks:
                h.remove()

    @staticmethod
    def _note(into, x, k, relative):
        if k >= x.shape[-1]:
            return
        s = np.sort(x.detach().double().numpy(), -1)[:, ::-1]
        gap = s[:, k - 1] - s[:, k]
        if relative:
            valid = np.where(s > -1e30, np.abs(s), 0)
            gap = gap / np.maximum(valid.max(-1), 1e-30)
        gap = np.where(s[:, k] > -1e30, gap, NO_TIE)   # fewer candidates than k: no choice made
        np.minimum(into, gap, out=into)


class Activations:
    """Hooks every NVFP4 linear of the model: `collect` finds amax, `apply` quantises the input."""

    def __init__(self, model, modules):
        self.model, self.modules = model, set(modules)
        self.amax = {}
        self.scales = None
        self.margin = None

    def _input(self, name, x, rows):
        """x [n, K] float32 entering module `name`; rows are its positions in the sequence."""
        if name not in self.modules:
            return x
        a = x.detach().numpy()
        if self.scales is None:
            if a.size:
                self.amax[name] = max(self.amax.get(name, 0.0), float(np.abs(a).max()))
            return x
        q, margin = formats.nvfp4_activation(a, self.scales[name])
        np.minimum.at(self.margin, rows, margin)
        return torch.from_numpy(q)

    def _experts(self, prefix, module):
        def forward(hidden, index, weight):
            out = torch.zeros_like(hidden)
            for e in range(module.num_experts):
                tok, pos = torch.where(index == e)
                if not len(tok):
                    continue
                x, rows, base = hidden[tok], tok.numpy(), f"{prefix}.{e}."
                gate_w, up_w = module.gate_up_proj[e].chunk(2, 0)
                gate = torch.nn.functional.linear(self._input(base + "gate_proj", x, rows), gate_w)
                up = torch.nn.functional.linear(self._input(base + "up_proj", x, rows), up_w)
                mid = self._input(base + "down_proj", module.act_fn(gate) * up, rows)
                y = torch.nn.functional.linear(mid, module.down_proj[e])
                out.index_add_(0, tok, y * weight[tok, pos, None])
            return out
        return forward

    @contextlib.contextmanager
    def hooked(self, n=0, scales=None):
        self.scales = scales
        self.margin = np.full(n, NO_TIE)
        hooks, patched = [], []

        def pre(name):
            def hook(module, args):
                x = args[0]
                flat = x.reshape(-1, x.shape[-1])
                return (self._input(name, flat, np.arange(len(flat))).reshape(x.shape),)
            return hook

        for name, m in self.model.named_modules():
            if name.endswith(".mlp.experts"):
                m.forward = self._experts(name, m)
                patched.append(m)
            elif name in self.modules:
                hooks.append(m.register_forward_pre_hook(pre(name)))
        try:
            yield self
        finally:
            for m in patched:
                del m.forward
            for h in hooks:
                h.remove()

    def input_scales(self):
        """amax/2688 per module; gate and up share theirs; experts never hit get the layer's max."""
        known = dict(self.amax)
        out = {}
        for name in sorted(self.modules):
            amax = known.get(name)
            if amax is None:
                prefix, leaf = name.rsplit(".", 2)[0], name.rsplit(".", 1)[1]
                amax = max(v for k, v in known.items()
                           if k.startswith(prefix + ".") and k.endswith("." + leaf))
            out[name] = amax
        for name in out:
            if name.endswith(".gate_proj"):
                up = name[: -len("gate_proj")] + "up_proj"
                if up in out:
                    out[name] = out[up] = max(out[name], out[up])
        return {k: np.float32(np.float32(v) / np.float32(2688)) for k, v in out.items()}
