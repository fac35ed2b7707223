"""States of the server, the end in order, and its log files."""

import json
import os
import signal
import socket
import threading
import time

import httpx
import pytest

LONG = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True}


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def open_stream(server, tokens):
    """A stream whose first event has come: (context manager, reply, its lines)."""
    context = httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "max_tokens": tokens, "stream": True}, timeout=120)
    reply = context.__enter__()
    lines = (line for line in reply.iter_lines() if line)
    next(lines)
    return context, reply, lines


# ---------------------------------------------------------------- health


def test_health(server):
    for method in ("GET", "HEAD"):
        reply = httpx.request(method, server.url + "/health")
        assert reply.status_code == 200
    body = server.get("/health").json()
    assert body["status"] == "ok" and body["state"] == "ready"


def test_health_generate(server):
    for reply in (server.get("/health_generate"), httpx.post(server.url + "/health_generate", timeout=60)):
        assert reply.status_code == 200
        assert reply.json()["generated_tokens"] == 1 and reply.json()["busy"] is False
    reply = httpx.delete(server.url + "/health_generate")
    assert reply.status_code == 405 and reply.headers["allow"] == "GET, HEAD, POST"


def test_health_generate_behind_a_queue(serve):
    """All slots are taken for long: the server is busy, not ill, and says so soon."""
    server = serve("--max-running-requests", "1", "--drain-timeout", "0")
    context, _, lines = open_stream(server, 3000)
    begin = time.monotonic()
    reply = server.get("/health_generate")
    assert reply.status_code == 200
    assert reply.json()["busy"] is True or reply.json()["generated_tokens"] == 1
    assert time.monotonic() - begin < 5
    context.__exit__(None, None, None)
    assert server.stop() == 0


def test_health_generate_of_a_broken_model(serve, model_dir, tmp_path):
    """A norm so large that no logit is finite: /health knows nothing of it, /health_generate says 503."""
    for path in model_dir.iterdir():
        if not path.name.endswith(".safetensors"):
            os.symlink(path, tmp_path / path.name)
    for path in model_dir.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        n = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:8 + n]).items():
            if name.endswith("model.norm.weight"):
                a, b = entry["data_offsets"]
                data[8 + n + a:8 + n + b] = b"\x00\x7f" * ((b - a) // 2)  # about 1e38
        (tmp_path / path.name).write_bytes(data)
    server = serve(model=tmp_path)
    reply = server.get("/health_generate")
    assert reply.status_code == 503, reply.text
    assert "norm" in reply.json()["error"]["message"] or "finite" in reply.json()["error"]["message"], reply.text
    assert server.stop() == 0


# ---------------------------------------------------------------- the end


def test_drain(serve):
    """What runs finishes; nothing new is taken; /health says draining; the status is 0."""
    server = serve()
    context, _, lines = open_stream(server, 600)
    early = socket.create_connection(("127.0.0.1", server.port))  # its headers come before the signal, its body after
    early.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n")
    time.sleep(0.1)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: server.get("/health").status_code == 503)
    health = server.get("/health")
    assert health.json()["state"] == "draining" and health.json()["requests"] == 1
    assert health.headers["retry-after"] and health.headers["connection"] == "close"
    for reply in (server.post("/v1/completions", LONG), server.get("/health_generate"), server.get("/v1/models")):
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "shutting_down" and reply.headers["retry-after"]
    early.sendall(b'{"prompt":"x"}')
    assert early.recv(4096).startswith(b"HTTP/1.1 503")
    early.close()
    assert server.get("/metrics").status_code == 200
    assert server.process.poll() is None
    rest = list(lines)
    context.__exit__(None, None, None)
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert len(rest) > 100
    assert server.stop(None) == 0
    assert "draining: 1 requests" in server.log


def test_drain_has_an_end(serve):
    server = serve("--drain-timeout", "1", "--context-length", "8192")
    context, _, lines = open_stream(server, 8000)
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    rest = list(lines)
    context.__exit__(None, None, None)
    assert '"shutting_down"' in rest[-2]
    assert server.stop(None) == 0
    assert 0.9 < time.monotonic() - begin < 5


def test_second_signal_cuts(serve):
    """The clients of cut requests are told so; the status is 0 all the same."""
    server = serve("--drain-timeout", "100")
    context, _, lines = open_stream(server, 8000)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: server.get("/health").status_code == 503)
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    rest = list(lines)
    context.__exit__(None, None, None)
    assert server.stop(None) == 0
    assert time.monotonic() - begin < 3
    assert '"shutting_down"' in rest[-2]


# ---------------------------------------------------------------- logs


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_lines(path, n):
    wait_for(lambda: path.exists() and len(path.read_text().splitlines()) >= n)
    return lines_of(path)


