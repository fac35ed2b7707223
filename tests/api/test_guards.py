"""Who may ask: API keys, other origins, addresses; and how long clients may take."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time

import anthropic
import httpx
import openai
import pytest

BODY = {"prompt": "x", "max_tokens": 1}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def wait_log(server, sentence, since=0, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any(re.search(sentence, line) for line in server.lines[since:]):
            return
        time.sleep(0.01)
    raise AssertionError(f"no \"{sentence}\" in:\n{server.log}")


def hang_up(server, sentence):
    since = len(server.lines)
    server.process.send_signal(signal.SIGHUP)
    wait_log(server, sentence, since)


def connect(server, seconds=30):
    return socket.create_connection(("127.0.0.1", server.port), timeout=seconds)


def closed(s):
    """Is it, by now? (Does not wait.)"""
    s.setblocking(False)
    try:
        return s.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def memory_kib(server):
    return int(re.search(r"VmRSS:\s+(\d+)", open(f"/proc/{server.process.pid}/status").read()).group(1))


def settled_memory_kib(server):
    """When the pages of the KV cache, which are taken in the background after the start, are there."""
    last, now = 0, memory_kib(server)
    while now - last > 256:
        time.sleep(0.3)
        last, now = now, memory_kib(server)
    return now


# ---------------------------------------------------------------- keys


def accepted(server, key):
    status = server.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
    assert status in (200, 401)
    return status == 200


def test_key_file(serve, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# team one\nalpha\n\n  beta \t\r\n   # another\n" + "k" * 512)
    server = serve("--api-key-file", str(file), "--api-key", "fixed", env={"NIBBLE_API_KEY": "environment"})
    good = ["alpha", "beta", "k" * 512, "fixed", "environment"]
    for key in good:
        assert accepted(server, key), key
    for key in ("alph", "alphaa", "# team one", "another", "k" * 511, "k" * 513, "k" * 5000, "alpha,beta", "alpha beta"):
        assert not accepted(server, key), key

    file.write_text("gamma\n")
    hang_up(server, "reload: 3 API keys")
    assert [accepted(server, key) for key in ("gamma", "alpha", "fixed", "environment")] == [True, False, True, True]
    for content, sentence in (("", "has no keys"), ("# only\n", "has no keys"), ("one\ntwo words\n", "line 2"), ("\n\nsch\xf6n\n", "line 3"),
                              ("k" * 513, "512")):
        file.write_text(content)
        hang_up(server, f"error: the API keys stay as they were: .*{sentence}")
        assert accepted(server, "gamma")
    file.unlink()
    hang_up(server, "error: the API keys stay as they were: --api-key-file")
    assert accepted(server, "gamma") and not accepted(server, "one")
    assert not re.search("gamma|alpha|fixed|environment", server.log), "keys do not belong into the log"
    assert server.stop() == 0, server.log


@pytest.mark.parametrize("content,sentence", [(None, "keys"), ("", "has no keys"), ("a b\n", "line 1"), ("ok\n" + "x" * 600, "line 2")])
def test_bad_key_file(nibble_bin, model_dir, tmp_path, content, sentence):
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    result = subprocess.run([nibble_bin, "serve", "--port", "0", "--model", model_dir, "--api-key-file", file], capture_output=True, text=True,
                            timeout=60)
    assert result.returncode == 1 and "--api-key-file" in result.stderr and sentence in result.stderr, result


def test_each_api_says_401_in_its_shape(serve):
    server = serve("--api-key", "right")
    wrong, right = ({"base_url": server.url, "api_key": key, "max_retries": 0} for key in ("wrong", "right"))
    for options in (wrong, right):
        openai_options = {**options, "base_url": server.url + "/v1"}
        ask = [lambda c=openai.OpenAI(**openai_options): c.models.list(),
               lambda c=openai.OpenAI(**openai_options): c.completions.create(model=None, prompt="x", max_tokens=1),
               lambda c=openai.OpenAI(**openai_options): c.responses.create(model=None, input="x", max_output_tokens=16)]
        claude = anthropic.Anthropic(**options)
        messages = [{"role": "user", "content": "x"}]
        ask_claude = [lambda: claude.messages.create(model=None, messages=messages, max_tokens=1),
                      lambda: claude.messages.count_tokens(model=None, messages=messages)]
        for call in ask + ask_claude:
            if options is right:
                call()
                continue
            with pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError)) as info:
                call()
            body = info.value.response.json()
            if call in ask_claude:
                assert body["type"] == "error" and body["error"]["type"] == "authentication_error"
            else:
                assert body["error"]["code"] == "invalid_api_key" and body["error"]["param"] is None
    assert server.get("/health").status_code == 200, "needs no key"
    assert server.stop() == 0, server.log


def test_warning_when_everybody_is_served(serve):
    words = "everybody who can reach"
    for options, warned in ((["--host", "0.0.0.0"], True), (["--host", "::"], True), (["--host", "127.0.0.1"], False), (["--host", "127.8.7.6"], False),
                            (["--host", "localhost"], False), (["--host", "0.0.0.0", "--api-key", "k"], False)):
        if options[1] == "::" and not os.path.exists("/proc/net/if_inet6"):
            continue
        server = serve(*options, wait=False)
        wait_log(server, "listening on")
        wait_log(server, "ready after")
        assert (f"warning: {words}" in server.log) == warned, server.log
        assert server.stop() == 0, server.log


# ---------------------------------------------------------------- origins


def preflight(server, origin, path="/v1/chat/completions", method="POST"):
    return httpx.options(server.url + path, headers={"Origin": origin, "Access-Control-Request-Method": method,
                                                     "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"})


def test_no_origin_by_default(server):
    reply = preflight(server, "https://app.example")
    assert reply.status_code == 405
    replies = [reply, server.get("/health", headers={"Origin": "https://app.example"}),
               server.post("/v1/completions", BODY, headers={"Origin": "https://app.example"})]
    for reply in replies:
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_named_origins(serve):
    server = serve("--cors-origin", "https://app.example", "--cors-origin", "http://localhost:3000", "--api-key", "k")
    key = {"Authorization": "Bearer k"}
    for origin in ("https://app.example", "http://localhost:3000"):
        reply = preflight(server, origin)
        assert reply.status_code == 204 and not reply.content
        assert reply.headers["access-control-allow-origin"] == origin and "Origin" in reply.headers["vary"]
        assert "POST" in reply.headers["access-control-allow-methods"] and "GET" in reply.headers["access-control-allow-methods"]
        assert reply.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
        replies = [server.post("/v1/completions", BODY, headers={"Origin": origin, **key}), server.get("/v1/models", headers={"Origin": origin}),
                   server.post("/v1/completions", {**BODY, "stream": True}, headers={"Origin": origin, **key}),
                   server.post("/v1/messages", {}, headers={"Origin": origin, **key})]
        assert [r.status_code for r in replies] == [200, 401, 200, 400]
        for reply in replies: # errors too: the page wants to show them
            assert reply.headers["access-control-allow-origin"] == origin
            assert "access-control-allow-credentials" not in reply.headers
    for origin in ("https://evil.example", "https://app.example.evil.example", "http://app.example", "null", "*", ""):
        assert preflight(server, origin).status_code == 405
        reply = server.post("/v1/completions", BODY, headers={"Origin": origin, **key})
        assert reply.status_code == 200 and "access-control-allow-origin" not in reply.headers
        assert "Origin" in reply.headers["vary"]
    assert server.stop() == 0, server.log


def test_every_origin(serve):
    server = serve("--cors-origin", "*")
    for origin in ("https://app.example", "null"):
        assert preflight(server, origin).headers["access-control-allow-origin"] == "*"
        assert server.post("/v1/completions", BODY, headers={"Origin": origin}).headers["access-control-allow-origin"] == "*"
    assert server.stop() == 0, server.log


@pytest.mark.parametrize("option,value", [
    ("--cors-origin", "app.example"), ("--cors-origin", "https://"), ("--cors-origin", "https://a.example/"), ("--cors-origin", ""),
    ("--header-timeout", "0"), ("--body-timeout", "x"), ("--idle-timeout", "0"), ("--max-connections", "0"), ("--max-header-bytes", "10"),
    ("--max-buffered-bytes", "1000"), ("--http-threads", "0"),
])
def test_wrong_usage(nibble_bin, option, value):
    result = subprocess.run([nibble_bin, "serve", option, value], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and option in result.stderr, result


# ---------------------------------------------------------------- slow clients


@pytest.fixture(scope="module")
def hasty(serve):
    """Cuts slow clients after seconds; 2 HTTP threads, as by default."""
    server = serve("--header-timeout", "2", "--body-timeout", "3", "--idle-timeout", "4", "--log-level", "debug", "--max-connections", "1000")
    yield server
    assert server.process.poll() is None
    assert server.stop() == 0, server.log
    assert "Sanitizer" not in server.log, server.log


def trickle(sockets, pieces, until):
    """A byte to each about every half second, so that no connection is ever idle."""
    i = 0
    while time.monotonic() < until:
        for s in sockets:
            try:
                s.send(pieces[i % len(pieces):][:1])
            except OSError:
                pass
        i += 1
        time.sleep(0.5)


def test_slow_headers_and_bodies(hasty):
    """Hundreds of clients that send a byte now and then: others are served meanwhile, and each is cut in time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    begin = time.monotonic()
    headers, bodies = ([connect(hasty) for _ in range(300)] for _ in range(2))
    for s in bodies:
        s.sendall(HEAD + b"Content-Length: 100000\r\n\r\n{\"prompt\": \"")
    for s in headers:
        s.sendall(HEAD + b"X-Slow: ")
    threads = [threading.Thread(target=trickle, args=(sockets, b"abcdefgh", begin + 12)) for sockets in (headers, bodies)]
    for t in threads:
        t.start()
    latency = []
    while time.monotonic() < begin + 5:
        t0 = time.monotonic()
        assert hasty.post("/v1/completions", BODY).status_code == 200
        latency.append(time.monotonic() - t0)
    for t in threads:
        t.join()
    assert all(closed(s) for s in headers) and all(closed(s) for s in bodies)
    assert sorted(latency)[len(latency) // 2] < 2, latency
    assert hasty.log.count("the headers took too long") >= 300
    assert hasty.log.count("the body took too long") >= 300
    for s in headers + bodies:
        s.close()


def test_silence_between_requests(hasty):
    """A kept connection lives between requests for the idle timeout, not longer."""
    with connect(hasty) as s:
        for _ in range(2):
            s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert s.recv(4096).startswith(b"HTTP/1.1 200")
            time.sleep(2)
        time.sleep(6)
        assert closed(s)


def test_long_work_is_not_slowness(hasty, sanitized):
    """Neither a long answer nor a long wait for it counts."""
    body = {"prompt": ["x"] * 16, "max_tokens": 10 if sanitized else 400, "ignore_eos": True, "temperature": 0}
    for _ in range(8):
        begin = time.monotonic()
        assert hasty.post("/v1/completions", body).status_code == 200
        if time.monotonic() - begin > 5:
            break
        body["max_tokens"] = min(2000, 2 * body["max_tokens"])
        body["prompt"] = body["prompt"] + ["y"] * 4
    else:
        pytest.fail("no answer took longer than the timeouts")
    with connect(hasty, 120) as s:
        data = json.dumps({**body, "stream": True}).encode()
        s.sendall(HEAD + f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        got = b""
        while piece := s.recv(1 << 20):
            got += piece
    assert b"data: [DONE]" in got[-200:], got[-300:]


def test_readers_that_do_not_read(hasty, sanitized):
    """Streams nobody takes are held with little memory, do not block others, and are cut."""
    if sanitized:
        pytest.skip("takes minutes, and sanitizers keep memory that is freed")
    data = json.dumps({"prompt": "x", "max_tokens": 1200, "ignore_eos": True, "stream": True, "logprobs": 20}).encode()
    warm = {"prompt": ["x"] * 8, "max_tokens": 300, "ignore_eos": True, "logprobs": 20}
    assert hasty.post("/v1/completions", warm).status_code == 200
    before = settled_memory_kib(hasty)
    readers = []
    for _ in range(8):
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", hasty.port))
        s.sendall(HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        readers.append(s)
    begin = time.monotonic()
    while sum(hasty.running()) < 8 and time.monotonic() < begin + 10:
        time.sleep(0.02)
    assert hasty.post("/v1/completions", BODY).status_code == 200
    got = [b""] * len(readers)
    while sum(hasty.running()) and time.monotonic() < begin + 60: # half of them take a byte now and then
        for i, s in enumerate(readers[:4]):
            got[i] += s.recv(1)
        time.sleep(0.25)
    assert hasty.running() == (0, 0)
    assert memory_kib(hasty) - before < 64 << 10
    for i, s in enumerate(readers):
        try:
            while piece := s.recv(1 << 16):
                got[i] += piece
        except ConnectionResetError:
            pass
        assert got[i].startswith(b"HTTP/1.1 200") and b"[DONE]" not in got[i]
        s.close()


# ---------------------------------------------------------------- how many, how much


def test_connections_per_address(serve):
    server = serve("--max-connections-per-address", "8", "--idle-timeout", "30")
    time.sleep(0.5) # the questions of the start have ended
    mine = [connect(server) for _ in range(12)]
    wait_log(server, "warning: . connections refused")
    end = time.monotonic() + 10
    while sum(closed(s) for s in mine) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    assert sum(closed(s) for s in mine) == 4
    with socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0), timeout=10) as other:
        other.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.recv(100).startswith(b"HTTP/1.1 200"), "another address"
    for s in mine:
        s.close()
    time.sleep(0.3)
    assert server.get("/health").status_code == 200
    assert server.stop() == 0, server.log


def test_connections_in_all(serve):
    """Beyond the limit clients wait; the places of slow ones become free."""
    server = serve("--max-connections", "16", "--header-timeout", "2")
    slow = [connect(server) for _ in range(40)]
    for s in slow:
        s.sendall(b"GET /hea")
    begin = time.monotonic()
    assert server.get("/health").status_code == 200
    assert time.monotonic() - begin < 20
    for s in slow:
        s.close()
    assert server.stop() == 0, server.log


def test_descriptors_end(serve):
    """The limit of open files bounds the connections, with a word about it."""
    server = serve(prefix=["prlimit", "--nofile=160:160"])
    wait_log(server, "at most 96 connections instead of 4096")
    many = [connect(server) for _ in range(150)]
    for s in many:
        s.close()
    assert server.post("/v1/completions", BODY).status_code == 200
    assert server.stop() == 0, server.log


def test_bodies_of_all_requests(serve, sanitized):
    """Many large bodies at once are refused before they fill the memory."""
    server = serve("--max-body-bytes", "4Mi", "--max-buffered-bytes", "8Mi")
    before = settled_memory_kib(server)
    sockets = [connect(server) for _ in range(12)]
    for s in sockets:
        s.sendall(HEAD + b"Content-Length: 4000000\r\n\r\n" + b" " * 1500000)
    time.sleep(0.5)
    assert sanitized or memory_kib(server) - before < 40 << 10
    for s in sockets:
        s.sendall(b" " * 2500000)
    statuses = sorted(s.recv(1000).split()[1] for s in sockets)
    assert statuses[0] == b"400" and statuses[-1] == b"503", statuses
    for s in sockets:
        s.close()
    assert server.post("/v1/completions", {**BODY, "stop": "y" * 10}).status_code == 200
    assert server.post("/v1/completions", {"prompt": "word " * 700000}).status_code == 400, "one large body has its place again"
    assert server.stop() == 0, server.log


@pytest.mark.parametrize("option,fits,cut", [((), 24000, 70000), (("--max-header-bytes", "128Ki"), 100000, 200000)])
def test_header_size(serve, option, fits, cut):
    server = serve(*option)
    assert server.get("/health", headers={"X-Long": "a" * fits}).status_code == 200
    with connect(server) as s:
        try:
            s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * cut + b"\r\n\r\n")
            reply = s.recv(1000)
        except ConnectionResetError:
            reply = b""
        assert not reply or reply.startswith(b"HTTP/1.1 431"), reply
    assert server.get("/health").status_code == 200
    assert server.stop() == 0, server.log
