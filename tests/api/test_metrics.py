"""/metrics in Prometheus' text form, its figures against what the clients were sent, and the dashboard made of it."""

import concurrent.futures
import json
import re
import threading
import time

import httpx
import pytest
from api_server import stream
from prometheus_client.parser import text_string_to_metric_families


def scrape(server):
    """{family: {(sample name, labels without model_name): value}} of one reply."""
    reply = server.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.text.endswith("\n")
    families = {}
    for family in text_string_to_metric_families(reply.text):
        assert family.name not in families, f"{family.name} comes twice"
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family
        families[family.name] = {(s.name, tuple(sorted((k, v) for k, v in s.labels.items() if k != "model_name"))): s.value
                                 for s in family.samples}
    return families


class Figures:
    """What changed since begin()."""

    def __init__(self, server):
        self.server = server
        self.before = self.flat()

    def flat(self):
        return {key: value for family in scrape(self.server).values() for key, value in family.items()}

    def of(self, name, **labels):
        key = (f"nibble:{name}", tuple(sorted(labels.items())))
        return self.now[key] - self.before.get(key, 0)

    def settle(self, done, seconds=10):
        """Reads until done(self): the last step counts its tokens just after it has handed them out."""
        end = time.monotonic() + seconds
        while True:
            self.now = self.flat()
            if done(self) or time.monotonic() > end:
                return self
            time.sleep(0.02)


def ended(n):
    return lambda f: sum(f.of("request_success_total", finished_reason=r) for r in ("stop", "length", "abort", "error")) >= n


@pytest.fixture(scope="module")
def mserver(serve):
    server = serve("--max-running-requests", "4")
    yield server
    assert server.stop() == 0


def check_histogram(figures, name, count, total=None):
    buckets = sorted((float(dict(labels)["le"]), value) for (n, labels), value in figures.now.items()
                     if n == f"nibble:{name}_bucket")
    values = [v for _, v in buckets]
    assert buckets[-1][0] == float("inf") and values == sorted(values), name
    assert values[-1] == figures.now[(f"nibble:{name}_count", ())]
    assert figures.of(f"{name}_count") == count, name
    if total is not None:
        assert figures.of(f"{name}_sum") == pytest.approx(total), name


def test_counts_are_what_clients_got(mserver):
    """Streams, whole replies, n, several prompts, thinking, one token: every figure equals the sum of usages."""
    figures = Figures(mserver)
    bodies = [("/v1/completions", {"prompt": "Once upon", "max_tokens": 1 + i, "ignore_eos": True, "stream": i % 2 == 0,
                                   "stream_options": {"include_usage": True} if i % 2 == 0 else None}) for i in range(6)]
    bodies += [("/v1/completions", {"prompt": ["Once", "There was"], "n": 2, "max_tokens": 5, "ignore_eos": True})]
    bodies += [("/v1/chat/completions", {"messages": [{"role": "user", "content": f"What is {i}+5?"}], "max_tokens": 30}) for i in range(4)]
    bodies += [("/v1/completions", {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 1})]

    def send(item):
        path, body = item
        if body.get("stream"):
            last = stream(mserver, path, body)[-2]
            return last["usage"], ["length"]
        reply = mserver.post(path, body).json()
        return reply["usage"], [c["finish_reason"] for c in reply["choices"]]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(send, bodies))
    usages = [u for u, _ in answers]
    reasons = [r for _, rs in answers for r in rs]
    requests = 6 + 4 + 4 + 1
    assert len(reasons) == requests
    figures.settle(ended(requests))
    completion = sum(u["completion_tokens"] for u in usages)
    prompt = sum(u["prompt_tokens"] for u in usages) + usages[6]["prompt_tokens"]  # n = 2: each prompt twice
    assert usages[-1]["completion_tokens"] == 0
    assert figures.of("generation_tokens_total") == completion
    assert figures.of("prompt_tokens_total") == figures.of("prefix_cache_queries_total") == prompt
    assert figures.of("cached_tokens_total") == figures.of("prefix_cache_hits_total")
    assert figures.of("reasoning_tokens_total") == sum(u["completion_tokens_details"]["reasoning_tokens"] for u in usages)
    for reason in ("stop", "length"):
        assert figures.of("request_success_total", finished_reason=reason) == reasons.count(reason)
    assert figures.of("num_requests_total") == requests
    check_histogram(figures, "time_to_first_token_seconds", requests - 1)
    check_histogram(figures, "inter_token_latency_seconds", completion - (requests - 1))
    check_histogram(figures, "e2e_request_latency_seconds", requests)
    check_histogram(figures, "queue_time_seconds", requests)
    check_histogram(figures, "request_prompt_tokens", requests, prompt)
    check_histogram(figures, "request_generation_tokens", requests, completion)
    decode = figures.of("request_decode_time_seconds_sum")
    assert figures.of("inter_token_latency_seconds_sum") == pytest.approx(decode, abs=1e-5)
    whole = figures.of("request_inference_time_seconds_sum")
    assert whole == pytest.approx(figures.of("request_prefill_time_seconds_sum") + decode, abs=1e-5)
    assert figures.of("e2e_request_latency_seconds_sum") >= whole


