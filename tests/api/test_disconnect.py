"""C46: whoever leaves frees what was reserved for him, at once."""

import socket
import threading
import time

import httpx
import pytest

LONG = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}


def begin(server, body, path="/v1/completions"):
    """A request on a bare socket, so that it can be left at any time."""
    import json

    data = json.dumps(body).encode()
    s = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    s.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return s


def wait_running(server, n, seconds=30):
    end = time.monotonic() + seconds
    while sum(server.running()) < n:
        assert time.monotonic() < end, f"{server.running()} of {n} requests after {seconds} s"
        time.sleep(0.002)


def test_leaving_a_stream(server):
    with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        for _ in range(5):
            next(lines)
    server.wait_idle(2)


@pytest.mark.parametrize("body", [LONG, {**LONG, "stream": True}, {**LONG, "n": 8}], ids=["plain", "stream", "n"])
def test_leaving_before_the_answer(server, body):
    s = begin(server, body)
    wait_running(server, 1)
    s.close()
    server.wait_idle(2)


def test_half_close_counts_as_leaving(server):
    s = begin(server, LONG)
    wait_running(server, 1)
    s.shutdown(socket.SHUT_WR)
    server.wait_idle(2)
    s.close()


def test_leaving_the_queue_and_the_prompt(serve):
    """One request runs at a time: the others leave while they wait, then one in the middle of its prompt."""
    server = serve("--max-running-requests", "1", "--chunked-prefill-size", "16")
    first = begin(server, LONG)
    wait_running(server, 1)
    waiting = [begin(server, LONG) for _ in range(8)]
    wait_running(server, 9)
    for s in waiting:
        s.close()
    end = time.monotonic() + 2
    while server.running() != (1, 0):
        assert time.monotonic() < end, server.running()
        time.sleep(0.002)
    first.close()
    server.wait_idle(2)
    prompt = begin(server, {"prompt": [5] * 2500, "max_tokens": 1})
    wait_running(server, 1)
    prompt.close()
    server.wait_idle(2)
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    assert server.stop() == 0


def test_cut_at_random_points(server, sanitized):
    """Requests of all kinds, a third of them cut; what stays is answered, and nothing is left behind."""
    import random

    rng = random.Random(7)
    failures = []

    def one(i):
        body = {"prompt": f"number {i}", "max_tokens": rng.randrange(1, 40), "n": rng.choice([1, 1, 3]),
                "stream": rng.random() < 0.5, "ignore_eos": True}
        cut = rng.random() < 0.34
        s = begin(server, body)
        try:
            if cut:
                time.sleep(rng.random() * 0.2)
            else:
                data = b""
                want = b"[DONE]" if body["stream"] else b'"usage":{'
                while want not in data:
                    piece = s.recv(65536)
                    if not piece:
                        failures.append((i, body, data[-200:]))
                        break
                    data += piece
        except Exception as e:
            failures.append((i, body, e))
        s.close()

    for begin_i in range(0, 60 if sanitized else 200, 20):
        threads = [threading.Thread(target=one, args=(begin_i + k,)) for k in range(20)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not failures, failures[:3]
    server.wait_idle(3)
    assert server.get("/health").json()["kv_tokens_used"] == 0
