"""nibble bench serve: every figure against arithmetic on a server with known times, counts against the real server."""

import json
import pathlib
import subprocess
import sys
import time
import xml.etree.ElementTree

import numpy
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "load"))

from api_server import free_port  # noqa: E402
from paced_server import DONE, Answer, PacedServer, event, text_stream, usage  # noqa: E402


@pytest.fixture
def run(nibble_bin):
    """run(url, *options) gives the finished process."""
    def start(url, *options):
        command = [nibble_bin, "bench", "serve", *(["--base-url", url] if url else []), *map(str, options)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)
    return start


@pytest.fixture
def bench(run):
    """The JSON report with details. Text prompts unless told otherwise; no warm-up, so that the server sees the measured only."""
    def start(url, *options, status=0):
        done = run(url, "--json", "--output-details", "--warmup-requests", "0", *options)
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout)
    return start


def one_prompt(tmp_path, n=1, **members):
    """A data set file: then no request is spent on learning how the server makes tokens."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {i}", "output_len": 8, **members}) + "\n" for i in range(n)))
    return ("--dataset-name", "file", "--dataset-path", path)


def check_arithmetic(r):
    """Everything that can be computed from the values per request."""
    ok = [i for i, failure in enumerate(r["failures"]) if failure is None]
    out = numpy.array([r["output_lens"][i] for i in ok])
    e2el = numpy.array([r["e2els"][i] for i in ok])
    ttft = [r["ttfts"][i] for i in ok]
    tpot = [(e - t) / (n - 1) for e, t, n in zip(e2el, ttft, out) if t is not None and n > 1]
    itl = [gap for i in ok for gap in r["itls"][i]]
    assert r["completed"] == len(ok) and r["failed"] == len(r["failures"]) - len(ok)
    assert r["total_output_tokens"] == out.sum()
    assert r["total_input_tokens"] == sum(r["input_lens"][i] for i in ok)
    for key, count in (("request", len(ok)), ("output", out.sum()), ("input", r["total_input_tokens"])):
        assert r[f"{key}_throughput"] == pytest.approx(count / r["duration"])
    assert r["total_token_throughput"] == pytest.approx((r["total_input_tokens"] + out.sum()) / r["duration"])
    assert r["concurrency"] == pytest.approx(e2el.sum() / r["duration"])
    for key, values in (("ttft", [t for t in ttft if t is not None]), ("tpot", tpot), ("itl", itl), ("e2el", e2el)):
        if len(values) == 0:
            assert r[f"mean_{key}_ms"] is None and r[f"p99_{key}_ms"] is None
            continue
        ms = numpy.array(values) * 1e3
        for name, value in (("mean", ms.mean()), ("median", numpy.median(ms)), ("std", ms.std()), ("min", ms.min()),
                            ("max", ms.max()), ("p99", numpy.percentile(ms, 99))):
            assert r[f"{name}_{key}_ms"] == pytest.approx(value, rel=1e-5, abs=1e-4), f"{name} {key}"
    # From the first request to the end of the last answer, by the client's own clock.
    assert r["duration"] == pytest.approx(max(s + e for s, e in zip(r["start_times"], r["e2els"])), abs=1e-6)


@pytest.mark.parametrize("chat", [False, True])
def test_times(bench, tmp_path, chat):
    """What the client measures is what the server did: its own times of sending, known to the microsecond."""
    with PacedServer(lambda body, i: text_stream(0.05 + 0.01 * i, 0.02, 8, chat=chat)) as server:
        r = bench(server.url, *one_prompt(tmp_path, 5), "--max-concurrency", 1,
                  "--endpoint", "/v1/chat/completions" if chat else "/v1/completions")
    check_arithmetic(r)
    assert r["completed"] == 5 and r["total_output_tokens"] == 40 and r["total_input_tokens"] == 35
    assert r["chunks"] == 40 and r["tokens_per_chunk"] == 1 and r["max_concurrent_requests"] == 1
    differences = []
    for i, seen in enumerate(server.requests):
        sent = [t - seen.begin for t in seen.sent[chat:]]  # the role's event is no token
        assert r["ttfts"][i] >= sent[0] and r["ttfts"][i] >= 0.05 + 0.01 * i
        differences += [r["ttfts"][i] - sent[0]]
        differences += [abs(a - b) for a, b in zip(r["itls"][i], numpy.diff(sent))]
        assert r["e2els"][i] >= sent[-1]
    assert numpy.median(differences) < 0.01
    gaps = [gap for seen in server.requests for gap in numpy.diff(seen.sent[chat:])]
    assert r["median_itl_ms"] == pytest.approx(numpy.median(gaps) * 1e3, abs=5)
    assert 70 <= r["median_ttft_ms"] < 700


def test_thinking_is_output(bench, tmp_path):
    """C79: tokens in reasoning_content only."""
    with PacedServer(lambda body, i: text_stream(0.03, 0.002, 50, chat=True, key="reasoning_content")) as server:
        r = bench(server.url, *one_prompt(tmp_path), "--endpoint", "/v1/chat/completions")
    check_arithmetic(r)
    assert r["total_output_tokens"] == 50 and len(r["itls"][0]) == 49
    assert 0.03 <= r["ttfts"][0] < r["e2els"][0]


def test_chunks_of_several_tokens(bench, run, tmp_path):
    """C80: 10 chunks, 40 tokens, 0.9 s from the first to the last: 39 tokens in that time."""
    with PacedServer(lambda body, i: text_stream(0.02, 0.1, 10, tokens_per_chunk=4)) as server:
        r = bench(server.url, *one_prompt(tmp_path))
        text = run(server.url, *one_prompt(tmp_path), "--warmup-requests", 0).stdout
    check_arithmetic(r)
    assert r["total_output_tokens"] == 40 and r["tokens_per_chunk"] == 4
    sent = server.requests[0].sent
    assert r["median_itl_ms"] == pytest.approx(numpy.median(numpy.diff(sent)) * 1e3, abs=5)
    assert r["mean_tpot_ms"] == pytest.approx((sent[-1] - sent[0]) / 39 * 1e3, rel=0.03)
    assert "a chunk carries 4.00 tokens" in text


def test_text_is_not_encoded_again(bench, tmp_path):
    """C81: a hundred tokens that are spaces."""
    def answer(body, i):
        if body["stream"]:
            return text_stream(0, 0, 100)
        return Answer([(0.02, json.dumps({"choices": [{"index": 0, "text": " " * 100, "finish_reason": "length"}],
                                          "usage": usage(1, 100)}).encode())], content_type="application/json")
    with PacedServer(answer) as server:
        streamed = bench(server.url, *one_prompt(tmp_path))
        whole = bench(server.url, *one_prompt(tmp_path), "--no-stream")
    assert streamed["total_output_tokens"] == whole["total_output_tokens"] == 100
    check_arithmetic(whole)
    assert whole["mean_ttft_ms"] is None and whole["mean_e2el_ms"] >= 20
    assert "stream_options" not in server.requests[-1].body and server.requests[0].body["stream_options"] == {"include_usage": True}


def test_no_tokens_and_no_usage(bench, run, tmp_path):
    def answer(body, i):
        if body["prompt"] == "prompt 0":
            return Answer([(0, event(choices=[{"index": 0, "text": "", "finish_reason": "stop"}])
                            + event(choices=[], usage=usage(3, 0)) + DONE)])
        return text_stream(0.01, 0.005, 6, with_usage=False)
    with PacedServer(answer) as server:
        r = bench(server.url, *one_prompt(tmp_path, 2), "--max-concurrency", 1)
        text = run(server.url, *one_prompt(tmp_path, 2), "--warmup-requests", 0).stdout
    check_arithmetic(r)
    assert r["answers_without_tokens"] == 1 and r["answers_without_usage"] == 1
    assert r["output_lens"] == [0, 6] and r["ttfts"][0] is None
    assert "1 answers have no tokens" in text and "1 answers came without usage" in text


def test_failures_are_counted_by_kind(bench, run, tmp_path):
    chunk = event(choices=[{"index": 0, "text": "a"}])
    answers = [
        text_stream(0, 0, 8),
        Answer([(0, b'{"error":{"message":"slow down"}}')], status=429, content_type="application/json"),
        Answer([(0, b'{"error":{"message":"slow down"}}')], status=429, content_type="application/json"),
        Answer([(0, b"<h1>Bad gateway</h1>")], status=502, content_type="text/html"),
        Answer([(0, chunk)], cut=True),
        Answer([(0, chunk)]),  # the stream ends well, the answer does not
        Answer([(0, chunk + event(error={"message": "engine failed"}) + DONE)]),
        Answer([(0, b"data: {nonsense\n\n")]),
        Answer([(0, chunk)], hang=True),
    ]
    with PacedServer(lambda body, i: answers[int(body["prompt"].split()[1])]) as server:
        r = bench(server.url, *one_prompt(tmp_path, len(answers)), "--timeout", 1)
        text = run(server.url, *one_prompt(tmp_path, len(answers)), "--timeout", 1, "--warmup-requests", 0).stdout
    check_arithmetic(r)
    found = {(e["kind"], e.get("status")): (e["count"], e["sample"]) for e in r["errors"]}
    assert {key: n for key, (n, _) in found.items()} == {
        ("http", 429): 2, ("http", 502): 1, ("cut", None): 2, ("error event", None): 1, ("malformed", None): 1, ("timeout", None): 1}
    assert found["http", 429][1] == "slow down" and found["error event", None][1] == "engine failed"
    assert r["completed"] == 1 and r["failed"] == 8
    assert "failed: 2 x http 429, for instance: slow down" in text


def test_nothing_succeeds(run, bench, tmp_path):
    done = run(f"http://127.0.0.1:{free_port()}", "--num-prompts", 1)
    assert done.returncode == 1 and "connect" in done.stderr and done.stdout == ""
    with PacedServer(lambda body, i: Answer([(0, b'{"error":{"message":"no memory"}}')], status=500)) as server:
        done = run(server.url, *one_prompt(tmp_path))
        assert done.returncode == 1 and "warm-up request failed: http 500: no memory" in done.stderr
        r = bench(server.url, *one_prompt(tmp_path), status=1)
        assert r["completed"] == 0 and r["request_throughput"] == 0 and r["mean_e2el_ms"] is None


def test_waits_for_the_server(run, tmp_path):
    with PacedServer(lambda body, i: text_stream(0, 0, 2), delay_ready=0.5) as server:
        assert "503" in run(server.url, *one_prompt(tmp_path)).stderr
        assert run(server.url, *one_prompt(tmp_path), "--ready-check-timeout-sec", 30).returncode == 0


def test_open_loop(bench, tmp_path):
    """Requests come at their times, however slow the answers are; the same seed gives the same times."""
    options = (*one_prompt(tmp_path), "--num-prompts", 60, "--request-rate", 100)
    with PacedServer(lambda body, i: text_stream(1.5, 0.01, 2)) as server:
        r = bench(server.url, *options, "--seed", 5)
        assert server.peak == r["max_concurrent_requests"] == 60
        again = bench(server.url, *options, "--seed", 5)
        even = bench(server.url, *options, "--burstiness", 1000)
    check_arithmetic(r)
    planned = numpy.array(r["planned_times"])
    assert planned[0] == 0 and 0.35 < planned[-1] < 0.9  # 59 gaps of 10 ms, deviation 77 ms
    assert r["planned_times"] == again["planned_times"] != even["planned_times"]
    assert numpy.std(numpy.diff(planned)) > 0.006 and numpy.std(numpy.diff(even["planned_times"])) < 0.001
    late = numpy.array(r["start_times"]) - planned
    assert late.min() >= 0 and numpy.median(late) < 0.3
    assert r["mean_send_delay_ms"] == pytest.approx(late.mean() * 1e3, abs=0.001)


def test_closed_loop(bench, tmp_path):
    """N under way, not more and not less, on N connections that are kept."""
    with PacedServer(lambda body, i: text_stream(0.05, 0.01, 3)) as server:
        r = bench(server.url, *one_prompt(tmp_path), "--num-prompts", 24, "--max-concurrency", 4)
    check_arithmetic(r)
    assert r["max_concurrent_requests"] == server.peak == 4 and r["completed"] == 24
    assert 3 < r["concurrency"] <= 4.001
    assert server.connections <= 5  # and one for /v1/models


def test_a_thousand_streams(bench, tmp_path, sanitized):
    """One core drives them and is far from busy. The test's own server, in Python, sets the pace."""
    n = 100 if sanitized else 1000
    with PacedServer(lambda body, i: text_stream(1.5, 0.5, 4)) as server:
        r = bench(server.url, *one_prompt(tmp_path), "--num-prompts", n)
    check_arithmetic(r)
    assert r["completed"] == n and r["total_output_tokens"] == 4 * n
    assert r["max_concurrent_requests"] == n
    assert r["client_busy"] < 0.8  # the report would warn; about 0.3 on a quiet machine


