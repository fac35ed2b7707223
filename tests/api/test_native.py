"""/generate, /tokenize, /detokenize and what operators ask and do, with httpx and requests."""

import json
import threading
import time

import httpx
import pytest
import requests
from api_server import sse, stream
from test_disconnect import begin, wait_running
from test_errors import error_of

PROMPT = "Once upon a time in a land far away there was"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12}


def generate(server, **body):
    reply = requests.post(server.url + "/generate", json={"sampling_params": GREEDY, **body}, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()


def completion(server, **body):
    reply = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


# ---------------------------------------------------------------- /generate

def test_shape(server):
    answer = generate(server, text=PROMPT)
    assert answer.keys() == {"text", "output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["completion_tokens"] == len(answer["output_ids"]) == 12
    assert meta["prompt_tokens"] == server.post("/tokenize", {"prompt": PROMPT}).json()["count"]
    assert meta["e2e_latency"] > 0 and meta["cached_tokens"] >= 0 and meta["id"]


def test_same_text_as_completions(server):
    assert generate(server, text=PROMPT)["text"] == completion(server)["choices"][0]["text"]


def test_ids_give_the_same_as_text(server):
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    by_text, by_ids = generate(server, text=PROMPT), generate(server, input_ids=ids)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert server.post("/detokenize", {"tokens": by_ids["output_ids"]}).json()["text"] == by_text["text"]


@pytest.mark.parametrize("incremental", [False, True])
def test_stream(server, incremental):
    whole = generate(server, text=PROMPT)
    events = stream(server, "/generate", {"text": PROMPT, "sampling_params": GREEDY, "incremental": incremental})
    assert events.pop() == "[DONE]"
    texts, ids = [e["text"] for e in events], [e["output_ids"] for e in events]
    assert all(e["meta_info"]["finish_reason"] is None for e in events[:-1])
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    if incremental:
        assert "".join(texts) == whole["text"] and sum(ids, []) == whole["output_ids"]
    else:
        assert all(b.startswith(a) and len(i) < len(j) for a, b, i, j in zip(texts, texts[1:], ids, ids[1:]))
        assert texts[-1] == whole["text"] and ids[-1] == whole["output_ids"]


def test_batch(server):
    one = generate(server, text=PROMPT)
    many = generate(server, text=["What is", PROMPT, "Hello"], rid=["a", "b", "c"])
    assert [m["meta_info"]["id"] for m in many] == ["a", "b", "c"]
    assert many[1]["output_ids"] == one["output_ids"]
    whole = server.post("/v1/completions", {"prompt": ["What is", PROMPT], "max_tokens": 2, "rid": ["d", "e"]})
    assert whole.json()["id"] == "d" and len(whole.json()["choices"]) == 2
    wrong = server.post("/v1/completions", {"prompt": ["What is", PROMPT], "max_tokens": 2, "rid": ["d"]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "rid"
    events = stream(server, "/generate", {"text": ["What is", PROMPT, "Hello"], "sampling_params": GREEDY})
    last = {e["index"]: e for e in events if e != "[DONE]"}
    assert [last[i]["text"] for i in range(3)] == [m["text"] for m in many]


def test_cached_prefixes_are_told_apart(server):
    """vLLM's cache_salt, SGLang's extra_key: what is cached serves those with the same texts alone."""
    prompt = [7 + i % 50 for i in range(150)]

    def cached(**fields):
        reply = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    ways = [{"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"extra_key": "a"}, {"extra_key": "a", "cache_salt": "a"}, {"extra_key": "ab"}]
    assert [cached(**way) for way in ways] == [0] * len(ways)
    assert [cached(**way) for way in ways] == [128] * len(ways)
    assert cached(cache_salt="", extra_key="") == cached(cache_salt=None) == cached(prompt=[prompt, prompt], extra_key=["a", "ab"]) / 2 == 128
    assert generate(server, input_ids=prompt, extra_key="a")["meta_info"]["cached_tokens"] == 128
    assert generate(server, input_ids=prompt, extra_key="c")["meta_info"]["cached_tokens"] == 0
    for value, param in ((5, "extra_key"), (["a", 5], "extra_key[1]"), (["a", "b"], "extra_key")):
        reply = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "extra_key": value})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_several_answers(server):
    params = {**GREEDY, "temperature": 1, "n": 3, "sampling_seed": 5}
    first, second = (generate(server, text=PROMPT, sampling_params=params) for _ in range(2))
    assert len(first) == 3 and len({tuple(a["output_ids"]) for a in first}) > 1
    assert [a["output_ids"] for a in first] == [a["output_ids"] for a in second]
    assert generate(server, text="a", sampling_params={**params, "max_new_tokens": 1, "n": 2})[1]["meta_info"]["prompt_tokens"] == 1


def test_logprobs(server):
    answer = generate(server, text=PROMPT, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True)
    meta = answer["meta_info"]
    scores = completion(server, logprobs=2, echo=True)["choices"][0]["logprobs"]
    both = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert [t[2] for t in both] == scores["tokens"]
    assert [t[0] for t in both[1:]] == pytest.approx(scores["token_logprobs"][1:], abs=1e-4) and both[0][0] is None
    assert [t[1] for t in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["input_top_logprobs"][0] is None and all(len(t) == 2 for t in meta["input_top_logprobs"][1:] + meta["output_top_logprobs"])
    assert all(t[0][1] == i for t, i in zip(meta["output_top_logprobs"], answer["output_ids"]))  # greedy: the best was taken
    late = generate(server, text=PROMPT, return_logprob=True, logprob_start_len=3)["meta_info"]
    assert [t[1] for t in late["input_token_logprobs"]] == [t[1] for t in meta["input_token_logprobs"]][3:]
    assert all(t[2] is None for t in late["input_token_logprobs"]) and "input_top_logprobs" not in late
    plain = generate(server, text=PROMPT, return_logprob=True)["meta_info"]
    assert plain["input_token_logprobs"] == [] and len(plain["output_token_logprobs"]) == 12


def test_nothing_generated(server):
    answer = generate(server, text=PROMPT, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert answer["text"] == "" and answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"]["type"] == "length" and len(answer["meta_info"]["input_token_logprobs"]) > 5


def test_stops(server):
    free = generate(server, text=PROMPT)
    middle = free["output_ids"][5]
    by_id = generate(server, text=PROMPT, sampling_params={**GREEDY, "stop_token_ids": [middle]})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": middle}
    assert by_id["output_ids"] == free["output_ids"][:free["output_ids"].index(middle) + 1]
    word = free["text"].split()[2]
    by_text = generate(server, text=PROMPT, sampling_params={**GREEDY, "stop": [word]})
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert by_text["text"] == free["text"][:free["text"].index(word)]
    kept = generate(server, text=PROMPT, sampling_params={**GREEDY, "stop": word, "no_stop_trim": True})
    assert kept["text"] == by_text["text"] + word


@pytest.mark.parametrize("constraint,check", [
    ({"regex": "[0-9]{3}"}, str.isdigit), ({"ebnf": 'root ::= "yes" | "no"'}, lambda t: t in ("yes", "no")),
    ({"json_schema": '{"type": "object", "properties": {"a": {"enum": [1, 20]}}, "required": ["a"], "additionalProperties": false}'},
     lambda t: json.loads(t)["a"] in (1, 20)),
], ids=["regex", "ebnf", "json_schema"])
def test_constraints(server, constraint, check):
    answer = generate(server, text="A number:", sampling_params={"temperature": 0, "max_new_tokens": 60, **constraint})
    assert check(answer["text"]), answer


@pytest.fixture(scope="module")
def small(serve):
    """A server whose context is soon full: 256 tokens."""
    server = serve("--context-length", "256")
    yield server
    server.stop()


def test_default_length(small):
    assert generate(small, text=PROMPT, sampling_params={"ignore_eos": True})["meta_info"]["completion_tokens"] == 128
    near = generate(small, input_ids=[7] * 253, sampling_params={"ignore_eos": True})
    assert near["meta_info"]["completion_tokens"] == 3


@pytest.mark.parametrize("body,param", [
    ({}, "text"), ({"text": "x", "input_ids": [1]}, "input_ids"), ({"text": 3}, "text"), ({"text": [1, 2]}, "text"), ({"text": ""}, "text"),
    ({"text": []}, "text"), ({"text": ["a", [1]]}, "text[1]"), ({"input_ids": "x"}, "input_ids"), ({"input_ids": ["x"]}, "input_ids[0]"),
    ({"input_ids": [[1], "x"]}, "input_ids[1]"), ({"input_ids": [-1]}, "input_ids[0]"), ({"input_ids": [[1], [10**9]]}, "input_ids[1][0]"),
    ({"input_ids": []}, "input_ids"), ({"text": "x", "sampling_params": []}, "sampling_params"), ({"text": "x", "stream": "y"}, "stream"),
    ({"text": "x", "return_logprob": 1}, "return_logprob"), ({"text": "x", "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"text": "x", "logprob_start_len": -2}, "logprob_start_len"), ({"text": "x", "rid": 3}, "rid"), ({"text": "x", "rid": ["a", "b"]}, "rid"),
    ({"text": ["x", "y"], "rid": ["a", 4]}, "rid[1]"), ({"text": "x", "lora_path": "p"}, "lora_path"),
    ({"text": "x", "image_data": "p"}, "image_data"), ({"text": "x", "return_hidden_states": True}, "return_hidden_states"),
    ({"text": "x", "priority": "p"}, "priority"), ({"text": ["x"] * 1025}, "text"),
], ids=lambda v: str(v)[:40])
def test_refused(server, body, param):
    error_of(server.post("/generate", body), param=param)


@pytest.mark.parametrize("key,value,param", [
    ("max_new_tokens", "5", None), ("max_new_tokens", -1, None), ("min_new_tokens", 9, None), ("temperature", -1, None), ("top_p", 0, None),
    ("top_k", 0.5, None), ("min_p", 2, None), ("frequency_penalty", 3, None), ("stop", [1], "stop[0]"), ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("n", 0, None), ("sampling_seed", "x", None), ("ignore_eos", 1, None), ("skip_special_tokens", 3, None), ("no_stop_trim", "x", None),
    ("spaces_between_special_tokens", 1, None), ("logit_bias", [], None), ("stop_regex", "a**b(", None), ("structural_tag", "x", None),
    ("regex", 3, None), ("regex", "(", None), ("json_schema", "{", None), ("json_schema", '{"type": "nothing"}', None),
    ("max_new_tokens", 10**7, None),
], ids=lambda v: str(v)[:24])
def test_sampling_refused(server, key, value, param):
    error_of(server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 3, key: value}}), param="sampling_params." + (param or key))


def test_too_long(server, limit):
    error = error_of(server.post("/generate", {"input_ids": [1] * (limit + 10)}), param="input_ids")
    assert str(limit) in error["message"] and str(limit + 10) in error["message"]


# ---------------------------------------------------------------- tokens

def test_tokenize(server, limit):
    reply = server.post("/tokenize", {"prompt": "Hello world ☃", "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"]) and reply["max_model_len"] == limit
    assert reply["token_strs"][0] == "Hello" and reply["token_strs"][-1].startswith("bytes:")
    back = server.post("/detokenize", {"tokens": reply["tokens"]}).json()
    assert back == {"prompt": "Hello world ☃", "text": "Hello world ☃"}
    assert server.post("/v1/tokenize", {"prompt": ""}).json() == {"count": 0, "max_model_len": limit, "tokens": [], "token_strs": None}


def test_tokenize_many(server):
    reply = server.post("/tokenize", {"prompt": ["Hello", "Hello Hello"]}).json()
    assert reply["count"] == [len(t) for t in reply["tokens"]]
    back = server.post("/v1/detokenize", {"tokens": reply["tokens"]}).json()
    assert back["text"] == ["Hello", "Hello Hello"]


def test_tokenize_messages(server):
    """What is counted is what a chat request would be charged."""
    messages = [{"role": "user", "content": "What is 3+5?"}]
    reply = server.post("/tokenize", {"messages": messages}).json()
    chat = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    assert reply["count"] == chat["usage"]["prompt_tokens"]
    shorter = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert reply["tokens"][:shorter["count"]] == shorter["tokens"] and shorter["count"] < reply["count"]


def test_detokenize_special(server):
    special = server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"]
    shown = server.post("/detokenize", {"tokens": special}).json()["prompt"]
    hidden = server.post("/detokenize", {"tokens": special, "skip_special_tokens": True}).json()["prompt"]
    assert "<|user|>" in shown and "<|user|>" not in hidden and "Hi" in hidden


@pytest.mark.parametrize("path,body,param", [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 3}, "prompt"), ("/tokenize", {"prompt": ["x", 3]}, "prompt[1]"), ("/tokenize", {"prompt": []}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": []}, "prompt"), ("/tokenize", {"messages": []}, "messages"), ("/tokenize", {"prompt": "x", "add_special_tokens": 3}, "add_special_tokens"),
    ("/tokenize", {"prompt": "x", "return_token_strs": "y"}, "return_token_strs"), ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"), ("/detokenize", {"tokens": [10**9]}, "tokens[0]"), ("/detokenize", {"tokens": [[1], "x"]}, "tokens[1]"),
    ("/detokenize", {"tokens": ["x"]}, "tokens[0]"), ("/detokenize", {"tokens": [1], "skip_special_tokens": 1}, "skip_special_tokens"),
], ids=lambda v: str(v)[:32])
def test_tokens_refused(server, path, body, param):
    error_of(server.post(path, body), param=param)


def test_unknown_model(server):
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        error_of(server.post(path, {**body, "model": "nobody"}), 404)


# ---------------------------------------------------------------- what the server says

def test_infos(server, limit, model):
    version = server.get("/version").json()["version"]
    for path in ("/model_info", "/get_model_info"):
        info = server.get(path).json()
        assert info["model_path"] == info["tokenizer_path"] and info["is_generation"] is True
        assert info["architectures"] == ["GlmMoeDsaForCausalLM"] and info["model_type"] == "glm_moe_dsa"
        assert info["max_model_len"] == limit and model in info["served_model_names"]
    for path in ("/server_info", "/get_server_info"):
        info = server.get(path).json()
        assert info["kv_cache_dtype"] == "bf16"
        assert info["version"] == version and info["status"] == "ready"
        assert info["flags"]["log_level"] == "debug" and info["flags"]["port"] == server.port
        assert info["limits"]["context_tokens"] == limit and info["memory"]["weight_bytes"] > 0
        assert info["internal_states"][0].keys() >= {"num_running_reqs", "num_queue_reqs", "avg_spec_accept_length", "token_usage"}
    assert server.get("/ping").status_code == 200


def test_no_secrets(serve):
    """Keys guard what changes or tells something, and are not told."""
    server = serve("--api-key", "s3cret")
    keyed = {"Authorization": "Bearer s3cret"}
    assert "s3cret" not in server.get("/server_info", headers=keyed).text
    for method, path in [("GET", "/server_info"), ("GET", "/model_info"), ("POST", "/flush_cache"), ("GET", "/flush_cache"),
                         ("POST", "/abort_request"), ("POST", "/generate"), ("POST", "/tokenize"), ("GET", "/version"),
                         ("GET", "/v1/loads"), ("GET", "/get_load"), ("GET", "/load"), ("POST", "/reset_prefix_cache")]:
        assert httpx.request(method, server.url + path).status_code == 401
    assert server.get("/ping").status_code == 200
    assert httpx.post(server.url + "/abort_request", json={"abort_all": True}, headers=keyed).json() == {"aborted": 0}
    server.stop()


# ---------------------------------------------------------------- control

@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(server, method):
    server.wait_idle(10)
    first = generate(server, text=PROMPT * 8)["meta_info"]
    again = generate(server, text=PROMPT * 8)["meta_info"]
    assert again["cached_tokens"] > 0
    reply = requests.request(method, server.url + "/flush_cache", timeout=60)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain") and "flushed" in reply.text
    assert generate(server, text=PROMPT * 8)["meta_info"]["cached_tokens"] == 0
    assert first["prompt_tokens"] == again["prompt_tokens"]


def test_flush_while_running(server):
    s = begin(server, {"prompt": "x", "max_tokens": 2000, "ignore_eos": True})
    wait_running(server, 1)
    error_of(server.post("/flush_cache", {}))
    s.close()
    server.wait_idle(5)


def test_reset_prefix_cache(server):
    """vLLM's path; a cache in use is an error, not a success that is false."""
    server.wait_idle(10)
    generate(server, text=PROMPT * 8)
    assert generate(server, text=PROMPT * 8)["meta_info"]["cached_tokens"] > 0
    reply = requests.post(server.url + "/reset_prefix_cache", timeout=60)
    assert reply.status_code == 200 and reply.json() == {"success": True}
    assert generate(server, text=PROMPT * 8)["meta_info"]["cached_tokens"] == 0
    assert requests.post(server.url + "/reset_prefix_cache?reset_running_requests=false", timeout=60).status_code == 200
    assert error_of(requests.post(server.url + "/reset_prefix_cache?reset_running_requests=true", timeout=60))["param"] == "reset_running_requests"
    s = begin(server, {"prompt": "x", "max_tokens": 2000, "ignore_eos": True})
    wait_running(server, 1)
    assert error_of(server.post("/reset_prefix_cache", {}))["code"] == "cache_in_use"
    s.close()
    server.wait_idle(5)


# ---------------------------------------------------------------- load

def test_load_when_idle(server):
    server.wait_idle(10)
    loads = server.get("/v1/loads").json()
    one, total = loads["loads"][0], loads["aggregate"]
    assert loads["dp_rank_count"] == len(loads["loads"]) == 1 and loads["version"] == server.get("/version").json()["version"]
    assert one["num_running_reqs"] == one["num_waiting_reqs"] == one["num_total_reqs"] == one["num_total_tokens"] == 0
    assert one["max_total_num_tokens"] == server.get("/server_info").json()["max_total_num_tokens"] == one["memory"]["token_capacity"]
    assert total["total_reqs"] == total["total_tokens"] == total["avg_utilization"] == 0
    old = server.get("/get_load").json()
    assert len(old) == 1 and old[0].items() >= {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}.items()
    assert server.get("/load").json() == {"server_load": 0}


def test_load_counts(serve):
    """Two run and three wait, of whose prompts every token counts; then nothing is left of them."""
    server = serve("--max-running-requests", "2")
    ids = [list(range(300 + 10 * i, 340 + 10 * i)) for i in range(5)]
    streams = [begin(server, {"prompt": p, "max_tokens": 3000, "ignore_eos": True}) for p in ids[:2]]
    wait_running(server, 2)
    streams += [begin(server, {"prompt": p, "max_tokens": 3000, "ignore_eos": True}) for p in ids[2:]]
    until = time.monotonic() + 20
    one = {"num_waiting_reqs": 0}
    while (one["num_waiting_reqs"] < 3 or one["num_used_tokens"] < 2 * 40) and time.monotonic() < until:
        time.sleep(0.01)
        loads = server.get("/v1/loads").json()  # pages in use are counted with the first step
        one = loads["loads"][0]
    assert (one["num_running_reqs"], one["num_waiting_reqs"], one["num_total_reqs"]) == (2, 3, 5)
    assert one["num_total_tokens"] - one["num_used_tokens"] == 3 * 40 and one["num_used_tokens"] >= 2 * 40
    assert one["utilization"] == 1 and one["max_running_requests"] == 2 and one["queues"]["waiting"] == 3
    assert loads["aggregate"]["total_reqs"] == 5
    old = server.get("/get_load").json()[0]
    assert (old["num_reqs"], old["num_waiting_reqs"], old["num_pending_tokens"]) == (5, 3, 120) and old["num_tokens"] >= 200
    assert server.get("/load").json() == {"server_load": 5}
    streams[4].close()  # while it waits
    while server.get("/get_load").json()[0]["num_reqs"] > 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert server.get("/get_load").json()[0]["num_pending_tokens"] == 80
    for s in streams[:4]:
        s.close()
    server.wait_idle(10)
    assert server.get("/get_load").json()[0]["num_tokens"] == 0
    server.stop()


def test_load_sections(server):
    def one(query):
        return server.get("/v1/loads?" + query).json()["loads"][0]
    assert {"memory", "queues"} <= one("include=all").keys() and {"memory", "queues"} <= one("").keys()
    assert not {"memory", "queues", "speculative"} & one("include=core").keys()
    assert "memory" in one("include=core,%20memory") and "queues" not in one("include=core,memory&dp_rank=0&format=json")
    for query, param in [("include=core,cpu", "include"), ("dp_rank=1", "dp_rank"), ("format=prometheus", "format")]:
        assert error_of(server.get("/v1/loads?" + query))["param"] == param


class Answer(threading.Thread):
    """A request in the background."""

    def __init__(self, server, path, body):
        super().__init__(daemon=True)
        self.args = server, path, body
        self.start()

    def run(self):
        self.reply = self.args[0].post(*self.args[1:])

    def json(self):
        self.join(60)
        return self.reply.json()


LONG = {"max_tokens": 3000, "ignore_eos": True}


@pytest.mark.parametrize("path,body,finish", [
    ("/generate", {"text": "x", "rid": "job-7", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}, lambda r: r["meta_info"]["finish_reason"]["type"]),
    ("/v1/completions", {"prompt": "x", "rid": "job-7", **LONG}, lambda r: r["choices"][0]["finish_reason"]),
    ("/v1/completions", {"prompt": "x", "request_id": "job-7", **LONG}, lambda r: r["choices"][0]["finish_reason"]),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "rid": "job-7", **LONG}, lambda r: r["choices"][0]["finish_reason"]),
], ids=["generate", "completions", "request_id", "chat"])
def test_abort(server, path, body, finish):
    """The answer is what was there, and says so."""
    bystander = Answer(server, "/v1/completions", {"prompt": "y", "max_tokens": 40, "ignore_eos": True})
    answer = Answer(server, path, body)
    wait_running(server, 1)
    while server.post("/abort_request", {"rid": "job-7"}).json()["aborted"] == 0:
        time.sleep(0.01)
    assert finish(answer.json()) == "abort"
    assert bystander.json()["choices"][0]["finish_reason"] == "length"
    assert server.post("/abort_request", {"rid": "job-7"}).json() == {"aborted": 0}
    server.wait_idle(2)


def test_abort_by_the_id_of_a_stream(server):
    body = {"prompt": "x", "stream": True, **LONG}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        name = json.loads(next(lines)[6:])["id"]
        assert server.post("/abort_request", {"rid": name}).json() == {"aborted": 1}
        events = [line for line in lines]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "abort"


def test_abort_by_the_id_of_http(server):
    with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "x", "stream": True, **LONG}, headers={"X-Request-Id": "http-1"},
                      timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        assert server.post("/abort_request", {"rid": "http-1"}).json() == {"aborted": 1}
        assert [line for line in lines][-1] == "data: [DONE]"


def test_abort_in_other_shapes(server):
    """Anthropic's API and the Responses API have no such end: it is an error."""
    messages = Answer(server, "/v1/messages", {"messages": [{"role": "user", "content": "x"}], "rid": "m", **LONG})
    while server.post("/abort_request", {"rid": "m"}).json()["aborted"] == 0:
        time.sleep(0.01)
    assert messages.json()["type"] == "error" and messages.reply.status_code == 400


def test_abort_waiting_and_in_prefill(serve):
    server = serve("--max-running-requests", "1", "--chunked-prefill-size", "16")
    rids = [f"r{i}" for i in range(6)]
    prompt = {"text": PROMPT * 60, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
    answers = [Answer(server, "/generate", {**prompt, "rid": rid}) for rid in rids]
    wait_running(server, 6)
    for rid in rids:
        assert server.post("/abort_request", {"rid": rid}).json() == {"aborted": 1}
        assert server.running()[0] <= 1
    server.wait_idle(2)
    assert [a.json()["meta_info"]["finish_reason"]["type"] for a in answers] == ["abort"] * 6
    assert server.get("/health").json()["kv_tokens_used"] == 0
    server.stop()


def test_abort_all(server):
    answers = [Answer(server, "/generate", {"text": [str(i), "x"], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}) for i in range(3)]
    wait_running(server, 6)
    assert server.post("/abort_request", {"abort_all": True}).json() == {"aborted": 6}
    assert all(x["meta_info"]["finish_reason"]["type"] == "abort" for a in answers for x in a.json())
    server.wait_idle(2)
    assert completion(server)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("body,param", [({}, "rid"), ({"rid": 3}, "rid"), ({"abort_all": "x"}, "abort_all"), ({"rid": "", "abort_all": False}, "rid")])
def test_abort_refused(server, body, param):
    error_of(server.post("/abort_request", body), param=param)


def test_stream_through_requests(server):
    """The way SGLang's own clients read."""
    reply = requests.post(server.url + "/generate", json={"text": PROMPT, "sampling_params": GREEDY, "stream": True}, stream=True, timeout=60)
    reply.encoding = "utf-8"
    events = sse(type("Lines", (), {"iter_lines": lambda self: reply.iter_lines(decode_unicode=True)})())
    assert events[-1] == "[DONE]" and events[-2]["text"] == generate(server, text=PROMPT)["text"]
