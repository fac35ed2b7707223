"""Many at once, and for long."""

import concurrent.futures
import json
import pathlib
import time

import httpx
import pytest
from api_server import stream

pytestmark = pytest.mark.runners


def test_64_streams(server, model, sanitized):
    """Every stream gets, token by token, what its request gets alone."""
    n = 16 if sanitized else 64
    bodies = [{"model": model, "prompt": [10 + i, 300 + 7 * i, 5] * (1 + i % 7), "max_tokens": 24, "ignore_eos": True, "seed": i,
               "temperature": i % 3 * 0.6, "logprobs": 0} for i in range(n)]

    def tokens(body):
        events = stream(server, "/v1/completions", body)
        assert events[-1] == "[DONE]"
        choices = [e["choices"][0] for e in events[:-1]]
        assert choices[-1]["finish_reason"] == "length"
        return [(t, v) for c in choices if c["logprobs"]
                for t, v in zip(c["logprobs"]["tokens"], c["logprobs"]["token_logprobs"])]

    alone = [tokens(body) for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        together = list(pool.map(tokens, bodies))
    assert together == alone
    assert all(len(t) == 24 for t in alone)


def test_streaming_costs_no_threads(server, model):
    status = pathlib.Path(f"/proc/{server.process.pid}/status")

    def threads():
        return int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("Threads:")))

    before = threads()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(stream, server, "/v1/completions", {"prompt": "x", "max_tokens": 60, "ignore_eos": True}) for _ in range(16)]
        during = threads()
        for job in jobs:
            job.result()
    assert during == before


def memory_kb(server):
    fields = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{server.process.pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) + int(fields["VmSwap"].split()[0])


def test_memory_per_request(serve, sanitized):
    """C76, short form."""
    if sanitized:
        pytest.skip("sanitizers keep freed memory")
    server = serve()
    body = {"messages": [{"role": "user", "content": "What is 3+5?"}], "max_tokens": 2}
    sizes = []
    with httpx.Client(timeout=60) as http:
        for i in range(600):
            kind = {"stream": True} if i % 2 else {}
            assert http.post(server.url + "/v1/chat/completions", json={**body, **kind}).status_code == 200
            if i >= 200 and i % 100 == 0:
                sizes.append(memory_kb(server))
    assert (sizes[-1] - sizes[0]) / 300 < 20, sizes
    assert server.stop() == 0


def test_text_work_does_not_grow(server, limit, sanitized):
    """C77: the cost of a streamed event is the same at the end of a long answer. Measured as the server's own work per event,
    so attention over a longer context is left out: the bytes of an event do not grow, and one event comes per token."""
    n = min(limit - 10, 400 if sanitized else 1500)
    events = stream(server, "/v1/completions", {"prompt": "x", "max_tokens": n, "ignore_eos": True,
                                                "stream_options": {"include_usage": True}})
    assert events[-2]["usage"]["completion_tokens"] == n
    sizes = [len(json.dumps(e)) for e in events[:-2]]
    tenth = max(1, len(sizes) // 10)
    assert sum(sizes[-tenth:]) / tenth < 1.3 * sum(sizes[:tenth]) / tenth + 40


def test_chunks_and_tokens(server):
    """C80, C81: usage counts tokens, however many a chunk carries."""
    events = stream(server, "/v1/completions", {"prompt": "x", "max_tokens": 40, "ignore_eos": True, "logprobs": 0,
                                                "stream_options": {"include_usage": True}})
    tokens = sum(len(e["choices"][0]["logprobs"]["tokens"]) for e in events[:-2] if e["choices"][0]["logprobs"])
    assert tokens == events[-2]["usage"]["completion_tokens"] == 40


def test_overhead_is_small(serve, sanitized):
    """Requests of one token on one connection: what a request costs beside its one or two steps of the engine stays small. The
    bound is loose; the figures are in bench/."""
    if sanitized:
        pytest.skip("sanitizers")
    server = serve()
    body = {"prompt": [5], "max_tokens": 1}
    with httpx.Client(timeout=60) as http:
        for _ in range(20):
            http.post(server.url + "/v1/completions", json=body)
        times = []
        for _ in range(100):
            begin = time.perf_counter()
            assert http.get(server.url + "/v1/models").status_code == 200
            times.append(time.perf_counter() - begin)
    assert sorted(times)[50] < 0.02
    assert server.stop() == 0
