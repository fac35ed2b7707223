"""return_token_ids, return_prompt_token_ids and return_tokens_as_token_ids: the ids beside the text, streamed or whole."""

import pytest
from api_server import stream
from test_errors import error_of
from test_native import PROMPT, completion

pytestmark = pytest.mark.runners

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = [{"role": "user", "content": "What is 3+5? \N{GRINNING FACE}"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]


def chat(server, **body):
    reply = server.post(CHAT, {"messages": ASK, "temperature": 0, "max_tokens": 24, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def ids_of(logprobs):
    names = logprobs["tokens"] if "tokens" in logprobs else [entry["token"] for entry in logprobs["content"]]
    assert all(name.startswith("token_id:") for name in names)
    return [int(name[len("token_id:"):]) for name in names]


def test_completions(server):
    """Of every prompt and answer; the names in logprobs are the same ids, alternatives included."""
    prompts = [PROMPT, "\N{GRINNING FACE} x"]
    want = [server.post("/tokenize", {"prompt": p}).json()["tokens"] for p in prompts]
    body = {"prompt": prompts, "n": 2, "max_tokens": 9, "temperature": 1, "seed": 5}
    plain = completion(server, **body, logprobs=2)
    found = completion(server, **body, logprobs=2, return_token_ids=True, return_tokens_as_token_ids=True)
    for i, (before, choice) in enumerate(zip(plain["choices"], found["choices"])):
        assert choice["text"] == before["text"] and choice["prompt_token_ids"] == want[i // 2]
        assert choice["token_ids"] == ids_of(choice["logprobs"])
        assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
        assert choice["logprobs"]["token_logprobs"] == before["logprobs"]["token_logprobs"]
        assert choice["logprobs"]["text_offset"] == before["logprobs"]["text_offset"]
        assert server.post("/detokenize", {"tokens": choice["token_ids"], "skip_special_tokens": True}).json()["text"] == choice["text"]
        assert not {"token_ids", "prompt_token_ids"} & set(before)
    assert sum(len(c["token_ids"]) for c in found["choices"]) == found["usage"]["completion_tokens"]


def test_echo(server):
    choice = completion(server, echo=True, logprobs=0, max_tokens=3, return_token_ids=True, return_tokens_as_token_ids=True)["choices"][0]
    assert choice["text"].startswith(PROMPT)
    assert choice["prompt_token_ids"] + choice["token_ids"] == ids_of(choice["logprobs"])
    nothing = completion(server, echo=True, max_tokens=0, return_token_ids=True)["choices"][0]
    assert nothing["text"] == PROMPT and nothing["token_ids"] == [] and nothing["prompt_token_ids"] == choice["prompt_token_ids"]


@pytest.mark.parametrize("extra", [{}, {"stream_interval": 4}, {"logprobs": 1}, {"echo": True}, {"stop": "1"}])
def test_completions_streamed(server, extra):
    body = {"prompt": [PROMPT, "y"], "n": 2, "max_tokens": 20, "temperature": 1, "seed": 7, "return_token_ids": True, **extra}
    plain = completion(server, **body)["choices"]
    parts = {i: [] for i in range(4)}
    for event in stream(server, TEXT, {**body, "ignore_eos": True})[:-1]:
        for choice in event["choices"]:
            parts[choice["index"]].append(choice)
    for i, events in parts.items():
        assert events[0]["prompt_token_ids"] == plain[i]["prompt_token_ids"]
        assert all("prompt_token_ids" not in event for event in events[1:])
        assert sum((event["token_ids"] for event in events), []) == plain[i]["token_ids"]
        assert "".join(event["text"] for event in events) == plain[i]["text"]


def test_chat(server):
    want = server.post("/tokenize", {"messages": ASK}).json()["tokens"]
    plain = chat(server, n=2, logprobs=True, top_logprobs=2)
    found = chat(server, n=2, logprobs=True, top_logprobs=2, return_token_ids=True, return_tokens_as_token_ids=True)
    assert found["prompt_token_ids"] == want and "prompt_token_ids" not in plain
    for before, choice in zip(plain["choices"], found["choices"]):
        assert choice["message"] == before["message"] and choice["token_ids"] == ids_of(choice["logprobs"])
        assert "prompt_token_ids" not in choice and "token_ids" not in before
        entries, others = choice["logprobs"]["content"], before["logprobs"]["content"]
        assert [e["bytes"] for e in entries] == [e["bytes"] for e in others]
        assert all(t["token"].startswith("token_id:") for e in entries for t in e["top_logprobs"])
    peer = chat(server, n=2, return_prompt_token_ids=True)
    assert [c["prompt_token_ids"] for c in peer["choices"]] == [want, want] and "prompt_token_ids" not in peer


@pytest.mark.parametrize("extra", [{}, {"stream_interval": 4}, {"logprobs": True}, {"tools": TOOLS}, {"separate_reasoning": False},
                                   {"echo": True, "messages": [*ASK, {"role": "assistant", "content": "It is"}], "continue_final_message": True}])
def test_chat_streamed(server, extra):
    """Every token once, also those of thinking, calls and the end, whose text is not shown."""
    body = {"n": 2, "max_tokens": 60, "temperature": 1, "seed": 3, "return_token_ids": True, "return_prompt_token_ids": True, **extra}
    plain = chat(server, **body)
    assert all(c["token_ids"] for c in plain["choices"])
    first, parts = {}, {0: [], 1: []}
    for event in stream(server, CHAT, {"messages": ASK, **body})[:-1]:
        [choice] = event["choices"]
        if choice["index"] not in first:
            first[choice["index"]] = event["prompt_token_ids"], choice["prompt_token_ids"]
            assert choice["delta"]["role"] == "assistant" and "token_ids" not in choice
        else:
            assert "prompt_token_ids" not in event and "prompt_token_ids" not in choice
            parts[choice["index"]] += choice["token_ids"]
    assert first == {i: (plain["prompt_token_ids"],) * 2 for i in (0, 1)}
    assert parts == {c["index"]: c["token_ids"] for c in plain["choices"]}


def test_hidden_thinking(server):
    """Where the thinking is left out its tokens are."""
    body = chat(server, include_reasoning=False, return_token_ids=True)
    assert "token_ids" not in body["choices"][0] and body["prompt_token_ids"]
    events = stream(server, CHAT, {"messages": ASK, "max_tokens": 8, "include_reasoning": False, "return_token_ids": True})[:-1]
    assert all("token_ids" not in event["choices"][0] for event in events)


def test_refused(server):
    for field in ("return_token_ids", "return_prompt_token_ids"):
        error_of(server.post("/v1/responses", {"input": "x", field: True}), param=field)
        assert server.post("/v1/messages", {"messages": ASK, "max_tokens": 1, field: True}).status_code == 400
        error_of(server.post("/generate", {"text": "x", "sampling_params": {field: True}}), param="sampling_params." + field)
        error_of(server.post(TEXT, {"prompt": "x", field: "yes"}), param=field)


# ---------------------------------------------------------------- what stands beside them


def meta_of(server, prompt, n, **sampling):
    body = {"input_ids": prompt, "return_logprob": True, "return_text_in_logprobs": True, "top_logprobs_num": 2,
            "sampling_params": {"temperature": 0, "max_new_tokens": n, **sampling}}
    return server.post("/generate", body).json()["meta_info"]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_meta_info(server, ignore_eos):
    """SGLang's, the same as /generate says of the same prompt."""
    prompt = server.post("/tokenize", {"messages": ASK}).json()["tokens"]
    want = meta_of(server, prompt, 24, ignore_eos=ignore_eos)
    found = [chat(server, logprobs=True, top_logprobs=2, return_meta_info=True, ignore_eos=ignore_eos),
             completion(server, prompt=prompt, max_tokens=24, logprobs=2, return_meta_info=True, ignore_eos=ignore_eos)]
    for body in found:
        meta = body["choices"][0]["meta_info"]
        assert meta.keys() == want.keys() and meta["e2e_latency"] > 0
        for key in meta.keys() - {"id", "e2e_latency", "cached_tokens"}:
            assert meta[key] == want[key], key
        assert meta["completion_tokens"] == body["usage"]["completion_tokens"] == len(meta["output_token_logprobs"])
    bare = chat(server, n=2, return_meta_info=True, max_tokens=3)["choices"]
    assert all(c["meta_info"]["finish_reason"]["type"] == "length" and "output_token_logprobs" not in c["meta_info"] for c in bare)
    assert "meta_info" not in chat(server)["choices"][0]
    error_of(server.post(CHAT, {"messages": ASK, "stream": True, "return_meta_info": True}), param="return_meta_info")


def test_prompt_text(server):
    body = chat(server, return_prompt_text=True, return_token_ids=True, max_tokens=2)
    assert body["prompt_text"] == server.post("/detokenize", {"tokens": body["prompt_token_ids"]}).json()["text"]
    assert ASK[0]["content"] in body["prompt_text"] and "prompt_text" not in chat(server, max_tokens=2)
    events = stream(server, CHAT, {"messages": ASK, "max_tokens": 3, "n": 2, "return_prompt_text": True})[:-1]
    assert [e["prompt_text"] for e in events if e["choices"][0]["delta"].get("role")] == [body["prompt_text"]] * 2
    assert sum("prompt_text" in e for e in events) == 2


@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}, {"tools": TOOLS}, {"stop": "8"}])
def test_input_ids(server, extra):
    """The ids that the template gives are answered as the messages are, thinking and calls taken apart alike."""
    ids = server.post("/tokenize", {"messages": ASK, **extra}).json()["tokens"]
    want = chat(server, max_tokens=60, return_token_ids=True, return_prompt_text=True, **extra)
    body = {"messages": [{"role": "user", "content": "something else"}], "input_ids": ids, "max_tokens": 60, "temperature": 0,
            "return_token_ids": True, "return_prompt_text": True, **{k: v for k, v in extra.items() if k != "enable_thinking"}}
    reply = server.post(CHAT, body).json()
    assert reply["prompt_token_ids"] == ids and reply["prompt_text"] == want["prompt_text"]
    assert reply["choices"][0]["token_ids"] == want["choices"][0]["token_ids"]
    for key in ("content", "reasoning_content"):
        assert reply["choices"][0]["message"][key] == want["choices"][0]["message"][key]
    deltas = [e["choices"][0]["delta"] for e in stream(server, CHAT, body)[:-1]]
    assert "".join(d.get("content") or "" for d in deltas) == (want["choices"][0]["message"]["content"] or "")


@pytest.mark.parametrize("value,param", [("x", ""), ([], ""), ([[5]], ""), (["x"], ""), ([5, -1], "[1]"), ([5, "x"], "[1]"), ([5, 10**9], "[1]")])
def test_input_ids_refused(server, value, param):
    error_of(server.post(CHAT, {"messages": ASK, "max_tokens": 1, "input_ids": value}), param="input_ids" + param)


def test_too_many_input_ids(server, limit):
    error = error_of(server.post(CHAT, {"messages": ASK, "input_ids": [7] * (limit + 1)}), param="input_ids")
    assert error["code"] == "context_length_exceeded"
