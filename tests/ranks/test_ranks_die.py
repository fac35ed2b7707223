"""A rank that is killed or stopped under load: every client is told, nothing stays, one line says who it was."""

import json
import os
import re
import signal
import threading
import time

import httpx
import pytest
from ranks_util import family, gone, leftovers, ranks_of

BODY = {"prompt": "one two three", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
SURFACES = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "count"}], "max_tokens": 4000, "ignore_eos": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "count"}], "max_tokens": 4000, "ignore_eos": True},
}


class Client(threading.Thread):
    """A request in flight; keeps what it was told."""

    def __init__(self, server, path, body, stream):
        super().__init__()
        self.args = server.url + path, {**body, "stream": stream}
        self.stream, self.begun, self.told, self.status = stream, threading.Event(), "", None
        self.start()

    def run(self):
        url, body = self.args
        try:
            with httpx.stream("POST", url, json=body, timeout=60) as reply:
                self.status = reply.status_code
                for text in reply.iter_text():
                    self.told += text
                    self.begun.set()
        except httpx.TransportError as e:
            self.told += f"<{type(e).__name__}>"
        self.begun.set()


def load(server):
    model = server.get("/v1/models").json()["data"][0]["id"]
    clients = [Client(server, path, {**body, "model": model}, stream) for path, body in SURFACES.items() for stream in (True, False)]
    for c in clients:
        if c.stream:
            assert c.begun.wait(60)
    end = time.monotonic() + 60
    while server.running()[0] < len(clients):
        assert time.monotonic() < end, server.running()
        time.sleep(0.01)
    return clients


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_follower(serve, how):
    before = leftovers()
    server = serve("--tp-size", "3")
    clients = load(server)
    processes = family(server.process.pid)
    victim = ranks_of(server.process.pid)[1]
    begin = time.monotonic()
    os.kill(victim, how)
    assert server.stop(None, seconds=60) not in (0, None)
    print(f"all over after {time.monotonic() - begin:.1f} s")
    assert not gone(processes) and leftovers() <= before
    sentence = f"rank 1 \\(process {victim}\\) is " + ("gone: killed, or ended without a word" if how == signal.SIGKILL else "stopped")
    for c in clients:
        c.join(10)
        assert not c.is_alive() and re.search(sentence, c.told), c.told[-300:]
        if not c.stream:
            assert c.status == 500 and "error" in json.loads(c.told), c.told
    assert len(re.findall(sentence, server.log)) == 1, server.log


def test_leader(serve):
    """Rank 0 dies: its clients lose their connections, the others end and one of them says why."""
    before = leftovers()
    server = serve("--tp-size", "2")
    client = Client(server, "/v1/completions", BODY, True)
    assert client.begun.wait(60)
    processes = family(server.process.pid)
    victim = ranks_of(server.process.pid)[0]
    os.kill(victim, signal.SIGKILL)
    assert server.stop(None, seconds=60) not in (0, None)
    assert not gone(processes) and leftovers() <= before
    client.join(10)
    assert not client.is_alive()
    assert len(re.findall(rf"rank 0 \(process {victim}\) is gone", server.log)) == 1, server.log


def test_launcher(serve):
    """Killed itself, it leaves no rank behind."""
    server = serve("--tp-size", "2")
    processes = family(server.process.pid)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(30)
    assert not gone(processes)


def test_mpiexec(serve):
    """So does mpiexec: its ranks notice, and the launcher says that it failed."""
    server = serve("--tp-size", "2")
    processes = family(server.process.pid)
    mpiexec = [p for p in processes if p not in ranks_of(server.process.pid).values() and p != server.process.pid]
    os.kill(mpiexec[0], signal.SIGKILL)
    assert server.stop(None, seconds=60) not in (0, None)
    assert not gone(processes)
    assert "the process that started this rank is gone" in server.log


def test_while_it_loads(serve, nibble_bin, model_dir):
    """A rank that dies before the model is there: /health says 503 until then, and the rest ends."""
    server = serve("--tp-size", "2", wait=False)
    end = time.monotonic() + 60
    while len(ranks_of(server.process.pid)) < 2:
        assert time.monotonic() < end
        time.sleep(0.005)
    processes = family(server.process.pid)
    os.kill(ranks_of(server.process.pid)[1], signal.SIGKILL)
    assert server.stop(None, seconds=60) not in (0, None)
    assert not gone(processes)