def test_bodies(bench, tmp_path):
    """What is asked for is sent, in both APIs."""
    with PacedServer(lambda body, i: text_stream(0, 0, 4)) as server:
        bench(server.url + "/v1/", *one_prompt(tmp_path), "--ignore-eos", "--api-key", "secret", "--model", "other",
              "--extra-body", '{"top_k": 3, "temperature": null}')
        bench(server.url, *one_prompt(tmp_path), "--endpoint", "/v1/chat/completions", "--output-len", 5, "--temperature", 0.5)
    first, second = server.requests
    assert first.path == "/v1/completions" and first.headers["authorization"] == "Bearer secret"
    assert first.body == {"model": "other", "prompt": "prompt 0", "max_tokens": 8, "stream": True, "ignore_eos": True, "top_k": 3,
                          "temperature": None, "stream_options": {"include_usage": True}}
    assert second.path == "/v1/chat/completions" and "authorization" not in second.headers
    assert second.body == {"model": "paced", "messages": [{"role": "user", "content": "prompt 0"}], "max_tokens": 5, "stream": True,
                           "temperature": 0.5, "stream_options": {"include_usage": True}}


def test_random_text_has_the_length(bench):
    """A server that counts a token per letter and 11 more: the prompts come out right on average."""
    def answer(body, i):
        letters = sum(c.isalpha() for c in body["prompt"])
        return text_stream(0, 0, body["max_tokens"], prompt_tokens=letters + 11)
    with PacedServer(answer) as server:
        r = bench(server.url, "--num-prompts", 60, "--random-input-len", 500, "--random-output-len", 6, "--random-range-ratio", 0.5)
    assert numpy.mean(r["input_lens"]) == pytest.approx(500, rel=0.1)  # 60 draws of 250 to 750
    assert min(r["input_lens"]) < 350 and max(r["input_lens"]) > 650
    assert set(r["output_lens"]) == set(range(3, 10))
    assert "tokens per word and 11 more" in r["prompts"]
    assert len(server.requests) == 62  # two to learn that


