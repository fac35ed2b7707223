"""--oea-k0: what it changes, whom it spares, what it counts. The embedded model: 4 of 16 experts, 4 layers with experts."""
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from test_metrics import Figures

PROMPTS = [f"Once upon a time there was a {what}" for what in ("fox", "girl", "king", "boat", "tree", "dog", "bear", "star")]


def answers(server, **extra):
    body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, **extra}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        replies = list(pool.map(lambda p: server.post("/v1/completions", {"prompt": p, **body}), PROMPTS))
    assert all(r.status_code == 200 for r in replies)
    return [r.json()["choices"][0]["text"] for r in replies]


@pytest.fixture(scope="module")
def plain(serve, trained):
    server = serve()
    texts = answers(server)
    assert server.stop() == 0
    return texts


def test_who_is_spared(serve, trained, plain):
    server = serve("--oea-k0", "1")
    figures = Figures(server)
    assert answers(server, disable_oea=True) == plain
    figures.settle(lambda f: f.of("num_requests_total") == 8)
    assert figures.of("oea_layers_total") == 0
    assert answers(server) != plain  # one expert of four for a token whose neighbours want others
    figures.settle(lambda f: f.of("num_requests_total") == 16)
    layers, before, after = (figures.of(f"oea_{name}_total") for name in ("layers", "experts_before", "experts_after"))
    assert layers % 4 == 0 and layers >= 4 * 23
    assert 4 * layers <= before <= 16 * layers  # a token has four experts, a layer sixteen
    assert layers <= after < before and after <= 8 * layers
    assert server.stop() == 0


def test_all_experts_are_first(serve, trained, plain):
    """k0 = top_k: the same answers, and nothing is read less."""
    server = serve("--oea-k0", "4")
    figures = Figures(server)
    assert answers(server) == plain
    figures.settle(lambda f: f.of("num_requests_total") == 8)
    assert figures.of("oea_experts_before_total") == figures.of("oea_experts_after_total") > 0
    assert server.stop() == 0


def test_refused(nibble_bin, model_dir):
    done = subprocess.run([nibble_bin, "serve", "--model", model_dir, "--oea-k0", "5", "--port", "0"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "--oea-k0 is 5; expected 1 to 4, the experts of a token" in done.stderr
