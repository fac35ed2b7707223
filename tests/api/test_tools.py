"""Tool calls of /v1/chat/completions through the openai client: the embedded model calls declared functions."""

import json

import jsonschema
import pytest
from api_server import stream
from tool_cases import CASES, CHAT_TOOLS, FORCED_SCHEMAS, NO_CALL

pytestmark = pytest.mark.runners

THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def ask(client, model, text, extra=None, **kwargs):
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}],
                                          **{"tools": CHAT_TOOLS, "temperature": 0, "max_tokens": 200, **kwargs}, extra_body=extra)


def calls_of(message):
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


def assemble(chunks):
    """(content, calls as (id, name, arguments), finish_reason); checks the order of the deltas."""
    content, calls, finish = "", [], None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for delta in choice.delta.tool_calls or []:
                if delta.id:
                    assert delta.index == len(calls), "calls are numbered in their order"
                    assert delta.function.name and delta.function.arguments == ""
                    assert delta.type == "function"
                    calls.append([delta.id, delta.function.name, ""])
                else:
                    assert delta.index == len(calls) - 1 and not delta.function.name
                    calls[delta.index][2] += delta.function.arguments
            finish = choice.finish_reason or finish
    return content, calls, finish


@pytest.mark.parametrize("text, want", CASES)
def test_calls(client, model, trained, text, want):
    """C34, C35: types from the schema, no arguments, several calls."""
    choice = ask(client, model, text).choices[0]
    assert calls_of(choice.message) == want
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.model_extra["reasoning_content"]
    ids = [c.id for c in choice.message.tool_calls]
    assert len(set(ids)) == len(want) and all(i.startswith("call_") and len(i) == 29 for i in ids)
    assert all(c.type == "function" for c in choice.message.tool_calls)


@pytest.mark.parametrize("text, want", CASES)
def test_calls_streamed(client, model, trained, text, want):
    content, calls, finish = assemble(ask(client, model, text, stream=True))
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == want
    assert len({c[0] for c in calls}) == len(want)
    assert (content, finish) == ("", "tool_calls")


def test_stream_helper(client, model, trained):
    """The client's own accumulator comes to the same."""
    text, want = CASES[3]
    with client.chat.completions.stream(model=model, messages=[{"role": "user", "content": text}], tools=CHAT_TOOLS,
                                        temperature=0, max_tokens=200) as events:
        done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
        final = events.get_final_completion()
    assert calls_of(final.choices[0].message) == want
    assert [(e.name, json.loads(e.arguments)) for e in done] == want


async def test_async(aclient, model, trained):
    text, want = CASES[0]
    reply = await ask(aclient, model, text)
    assert calls_of(reply.choices[0].message) == want
    chunks = [chunk async for chunk in await ask(aclient, model, text, stream=True)]
    assert [(n, json.loads(a)) for _, n, a in assemble(chunks)[1]] == want


def test_thinking_off(client, model, trained):
    text, want = CASES[0]
    message = ask(client, model, text, extra=THINKING_OFF).choices[0].message
    assert calls_of(message) == want
    assert message.model_extra["reasoning_content"] is None


def test_no_call(client, model, trained):
    choice = ask(client, model, NO_CALL[0]).choices[0]
    assert choice.message.content == NO_CALL[1]
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_parallel_off_keeps_the_first(client, model, trained):
    text, want = CASES[3]
    choice = ask(client, model, text, parallel_tool_calls=False).choices[0]
    assert calls_of(choice.message) == want[:1]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    content, calls, finish = assemble(ask(client, model, text, parallel_tool_calls=False, stream=True))
    assert [(n, json.loads(a)) for _, n, a in calls] == want[:1]
    assert (content, finish) == ("", "tool_calls")


def test_choice_none(client, model, trained):
    choice = ask(client, model, CASES[0][0], tool_choice="none").choices[0]
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.content is not None


