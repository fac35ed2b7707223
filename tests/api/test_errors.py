"""Every kind of bad input: 4xx in OpenAI's shape, the field's name in it, and a server that goes on."""

import httpx
import openai
import pytest

ASK = [{"role": "user", "content": "hi"}]


def error_of(reply, status=400, param=None):
    """The error object of a reply; checks its shape."""
    assert reply.status_code == status, (reply.status_code, reply.text)
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    if param:
        assert error["param"] == param, error
        assert param in error["message"], error
    return error


COMMON = [
    ("model", 3), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", -1), ("max_tokens", True), ("max_tokens", [1]),
    ("max_completion_tokens", "7"), ("max_completion_tokens", -3), ("temperature", "hot"), ("temperature", -0.1),
    ("temperature", 1e300), ("temperature", {}), ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("top_p", "x"), ("top_k", -2),
    ("top_k", 1.5), ("top_k", "x"), ("min_p", -0.1), ("min_p", 1.1), ("min_p", []), ("seed", "x"), ("seed", 1.5), ("seed", 2**70),
    ("n", 0), ("n", -1), ("n", 129), ("n", "2"), ("best_of", 0), ("best_of", "3"), ("stop", 5), ("stop", "x" * 1025), ("stop", {}), ("stop", ""), ("stop", [f"{i}" for i in range(17)]),
    ("stop_token_ids", 3), ("min_tokens", -1), ("min_tokens", "x"), ("ignore_eos", 1), ("ignore_eos", "yes"),
    ("skip_special_tokens", "no"), ("include_stop_str_in_output", 3), ("stream", "true"), ("stream", 1), ("stream_options", []),
    ("stream_options", {"include_usage": True}), ("frequency_penalty", 2.5), ("presence_penalty", -2.1), ("repetition_penalty", 0),
    ("frequency_penalty", "x"), ("logit_bias", {"1": 101}), ("logit_bias", {"-1": 5}), ("logit_bias", {"x": 5}), ("logit_bias", {"1": "5"}), ("logit_bias", {"99999999": 1}), ("use_beam_search", "yes"), ("use_beam_search", 1), ("length_penalty", 2), ("length_penalty", "x"), ("early_stopping", True), ("early_stopping", "soon"), ("guided_json", 3), ("structured_outputs", "regex"),
    ("prompt_logprobs", "1"), ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 10**7), ("priority", "x"), ("stream_interval", 0), ("stream_interval", "4"), ("rid", 3), ("rid", ""), ("rid", "x" * 257), ("request_id", []),
    ("user", 3), ("metadata", "x"), ("store", "yes"), ("service_tier", 1), ("spaces_between_special_tokens", "x"),
    ("response_format", "json"), ("bad_words", "x"), ("thinking_token_budget", -2), ("thinking_token_budget", "5"), ("thinking_token_budget", 1.5), ("stop_regex", 3), ("stop_regex", "("), ("stop_regex", "a*"), ("stop_regex", "x" * 1025), ("stop_regex", ["a"] * 5), ("bad_words", ["x"] * 1025), ("bad_words", ["x" * 1000, "yz" * 500] * 500), ("regex", 3),
]
NESTED = [
    ("stop", ["a", 3], "stop[1]"), ("stop", ["a", ""], "stop[1]"), ("stop_token_ids", [1, "x"], "stop_token_ids[1]"), ("bad_words", ["x", 3], "bad_words[1]"), ("stop_regex", ["a", 3], "stop_regex[1]"), ("stop_regex", ["a", "[b"], "stop_regex[1]"), ("stop_regex", ["", "b"], "stop_regex[0]"), ("bad_words", ["  "], "bad_words[0]"), ("bad_words", ["x" * 1025], "bad_words[0]"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"), ("stop_token_ids", [10**7], "stop_token_ids[0]"),
    ("response_format", {"type": "xml"}, "response_format.type"), ("response_format", {"type": 4}, "response_format.type"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
]


def cases():
    for key, value in COMMON:
        yield key, value, key
    yield from NESTED


@pytest.mark.parametrize("path,base", [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": ASK})])
@pytest.mark.parametrize("key,value,param", list(cases()), ids=lambda v: str(v)[:24])
def test_shared_fields(server, path, base, key, value, param):
    error_of(server.post(path, {"max_tokens": 2, **base, key: value}), param=param)


@pytest.mark.parametrize("value,param", [
    (None, "prompt"), ("", "prompt"), ([], "prompt"), (3, "prompt"), ({}, "prompt"), (True, "prompt"), ([True], "prompt[0]"),
    ([1, "x"], "prompt[1]"), ([1, -1], "prompt[1]"), ([-1], "prompt[0]"), ([10**9], "prompt[0]"), ([2**40], "prompt[0]"),
    ([1.5], "prompt[0]"), ([1, None], "prompt[1]"), ([[]], "prompt[0]"), ([[1], "x", [-1]], "prompt[2][0]"), (["a", ""], "prompt[1]"),
    (["a", 3], "prompt[1]"), ([[1, [2]]], "prompt[0][1]"), (["x"] * 1025, "prompt"),
], ids=lambda v: str(v)[:24])
def test_prompt(server, value, param):
    """C49 among them."""
    error_of(server.post("/v1/completions", {"prompt": value, "max_tokens": 1}), param=param)
    good = server.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
    assert good.status_code == 200


@pytest.mark.parametrize("key,value", [
    ("echo", "yes"), ("echo", 1), ("logprobs", True), ("logprobs", 21), ("logprobs", -1), ("logprobs", "2"), ("suffix", "tail"), ("suffix", 3),
    ("max_tokens", 0),
], ids=lambda v: str(v)[:24])
def test_completions_fields(server, key, value):
    error_of(server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, key: value}), param=key)


def test_too_many_answers(server):
    error_of(server.post("/v1/completions", {"prompt": ["x"] * 100, "n": 100, "max_tokens": 1}), param="prompt")


def test_min_above_max(server):
    error_of(server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "min_tokens": 2}), param="min_tokens")