def test_shared_prefixes(bench):
    with PacedServer(lambda body, i: text_stream(0, 0, 2, prompt_tokens=len(body["prompt"].split()))) as server:
        bench(server.url, "--dataset-name", "shared-prefix", "--shared-prefix-len", 40, "--shared-prefix-groups", 3,
              "--random-input-len", 20, "--random-output-len", 2, "--num-prompts", 30)
    prompts = [r.body["prompt"].split() for r in server.requests[2:]]
    assert {len(p) for p in prompts} == {60}
    assert len({tuple(p[:40]) for p in prompts}) == 3 and len({tuple(p[40:]) for p in prompts}) == 30


def test_files(bench, run, tmp_path):
    share = tmp_path / "share.json"
    share.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "abcdefghij" * 20}]},
                                 {"conversations": [{"from": "human", "value": "alone"}]}]))
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "output_tokens": 3}\n')
    with PacedServer(lambda body, i: text_stream(0, 0, 2, prompt_tokens=len(str(body)))) as server:
        r = bench(server.url, "--dataset-name", "file", "--dataset-path", share)
        assert r["num_prompts"] == 1 and "estimated" in r["prompts"]
        assert server.requests[-1].body["prompt"] == "hello" and 150 < server.requests[-1].body["max_tokens"] < 250
        r = bench(server.url, "--dataset-name", "file", "--dataset-path", lines, "--endpoint", "/v1/chat/completions", "--num-prompts", 3)
        assert r["num_prompts"] == 3 and "again from the start" in r["prompts"]
        assert server.requests[-1].body["max_tokens"] == 3 and len(server.requests[-1].body["messages"]) == 2
        done = run(server.url, "--dataset-name", "file", "--dataset-path", lines)
        assert done.returncode == 1 and "line 1" in done.stderr and "chat/completions" in done.stderr
        done = run(server.url, "--dataset-name", "file", "--dataset-path", tmp_path / "none")
        assert done.returncode == 1 and "none" in done.stderr


