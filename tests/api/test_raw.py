"""Hostile and clumsy clients, on bare sockets."""

import json
import socket
import time

import pytest

GOOD = b'{"prompt": "x", "max_tokens": 2, "temperature": 0}'


def connect(server, seconds=30):
    s = socket.create_connection(("127.0.0.1", server.port), timeout=seconds)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def request(body=GOOD, path="/v1/completions", method="POST", headers=()):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def read_reply(s):
    """(status, headers, body) of one reply with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = s.recv(65536)
        assert piece, f"closed after {data!r}"
        data += piece
    head, body = data.split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    while len(body) < int(headers["content-length"]):
        piece = s.recv(65536)
        assert piece
        body += piece
    n = int(headers["content-length"])
    assert len(body) == n, "one reply at a time"
    return int(lines[0].split()[1]), headers, body


def read_to_end(s):
    data = b""
    try:
        while piece := s.recv(65536):
            data += piece
    except (ConnectionResetError, TimeoutError):
        pass
    return data


def alive(server):
    with connect(server) as s:
        s.sendall(request())
        assert read_reply(s)[0] == 200


def test_keep_alive(server):
    with connect(server) as s:
        for _ in range(5):
            s.sendall(request())
            status, _, body = read_reply(s)
            assert status == 200 and json.loads(body)["choices"]


def test_pipelined(server):
    """Several requests at once get their replies in order."""
    with connect(server) as s:
        s.sendall(request() + request(b"{") + request(method="GET", path="/health", body=b"") + request(b"", path="/nope"))
        data, statuses = b"", []
        end = time.monotonic() + 30
        while len(statuses) < 4 and time.monotonic() < end:
            data += s.recv(65536)
            statuses = [int(part.split()[0]) for part in data.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [200, 400, 200, 404]


def test_one_byte_at_a_time(server):
    with connect(server) as s:
        for byte in request():
            s.sendall(bytes([byte]))
            time.sleep(0.0005)
        assert read_reply(s)[0] == 200


def test_slow_bodies_hold_nothing(server):
    """Many requests that never get complete do not keep others from being answered."""
    slow = [connect(server) for _ in range(50)]
    for s in slow:
        s.sendall(request()[:-10])
    begin = time.monotonic()
    alive(server)
    assert time.monotonic() - begin < 5
    for s in slow:
        s.close()
    alive(server)


@pytest.mark.parametrize("data", [
    b"\r\n\r\n", b"\x00" * 100, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost x\r\n\r\n", b"GET /health HTTP/1.1\r\n: x\r\n\r\n", b"G" * 100_000,
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
], ids=lambda v: repr(v[:24]))
def test_bad_http(server, data):
    """Refused, cut, or (where more could make it a request) waited for; and the server goes on."""
    with connect(server, 2) as s:
        try:
            s.sendall(data)
        except OSError: # already refused
            pass
        reply = read_to_end(s)
        assert not reply or reply.startswith(b"HTTP/1.") and b" 200 " not in reply.split(b"\r\n")[0], reply[:200]
    alive(server)


def test_body_that_never_comes(serve):
    """Chunks of any claimed size reserve nothing, and do not keep the server from ending."""
    server = serve()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    sockets = [connect(server) for _ in range(20)]
    for s in sockets:
        s.sendall(head + b"ffffffffffffff\r\n{")
    alive(server)
    begin = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begin < 1.5
    for s in sockets:
        s.close()


def test_no_length(server):
    with connect(server) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\r\n")
        status, _, body = read_reply(s)
        assert status == 411
        assert json.loads(body)["error"]["code"] == "length_required"


def test_large_headers_that_fit(server):
    with connect(server) as s:
        s.sendall(request(headers=["X-Long: " + "a" * 8000]))
        assert read_reply(s)[0] == 200


def test_expect_continue(server):
    head, body = request(headers=["Expect: 100-continue"]).split(b"\r\n\r\n", 1)
    with connect(server) as s:
        s.sendall(head + b"\r\n\r\n")
        assert s.recv(100).startswith(b"HTTP/1.1 100 ")
        s.sendall(body)
        assert read_reply(s)[0] == 200
    with connect(server) as s:
        s.sendall(request(path="/nope", headers=["Expect: 100-continue"])[:-len(GOOD)])
        assert read_reply(s)[0] == 404


def test_error_before_the_body(server):
    """The body of a refused request is read and dropped; the connection serves the next one."""
    with connect(server) as s:
        s.sendall(request(b"x" * 1_000_000, path="/nope"))
        assert read_reply(s)[0] == 404
        s.sendall(request())
        assert read_reply(s)[0] == 200


def test_http_1_0(server):
    with connect(server) as s:
        s.sendall(request().replace(b"HTTP/1.1", b"HTTP/1.0"))
        data = read_to_end(s)
        assert b" 200 " in data.split(b"\r\n")[0] and b'"choices"' in data


def test_http_1_0_stream(server):
    with connect(server) as s:
        body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
        s.sendall(request(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        data = read_to_end(s)
        assert data.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_cut_while_sending(server, share):
    data = request(b'{"prompt": "%s", "max_tokens": 1}' % (b"word " * 2000))
    for _ in range(10):
        with connect(server) as s:
            s.sendall(data[:int(len(data) * share)])
    alive(server)


def test_reset_while_reading(server):
    """A client that resets the connection instead of closing it."""
    for _ in range(10):
        s = connect(server)
        s.sendall(request(b'{"prompt": "x", "max_tokens": 500, "stream": true, "ignore_eos": true}'))
        s.recv(100)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        s.close()
    server.wait_idle(5)
    alive(server)


def test_reader_that_does_not_read(server):
    """Answers wait for a slow reader without holding others up."""
    s = connect(server)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.sendall(request(b'{"prompt": ["a", "b", "c", "d"], "n": 4, "max_tokens": 1500, "stream": true, "ignore_eos": true}'))
    time.sleep(1)
    alive(server)
    s.close()
    server.wait_idle(10)
