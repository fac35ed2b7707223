"""The system says no: a disk that is full, no more threads, clients that are killed (docs/operations.md, "What happens when")."""

import os
import re
import resource
import signal
import subprocess
import sys
import time

import httpx
import pytest

from api_server import free_port

CLIENT = """
import json, socket, sys
body = json.dumps({"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.sendall(b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
while s.recv(65536):
    print("more", flush=True)
"""


def test_clients_are_killed(serve):
    """kill -9: the kernel closes the connection, the request ends, its pages are free."""
    server = serve()
    clients = [subprocess.Popen([sys.executable, "-c", CLIENT, str(server.port)], stdout=subprocess.PIPE) for _ in range(4)]
    for c in clients:
        assert c.stdout.readline() == b"more\n"
    for c in clients:
        c.kill()
        c.wait()
        c.stdout.close()
    server.wait_idle(5)
    assert server.get("/health").json()["kv_tokens_used"] == 0
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    assert server.stop() == 0


def test_log_on_a_full_disk(nibble_bin, model_dir):
    """Lines that cannot be written are lost, requests are not."""
    port = free_port()
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([nibble_bin, "serve", "--model", model_dir, "--port", str(port), "--log-level", "debug"], stdout=full,
                                   stderr=full)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        for _ in range(5):
            reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x", "max_tokens": 3}, timeout=60)
            assert reply.status_code == 200
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def synth(nibble_bin, out, **kwargs):
    return subprocess.run([nibble_bin, "synth", "--like", "glm-5.2", "--layers", "4", "--experts", "8", "--set", "hidden_size=128", "--set",
                           "vocab_size=512", "--set", "eos_token_id=1", "--set", "intermediate_size=128", "--set",
                           "moe_intermediate_size=64", "--out", out], capture_output=True, text=True, timeout=120, **kwargs)


def test_output_on_a_full_disk(nibble_bin, tmp_path):
    """A checkpoint that does not fit: a sentence with the file, and no folder that looks complete."""
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN) # as a disk: write() fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    result = synth(nibble_bin, tmp_path / "small", preexec_fn=limit)
    assert result.returncode == 1, result.stderr
    assert re.search(r"File too large|No space left", result.stderr), result.stderr
    assert not (tmp_path / "small").exists() or not list((tmp_path / "small").glob("*.safetensors"))
    result = synth(nibble_bin, tmp_path / "small")
    assert result.returncode == 0, result.stderr


def test_output_to_a_full_pipe(nibble_bin, model_dir):
    """What a command prints is its result: when it cannot be written the command fails."""
    with open("/dev/full", "w") as full:
        result = subprocess.run([nibble_bin, "inspect", "--model", model_dir], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 1, result.stderr


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_no_more_threads(nibble_bin, model_dir, sanitized, threads):
    """With a limit on threads the server either says which start failed, or works with those it has."""
    if sanitized or os.getuid() != 0:
        pytest.skip("the limit holds for ordinary users, to which only root can change; sanitizers need threads of their own")
    nobody = 61234 + threads # an id that has no processes

    def limit():
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
        os.setgroups([])
        os.setgid(nobody)
        os.setuid(nobody)

    try:
        process = subprocess.Popen([nibble_bin, "serve", "--port", "0", "--model", model_dir], stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, preexec_fn=limit)
    except (PermissionError, subprocess.SubprocessError):
        pytest.skip("an ordinary user cannot run this build")
    try:
        text, _ = process.communicate(timeout=10)
        assert process.returncode == 1, text
        assert re.search(r"thread|HTTP server|Permission denied", text), text
    except subprocess.TimeoutExpired: # it serves
        process.terminate()
        text, _ = process.communicate(timeout=30)
        assert process.returncode == 0 and "ready" in text, text
