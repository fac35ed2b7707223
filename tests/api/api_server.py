"""A server process for the API tests, and how to read a stream. Imported by conftest.py and the tests."""

import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time

import httpx
import openai

START_SECONDS = 120


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """One `nibble serve` process."""

    def __init__(self, binary, model, *options, wait=True, env=None, port=None, ca=None, key=None, prefix=()):
        """`ca`: the server speaks HTTPS with a certificate of this file; `key`: sent with every request; `prefix`: a command that
        runs the server's."""
        self.port = port or free_port()
        self.url = f"{'https' if ca else 'http'}://127.0.0.1:{self.port}"
        self.verify = ssl.create_default_context(cafile=ca) if ca else True
        self.key = key
        self.lines = []
        self.quiet = "error" in options  # of --log-level
        command = [*prefix, str(binary), "serve", "--port", str(self.port)]
        if model is not None:
            command += ["--model", str(model)]
        self.process = subprocess.Popen(command + list(options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        env={**os.environ, **(env or {})})
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        if wait:
            self.wait_ready()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self):
        return "\n".join(self.lines)

    def get(self, path, **kwargs):
        return httpx.get(self.url + path, timeout=60, verify=self.verify, headers=self._headers(kwargs), **kwargs)

    def post(self, path, body, **kwargs):
        return httpx.post(self.url + path, json=body, timeout=300, verify=self.verify, headers=self._headers(kwargs), **kwargs)

    def _headers(self, kwargs):
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {**key, **kwargs.pop("headers", {})}

    def wait_ready(self):
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                self.reader.join(5)
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            try:
                if self.get("/health").status_code == 200:
                    return self._wait_log(min(end, time.monotonic() + 2))
            except httpx.TransportError:
                pass
            time.sleep(0.01)
        raise AssertionError(f"not ready after {START_SECONDS} s:\n{self.log}")

    def _wait_log(self, end):
        """What the start logged is read by a thread of its own, perhaps after the server has answered."""
        while "ready after" not in self.log and not self.quiet and time.monotonic() < end:
            time.sleep(0.005)

    def stop(self, number=signal.SIGTERM, seconds=60):
        """Ends the server (None: waits for the end); returns its exit status."""
        if number and self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"still there {seconds} s after signal {number}:\n{self.log}")
        self.reader.join(5)
        return status

    def running(self):
        """(running, waiting) as /health reports them."""
        health = self.get("/health").json()
        return health["running"], health["waiting"]

    def wait_idle(self, seconds):
        """Seconds until nothing runs or waits; fails when that takes longer than allowed."""
        begin = time.monotonic()
        while self.running() != (0, 0):
            assert time.monotonic() - begin < seconds, f"{self.running()} requests after {seconds} s"
            time.sleep(0.005)
        return time.monotonic() - begin

    def client(self, **kwargs):
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=300, **kwargs)

    def async_client(self, **kwargs):
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=300, **kwargs)


def sse(response):
    """The events of a streamed reply: parsed JSON, and the string "[DONE]"."""
    events = []
    for line in response.iter_lines():
        if not line:
            continue
        assert line.startswith("data: "), line
        data = line[len("data: "):]
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def stream(server, path, body):
    """All events of a streamed request that must succeed."""
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=300) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return sse(response)
