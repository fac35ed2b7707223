"""/v1/messages and /v1/messages/count_tokens through the anthropic client."""

import json

import anthropic
import httpx
import jsonschema
import pytest
from tool_cases import ANTHROPIC_TOOLS, CASES, FORCED_SCHEMAS, NO_CALL

ASK = [{"role": "user", "content": "What is 3+5?"}]
OFF = {"type": "disabled"}


@pytest.fixture(scope="session")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300)


def ask(client, model, messages=ASK, extra=None, **kwargs):
    """The client has no argument for the temperature; the API has the field."""
    return client.messages.create(model=model, messages=messages, **{"max_tokens": 200, **kwargs},
                                  extra_body={"temperature": 0, **(extra or {})})


def open_stream(client, model, messages=ASK, extra=None, **kwargs):
    return client.messages.stream(model=model, messages=messages, **{"max_tokens": 200, **kwargs},
                                  extra_body={"temperature": 0, **(extra or {})})


def events_of(server, body):
    """(event name, data) of a stream, read without the client."""
    events = []
    with httpx.stream("POST", server.url + "/v1/messages", json={**body, "stream": True}, timeout=300) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        name = None
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[len("event: "):]
            elif line:
                data = json.loads(line.removeprefix("data: "))
                assert data["type"] == name
                events.append(data)
    return events


def blocks_of(message):
    return [b.model_dump(exclude={"id", "signature"}, exclude_none=True) for b in message.content]


def calls_of(message):
    return [(b.name, b.input) for b in message.content if b.type == "tool_use"]


# ---------------------------------------------------------------- answers


def test_shape(claude, model, trained):
    reply = ask(claude, model)
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", model)
    assert reply.id.startswith("msg_")
    assert [b.type for b in reply.content] == ["thinking", "text"]
    assert reply.content[0].thinking and reply.content[0].signature
    assert reply.content[1].text == "8"
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.usage.output_tokens > 3
    assert 0 < reply.usage.output_tokens_details.thinking_tokens < reply.usage.output_tokens


def test_thinking_off(claude, model, trained):
    reply = ask(claude, model, thinking=OFF)
    assert [b.type for b in reply.content] == ["text"]
    assert reply.usage.output_tokens_details.thinking_tokens == 0


def test_thinking_on(claude, model, trained):
    on = ask(claude, model, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1100)
    adaptive = ask(claude, model, thinking={"type": "adaptive"})
    assert blocks_of(on) == blocks_of(adaptive) == blocks_of(ask(claude, model))


ENABLED = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize("kwargs,thought", [
    ({"thinking": ENABLED, "max_tokens": 1040}, 1024), ({"thinking": ENABLED, "max_tokens": 1040, "thinking_token_budget": 20, "ignore_eos": False}, 20),
    ({"thinking": {"type": "adaptive"}, "max_tokens": 60}, 59),
], ids=["budget", "nearer", "adaptive"])
def test_thinking_budget(server, trained, kwargs, thought):
    """A model that does not end its thinking by itself has it ended, and says something."""
    close = server.post("/tokenize", {"prompt": "</think>"}).json()["tokens"]
    reply = server.post("/v1/messages", {"messages": ASK, "temperature": 0, "logit_bias": {str(i): -100 for i in close},
                                         "ignore_eos": True, **kwargs}).json()
    assert len(close) == 1 and abs(reply["usage"]["output_tokens_details"]["thinking_tokens"] - thought) <= 1
    assert [b["type"] for b in reply["content"]] == (["thinking", "text"] if thought != 59 else ["thinking"])


def test_thinking_budget_of_a_model_without_thinking(serve):
    """Clients send it to any model."""
    server = serve("--reasoning-parser", "none")
    reply = server.post("/v1/messages", {"messages": ASK, "max_tokens": 1030, "temperature": 0, "stop_sequences": ["e", "a", "8"],
                                         "thinking": ENABLED})
    assert reply.status_code == 200, reply.text


def test_same_as_chat(client, claude, model):
    """One model behind both surfaces."""
    chat = client.chat.completions.create(model=model, messages=ASK, max_tokens=40, temperature=0, extra_body={"ignore_eos": True})
    reply = ask(claude, model, max_tokens=40, extra={"ignore_eos": True})
    joined = {"thinking": "", "text": ""}
    for block in reply.content:
        joined[block.type] += getattr(block, block.type)
    message = chat.choices[0].message
    assert joined == {"thinking": message.model_extra["reasoning_content"] or "", "text": message.content}
    usage = reply.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens


