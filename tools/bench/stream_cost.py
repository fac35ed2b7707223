#!/usr/bin/env python3
"""What a streamed token costs the server in CPU time, by thread, and how many system calls it makes.

    tools/bench/stream_cost.py --build build/release --streams 1 16 64 [--strace]

Starts `nibble serve`, opens the streams over plain sockets and reads the kernel's own figures of every thread of the server
(/proc/PID/task/TID/schedstat, nanoseconds on a core) before and after. "server" is every thread but the engine's and its
compute workers: HTTP, streams, watcher. The engine's side is the difference between the same requests streamed and not
streamed, so use a small model and several rounds for that line.
"""

import argparse
import json
import pathlib
import re
import selectors
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKERS = ("engine", "nibble")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, args, options):
        self.port = free_port()
        command = [str(pathlib.Path(args.build) / "nibble"), "serve", "--port", str(self.port), "--model", str(args.model),
                   "--threads", str(args.threads), "--log-level", "warn", *options]
        self.process = subprocess.Popen(command)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5) as s:
                    s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    if b" 200 " in s.recv(4096):
                        return
            except OSError:
                pass
            time.sleep(0.02)
        raise SystemExit("the server is not ready")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)

    def cpu(self):
        """{thread id: (name, nanoseconds)}"""
        threads = {}
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            try:
                threads[task.name] = ((task / "comm").read_text().strip(), int((task / "schedstat").read_text().split()[0]))
            except OSError:
                pass
        return threads


def run(server, streams, tokens, stream, first=1):
    """Requests of `tokens` tokens over `streams` connections at once; returns bytes read."""
    selector = selectors.DefaultSelector()
    total = 0
    for i in range(streams):
        body = json.dumps({"prompt": [first + i, 7, 9], "max_tokens": tokens, "ignore_eos": True, "stream": stream,
                           "temperature": 0}).encode()
        s = socket.create_connection(("127.0.0.1", server.port))
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
                  b"Content-Length: %d\r\n\r\n" % len(body) + body)
        selector.register(s, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)
            total += len(data)
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return total


def cost(server, streams, tokens, stream):
    before, begin = server.cpu(), time.monotonic()
    run(server, streams, tokens, stream)
    seconds, after = time.monotonic() - begin, server.cpu()
    engine = http = 0
    for tid, (name, ns) in after.items():
        spent = ns - before.get(tid, (name, 0))[1]
        if name.startswith(WORKERS):
            engine += spent
        else:
            http += spent
    n = streams * tokens
    return {"server": http / n / 1e3, "engine": engine / n / 1e3, "tokens_per_s": n / seconds}


def syscalls(server, streams, tokens):
    """System calls of the server per streamed token, by name."""
    log = pathlib.Path("/tmp") / f"nibble-strace-{server.process.pid}"
    trace = subprocess.Popen(["strace", "-c", "-f", "-o", str(log), "-p", str(server.process.pid)], stderr=subprocess.DEVNULL)
    time.sleep(1)
    run(server, streams, tokens, True)
    trace.send_signal(signal.SIGINT)
    trace.wait(20)
    counts = {}
    for line in log.read_text().splitlines():
        found = re.match(r"\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)$", line)
        if found and found[2] != "total":
            counts[found[2]] = int(found[1]) / (streams * tokens)
    log.unlink()
    return {k: round(v, 3) for k, v in sorted(counts.items(), key=lambda kv: -kv[1]) if v > 0.01}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build" / "release")
    parser.add_argument("--model", default=ROOT / "models" / "glm5-tiny")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of the server")
    parser.add_argument("--strace", action="store_true", help="count system calls too")
    args, options = parser.parse_known_args()
    server = Server(args, options)
    try:
        run(server, 1, 50, True)
        for n in args.streams:
            best = {}
            for stream in (True, False):
                rounds = [cost(server, n, args.tokens, stream) for _ in range(args.rounds)]
                best[stream] = {k: (max if k == "tokens_per_s" else min)(r[k] for r in rounds) for k in rounds[0]}
            line = {"streams": n, "server_us_per_token": round(best[True]["server"], 2),
                    "engine_us_per_token": round(best[True]["engine"], 2),
                    "engine_us_per_token_not_streamed": round(best[False]["engine"], 2),
                    "server_us_per_token_not_streamed": round(best[False]["server"], 2),
                    "tokens_per_s": round(best[True]["tokens_per_s"])}
            if args.strace:
                line["syscalls_per_token"] = syscalls(server, n, min(args.tokens, 200))
            print(json.dumps(line), flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
