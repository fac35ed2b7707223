"""Who is served when: turns of clients, time limits, bounds of the queue, slow readers; the memory plan."""

import json
import socket
import threading
import time

import httpx
import pytest
from api_server import sse

LONG = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def small(serve):
    """One place to run, two to wait, two seconds for a request, two clients with a key each."""
    server = serve("--max-running-requests", "1", "--max-queued-requests", "2", "--request-timeout", "2", "--api-key", "a",
                   "--api-key", "b", "--chunked-prefill-size", "64")
    yield server
    assert server.stop() == 0, server.log


HTTP = httpx.Client(limits=httpx.Limits(max_connections=None))


def post(server, body, key="a", path="/v1/completions"):
    return HTTP.post(server.url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def in_background(calls):
    threads = [threading.Thread(target=call) for call in calls]
    for t in threads:
        t.start()
    return threads


def wait_for(server, running, waiting):
    end = time.monotonic() + 20
    while server.running() != (running, waiting):
        assert time.monotonic() < end, server.running()
        time.sleep(0.002)


def test_the_plan_is_printed(small):
    plan = [line for line in small.log.splitlines() if line.startswith("memory: ")]
    for part in ("weights", "workspace", "KV pages", "prefix tree", "requests", "together"):
        assert any(line[len("memory: "):].startswith(part) for line in plan), plan


def test_late_answers(small):
    """504 while it is answered and while it waits; in a stream, where the status is gone, an error event."""
    replies = {}
    threads = in_background([lambda: replies.update(runs=post(small, LONG))])
    wait_for(small, 1, 0)
    begin = time.monotonic()
    threads += in_background([lambda: replies.update(waits=post(small, LONG))])
    wait_for(small, 1, 1)
    for t in threads:
        t.join()
    assert time.monotonic() - begin < 4
    assert replies["runs"].status_code == 504, replies["runs"].text
    error = replies["runs"].json()["error"]
    assert error["type"] == "timeout_error" and error["code"] == "request_timeout" and "--request-timeout" in error["message"]
    assert replies["waits"].status_code == 504
    small.wait_idle(2)
    with httpx.stream("POST", small.url + "/v1/completions", json={**LONG, "stream": True}, timeout=60,
                      headers={"Authorization": "Bearer a"}) as reply:
        assert reply.status_code == 200
        events = sse(reply)
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "request_timeout", events[-2:]
    small.wait_idle(2)


def test_a_full_queue(small):
    threads = in_background([lambda: post(small, LONG)])
    wait_for(small, 1, 0)
    threads += in_background([lambda: post(small, LONG)] * 2)
    wait_for(small, 1, 2)
    reply = post(small, LONG)
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "queue_full", reply.text
    assert reply.headers["retry-after"]
    for t in threads:
        t.join()
    small.wait_idle(5)


def test_clients_take_turns(serve):
    """A client with one request is served before the rest of one with many."""
    server = serve("--max-running-requests", "1", "--api-key", "a", "--api-key", "b")
    done = []
    body = {"prompt": "x", "max_tokens": 16, "ignore_eos": True}

    def call(key):
        assert post(server, body, key).status_code == 200
        done.append(key)

    with httpx.stream("POST", server.url + "/v1/completions", timeout=60,
                      json={**LONG, "max_tokens": 8000, "stream": True}, headers={"Authorization": "Bearer a"}) as first:
        pieces = first.iter_raw()  # kept: without it the connection is closed
        next(pieces)
        threads = in_background([lambda: call("a")] * 12)
        wait_for(server, 1, 12)
        threads += in_background([lambda: call("b")])
        wait_for(server, 1, 13)
    for t in threads:
        t.join()
    assert "b" in done[:4], done  # the first but for the order in which the threads get to say so; without turns it is the last
    assert server.stop() == 0


def test_a_reader_that_pauses_loses_nothing(server):
    """The socket fills up in the middle of a chunk; later the rest comes, every chunk whole."""
    body = json.dumps({"prompt": [5, 6], "max_tokens": 500, "ignore_eos": True, "temperature": 0, "logprobs": 5, "stream": True})
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.connect(("127.0.0.1", server.port))
    s.settimeout(60)
    s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
              f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
    time.sleep(1.5)
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        piece = s.recv(1 << 16)
        assert piece, "closed early"
        data += piece
    s.close()
    head, rest = data.split(b"\r\n\r\n", 1)
    text = b""
    while True:
        size, rest = rest.split(b"\r\n", 1)
        n = int(size, 16)
        if not n:
            break
        text += rest[:n]
        assert rest[n:n + 2] == b"\r\n"
        rest = rest[n + 2:]
    events = [line[6:] for line in text.decode().split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    tokens = sum(len(c["logprobs"]["tokens"]) for e in events[:-1] for c in json.loads(e)["choices"] if c["logprobs"])
    assert tokens == 500


def test_overlap_changes_no_answer(serve):
    bodies = [{"temperature": 0}, {"temperature": 0.9, "seed": 4, "n": 2}, {"temperature": 0, "stop": ["e", "the"]}, {"temperature": 0, "logprobs": 3},
              {"temperature": 0.7, "seed": 1, "max_tokens": 1}, {"temperature": 0.8, "seed": 2, "regex": "[a-z ]{20,30}"}, {"use_beam_search": True, "n": 2}]
    found = []
    for option in "--disable-overlap-schedule", "--async-scheduling":
        server = serve(option, "--speculative-algorithm", "mtp")
        found.append([])
        for body in bodies:
            r = httpx.post(server.url + "/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 40, **body}, timeout=60)
            assert r.status_code == 200, r.text
            found[-1].append((r.json()["choices"], r.json()["usage"]))
        with httpx.stream("POST", server.url + "/v1/completions", timeout=60,
                          json={"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "stream": True}) as r:
            text = "".join(c["text"] for line in r.iter_lines() if line.startswith("data: {") for c in json.loads(line[6:])["choices"])
        assert text == found[-1][0][0][0]["text"]
        assert server.stop() == 0, server.log
    assert found[0] == found[1]


@pytest.mark.parametrize("options,word", [(["--max-total-tokens", "900G"], "--max-total-tokens"),
                                          (["--mem-fraction-static", "1.5"], "memory_fraction"),
                                          (["--mem-fraction-static", "0.0000001"], "--mem-fraction-static"),
                                          (["--num-continuous-decode-steps", "5000"], "decode_steps"),
                                          (["--schedule-policy", "random"], "schedule_policy"),
                                          (["--speculative-algorithm", "ngram"], "speculative_algorithm"),
                                          (["--request-timeout", "1000000"], "--request-timeout")])
def test_refused_at_start(nibble_bin, model_dir, options, word):
    from api_server import Server

    server = Server(nibble_bin, model_dir, *options, wait=False)
    assert server.process.wait(60) != 0
    server.reader.join(5)
    assert word in server.log, server.log