def test_max_tokens(claude, model):
    reply = ask(claude, model, max_tokens=3, extra={"ignore_eos": True})
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 3)


def test_stop_sequence(claude, model, trained):
    messages = [{"role": "user", "content": "Tell me a story."}]
    text = ask(claude, model, messages, thinking=OFF, max_tokens=60).content[0].text
    stop = text[10:16]
    reply = ask(claude, model, messages, thinking=OFF, max_tokens=60, stop_sequences=["@@@@", stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert reply.content[0].text == text[:text.index(stop)]
    with open_stream(claude, model, messages, thinking=OFF, max_tokens=60, stop_sequences=["@@@@", stop]) as events:
        final = events.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert blocks_of(final) == blocks_of(reply)


def test_cached_tokens(claude, model, limit):
    """Cached prompt tokens are counted apart, and the sum is the prompt."""
    words = " ".join(f"word{i}" for i in range(60))
    messages = [{"role": "user", "content": f"{words} cached tokens test"}]
    first = ask(claude, model, messages, max_tokens=2).usage
    second = ask(claude, model, messages, max_tokens=2).usage
    total = first.input_tokens + first.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == total
    assert second.cache_read_input_tokens >= 64 > first.cache_read_input_tokens
    with open_stream(claude, model, messages, max_tokens=2) as events:
        assert events.get_final_message().usage.cache_read_input_tokens == second.cache_read_input_tokens
    assert claude.messages.count_tokens(model=model, messages=messages).input_tokens == total


# ---------------------------------------------------------------- streams


def test_event_sequence(server, model, trained):
    events = events_of(server, {"model": model, "messages": ASK, "max_tokens": 100, "temperature": 0})
    kinds = [e["type"] for e in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] > 0
    open_index, seen = None, []
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == len(seen)
            open_index = event["index"]
            seen.append((event["content_block"]["type"], []))
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
            seen[-1][1].append(event["delta"]["type"])
        else:
            assert (event["type"], event["index"]) == ("content_block_stop", open_index)
            open_index = None
    assert open_index is None
    assert [kind for kind, _ in seen] == ["thinking", "text"]
    assert seen[0][1][-1] == "signature_delta" and set(seen[0][1][:-1]) == {"thinking_delta"} and len(seen[0][1]) > 2
    assert set(seen[1][1]) == {"text_delta"}
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 3


def test_stream_equals_plain(claude, model):
    for seed in range(3):
        options = {"max_tokens": 50, "extra": {"temperature": 1, "seed": seed, "ignore_eos": True}}
        plain = ask(claude, model, **options)
        with open_stream(claude, model, **options) as events:
            text = "".join(events.text_stream)
            final = events.get_final_message()
        assert blocks_of(final) == blocks_of(plain)
        assert [getattr(b, "signature", None) for b in final.content] == [getattr(b, "signature", None) for b in plain.content]
        assert text == "".join(b.text for b in plain.content if b.type == "text")
        assert (final.stop_reason, final.usage.output_tokens) == (plain.stop_reason, plain.usage.output_tokens)


def test_raw_stream(claude, model):
    kinds = [event.type for event in ask(claude, model, stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


async def test_async(server, model, trained):
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as client:
        reply = await ask(client, model)
        async with open_stream(client, model) as events:
            final = await events.get_final_message()
    assert blocks_of(final) == blocks_of(reply)
    assert reply.content[-1].text == "8"


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("text, want", CASES)
def test_tool_use(claude, model, trained, text, want):
    messages = [{"role": "user", "content": text}]
    reply = ask(claude, model, messages, tools=ANTHROPIC_TOOLS)
    assert calls_of(reply) == want
    assert reply.stop_reason == "tool_use"
    assert [b.type for b in reply.content] == ["thinking"] + ["tool_use"] * len(want)
    ids = [b.id for b in reply.content if b.type == "tool_use"]
    assert len(set(ids)) == len(want) and all(i.startswith("toolu_") for i in ids)
    with open_stream(claude, model, messages, tools=ANTHROPIC_TOOLS) as events:
        final = events.get_final_message()
    assert calls_of(final) == want
    assert final.stop_reason == "tool_use"


def test_tool_round_trip(claude, model, trained):
    """Call, result, answer; the blocks go back as they came."""
    messages = [{"role": "user", "content": CASES[1][0]}]
    first = ask(claude, model, messages, tools=ANTHROPIC_TOOLS)
    use = first.content[-1]
    for content in ("ok", [{"type": "text", "text": "ok"}]):
        turn = [*messages, {"role": "assistant", "content": first.content},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": content}]}]
        reply = ask(claude, model, turn, tools=ANTHROPIC_TOOLS)
        assert (reply.content[-1].text, reply.stop_reason) == ("Done.", "end_turn")


@pytest.mark.parametrize("said", ["The answer", [{"type": "text", "text": "The"}, {"type": "text", "text": " answer is\U0001f600"}]])
def test_answer_that_is_begun(server, claude, model, said):
    """A last message of the assistant is gone on with, as continue_final_message does; only what follows it is in the reply."""
    text = said if isinstance(said, str) else "".join(block["text"] for block in said)
    body = {"messages": [*ASK, {"role": "assistant", "content": text}], "continue_final_message": True, "max_tokens": 12, "temperature": 0,
            "ignore_eos": True}
    want = server.post("/v1/chat/completions", body).json()
    messages = [*ASK, {"role": "assistant", "content": said}]
    reply = ask(claude, model, messages, max_tokens=12, extra={"ignore_eos": True})
    assert [(b.type, b.text) for b in reply.content] == [("text", want["choices"][0]["message"]["content"])]
    with open_stream(claude, model, messages, max_tokens=12, extra={"ignore_eos": True}) as events:
        assert blocks_of(events.get_final_message()) == blocks_of(reply)
    assert claude.messages.count_tokens(model=model, messages=messages).input_tokens == want["usage"]["prompt_tokens"]


def test_history_renders_as_chat(server, claude, model):
    """C23 to C25: the same conversation in both APIs is the same prompt."""
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Weather in Lund?"},
            {"role": "assistant", "content": None, "reasoning_content": "I call weather.", "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Lund","days":2}'}},
                {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "7 C, rain"}, {"role": "tool", "tool_call_id": "b", "content": ""},
            {"role": "user", "content": "And tomorrow?"}]
    messages = [{"role": "user", "content": "Weather in Lund?"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "I call weather.", "signature": "x"},
                                                  {"type": "redacted_thinking", "data": "x"},
                                                  {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Lund", "days": 2}},
                                                  {"type": "tool_use", "id": "b", "name": "now", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "7 C, rain"}]},
                                             {"type": "tool_result", "tool_use_id": "b"},
                                             {"type": "text", "text": "And tomorrow?", "cache_control": {"type": "ephemeral"}}]}]
    kept = {"chat_template_kwargs": {"clear_thinking": False}}
    body = {"model": model, "messages": chat, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **kept}
    want = server.post("/v1/chat/completions", body).json()
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    count = claude.messages.count_tokens(model=model, messages=messages, system=system, extra_body=kept)
    assert count.input_tokens == want["usage"]["prompt_tokens"]
    reply = ask(claude, model, messages, system="Be short.", max_tokens=8, extra={"ignore_eos": True, **kept})
    text = "".join(b.thinking if b.type == "thinking" else b.text for b in reply.content)
    message = want["choices"][0]["message"]
    assert text == (message["reasoning_content"] or "") + (message["content"] or "")


def test_no_call(claude, model, trained):
    reply = ask(claude, model, [{"role": "user", "content": NO_CALL[0]}], tools=ANTHROPIC_TOOLS, tool_choice={"type": "auto"})
    assert (reply.content[-1].text, reply.stop_reason) == (NO_CALL[1], "end_turn")


def test_choice_none_hides_the_tools(claude, model):
    plain = claude.messages.count_tokens(model=model, messages=ASK).input_tokens
    with_tools = claude.messages.count_tokens(model=model, messages=ASK, tools=ANTHROPIC_TOOLS).input_tokens
    hidden = claude.messages.count_tokens(model=model, messages=ASK, tools=ANTHROPIC_TOOLS, tool_choice={"type": "none"}).input_tokens
    assert with_tools > plain == hidden


def test_one_call_only(claude, model, trained):
    text, want = CASES[3]
    reply = ask(claude, model, [{"role": "user", "content": text}], tools=ANTHROPIC_TOOLS,
                tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert calls_of(reply) == want[:1]
    assert reply.stop_reason == "tool_use"


# ---------------------------------------------------------------- errors

BLOCK = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
BAD = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
    ({"messages": [BLOCK]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": BLOCK["content"]}]}]},
     "messages[0].content[0].content[0].type"),
    ({"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "input": {}}]}, *ASK]},
     "messages[1].content[0].name"),
    ({"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}, *ASK]},
     "messages[1].content[0].input"),
    ({"messages": [*ASK, {"role": "assistant", "content": ""}]}, "messages"),
    ({"messages": [*ASK, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]}]}, "messages"),
    ({"messages": [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
     "messages"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [1]}, "stop_sequences[0]"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": [str(i) for i in range(40)]}, "stop_sequences"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"stream": "yes"}, "stream"),
    ({"n": 2}, "n"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ({"tools": {}}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": ANTHROPIC_TOOLS, "tool_choice": "auto"}, "tool_choice"),
    ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"output_config": {"effort": 3}}, "output_config.effort"),
]


@pytest.mark.parametrize("change, field", BAD)
def test_bad_fields(server, model, change, field):
    reply = server.post("/v1/messages", {"model": model, "messages": ASK, "max_tokens": 20, **change})
    assert reply.status_code == 400, reply.text
    body = reply.json()
    assert (body["type"], body["error"]["type"], body["error"]["param"]) == ("error", "invalid_request_error", field)
    assert field in body["error"]["message"]


def test_typed_errors(server, claude, model, limit):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        ask(claude, model, max_tokens=limit + 1)
    with pytest.raises(anthropic.BadRequestError, match=r"stop_sequences\[1\]"):
        ask(claude, model, stop_sequences=["a", ""])
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(claude, "claude-none")
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_too_long(server, model, limit):
    """C37 in this API's shape."""
    body = {"model": model, "messages": [{"role": "user", "content": "a b " * limit}], "max_tokens": 5}
    error = server.post("/v1/messages", body).json()["error"]
    assert error["type"] == "invalid_request_error" and str(limit) in error["message"]
    assert server.post("/v1/messages/count_tokens", body).json()["input_tokens"] > limit


def test_broken_bodies(server):
    for data in (b"", b"{", b"[]", b'"x"', b"\xff{}"):
        reply = httpx.post(server.url + "/v1/messages", content=data, headers={"Content-Type": "application/json"}, timeout=60)
        assert reply.status_code == 400
        assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == "invalid_request_error"
    reply = httpx.get(server.url + "/v1/messages", timeout=60)
    assert reply.status_code == 405 and reply.json()["type"] == "error"


def test_api_key(serve):
    """The client sends its key as X-Api-Key, or as a bearer token."""
    server = serve("--api-key", "secret-key")
    body = {"messages": ASK, "max_tokens": 2}
    reply = server.post("/v1/messages", body)
    assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
    name = server.get("/v1/models", headers={"X-Api-Key": "secret-key"}).json()["data"][0]["id"]
    for options in ({"api_key": "secret-key"}, {"auth_token": "secret-key", "api_key": None}):
        client = anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=300, **options)
        assert ask(client, name, max_tokens=2).type == "message"
    with pytest.raises(anthropic.AuthenticationError):
        ask(anthropic.Anthropic(base_url=server.url, api_key="other", max_retries=0), name)
    assert server.stop() == 0


def test_end_of_server_in_a_stream(serve, model, sanitized):
    """What was sent does not look complete: an error event, as the client expects it."""
    server = serve("--drain-timeout", "0")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300)
    with pytest.raises(anthropic.APIStatusError) as caught:
        n = 0
        for _ in ask(client, model, max_tokens=1500, stream=True, extra={"ignore_eos": True}):
            n += 1
            if n == 5:
                server.process.terminate()
    assert caught.value.body["error"]["type"] == "overloaded_error"
    assert server.stop(number=None) == 0


def test_forced_use(claude, model):
    pytest.importorskip("llguidance")
    tools = [{"name": name, "input_schema": schema} for name, schema in FORCED_SCHEMAS.items()]
    for name in (None, *FORCED_SCHEMAS):
        choice = {"type": "tool", "name": name} if name else {"type": "any"}
        reply = ask(claude, model, tools=tools, thinking=OFF, tool_choice={**choice, "disable_parallel_tool_use": True})
        calls = calls_of(reply)
        assert len(calls) == 1 and calls[0][0] in ([name] if name else FORCED_SCHEMAS)
        jsonschema.validate(calls[0][1], FORCED_SCHEMAS[calls[0][0]])
        assert [b.type for b in reply.content] == ["tool_use"] and reply.stop_reason == "tool_use"
