"""Beam search (use_beam_search) against vLLM's algorithm, written again over /generate with one token a step."""

import json
import threading

import pytest
from api_server import stream
from test_disconnect import begin, wait_running
from test_errors import error_of

pytestmark = pytest.mark.runners

PROMPT = "What is 3+5? The answer is"
ASK = [{"role": "user", "content": "What is 3+5?"}]


@pytest.fixture(scope="module")
def eos(model_dir):
    return set(json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"])


def likeliest(server, beams, k):
    """The k likeliest next tokens of every beam, [(logprob, id)]."""
    reply = server.post("/generate", {"input_ids": beams, "return_logprob": True, "top_logprobs_num": k,
                                      "sampling_params": {"temperature": 0, "max_new_tokens": 1}})
    assert reply.status_code == 200, reply.text
    return [[(top[0], top[1]) for top in r["meta_info"]["output_top_logprobs"][0]] for r in reply.json()]


def expected(server, prompt, width, max_tokens, length_penalty, ends):
    """[(answer, log-probability, ended)] best first. The length counts the prompt, and not the token that ends an answer."""
    live, done = [(list(prompt), 0.0)], []
    for _ in range(max_tokens):
        following = []
        for (ids, total), tops in zip(live, likeliest(server, [ids for ids, _ in live], 2 * width)):
            for logprob, token in tops:
                if token in ends:
                    done.append((ids + [token], total + logprob, True, len(ids)))
                else:
                    following.append((ids + [token], total + logprob))
        live = sorted(following, key=lambda beam: -beam[1])[:width]
    done += [(ids, total, False, len(ids)) for ids, total in live]
    done.sort(key=lambda d: -d[1] / d[3] ** length_penalty)
    return [(ids[len(prompt):], total, ended) for ids, total, ended, _ in done[:width]]


def complete(server, **body):
    reply = server.post("/v1/completions", {"prompt": PROMPT, "use_beam_search": True, "logprobs": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def text_of(server, ids):
    return server.post("/detokenize", {"tokens": ids, "skip_special_tokens": True}).json()["text"]


@pytest.mark.parametrize("width,max_tokens,length_penalty,ignore_eos", [
    (3, 8, 1.0, False), (4, 12, 0.0, False), (2, 16, 2.0, True), (10, 5, -1.0, False), (1, 10, 1.0, False)])
def test_completions(server, eos, width, max_tokens, length_penalty, ignore_eos):
    prompt = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    want = expected(server, prompt, width, max_tokens, length_penalty, set() if ignore_eos else eos)
    body = complete(server, n=width, max_tokens=max_tokens, length_penalty=length_penalty, ignore_eos=ignore_eos)
    assert [c["index"] for c in body["choices"]] == list(range(width))
    for choice, (ids, total, ended) in zip(body["choices"], want):
        assert choice["text"] == text_of(server, ids)
        assert choice["finish_reason"] == ("stop" if ended else "length")
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(total, abs=1e-4)
    assert body["usage"]["completion_tokens"] == sum(len(ids) for ids, _, _ in want)
    assert body["usage"]["prompt_tokens"] == len(prompt)


def test_chat(server, eos):
    prompt = server.post("/tokenize", {"messages": ASK}).json()["tokens"]
    want = expected(server, prompt, 3, 10, 1.0, eos)
    reply = server.post("/v1/chat/completions", {"messages": ASK, "use_beam_search": True, "n": 3, "max_tokens": 10,
                                                 "logprobs": True, "top_logprobs": 2, "separate_reasoning": False})
    assert reply.status_code == 200, reply.text
    for choice, (ids, total, ended) in zip(reply.json()["choices"], want):
        entries = choice["logprobs"]["content"]
        assert len(entries) == len(ids) and all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert sum(entry["logprob"] for entry in entries) == pytest.approx(total, abs=1e-4)
        assert choice["finish_reason"] == ("stop" if ended else "length")


@pytest.mark.parametrize("usage", [False, True])
def test_streamed(server, usage):
    """As vLLM streams a search: nothing until it is over, then the whole reply as one event."""
    body = {"prompt": [PROMPT, "x"], "n": 2, "best_of": 4, "max_tokens": 6, "logprobs": 1, "return_token_ids": True}
    whole = complete(server, **body)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = stream(server, "/v1/completions", {**body, "use_beam_search": True, **options})
    assert events[-1] == "[DONE]" and len(events) == 2 + usage
    assert events[0]["choices"] == whole["choices"] and events[0]["object"] == "text_completion"
    for event in events[:-1]:
        assert {**event["usage"], "prompt_tokens_details": None} == {**whole["usage"], "prompt_tokens_details": None}
    assert not usage or events[1]["choices"] == []


@pytest.mark.parametrize("extra", [{}, {"separate_reasoning": False, "logprobs": True}, {"return_token_ids": True}])
def test_chat_streamed(server, extra):
    """Choice after choice, the best first, with the events of any stream."""
    body = {"messages": ASK, "use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 8, **extra}
    whole = server.post("/v1/chat/completions", body).json()
    events = stream(server, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]" and events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    parts = [c for event in events[:-2] for c in event["choices"]]
    assert [c["index"] for c in parts] == sorted(c["index"] for c in parts)
    for want in whole["choices"]:
        own = [c for c in parts if c["index"] == want["index"]]
        for key in ("content", "reasoning_content"):
            assert "".join(c["delta"].get(key) or "" for c in own) == (want["message"][key] or "")
        assert own[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + [want["finish_reason"]]
        if "logprobs" in extra:
            assert sum((c["logprobs"]["content"] for c in own if c["logprobs"]), []) == want["logprobs"]["content"]
        if "return_token_ids" in extra:
            assert sum((c.get("token_ids", []) for c in own), []) == want["token_ids"]


def test_clients(client, model):
    """OpenAI's client reads both."""
    extra = {"use_beam_search": True}
    [chunk] = client.completions.create(model=model, prompt=PROMPT, n=3, max_tokens=5, stream=True, extra_body=extra)
    whole = client.completions.create(model=model, prompt=PROMPT, n=3, max_tokens=5, extra_body=extra)
    assert [c.text for c in chunk.choices] == [c.text for c in whole.choices]
    texts = {}
    for chunk in client.chat.completions.create(model=model, messages=ASK, n=3, max_tokens=5, stream=True,
                                                extra_body={**extra, "separate_reasoning": False}):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    whole = client.chat.completions.create(model=model, messages=ASK, n=3, max_tokens=5, extra_body={**extra, "separate_reasoning": False})
    assert texts == {c.index: c.message.content for c in whole.choices}


def test_width_and_answers(server):
    """best_of is the width, of which the n best come; several prompts are searches of their own."""
    whole = complete(server, n=5, max_tokens=6)["choices"]
    some = complete(server, n=2, best_of=5, max_tokens=6)["choices"]
    assert [c["text"] for c in some] == [c["text"] for c in whole[:2]]
    twice = complete(server, prompt=[PROMPT, "x"], n=2, best_of=5, max_tokens=6)["choices"]
    assert [c["index"] for c in twice] == [0, 1, 2, 3] and [c["text"] for c in twice[:2]] == [c["text"] for c in some]
    hot = complete(server, n=5, max_tokens=6, temperature=1.7, top_p=0.5, seed=3)["choices"]
    assert [c["text"] for c in hot] == [c["text"] for c in whole]
    assert [c["text"] for c in complete(server, n=5, max_tokens=6, logprobs=None)["choices"]] == [c["text"] for c in whole]
    early = complete(server, n=5, max_tokens=6, early_stopping=True)["choices"]
    assert len(early) == 5


def test_echo(server):
    plain, echoed = (complete(server, n=2, max_tokens=4, logprobs=None, echo=echo)["choices"] for echo in (False, True))
    assert [c["text"] for c in echoed] == [PROMPT + c["text"] for c in plain]


@pytest.mark.parametrize("field,value", [
    ("n", 11), ("best_of", 11), ("stop", "x"), ("stop_regex", "x"), ("min_tokens", 2), ("logit_bias", {"5": 1}), ("bad_words", ["x"]),
    ("allowed_token_ids", [5]), ("frequency_penalty", 0.5), ("presence_penalty", 0.5), ("repetition_penalty", 1.1), ("prompt_logprobs", 1),
    ("logprob_token_ids", [5]), ("repetition_detection", {"max_pattern_size": 3, "min_count": 4}), ("thinking_token_budget", 5), ("regex", "a+"), ("length_penalty", "x"), ("length_penalty", 17),
    ("early_stopping", "soon"), ("use_beam_search", 1)])
@pytest.mark.parametrize("path,base", [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": ASK})])
def test_refused_together(server, path, base, field, value):
    body = {"use_beam_search": True, "n": 2, "max_tokens": 4, **base, field: value}
    error_of(server.post(path, body), param=field)


def test_refused(server):
    for path, base in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": ASK})):
        error_of(server.post(path, {**base, "length_penalty": 2}), param="length_penalty")
        error_of(server.post(path, {**base, "early_stopping": True}), param="early_stopping")
        neutral = {"use_beam_search": False, "length_penalty": 1, "early_stopping": "never", "max_tokens": 1}
        assert server.post(path, {**base, **neutral}).status_code == 200
    error_of(server.post("/v1/completions", {"prompt": "x", "use_beam_search": True, "max_tokens": 0, "echo": True}), param="max_tokens")
    error_of(server.post("/v1/completions", {"prompt": "x", "use_beam_search": True, "echo": True, "logprobs": 1}), param="echo")
    error_of(server.post("/v1/responses", {"input": "x", "use_beam_search": True}), param="use_beam_search")
    error_of(server.post("/generate", {"text": "x", "sampling_params": {"use_beam_search": True}}), param="sampling_params.use_beam_search")


@pytest.fixture(scope="module")
def small(serve):
    server = serve("--max-running-requests", "4", "--max-total-tokens", "1024", "--context-length", "1024")
    yield server
    assert server.stop() == 0, server.log


def test_what_the_cache_cannot_hold(small):
    error_of(small.post("/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 5}), param="n")
    error = error_of(small.post("/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 4, "max_tokens": 900}),
                     param="max_tokens")
    assert "4 beams of 900 tokens" in error["message"]
    error_of(small.post("/v1/chat/completions", {"messages": ASK, "use_beam_search": True, "n": 4}), param="max_tokens")


def test_beside_others_and_cut_off(small):
    """Searches and streams at once come to what they come to alone; a client that leaves frees everything."""
    body = {"n": 3, "max_tokens": 100, "ignore_eos": True, "logprobs": None}
    alone = [complete(small, prompt=f"{i} {PROMPT}", **body)["choices"] for i in range(3)]
    found = [None] * 3
    assert small.post("/flush_cache", {}).status_code == 200

    def search(i):
        found[i] = complete(small, prompt=f"{i} {PROMPT}", **body)["choices"]

    threads = [threading.Thread(target=search, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for i in range(4):
        small.post("/v1/completions", {"prompt": f"{i} y", "max_tokens": 60, "ignore_eos": True})
    for thread in threads:
        thread.join()
    assert [[c["text"] for c in choices] for choices in found] == [[c["text"] for c in choices] for choices in alone]
    leaver = begin(small, {"prompt": PROMPT, "use_beam_search": True, "n": 4, "max_tokens": 200, "ignore_eos": True})
    wait_running(small, 1)
    leaver.close()
    small.wait_idle(2)


def test_abort(small):
    found = []
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 4, "max_tokens": 200, "ignore_eos": True, "rid": "the search"}
    thread = threading.Thread(target=lambda: found.append(small.post("/v1/completions", body)))
    thread.start()
    wait_running(small, 1)
    small.post("/abort_request", {"rid": "the search"})
    thread.join()
    small.wait_idle(2)
    assert found[0].status_code == 200
    assert [c["finish_reason"] for c in found[0].json()["choices"]] in (["abort"] * 4, ["length"] * 4)
