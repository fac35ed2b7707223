"""NVFP4 and FP8-block quantisation, exactly as the checkpoint formats define it.

Callers: store.py (writes checkpoints), reference.py (activation quantisation), test_formats.py.
Pure numpy; every division is a float32 division, every rounding is to nearest, ties to even.
"""
import numpy as np

F32 = np.float32

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=F32)


def _e4m3_table():
    """The 127 finite non-negative values of E4M3FN in code order (0x00..0x7E)."""
    codes = np.arange(0x7F)
    exp, man = codes >> 3, (codes & 7).astype(np.float64)
    return np.where(exp == 0, man * 2.0**-9, (1 + man / 8) * 2.0 ** (exp - 7.0))


E4M3_VALUES = _e4m3_table()


def _nearest_even(magnitude, table):
    """Index into an ascending table: nearest, ties to the even index, saturating at the end."""
    table = table.astype(np.float64)
    magnitude = magnitude.astype(np.float64)
    mid = (table[1:] + table[:-1]) / 2
    code = np.searchsorted(mid, magnitude, side="left")
    tie = (code < len(mid)) & (mid[np.minimum(code, len(mid) - 1)] == magnitude)
    return code + (tie & (code % 2 == 1))


def e4m3_encode(x):
    """float array -> uint8 codes; saturates at 448, never produces NaN."""
    x = np.asarray(x, dtype=F32)
    if not np.isfinite(x).all():
        raise ValueError("e4m3_encode: input is not finite")
    code = _nearest_even(np.abs(x), E4M3_VALUES)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def e4m3_decode(code):
    code = np.asarray(code, dtype=np.uint8)
    if ((code & 0x7F) == 0x7F).any():
        raise ValueError("e4m3_decode: NaN code")
    value = E4M3_VALUES[code & 0x7F]
    return np.where(code & 0x80, -value, value).astype(F32)


def e2m1_encode(x, sign_of_zero=False):
    """float array -> 4-bit codes. ModelOpt writes -0 as code 0, compressed-tensors as code 8."""
    x = np.asarray(x, dtype=F32)
    code = _nearest_even(np.abs(x), E2M1_VALUES)
    sign = np.signbit(x) if sign_of_zero else x < 0
    return (code | np.where(sign, 8, 0)).astype(np.uint8)


def e2m1_decode(code):
    value = E2M1_VALUES[np.asarray(code) & 7]
    return np.where(np.asarray(code) & 8, -value, value).astype(F32)