@pytest.mark.parametrize("key,value,param", [
    ("messages", None, "messages"), ("messages", [], "messages"), ("messages", "hi", "messages"), ("messages", {}, "messages"),
    ("messages", ["hi"], "messages[0]"), ("messages", [{}], "messages[0].role"),
    ("messages", [{"role": 3, "content": "x"}], "messages[0].role"), ("messages", [{"role": "king", "content": "x"}], "messages[0].role"),
    ("messages", [*ASK, {"role": "user"}], "messages[1].content"), ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [{"role": "user", "content": 3}], "messages[0].content"), ("messages", [{"role": "user", "content": {}}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ("messages", [*ASK, {"role": "assistant", "tool_calls": 3}], "messages[1].tool_calls"),
    ("messages", [*ASK, {"role": "assistant", "tool_calls": [{"type": "function"}]}], "messages[1].tool_calls[0].function"),
    ("messages", [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
     "messages[1].tool_calls[0].function.arguments"),
    ("messages", [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
     "messages[1].tool_calls[0].function.arguments"),
    ("messages", [*ASK, {"role": "assistant", "content": "x", "reasoning_content": 4}], "messages[1].reasoning_content"),
    ("logprobs", 3, "logprobs"), ("top_logprobs", 3, "top_logprobs"), ("top_logprobs", 21, "top_logprobs"), ("top_logprobs", "x", "top_logprobs"),
    ("max_tokens", 0, "max_tokens"), ("tools", {}, "tools"), ("tools", [3], "tools[0]"), ("tools", [{"type": "function"}], "tools[0].function"),
    ("tools", [{"type": "retrieval"}], "tools[0].type"), ("tools", [{"type": "function", "function": {}}], "tools[0].function"),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": 3}}], "tools[0].function.parameters"),
    ("tool_choice", "required", "tool_choice"), ("tool_choice", 3, "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice.function.name"), ("chat_template", "{{ 1 }}", "chat_template"),
    ("chat_template_kwargs", 3, "chat_template_kwargs"), ("chat_template_kwargs", {"enable_thinking": "no"}, "chat_template_kwargs.enable_thinking"),
    ("reasoning_effort", 3, "reasoning_effort"), ("thinking", "on", "thinking"), ("thinking", {"type": "maybe"}, "thinking.type"),
    ("enable_thinking", 0, "enable_thinking"), ("best_of", 3, "best_of"), ("separate_reasoning", "x", "separate_reasoning"), ("continue_final_message", True, "continue_final_message"),
    ("add_generation_prompt", "x", "add_generation_prompt"), ("echo", "x", "echo"), ("functions", [{"name": "f"}], "functions"),
], ids=lambda v: str(v)[:24])
def test_chat_fields(server, key, value, param):
    error_of(server.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 2, key: value}), param=param)


def test_stream_option_types(server):
    body = {"prompt": "x", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": "yes"}}
    error_of(server.post("/v1/completions", body), param="stream_options.include_usage")


# ---------------------------------------------------------------- lengths


def test_prompt_too_long(server, limit):
    """C37: names the limit and the two counts."""
    error = error_of(server.post("/v1/completions", {"prompt": [7] * (limit + 10), "max_tokens": 5}), param="prompt")
    assert error["code"] == "context_length_exceeded"
    for number in (limit, limit + 10, 5):
        assert str(number) in error["message"]


def test_answer_too_long(server, limit):
    error = error_of(server.post("/v1/completions", {"prompt": [7] * (limit - 5), "max_tokens": 100}), param="max_tokens")
    assert error["code"] == "context_length_exceeded"
    for number in (limit, limit - 5, 100):
        assert str(number) in error["message"]
    newer = {"prompt": [7] * 3, "max_completion_tokens": limit}
    error_of(server.post("/v1/completions", newer), param="max_completion_tokens")


def test_chat_too_long(server, limit):
    messages = [{"role": "user", "content": "a b c d " * limit}]
    error = error_of(server.post("/v1/chat/completions", {"messages": messages}), param="messages")
    assert error["code"] == "context_length_exceeded"
    assert str(limit) in error["message"]


@pytest.mark.parametrize("path,body", [("/v1/completions", {}), ("/v1/chat/completions", {}), ("/generate", {}), ("/v1/responses", {}),
                                       ("/v1/completions", {"truncate_prompt_tokens": 5}), ("/tokenize", {}),
                                       ("/v1/messages/count_tokens", {})], ids=lambda v: str(v)[:24])
def test_encoding_ends_early(server, limit, path, body):
    """Text that is far too long is not encoded to its end: two contexts, or 16 where the end of it or its length is wanted."""
    times = 16 if "token" in str((path, body)) else 2
    text = "a b c d " * (5 * limit)  # 20 contexts
    field = {"/generate": "text", "/v1/responses": "input"}.get(path, "prompt")
    chat = "chat" in path or "messages" in path
    content = {"messages": [{"role": "user", "content": text}]} if chat else {field: text}
    reply = server.post(path, {**content, **body})
    assert reply.status_code == 400
    assert f"more than {times * limit} tokens" in reply.text and f"holds {limit}" in reply.text


def test_second_prompt_too_long(server, limit):
    error_of(server.post("/v1/completions", {"prompt": [[1], [7] * (limit + 1)], "max_tokens": 1}), param="prompt[1]")


def test_large_body(server, limit):
    """C47: 900 KB is read and judged by its tokens."""
    error = error_of(server.post("/v1/completions", {"prompt": "word " * 180_000, "max_tokens": 1}), param="prompt")
    assert error["code"] == "context_length_exceeded"


# ---------------------------------------------------------------- bodies


def post_raw(server, data, path="/v1/completions", **headers):
    return httpx.post(server.url + path, content=data, headers={"Content-Type": "application/json", **headers}, timeout=60)


@pytest.mark.parametrize("data", [
    b"", b"{", b"x", b"[]", b"3", b"null", b'"x"', b'{"prompt": "x"', b'{"prompt": "x"} trailing', b'{"prompt": NaN}', b'{"prompt": 1e999}',
    b'{"prompt": "\xff\xfe"}', b'{"prompt": "a\x00b"}', b'{"prompt": "x", "prompt": "y"}', b"[" * 100000,
    b'{"a":' * 100000, b'{"prompt": "\\x"}', b"\xef\xbb\xbf{}", b"'prompt'", b'{"prompt": 00}',
], ids=lambda v: repr(v[:20]))
def test_broken_json(server, data):
    error_of(post_raw(server, data))


def test_broken_json_keeps_the_connection(server):
    """C44."""
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true, y}'
    with httpx.Client(base_url=server.url, headers={"Content-Type": "application/json"}, timeout=60) as http:
        error_of(http.post("/v1/chat/completions", content=body))
        assert http.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}').status_code == 200


