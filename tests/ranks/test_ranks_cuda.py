"""Ranks on devices: a build with CUDA, on GPUs or emulated (preset "emulated"). Golden checkpoints: the emulation is slow.

Run: pytest tests/ranks/test_ranks_cuda.py --build build/emulated
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from ranks_util import family, gone, ranks_of
from test_ranks_die import Client

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/golden/data/glm52-nvfp4-routed"
IDS = [3, 17, 99, 4, 52, 8]
CUDA = ["--device", "cuda", "--kv-cache-dtype", "bf16"]
SMALL = ["--context-length", "512", "--chunked-prefill-size", "16", "--max-running-requests", "4"]


@pytest.fixture(scope="session", autouse=True)
def has_cuda(request):
    cache = ROOT / request.config.getoption("--build") / "CMakeCache.txt"
    text = cache.read_text() if cache.exists() else ""
    if "NIBBLE_CUDA:BOOL=ON" not in text and "NIBBLE_CUDA_EMULATED:BOOL=ON" not in text:
        pytest.skip("this build has no CUDA backend")


def score(nibble_bin, tmp_path, *options):
    ids, logits = tmp_path / "ids.json", tmp_path / "logits.npy"
    ids.write_text(json.dumps([IDS * 3]))
    done = subprocess.run([nibble_bin, "score", "--model", MODEL, "--token-ids", ids, "--logits", logits, *CUDA, *options],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return np.load(logits), done.stderr


def test_exchanges(nibble_bin, tmp_path):
    """Tensor parallel, expert parallel, through either exchange: near one rank, and the same bits whatever the exchange."""
    alone, _ = score(nibble_bin, tmp_path)
    for ranks in (["--tp-size", "2"], ["--tp-size", "2", "--ep-size", "2"]):
        fast, said = score(nibble_bin, tmp_path, *ranks, "--gpu-exchange", "one-shot", "--chunk-size", "5")
        slow, warned = score(nibble_bin, tmp_path, *ranks, "--gpu-exchange", "staged", "--chunk-size", "18")
        assert np.array_equal(fast.view(np.uint32), slow.view(np.uint32))
        assert np.median(np.linalg.norm(fast - alone, axis=1) / np.linalg.norm(alone, axis=1)) < 1e-3
        assert "through the host" not in said and "through the host" in warned


def test_bench(nibble_bin):
    done = subprocess.run([nibble_bin, "bench", "decode", "--model", MODEL, "--tp-size", "2", "--tokens", "3", "--repeat", "1",
                           "--breakdown", "--json", *CUDA], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = {row["component"]: row for row in json.loads(done.stdout)["breakdown"]["components"]}
    assert rows["collectives"]["calls"] > 0


@pytest.mark.parametrize("options,sentence", [
    (["--gpu-exchange", "pigeons", *CUDA], '--gpu-exchange is "pigeons"; expected auto, one-shot, nccl or staged'),
    (["--device", "no"], 'device "no" is unknown'),
], ids=["exchange", "device"])
def test_refused(nibble_bin, options, sentence):
    """Every rank comes to the same refusal, rank 0 says it."""
    done = subprocess.run([nibble_bin, "bench", "decode", "--model", MODEL, "--tp-size", "2", *options],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count(sentence) == 1, done.stderr


def test_serve(serve):
    """Drafts and shared experts too: the same tokens as one rank; it ends in order."""
    body = {"prompt": IDS, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    tokens = []
    for ranks in ("1", "2"):
        server = serve(*CUDA, *SMALL, "--tp-size", ranks, "--speculative-algorithm", "mtp", "--oea-k0", "1", model=MODEL)
        reply = server.post("/v1/completions", body)
        assert reply.status_code == 200, reply.text
        tokens.append(reply.json()["choices"][0]["logprobs"]["tokens"])
        processes = family(server.process.pid)
        assert server.stop() == 0, server.log
        assert not gone(processes)
    assert len(tokens[0]) == 6 and tokens[0] == tokens[1]


def test_killed(serve):
    """A rank dies while kernels of the other wait for it: the client is told, no process stays."""
    server = serve(*CUDA, *SMALL, "--tp-size", "2", model=MODEL)
    client = Client(server, "/v1/completions", {"prompt": IDS, "max_tokens": 500, "ignore_eos": True, "temperature": 0}, False)
    end = time.monotonic() + 60
    while not server.running()[0]:
        assert time.monotonic() < end
        time.sleep(0.01)
    processes = family(server.process.pid)
    victim = ranks_of(server.process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    assert server.stop(None, seconds=60) not in (0, None)
    assert not gone(processes)
    client.join(10)
    assert not client.is_alive()
    assert re.search(rf"rank 1 \(process {victim}\) is gone", client.told), client.told[-300:] + server.log
