"""What narrows an answer token by token: allowed_token_ids, bad_words, thinking_token_budget."""

import shutil
import subprocess

import pytest
from test_errors import error_of
from test_native import PROMPT, completion, generate

pytestmark = pytest.mark.runners

ASK = [{"role": "user", "content": "What is 3+5?"}]


@pytest.fixture(scope="module")
def drafting(serve, trained):
    server = serve("--speculative-algorithm", "mtp", "--speculative-num-steps", "3")
    yield server
    assert server.stop() == 0, server.log


def ids_of(server, text):
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


def chat(server, **body):
    reply = server.post("/v1/chat/completions", {"messages": ASK, "temperature": 0, "max_tokens": 24, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def sampled(**body):
    return {"text": PROMPT, "sampling_params": {"temperature": 1.2, "sampling_seed": 4, "max_new_tokens": 24, "ignore_eos": True, **body}}


# ---------------------------------------------------------------- allowed_token_ids

def test_allowed(server, drafting):
    """Nothing else comes, whatever the API; drafts and a cached prompt change no token."""
    allowed = ids_of(server, "the cat and dog were red 0123")
    for temperature in (0, 1.2):
        asks = sampled(temperature=temperature, allowed_token_ids=allowed)
        answers = [generate(at, **asks)["output_ids"] for at in (server, server, drafting, drafting)]
        assert set(answers[0]) <= set(allowed) and all(a == answers[0] for a in answers)
    text = completion(server, allowed_token_ids=allowed)["choices"][0]["text"]
    assert text and set(text) <= set("the cat and dog were red 0123")
    one = chat(server, allowed_token_ids=[allowed[0]], separate_reasoning=False, max_tokens=5)
    assert one["message"]["content"] == "the" * 5 and one["finish_reason"] == "length"


def test_allowed_end(server):
    """An end is allowed when it is among the ids, and is taken at last where nothing else is."""
    end = ids_of(server, "<|endoftext|>")
    assert len(end) == 1
    answer = generate(server, **sampled(allowed_token_ids=end, ignore_eos=False, min_new_tokens=3))
    assert answer["output_ids"] == end and answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end[0]}


def test_allowed_beside_a_grammar(server, drafting):
    """Both hold where they can; where nothing is left the grammar does."""
    a, b = ids_of(server, "a"), ids_of(server, "b")
    for at in (server, drafting):
        assert completion(at, regex="[abc]{6}", allowed_token_ids=a + b, max_tokens=9)["choices"][0]["text"].strip("ab") == ""
        assert completion(at, regex="ca", allowed_token_ids=a, max_tokens=5, ignore_eos=False)["choices"][0]["text"] == "ca"


@pytest.mark.parametrize("value,param", [
    ([], "allowed_token_ids"), ("1", "allowed_token_ids"), ([1, "x"], "allowed_token_ids[1]"), ([-1], "allowed_token_ids[0]"),
    ([10**7], "allowed_token_ids[0]"),
])
def test_allowed_refused(server, value, param):
    error_of(server.post("/v1/completions", {"prompt": "x", "allowed_token_ids": value}), param=param)
    error_of(server.post("/v1/chat/completions", {"messages": ASK, "allowed_token_ids": value}), param=param)
    error_of(server.post("/generate", {"text": "x", "sampling_params": {"allowed_token_ids": value}}), param="sampling_params." + param)


PADDED = """vocab_size=4160 hidden_size=64 intermediate_size=64 moe_intermediate_size=32 num_attention_heads=2 q_lora_rank=32
kv_lora_rank=32 index_n_heads=2 index_topk=32 max_position_embeddings=512 pad_token_id=4060 eos_token_id=[4060,4067,4069]""".split()


@pytest.fixture(scope="module")
def padded(nibble_bin, serve, model_dir, tmp_path_factory):
    """A model whose head has rows that are no token of the tokenizer."""
    folder = tmp_path_factory.mktemp("padded") / "random"
    sets = [word for item in PADDED for word in ("--set", item)]
    subprocess.run([nibble_bin, "synth", "--like", "glm-5.2", "--layers", "2", "--experts", "4", *sets, "--out", folder, "--tokenizer", model_dir],
                   check=True, capture_output=True)
    shutil.copy(model_dir / "chat_template.jinja", folder)
    return serve(model=folder)


def test_the_engine_names_the_field(padded):
    """What only the engine can say, here that nothing is left, is about that field, by the name that the surface has for it."""
    no_tokens, many_words = {"allowed_token_ids": [4100]}, {"bad_words": ["abcdefgh" * 100] * 200}
    for fields in (no_tokens, many_words):
        param = next(iter(fields))
        error_of(padded.post("/v1/completions", {"prompt": "x", **fields}), param=param)
        error_of(padded.post("/v1/chat/completions", {"messages": ASK, **fields}), param=param)
        error_of(padded.post("/generate", {"text": "x", "sampling_params": fields}), param="sampling_params." + param)


# ---------------------------------------------------------------- bad_words

def words_of(server, answer):
    """A token of its own in the middle of a word's text, and a text of several tokens."""
    ids = answer["output_ids"]
    texts = [server.post("/detokenize", {"tokens": ids[i:i + 3]}).json()["text"] for i in range(2, 14, 5)]
    return [t for t in texts if t.strip(" ")]


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_bad_words(server, drafting, temperature):
    """What the plain answer has does not come any more, at its start or behind a space; drafts and a cached prompt change no token."""
    plain = generate(server, **sampled(temperature=temperature))
    words = words_of(server, plain)
    assert words and all(w in plain["text"] for w in words)
    asks = sampled(temperature=temperature, bad_words=words)
    answers = [generate(at, **asks)["output_ids"] for at in (server, server, drafting, drafting)]
    assert answers[0] != plain["output_ids"] and all(a == answers[0] for a in answers)
    for word in words:
        for ids in (ids_of(server, word.lstrip(" ")), ids_of(server, " " + word.lstrip(" "))):
            assert not any(answers[0][i:i + len(ids)] == ids for i in range(len(answers[0])))


def test_bad_word_of_several_tokens(server):
    """Its tokens may come elsewhere: only the last is kept from coming behind the others."""
    a, b = ids_of(server, "a"), ids_of(server, "b")
    assert len(ids_of(server, "xq")) == 2
    x, q = ids_of(server, "xq")
    free = generate(server, **sampled(temperature=1000, allowed_token_ids=[x, q]))["output_ids"]
    held = generate(server, **sampled(temperature=1000, allowed_token_ids=[x, q], bad_words=["xq"]))["output_ids"]
    pairs = list(zip(free, free[1:]))
    assert (x, q) in pairs and (x, q) not in zip(held, held[1:])
    assert held == sorted(held, key=lambda i: i == x)
    assert generate(server, **sampled(allowed_token_ids=a + b, bad_words=["a"]))["text"].strip("b") == ""


def test_bad_words_in_chat(server, trained):
    said = chat(server, chat_template_kwargs={"enable_thinking": False})["message"]["content"]
    word = next(w for w in said.split() if w.strip(".,"))
    again = chat(server, chat_template_kwargs={"enable_thinking": False}, bad_words=[word])["message"]["content"]
    assert again != said
    assert chat(server, chat_template_kwargs={"enable_thinking": False}, bad_words=[])["message"]["content"] == said


# ---------------------------------------------------------------- thinking_token_budget

THINK = {"text": "<|user|>What is 3+5?<|assistant|><think>"}


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_thinking_budget(server, drafting, budget):
    """The thinking is cut behind its budget and the answer follows; drafts and a cached prompt change no token."""
    close, = ids_of(server, "</think>")
    plain = generate(server, **THINK, sampling_params={"temperature": 0, "max_new_tokens": 60})["output_ids"]
    asks = {**THINK, "sampling_params": {"temperature": 0, "max_new_tokens": 60, "thinking_token_budget": budget}}
    answers = [generate(at, **asks)["output_ids"] for at in (server, server, drafting, drafting)]
    assert close not in plain[:5]
    assert answers[0][:budget] == plain[:budget] and answers[0][budget] == close and all(a == answers[0] for a in answers)
    assert answers[0].count(close) == 1 and len(answers[0]) > budget + 1
    wide = {**THINK, "sampling_params": {"temperature": 0, "max_new_tokens": 60, "thinking_token_budget": 59}}
    assert generate(drafting, **wide)["output_ids"] == plain


def test_thinking_budget_of_the_answer(server, trained):
    """Thinking that the answer opens has the budget too."""
    open_, close = ids_of(server, "<think></think>")
    asks = {"text": "<|user|>What is 3+5?<|assistant|>", "sampling_params": {
        "temperature": 0, "max_new_tokens": 30, "thinking_token_budget": 3, "logit_bias": {str(open_): 15}, "ignore_eos": True}}
    ids = generate(server, **asks)["output_ids"]
    assert open_ in ids
    opened = ids.index(open_)
    assert close in ids[opened:opened + 5]


def test_thinking_budget_in_chat(server, trained):
    def ask(path="/v1/chat/completions", **body):
        reply = server.post(path, {"temperature": 0, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    plain, short = (ask(messages=ASK, max_tokens=80, thinking_token_budget=budget) for budget in (-1, 2))
    assert plain["usage"]["completion_tokens_details"]["reasoning_tokens"] > 4
    assert 2 <= short["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 3
    assert short["choices"][0]["message"]["content"]
    bound = ask(messages=ASK, max_tokens=80, thinking_token_budget=2, regex="[0-9]{2}")
    assert bound["choices"][0]["message"]["content"].isdigit() and bound["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 3
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(messages=ASK, max_tokens=20, thinking_token_budget=0, **off)["choices"] == ask(messages=ASK, max_tokens=20, **off)["choices"]


def test_thinking_budget_needs_thinking(serve):
    server = serve("--reasoning-parser", "none")
    error_of(server.post("/v1/completions", {"prompt": "x", "thinking_token_budget": 3}), param="thinking_token_budget")
    server.stop()
