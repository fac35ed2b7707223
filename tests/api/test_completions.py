"""/v1/completions through the openai client."""

import json

import pytest
from api_server import stream

pytestmark = pytest.mark.runners

PROMPT = "Once upon a time in a land far away there was"
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def complete(client, model, prompt=PROMPT, max_tokens=12, **kwargs):
    return client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, **{**GREEDY, **kwargs})


def joined(chunks):
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def test_shape(client, model):
    reply = complete(client, model)
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert reply.model == model
    assert reply.choices[0].index == 0
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].text
    assert reply.choices[0].logprobs is None
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12


def test_ids_differ(client, model):
    assert complete(client, model, max_tokens=1).id != complete(client, model, max_tokens=1).id


def test_default_max_tokens(client, model):
    reply = client.completions.create(model=model, prompt=PROMPT, **GREEDY)
    assert reply.usage.completion_tokens == 16


def test_stream_equals_plain(client, model):
    plain = complete(client, model, max_tokens=40)
    chunks = list(complete(client, model, max_tokens=40, stream=True))
    assert joined(chunks) == plain.choices[0].text
    assert len({chunk.id for chunk in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_no_usage_chunk_unasked(server, model):
    """C43."""
    events = stream(server, "/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 4})
    assert events[-1] == "[DONE]"
    assert all(e["choices"] for e in events[:-1])
    assert all("usage" not in e for e in events[:-1])
    assert events[-2]["choices"][0]["finish_reason"]


def test_usage_chunk(client, model):
    chunks = list(complete(client, model, max_tokens=5, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5


def test_continuous_usage(client, model):
    chunks = list(complete(client, model, max_tokens=6, stream=True,
                           stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6
    assert all(chunk.usage.prompt_tokens == chunks[0].usage.prompt_tokens for chunk in chunks)


def test_token_ids(client, server, model):
    """Ids give what their text gives; a list of lists gives what each gives."""
    body = {"model": model, "prompt": [10, 11, 12, 13], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    one = server.post("/v1/completions", body).json()
    assert one["usage"]["prompt_tokens"] == 4
    two = server.post("/v1/completions", {**body, "prompt": [[10, 11, 12, 13], [20, 21]]}).json()
    assert [c["index"] for c in two["choices"]] == [0, 1]
    assert two["choices"][0]["text"] == one["choices"][0]["text"]
    assert two["usage"]["prompt_tokens"] == 6
    assert two["usage"]["completion_tokens"] == 16


def test_batch_of_texts(client, model):
    prompts = [PROMPT, "The answer is", "A small cat"]
    batch = complete(client, model, prompt=prompts)
    singles = [complete(client, model, prompt=p).choices[0].text for p in prompts]
    assert [c.text for c in batch.choices] == singles
    assert [c.index for c in batch.choices] == [0, 1, 2]


def test_batch_stream(client, model):
    prompts = [PROMPT, "The answer is"]
    texts = ["", ""]
    finished = [None, None]
    for chunk in complete(client, model, prompt=prompts, stream=True):
        for c in chunk.choices:
            texts[c.index] += c.text
            finished[c.index] = c.finish_reason or finished[c.index]
    assert texts == [c.text for c in complete(client, model, prompt=prompts).choices]
    assert finished == ["length", "length"]


def test_n_with_seed(client, model):
    """C39: copies differ inside an answer and are the same in the next."""
    def ask():
        reply = client.completions.create(model=model, prompt="The", max_tokens=16, n=3, seed=11, temperature=1,
                                          extra_body={"ignore_eos": True})
        assert [c.index for c in reply.choices] == [0, 1, 2]
        assert reply.usage.completion_tokens == 48
        return [c.text for c in reply.choices]

    first = ask()
    assert len(set(first)) > 1
    assert ask() == first


def test_seed_repeats(client, model):
    def ask(seed):
        return client.completions.create(model=model, prompt="The", max_tokens=24, seed=seed, temperature=1,
                                         extra_body={"ignore_eos": True}).choices[0].text

    assert ask(5) == ask(5)
    assert len({ask(s) for s in range(6)}) > 1


def test_batch_times_n(client, model):
    reply = complete(client, model, prompt=["A", "B"], n=2, max_tokens=2, temperature=1, seed=3)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert reply.usage.completion_tokens == 8


def test_greedy_top_k_one(client, model):
    greedy = complete(client, model).choices[0].text
    top_k = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=1, seed=1,
                                      extra_body={"ignore_eos": True, "top_k": 1}).choices[0].text
    assert top_k == greedy
    min_p = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=1, seed=1,
                                      extra_body={"ignore_eos": True, "min_p": 1.0}).choices[0].text
    assert min_p == greedy
    top_p = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=1, seed=1, top_p=1e-9,
                                      extra_body={"ignore_eos": True}).choices[0].text
    assert top_p == greedy


# ---------------------------------------------------------------- log-probabilities and echo


def test_logprobs(client, model):
    reply = complete(client, model, max_tokens=6, logprobs=3)
    lp = reply.choices[0].logprobs
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) == 6
    for token, value, top in zip(lp.tokens, lp.token_logprobs, lp.top_logprobs):
        assert value <= 0
        assert 3 <= len(top) <= 4 and token in top
        assert top[token] == pytest.approx(value, abs=1e-4)
        assert max(top.values()) == pytest.approx(value, abs=1e-4), "greedy takes the best"
    assert lp.text_offset[0] == 0 and lp.text_offset == sorted(lp.text_offset)


def test_logprobs_zero(client, model):
    lp = complete(client, model, max_tokens=3, logprobs=0).choices[0].logprobs
    assert [list(top) for top in lp.top_logprobs] == [[t] for t in lp.tokens]


def test_echo(client, model):
    plain = complete(client, model)
    echoed = complete(client, model, echo=True)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    assert echoed.usage.completion_tokens == plain.usage.completion_tokens


def test_echo_logprobs(client, model):
    """C42: four arrays of equal length, the first prompt token has no value."""
    reply = complete(client, model, max_tokens=1, echo=True, logprobs=2)
    lp = reply.choices[0].logprobs
    n = reply.usage.prompt_tokens + 1
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) == n
    assert lp.token_logprobs[0] is None and lp.top_logprobs[0] is None
    assert all(v is not None and v <= 0 for v in lp.token_logprobs[1:])
    assert "".join(lp.tokens) == reply.choices[0].text
    for token, offset in zip(lp.tokens, lp.text_offset):
        assert reply.choices[0].text[offset:].startswith(token)


def test_echo_scores_only(client, model):
    """max_tokens 0 scores the prompt, as evaluation tools do."""
    reply = complete(client, model, max_tokens=0, echo=True, logprobs=1)
    lp = reply.choices[0].logprobs
    assert reply.choices[0].text == PROMPT
    assert reply.usage.completion_tokens == 0
    assert reply.choices[0].finish_reason == "length"
    assert len(lp.tokens) == reply.usage.prompt_tokens
    longer = complete(client, model, max_tokens=1, echo=True, logprobs=1).choices[0].logprobs
    assert lp.token_logprobs[1:] == pytest.approx(longer.token_logprobs[1:-1], abs=1e-5)


def test_echo_stream(client, model):
    chunks = list(complete(client, model, max_tokens=4, echo=True, logprobs=1, stream=True))
    plain = complete(client, model, max_tokens=4, echo=True, logprobs=1)
    assert joined(chunks) == plain.choices[0].text
    tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert tokens == plain.choices[0].logprobs.tokens
    offsets = [o for c in chunks if c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset]
    assert offsets == plain.choices[0].logprobs.text_offset


def test_prompt_scores_agree(client, server, model):
    """What a continuation was given while it was written is what it is given when it is read."""
    written = complete(client, model, max_tokens=8, logprobs=0, echo=True)
    text = written.choices[0].text
    read = complete(client, model, prompt=text, max_tokens=0, echo=True, logprobs=0)
    a, b = written.choices[0].logprobs, read.choices[0].logprobs
    if a.tokens != b.tokens:
        pytest.skip("the text encodes to other tokens than were written")
    assert a.token_logprobs[1:] == pytest.approx(b.token_logprobs[1:], abs=2e-2)


# ---------------------------------------------------------------- ends


def test_stop_string(client, model):
    """C36: the stop text and everything behind it is gone, streamed or not, also inside a token."""
    text = complete(client, model, max_tokens=40).choices[0].text
    for begin, end in ((5, 8), (7, 15), (12, 13)):
        stop = text[begin:end]
        want = text[:text.index(stop)]
        plain = complete(client, model, max_tokens=40, stop=[stop])
        assert plain.choices[0].text == want
        assert plain.choices[0].finish_reason == "stop"
        assert plain.choices[0].model_extra["stop_reason"] == stop
        assert plain.choices[0].model_extra["matched_stop"] == stop
        chunks = list(complete(client, model, max_tokens=40, stop=stop, stream=True))
        assert joined(chunks) == want
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_stop_string_included(client, model):
    text = complete(client, model, max_tokens=40).choices[0].text
    stop = text[7:12]
    kept = complete(client, model, max_tokens=40, stop=[stop],
                    extra_body={"ignore_eos": True, "include_stop_str_in_output": True})
    assert kept.choices[0].text == text[:text.index(stop) + len(stop)]


def test_first_of_several_stops(client, model):
    text = complete(client, model, max_tokens=40).choices[0].text
    late, early = text[20:24], text[6:9]
    reply = complete(client, model, max_tokens=40, stop=["\x07never", late, early])
    assert reply.choices[0].text == text[:min(text.index(late), text.index(early))]


def test_stop_token_id(server, model):
    """An id ends the answer and is reported; it is found by asking with ever shorter lists of ids."""
    body = {"model": model, "prompt": [10, 11, 12], "max_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": 0,
            "skip_special_tokens": False}

    def ask(ids):
        return server.post("/v1/completions", {**body, "stop_token_ids": ids}).json()

    free = ask([])
    assert free["choices"][0]["finish_reason"] == "length"
    for begin in range(0, 4096, 64):
        ids = list(range(begin, begin + 64))
        if ask(ids)["choices"][0]["finish_reason"] == "stop":
            break
    else:
        pytest.fail("no id of the vocabulary ends the answer")
    while len(ids) > 1:
        half = ids[:len(ids) // 2]
        ids = half if ask(half)["choices"][0]["finish_reason"] == "stop" else ids[len(ids) // 2:]
    ended = ask(ids)
    choice = ended["choices"][0]
    n = ended["usage"]["completion_tokens"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == choice["matched_stop"] == ids[0]
    tokens = free["choices"][0]["logprobs"]["tokens"]
    assert choice["logprobs"]["tokens"] == tokens[:n]
    assert choice["text"] == "".join(tokens[:n - 1])


def test_min_tokens(client, model):
    text = complete(client, model, max_tokens=20).choices[0].text
    stop = text[0]
    early = complete(client, model, max_tokens=20, stop=[stop])
    late = complete(client, model, max_tokens=20, stop=[stop], extra_body={"ignore_eos": True, "min_tokens": 5})
    assert early.choices[0].text == ""
    assert late.usage.completion_tokens >= 5


def test_newer_name_of_limit(server, model):
    """C38, on both surfaces."""
    body = {"model": model, "prompt": PROMPT, "max_completion_tokens": 7, "max_tokens": 3, "ignore_eos": True}
    reply = server.post("/v1/completions", body).json()
    assert reply["usage"]["completion_tokens"] == 7
    assert reply["choices"][0]["finish_reason"] == "length"


def test_nulls_are_absent(server, model):
    """C50."""
    fields = ["temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "stream", "stream_options", "logprobs", "echo",
              "suffix", "logit_bias", "frequency_penalty", "presence_penalty", "best_of", "user", "stop_token_ids",
              "min_tokens", "ignore_eos", "skip_special_tokens", "max_completion_tokens", "response_format"]
    reply = server.post("/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 2, **{f: None for f in fields}})
    assert reply.status_code == 200, reply.text


def test_neutral_values_are_fine(server, model):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 2, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {},
            "repetition_penalty": 1, "best_of": 1, "suffix": "", "response_format": {"type": "text"}, "user": "somebody",
            "spaces_between_special_tokens": True, "priority": 3, "nobody_knows_this": {"a": [1]}}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text


def test_logit_bias_and_penalties(server, model):
    """A bias of 100 makes a token certain; a penalty then makes it rarer; log-probabilities stay the model's."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1,
            "logit_bias": {"65": 100}}
    forced = server.post("/v1/completions", body).json()["choices"][0]
    assert len(set(forced["logprobs"]["tokens"])) == 1
    assert all(x < 0 for x in forced["logprobs"]["token_logprobs"])
    body["logit_bias"] = {"65": 20}
    body["frequency_penalty"] = body["presence_penalty"] = 2
    body["max_tokens"] = 30
    less = server.post("/v1/completions", body).json()["choices"][0]
    assert len(set(less["logprobs"]["tokens"])) > 1


def test_cached_tokens_are_counted(server, model):
    """The second of two equal prompts finds its whole pages of 64 tokens in the cache."""
    prompt = "A story of a fox. " * 60
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    first, second = (server.post("/v1/completions", body).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    n = second["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (n - 1) // 64 * 64


def test_partial_characters_in_stream(server, model):
    """Every event of a stream is whole characters, whatever bytes the tokens split."""
    body = {"model": model, "prompt": "é€😀" * 8, "max_tokens": 60, "temperature": 1.5, "seed": 4, "ignore_eos": True}
    events = stream(server, "/v1/completions", body)
    text = "".join(e["choices"][0]["text"] for e in events[:-1])
    plain = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert text == plain
    json.dumps(text).encode()
