"""Fields of OpenAI's APIs that vLLM and SGLang have added: prompt_logprobs, best_of, truncation, continued messages, names."""

import json

import httpx
import pytest
from api_server import stream
from test_errors import error_of
from test_native import PROMPT, completion

ASK = [{"role": "user", "content": "What is 3+5?"}]


@pytest.fixture(scope="module")
def coarse(serve):
    server = serve("--stream-interval", "8")
    yield server
    assert server.stop() == 0, server.log


def chat(server, **body):
    reply = server.post("/v1/chat/completions", {"messages": ASK, "temperature": 0, "max_tokens": 8, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_prompt_logprobs(server):
    choice = completion(server, prompt_logprobs=2, logprobs=0, max_tokens=1)["choices"][0]
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    scores = completion(server, logprobs=2, echo=True, max_tokens=0)["choices"][0]["logprobs"]
    entries = choice["prompt_logprobs"]
    assert len(entries) == len(ids) and entries[0] is None
    for token, entry, expected in zip(ids[1:], entries[1:], scores["token_logprobs"][1:]):
        assert next(iter(entry)) == str(token)
        assert entry[str(token)]["logprob"] == pytest.approx(expected, abs=1e-4)
        ranks = sorted(e["rank"] for e in entry.values() if e["rank"])
        assert ranks == [1, 2]
        best = min((e for e in entry.values() if e["rank"]), key=lambda e: e["rank"])
        assert best["logprob"] == max(e["logprob"] for e in entry.values())
    assert len(choice["logprobs"]["tokens"]) == 1 and len(choice["logprobs"]["top_logprobs"][0]) == 1


def test_prompt_logprobs_alone(server):
    """They neither bring log-probabilities of the answer nor need an answer."""
    choice = completion(server, prompt_logprobs=0, max_tokens=0)["choices"][0]
    assert choice["logprobs"] is None and choice["text"] == "" and all(len(e) == 1 for e in choice["prompt_logprobs"][1:])
    body = chat(server, prompt_logprobs=1)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"] and body["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in chat(server)
    error_of(server.post("/v1/completions", {"prompt": "x", "stream": True, "prompt_logprobs": 1}), param="prompt_logprobs")


def test_best_of(server):
    """The kept answers are the likeliest of those that the same seeds give."""
    body = {"temperature": 1.5, "seed": 3, "max_tokens": 6, "logprobs": 0, "min_tokens": 6}
    every = completion(server, n=5, **body)["choices"]
    best = completion(server, n=2, best_of=5, **body)
    assert [c["index"] for c in best["choices"]] == [0, 1]
    mean = sorted((sum(c["logprobs"]["token_logprobs"]) / 6, c["text"]) for c in every)
    assert {c["text"] for c in best["choices"]} == {text for _, text in mean[-2:]}
    assert best["usage"]["completion_tokens"] == 30
    quiet = completion(server, n=2, best_of=5, **{**body, "logprobs": None})
    assert [c["text"] for c in quiet["choices"]] == [c["text"] for c in best["choices"]] and quiet["choices"][0]["logprobs"] is None
    error_of(server.post("/v1/completions", {"prompt": "x", "n": 3, "best_of": 2}), param="best_of")
    events = stream(server, "/v1/completions", {"prompt": PROMPT, "n": 2, "best_of": 5, "ignore_eos": True, **body})
    assert len(events) == 2 and events[0]["choices"] == best["choices"] and events[0]["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("parts", [False, True])
def test_chat_echo(server, parts):
    """The last message comes first, streamed or not, if it is the assistant's; what is generated is the same."""
    said = "The answer is"
    messages = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": said}] if parts else said}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": True}
    plain, echoed = (chat(server, **body, echo=echo) for echo in (False, True))
    content = plain["choices"][0]["message"]["content"]
    assert echoed["choices"][0]["message"]["content"] == said + content
    assert echoed["usage"] == plain["usage"] and echoed["choices"][0]["logprobs"] == plain["choices"][0]["logprobs"]
    events = stream(server, "/v1/chat/completions", {**body, "echo": True})[:-1]
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == said + content
    assert chat(server, echo=True)["choices"][0]["message"] == chat(server)["choices"][0]["message"]


def tokens_per_event(server, path, body, **more):
    events = stream(server, path, {**body, "stream": True, "max_tokens": 65, "ignore_eos": True, **more})
    lists = [c["logprobs"] and (c["logprobs"].get("tokens") or c["logprobs"].get("content")) for e in events[:-1] for c in e["choices"]]
    return [len(tokens) for tokens in lists if tokens]


def test_stream_interval(server, serve):
    """By the request or by the server; all tokens come, and the text is the same."""
    completions = "/v1/completions", {"prompt": PROMPT, "logprobs": 0}
    chats = "/v1/chat/completions", {"messages": ASK, "logprobs": True, "separate_reasoning": False}
    coarse = serve("--stream-interval", "16")
    for path, body in (completions, chats):
        for at, more in ((server, {"stream_interval": 16}), (server, {"stream_interval": 10**6}), (coarse, {})):
            counts = tokens_per_event(at, path, body, **more)
            assert sum(counts) == 65 and len(counts) <= 6, counts
        fine = tokens_per_event(coarse, path, body, stream_interval=1)
        assert sum(fine) == 65 and len(fine) > 6, fine
    texts = [[e["choices"][0]["text"] for e in stream(server, completions[0], {**completions[1], "seed": 1, "stream": True, **more})[:-1]]
             for more in ({}, {"stream_interval": 7})]
    assert "".join(texts[0]) == "".join(texts[1])
    coarse.stop()


def shown_in(path, event):
    """What a client adds to the answer so far."""
    if path == "/v1/completions":
        return "".join(c["text"] for c in event["choices"])
    if path == "/v1/chat/completions":
        return "".join((c["delta"].get("reasoning_content") or "") + (c["delta"].get("content") or "") for c in event["choices"])
    if path == "/generate":
        return event["text"]
    if path == "/v1/messages":
        delta = event.get("delta", {}) if event["type"] == "content_block_delta" else {}
        return delta.get("thinking", "") + delta.get("text", "")
    return event["delta"] if event["type"].endswith("_text.delta") else ""


def tokens_in(path, event):
    """The count that an event ends with, if it has one."""
    usage = event.get("usage") or (event.get("response") or {}).get("usage") or event.get("meta_info") or {}
    return usage.get("completion_tokens") or usage.get("output_tokens") or 0


@pytest.mark.parametrize("path,body", [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 65, "ignore_eos": True, "seed": 5, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 65, "ignore_eos": True, "seed": 5, "stream_options": {"include_usage": True}}),
    ("/generate", {"text": PROMPT, "incremental": True, "sampling_params": {"max_new_tokens": 65, "ignore_eos": True, "sampling_seed": 5}}),
    ("/v1/messages", {"messages": ASK, "max_tokens": 65, "ignore_eos": True, "seed": 5}),
    ("/v1/responses", {"input": ASK, "max_output_tokens": 65, "ignore_eos": True, "seed": 5}),
], ids=lambda v: v if isinstance(v, str) else "")
def test_stream_interval_of_every_surface(server, coarse, path, body):
    """The same text in fewer events, and all tokens counted."""
    texts = []
    for at in (server, coarse):
        with httpx.stream("POST", at.url + path, json={**body, "stream": True}, timeout=300) as reply:
            assert reply.status_code == 200, reply.read()
            events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
        texts.append([text for text in (shown_in(path, e) for e in events) if text])
        assert max(tokens_in(path, e) for e in events) == 65
    assert "".join(texts[0]) == "".join(texts[1]) and len("".join(texts[0])) > 65
    # one for the first token, one for every 8, one for the end; where thinking ends there may be one more
    assert 1 < len(texts[1]) <= 11, texts[1]


