"""Field cases that need a server and had no test of their own; docs/field-cases.md says where the others are."""

import json
import pathlib
import re
import socket
import struct
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest
from api_server import Server, stream

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in ("tests/golden", "tools/golden"):
    sys.path.append(str(ROOT / folder))
import formats  # noqa: E402
import stfile  # noqa: E402

THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def changed_model(model_dir, target, **replaced):
    """A folder of links to the model's files, except those that are given (bytes, or None: absent)."""
    target.mkdir()
    for path in model_dir.iterdir():
        name = path.name
        if name not in replaced:
            (target / name).symlink_to(path)
        elif replaced[name] is not None:
            (target / name).write_bytes(replaced[name])
    return target


def strict(text):
    """JSON as the standard has it: no NaN, no Infinity."""
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


# ---------------------------------------------------------------- loading


def test_shard_that_is_not_there(nibble_bin, model_dir, tmp_path):
    """C13: no request is ever served; the process ends with the file's name."""
    index = json.loads((model_dir / "model.safetensors.index.json").read_text())
    name = sorted(set(index["weight_map"].values()))[1]
    server = Server(nibble_bin, changed_model(model_dir, tmp_path / "model", **{name: None}), wait=False)
    served = []
    while server.process.poll() is None:
        try:
            served.append(server.get("/health").status_code)
        except httpx.TransportError:
            pass
    assert server.stop(None) == 1, server.log
    assert name in server.log and 200 not in served


def quantize_head(tensors, *ignored):
    """lm_head as packed weight, block scales and global scale, and listed nowhere."""
    packed, scale, scale_2 = formats.nvfp4_modelopt(stfile.floats(tensors["lm_head.weight"]))
    tensors["lm_head.weight"] = "U8", list(packed.shape), packed.tobytes()
    tensors["lm_head.weight_scale"] = "F8_E4M3", list(scale.shape), scale.tobytes()
    tensors["lm_head.weight_scale_2"] = stfile.f32(np.float32(scale_2), ())
    tensors["lm_head.input_scale"] = stfile.f32(np.float32(0.01), ())
    for names in ignored:
        names.remove("lm_head")


def plain_draft_layer(tensors, *ignored):
    """Every matrix of the draft layer in BF16 (its first 16 bits of float32), and no list says so."""
    for name in [n for n in tensors if n.startswith("model.layers.5.") and n.endswith(".weight_scale_2")]:
        base = name.removesuffix(".weight_scale_2")
        parts = [tensors.pop(base + s) for s in (".weight", ".weight_scale", ".weight_scale_2")]
        tensors.pop(base + ".input_scale", None)
        values = formats.nvfp4_modelopt_decode(stfile.array(parts[0]), stfile.array(parts[1]), stfile.floats(parts[2])[()])
        bits = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        tensors[base + ".weight"] = "BF16", list(bits.shape), bits.tobytes()
    for names in ignored:
        names[:] = [n for n in names if "layers.5" not in n]


def no_draft_layer(tensors, *_):
    for name in [n for n in tensors if n.startswith("model.layers.5.")]:
        del tensors[name]


def rewritten(model_dir, target, change):
    """The model with other tensors and lists of what is not quantized."""
    tensors = stfile.read_folder(model_dir)
    config, quantization = (json.loads((model_dir / name).read_text()) for name in ("config.json", "hf_quant_config.json"))
    change(tensors, config["quantization_config"]["ignore"], quantization["quantization"]["exclude_modules"])
    drop = {path.name: None for path in model_dir.iterdir() if "safetensors" in path.name}
    changed_model(model_dir, target, **drop, **{"config.json": json.dumps(config).encode(),
                                                "hf_quant_config.json": json.dumps(quantization).encode()})
    stfile.write_file(target / "model.safetensors", tensors)
    return target


