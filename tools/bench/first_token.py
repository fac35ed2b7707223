#!/usr/bin/env python3
"""Time from the start of `nibble serve` to the first token of an answer.

    tools/bench/first_token.py --model DIR [--build build/release] [--repeats 3] [-- SERVE OPTION...]

Per repeat: starts the server, waits for /health to say that it is ready (polled every millisecond), streams one completion of a
prompt of token ids and stops the clock at the first event. Prints seconds: to ready, to the first token, and the largest resident
memory of the server in bytes. The first repeat reads the checkpoint into the page cache and is printed as such.
"""

import argparse
import http.client
import json
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_ready(process, port, limit):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if process.poll() is not None:
            return False
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.001)
    return False


def first_event(port, prompt):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    line = answer.readline()
    if answer.status != 200 or not line.startswith(b"data:"):
        sys.exit(f"completion: HTTP {answer.status}: {(line + answer.read())[:400].decode(errors='replace')}")
    now = time.monotonic()
    answer.read()
    return now


def peak_memory(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def once(args, log):
    port = free_port()
    command = [str(pathlib.Path(args.build) / "nibble"), "serve", "--port", str(port), "--model", args.model, *args.options]
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        if not wait_ready(process, port, args.limit):
            log.seek(0)
            sys.exit(f"the server did not become ready:\n{log.read().decode(errors='replace')[-2000:]}")
        ready = time.monotonic() - begin
        token = first_event(port, list(range(5, 5 + args.tokens))) - begin
        return ready, token, peak_memory(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--build", default=ROOT / "build/release")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--limit", type=float, default=300, help="seconds to wait for the server")
    parser.add_argument("options", nargs="*", help="options of nibble serve, behind --")
    args = parser.parse_args()
    results = []
    for i in range(args.repeats + 1):
        with tempfile.TemporaryFile() as log:
            ready, token, memory = once(args, log)
        print(f"{'first' if i == 0 else 'again'}: ready {ready:.3f} s, first token {token:.3f} s, {memory / 1e9:.2f} GB resident at most",
              flush=True)
        if i:
            results.append(token)
    print(f"median to the first token, checkpoint in the page cache: {statistics.median(results):.3f} s")


if __name__ == "__main__":
    main()
