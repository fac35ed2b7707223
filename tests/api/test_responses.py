"""/v1/responses through the openai client: what coding agents use of it, stateless."""

import json

import httpx
import jsonschema
import openai
import pytest
from tool_cases import CASES, FORCED_SCHEMAS, NO_CALL, RESPONSES_TOOLS

ASK = "What is 3+5?"
NO_THINKING = {"effort": "none"}


def ask(client, model, content=ASK, extra=None, **kwargs):
    return client.responses.create(model=model, input=content, **{"temperature": 0, "max_output_tokens": 200, **kwargs}, extra_body=extra)


def events_of(server, body):
    """The events of a stream, read without the client: numbered, named as their type, without [DONE]."""
    events, name = [], None
    with httpx.stream("POST", server.url + "/v1/responses", json={**body, "stream": True}, timeout=300) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[len("event: "):]
            elif line:
                data = json.loads(line.removeprefix("data: "))
                assert (data["type"], data["sequence_number"]) == (name, len(events))
                events.append(data)
    return events


def plain(item):
    """An output item without what differs between two answers."""
    return {k: v for k, v in item.items() if k not in ("id", "call_id")}


def outputs(response):
    return [plain(item.to_dict()) for item in response.output]


def calls_of(response):
    return [(i.name, json.loads(i.arguments)) for i in response.output if i.type == "function_call"]


# ---------------------------------------------------------------- answers


def test_shape(client, model, trained):
    reply = ask(client, model, instructions="You are a helpful assistant.", metadata={"a": "b"}, top_p=0.5)
    assert reply.id.startswith("resp_") and reply.object == "response" and reply.model == model
    assert (reply.status, reply.error, reply.incomplete_details) == ("completed", None, None)
    assert [i.type for i in reply.output] == ["reasoning", "message"]
    reasoning, message = reply.output
    assert reasoning.id.startswith("rs_") and reasoning.summary == []
    assert reasoning.content[0].type == "reasoning_text" and reasoning.content[0].text
    assert message.id.startswith("msg_") and (message.role, message.status) == ("assistant", "completed")
    assert message.content[0].type == "output_text" and message.content[0].annotations == []
    assert reply.output_text == "8"
    assert (reply.instructions, reply.metadata, reply.store) == ("You are a helpful assistant.", {"a": "b"}, False)
    assert (reply.temperature, reply.top_p, reply.max_output_tokens) == (0, 0.5, 200)
    assert reply.parallel_tool_calls is True and reply.tools == [] and reply.tool_choice == "auto"
    assert reply.text.format.type == "text" and reply.previous_response_id is None
    usage = reply.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert reply.created_at > 1.6e9


def test_same_as_chat(client, model):
    chat = client.chat.completions.create(model=model, messages=[{"role": "user", "content": ASK}], max_tokens=30, temperature=0,
                                          extra_body={"ignore_eos": True})
    reply = ask(client, model, max_output_tokens=30, extra={"ignore_eos": True})
    message = chat.choices[0].message
    thinking = "".join(p.text for i in reply.output if i.type == "reasoning" for p in i.content)
    assert (thinking, reply.output_text) == (message.model_extra["reasoning_content"] or "", message.content)
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)


def test_max_output_tokens(client, model):
    reply = ask(client, model, max_output_tokens=4, extra={"ignore_eos": True})
    assert (reply.status, reply.incomplete_details.reason, reply.usage.output_tokens) == ("incomplete", "max_output_tokens", 4)
    assert reply.output[-1].status == "incomplete"


def test_effort_none(client, model, trained):
    reply = ask(client, model, reasoning=NO_THINKING)
    assert [i.type for i in reply.output] == ["message"]
    assert reply.reasoning.effort == "none"
    assert reply.usage.output_tokens_details.reasoning_tokens == 0


def test_fields_without_effect(client, model, trained):
    """What coding agents send along."""
    reply = ask(client, model, store=True, include=["reasoning.encrypted_content"], truncation="auto", service_tier="auto",
                prompt_cache_key="k", safety_identifier="s", text={"format": {"type": "text"}, "verbosity": "low"},
                reasoning={"effort": "high", "summary": "auto"}, extra={"unknown_field": [1]})
    assert reply.output_text == "8" and reply.store is False


