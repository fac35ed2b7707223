#!/usr/bin/env python3
"""Figures of the scheduler, taken from a real server over plain sockets.

    tools/bench/scheduling.py gap      gaps between the tokens of running streams, without and with long prompts arriving
    tools/bench/scheduling.py prefix   time to the first token of a prompt, and of the same prompt again
    tools/bench/scheduling.py batch    tokens per second at 64 streams, beside `nibble bench decode --batch 64`
    tools/bench/scheduling.py cost     CPU time of a decode step outside the model, at 256 running requests

Options: --build, --model, --threads, --prompt-tokens; whatever else is given goes to `nibble serve`. Prompts that are longer than
the model's context get a copy of its folder that claims a longer one: what the answers say does not matter here.

`cost --perf` says where the time goes, by thread: `kernel`; `host`, which is what the folders engine, server, text and base do,
with locks and the clock; `copies`, memcpy() and its like, of whom cannot be seen; and for the engine's threads `model`, the rest.
`profiled` is the share of the thread's time that the samples cover: far from 1 perf had no time of its own to keep them.
"""

import argparse
import collections
import contextlib
import json
import pathlib
import random
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from stream_cost import ROOT, Server, run  # noqa: E402


def ids(n, seed):
    rng = random.Random(seed)
    return [rng.randrange(300, 3000) for _ in range(n)]


def post(server, body):
    s = socket.create_connection(("127.0.0.1", server.port))
    data = json.dumps({"ignore_eos": True, "temperature": 0, **body}).encode()
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
              b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return s


def first_token(server, prompt):
    begin = time.perf_counter()
    s = post(server, {"prompt": prompt, "max_tokens": 1, "stream": True})
    data = b""
    while b"data: " not in data:
        piece = s.recv(1 << 16)
        if not piece:
            raise SystemExit(data.decode())
        data += piece
    return time.perf_counter() - begin


