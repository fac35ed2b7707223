"""/v1/chat/completions through the openai client."""

import pytest
from api_server import stream

pytestmark = pytest.mark.runners

ASK = [{"role": "user", "content": "What is 3+5?"}]
OPEN = {"ignore_eos": True}


def chat(client, model, messages=ASK, max_tokens=24, extra=None, **kwargs):
    return client.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens,
                                          **{"temperature": 0, **kwargs}, extra_body={**OPEN, **(extra or {})})


def text_of(message):
    """Reasoning and content, as two strings."""
    return message.model_extra.get("reasoning_content") or "", message.content or ""


def assemble(chunks):
    """(reasoning, content, finish_reason, role) per choice of a stream."""
    parts = {}
    for chunk in chunks:
        for c in chunk.choices:
            reasoning, content, finish, role = parts.get(c.index, ("", "", None, None))
            extra = c.delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content"), "both names, the same text"
            parts[c.index] = (reasoning + (extra.get("reasoning_content") or ""), content + (c.delta.content or ""),
                              c.finish_reason or finish, c.delta.role or role)
    return parts


def prompt_tokens(server, model, messages, **fields):
    """Length of a rendered prompt."""
    reply = server.post("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 1, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["prompt_tokens"]


def test_shape(client, model):
    reply = chat(client, model)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == model
    message = reply.choices[0].message
    assert message.role == "assistant"
    assert message.content is not None
    assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"]
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 24


def test_thinking_on_and_off(client, model):
    """C33: with thinking off there is no reasoning and the answer is content."""
    off = chat(client, model, extra={"chat_template_kwargs": {"enable_thinking": False}})
    assert off.choices[0].message.model_extra["reasoning_content"] is None
    assert off.choices[0].message.content
    assert off.usage.completion_tokens_details.reasoning_tokens == 0
    on = chat(client, model, max_tokens=4, extra={"chat_template_kwargs": {"enable_thinking": True}})
    assert on.choices[0].message.model_extra["reasoning_content"]


@pytest.mark.parametrize("extra", [{"enable_thinking": False}, {"thinking": {"type": "disabled"}}])
def test_other_switches(client, model, extra):
    want = chat(client, model, extra={"chat_template_kwargs": {"enable_thinking": False}})
    assert chat(client, model, extra=extra).choices[0].message.content == want.choices[0].message.content


def test_effort_none(client, server, model):
    """reasoning_effort none turns thinking off, as in OpenAI's API; what says so itself wins."""
    off = chat(client, model, extra={"chat_template_kwargs": {"enable_thinking": False}})
    none = chat(client, model, reasoning_effort="none")
    assert text_of(none.choices[0].message) == text_of(off.choices[0].message) and none.usage == off.usage
    counts = {}
    for name, more in (("on", {}), ("off", {"enable_thinking": False}), ("none", {"reasoning_effort": "none"}),
                       ("both", {"reasoning_effort": "none", "enable_thinking": True})):
        body = {"messages": [{"role": "user", "content": "hi"}], **more}
        counts[name] = server.post("/tokenize", body).json()["tokens"]
    assert counts["none"] == counts["off"] != counts["on"] == counts["both"]


def test_refusal_is_text(server):
    """What OpenAI's assistant has refused comes back as a part of its own kind."""
    def tokens(content):
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}, {"role": "user", "content": "y"}]
        reply = server.post("/tokenize", {"messages": turns})
        return reply.json().get("tokens") or reply.json()["error"]["param"]

    assert tokens([{"type": "refusal", "refusal": "No. Not"}, {"type": "text", "text": " that."}]) == tokens("No. Not that.")
    assert tokens([{"type": "refusal", "text": "x"}]) == "messages[1].content[0].refusal"


@pytest.mark.parametrize("extra", [{}, {"chat_template_kwargs": {"enable_thinking": False}}, {"separate_reasoning": False}])
def test_stream_equals_plain(client, model, extra):
    plain = chat(client, model, max_tokens=60, extra=extra)
    chunks = list(chat(client, model, max_tokens=60, extra=extra, stream=True))
    reasoning, content, finish, role = assemble(chunks)[0]
    assert (reasoning, content) == text_of(plain.choices[0].message)
    assert finish == plain.choices[0].finish_reason
    assert role == "assistant"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == finish
    assert all(c.object == "chat.completion.chunk" for c in chunks)


def test_unseparated_is_the_same_text(client, model):
    apart = chat(client, model, max_tokens=60)
    together = chat(client, model, max_tokens=60, extra={"separate_reasoning": False})
    reasoning, content = text_of(apart.choices[0].message)
    assert together.choices[0].message.model_extra["reasoning_content"] is None
    assert together.choices[0].message.content in (reasoning + "</think>" + content, reasoning, reasoning + content)