def test_cached_tokens(client, model):
    text = " ".join(f"item{i}" for i in range(60)) + " responses cache"
    first, second = (ask(client, model, text, max_output_tokens=2).usage for _ in range(2))
    assert second.input_tokens == first.input_tokens
    assert second.input_tokens_details.cached_tokens >= 64 > first.input_tokens_details.cached_tokens


def test_forms_of_input(client, model):
    """String, easy message, message with parts: one prompt."""
    forms = [ASK, [{"role": "user", "content": ASK}], [{"type": "message", "role": "user", "content": ASK}],
             [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is "},
                                                              {"type": "input_text", "text": "3+5?"}]}]]
    replies = [ask(client, model, form, max_output_tokens=20) for form in forms]
    assert len({r.usage.input_tokens for r in replies}) == 1
    assert all(outputs(r) == outputs(replies[0]) for r in replies)
    system = [ask(client, model, [{"role": role, "content": "Be short."}, {"role": "user", "content": ASK}], max_output_tokens=1)
              for role in ("system", "developer")] + [ask(client, model, instructions="Be short.", max_output_tokens=1)]
    assert len({r.usage.input_tokens for r in system}) == 1
    assert system[0].usage.input_tokens > replies[0].usage.input_tokens


# ---------------------------------------------------------------- streams


def test_event_sequence(server, model, trained):
    events = events_of(server, {"model": model, "input": ASK, "max_output_tokens": 100, "temperature": 0})
    kinds = [e["type"].removeprefix("response.") for e in events]
    short = [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]]
    assert short == ["created", "in_progress",
                     "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
                     "content_part.done", "output_item.done",
                     "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
                     "content_part.done", "output_item.done", "completed"]
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    final = events[-1]["response"]
    assert done == final["output"]
    assert [(i["id"], i["status"]) for i in added] == [(i["id"], "in_progress") for i in done]
    for index, item in enumerate(done):
        inside = [e for e in events if e.get("item_id") == item["id"]]
        assert {e["output_index"] for e in inside} == {index} and {e["content_index"] for e in inside} == {0}
        assert "".join(e.get("delta", "") for e in inside) == item["content"][0]["text"]
        assert [e["text"] for e in inside if e["type"].endswith("_text.done")] == [item["content"][0]["text"]]
    assert final["id"] == events[0]["response"]["id"] and final["usage"]["output_tokens"] > 3


def test_stream_equals_plain(client, model):
    for seed in range(3):
        options = {"temperature": 1, "max_output_tokens": 50, "extra": {"seed": seed, "ignore_eos": True}}
        whole = ask(client, model, **options)
        events = list(ask(client, model, stream=True, **options))
        assert events[-1].type == "response.incomplete"
        assert outputs(events[-1].response) == outputs(whole)
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text


def test_stream_helper(client, model, trained):
    with client.responses.stream(model=model, input=ASK, temperature=0, max_output_tokens=200) as events:
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        final = events.get_final_response()
    assert text == final.output_text == "8"
    assert [plain(i.to_dict()) for i in final.output if i.type == "reasoning"] == outputs(ask(client, model))[:1]


async def test_async(aclient, model, trained):
    reply = await ask(aclient, model)
    events = [e async for e in await ask(aclient, model, stream=True)]
    assert outputs(events[-1].response) == outputs(reply)
    async with aclient.responses.stream(model=model, input=CASES[0][0], tools=RESPONSES_TOOLS, temperature=0,
                                        max_output_tokens=200) as stream:
        final = await stream.get_final_response()
    assert calls_of(final) == CASES[0][1]


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("text, want", CASES)
def test_calls(client, model, trained, text, want):
    reply = ask(client, model, text, tools=RESPONSES_TOOLS)
    assert calls_of(reply) == want
    assert reply.status == "completed"
    assert [i.type for i in reply.output] == ["reasoning"] + ["function_call"] * len(want)
    ids = {i.call_id for i in reply.output if i.type == "function_call"}
    assert len(ids) == len(want) and all(i.startswith("call_") for i in ids)
    with client.responses.stream(model=model, input=text, tools=RESPONSES_TOOLS, temperature=0, max_output_tokens=200) as events:
        deltas = {}
        for event in events:
            if event.type == "response.function_call_arguments.delta":
                deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
        final = events.get_final_response()
    assert calls_of(final) == want
    assert [json.loads(deltas[i]) for i in sorted(deltas)] == [arguments for _, arguments in want]


