"""Every allocation of a request made to fail in turn: the client gets an error or its answer, the server lives and answers the next
request with the same tokens.

The short form takes a step between the numbers, so that it ends within a minute; --long tries each. Covered is what goes through
base/mem.h: nibble's own memory and jansson's. libmicrohttpd takes a pool of its own per connection, PCRE2 and the embedded Python
have their own heaps; they are not made to fail here. Needs a build with a sanitizer, where heap.c can be told by another process.
"""

import json
import mmap
import struct

import httpx
import pytest

CHAT = [{"role": "system", "content": "Be brief. \u20ac \U0001f642"},
        {"role": "user", "content": [{"type": "text", "text": "What is 3+5? " + "This is a long sentence. " * 8}]}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of a city",
                                         "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
BASE = {"temperature": 0, "max_tokens": 6}
CASES = {
    "completions": ("/v1/completions", {**BASE, "prompt": ["Once upon", "a time"], "n": 2, "logprobs": 2, "stop": ["zebra"], "echo": True}),
    "completions-stream": ("/v1/completions", {**BASE, "prompt": "Once \\u0041 upon", "stream": True, "stream_options": {"include_usage": True}}),
    "chat": ("/v1/chat/completions", {**BASE, "messages": CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat-stream": ("/v1/chat/completions", {**BASE, "messages": CHAT, "stream": True}),
    "chat-tools": ("/v1/chat/completions", {**BASE, "max_tokens": 24, "messages": CHAT, "tools": [TOOL],
                                            "chat_template_kwargs": {"enable_thinking": False}}),
    "responses": ("/v1/responses", {"temperature": 0, "max_output_tokens": 6, "input": "Hello", "instructions": "Be brief.",
                                    "tools": [{"type": "function", **TOOL["function"]}], "stream": True}),
    "messages": ("/v1/messages", {**BASE, "system": "Be brief.", "messages": [{"role": "user", "content": "Hello"}], "stream": True,
                                  "tools": [{"name": "weather", "input_schema": {"type": "object"}}]}),
}


class Faults:
    """The two counters that heap.c shares: which allocation fails, and how many there were."""

    def __init__(self, path):
        path.write_bytes(struct.pack("qq", -1, 0))
        self.file = open(path, "r+b")
        self.memory = mmap.mmap(self.file.fileno(), 16)

    def fail_after(self, n):
        self.memory[:8] = struct.pack("q", n)

    @property
    def pending(self):
        return struct.unpack("q", self.memory[:8])[0] >= 0

    @property
    def count(self):
        return struct.unpack("q", self.memory[8:])[0]


@pytest.fixture(scope="module")
def faults(sanitized, tmp_path_factory):
    if not sanitized:
        pytest.skip("needs a build with a sanitizer")
    return Faults(tmp_path_factory.mktemp("faults") / "heap")


@pytest.fixture(scope="module")
def server(serve, faults):
    server = serve("--log-level", "error", env={"NIBBLE_FAULT_FILE": faults.file.name})
    yield server
    faults.fail_after(-1)
    assert server.process.poll() is None, server.log[-8000:]
    assert server.stop() == 0, server.log[-8000:]
    assert "Sanitizer" not in server.log and "runtime error" not in server.log, server.log[-8000:]


def essence(value):
    """What must be the same every time: everything but identities and times."""
    if isinstance(value, dict):
        drop = ("id", "created", "created_at", "item_id", "response_id", "call_id", "prompt_tokens_details", "cached_tokens",
                "input_tokens_details", "cache_read_input_tokens", "input_tokens")
        return {k: essence(v) for k, v in value.items() if k not in drop}
    return [essence(v) for v in value] if isinstance(value, list) else value


def text_of(events):
    """The deltas of a stream joined, however they were cut into events."""
    parts = []
    for e in events:
        if not isinstance(e, dict):
            continue
        for c in e.get("choices", []):
            d = c.get("delta", {})
            parts.append(c.get("text") or d.get("content") or d.get("reasoning_content") or "")
        d = e.get("delta")
        parts.append(d if isinstance(d, str) else (d.get("text") or d.get("thinking") or "") if isinstance(d, dict) else "")
    return "".join(parts)


def send(server, path, body):
    """("answer", what), ("error", status) or ("cut", why)."""
    try:
        reply = httpx.post(server.url + path, json=body, timeout=20)
    except httpx.TimeoutException:
        return "error", (0, "no answer for 20 s")
    except httpx.TransportError as e:
        return "cut", str(e)
    if reply.status_code != 200:
        return "error", (reply.status_code, reply.json()["error"]["message"])
    if not body.get("stream"):
        return "answer", essence(reply.json())
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    events = [line if line == "[DONE]" else json.loads(line) for line in lines]
    if any(isinstance(e, dict) and (e.get("error") or e.get("type") in ("error", "response.failed")) for e in events):
        return "error", (500, "")
    last = events[-1] if events else None
    assert last == "[DONE]" or (isinstance(last, dict) and last.get("type") in ("response.completed", "response.incomplete", "message_stop")), (
        f"a stream without an end: {reply.text[-300:]}")
    return "answer", text_of(events)


@pytest.mark.parametrize("case", CASES)
def test_every_allocation(server, faults, case, request):
    path, body = CASES[case]
    for _ in range(3): # caches fill
        kind, right = send(server, path, body)
        assert kind == "answer", right
    before = faults.count
    assert send(server, path, body) == ("answer", right)
    n = faults.count - before
    assert n > 20, "the counters are not those of the server"
    step = 1 if request.config.getoption("--long") else max(1, n // 24)
    seen = {"answer": 0, "error": 0, "cut": 0}
    wrong = []
    for k in range(0, n, step):
        faults.fail_after(k)
        kind, what = send(server, path, body)
        faults.fail_after(-1)
        assert server.process.poll() is None, f"allocation {k} of {n}: the server is gone\n{server.log[-8000:]}"
        if (kind == "answer" and what != right) or (kind == "error" and what[0] < 500):
            wrong.append((k, what))
        seen[kind] += 1
        if k // step % 6 == 0:
            assert send(server, path, body) == ("answer", right), f"after allocation {k} of {n}"
    assert not wrong, f"of {n} allocations: {wrong}"
    server.wait_idle(5)
    assert send(server, path, body) == ("answer", right)
    assert seen["error"] > seen["cut"], seen # most failures are told
    print(f"{case}: {n} allocations, {seen}")
