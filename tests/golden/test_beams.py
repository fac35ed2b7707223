"""Beam search gives the answers that Hugging Face's generate(num_beams=...) gave (tools/golden/beams.py)."""

import json
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "api"))
from api_server import Server  # noqa: E402

SEARCHES = json.loads((HERE / "beams.json").read_text())


@pytest.fixture(scope="module")
def servers(nibble):
    started = {}

    def get(case):
        if case not in started:
            started[case] = Server(nibble, HERE / "data" / case, "--cpu-level", "reference", "--max-running-requests", "8",
                                   "--context-length", "256")
        return started[case]

    yield get
    for server in started.values():
        server.stop()


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: f"{s['case']}-{len(s['prompt'])}-{s['width']}-{s['ignore_eos']}")
def test_answers(servers, search):
    reply = servers(search["case"]).post("/v1/completions", {
        "prompt": search["prompt"], "use_beam_search": True, "n": search["width"], "max_tokens": search["max_tokens"],
        "length_penalty": 0, "ignore_eos": search["ignore_eos"], "logprobs": 0})
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    assert len(choices) == len(search["answers"])
    for choice, answer in zip(choices, search["answers"]):
        ids = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
        assert ids == answer["ids"]
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(answer["sum"], abs=1e-3)
