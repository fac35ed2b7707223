"""The comparer itself: recorded logits pass, every kind of wrong ones fails. Needs no nibble."""
import os
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare  # noqa: E402

CASES = compare.all_cases()
W4A4 = [c for c in CASES if c.has_w4a4]
BY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def recorded(case, kind="logits"):
    return np.concatenate(case.logits(kind))


def noisy(ref, amount, seed=1):
    """Every position off by exactly `amount` in the relative norm."""
    d = np.random.default_rng(seed).standard_normal(ref.shape)
    d *= amount * np.linalg.norm(ref, axis=-1, keepdims=True) / np.linalg.norm(
        d, axis=-1, keepdims=True)
    return (ref + d).astype(np.float32)


@BY_CASE
def test_recorded_data_is_sound(case):
    ref = recorded(case)
    assert ref.dtype == np.float32 and np.isfinite(ref).all()
    assert len(ref) == sum(map(len, case.tokens)) == len(case.gap("gap_router"))
    assert [s["tokens"] for s in case.meta["sequences"]] == list(map(len, case.tokens))
    assert case.meta["f32_noise"] < compare.FLOAT32 / 5
    assert min(case.gap("gap_indexer").min(), case.gap("gap_router").min()) > compare.TIE_FLOAT32


@BY_CASE
def test_exact_passes_and_wrong_fails(case):
    ref = recorded(case)
    assert compare.judge_float32(case, ref).ok
    assert compare.judge_float32(case, noisy(ref, 5e-5)).ok
    assert not compare.judge_float32(case, noisy(ref, 2e-4)).ok
    assert compare.judge_loose(case, noisy(ref, 8e-3), "x").ok
    assert not compare.judge_loose(case, noisy(ref, 2e-2), "x").ok


@BY_CASE
def test_one_bad_position_fails(case):
    for bad in (np.nan, np.inf, None):
        got = recorded(case).copy()
        got[len(got) // 2] = got[len(got) // 2 - 1] if bad is None else bad
        assert not compare.judge_float32(case, got).ok


def test_wrong_shape_is_an_error():
    case = CASES[0]
    with pytest.raises(AssertionError, match="the reference is"):
        compare.judge_float32(case, recorded(case)[:-1])


@pytest.mark.parametrize("case", W4A4, ids=lambda c: c.name)
def test_w4a4_is_told_from_weight_only(case):
    ref = recorded(case, "logits_w4a4")
    assert compare.judge_w4a4(case, ref).ok
    assert compare.judge_w4a4(case, noisy(ref, 5e-5)).ok
    assert not compare.judge_w4a4(case, noisy(ref, 3e-3)).ok
    assert not compare.judge_w4a4(case, recorded(case)).ok
