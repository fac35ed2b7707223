"""logprob_token_ids: log-probabilities of ids that the client names."""

import pytest
from api_server import stream
from test_errors import error_of
from test_native import GREEDY, PROMPT, completion, generate
from test_token_limits import ASK, drafting, ids_of  # noqa: F401


def chat(server, **body):
    reply = server.post("/v1/chat/completions", {"messages": ASK, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["logprobs"]["content"]


@pytest.fixture(scope="module")
def named(server):
    """Ids whose names are plain text, in no order, with those that are likely at some place among them."""
    ids = ids_of(server, "the a 35 dog8 .")
    return list(dict.fromkeys(reversed(ids)))[:12]


def names_of(server, ids):
    return [server.post("/detokenize", {"tokens": [i]}).json()["text"] for i in ids]


def test_chat(server, drafting, named):  # noqa: F811
    """In the order asked for, the model's own figures: those of the top list where a token is in both, whatever was masked."""
    names = names_of(server, named)
    best = chat(server, logprobs=True, top_logprobs=20)
    for at in (server, drafting):
        for more in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}):
            tokens = chat(at, logprob_token_ids=named, **more)
            assert [t["token"] for t in tokens] == [t["token"] for t in best]
            shared = 0
            for token, top in zip(tokens, best):
                assert [t["token"] for t in token["top_logprobs"]] == names
                figures = {t["token"]: t["logprob"] for t in top["top_logprobs"]}
                shared += sum(t["token"] in figures for t in token["top_logprobs"])
                for t in token["top_logprobs"]:
                    if t["token"] in figures:
                        assert t["logprob"] == pytest.approx(figures[t["token"]], abs=1e-5)
            assert shared > 3
    free, held = chat(server, logprob_token_ids=named, max_tokens=1), \
        chat(server, logprob_token_ids=named, max_tokens=1, allowed_token_ids=[named[2]], logit_bias={str(named[0]): 9}, frequency_penalty=1)
    assert held[0]["token"] == names[2] and held[0]["top_logprobs"] == free[0]["top_logprobs"]
    assert held[0]["logprob"] == held[0]["top_logprobs"][2]["logprob"]


def test_completions(server, named):
    names = names_of(server, named)
    asks = {"logprob_token_ids": named, "max_tokens": 5}
    lists = completion(server, **asks)["choices"][0]["logprobs"]
    plain = completion(server, logprobs=20, max_tokens=5)["choices"][0]["logprobs"]
    assert lists["tokens"] == plain["tokens"] and lists["token_logprobs"] == plain["token_logprobs"]
    for top, token, likely in zip(lists["top_logprobs"], lists["tokens"], plain["top_logprobs"]):
        assert top.keys() == {*names, token}
        assert all(likely[name] == pytest.approx(value, abs=1e-5) for name, value in top.items() if name in likely)
    events = stream(server, "/v1/completions", {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True, **asks})[:-1]
    assert [t for e in events for t in e["choices"][0]["logprobs"]["top_logprobs"]] == lists["top_logprobs"]
    echoed = completion(server, echo=True, **asks)["choices"][0]["logprobs"]
    assert echoed["top_logprobs"][0] is None and echoed["top_logprobs"][-5:] == lists["top_logprobs"]
    assert all(top.keys() >= set(names) for top in echoed["top_logprobs"][1:])
    assert completion(server, logprob_token_ids=[])["choices"][0]["logprobs"] is None


def test_generate(server, named):
    """SGLang's name of it: a list beside that of the tokens, of the prompt too."""
    asks = {"text": PROMPT, "return_logprob": True, "logprob_start_len": 0}
    with_ids, with_top = (generate(server, **asks, **more)["meta_info"] for more in ({"token_ids_logprob": named}, {"top_logprobs_num": 20}))
    shared = 0
    for part in ("input", "output"):
        assert with_ids[f"{part}_token_logprobs"] == with_top[f"{part}_token_logprobs"]
        assert f"{part}_top_logprobs" not in with_ids
        lists, tops = with_ids[f"{part}_token_ids_logprobs"], with_top[f"{part}_top_logprobs"]
        assert len(lists) == len(tops) > 3 and (lists[0] is None) == (part == "input")
        for entries, top in zip(lists, tops):
            if entries is None:
                continue
            assert [e[1:] for e in entries] == [[i, None] for i in named]
            likely = {e[1]: e[0] for e in top}
            shared += sum(e[1] in likely for e in entries)
            assert all(likely[e[1]] == pytest.approx(e[0], abs=1e-5) for e in entries if e[1] in likely)
    assert shared > 3
    late = generate(server, text=PROMPT, return_logprob=True, token_ids_logprob=named[:2])["meta_info"]
    assert late["input_token_ids_logprobs"] == [] and len(late["output_token_ids_logprobs"][0]) == 2
    events = stream(server, "/generate", {"text": PROMPT, "sampling_params": GREEDY, "incremental": True, "return_logprob": True,
                                          "token_ids_logprob": named[:2]})[:-1]
    assert [e for event in events for e in event["meta_info"]["output_token_ids_logprobs"]] == late["output_token_ids_logprobs"]
    assert "output_token_ids_logprobs" not in generate(server, text=PROMPT, token_ids_logprob=named)["meta_info"]
    error_of(server.post("/generate", {"text": "x", "token_ids_logprob": [1], "top_logprobs_num": 2}), param="token_ids_logprob")
    for value, param in (("x", ""), ([[1]], "[0]"), ([1, -1], "[1]"), ([10**7], "[0]"), (list(range(21)), "")):
        error_of(server.post("/generate", {"text": "x", "token_ids_logprob": value}), param="token_ids_logprob" + param)


@pytest.mark.parametrize("value,param", [("x", ""), (5, ""), ([1, "x"], "[1]"), ([-1], "[0]"), ([10**7], "[0]"), (list(range(21)), "")],
                         ids=lambda v: str(v)[:12])
def test_refused(server, value, param):
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": ASK})):
        error_of(server.post(path, {**body, "logprob_token_ids": value}), param="logprob_token_ids" + param)


def test_not_everywhere(server):
    error_of(server.post("/v1/completions", {"prompt": "x", "logprob_token_ids": [1], "prompt_logprobs": 1}), param="logprob_token_ids")
    error_of(server.post("/v1/responses", {"input": "x", "logprob_token_ids": [1]}), param="logprob_token_ids")
    error_of(server.post("/generate", {"text": "x", "sampling_params": {"logprob_token_ids": [1]}}), param="sampling_params.logprob_token_ids")
    reply = server.post("/v1/messages", {"messages": ASK, "max_tokens": 3, "logprob_token_ids": [1]})
    assert reply.status_code == 400 and "logprob_token_ids" in reply.json()["error"]["message"]
