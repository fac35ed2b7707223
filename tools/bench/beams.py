#!/usr/bin/env python3
"""What beam search costs beside as many sampled answers: time of a whole reply, in turns, medians.

    tools/bench/beams.py [--build build/release] [--model models/glm5-tiny] [--threads 1] [--turns 7] [--tokens 150]

Every prompt is new to the prefix cache.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from stream_cost import ROOT, Server  # noqa: E402


def seconds(server, prompt, tokens, **fields):
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **fields}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request) as reply:
        reply.read()
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default=ROOT / "build" / "release")
    parser.add_argument("--model", default=ROOT / "models" / "glm5-tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=150)
    args = parser.parse_args()
    server = Server(args, ["--max-running-requests", "16"])
    try:
        for width in (1, 2, 4, 8):
            sampled, beams = [], []
            for turn in range(args.turns):
                for i, (times, fields) in enumerate(((sampled, {"temperature": 0.8, "seed": turn}), (beams, {"use_beam_search": True}))):
                    prompt = [300 + (turn * 31 + width * 7 + i * 13 + k * k) % 3000 for k in range(100)]
                    times.append(seconds(server, prompt, args.tokens, n=width, **fields))
            a, b = statistics.median(sampled), statistics.median(beams)
            print(f"n = {width}: sampled {a * 1e3:.1f} ms, beams {b * 1e3:.1f} ms, {b / a:.2f}", flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