def test_cut_inside_a_call(client, model, trained):
    """What exists of a call is valid JSON, and the finish reason is the true one; both modes agree."""
    text, _ = CASES[1]
    total = ask(client, model, text, extra=THINKING_OFF).usage.completion_tokens
    for n in range(1, total):
        choice = ask(client, model, text, extra=THINKING_OFF, max_tokens=n).choices[0]
        assert choice.finish_reason == "length"
        for _, arguments in calls_of(choice.message):
            assert isinstance(arguments, dict)
        content, calls, finish = assemble(ask(client, model, text, extra=THINKING_OFF, max_tokens=n, stream=True))
        assert finish == "length"
        assert [(name, json.loads(arguments)) for _, name, arguments in calls] == calls_of(choice.message)
        assert content == (choice.message.content or "")


def test_round_trip(client, model, trained):
    """A call, its result, and the answer that states it."""
    messages = [{"role": "user", "content": CASES[1][0]}]
    kwargs = {"model": model, "tools": CHAT_TOOLS, "temperature": 0, "max_tokens": 200}
    message = client.chat.completions.create(messages=messages, **kwargs).choices[0].message
    messages += [message.model_dump(exclude_none=True),
                 {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"}]
    choice = client.chat.completions.create(messages=messages, **kwargs).choices[0]
    assert choice.message.content == "Done."
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("n", [2])
def test_n(client, model, trained, n):
    reply = ask(client, model, CASES[0][0], n=n)
    assert [calls_of(c.message) for c in reply.choices] == [CASES[0][1]] * n
    assert len({c.message.tool_calls[0].id for c in reply.choices}) == n


def test_logprobs_with_calls(client, model, trained):
    """Every token has its entry, those of calls too."""
    reply = ask(client, model, CASES[0][0], logprobs=True)
    assert len(reply.choices[0].logprobs.content) == reply.usage.completion_tokens
    chunks = list(ask(client, model, CASES[0][0], logprobs=True, stream=True))
    entries = [e for c in chunks for x in c.choices if x.logprobs for e in x.logprobs.content]
    assert [e.token for e in entries] == [e.token for e in reply.choices[0].logprobs.content]


def test_without_tools_nothing_is_parsed(serve, server, model, trained):
    """The same answer with the parser off: the markup is content, byte for byte."""
    off = serve("--tool-call-parser", "none")
    body = {"messages": [{"role": "user", "content": CASES[0][0]}], "tools": CHAT_TOOLS, "temperature": 0, "max_tokens": 200}
    choice = off.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
    events = stream(off, "/v1/chat/completions", body)
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1])
    assert text == choice["message"]["content"]
    assert off.stop() == 0


def test_other_form_is_content(serve, trained):
    """A parser that does not know the model's form: nothing is lost, nothing fails."""
    hermes = serve("--tool-call-parser", "hermes")
    body = {"messages": [{"role": "user", "content": CASES[0][0]}], "tools": CHAT_TOOLS, "temperature": 0, "max_tokens": 200}
    choice = hermes.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
    assert "tool_calls" not in choice["message"]
    assert hermes.stop() == 0


def test_random_weights_never_fail(server, model):
    """Hot sampling makes malformed calls; whatever comes is an answer."""
    for seed in range(12):
        body = {"model": model, "messages": [{"role": "user", "content": CASES[0][0]}], "tools": CHAT_TOOLS, "temperature": 3,
                "seed": seed, "max_tokens": 60, "skip_special_tokens": False}
        reply = server.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        message = reply.json()["choices"][0]["message"]
        events = stream(server, "/v1/chat/completions", body)
        content, calls = "", {}
        for event in events[:-1]:
            delta = event["choices"][0]["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                entry = calls.setdefault(call["index"], ["", ""])
                entry[0] += call["function"].get("name", "")
                entry[1] += call["function"].get("arguments", "")
        assert content == (message["content"] or "")
        whole = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])]
        assert [calls[i] for i in sorted(calls)] == whole
        for _, arguments in whole:
            assert isinstance(json.loads(arguments), dict)


FORCED_TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in FORCED_SCHEMAS.items()]


