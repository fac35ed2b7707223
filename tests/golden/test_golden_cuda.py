"""The recorded Hugging Face logits on the CUDA backend: a GPU, or its emulation (preset "emulated").

Run: pytest tests/golden/test_golden_cuda.py --build build/emulated   (or NIBBLE_BIN=PATH)
"""
import os
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare  # noqa: E402

CASES = {c.name: c for c in compare.all_cases()}
BY_CASE = pytest.mark.parametrize("name", sorted(CASES))


@pytest.fixture(scope="session", autouse=True)
def has_cuda(request):
    cache = compare.DATA.parents[2] / request.config.getoption("--build") / "CMakeCache.txt"
    text = cache.read_text() if cache.exists() else ""
    built = "NIBBLE_CUDA:BOOL=ON" in text or "NIBBLE_CUDA_EMULATED:BOOL=ON" in text
    if not built and not os.environ.get("NIBBLE_BIN"):
        pytest.skip("this build has no CUDA backend")


@pytest.fixture(scope="session")
def whole(nibble, tmp_path_factory):
    """Logits of all sequences of a case, 64 tokens a step; kept."""
    kept = {}

    def get(case):
        if case.name not in kept:
            work = tmp_path_factory.mktemp(case.name)
            kept[case.name] = compare.score(nibble, case.folder, case.tokens, work,
                                            "--device", "cuda")
        return kept[case.name]
    return get


@BY_CASE
def test_logits(name, whole, table):
    case = CASES[name]
    verdict = compare.judge_loose(case, whole(case), "cuda")
    table.append(verdict.row)
    assert verdict.ok, verdict.row


@BY_CASE
@pytest.mark.parametrize("options", [("--chunk-size", "7"), ("--chunk-size", "1"),
                                     ("--chunk-size", "1", "--disable-cuda-graph")],
                         ids=["chunk-7", "chunk-1", "chunk-1-no-graph"])
def test_same_bits(name, options, nibble, whole, tmp_path):
    """However a prompt is cut, and recorded or not: the same bits."""
    case = CASES[name]
    if "1" in options and "emulated" in str(nibble):
        pytest.skip("token by token takes minutes in the emulation")
    got = compare.score(nibble, case.folder, case.tokens, tmp_path, "--device", "cuda", *options)
    same = (got.view(np.uint32) == whole(case).view(np.uint32)).all(axis=1)
    assert same.all(), f"{name}: {(~same).sum()} of {len(same)} positions differ, " \
        f"first {int(np.argmin(same))}, by {compare.relative(got, whole(case)).max():.2e}"


@BY_CASE
@pytest.mark.parametrize("runner", ["cuda_gemv", "cuda_stream", "cuda_grouped", "cuda_masked"])
def test_runners(name, runner, nibble, whole, tmp_path):
    """Each by name: the bits of "auto", or the sentence why not."""
    case = CASES[name]
    if "emulated" in str(nibble) and name not in ("glm53-fp8", "qwen3-nvfp4"):
        pytest.skip("all cases take minutes in the emulation")
    try:
        got = compare.score(nibble, case.folder, case.tokens, tmp_path, "--device", "cuda", "--moe-runner-backend", runner)
    except compare.Failed as e:
        assert runner in e.text and "cannot run" in e.text, e
        pytest.skip(e.text.strip().splitlines()[-1])
    assert np.array_equal(got.view(np.uint32), whole(case).view(np.uint32))


@pytest.mark.parametrize("name", ["glm53-fp8", "lite-bf16", "qwen3-nvfp4"])
def test_fp8_cache(name, nibble, tmp_path):
    """As the CPU with the same cache, not as the CPU with a BF16 one; a chunk at a time or at once: the same bits."""
    case = CASES[name]
    cpu = {kind: compare.score(nibble, case.folder, case.tokens, tmp_path, "--device", "cpu", "--kv-cache-dtype", kind)
           for kind in ("bf16", "fp8_e4m3")}
    options = ("--device", "cuda", "--kv-cache-dtype", "fp8_e4m3")
    got = compare.score(nibble, case.folder, case.tokens, tmp_path, *options)
    near, away = (np.median(compare.relative(got, cpu[kind])) for kind in ("fp8_e4m3", "bf16"))
    assert near < 0.7 * away and near < compare.LOOSE, f"{name}: {near:.2e} from FP8, {away:.2e} from BF16"
    cut = compare.score(nibble, case.folder, case.tokens, tmp_path, *options, "--chunk-size", "7")
    assert np.array_equal(got.view(np.uint32), cut.view(np.uint32))


@pytest.mark.parametrize("name", sorted(n for n, c in CASES.items() if c.has_w4a4))
@pytest.mark.parametrize("runner", ["auto", "cuda_masked_fp4"])
def test_nvfp4_activations(name, runner, nibble, tmp_path):
    """As the CPU's fast levels, whose sums round alike; a code that falls the other way is about a thousandth."""
    case, options = CASES[name], ("--activations", "w4a4", "--kv-cache-dtype", "f32")
    cpu = compare.score(nibble, case.folder, case.tokens, tmp_path, "--device", "cpu", *options)
    got = compare.score(nibble, case.folder, case.tokens, tmp_path, "--device", "cuda", *options, "--moe-runner-backend",
                        runner)
    away = compare.relative(got, np.concatenate(case.logits()))
    assert np.median(away) > case.meta["w4a4_distance"] / 2, "weight-only logits came back"
    near = compare.relative(got, cpu)
    assert np.median(near) <= compare.LOOSE, f"{name}: {np.median(near):.2e} from the CPU"
