"""The time of day is set while the server works, and the server is stopped for seconds (docs/operations.md, "What happens when")."""

import datetime
import http.client
import json
import pathlib
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time

import httpx
import pytest

from api_server import sse

HOUR = 3600
ASK = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


class WallClock:
    """Seconds that are added to the server's time of day."""

    def __init__(self, folder):
        self.file = folder / "seconds"
        self.set(0)
        self.library = folder / "wall_clock.so"
        compiler = shutil.which("cc")
        if not compiler:
            pytest.skip("no C compiler")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", self.library, pathlib.Path(__file__).with_name("wall_clock.c")], check=True)

    def set(self, seconds):
        self.seconds = seconds
        with open(self.file, "r+b" if self.file.exists() else "wb") as f:
            f.write(struct.pack("q", seconds))

    def jump(self, stop):
        """Hours to and fro, many times a second, until `stop`."""
        rng = random.Random(1)
        while not stop.wait(0.02):
            self.set(rng.choice([-30 * HOUR, -7 * HOUR, 0, 2 * HOUR, 26 * HOUR, 4000 * HOUR]))

    @property
    def env(self):
        return {"LD_PRELOAD": str(self.library), "WALL_CLOCK_FILE": str(self.file)}


class Jumping:
    """The clock jumps inside of a `with`."""

    def __init__(self, clock):
        self.clock, self.stop = clock, threading.Event()

    def __enter__(self):
        self.thread = threading.Thread(target=self.clock.jump, args=(self.stop,))
        self.thread.start()

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


@pytest.fixture
def clock(tmp_path, sanitized):
    if sanitized:
        pytest.skip("the sanitizers' own wrappers must come first")
    return WallClock(tmp_path)


def streamed(server, **fields):
    with httpx.stream("POST", server.url + "/v1/completions", json={**ASK, **fields, "stream": True}, timeout=120) as reply:
        assert reply.status_code == 200
        events = sse(reply)
    assert events[-1] == "[DONE]"
    assert not [e for e in events[:-1] if "error" in e]
    return "".join(e["choices"][0]["text"] for e in events[:-1] if e["choices"]), events[0]["created"]