def test_logs(serve, tmp_path):
    access, requests = tmp_path / "access.jsonl", tmp_path / "requests.jsonl"
    server = serve("--access-log", str(access), "--request-log", str(requests))
    secret = "What is 3+5? tell nobody"
    chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 12, "temperature": 0.5, "seed": 7, "ignore_eos": True}
    reply = server.post("/v1/chat/completions", chat, headers={"x-request-id": b'ab-12 "\\<x>\xe9' + b"y" * 500})
    given = reply.headers["x-request-id"]
    assert given == "ab-12x" + "y" * 122
    with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "Once", "max_tokens": 3, "stream": True}) as s:
        streamed = sum(len(part) for part in s.iter_raw())
        made = s.headers["x-request-id"]
    bad = server.post("/v1/completions", {"prompt": 5})
    nowhere = server.get("/now\"here?token=secret")
    assert len({given, made, bad.headers["x-request-id"], nowhere.headers["x-request-id"]}) == 4
    wait_for(lambda: "now" in access.read_text())
    one, two, three, four = (line for line in lines_of(access) if line["path"] != "/health")  # the fixture has asked for that
    assert one["request_id"] == given and one["status"] == 200 and one["bytes"] == len(reply.content)
    assert one["method"] == "POST" and one["path"] == "/v1/chat/completions" and one["ms"] > 0
    assert one["remote"].startswith("127.0.0.1:") and one["ts"].endswith("Z")
    assert two["request_id"] == made and two["bytes"] == streamed  # without the headers of chunks
    assert (three["status"], four["status"]) == (400, 404)
    assert "secret" not in json.dumps(four)
    first, second = wait_lines(requests, 2)
    usage, body = reply.json()["usage"], reply.json()
    assert first["request_id"] == given and first["id"] == body["id"] and first["model"] == body["model"]
    assert first["prompt_tokens"] == usage["prompt_tokens"] and first["completion_tokens"] == 12
    assert first["reasoning_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"]
    assert first["finish_reason"] == "length" == second["finish_reason"]
    assert 0 <= first["queue_ms"] <= first["ttft_ms"] <= first["total_ms"]
    assert first["params"]["temperature"] == 0.5 and first["params"]["seed"] == 7 and first["params"]["max_tokens"] == 12
    assert second["params"]["stream"] is True
    assert "nobody" not in requests.read_text() + access.read_text()
    # rotation
    access.rename(tmp_path / "access.1")
    server.process.send_signal(signal.SIGHUP)
    wait_for(access.exists)
    server.get("/health")
    assert wait_lines(access, 1)[0]["path"] == "/health"
    assert server.stop() == 0


def test_log_of_a_client_that_left(serve, tmp_path):
    path = tmp_path / "requests.jsonl"
    server = serve("--request-log", str(path), "--log-content", "--access-log", str(tmp_path / "access"))
    server.post("/v1/completions", {"prompt": ["Once", "Then"], "max_tokens": 2, "ignore_eos": True})
    context, _, lines = open_stream(server, 3000)
    next(lines)
    context.__exit__(None, None, None)
    first, second = wait_lines(path, 2)
    assert first["prompts"] == ["Once", "Then"] and len(first["answers"]) == 2 and first["finish_reason"] == "length"
    assert second["finish_reason"] == "abort" and second["completion_tokens"] >= 1 and second["answers"][0]
    assert second["ttft_ms"] is not None
    assert server.stop() == 0


@pytest.mark.parametrize("target", ["/dev/full", "fifo"])
def test_logs_that_take_nothing(serve, tmp_path, target):
    """A full disk and a reader who does not read cost lines, not requests."""
    path = target
    if target == "fifo":
        path = str(tmp_path / "fifo")
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    server = serve("--access-log", path)
    # 1.3 MB of lines: the pipe holds 64 KB, the buffer 1 MiB
    with httpx.Client(base_url=server.url, timeout=20) as client:
        for _ in range(2500 if target == "fifo" else 20):
            assert client.get("/" + "x" * 250, headers={"x-request-id": "y" * 128}).status_code == 404
        text = client.get("/metrics").text
    dropped = float(text.split('nibble:log_lines_dropped_total{log="access"} ')[1].split()[0])
    assert dropped > 0
    if target == "/dev/full":
        wait_for(lambda: "lines lost" in server.log)
    begin = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begin < 10
    if target == "fifo":
        os.close(reader)


def test_log_file_that_cannot_be(nibble_bin, model_dir, tmp_path):
    import subprocess

    result = subprocess.run([nibble_bin, "serve", "--port", "0", "--model", model_dir, "--access-log", tmp_path / "no" / "such"],
                            capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "--access-log" in result.stderr and "No such file" in result.stderr


def test_load_line(serve):
    """A line every ten seconds while there is load."""
    server = serve()
    stop = time.monotonic() + 30
    threads = [threading.Thread(target=lambda: [server.post("/v1/completions", {**LONG, "max_tokens": 200})
                                                for _ in iter(lambda: time.monotonic() < stop and "load: " not in server.log, False)])
               for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    wait_for(lambda: "load: " in server.log, 3)
    line = next(line for line in server.lines if line.startswith("load: "))
    assert "running" in line and "tok/s" in line and "KV" in line and "prefix hits" in line
    assert float(line.split("decode ")[1].split()[0]) > 1
    assert server.stop() == 0
