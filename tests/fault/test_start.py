"""Starts that fail, and starts that are ended: whatever the process is doing then, it ends in order, at once and with one sentence."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest


def start(nibble_bin, *options):
    """SIGINT as at a terminal: a shell ignores it in what it starts in the background, and one that comes before the handlers is lost."""
    return subprocess.Popen([nibble_bin, "serve", "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def end(process, seconds=60):
    """(exit status, output); no sanitizer may have found anything."""
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still there after {seconds} s:\n{process.communicate()[0]}")
    assert not re.search(r"Sanitizer|runtime error", text), text
    return process.returncode, text


@pytest.fixture(scope="module")
def broken(model_dir, tmp_path_factory):
    """A model whose template is fine, so that Python starts, and whose weights are refused at once."""
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(model_dir, folder)
    (folder / "config.json").write_text("{")
    return folder


@pytest.mark.parametrize("options,sentence", [
    (["--tool-call-parser", "pigeon"], "pigeon"),
    (["--reasoning-parser", "pigeon"], "pigeon"),
    (["--chat-template", "/nowhere/a.jinja"], "/nowhere/a.jinja"),
    (["--model", "/nowhere"], "/nowhere"),
    (["--max-total-tokens", "90000000000"], "KV cache"),
    (["--host", "256.1.1.1"], "256.1.1.1"),
], ids=lambda v: v[0] if isinstance(v, list) else "")
def test_refused(nibble_bin, model_dir, options, sentence):
    if "--model" not in options:
        options = ["--model", str(model_dir), *options]
    status, text = end(start(nibble_bin, *options))
    assert status == 1 and sentence in text.splitlines()[-1], text


def test_refused_while_python_starts(nibble_bin, broken, sanitized, request):
    """The process used to end while Python was importing: what Python had loaded was taken down under it."""
    n = 200 if request.config.getoption("--long") else 6 if sanitized else 20
    for _ in range(n):
        status, text = end(start(nibble_bin, "--model", str(broken)))
        assert status == 1 and "config.json" in text.splitlines()[-1], text


def test_port_in_use(nibble_bin, model_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, text = end(subprocess.Popen([nibble_bin, "serve", "--model", model_dir, "--port", str(port)], stdout=subprocess.PIPE,
                                            stderr=subprocess.STDOUT, text=True))
    assert status == 1 and f"port {port}" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_while_it_loads(nibble_bin, model_dir, sanitized, request, number):
    """SIGTERM and SIGINT at random points of the start: before the handlers are there it dies of the signal, afterwards it ends well."""
    rng = random.Random(11)
    n = 200 if request.config.getoption("--long") else 4 if sanitized else 12
    for _ in range(n):
        process = start(nibble_bin, "--model", str(model_dir))
        time.sleep(rng.random() * (1.2 if sanitized else 0.4))
        process.send_signal(number)
        if rng.random() < 0.3: # the second one ends it at once
            process.send_signal(number)
            assert end(process)[0] in (0, -number)
            continue
        status, text = end(process)
        assert status == 0 or (status == -number and "listening" not in text), text


def test_restart_on_the_same_port(nibble_bin, model_dir, serve, request):
    """kill -9 of the server while it answers: the next one has the port at once, although connections of the old one are not yet
    forgotten by the system."""
    if request.config.getoption("--ranks") > 1:
        pytest.skip("the process that is killed is not the one with the port")
    first = serve()
    body = b'{"prompt":"x","max_tokens":2000,"ignore_eos":true,"stream":true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", first.port), timeout=60) as s:
        s.sendall(head + body)
        assert b"data: " in s.recv(65536) + s.recv(65536)
        os.kill(first.process.pid, signal.SIGKILL)
        assert first.process.wait(10) == -signal.SIGKILL
        second = serve(port=first.port)
    assert second.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    assert second.stop() == 0
