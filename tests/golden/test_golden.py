"""nibble's logits against the recorded Hugging Face ones, and against itself in other pieces.

Run: pytest tests/golden/test_golden.py   (NIBBLE_BIN=PATH or --build DIR names the program)
"""
import json
import os
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare  # noqa: E402

CASES = {c.name: c for c in compare.all_cases()}
BY_CASE = pytest.mark.parametrize("name", sorted(CASES))
# Pieces of one prompt take other kernels than the whole, so sums may be ordered differently.
SAME_MODEL = 2e-5
CPU_FLAGS = {"avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512vl"}}


def cpu_has(level):
    text = pathlib.Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    flags = next((set(line.split()) for line in text.splitlines() if line.startswith("flags")),
                 set())
    return CPU_FLAGS.get(level, set()) <= flags


@pytest.fixture(scope="session")
def whole(nibble, tmp_path_factory):
    """Logits of all sequences of a case in one call, reference level, one piece; kept."""
    kept = {}

    def get(case):
        if case.name not in kept:
            work = tmp_path_factory.mktemp(case.name)
            kept[case.name] = compare.score(nibble, case.folder, case.tokens, work,
                                            "--cpu-level", "reference")
        return kept[case.name]
    return get


def settle(table, verdict):
    table.append(verdict.row)
    assert verdict.ok, verdict.row


def test_there_are_cases_of_every_family():
    families = {c.meta["family"] for c in CASES.values()}
    assert families == {"glm_moe_dsa", "glm4_moe_lite", "glm4_moe", "deepseek_v3", "deepseek_v32",
                        "qwen3_moe"}
    assert sum(c.has_w4a4 for c in CASES.values()) >= 2


@BY_CASE
def test_reference(name, whole, table):
    case = CASES[name]
    settle(table, compare.judge_float32(case, whole(case), "reference"))


@BY_CASE
def test_each_sequence_alone(name, nibble, whole, tmp_path):
    """A file with one flat list of ids; the neighbours in the call change nothing."""
    case = CASES[name]
    start = 0
    for ids in case.tokens:
        got = compare.score(nibble, case.folder, ids, tmp_path, "--cpu-level", "reference")
        rel = compare.relative(got, whole(case)[start:start + len(ids)])
        assert rel.max() <= SAME_MODEL, f"{name}: {len(ids)} tokens alone differ by {rel.max():.2e}"
        start += len(ids)


@BY_CASE
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks(name, chunk, nibble, whole, table, tmp_path):
    """Prefill in pieces, down to token by token, gives what one piece gives."""
    case = CASES[name]
    got = compare.score(nibble, case.folder, case.tokens, tmp_path, "--cpu-level", "reference",
                        "--chunk-size", str(chunk))
    rel = compare.relative(got, whole(case))
    assert rel.max() <= SAME_MODEL, f"{name}: chunk {chunk} differs by {rel.max():.2e}"
    settle(table, compare.judge_float32(case, got, f"reference chunk {chunk}"))


@pytest.mark.parametrize("name", sorted(n for n in CASES if n.startswith(("lite-", "v3-"))))
@pytest.mark.parametrize("level", ["reference", "auto"])
def test_expanded_attention(name, level, nibble, whole, table, tmp_path):
    """Latent attention of a prompt's first 64 tokens in the expanded form: as close to the
    reference as the absorbed one, and the same bits in any pieces."""
    case = CASES[name]
    options = ("--cpu-level", level, "--kv-cache-dtype", "f32", "--mla-prefill", "expanded",
               "--mla-prefill-block", "64")
    assert max(map(len, case.tokens)) >= 64
    got = compare.score(nibble, case.folder, case.tokens, tmp_path, *options, "--chunk-size", "512")
    for chunk in (1, 7, 64):
        cut = compare.score(nibble, case.folder, case.tokens, tmp_path, *options,
                            "--chunk-size", str(chunk))
        assert np.array_equal(got, cut), f"{name}: chunk {chunk} has other bits"
    if level == "reference":
        absorbed = compare.score(nibble, case.folder, case.tokens, tmp_path, "--cpu-level", level)
        assert not np.array_equal(got, absorbed), "the absorbed form came back"
        settle(table, compare.judge_float32(case, got, "expanded"))
    else:
        settle(table, compare.judge_loose(case, got, f"expanded {level}"))


@BY_CASE
@pytest.mark.parametrize("level", ["avx2", "avx512", "auto"])
def test_levels(name, level, nibble, table, tmp_path):
    if not cpu_has(level):
        pytest.skip(f"this CPU has no {level}")
    case = CASES[name]
    got = compare.score(nibble, case.folder, case.tokens, tmp_path, "--cpu-level", level)
    settle(table, compare.judge_loose(case, got, level))


@pytest.mark.parametrize("name", sorted(n for n, c in CASES.items() if c.has_w4a4))
def test_nvfp4_activations(name, nibble, table, tmp_path):
    case = CASES[name]
    got = compare.score(nibble, case.folder, case.tokens, tmp_path, "--cpu-level", "reference",
                        "--activations", "w4a4")
    settle(table, compare.judge_w4a4(case, got))
    away = compare.relative(got, np.concatenate(case.logits()))
    assert np.median(away) > case.meta["w4a4_distance"] / 2, "weight-only logits came back"


# An FP8 cache against a BF16 one: relative, but for FP8_NEAR, which is in deviations of the logits.
FP8_MEDIAN, FP8_HIGH, FP8_NEAR, FP8_ROUTER = 5e-2, 1e-1, 0.25, 5e-2


@BY_CASE
def test_fp8_cache(name, nibble, tmp_path):
    """Codes of three bits of mantissa move the logits by a few hundredths, and the choice of a token
    only where two are close. Counted: positions that attend to all before them, and whose experts
    are no near tie: what random weights choose among keys or experts decides everything."""
    case = CASES[name]
    bf16, fp8 = (compare.score(nibble, case.folder, case.tokens, tmp_path, "--kv-cache-dtype", t)
                 for t in ("bf16", "fp8_e4m3"))
    whole = json.loads((case.folder / "config.json").read_text()).get("index_topk", 1 << 30)
    counted = np.concatenate([np.arange(len(ids)) < whole for ids in case.tokens])
    counted &= case.gap("gap_router") > FP8_ROUTER
    rel = compare.relative(fp8, bf16)[counted]
    assert 1e-3 < np.median(rel) < FP8_MEDIAN, f"{name}: median {np.median(rel):.2e} of {len(rel)}"
    high = np.quantile(rel, 0.75)
    assert high < FP8_HIGH, f"{name}: 75 % quantile {high:.2e} of {len(rel)}"
    top = np.sort(bf16, axis=-1)
    gap = (top[:, -1] - top[:, -2]) / bf16.std()
    flips = counted & (bf16.argmax(-1) != fp8.argmax(-1))
    assert not (gap[flips] > FP8_NEAR).any(), f"{name}: a choice by {gap[flips].max():.2f} fell"
