"""The serve command: start, names, keys, signals."""

import re
import signal
import socket
import subprocess
import threading
import time

import httpx
import pytest
from api_server import Server

LONG = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True}


def run(nibble_bin, *args):
    return subprocess.run([nibble_bin, "serve", *args], capture_output=True, text=True, timeout=120)


def test_log(server):
    assert re.search(r"listening on http://127\.0\.0\.1:\d+", server.log)
    assert re.search(r"ready after \d+\.\d+ s", server.log)


def test_help(nibble_bin):
    result = run(nibble_bin, "--help")
    assert result.returncode == 0
    for flag in ("--model", "--model-path", "--host", "--port", "--served-model-name", "--device", "--moe-runner-backend", "--cpu-level",
                 "--activations", "--kv-cache-dtype", "--threads", "--max-running-requests", "--chunked-prefill-size", "--context-length",
                 "--max-total-tokens", "--reasoning-parser", "--chat-template", "--log-level", "--api-key", "--drain-timeout", "--access-log", "--request-log", "--log-content"):
        assert flag in result.stdout


@pytest.mark.parametrize("args,sentence", [
    (["--port", "70000"], "--port"), (["--port", "x"], "--port"), (["--nonsense"], "--nonsense"), (["--log-level", "loud"], "--log-level"),
    (["--api-key", ""], "--api-key"), (["a", "b"], "MODEL"),
])
def test_wrong_usage(nibble_bin, args, sentence):
    result = run(nibble_bin, *args)
    assert result.returncode == 2
    assert sentence in result.stderr


def test_no_such_model(nibble_bin, tmp_path):
    result = run(nibble_bin, "--port", "0", "--model", str(tmp_path / "nothing"))
    assert result.returncode == 1
    assert "nothing" in result.stderr


@pytest.mark.parametrize("args,sentence", [(["--reasoning-parser", "wizard"], "wizard"), (["--chat-template", "/does/not/exist"], "/does/not/exist"),
                                           (["--host", "no.such.host.invalid"], "no.such.host.invalid"), (["--device", "abacus"], "abacus"),
                                           (["--moe-runner-backend", "abacus"], "abacus"),
                                           (["--chunked-prefill-size", "1000000"], "--chunked-prefill-size) is 1000000; expected 1 to 65536"),
                                           (["--max-running-requests", "100000"], "--max-running-requests) is 100000; expected 1 to 4096"),
                                           (["--context-length", "100000000"], "--context-length) is 100000000")])
def test_bad_values(nibble_bin, model_dir, args, sentence):
    result = run(nibble_bin, "--port", "0", "--model", str(model_dir), *args)
    assert result.returncode == 1, result.stderr
    assert sentence in result.stderr


def test_port_in_use(nibble_bin, model_dir):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        result = run(nibble_bin, "--port", port, "--model", str(model_dir))
    assert result.returncode == 1
    assert port in result.stderr and "in use" in result.stderr


def test_served_names(serve):
    server = serve("--served-model-name", "zai-org/GLM-5", "--served-model-name", "other")
    assert [m["id"] for m in server.get("/v1/models").json()["data"]] == ["zai-org/GLM-5", "other"]
    assert server.get("/v1/models/zai-org/GLM-5").status_code == 200
    for name, status in (("zai-org/GLM-5", 200), ("other", 200), ("third", 404)):
        reply = server.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})
        assert reply.status_code == status
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json()["model"] == "zai-org/GLM-5"
    assert server.stop() == 0


def test_api_key(serve):
    server = serve("--api-key", "secret", "--api-key", "another")
    body = {"prompt": "x", "max_tokens": 1}
    for key in (None, "Bearer", "Bearer wrong", "Bearer secre", "Bearer secrets", "Basic secret", "secret"):
        headers = {"Authorization": key} if key else {}
        reply = server.post("/v1/completions", body, headers=headers)
        assert reply.status_code == 401, key
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"
        assert server.get("/v1/models", headers=headers).status_code == 401
    for key in ("Bearer secret", "bearer another"):
        assert server.post("/v1/completions", body, headers={"Authorization": key}).status_code == 200
    assert server.get("/health").status_code == 200
    assert server.stop() == 0