@pytest.mark.parametrize("text", [rb"emoji \ud83d end", rb"\udc00", rb"\ud83d\ud83d", rb"\uD83Dx\uDE00"])
def test_half_a_surrogate(server, text):
    """C45: read as U+FFFD."""
    reply = post_raw(server, b'{"messages": [{"role": "user", "content": "%b"}], "max_tokens": 1}' % text, "/v1/chat/completions")
    assert reply.status_code == 200, reply.text
    echo = post_raw(server, b'{"prompt": "%b", "max_tokens": 0, "echo": true}' % text)
    assert "\ufffd" in echo.json()["choices"][0]["text"]


def test_zero_in_a_text(server):
    """Tools print zeros and their output is sent on: read as U+FFFD, each."""
    echo = post_raw(server, rb'{"prompt": "a\u0000\u0000\ud83d\ude00\\\u0000b \\u0000", "max_tokens": 0, "echo": true}')
    assert echo.json()["choices"][0]["text"] == "a\ufffd\ufffd\U0001f600\\\ufffdb \\u0000"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_zero_in_arguments(server, path):
    """They are JSON in a string of JSON."""
    arguments = r'{"a": "x\u0000y \ud83d"}'
    if path == "/v1/responses":
        body = {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
                          {"type": "function_call_output", "call_id": "c", "output": "z\0"}], "max_output_tokens": 16}
    else:
        calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        body = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls},
                             {"role": "tool", "tool_call_id": "c", "content": "z\0"}], "max_tokens": 1, "return_prompt_text": True}
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    if "chat" in path:
        assert "x\ufffdy \ufffd" in reply.json()["prompt_text"] and "z\ufffd" in reply.json()["prompt_text"]


