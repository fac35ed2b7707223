"""Muon for the hidden matrices: momentum, then the nearest orthogonal matrix as the update.

Used by train.py. Scaled as in Moonlight (0.2 * sqrt(max(rows, cols))), so that the same learning rate
and decay as for AdamW fit. Matrices of one shape are updated as one batch.
"""
import torch


def orthogonal(g, steps=5):
    """Newton-Schulz on [n,rows,cols] in bfloat16."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-2, -1) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(-2, -1)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.transpose(-2, -1) if tall else x


class Muon:
    def __init__(self, params, decay=0.05, momentum=0.95):
        """params: list of (tensor, rows): the tensor is read as a batch of [rows, last dim]."""
        self.decay, self.momentum = decay, momentum
        self.groups = {}
        for p, rows in params:
            self.groups.setdefault((rows, p.shape[-1]), []).append(p)
        self.buffers = {p: torch.zeros_like(p) for p, _ in params}

    @torch.no_grad()
    def step(self, lr):
        for (rows, cols), params in self.groups.items():
            grads = [p.grad for p in params]
            bufs = [self.buffers[p] for p in params]
            torch._foreach_lerp_(bufs, grads, 1 - self.momentum)
            nesterov = torch._foreach_lerp(grads, bufs, self.momentum)
            flat = torch.cat([n.reshape(-1, rows, cols) for n in nesterov])
            update = orthogonal(flat).float() * (-lr * 0.2 * max(rows, cols) ** 0.5)
            torch._foreach_mul_(params, 1 - lr * self.decay)
            at = 0
            for p in params:
                n = p.numel() // (rows * cols)
                p.add_(update[at:at + n].view_as(p))
                at += n