def test_context_length(serve):
    server = serve("--context-length", "256", "--max-total-tokens", "1024")
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 256
    assert server.post("/v1/completions", {"prompt": [5] * 300, "max_tokens": 1}).status_code == 400
    until_full = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True})
    assert until_full.json()["usage"]["total_tokens"] == 256
    assert until_full.json()["choices"][0]["finish_reason"] == "length"
    assert server.stop() == 0


def test_no_parser(serve):
    server = serve("--reasoning-parser", "none")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "ignore_eos": True}
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["reasoning_content"] is None and message["content"]
    assert server.stop() == 0


def test_loading_is_visible(serve):
    """The port answers before the model is there; requests are told to come back."""
    server = serve(wait=False)
    seen = []
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            reply = server.get("/health")
        except httpx.TransportError:
            continue
        if reply.status_code == 200:
            break
        assert reply.status_code == 503
        assert reply.json()["status"] == "loading" and 0 <= reply.json()["progress"] <= 1
        seen.append(server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    for reply in seen[:-1]: # the last may already have been served
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "loading"
        assert reply.headers["retry-after"]
    assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_when_idle(serve, number):
    server = serve()
    begin = time.monotonic()
    assert server.stop(number) == 0
    assert time.monotonic() - begin < 5


def test_signal_while_loading(serve):
    server = serve(wait=False)
    time.sleep(0.05)
    assert server.stop() in (0, -signal.SIGTERM) # before the handler is there the default applies


def test_signal_in_mid_stream(serve):
    """C51: the stream says that it is not complete; the process ends in order."""
    server = serve("--drain-timeout", "0")
    with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        first = [next(lines) for _ in range(3)]
        server.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert all('"finish_reason":null' in line for line in first)
    assert rest[-1] == "data: [DONE]"
    assert '"error"' in rest[-2] and '"shutting_down"' in rest[-2]
    assert not any('"finish_reason":"stop"' in line for line in first + rest)
    assert server.stop(None) == 0


def test_signal_with_waiting_requests(serve):
    server = serve("--max-running-requests", "1", "--drain-timeout", "0")
    statuses = []
    threads = [threading.Thread(target=lambda: statuses.append(server.post("/v1/completions", LONG).status_code)) for _ in range(4)]
    for t in threads:
        t.start()
    while sum(server.running()) < 4:
        time.sleep(0.005)
    begin = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begin < 10
    for t in threads:
        t.join()
    assert statuses == [503] * 4


def test_signal_with_stuck_reader(serve):
    """A client that does not take its bytes cannot keep the server from ending."""
    server = serve("--drain-timeout", "1")
    body = b'{"prompt": ["a","b","c","d"], "n": 4, "max_tokens": 2000, "stream": true, "ignore_eos": true}'
    s = socket.create_connection(("127.0.0.1", server.port))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    time.sleep(1)
    begin = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begin < 10
    s.close()


def test_embedded_model_is_the_default(nibble_bin, model_dir):
    if model_dir.name != "glm5-tiny":
        pytest.skip("the embedded model is not built")
    server = Server(nibble_bin, None)
    assert server.get("/v1/models").json()["data"][0]["id"] == "glm5-tiny"
    assert server.stop() == 0


def test_second_signal(serve):
    """The first signal waits for a stuck reader, the second does not."""
    server = serve()
    body = b'{"prompt": ["a","b","c","d"], "n": 4, "max_tokens": 2000, "stream": true, "ignore_eos": true}'
    s = socket.create_connection(("127.0.0.1", server.port))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    time.sleep(1)
    server.process.send_signal(signal.SIGTERM)
    while server.get("/health").status_code == 200:
        time.sleep(0.01)
    begin = time.monotonic()
    assert server.stop(signal.SIGTERM) == 0, server.log
    assert time.monotonic() - begin < 5
    s.close()
