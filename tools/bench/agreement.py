"""Do CPU and GPU write the same? Greedy answers of the embedded model to held-out prompts, through two servers.

Two answers may part only where the CPU's two best log-probabilities are closer than --tie: there rounding decides.
Exit status 1 when they part anywhere else. Prints one line per parting and a sum.
"""
import argparse
import json
import pathlib
import random
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/tiny"))
import evalset  # noqa: E402
from corpus import arith, chat, jsonobj, story, toolcall  # noqa: E402
from corpus.item import draw  # noqa: E402


def prompts(n, seed):
    rng = random.Random(seed)
    makers = [arith.make, chat.make, jsonobj.make, toolcall.make, story.make]
    items = [draw(makers[i % len(makers)], rng, held_out=True) for i in range(n)]
    return [evalset.prompt_text(item, thinking=i % 2 == 0) for i, item in enumerate(items)]


class Server:
    """`nibble serve` on a free port of this machine."""

    def __init__(self, nibble, device, options):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([nibble, "serve", "--device", device, "--port", str(port),
                                         "--model", str(ROOT / "models/glm5-tiny"), *options])
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit(f"nibble serve --device {device} ended with {self.process.returncode}")
            try:
                urllib.request.urlopen(self.url + "/health", timeout=1)
                return
            except OSError:
                time.sleep(0.1)
        sys.exit(f"nibble serve --device {device} is not ready after 60 s")

    def close(self):
        self.process.terminate()
        self.process.wait()

    def answer(self, prompt, max_tokens):
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)["choices"][0]["logprobs"]

    def answers(self, texts, max_tokens, together):
        with ThreadPoolExecutor(together) as pool:
            return list(pool.map(lambda p: self.answer(p, max_tokens), texts))


def parting(a, b):
    """First position whose tokens differ, or None."""
    for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"])):
        if x != y:
            return i
    return None if len(a["tokens"]) == len(b["tokens"]) else min(len(a["tokens"]), len(b["tokens"]))


def margin(answer, i):
    best = sorted(answer["top_logprobs"][i].values(), reverse=True)
    return best[0] - best[1]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nibble", default=str(ROOT / "build/cuda/nibble"))
    p.add_argument("--prompts", type=int, default=200)
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--tie", type=float, default=1e-3)
    p.add_argument("--together", type=int, default=8, help="requests at once (default 8)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--first", default="cpu", help="device (default cpu)")
    p.add_argument("--second", default="cuda", help="device (default cuda)")
    p.add_argument("--first-option", action="append", default=[], help="for the first server, repeatable")
    p.add_argument("--second-option", action="append", default=[], help="for the second server, repeatable")
    a = p.parse_args()
    texts, got = prompts(a.prompts, a.seed), []
    for device, options in ((a.first, a.first_option), (a.second, a.second_option)):
        server = Server(a.nibble, device, options)
        try:
            got.append(server.answers(texts, a.max_tokens, a.together))
        finally:
            server.close()
    ties = wrong = 0
    for i, (x, y) in enumerate(zip(*got)):
        at = parting(x, y)
        if at is None:
            continue
        gap = margin(x, at) if at < len(x["tokens"]) else 0.0
        ties, wrong = ties + (gap < a.tie), wrong + (gap >= a.tie)
        print(f"prompt {i} parts at token {at}: {x['tokens'][at:at + 1]} and {y['tokens'][at:at + 1]}, "
              f"the two best are {gap:.2e} apart")
    n = sum(len(x["tokens"]) for x in got[0])
    print(f"{a.prompts} prompts, {n} tokens: {a.prompts - ties - wrong} alike, {ties} part at a tie "
          f"(< {a.tie:g}), {wrong} elsewhere")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
