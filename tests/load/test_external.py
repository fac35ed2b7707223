"""`nibble bench serve` beside two load clients of other people: guidellm and sglang.bench_serving.

Counts are compared exactly, on the real server. Times are compared within 3 % on a server that keeps time (paced_server.py), whose
delays are long against what a busy machine adds, and on the real one; three attempts, since noise passes and a difference of
definition does not.
`scripts/setup load` installs the clients; without them the tests are skipped.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess

import pytest
from api_server import Server
from paced_server import PacedServer, text_stream

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "load" / "venv"
TOKENIZER = ROOT / "models" / "glm5-tiny"
# Its package needs torch to be imported; the file does not.
BENCH_SERVING = ("import importlib.util as u, runpy; "
                 "runpy.run_path(u.find_spec('sglang').submodule_search_locations[0] + '/bench_serving.py', run_name='__main__')")

N_REQUESTS, N_TOKENS, N_STREAMS = 16, 12, 4
PROMPTS = [f"What is {3 + i} plus {5 * i}? And is {'very ' * i}good?" for i in range(N_REQUESTS)]

pytestmark = pytest.mark.skipif(not (VENV / "requirements.txt").exists(), reason="scripts/setup load was not run")


def call(command, folder):
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": ""}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=200, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def with_nibble(nibble_bin, url, model, folder, streams=N_STREAMS):
    """The figures that all three have: counts, medians of TTFT and of the time per token, in ms."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "output_tokens": N_TOKENS}) + "\n" for p in PROMPTS))
    r = json.loads(call([nibble_bin, "bench", "serve", "--base-url", url, "--model", model, "--dataset-name", "file", "--dataset-path", path,
                         "--num-prompts", N_REQUESTS, "--max-concurrency", streams, "--ignore-eos", "--json"], folder).stdout)
    return {"requests": r["completed"], "input": r["total_input_tokens"], "output": r["total_output_tokens"],
            "ttft": r["median_ttft_ms"], "tpot": r["median_tpot_ms"], "itl": r["median_itl_ms"], "e2el": r["median_e2el_ms"],
            "throughput": r["output_throughput"]}


def with_guidellm(nibble_bin, url, model, folder, streams=N_STREAMS):
    """Its inter-token latency is that of a request: the time between first and last token, by the tokens but one. Medians are taken
    here: of an even number of values it reports the lower of the two in the middle, here 2 % less."""
    path, out = folder / "prompts.jsonl", folder / "guidellm.json"
    path.write_text("".join(json.dumps({"prompt": p, "output_tokens": N_TOKENS}) + "\n" for p in PROMPTS))
    call([VENV / "bin" / "guidellm", "benchmark", "run", "--target", url, "--model", model, "--processor", TOKENIZER,
          "--rate-type", "concurrent", "--rate", streams, "--max-requests", N_REQUESTS, "--data", path,
          "--data-args", '{"prompt_column": "prompt", "output_tokens_count_column": "output_tokens"}',
          "--backend-args", '{"extra_body": {"text_completions": {"temperature": 0}}}',
          "--output-path", out, "--disable-progress"], folder)
    b = json.loads(out.read_text())["benchmarks"][0]
    m = {key: value["successful"] for key, value in b["metrics"].items()}
    median = {key: statistics.median(r[key] or 0 for r in b["requests"]["successful"])
              for key in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")}
    return {"requests": b["request_totals"]["successful"], "input": m["prompt_token_count"]["total_sum"],
            "output": m["output_token_count"]["total_sum"], "ttft": median["time_to_first_token_ms"],
            "tpot": median["inter_token_latency_ms"], "e2el": median["request_latency"] * 1e3}


def with_sglang(nibble_bin, url, model, folder, streams=N_STREAMS):
    path, out = folder / "share.json", folder / "sglang.jsonl"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": "as long as needed"}]}
                                for p in PROMPTS]))
    call([VENV / "bin" / "python", "-c", BENCH_SERVING, "--backend", "sglang-oai", "--base-url", url, "--model", model,
          "--tokenizer", TOKENIZER, "--dataset-name", "sharegpt", "--dataset-path", path, "--sharegpt-output-len", N_TOKENS,
          "--num-prompts", N_REQUESTS, "--max-concurrency", streams, "--output-file", out, "--disable-tqdm"], folder)
    r = json.loads(out.read_text().splitlines()[-1])
    return {"requests": r["completed"], "input": r["total_input_tokens"], "output": r["total_output_tokens"],
            "ttft": r["median_ttft_ms"], "tpot": r["median_tpot_ms"], "itl": r["median_itl_ms"], "e2el": r["median_e2e_latency_ms"],
            "throughput": r["output_throughput"]}


CLIENTS = {"guidellm": with_guidellm, "sglang": with_sglang}


def compare_times(nibble_bin, tmp_path, name, start, model, streams=N_STREAMS):
    """`start` is a context with a server of this model."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with start() as server:
            ours = with_nibble(nibble_bin, server.url, model, folder, streams)
            theirs = CLIENTS[name](nibble_bin, server.url, model, folder, streams)
        differences = {key: theirs[key] / ours[key] - 1 for key in ("ttft", "tpot", "itl", "e2el", "throughput") if key in theirs}
        print(name, {key: f"{100 * d:+.2f} %" for key, d in differences.items()}, ours, theirs)
        assert (theirs["requests"], theirs["output"]) == (ours["requests"], ours["output"]) == (N_REQUESTS, N_REQUESTS * N_TOKENS)
        if all(abs(d) < 0.03 for d in differences.values()):
            return
    if os.getloadavg()[0] > 2 * os.cpu_count():
        pytest.skip(f"the machine is busy with other things: {differences}")
    assert not differences, f"nibble {ours}, {name} {theirs}"


@pytest.mark.parametrize("name", CLIENTS)
def test_times(nibble_bin, tmp_path, name):
    """The usage event goes only to those who ask for it: to others it is an event without choices, as servers have it (C43)."""
    def answer(body, i):
        return text_stream(0.4, 0.1, N_TOKENS, with_usage=bool(body.get("stream_options")))

    compare_times(nibble_bin, tmp_path, name, lambda: PacedServer(answer), "paced")


@pytest.mark.parametrize("name", CLIENTS)
def test_times_of_the_real_server(nibble_bin, tmp_path, name):
    """One request after another, so that the arrival of a neighbour changes no step; with one thread and the reference kernels, whose
    steps are long against what a client takes of the other core."""
    @contextlib.contextmanager
    def start():
        server = Server(nibble_bin, TOKENIZER, "--cpu-level", "reference", "--threads", "1")
        try:
            yield server
        finally:
            server.stop()

    compare_times(nibble_bin, tmp_path, name, start, "glm5-tiny", streams=1)


@pytest.fixture(scope="module")
def server(nibble_bin):
    server = Server(nibble_bin, TOKENIZER)
    yield server
    server.stop()


@pytest.mark.parametrize("name", CLIENTS)
def test_counts(nibble_bin, server, tmp_path, name):
    """The same prompts to the real server: the same requests, prompt tokens and output tokens."""
    ours = with_nibble(nibble_bin, server.url, "glm5-tiny", tmp_path)
    theirs = CLIENTS[name](nibble_bin, server.url, "glm5-tiny", tmp_path)
    print(name, ours, theirs)
    for key in ("requests", "input", "output"):
        assert theirs[key] == pytest.approx(ours[key], abs=1e-6), key  # guidellm sums in floating point