def test_reasoning_left_out(client, model):
    apart = chat(client, model, max_tokens=60)
    chunks = list(chat(client, model, max_tokens=60, stream=True, extra={"stream_reasoning": False}))
    thoughts = [t for c in chunks if (t := (c.choices[0].delta.model_extra or {}).get("reasoning_content"))]
    content = [c.choices[0].delta.content for c in chunks if c.choices[0].delta.content]
    split = chat(client, model, max_tokens=60).choices[0].message
    assert thoughts == [split.model_extra["reasoning_content"]] and "".join(content) == (split.content or "")
    short = chat(client, model, max_tokens=60, extra={"include_reasoning": False})
    assert short.choices[0].message.model_extra["reasoning_content"] is None
    assert short.choices[0].message.content == apart.choices[0].message.content


def test_usage_in_stream(client, model):
    chunks = list(chat(client, model, max_tokens=5, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_reasoning_counts_as_tokens(client, model):
    """C79: an answer that is cut inside the thinking has its tokens counted."""
    chunks = list(chat(client, model, max_tokens=3, stream=True, stream_options={"include_usage": True},
                       extra={"chat_template_kwargs": {"enable_thinking": True}}))
    assert chunks[-1].usage.completion_tokens == 3
    reasoning, content, finish, _ = assemble(chunks)[0]
    assert reasoning and not content and finish == "length"
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 3


def test_no_usage_chunk_unasked(server, model):
    events = stream(server, "/v1/chat/completions", {"model": model, "messages": ASK, "max_tokens": 4})
    assert events[-1] == "[DONE]"
    assert all(e["choices"] for e in events[:-1])
    assert events[-2]["choices"][0]["finish_reason"]


def test_n(client, model):
    reply = chat(client, model, n=3, temperature=1, seed=2)
    assert [c.index for c in reply.choices] == [0, 1, 2]
    texts = [text_of(c.message) for c in reply.choices]
    chunks = list(chat(client, model, n=3, temperature=1, seed=2, stream=True))
    streamed = assemble(chunks)
    assert [streamed[i][:2] for i in range(3)] == texts
    again = chat(client, model, n=3, temperature=1, seed=2)
    assert [text_of(c.message) for c in again.choices] == texts


def test_logprobs(client, model):
    reply = chat(client, model, max_tokens=8, logprobs=True, top_logprobs=4)
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-4)
        values = [t.logprob for t in entry.top_logprobs]
        assert values == sorted(values, reverse=True)


def test_logprob_bytes(client, model):
    """C40: bytes of tokens that are parts of characters, where they come up; joined they are the text."""
    reply = chat(client, model, [{"role": "user", "content": "é€😀 " * 6}], max_tokens=80, temperature=1.6, seed=1, logprobs=True,
                 extra={"chat_template_kwargs": {"enable_thinking": False}, "skip_special_tokens": False})
    data = b"".join(bytes(e.bytes) for e in reply.choices[0].logprobs.content)
    assert data.decode("utf-8", "replace") == reply.choices[0].message.content
    for entry in reply.choices[0].logprobs.content:
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token


def test_logprobs_in_stream(client, model):
    plain = chat(client, model, max_tokens=12, logprobs=True, top_logprobs=2)
    chunks = list(chat(client, model, max_tokens=12, logprobs=True, top_logprobs=2, stream=True))
    entries = [e for c in chunks for x in c.choices if x.logprobs for e in x.logprobs.content]
    assert [e.token for e in entries] == [e.token for e in plain.choices[0].logprobs.content]
    assert [len(e.top_logprobs) for e in entries] == [2] * 12


def test_logprobs_without_top(client, model):
    reply = chat(client, model, max_tokens=2, logprobs=True)
    assert [e.top_logprobs for e in reply.choices[0].logprobs.content] == [[], []]


def test_newer_name_of_limit(client, model):
    reply = client.chat.completions.create(model=model, messages=ASK, max_completion_tokens=7, extra_body=OPEN)
    assert reply.usage.completion_tokens == 7
    assert reply.choices[0].finish_reason == "length"


def test_stop_string(client, model):
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    text = chat(client, model, max_tokens=40, extra=extra).choices[0].message.content
    stop = text[6:12]
    reply = chat(client, model, max_tokens=40, extra=extra, stop=[stop])
    assert reply.choices[0].message.content == text[:text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    chunks = list(chat(client, model, max_tokens=40, extra=extra, stop=[stop], stream=True))
    assert assemble(chunks)[0][1] == text[:text.index(stop)]


# ---------------------------------------------------------------- messages


def test_content_parts(server, model):
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "3+5?"}]}]
    body = {"model": model, "max_tokens": 12, "temperature": 0}
    a = server.post("/v1/chat/completions", {**body, "messages": ASK}).json()
    b = server.post("/v1/chat/completions", {**body, "messages": parts}).json()
    assert a["usage"] == b["usage"]
    assert a["choices"] == b["choices"]