@pytest.mark.parametrize("change", [quantize_head, plain_draft_layer, no_draft_layer])
def test_drafts_of_odd_checkpoints(nibble_bin, serve, trained, model_dir, tmp_path, change):
    """C07: the draft layer shares a head that is NVFP4. C10: the draft layer is BF16 and no list says so, or it is absent. Drafts are
    accepted, or a line says that there are none; the text is the same."""
    model = rewritten(model_dir, tmp_path / "model", change)
    shown = json.loads(subprocess.run([nibble_bin, "inspect", "--model", model, "--json"], capture_output=True, check=True).stdout)
    head = ["nvfp4" if change is quantize_head else "bf16"]
    assert [c["kind"] for c in shown["components"] if c["component"] == "output head"] == head and shown["unused"] == []
    body = {"prompt": "Once upon a time in a land far away there was", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    texts = []
    for options in ([], ["--speculative-algorithm", "mtp", "--speculative-num-steps", "3"]):
        server = serve(*options, model=model)
        texts.append(server.post("/v1/completions", body).json()["choices"][0]["text"])
        metrics, log = server.get("/metrics").text, server.log
        assert server.stop() == 0, server.log
    assert texts[0] == texts[1] and re.search(r"[a-z]{3,} [a-z]{2,}", texts[0]), texts
    if change is no_draft_layer:
        assert "speculative decoding is off" in log
    else:
        assert int(re.search(r"^nibble:spec_decode_num_accepted_tokens_total(?:\{.*\})? (\d+)", metrics, re.M).group(1)) > 10


# ---------------------------------------------------------------- template


def test_one_start_pair(nibble_bin, model_dir, tmp_path):
    """C31: the template writes the start pair, the tokenizer's post-processor would add it once more."""
    spec = json.loads((model_dir / "tokenizer.json").read_text())
    pair = ["[gMASK]", "<sop>"]
    ids = {t["content"]: t["id"] for t in spec["added_tokens"]}
    spec["post_processor"] = {"type": "TemplateProcessing", "pair": [],
                              "single": [*({"SpecialToken": {"id": t, "type_id": 0}} for t in pair), {"Sequence": {"id": "A", "type_id": 0}}],
                              "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in pair}}
    model = changed_model(model_dir, tmp_path / "model", **{"tokenizer.json": json.dumps(spec).encode()})
    request = json.dumps({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True})
    done = subprocess.run([nibble_bin, "tokenize", "--model", model, "--chat", "--json"], input=request, capture_output=True, text=True,
                          timeout=60, check=True)
    prompt = json.loads(done.stdout)["ids"]
    assert prompt[:2] == [ids[t] for t in pair]
    assert [prompt.count(ids[t]) for t in pair] == [1, 1]


# ---------------------------------------------------------------- streams and probabilities


def ids_of(model_dir):
    return {t["content"]: t["id"] for t in json.loads((model_dir / "tokenizer.json").read_text())["added_tokens"]}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_end_marker(server, model_dir, place):
    """C30: each of the checkpoint's end ids ends the answer, and none is in the text."""
    ends = json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"]
    assert len(ends) == 3
    body = {"prompt": "Once upon", "max_tokens": 8, "min_tokens": 3, "temperature": 0, "logit_bias": {str(ends[place]): 100}}
    reply = server.post("/v1/completions", body).json()
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"], reply["usage"]["completion_tokens"]) == ("stop", ends[place], 4)
    texts = [e["choices"][0]["text"] for e in stream(server, "/v1/completions", body) if e != "[DONE]"]
    assert "".join(texts) == choice["text"] and not any(name in choice["text"] for name in ids_of(model_dir))


@pytest.mark.parametrize("cut", [None, 3])
def test_thinking_that_is_not_closed(server, trained, model_dir, cut):
    """C32: the model is kept from closing its thinking. When it ends all the same, what it wrote is the content (and thinking);
    cut by the limit it is thinking alone. Streamed alike."""
    body = {"messages": [{"role": "user", "content": "What is 3+5?"}], "max_tokens": cut or 200, "temperature": 0,
            "logit_bias": {str(ids_of(model_dir)["</think>"]): -100}}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == ("length" if cut else "stop")
    assert message["reasoning_content"] and message["content"] == ("" if cut else message["reasoning_content"])
    deltas = [e["choices"][0]["delta"] for e in stream(server, "/v1/chat/completions", body) if e != "[DONE]"]
    for part in ("reasoning_content", "content"):
        assert "".join(d.get(part) or "" for d in deltas) == message[part]


@pytest.mark.parametrize("text", ["A\U0001f600B", "\u9f98!", "\U0001f469\u200d\U0001f680 \u00e9\u20ac"])
def test_characters_of_several_tokens(server, text):
    """C20, C21: the answer is forced to be characters that the vocabulary has only as bytes."""
    count = server.post("/tokenize", {"prompt": text}).json()["count"]
    assert count > len(text)
    body = {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"choice": [text]}, "max_tokens": 64, **THINKING_OFF}
    deltas = [e["choices"][0]["delta"].get("content") or "" for e in stream(server, "/v1/chat/completions", body) if e != "[DONE]"]
    assert "".join(deltas) == text and not any("\ufffd" in d for d in deltas)
    assert len([d for d in deltas if d]) <= len(text)


def test_constraint_and_all_alternatives(server):
    """C41: where one token alone is allowed the others' log-probabilities are still finite numbers."""
    body = {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "abc"}, "max_tokens": 9, "logprobs": True,
            "top_logprobs": 20, "temperature": 0, **THINKING_OFF}
    reply = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    entries = strict(reply.text)["choices"][0]["logprobs"]["content"]
    assert entries and all(len(e["top_logprobs"]) == 20 for e in entries)
    values = [t["logprob"] for e in entries for t in (e, *e["top_logprobs"])]
    assert all(isinstance(v, (int, float)) and -10000 < v <= 0 for v in values)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_k": 1, "temperature": 1}, {"min_p": 1, "temperature": 1},
                                      {"logit_bias": {"40": 100}}, {"logit_bias": {str(i): -100 for i in range(300)}}])