def lines(path):
    """Whole lines."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def histogram(server, name):
    text = server.get("/metrics").text
    return [float(re.search(rf"nibble:{name}_{part}\S* (\S+)", text)[1]) for part in ("sum", "count")]


def test_streams_and_durations_while_the_time_is_set(serve, clock, tmp_path):
    """Tokens, time limits, histograms and the durations in logs do not see it."""
    access, requests = tmp_path / "access", tmp_path / "requests"
    server = serve("--access-log", str(access), "--request-log", str(requests), "--header-timeout", "60", "--idle-timeout", "60", env=clock.env)
    plain, _ = streamed(server)
    begin = time.monotonic()
    with Jumping(clock):
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(streamed(server)[0])) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert answers == [plain] * 4
    seconds = time.monotonic() - begin
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_decode_time_seconds", "queue_time_seconds"):
        total, count = histogram(server, name)
        assert count == 5 and 0 <= total < 5 * (seconds + 60), name
    total, count = histogram(server, "inter_token_latency_seconds")
    assert count == 5 * (ASK["max_tokens"] - 1) and 0 < total < 5 * (seconds + 60)
    assert server.stop() == 0
    assert len(lines(requests)) == 5
    for line in lines(requests):
        assert line["status"] == 200 and 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"] < 1e3 * (seconds + 60)
    assert all(0 <= line["ms"] < 1e3 * (seconds + 60) for line in lines(access))


def test_time_limits_while_the_time_is_set(serve, clock):
    """A limit of a second is a second: neither at once nor in hours."""
    server = serve("--request-timeout", "1", env=clock.env)
    with Jumping(clock):
        for _ in range(2):
            begin = time.monotonic()
            reply = server.post("/v1/completions", {**ASK, "max_tokens": 8000})
            assert reply.status_code == 504 and reply.json()["error"]["code"] == "request_timeout"
            assert 0.99 < time.monotonic() - begin < 10
        assert server.post("/v1/completions", {**ASK, "max_tokens": 2}).status_code == 200


def test_connections_while_the_time_is_set(serve, clock):
    """A kept connection, and one in the middle of its headers, live on; one that may wait two seconds is cut after them."""
    server = serve("--header-timeout", "2", "--idle-timeout", "60", env=clock.env)
    kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    kept.request("GET", "/health")
    assert kept.getresponse().read()
    same = kept.sock
    slow = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    slow.sendall(b"GET /health HTTP/1.1\r\nHo")
    never = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    never.sendall(b"GET /health HTTP/1.1\r\nHo")
    begin = time.monotonic()
    with Jumping(clock):
        time.sleep(0.7)
        slow.sendall(b"st: x\r\n\r\n")
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")
        never.recv(4096)
        assert 1 < time.monotonic() - begin < 20
        kept.request("GET", "/health")
        assert kept.getresponse().status == 200 and kept.sock is same
    slow.close()
    never.close()
    kept.close()


def test_dates_follow_the_time_of_day(serve, clock, tmp_path):
    access = tmp_path / "access"
    server = serve("--access-log", str(access), env=clock.env)

    def answered():
        return [line for line in lines(access) if line["path"] == "/v1/completions"] if access.exists() else []

    for n, hours in enumerate((0, 49, -100)):
        clock.set(hours * HOUR)
        _, created = streamed(server, max_tokens=2)
        end = time.monotonic() + 20
        while len(answered()) <= n:
            assert time.monotonic() < end
            time.sleep(0.01)
        expected = time.time() + hours * HOUR
        stamp = datetime.datetime.fromisoformat(answered()[n]["ts"].replace("Z", "+00:00")).timestamp()
        assert abs(created - expected) < 60 and abs(stamp - expected) < 60
    assert server.stop() == 0


def test_the_end_while_the_time_is_set(serve, clock):
    """SIGTERM waits for the answer that was begun, as long as it may and no longer."""
    server = serve("--drain-timeout", "60", env=clock.env)
    with Jumping(clock):
        text = []
        thread = threading.Thread(target=lambda: text.append(streamed(server, max_tokens=1000)[0]))
        thread.start()
        while server.running() == (0, 0):
            assert not text, "over too soon"
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert server.stop(None) == 0
    assert len(text) == 1 and text[0]
    impatient = serve("--drain-timeout", "1", env=clock.env)
    with Jumping(clock):
        with httpx.stream("POST", impatient.url + "/v1/completions", json={**ASK, "max_tokens": 8000, "stream": True}, timeout=60) as reply:
            rows = reply.iter_lines()
            next(rows)
            begin = time.monotonic()
            impatient.process.send_signal(signal.SIGTERM)
            rest = list(rows)
        assert "shutting_down" in " ".join(rest)
        assert 0.9 < time.monotonic() - begin < 20
        assert impatient.stop(None) == 0


def test_a_stopped_server_goes_on(serve):
    """SIGSTOP for seconds, as a machine that was suspended: every stream ends with the tokens of a quiet one."""
    server = serve()
    plain, _ = streamed(server, max_tokens=1000)
    kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    kept.request("GET", "/health")
    assert kept.getresponse().read()
    same, answers = kept.sock, []
    threads = [threading.Thread(target=lambda: answers.append(streamed(server, max_tokens=1000)[0])) for _ in range(2)]
    for t in threads:
        t.start()
    while server.running()[0] < 2:
        assert not answers, "over too soon"
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    server.process.send_signal(signal.SIGCONT)
    for t in threads:
        t.join()
    assert answers == [plain] * 2
    kept.request("GET", "/health")
    assert kept.getresponse().status == 200 and kept.sock is same
    kept.close()
    assert server.stop() == 0