def test_call_events(server, model, trained):
    text, want = CASES[3]
    events = events_of(server, {"model": model, "input": text, "tools": RESPONSES_TOOLS, "max_output_tokens": 200, "temperature": 0})
    done = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert [(e["name"], json.loads(e["arguments"])) for e in done] == want
    added = [e["item"] for e in events if e["type"] == "response.output_item.added" and e["item"]["type"] == "function_call"]
    assert [(i["name"], i["arguments"]) for i in added] == [(name, "") for name, _ in want]
    assert [i["id"] for i in added] == [e["item_id"] for e in done]
    assert [i["call_id"] for i in added] == [i["call_id"] for i in events[-1]["response"]["output"] if i["type"] == "function_call"]


def test_cut_inside_a_call(server, model, trained):
    """A call that the limit cuts is incomplete, its arguments are JSON all the same."""
    body = {"model": model, "input": CASES[1][0], "tools": RESPONSES_TOOLS, "temperature": 0, "reasoning": NO_THINKING}
    total = server.post("/v1/responses", {**body, "max_output_tokens": 200}).json()["usage"]["output_tokens"]
    seen = 0
    for n in range(1, total):
        reply = server.post("/v1/responses", {**body, "max_output_tokens": n}).json()
        final = events_of(server, {**body, "max_output_tokens": n})[-1]
        assert (reply["status"], final["type"]) == ("incomplete", "response.incomplete")
        assert [plain(i) for i in final["response"]["output"]] == [plain(i) for i in reply["output"]]
        for item in reply["output"]:
            if item["type"] == "function_call":
                seen += 1
                assert isinstance(json.loads(item["arguments"]), dict) and item["status"] == "incomplete"
    assert seen > 2


def test_round_trip(client, model, trained):
    """The output goes back as input, as agents do without stored responses."""
    conversation = [{"role": "user", "content": CASES[1][0]}]
    first = ask(client, model, conversation, tools=RESPONSES_TOOLS)
    conversation += [i.to_dict() for i in first.output]
    conversation.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "ok"})
    reply = ask(client, model, conversation, tools=RESPONSES_TOOLS)
    assert reply.output_text == "Done."
    conversation[-1]["output"] = [{"type": "input_text", "text": "ok"}]
    assert ask(client, model, conversation, tools=RESPONSES_TOOLS).output_text == "Done."


