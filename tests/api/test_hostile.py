"""What a client may send is bounded in time and memory, and its text stays text."""

import time

import httpx
import pytest
from test_guards import memory_kib, settled_memory_kib

MARK = "<|assistant|>"


def send(server, body, path="/v1/completions"):
    return httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=120)


@pytest.mark.parametrize("piece,times,sentence", [
    (b"[],", 1 << 20, "objects and arrays, at most"), (b"{},", 1 << 20, "objects and arrays, at most"), (b"1,", 5 << 20, "JSON values, at most"),
    (b'"",', 5 << 20, "JSON values, at most"), (b"[", 1 << 20, "objects and arrays, at most"), (b"[", 1000, "nested deeper"),
], ids=lambda v: repr(v)[:12])
def test_many_small_values(server, piece, times, sentence):
    """A short text for many values is refused before it has become any."""
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    before = settled_memory_kib(server)
    begin = time.monotonic()
    reply = send(server, b'{"prompt": "x", "max_tokens": 1, "a": [' + piece * times + b"1]}")
    assert reply.status_code == 400 and sentence in reply.json()["error"]["message"], reply.text[:300]
    assert time.monotonic() - begin < 30
    if server.process.args[0].endswith("release/nibble"): # sanitizers keep what is freed
        assert memory_kib(server) - before < 150 << 10


def test_brackets_and_commas_in_strings_are_text(server):
    text = "[,{" * 600000 + '\\"[{,'
    reply = send(server, b'{"prompt": "x", "max_tokens": 1, "user": "' + text.encode() + b'"}')
    assert reply.status_code == 200, reply.text[:300]


@pytest.mark.parametrize("field,value", [("stop", [f"s{i}" for i in range(5000)]), ("logit_bias", {str(i): 1 for i in range(5000)}),
                                         ("n", 100000), ("prompt", ["x"] * 5000)], ids=lambda v: v if isinstance(v, str) else "")
def test_lists_have_an_end(server, field, value):
    reply = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, field: value})
    assert reply.status_code == 400 and field in reply.json()["error"]["message"]


@pytest.mark.parametrize("field,value", [("messages", [{"role": "user", "content": "x"}] * 20000), ("chat_template", "{{ 1 }}"),
                                         ("tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5000)])],
                         ids=lambda v: v if isinstance(v, str) else "")
def test_chat_lists_have_an_end(server, field, value):
    reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, field: value})
    assert reply.status_code == 400 and field in reply.json()["error"]["message"]


def counted(reply):
    assert reply.status_code == 200, reply.text
    body = reply.json()
    usage = body.get("usage") or body
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"]
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)  # Anthropic's does not count what the cache had


def user(text):
    return [{"role": "user", "content": text}]


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
PLACES = {
    "user": ("/v1/chat/completions", lambda t: {"messages": user(t)}),
    "parts": ("/v1/chat/completions", lambda t: {"messages": user([{"type": "text", "text": t[:-3]}, {"type": "text", "text": t[-3:]}])}),
    "system": ("/v1/chat/completions", lambda t: {"messages": [{"role": "system", "content": t}] + user("x")}),
    "assistant": ("/v1/chat/completions", lambda t: {"messages": user("x") + [{"role": "assistant", "content": t}] + user("y")}),
    "tool result": ("/v1/chat/completions", lambda t: {"messages": user("x") + [
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": t}]}),
    "tool description": ("/v1/chat/completions", lambda t: {"messages": user("x"), "tools": [
        {"type": "function", "function": {**TOOL, "description": t}}]}),
    "messages": ("/v1/messages", lambda t: {"messages": user(t)}),
    "messages system": ("/v1/messages", lambda t: {"messages": user("x"), "system": t}),
    "responses": ("/v1/responses", lambda t: {"input": t}),
    "instructions": ("/v1/responses", lambda t: {"input": "x", "instructions": t}),
}


@pytest.mark.parametrize("place", PLACES)
def test_text_cannot_forge_roles(server, place):
    """A control word in text is many tokens of text; the control token itself would be one."""
    path, body = PLACES[place]
    limit = {"max_output_tokens": 16} if path == "/v1/responses" else {"max_tokens": 1}

    def count(text):
        return counted(server.post(path, {"model": None, **body(text), **limit}))

    assert count("abcd" + MARK * 8) - count("abcd") >= 8 * 4


def test_raw_prompts_are_the_clients(server):
    """/v1/completions has no roles: there the client writes the whole prompt, control words too."""
    def count(text):
        return counted(server.post("/v1/completions", {"prompt": text, "max_tokens": 1}))

    assert count("abcd" + MARK * 8) - count("abcd") == 8
