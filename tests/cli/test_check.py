"""nibble check: what it reports, and its exit status. That it finds wrong kernels is in tests/unit/test_check.c."""

import json
import os
import subprocess

import pytest


@pytest.fixture(scope="module")
def check(nibble_bin, repo):
    def run(*options, env=None):
        return subprocess.run([nibble_bin, "check", "--device", "cpu", *options], cwd=repo, capture_output=True, text=True,
                              timeout=120, env={**os.environ, **(env or {})})

    return run


@pytest.fixture(scope="module")
def report(check, repo):
    done = check("--model", repo / "models" / "glm5-tiny", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_path_has_its_error(report):
    assert report["ok"] and report["failure"] == "" and report["read_bandwidth"] > 0
    ran = [r for r in report["results"] if r["supported"]]
    assert {r["kind"] for r in ran} == {"linear", "mlp", "attention", "runner"}
    for r in ran:
        assert r["ok"] and 0 < r["error"] <= r["bound"] < 1, r
    timed = [r for r in ran if r["bytes"]]
    assert timed and all(r["seconds"] > 0 and r["share_of_floor"] > 0 for r in timed)


def test_kinds_and_phases(report):
    paths = {(r["kind"], r["path"]) for r in report["results"]}
    assert ("linear", "nvfp4") in paths and ("linear", "bf16") in paths
    assert ("attention", "cpu sparse, prefill") in paths and ("attention", "cpu sparse, decode") in paths
    sparse = [r for r in report["results"] if r["path"] == "cpu sparse, decode"]
    assert sparse[0]["context"] > 128  # beyond what the index chooses


def test_runners_are_all_decided(report):
    runners = {r["path"]: r for r in report["results"] if r["kind"] == "runner"}
    assert runners["cpu"]["chosen"] and not runners["reference"]["chosen"]
    assert runners["reference"]["error"] < 1e-5
    for name in ("cuda", "cuda_gemv", "cuda_grouped", "cuda_masked", "cuda_masked_fp4", "cuda_grouped_fp4"):
        assert not runners[name]["supported"] and runners[name]["why"]


def test_names_of_attention_backends(report):
    names = {n["name"]: n for n in report["attention_names"]}
    assert names["dsa"]["supported"] and names["cpu"]["supported"]
    assert "GPU" in names["fa3"]["why"] and "DSA" in names["torch_native"]["why"]


def test_one_layer_of_a_real_shape(check, tmp_path):
    done = check("--like", "qwen3-30b-a3b", "--moe-runner-backend", "auto", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "grouped-query, decode" in done.stdout and "WRONG" not in done.stdout and "reference" not in done.stdout
    assert not list(tmp_path.iterdir())  # the checkpoint it made is gone


@pytest.mark.parametrize("like", ["qwen3-30b-a3b", "glm-4.7-flash", ""])
def test_fp8_cache(check, like, repo, tmp_path):
    model = ("--like", like, "--moe-runner-backend", "auto") if like else ("--model", repo / "models" / "glm5-tiny")
    done = check(*model, "--kv-cache-dtype", "fp8_e4m3", "--json", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    ran = [r for r in json.loads(done.stdout)["results"] if r["kind"] == "attention"]
    assert len(ran) == 2 and all(r["ok"] and "F8_E4M3 cache" in r["where"] for r in ran), ran


@pytest.mark.parametrize("options, says", [
    (("--moe-runner-backend", "flashinfer_trtllm"), "GPU runner"),
    (("--moe-runner-backend", "cublas"), "unknown"),
    (("--kv-cache-dtype", "fp8_e5m2"), "fp8_e4m3"),
    (("--kv-cache-dtype", "int3"), "expected auto"),
    (("--attention-backend", "flashmla"), "GPUs"),
    (("--like", "gpt-9"), "gpt-9"),
])
def test_refusals(check, options, says):
    done = check(*options)
    assert done.returncode == 1 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_model_and_like(check):
    done = check("--model", "x", "--like", "glm-5")
    assert done.returncode == 2 and "--like" in done.stderr


def test_runners_on_ranks(check, repo):
    """A runner that cannot do what a rank would hold is named with the rank and the reason."""
    model = ("--model", repo / "models" / "glm5-tiny", "--moe-runner-backend", "auto")
    done = check(*model, "--tp-size", "4", "--ep-size", "2", "--json")
    assert done.returncode == 0, done.stderr
    runners = {r["name"]: r for r in json.loads(done.stdout)["runners_on_ranks"]}
    assert runners["cpu"]["supported"] and runners["reference"]["supported"]
    assert not runners["cuda"]["supported"] and runners["cuda"]["why"].startswith("rank 0, ")
    text = check(*model, "--tp-size", "4").stdout
    assert "runner on ranks, --tp-size 4 --ep-size 1" in text
    assert check(*model, "--tp-size", "4", "--ep-size", "3").returncode == 2
    assert check(*model, "--ep-size", "2").returncode == 2