REPEATS = {"repetition_detection": {"max_pattern_size": 4, "min_count": 5}}


@pytest.mark.parametrize("path,base", [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": ASK, "separate_reasoning": False})])
def test_repetition(server, path, base):
    """One token is all that may come: the fifth ends the answer; not before min_tokens; the limit comes first."""
    body = {**base, "allowed_token_ids": [40], "max_tokens": 30, "return_token_ids": True, **REPEATS}
    for more, n, reason in (({}, 5, "repetition"), ({"min_tokens": 9}, 9, "repetition"), ({"max_tokens": 5}, 5, "length"),
                            ({"max_tokens": 4}, 4, "length"),
                            ({"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 3, "min_count": 2}}, 6, "repetition"),
                            ({"repetition_detection": {"max_pattern_size": 0, "min_count": 5}}, 30, "length")):
        reply = server.post(path, {**body, **more}).json()
        choice = reply["choices"][0]
        assert (choice["finish_reason"], len(choice["token_ids"])) == (reason, n), more
        assert choice["stop_reason"] == ("repetition_detected" if reason == "repetition" else None)
        events = stream(server, path, {**body, **more})[:-1]
        assert events[-1]["choices"][0]["finish_reason"] == reason
        assert sum((e["choices"][0].get("token_ids", []) for e in events), []) == choice["token_ids"]


@pytest.mark.parametrize("value,param", [
    (5, ""), ({"max_pattern_size": -1}, ".max_pattern_size"), ({"max_pattern_size": 3}, ".min_count"),
    ({"max_pattern_size": 3, "min_count": 1}, ".min_count"), ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, ".min_pattern_size"),
    ({"max_pattern_size": "x"}, ".max_pattern_size"), ({"min_count": 1.5}, ".min_count")])
def test_repetition_refused(server, value, param):
    error_of(server.post("/v1/completions", {"prompt": "x", "repetition_detection": value}), param="repetition_detection" + param)
    error_of(server.post("/v1/responses", {"input": "x", **REPEATS}), param="repetition_detection")
    error_of(server.post("/generate", {"text": "x", "sampling_params": REPEATS}), param="sampling_params.repetition_detection")


def test_truncation(server, serve):
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    cut = completion(server, truncate_prompt_tokens=4, echo=True)
    tail = completion(server, prompt=ids[-4:], echo=True)
    assert cut["usage"]["prompt_tokens"] == 4 and cut["choices"][0]["text"] == tail["choices"][0]["text"]
    right = completion(server, truncate_prompt_tokens=4, truncation_side="right", echo=True)["choices"]
    assert right[0]["text"] == completion(server, prompt=ids[:4], echo=True)["choices"][0]["text"]
    assert completion(server, truncate_prompt_tokens=4, truncation_side="left", echo=True)["choices"] == cut["choices"]
    error_of(server.post("/v1/completions", {"prompt": "x", "truncation_side": "middle"}), param="truncation_side")
    assert completion(server, truncate_prompt_tokens=4000)["usage"]["prompt_tokens"] == len(ids)
    small = serve("--context-length", "256")
    long = completion(small, prompt=[7] * 300, truncate_prompt_tokens=-1, max_tokens=5)
    assert long["usage"]["prompt_tokens"] == 251
    small.stop()
    assert chat(server, truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3


def prompt_of(server, **body):
    tokens = server.post("/tokenize", body).json()["tokens"]
    return server.post("/detokenize", {"tokens": tokens}).json()["text"]


@pytest.mark.parametrize("content,end", [
    ("The answer is", "The answer is"), ("The answer is ", "The answer is"), ("  The answer is", "The answer is"),
    ([{"type": "text", "text": "The answer"}], "The answer"), ("<think>hm</think>It is", "<think>hm</think>It is"), ("a <|user|> b", "a <|user|> b"),
])
def test_continue_final_message(server, trained, content, end):
    messages = [*ASK, {"role": "assistant", "content": content}]
    text = prompt_of(server, messages=messages, continue_final_message=True)
    assert text.endswith(end) and "What is 3+5?" in text
    assert text == prompt_of(server, messages=messages, continue_final_message=True, add_generation_prompt=False)
    # a message in the middle that says the same is not taken for it
    again = prompt_of(server, messages=[{"role": "user", "content": "The answer is"}, *messages], continue_final_message=True)
    assert again.endswith(end) and "What is 3+5?" in again


def test_continuing(server, trained):
    """The answer is what a completion of the same tokens is, and no thinking."""
    body = {"messages": [*ASK, {"role": "assistant", "content": "The answer"}], "continue_final_message": True}
    ids = server.post("/tokenize", body).json()["tokens"]
    message = chat(server, **body)["choices"][0]["message"]
    assert message["content"] == completion(server, prompt=ids, max_tokens=8, ignore_eos=False)["choices"][0]["text"]
    assert message["reasoning_content"] is None and message["content"]


@pytest.mark.parametrize("messages,extra,param", [
    (ASK, {}, "continue_final_message"), ([*ASK, {"role": "assistant", "content": "x"}], {"add_generation_prompt": True}, "continue_final_message"),
    ([*ASK, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}], {}, "continue_final_message"),
    ([*ASK, {"role": "assistant", "content": ""}], {}, "messages"), ([*ASK, {"role": "assistant", "content": "x"}], {"continue_final_message": 1}, "continue_final_message"),
])
def test_continue_refused(server, messages, extra, param):
    error_of(server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "continue_final_message": True, **extra}), param=param)


def test_names(server):
    assert completion(server, rid="mine")["id"] == "mine"
    assert completion(server, request_id="mine")["id"] == "cmpl-mine"
    assert chat(server, rid='with "quotes"')["id"] == 'with "quotes"'


def test_fields_without_effect(server):
    plain = completion(server)["choices"]
    extra = completion(server, user="u", metadata={"a": "b"}, store=True, service_tier="flex", spaces_between_special_tokens=False, priority=3,
                       cache_salt="s", a_field_from_the_future={"x": [1]})["choices"]
    assert plain == extra


def test_messages_of_every_kind(server):
    """Developer role, parts, results of tools, arguments as text or object, null content."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    as_object = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
    counts = set()
    for c in (call, as_object):
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]},
                    {"role": "assistant", "content": None, "tool_calls": [c]},
                    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "8"}]}]
        counts.add(chat(server, messages=messages)["usage"]["prompt_tokens"])
    assert len(counts) == 1
