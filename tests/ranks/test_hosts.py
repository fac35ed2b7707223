"""Ranks of several hosts. Those of one machine take its parts for hosts (NIBBLE_COMM_HOST), so that all between leaders goes over MPI."""

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import time

import pytest
from ranks_util import completion, gone, leftovers, over_hosts, ranks_of
from test_comm_mpi import rank_calls  # noqa: F401
from test_ranks_die import BODY, Client
from test_serve_ranks import EXACT, PROMPTS


def run(rank_calls, hosts, *args, grace=1):  # noqa: F811
    return subprocess.run([*over_hosts(hosts, grace), rank_calls, *args], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abac", "abbb"])
def test_results(rank_calls, hosts):  # noqa: F811
    """Every collective, with hosts of one and of several ranks, and ranks that are dealt in turn: the bits of one host."""
    done = run(rank_calls, hosts)
    assert done.returncode == 0 and done.stdout == "ok\n", done


@pytest.mark.parametrize("hosts,how,sentence", [
    ("aab", "die", r"rank 2 on host b: not heard of for \d\.\d s: down, or cut off"),
    ("aab", "error", r"the disk is on fire"),
    ("abb", "die", r"rank 2 \(process \d+\) is gone: killed, or ended without a word"),
    ("abb", "stop", r"rank 2 \(process \d+\) is stopped"),
    ("abb", "error", r"(rank 2: )?the disk is on fire"),
])
def test_lost(rank_calls, tmp_path, hosts, how, sentence):  # noqa: F811
    """The last rank of three goes wrong, alone on its host or beside another: both others say the same."""
    done = run(rank_calls, hosts, how, tmp_path / "heard", grace=5 if "not heard" in sentence else 1)
    assert done.returncode != 0
    heard = sorted((tmp_path / "heard").read_text().splitlines())
    assert len(heard) == 2, done
    for rank, line in enumerate(heard):
        assert re.fullmatch(f"rank {rank}: {sentence}", line), done


def answers(serve, *options, **where):
    server = serve(*EXACT, *options, **where)
    told = [completion(server, p, logprobs=1, max_tokens=12) for p in PROMPTS]
    ranks = ranks_of(server.process.pid)
    os.kill(ranks[0], signal.SIGTERM)
    assert server.stop(None) == 0, server.log
    assert not gone(ranks.values())
    return [(a["text"], a["finish_reason"], a["logprobs"]["token_logprobs"]) for a in told]


@pytest.mark.parametrize("hosts,options", [("ab", []), ("abab", ["--ep-size", "2"])], ids=["two", "mixed"])
def test_same_bits(serve, hosts, options):
    """A layout gives the same answers, to the last bit, on one host and on two."""
    options = ["--tp-size", str(len(hosts)), *options]
    before = leftovers()
    assert answers(serve, *options, prefix=over_hosts("a" * len(hosts))) == answers(serve, *options, prefix=over_hosts(hosts))
    assert leftovers() <= before


def test_best_logits(serve, model_dir):
    """Greedily and with top_k hosts exchange their best logits; with log-probabilities, all: the same tokens, also beside each other."""
    bodies = [{"temperature": t, "top_k": k, "top_p": p, "min_p": m, "seed": i} for i, (t, k, p, m) in enumerate(
        [(0, -1, 1, 0), (1, 20, 1, 0), (0.7, 50, 0.9, 0), (1.5, 128, 0.95, 0.02), (3, 2, 1, 0), (1, -1, 0.9, 0), (1, 500, 0.9, 0)])]
    server = serve(*EXACT, "--tp-size", "3", "--speculative-algorithm", "mtp", prefix=over_hosts("aba"))
    whole = [completion(server, PROMPTS[1], max_tokens=20, ignore_eos=True, logprobs=1, **b)["text"] for b in bodies]
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        few = list(pool.map(lambda b: completion(server, PROMPTS[1], max_tokens=20, ignore_eos=True, **b)["text"], bodies))
    assert few == whole and len(set(few)) > 3
    vocab = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    for options in {}, {"top_k": 50, "temperature": 1}, {"logprobs": 1}:
        assert server.post("/start_profile", {}).status_code == 200
        completion(server, "Once upon a time there", max_tokens=8, **options)
        tables = server.post("/stop_profile", {}).json()["breakdown"]
        decode = next(t for t in tables if t["stage"] == "decode")
        gathered = sum(o["bytes"] for o in decode["operators"] if o["operator"] == "all_gather")
        assert 32 <= gathered and (gathered < vocab) == ("logprobs" not in options), (options, gathered)
    os.kill(ranks_of(server.process.pid)[0], signal.SIGTERM)
    assert server.stop(None) == 0, server.log


def test_clients_are_told(serve):
    """The only rank of another host is stopped: clients have an error, one line says why, and nothing stays."""
    before, sentence = leftovers(), "rank 1 on host b: not heard of"
    server = serve("--tp-size", "2", prefix=over_hosts("ab", grace=5))
    clients = [Client(server, "/v1/completions", BODY, stream) for stream in (True, False)]
    assert clients[0].begun.wait(60)
    ranks = ranks_of(server.process.pid)
    begin = time.monotonic()
    os.kill(ranks[1], signal.SIGSTOP)
    for c in clients:
        c.join(30)
        assert not c.is_alive() and re.search(sentence, c.told), c.told[-300:]
    print(f"told after {time.monotonic() - begin:.1f} s")
    assert server.stop(None, seconds=60) not in (0, None)
    assert not gone(ranks.values()) and leftovers() <= before
    assert len(re.findall(sentence, server.log)) == 1, server.log