def test_cached_prompt(mserver):
    figures = Figures(mserver)
    ids = [7 + i % 50 for i in range(300)]
    usages = [mserver.post("/v1/completions", {"prompt": ids, "max_tokens": 2, "ignore_eos": True}).json()["usage"] for _ in range(2)]
    figures.settle(ended(2))
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert cached == 256
    assert figures.of("cached_tokens_total") == figures.of("prefix_cache_hits_total") == cached
    assert figures.of("prompt_tokens_by_source_total", source="local_cache_hit") == cached
    assert figures.of("prompt_tokens_by_source_total", source="local_compute") == 600 - cached
    assert figures.of("realtime_tokens_total", mode="prefill_compute") == 600 - cached
    check_histogram(figures, "request_prefill_kv_computed_tokens", 2, 600 - cached)
    assert figures.now[("nibble:kv_evictable_tokens", ())] >= 256


def test_aborts_and_gauges(mserver):
    """A client leaves in mid-answer, another from the queue: counted as aborted, in no distribution of whole requests."""
    figures = Figures(mserver)
    body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    looked = threading.Event()

    def leave(_):
        with httpx.stream("POST", mserver.url + "/v1/completions", json=body, timeout=60):
            looked.wait(60)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        left = [pool.submit(leave, i) for i in range(6)]
        end = time.monotonic() + 30
        while time.monotonic() < end and mserver.running() != (4, 2):
            time.sleep(0.01)
        seen = figures.flat()
        looked.set()
        for f in left:
            f.result()
    figures.settle(ended(6))
    assert (seen[("nibble:num_requests_running", ())], seen[("nibble:num_requests_waiting", ())]) == (4, 2)
    assert 0 < seen[("nibble:kv_cache_usage_perc", ())] < 1
    assert figures.of("request_success_total", finished_reason="abort") == figures.of("num_aborted_requests_total") == 6
    check_histogram(figures, "e2e_request_latency_seconds", 0)
    check_histogram(figures, "request_generation_tokens", 0)
    mserver.wait_idle(5)
    assert figures.flat()[("nibble:kv_cache_usage_perc", ())] == 0


def test_http_and_process(mserver):
    figures = Figures(mserver)
    mserver.get("/health")
    mserver.get("/nowhere")
    mserver.post("/v1/completions", {"prompt": 5})
    figures.settle(lambda f: True)
    assert figures.of("http_requests_total", endpoint="/health") == 1
    assert figures.of("http_responses_total", endpoint="other", status_code="404") == 1
    assert figures.of("http_responses_total", endpoint="/v1/completions", status_code="400") == 1
    now = {name: value for (name, _), value in figures.now.items()}
    assert now["process_resident_memory_bytes"] > 1e6 and now["process_open_fds"] > 3 and now["process_threads"] > 3
    assert abs(now["process_start_time_seconds"] - time.time()) < 3600
    assert 0 < now["process_cpu_seconds_total"] < 3600
    assert figures.now[("nibble:server_state", (("state", "ready"),))] == 1


def test_speculation(serve, trained):
    server = serve("--speculative-algorithm", "mtp", "--speculative-num-steps", "3")
    figures = Figures(server)
    usage = server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 64, "ignore_eos": True, "temperature": 0}).json()["usage"]
    figures.settle(ended(1))
    drafts = figures.of("spec_decode_num_drafts_total")
    drafted = figures.of("spec_decode_num_draft_tokens_total")
    accepted = figures.of("spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= drafted <= 3 * drafts
    assert usage["completion_tokens"] == 64 == figures.of("generation_tokens_total")
    places = [figures.of("spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(8)]
    assert sum(places) == accepted and places == sorted(places, reverse=True) and places[0] <= drafts
    check_histogram(figures, "inter_token_latency_seconds", 63)
    time.sleep(2.1)  # two looks of the reporter
    now = figures.flat()
    assert now[("nibble:spec_accept_length", ())] == pytest.approx(1 + accepted / drafts)
    assert now[("nibble:spec_accept_rate", ())] == pytest.approx(accepted / drafted)
    assert now[("nibble:gen_throughput", ())] > 5
    assert server.stop() == 0


def test_before_the_model_is_there(serve):
    """/metrics answers while the model loads, and with a key set."""
    server = serve("--api-key", "secret", wait=False)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            assert scrape(server)
            break
        except httpx.TransportError:
            continue
    server.wait_ready()
    assert "nibble:num_requests_running" in scrape(server)
    assert server.stop() == 0


def test_dashboard(mserver, repo):
    """Every query of the dashboard names series that exist, and every series is documented."""
    board = json.loads((repo / "docs" / "grafana" / "nibble.json").read_text())
    names = {name for family in scrape(mserver).values() for name, _ in family}
    families = {f.removesuffix("_total") for f in scrape(mserver)} | {"nibble:http_responses"}
    queries = [t["expr"] for p in board["panels"] for t in p.get("targets", [])]
    queries += [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    assert len(queries) > 15
    for query in queries:
        used = re.findall(r"\b(?:nibble:|process_)\w+", query)
        assert used, query
        for name in used:
            assert name in names or name == "nibble:http_responses_total", f"{name} in {query}"
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
    ids = [p["id"] for p in board["panels"]]
    assert len(ids) == len(set(ids)) and board["uid"] and board["schemaVersion"] >= 36
    for panel in board["panels"]:
        assert panel["title"] and {"x", "y", "w", "h"} <= set(panel["gridPos"])
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    documented = (repo / "docs" / "operations.md").read_text()
    for family in families:
        assert family.removeprefix("nibble:") in documented, f"{family} is not in docs/operations.md"
