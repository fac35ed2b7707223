"""Smaller BF16 checkpoints, for carrying one between machines in parts of 15 MB.

  python tools/tiny/pack.py pack FOLDER PARTS [BITS]      FOLDER: sharded BF16 checkpoint
  python tools/tiny/pack.py unpack PARTS FOLDER

The byte with sign and exponent compresses to under half, the mantissa byte hardly at all. With BITS,
the MLP weights are first rounded to that many mantissa bits (they end as NVFP4, with one).
"""
import json
import lzma
import sys
from pathlib import Path

import numpy as np
import torch

import checkpoint

PART = 15_000_000


def rounded(t, bits):
    """bfloat16 with `bits` of its 7 mantissa bits, half up in magnitude."""
    drop = 7 - bits
    i = t.view(torch.int16).to(torch.int32) & 0xFFFF
    return (((i + (1 << (drop - 1))) >> drop) << drop).to(torch.int16).view(torch.bfloat16)


def pack(folder, parts, bits=7):
    tensors = checkpoint.load_raw(folder)
    if int(bits) < 7:
        tensors |= {k: rounded(t, int(bits)) for k, t in tensors.items()
                    if ".mlp." in k and t.dtype == torch.bfloat16 and not k.endswith("gate.weight")}
    high, low, names = [], [], []
    for name, t in tensors.items():
        raw = t.view(torch.uint8).numpy().reshape(-1, t.element_size())
        names.append([name, str(t.dtype).split(".")[1], list(t.shape)])
        half = t.element_size() // 2
        low.append(raw[:, :half].tobytes())
        high.append(raw[:, half:].tobytes())
    head = json.dumps(names).encode()
    blob = b"".join([len(head).to_bytes(8, "little"), head, *high])
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1}]
    small = lzma.compress(blob, format=lzma.FORMAT_XZ, filters=filters)
    rest = b"".join(low)
    if len(lzma.compress(rest[:1 << 20], filters=filters)) < 0.9 * (1 << 20):   # rounded weights
        rest = lzma.compress(rest, filters=filters)
    data = len(small).to_bytes(8, "little") + small + rest
    Path(parts).mkdir(parents=True, exist_ok=True)
    for i in range(0, len(data), PART):
        (Path(parts) / f"part-{i // PART:02d}.bin").write_bytes(data[i:i + PART])
    print(f"{len(data) / 1e6:.1f} MB in {-(-len(data) // PART)} parts")


def unpack(parts, folder):
    data = b"".join(f.read_bytes() for f in sorted(Path(parts).glob("part-*.bin")))
    n = int.from_bytes(data[:8], "little")
    blob, low = lzma.decompress(data[8:8 + n]), data[8 + n:]
    if low.startswith(b"\xfd7zXZ"):
        low = lzma.decompress(low)
    m = int.from_bytes(blob[:8], "little")
    names, high = json.loads(blob[8:8 + m]), blob[8 + m:]
    out, at = {}, 0
    for name, dtype, shape in names:
        dtype = getattr(torch, dtype)
        half = dtype.itemsize // 2
        n = int(np.prod(shape)) * half
        raw = np.concatenate([np.frombuffer(low[at:at + n], np.uint8).reshape(-1, half),
                              np.frombuffer(high[at:at + n], np.uint8).reshape(-1, half)], 1)
        out[name] = torch.from_numpy(raw.copy()).flatten().view(dtype).reshape(shape)
        at += n
    checkpoint.save_sharded(out, folder)


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]](*sys.argv[2:])