def gaps(server, streams, tokens):
    """Seconds between the arrivals of pieces, over all streams."""
    selector, last, out = selectors.DefaultSelector(), {}, []
    for i in range(streams):
        selector.register(post(server, {"prompt": [400 + i, 7], "max_tokens": tokens, "stream": True}), selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            data, now = key.fileobj.recv(1 << 16), time.perf_counter()
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                continue
            if key.fd in last and b"data: {" in data:
                out.append(now - last[key.fd])
            if b"data: {" in data:
                last[key.fd] = now
    return sorted(out)


def share(values, q):
    return values[min(len(values) - 1, int(q * len(values)))]


def gap(args, server):
    length = args.prompt_tokens
    chunk = 512
    whole = first_token(server, ids(length, 1))
    chunk_ms = 1e3 * whole / -(-length // chunk)
    quiet = gaps(server, args.streams, args.tokens)
    stop = threading.Event()

    def arrive():
        for seed in range(2, 1000):
            if stop.is_set():
                return
            first_token(server, ids(length, seed))

    thread = threading.Thread(target=arrive)
    thread.start()
    busy = gaps(server, args.streams, args.tokens)
    stop.set()
    thread.join()
    print(json.dumps({"prompt_tokens": length, "chunk_ms": round(chunk_ms, 1), "streams": args.streams,
                      "quiet_p50_ms": round(1e3 * share(quiet, .5), 2), "quiet_p99_ms": round(1e3 * share(quiet, .99), 2),
                      "busy_p50_ms": round(1e3 * share(busy, .5), 2), "busy_p99_ms": round(1e3 * share(busy, .99), 2),
                      "busy_p99_in_chunks": round(1e3 * share(busy, .99) / chunk_ms, 2)}))


def prefix(args, server):
    rows = []
    for seed in range(3):
        prompt = ids(args.prompt_tokens, 100 + seed)
        cold = first_token(server, prompt)
        warm = min(first_token(server, prompt) for _ in range(3))
        rows.append({"cold_ms": round(1e3 * cold, 1), "warm_ms": round(1e3 * warm, 2), "share": round(warm / cold, 4)})
    print(json.dumps({"prompt_tokens": args.prompt_tokens, "runs": rows}))


def batch(args, server):
    bench = json.loads(subprocess.run([str(pathlib.Path(args.build) / "nibble"), "bench", "decode", "--model", str(args.model), "--batch",
                                       "64", "--tokens", "64", "--repeat", "3", "--threads", str(args.threads), "--json"],
                                      check=True, capture_output=True, text=True).stdout)
    run(server, 64, 8, True)
    begin = time.perf_counter()
    run(server, 64, args.tokens, True)
    rate = 64 * args.tokens / (time.perf_counter() - begin)
    print(json.dumps({"server_tokens_per_s": round(rate), "bench_tokens_per_s": round(bench["tokens_per_s"]),
                      "share": round(rate / bench["tokens_per_s"], 3)}))


WAITING = ("nbi_pool_run", "worker_main")  # in base/thread.c: the model's threads waiting for each other


def host_symbols(build):
    """Functions of the scheduler's and the server's folders, by the names of the object files."""
    rooms = ("/src/engine/", "/src/server/", "/src/text/", "/src/base/")
    names = set()
    for path in pathlib.Path(build).rglob("*.o"):
        if any(room in str(path) for room in rooms):
            listing = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True).stdout
            names |= {fields[2] for fields in map(str.split, listing.splitlines()) if len(fields) == 3 and fields[1] in "tT"}
    return names - set(WAITING)


def shares(args, data):
    """{thread: {kind: ms per step}} and the dearest functions outside the model."""
    host, kinds, functions = host_symbols(args.build), {}, collections.Counter()
    samples = subprocess.run(["perf", "script", "-i", data, "-F", "comm,period,ip,sym,dso"], capture_output=True, text=True, check=True).stdout
    for line in samples.splitlines():
        fields = line.split()
        if len(fields) < 5:
            continue
        thread, ms, symbol, library = fields[0], int(fields[1]) / args.tokens / 1e6, fields[3].split("+")[0], fields[-1]
        if "kernel" in library:
            kind = "kernel"
        elif "libc" in library and "mem" in symbol:
            kind = "copies"
        elif "libc" in library or "vdso" in library or "microhttpd" in library or symbol in host:
            kind = "host"
        else:
            kind = "model"
        kinds.setdefault(thread, collections.Counter())[kind] += ms
        if kind != "model":
            functions[f"{thread} {kind} {symbol}"] += ms
    return kinds, functions


def cost(args, server):
    n, data = 256, str(pathlib.Path(tempfile.gettempdir()) / f"nibble-perf-{server.process.pid}")
    run(server, n, 4, True)
    before = server.cpu()
    profile = subprocess.Popen(["perf", "record", "-q", "-e", "cpu-clock", "-F", "5000", "-p", str(server.process.pid), "-o",
                                data], stderr=subprocess.PIPE, text=True) if args.perf else None
    while profile and profile.poll() is None and not (pathlib.Path(data).exists() and pathlib.Path(data).stat().st_size):
        time.sleep(0.05)  # under load it may come too late to see anything
    run(server, n, args.tokens, True)
    after = server.cpu()
    if profile:
        profile.terminate()
        said = profile.communicate()[1]
        if profile.returncode not in (0, -15):
            raise SystemExit(f"perf ended with {profile.returncode}: {said}")
    spent = {}
    for tid, (name, ns) in after.items():
        spent[name] = spent.get(name, 0) + ns - before.get(tid, (name, 0))[1]
    print(json.dumps({"running": n, "ms_per_step": {k: round(v / args.tokens / 1e6, 3) for k, v in spent.items()}}))
    if profile:
        kinds, functions = shares(args, data)
        pathlib.Path(data).unlink()
        for thread, by_kind in kinds.items():
            profiled = sum(by_kind.values()) * args.tokens * 1e6 / spent.get(thread, 1)
            print(json.dumps({"thread": thread, "profiled": round(min(profiled, 9), 2),
                              "ms_per_step": {k: round(v, 3) for k, v in by_kind.most_common()}}))
        for name, ms in functions.most_common(30):
            print(f"{1e3 * ms:8.1f} us  {name}")


@contextlib.contextmanager
def long_enough(args):
    """The model, or a copy whose context holds the prompt and eight streams' answers."""
    config = json.loads((pathlib.Path(args.model) / "config.json").read_text())
    if args.prompt_tokens + 1 < config["max_position_embeddings"]:
        yield args.model
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in pathlib.Path(args.model).resolve().iterdir():
            (pathlib.Path(folder) / path.name).symlink_to(path)
        (pathlib.Path(folder) / "config.json").unlink()
        config["max_position_embeddings"] = -(-args.prompt_tokens // 8192) * 8192 + 8192
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gap", "prefix", "batch", "cost"])
    parser.add_argument("--build", default=ROOT / "build" / "release")
    parser.add_argument("--model", default=ROOT / "models" / "glm5-tiny")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--perf", action="store_true", help="cost: profile the process too")
    args, options = parser.parse_known_args()
    if args.what == "cost":
        options += ["--max-running-requests", "256"]
    with long_enough(args) as args.model:
        server = Server(args, options)
        try:
            {"gap": gap, "prefix": prefix, "batch": batch, "cost": cost}[args.what](args, server)
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