def test_whole_surrogate_pair(server):
    echo = post_raw(server, rb'{"prompt": "emoji \ud83d\ude00 end", "max_tokens": 0, "echo": true}')
    assert echo.json()["choices"][0]["text"] == "emoji \U0001f600 end"


# ---------------------------------------------------------------- HTTP


def test_unknown_path(server):
    for path in ("/v1", "/v1/completion", "/v1/completions/", "/v1/models/", "/v1/models%00", "/%00"):
        error = error_of(server.get(path), 404)
        assert error["code"] == "unknown_url"


@pytest.mark.parametrize("method,path,allow", [
    ("GET", "/v1/completions", "POST"), ("PUT", "/v1/chat/completions", "POST"), ("DELETE", "/v1/models", "GET, HEAD"),
    ("POST", "/health", "GET, HEAD"), ("OPTIONS", "/v1/completions", "POST"), ("PATCH", "/v1/models/x", "GET, HEAD"),
])
def test_wrong_method(server, method, path, allow):
    reply = httpx.request(method, server.url + path, timeout=60)
    error_of(reply, 405)
    assert reply.headers["allow"] == allow


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx"])
def test_wrong_content_type(server, kind):
    error_of(post_raw(server, b'{"prompt": "x"}', **{"Content-Type": kind}), 415)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
def test_right_content_type(server, kind):
    assert post_raw(server, b'{"prompt": "x", "max_tokens": 1}', **{"Content-Type": kind}).status_code == 200


def test_compressed_body(server):
    error_of(post_raw(server, b"\x1f\x8b", **{"Content-Encoding": "gzip"}), 415)


def test_chunked_body(server):
    def pieces():
        yield b'{"prompt": "x",'
        yield b' "max_tokens": 1}'

    assert post_raw(server, pieces()).status_code == 200


def test_body_too_large(serve):
    server = serve("--max-body-bytes", "100000")
    good = b'{"prompt": "x", "max_tokens": 1}'
    error_of(post_raw(server, good + b" " * 100_000), 413)
    error_of(post_raw(server, iter([good, b" " * 60_000, b" " * 60_000])), 413)
    error_of(post_raw(server, good + b" " * 10_000_000), 413)
    assert post_raw(server, good + b" " * 90_000).status_code == 200
    assert server.stop() == 0


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as e:
        client.completions.create(model="gpt-4", prompt="x", max_tokens=1)
    assert e.value.code == "model_not_found"
    assert e.value.param == "model"


def test_client_exceptions(client, model):
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model=model, prompt="x", max_tokens=-1)
    assert e.value.param == "max_tokens"
    assert e.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, messages=[])
