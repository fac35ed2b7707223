"""safetensors folders read and written as raw bytes, so that tests can write wrong ones too.

Callers: hostile.py. Tensors are {name: (dtype, shape, bytes)}; nothing is checked on purpose.
"""
import json
import pathlib
import struct

import numpy as np

NUMPY = {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "F8_E4M3": np.uint8,
         "BF16": np.uint16}


def read_file(path):
    raw = pathlib.Path(path).read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + n])
    header.pop("__metadata__", None)
    base = 8 + n
    return {name: (t["dtype"], t["shape"],
                   raw[base + t["data_offsets"][0]:base + t["data_offsets"][1]])
            for name, t in header.items()}


def read_folder(folder):
    tensors = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        tensors.update(read_file(path))
    return tensors


def write_raw(path, header, data):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_file(path, tensors):
    """Larger element types first, so that every tensor is aligned."""
    header, data, at = {"__metadata__": {"format": "pt"}}, [], 0
    width = {d: np.dtype(t).itemsize for d, t in NUMPY.items()}
    for name, (dtype, shape, raw) in sorted(tensors.items(), key=lambda t: -width[t[1][0]]):
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    write_raw(path, header, b"".join(data))


def array(tensor):
    """numpy view in the stored element type (BF16 and F8 as their bits)."""
    dtype, shape, raw = tensor
    return np.frombuffer(raw, NUMPY[dtype]).reshape(shape)


def floats(tensor):
    """float32 values of a plain tensor."""
    a = array(tensor)
    if tensor[0] == "BF16":
        return (a.astype(np.uint32) << 16).view(np.float32)
    return a.astype(np.float32)


def f32(values, shape=None):
    a = np.ascontiguousarray(values, dtype="<f4")
    return "F32", list(a.shape if shape is None else shape), a.tobytes()