def pack_nibbles(codes):
    """[..., K] codes -> [..., K/2] bytes; element 2j in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def unpack_nibbles(packed):
    out = np.empty(packed.shape[:-1] + (packed.shape[-1] * 2,), dtype=np.uint8)
    out[..., 0::2] = packed & 15
    out[..., 1::2] = packed >> 4
    return out


def _blocks(w):
    if w.shape[-1] % 16:
        raise ValueError(f"NVFP4 needs an input dimension divisible by 16, got {w.shape}")
    return w.reshape(w.shape[:-1] + (w.shape[-1] // 16, 16))


def nvfp4_modelopt(w, amax=None):
    """ModelOpt convention. w [out, in] float32 -> (packed, block scale codes, weight_scale_2).

    `amax` may be larger than that of `w` (gate and up unified); default is the tensor's own.
    """
    w = np.asarray(w, dtype=F32)
    scale_2 = F32(F32(np.abs(w).max() if amax is None else amax) / F32(2688.0))
    b = _blocks(w)
    scale = np.abs(b).max(-1) / F32(F32(6.0) * scale_2)
    scale = np.where(scale == 0, F32(1.0), scale)
    scale_code = e4m3_encode(np.clip(scale, F32(2.0**-9), F32(448.0)))
    step = e4m3_decode(scale_code) * scale_2
    codes = e2m1_encode(b / step[..., None]).reshape(w.shape)
    return pack_nibbles(codes), scale_code, scale_2


def nvfp4_modelopt_decode(packed, scale_code, scale_2):
    b = _blocks(e2m1_decode(unpack_nibbles(packed)))
    w = b * e4m3_decode(scale_code)[..., None] * F32(scale_2)
    return w.reshape(packed.shape[0], -1)


def nvfp4_compressed(w, amax=None):
    """compressed-tensors convention -> (packed, block scale codes, weight_global_scale)."""
    w = np.asarray(w, dtype=F32)
    glob = F32(F32(2688.0) / F32(np.abs(w).max() if amax is None else amax))
    b = _blocks(w)
    scale = np.abs(b).max(-1) / F32(6.0) * glob
    scale_code = e4m3_encode(np.clip(scale, F32(0), F32(448.0)))
    scale_code = np.where(e4m3_decode(scale_code) == 0, e4m3_encode(F32(0.125)), scale_code)
    step = e4m3_decode(scale_code) / glob
    codes = e2m1_encode(b / step[..., None], sign_of_zero=True).reshape(w.shape)
    return pack_nibbles(codes), scale_code, glob


def nvfp4_compressed_decode(packed, scale_code, glob):
    b = _blocks(e2m1_decode(unpack_nibbles(packed)))
    w = b * e4m3_decode(scale_code)[..., None] / F32(glob)
    return w.reshape(packed.shape[0], -1)


def nvfp4_activation(x, input_scale):
    """Values after NVFP4 activation quantisation with a static global `input_scale` (multiplier).

    gs = 1/input_scale; SF = E4M3(gs * amax16 / 6); code = E2M1(x * gs / SF), 0 where SF = 0;
    the value is code * SF * input_scale. Also returns, per row, the smallest relative distance
    of any element from a rounding edge: where it is tiny, another summation order may flip a code.
    """
    x = np.asarray(x, dtype=F32)
    input_scale = F32(input_scale)
    gs = F32(1.0) / input_scale
    b = _blocks(x)
    raw = gs * np.abs(b).max(-1) / F32(6.0)
    sf = e4m3_decode(e4m3_encode(raw))
    safe = np.where(sf == 0, F32(1), sf)[..., None]
    scaled = b * gs / safe
    code = np.where(sf[..., None] == 0, 0, e2m1_encode(scaled)).astype(np.uint8)
    value = e2m1_decode(code) * sf[..., None] * input_scale

    def margin(v, table):
        mid = ((table[1:] + table[:-1]) / 2).astype(np.float64)
        v = np.abs(v).astype(np.float64)
        i = np.clip(np.searchsorted(mid, v), 1, len(mid) - 1)
        return np.minimum(abs(v - mid[i]) / mid[i], abs(v - mid[i - 1]) / mid[i - 1])

    rows = x.shape[0]
    m = np.minimum(
        margin(scaled, E2M1_VALUES).reshape(rows, -1).min(-1),
        margin(raw, E4M3_VALUES).reshape(rows, -1).min(-1),
    )
    return value.reshape(x.shape).astype(F32), m


def fp8_block(w, block=128):
    """w [out, in] -> (codes [out, in], scale_inv [ceil(out/128), ceil(in/128)] float32)."""
    w = np.asarray(w, dtype=F32)
    rows, cols = w.shape
    nr, nc = -(-rows // block), -(-cols // block)
    scale = np.ones((nr, nc), dtype=F32)
    codes = np.empty(w.shape, dtype=np.uint8)
    for r in range(nr):
        for c in range(nc):
            part = (slice(r * block, (r + 1) * block), slice(c * block, (c + 1) * block))
            amax = np.abs(w[part]).max()
            if amax > 0:
                scale[r, c] = F32(amax) / F32(448.0)
            codes[part] = e4m3_encode(w[part] / scale[r, c])
    return codes, scale


def fp8_block_decode(codes, scale, block=128):
    rows, cols = codes.shape
    full = np.repeat(np.repeat(scale, block, 0), block, 1)[:rows, :cols]
    return e4m3_decode(codes) * full.astype(F32)