def test_report_and_plot(run, tmp_path):
    plot, log = tmp_path / "plot.svg", tmp_path / "log.jsonl"
    with PacedServer(lambda body, i: text_stream(0.03, 0.01, 5)) as server:
        for _ in range(2):
            done = run(server.url, *one_prompt(tmp_path), "--num-prompts", 4, "--plot", plot, "--output-file", log, "--goodput", "ttft:1",
                       "--percentile-metrics", "ttft,itl", "--metric-percentiles", "90,99.9")
    assert done.returncode == 0 and done.stderr == ""  # no bar and no notes where nobody looks
    for words in ("Successful requests:  4", "Failed requests:  0", "Total generated tokens:  20", "Request goodput (req/s):  0.00",
                  "P90 TTFT (ms):", "P99.9 ITL (ms):", "Peak concurrent requests:  4"):
        assert words.split() in [line.split()[:len(words.split())] for line in done.stdout.splitlines()], done.stdout
    assert "TPOT" not in done.stdout
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 2 and lines[1]["p99.9_itl_ms"] > 0 and "itls" not in lines[0]
    svg = xml.etree.ElementTree.parse(plot).getroot()
    texts = [t.text for t in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "Time to first token" in texts and "Inter-token latency" in texts
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 4


@pytest.mark.parametrize("options, words", [
    (["--request-rate", "0"], "--request-rate is 0"),
    (["--request-rate", "x"], '--request-rate: "x"'),
    (["--burstiness", "0"], "--burstiness is 0"),
    (["--dataset-name", "x"], "shared-prefix"),
    (["--dataset-name", "file"], "--dataset-path"),
    (["--dataset-path", "x"], "--dataset-name"),
    (["--endpoint", "/v1/messages"], "--endpoint"),
    (["--random-range-ratio", "1"], "--random-range-ratio is 1"),
    (["--random-output-len", "0"], "--random-output-len"),
    (["--percentile-metrics", "ttft,x"], '"x"'),
    (["--metric-percentiles", "101"], '"101"'),
    (["--goodput", "itl:3"], '"itl:3"'),
    (["--extra-body", "[1]"], "--extra-body is an array"),
    (["--base-url", "ftp://x"], "ftp://x"),
    (["--stream", "--no-stream"], "--no-stream"),
    (["--timeout", "0"], "--timeout is 0"),
    (["--max-concurrency", "100000000"], "open files"),
    (["extra"], "extra"),
])
def test_wrong_options(run, options, words):
    with PacedServer(lambda body, i: text_stream(0, 0, 2)) as server:
        done = run(None if "--base-url" in options else server.url, "--num-prompts", 1, *options)
    assert done.returncode in (1, 2) and words in done.stderr, done.stderr
    assert done.stdout == ""


def test_https_to_a_server_without_it(run):
    with PacedServer(lambda body, i: text_stream(0, 0, 2)) as server:
        done = run(server.url.replace("http:", "https:"), "--num-prompts", 1)
    assert done.returncode == 1 and "failed: connect" in done.stderr


# ---------------------------------------------------------------- the real server


def test_counts_of_the_real_server(bench, server, model):
    r = bench(server.url, "--num-prompts", 8, "--random-input-len", 40, "--random-output-len", 12, "--max-concurrency", 4, "--ignore-eos")
    check_arithmetic(r)
    assert r["model"] == model and r["completed"] == 8 and r["output_lens"] == [12] * 8
    assert r["answers_shorter"] == r["answers_longer"] == r["answers_without_usage"] == 0
    assert all(12 >= len(gaps) + 1 for gaps in r["itls"])  # a busy server sends several tokens at once
    assert r["input_lens"] == [40] * 8 and "token ids" in r["prompts"]
    text = bench(server.url, "--num-prompts", 8, "--random-input-len", 40, "--random-output-len", 2, "--text-prompts")
    assert "words" in text["prompts"] and numpy.mean(text["input_lens"]) == pytest.approx(40, rel=0.15)


def test_thinking_of_the_real_server(bench, server, trained, tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('{"prompt": "What is 3+5?", "output_len": 40}\n')
    r = bench(server.url, "--dataset-name", "file", "--dataset-path", path, "--endpoint", "/v1/chat/completions")
    check_arithmetic(r)
    message = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 3+5?"}], "max_tokens": 40,
                                                   "temperature": 0}).json()
    assert r["total_output_tokens"] == message["usage"]["completion_tokens"]
    assert r["total_reasoning_tokens"] == message["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert r["total_input_tokens"] == message["usage"]["prompt_tokens"]
    assert len(r["itls"][0]) + 1 >= r["total_output_tokens"] // 2  # the thinking's chunks are among them


def test_too_long_for_the_real_server(run, server, limit):
    done = run(server.url, "--num-prompts", 1, "--random-input-len", 10, "--random-output-len", limit + 1)
    assert done.returncode == 1 and "http 400" in done.stderr and str(limit) in done.stderr