def test_history_renders_as_chat(server, model):
    """C23 to C25: the same conversation in both APIs is the same prompt."""
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Weather in Lund?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "I call weather.", "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Lund","days":2}'}},
                {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "7 C, rain"}, {"role": "tool", "tool_call_id": "b", "content": ""},
            {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And tomorrow?"}]
    items = [{"role": "user", "content": "Weather in Lund?"},
             {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I call weather."}]},
             {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
              "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
             {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city":"Lund","days":2}'},
             {"type": "function_call", "call_id": "b", "name": "now", "arguments": ""},
             {"type": "function_call_output", "call_id": "a", "output": "7 C, rain"},
             {"type": "function_call_output", "call_id": "b", "output": ""},
             {"type": "reasoning", "summary": [], "encrypted_content": "x"},
             {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And tomorrow?"}]
    common = {"model": model, "temperature": 0, "ignore_eos": True, "chat_template_kwargs": {"clear_thinking": False}}
    want = server.post("/v1/chat/completions", {**common, "messages": chat, "max_tokens": 8}).json()
    got = server.post("/v1/responses", {**common, "input": items, "instructions": "Be short.", "max_output_tokens": 8}).json()
    assert got["usage"]["input_tokens"] == want["usage"]["prompt_tokens"]
    message = want["choices"][0]["message"]
    text = "".join(p["text"] for i in got["output"] for p in i["content"])
    assert text == (message["reasoning_content"] or "") + (message["content"] or "")


def test_no_call(client, model, trained):
    reply = ask(client, model, NO_CALL[0], tools=RESPONSES_TOOLS)
    assert (reply.output_text, calls_of(reply)) == (NO_CALL[1], [])


def test_one_call_only(client, model, trained):
    reply = ask(client, model, CASES[3][0], tools=RESPONSES_TOOLS, parallel_tool_calls=False)
    assert calls_of(reply) == CASES[3][1][:1]
    assert reply.parallel_tool_calls is False


def test_choice_none_and_web_search(client, model):
    """Neither is in the prompt; what was declared is repeated."""
    base = ask(client, model, max_output_tokens=1).usage.input_tokens
    assert ask(client, model, tools=RESPONSES_TOOLS, tool_choice="none", max_output_tokens=1).usage.input_tokens == base
    reply = ask(client, model, tools=[{"type": "web_search"}], max_output_tokens=1)
    assert reply.usage.input_tokens == base and reply.tools[0].type == "web_search"
    assert ask(client, model, tools=RESPONSES_TOOLS, max_output_tokens=1).usage.input_tokens > base


def test_forced_calls(client, model):
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in FORCED_SCHEMAS.items()]
    for choice in ("required", *({"type": "function", "name": name} for name in FORCED_SCHEMAS)):
        reply = ask(client, model, tools=tools, tool_choice=choice, parallel_tool_calls=False, reasoning=NO_THINKING)
        calls = calls_of(reply)
        assert len(calls) == 1 and calls[0][0] in (FORCED_SCHEMAS if choice == "required" else [choice["name"]])
        jsonschema.validate(calls[0][1], FORCED_SCHEMAS[calls[0][0]])
        assert [i.type for i in reply.output] == ["function_call"] and reply.status == "completed"


# ---------------------------------------------------------------- errors

USER = {"role": "user", "content": "x"}
BAD = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{}]}, "input[0].role"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input[0].content[0].type"),
    ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input[1].type"),
    ({"input": [USER, {"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[1].call_id"),
    ({"input": [USER, {"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input[1].name"),
    ({"input": [USER, {"type": "function_call", "call_id": "a", "name": "f"}]}, "input[1].arguments"),
    ({"input": [USER, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{x"}]}, "input[1].arguments"),
    ({"input": [USER, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "[]"}]}, "input[1].arguments"),
    ({"input": [USER, {"type": "function_call_output", "output": "x"}]}, "input[1].call_id"),
    ({"input": [USER, {"type": "function_call_output", "call_id": "a"}]}, "input[1].output"),
    ({"instructions": ["x"]}, "instructions"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"background": True}, "background"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "x"}, "max_output_tokens"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"stream": 1}, "stream"),
    ({"n": 2}, "n"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"metadata": []}, "metadata"),
    ({"include": "x"}, "include"),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort"),
    ({"text": {"format": {}}}, "text.format.type"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"tools": {}}, "tools"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    ({"tools": RESPONSES_TOOLS, "tool_choice": 3}, "tool_choice"),
    ({"tools": RESPONSES_TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ({"parallel_tool_calls": "x"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize("change, field", BAD)
def test_bad_fields(server, model, change, field):
    reply = server.post("/v1/responses", {"model": model, "input": ASK, "max_output_tokens": 8, **change})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert field in error["message"]


def test_typed_errors(client, model, limit):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, model, previous_response_id="resp_0")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        ask(client, "none")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, model, "a b " * limit)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")


def test_stored_responses_are_not_there(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_0")


def test_end_of_server_in_a_stream(serve, model):
    """What was sent does not look complete: the last event is response.failed."""
    server = serve("--drain-timeout", "0")
    events = []
    for event in ask(server.client(), model, max_output_tokens=1500, stream=True, extra={"ignore_eos": True}):
        events.append(event)
        if len(events) == 8:
            server.process.terminate()
    assert events[-1].type == "response.failed"
    assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "server_error")
    assert "shutting down" in events[-1].response.error.message
    assert server.stop(number=None) == 0