@pytest.mark.parametrize("extra", [None, THINKING_OFF, {"separate_reasoning": False}])
@pytest.mark.parametrize("temperature, seed", [(0, 1), (1.5, 2), (1.5, 3)])
def test_forced_calls(client, model, extra, temperature, seed):
    """A grammar behind the thinking: at least one call, arguments that fit the schema, nothing else."""
    pytest.importorskip("llguidance")
    options = {"tools": FORCED_TOOLS, "tool_choice": "required", "max_tokens": 600, "temperature": temperature, "seed": seed,
               "parallel_tool_calls": False}
    choice = ask(client, model, "Pick one.", extra=extra, **options).choices[0]
    if choice.finish_reason == "length":  # hot sampling may never end the thinking
        assert temperature > 0 and not choice.message.tool_calls
        return
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = calls_of(choice.message)
    assert len(calls) == 1
    jsonschema.validate(calls[0][1], FORCED_SCHEMAS[calls[0][0]])
    content, streamed, finish = assemble(ask(client, model, "Pick one.", extra=extra, stream=True, **options))
    assert [(name, json.loads(arguments)) for _, name, arguments in streamed] == calls
    assert (content, finish) == ("", "tool_calls")


@pytest.mark.parametrize("name", FORCED_SCHEMAS)
def test_named_call(client, model, name):
    pytest.importorskip("llguidance")
    choice = ask(client, model, "Pick one.", tools=FORCED_TOOLS, extra=THINKING_OFF, parallel_tool_calls=False,
                 tool_choice={"type": "function", "function": {"name": name}}).choices[0]
    calls = calls_of(choice.message)
    assert [c[0] for c in calls] == [name]
    jsonschema.validate(calls[0][1], FORCED_SCHEMAS[name])


def test_one_call_of_a_named_function(client, model):
    """Whatever parallel_tool_calls says: the list ends behind the first."""
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}]
    for seed in range(4):
        choice = ask(client, model, "Pick one.", tools=tools, extra=THINKING_OFF, temperature=1, seed=seed, parallel_tool_calls=True,
                     tool_choice={"type": "function", "function": {"name": "now"}}).choices[0]
        assert (calls_of(choice.message), choice.finish_reason, choice.message.content) == ([("now", {})], "tool_calls", None)


@pytest.mark.parametrize("extra", [{}, {"stop": ["name"]}, {"stop": ["size"], "n": 2}])
def test_cut_list_of_forced_calls(client, model, extra):
    """What is left of a list that was cut, or of what stood between two calls, is no content."""
    pytest.importorskip("llguidance")
    for n in (1, 4, 9, 14, 19, 24, 31, 40):
        options = {"tools": FORCED_TOOLS, "tool_choice": "required", "max_tokens": n, "extra": THINKING_OFF, **extra}
        choice = ask(client, model, "Pick one.", **options).choices[0]
        assert not choice.message.content and choice.message.model_extra["reasoning_content"] is None
        content, calls, finish = assemble(c for c in ask(client, model, "Pick one.", stream=True, **options) if c.choices[0].index == 0)
        assert (content, finish) == ("", choice.finish_reason)
        assert [(name, json.loads(arguments)) for _, name, arguments in calls] == calls_of(choice.message)


def test_forced_calls_of_the_trained_model(client, model, trained):
    """Several calls may come; each fits."""
    pytest.importorskip("llguidance")
    choice = ask(client, model, "Pick one.", tools=FORCED_TOOLS, tool_choice="required", max_tokens=400).choices[0]
    for name, arguments in calls_of(choice.message)[:-1]:
        jsonschema.validate(arguments, FORCED_SCHEMAS[name])
    assert choice.message.tool_calls


@pytest.mark.parametrize("fields, field", [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": FORCED_TOOLS, "tool_choice": "all"}, "tool_choice"),
    ({"tools": FORCED_TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
    ({"tools": FORCED_TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": FORCED_TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "x": {"type": "nothing"}}}}}], "tool_choice": "required"}, "tool_choice"),
])
def test_bad_choice(server, model, fields, field):
    pytest.importorskip("llguidance")
    reply = server.post("/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field
    assert field in reply.json()["error"]["message"]


def test_unknown_parser(serve):
    server = serve("--tool-call-parser", "pigeon", wait=False)
    assert server.process.wait(60) != 0
    server.reader.join(5)
    assert "pigeon" in server.log and "glm47" in server.log