def test_developer_is_system(server, model):
    def ask(role):
        messages = [{"role": role, "content": "Be short."}, *ASK]
        body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}
        return server.post("/v1/chat/completions", body).json()

    assert ask("developer")["choices"] == ask("system")["choices"]
    assert ask("system")["usage"]["prompt_tokens"] > prompt_tokens(server, model, ASK)


CALL = {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Lund","days":2}'}}


def history(**changes):
    return [*ASK, {"role": "assistant", "content": "", "tool_calls": [CALL], **changes},
            {"role": "tool", "tool_call_id": "call_a", "content": "7 C, rain"}]


def test_arguments_string_or_object(server, model):
    """C23."""
    as_object = {**CALL, "function": {**CALL["function"], "arguments": {"city": "Lund", "days": 2}}}
    assert prompt_tokens(server, model, history()) == prompt_tokens(server, model, history(tool_calls=[as_object]))


def test_tool_result_as_parts(server, model):
    """C24."""
    parts = history()
    parts[-1] = {**parts[-1], "content": [{"type": "text", "text": "7 C, rain"}]}
    assert prompt_tokens(server, model, parts) == prompt_tokens(server, model, history())


def test_null_content_with_calls(server, model):
    """C25."""
    assert prompt_tokens(server, model, history(content=None)) == prompt_tokens(server, model, history())
    missing = history()
    del missing[1]["content"]
    assert prompt_tokens(server, model, missing) == prompt_tokens(server, model, history())


def test_reasoning_of_earlier_turns(server, model):
    """Both names of earlier thinking reach the template."""
    kept = {"chat_template_kwargs": {"clear_thinking": False}}
    turns = [[*ASK, {"role": "assistant", "content": "8", name: "three and five"}, *ASK] for name in ("reasoning", "reasoning_content")]
    counts = [prompt_tokens(server, model, t, **kept) for t in turns]
    assert counts[0] == counts[1] > prompt_tokens(server, model, [*ASK, {"role": "assistant", "content": "8"}, *ASK], **kept)


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "a < b & 'c'",
                                           "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]


def test_tools_are_declared(server, model):
    plain = prompt_tokens(server, model, ASK)
    assert prompt_tokens(server, model, ASK, tools=TOOLS) > plain
    assert prompt_tokens(server, model, ASK, tools=TOOLS, tool_choice="auto") > plain
    assert prompt_tokens(server, model, ASK, tools=TOOLS, tool_choice="none") == plain
    assert prompt_tokens(server, model, ASK, tools=[]) == plain


def test_control_words_in_user_text(server, model):
    """C19: a spelled role marker is text, so the prompt is longer than with the marker's id."""
    base = prompt_tokens(server, model, [{"role": "user", "content": "please repeat ok verbatim"}])
    spelled = prompt_tokens(server, model, [{"role": "user", "content": "please repeat <|assistant|>ok<|user|> verbatim"}])
    assert spelled > base + 2


def test_effort_reaches_the_template(serve, tmp_path):
    template = tmp_path / "effort.jinja"
    template.write_text("{{ 'word ' * 40 if reasoning_effort is defined and reasoning_effort == 'high' else 'x' }}"
                        "{{ messages[0].content }}")
    server = serve("--chat-template", str(template))
    body = {"messages": ASK, "max_tokens": 1}
    low = server.post("/v1/chat/completions", {**body, "reasoning_effort": "low"}).json()
    high = server.post("/v1/chat/completions", {**body, "reasoning_effort": "high"}).json()
    assert high["usage"]["prompt_tokens"] > low["usage"]["prompt_tokens"] + 30
    assert server.stop() == 0


def test_template_error(serve, tmp_path):
    """C29: the template's own sentence, as the client's error; the next request works."""
    template = tmp_path / "strict.jinja"
    template.write_text("{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
                        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}")
    server = serve("--chat-template", str(template))
    bad = server.post("/v1/chat/completions", {"messages": ASK + ASK, "max_tokens": 1})
    assert bad.status_code == 400
    assert "roles must alternate" in bad.json()["error"]["message"]
    assert server.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 1}).status_code == 200
    assert server.stop() == 0


def test_date_and_loop_controls(serve, tmp_path):
    """C26, C28: what is rendered is seen through the echo of its length."""
    template = tmp_path / "loop.jinja"
    template.write_text("{%- for m in messages %}{%- if m.role == 'tool' %}{%- continue %}{%- endif %}{{ m.role[0] }}"
                        "{%- if loop.index == 3 %}{%- break %}{%- endif %}{%- endfor %}{{ strftime_now('%Y-%m-%d') }}")
    server = serve("--chat-template", str(template))
    messages = [{"role": r, "content": "x"} for r in ("system", "user", "tool", "user")]
    reply = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert reply.status_code == 200, reply.text
    assert server.stop() == 0