def test_impossible_alternatives(server, sampling):
    """C41: neither do filters of the sampler and biases bring infinity into the reply."""
    reply = httpx.post(server.url + "/v1/completions", json={"prompt": "a b", "max_tokens": 4, "logprobs": 20, "ignore_eos": True, **sampling},
                       timeout=60)
    assert reply.status_code == 200, reply.text
    logprobs = strict(reply.text)["choices"][0]["logprobs"]
    assert all(v is not None for v in logprobs["token_logprobs"])
    assert len(logprobs["top_logprobs"]) == 4


# ---------------------------------------------------------------- scheduling


@pytest.fixture(scope="module")
def context(sanitized):
    """Tokens of a small cache."""
    return 256 if sanitized else 1024


@pytest.fixture(scope="module")
def small(serve, context):
    """A cache of one context."""
    server = serve("--context-length", str(context), "--max-total-tokens", str(context))
    yield server
    assert server.stop() == 0, server.log


@pytest.mark.parametrize("seconds, streaming", [(0, False), (0.05, True), (1, False)])
def test_cancel_near_the_cache_size(small, context, seconds, streaming):
    """C64: all of the cache but five tokens, left at some time; the next one is served at once."""
    body = json.dumps({"prompt": [5 + i % 300 for i in range(context - 5)], "max_tokens": 5, "ignore_eos": True, "stream": streaming}).encode()
    with socket.create_connection(("127.0.0.1", small.port), timeout=60) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(seconds)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    small.wait_idle(5)
    whole = small.post("/v1/completions", {"prompt": [9 + i % 300 for i in range(context - 5)], "max_tokens": 5, "ignore_eos": True})
    assert whole.status_code == 200 and whole.json()["usage"]["total_tokens"] == context
    assert small.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_long_request_between_short_ones(small, context):
    """C67: while short requests keep coming, one that needs nearly the whole cache is served, and they are not held up by it for
    longer than it and what ran before it take."""
    done, stop = [], threading.Event()

    def ask(name, prompt, n):
        reply = small.post("/v1/completions", {"prompt": prompt, "max_tokens": n, "ignore_eos": True})
        assert reply.status_code == 200, reply.text
        done.append((name, reply.json()["usage"]["completion_tokens"]))

    def keep_asking(k):
        i = 0
        while not stop.is_set():
            ask("short", [20 + k, 400 + i % 50] + [7] * 60, 4)
            i += 1

    first = threading.Thread(target=ask, args=("first", [5] * (context // 2), context // 4))
    first.start()
    while small.running()[0] < 1:
        time.sleep(0.002)
    clients = [threading.Thread(target=keep_asking, args=(k,)) for k in range(4)]
    for t in clients:
        t.start()
    long = threading.Thread(target=ask, args=("long", [6 + i % 300 for i in range(context - 120)], 100))
    long.start()
    long.join(120)
    starved = long.is_alive()
    before = len([d for d in done if d[0] == "short"])
    end = time.monotonic() + 60
    while not starved and len([d for d in done if d[0] == "short"]) < before + 4 and time.monotonic() < end:
        time.sleep(0.01)
    stop.set()
    for t in (first, long, *clients):
        t.join()
    assert not starved and ("long", 100) in done and ("first", context // 4) in done
    assert len([d for d in done if d[0] == "short"]) >= before + 4
    small.wait_idle(5)


def test_longest_prompts_first(serve, context, sanitized):
    """C68: right after the start the largest batch of the longest prompts is served in memory that was reserved by then."""
    n = 3 if sanitized else 8
    server = serve("--context-length", str(context), "--max-running-requests", str(n), "--max-total-tokens", str(n * context))
    size = settled_kib(server)
    replies = []

    def ask(k):
        body = {"prompt": [10 + (k * 31 + i * (k + 3)) % 900 for i in range(context - 24)], "max_tokens": 24, "ignore_eos": True}
        replies.append(server.post("/v1/completions", body))

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [r.status_code for r in replies] == [200] * n
    assert {r.json()["usage"]["total_tokens"] for r in replies} == {context}
    if not sanitized:
        assert data_kib(server) - size < 8 << 10
    assert server.stop() == 0, server.log


def data_kib(server):
    """Private memory that the process has asked for, touched or not."""
    return int(re.search(r"VmData:\s+(\d+)", pathlib.Path(f"/proc/{server.process.pid}/status").read_text()).group(1))


def settled_kib(server):
    """The same, when threads that prepare what comes later (templates, the rate of the memory) have their stacks or are gone."""
    size, since = data_kib(server), time.monotonic()
    while time.monotonic() < since + 1:
        time.sleep(0.02)
        if data_kib(server) != size:
            size, since = data_kib(server), time.monotonic()
    return size


def test_chunk_size_changes_no_probability(serve, limit, sanitized):
    """C66 at length: far beyond index_topk, in parts of 512 and of 8192 tokens."""
    prompt = [10 + (i * i + 7 * i) % 900 for i in range(min(320 if sanitized else 5500, limit - 8))]
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 20, "temperature": 0}
    tops = []
    for chunk in ("64" if sanitized else "512", "8192"):
        server = serve("--chunked-prefill-size", chunk)
        tops.append(server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["top_logprobs"][0])
        assert server.stop() == 0, server.log
    assert tops[0].keys() == tops[1].keys()
    assert all(abs(tops[0][t] - tops[1][t]) < 2e-2 for t in tops[0])


def test_first_request_is_not_slow(serve, sanitized):
    """C73: what is made at first use is made before "ready". The best of a few starts, since others use this machine too."""
    if sanitized:
        pytest.skip("speed is that of the release build")
    ratios = []
    for start in range(5):
        server = serve("--disable-radix-cache")
        body = {"prompt": [10 + start + i % 300 for i in range(100)], "max_tokens": 16, "ignore_eos": True}
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            assert server.post("/v1/completions", body).status_code == 200
            times.append(time.perf_counter() - begin)
        assert server.stop() == 0
        ratios.append(times[0] / min(times[1:]))
        if ratios[-1] < 2:
            return
    pytest.fail(f"first request over the second: {ratios}")
