"""Checks formats.py against fixed vectors, against torch's own casts and by independent loops.

Run: python -m pytest tools/golden/test_formats.py  (make.py runs it before it makes anything)
"""
import os
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import formats as f  # noqa: E402

# A block that hits every tie of E2M1, with weight_scale_2 = 2^-10.
VECTOR = [0.0625, 0.1875, 0.3125, 0.4375, 0.625, 0.875, 1.25, 1.5,
          -0.0625, -0.1875, -0.07, -0.5, -0.7, -1.0, -1.26, -1.5]
CODES = [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 9, 12, 13, 14, 15, 15]
PACKED = "20426476a8c9edff"
DECODED = [0, .25, .25, .5, .5, 1, 1, 1.5, -0., -.25, -.125, -.5, -.75, -1, -1.5, -1.5]


def block():
    return np.array(VECTOR, dtype=np.float32).reshape(1, 16)


def test_modelopt_vector():
    packed, scale, scale_2 = f.nvfp4_modelopt(block(), amax=2688 * 2.0**-10)
    assert scale_2 == np.float32(2.0**-10)
    assert np.float32(scale_2).tobytes().hex() == "0000803a"
    assert scale.tolist() == [[0x78]]
    assert f.unpack_nibbles(packed)[0].tolist() == CODES
    assert packed.tobytes().hex() == PACKED
    assert f.nvfp4_modelopt_decode(packed, scale, scale_2)[0].tolist() == DECODED


def test_compressed_vector():
    packed, scale, glob = f.nvfp4_compressed(block(), amax=2688 * 2.0**-10)
    assert glob == 1024 and scale.tolist() == [[0x78]] and packed.tobytes().hex() == PACKED
    assert f.nvfp4_compressed_decode(packed, scale, glob)[0].tolist() == DECODED


def test_zero_block():
    w = np.zeros((1, 32), dtype=np.float32)
    w[0, 16:] = 3.0
    packed, scale, _ = f.nvfp4_modelopt(w)
    assert f.e4m3_decode(scale)[0, 0] == 1.0 and packed[0, :8].max() == 0
    packed, scale, _ = f.nvfp4_compressed(w)
    assert f.e4m3_decode(scale)[0, 0] == 0.125 and packed[0, :8].max() == 0


@pytest.mark.parametrize("edge,low,high", [(.25, 0, .5), (.75, .5, 1), (1.25, 1, 1.5),
                                           (1.75, 1.5, 2), (2.5, 2, 3), (3.5, 3, 4), (5, 4, 6)])
def test_e2m1_edges(edge, low, high):
    down, up = np.nextafter(np.float32(edge), np.float32([0, 9]), dtype=np.float32)
    got = f.e2m1_decode(f.e2m1_encode(np.array([down, edge, up, -down, -up])))
    tie = low if (list(f.E2M1_VALUES).index(low) % 2 == 0) else high
    assert got.tolist() == [low, tie, high, -low, -high]


def test_e2m1_saturates_and_signs_zero():
    assert f.e2m1_encode([1e30, -1e30, -0.0]).tolist() == [7, 15, 0]
    assert f.e2m1_encode([-0.0], sign_of_zero=True).tolist() == [8]


def test_division_not_reciprocal():
    scale = np.float32(0.013671875)
    assert f.e4m3_decode(7) == scale
    x = np.float32(0.02392577938735485)
    assert f.e2m1_encode([x / scale])[0] == 3
    assert f.e2m1_encode([x * (np.float32(1) / scale)])[0] == 4


def test_e4m3_every_code_and_against_torch():
    torch = pytest.importorskip("torch")
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], dtype=np.uint8)
    as_torch = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert (f.e4m3_decode(codes) == as_torch).all()
    assert (f.e4m3_encode(as_torch) == codes).all()
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(200000) * 10.0 ** rng.uniform(-4, 3, 200000)).astype(np.float32)
    mid = ((f.E4M3_VALUES[1:] + f.E4M3_VALUES[:-1]) / 2).astype(np.float32)
    x = np.clip(np.concatenate([x, mid, -mid, np.nextafter(mid, np.float32(0))]), -448, 448)
    want = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (f.e4m3_encode(x) == want).all()
    assert f.e4m3_encode([1e9, -1e9]).tolist() == [0x7E, 0xFE]


def test_fp8_partial_blocks():
    rng = np.random.default_rng(2)
    w = rng.standard_normal((130, 144)).astype(np.float32)
    w[128:] *= 100
    codes, scale = f.fp8_block(w)
    assert scale.shape == (2, 2)
    assert scale[1, 1] == np.float32(np.abs(w[128:, 128:]).max()) / np.float32(448)
    got = f.fp8_block_decode(codes, scale)
    for r, c in [(0, 0), (127, 128), (128, 0), (129, 143)]:
        assert got[r, c] == f.e4m3_decode(codes[r, c]) * scale[r // 128, c // 128]
    assert np.abs(got - w).max() <= np.abs(w).max() / 16 * 1.01


def test_activation_loop():
    """The vectorised activation quantiser against a scalar loop with the same formula."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, 48)).astype(np.float32)
    x[0, :16] = 0
    s = np.float32(np.abs(x).max() / 2688)
    got, margin = f.nvfp4_activation(x, s)
    gs = np.float32(1) / s
    for r in range(5):
        for b in range(3):
            v = x[r, b * 16:b * 16 + 16]
            sf = f.e4m3_decode(f.e4m3_encode(gs * np.abs(v).max() / np.float32(6)))
            for i, e in enumerate(v):
                want = np.float32(0)
                if sf > 0:
                    want = f.e2m1_decode(f.e2m1_encode(e * gs / sf)) * sf * s
                assert got[r, b * 16 + i] == want
    assert margin.shape == (5,) and (margin >= 0).all()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider"]))
