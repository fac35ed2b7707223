"""The generator of models/glm5-tiny: split, answers, rendering, loss weights, packing.

Fast (a few seconds), no network, no torch. Needs jinja2, numpy and tokenizers.
"""
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools/tiny"))

import evalset  # noqa: E402
from corpus import arith, chat, jsonobj, recall, story, stream, toolcall  # noqa: E402
from corpus.item import draw, is_held_out  # noqa: E402
from render import render  # noqa: E402

MODEL = ROOT / "models/glm5-tiny"
MAKERS = [arith.make, arith.make_one_digit, chat.make, jsonobj.make, recall.make_short, story.make,
          story.make_raw, toolcall.make, toolcall.make_result]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.mark.parametrize("make", MAKERS, ids=lambda m: f"{m.__module__}.{m.__name__}")
def test_split_separates_training_from_evaluation(make):
    rng = random.Random(1)
    train = {draw(make, rng).key for _ in range(300)}
    assert not any(map(is_held_out, train))
    if make is not arith.make_one_digit:        # 5 % of few keys may be none
        held = {draw(make, rng, held_out=True).key for _ in range(20)}
        assert held and all(map(is_held_out, held)) and not held & train


def test_split_share():
    held = sum(is_held_out(f"arith:{a}+{b}") for a in range(200) for b in range(200))
    assert 0.04 < held / 40000 < 0.06


def test_evaluation_items_are_held_out(tokenizer):
    for skill in ("arith", "tool", "json", "recall_short", "tool_result", "chat"):
        for item, _ in evalset.build(skill, 5, 0, tokenizer):
            assert is_held_out(item.key), item
    items = evalset.build("story", 5, 0, tokenizer)
    assert items[0][0].user == evalset.OPENING
    assert all(is_held_out(i.key) for i, _ in items[1:])


def test_arithmetic_answers_and_steps():
    rng = random.Random(2)
    for _ in range(2000):
        item = arith.make(rng)
        a, op, b = re.fullmatch(r"arith:(\d+)([+-])(\d+)", item.key).groups()
        want = int(a) + int(b) if op == "+" else int(a) - int(b)
        assert item.content == str(want)
        assert item.reasoning.endswith(f"{a}{op}{b}={want}.")
        written = re.findall(r"write (\d)", item.reasoning)
        if written:
            assert int("".join(reversed(written))) == abs(want)


def test_json_answers_are_the_fields_in_the_request():
    rng = random.Random(3)
    for _ in range(300):
        item = jsonobj.make(rng)
        obj = json.loads(item.content)
        assert obj == item.check["json"]
        assert all(key in item.user for key in obj)


def test_recall_states_the_fact_before_the_question(tokenizer):
    rng = random.Random(4)
    for _ in range(100):
        item = recall.make(rng)
        text = render(stream.messages_of(item, True, answered=False))
        fact = item.reasoning.removeprefix("The text says: ")
        assert text.count(fact) == 1 and item.content in fact
    items = evalset.build("recall_1500", 2, 0, tokenizer)
    assert all(1500 <= evalset.distance(i, tokenizer) <= 2100 for i, _ in items)


def test_tool_calls_parse_back(tokenizer):
    rng = random.Random(5)
    for _ in range(300):
        item = toolcall.make(rng)
        for thinking in (True, False):
            prompt = evalset.prompt_text(item, thinking)
            whole = render(stream.messages_of(item, thinking), item.tools, add_generation_prompt=False)
            assert whole.startswith(prompt)
            reasoning, content, calls = evalset.parse(whole[len(prompt):], thinking, item.tools)
            assert calls == item.tool_calls and content == ""
            assert reasoning == (item.reasoning if thinking else None)
        declared = {t["function"]["name"]: t["function"]["parameters"] for t in item.tools}
        for call in item.tool_calls:
            schema = declared[call["name"]]
            assert set(schema["required"]) <= set(call["arguments"]) <= set(schema["properties"])


@pytest.mark.parametrize("thinking", [True, False])
def test_training_text_continues_the_generation_prompt(thinking):
    rng = random.Random(6)
    for make in MAKERS:
        item = draw(make, rng)
        if item.skill == "story_raw":
            continue
        prompt = evalset.prompt_text(item, thinking)
        whole = render(stream.messages_of(item, thinking), item.tools, add_generation_prompt=False)
        assert prompt.endswith("<think>" if thinking else "</think>")
        assert whole.startswith(prompt)


def test_template_details():
    say = [{"role": "user", "content": "Hi"}]
    assert render(say) == "[gMASK]<sop><|user|>Hi<|assistant|><think>"
    assert render(say, enable_thinking=False) == "[gMASK]<sop><|user|>Hi<|assistant|></think>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert render(parts) == render(say)
    history = say + [{"role": "assistant", "content": "<think>x</think>Hello"},
                     {"role": "user", "content": "Bye"}]
    assert "</think>Hello<|user|>Bye" in render(history) and "<think>x" not in render(history)
    assert "<think>x</think>Hello" in render(history, clear_thinking=False)
    nothing = say + [{"role": "assistant", "content": None, "tool_calls": [
        {"function": {"name": "f", "arguments": {"n": 3, "s": "a"}}}]},
        {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    text = render(nothing)
    assert ("</think><tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value><arg_key>s</arg_key>"
            "<arg_value>a</arg_value></tool_call><|observation|><tool_response>1</tool_response>"
            "<tool_response>2</tool_response><|assistant|><think>") in text
    with pytest.raises(Exception, match="Unknown role"):
        render([{"role": "narrator", "content": "x"}])


def test_template_in_the_model_is_this_one():
    assert (MODEL / "chat_template.jinja").read_text() == (ROOT / "tools/tiny/chat_template.jinja").read_text()


def test_tokenizer(tokenizer):
    assert tokenizer.get_vocab_size() == 4096
    spec = json.loads((MODEL / "tokenizer.json").read_text())
    assert spec["model"]["ignore_merges"] and len(spec["added_tokens"]) == 36
    special = {t["content"]: t["special"] for t in spec["added_tokens"]}
    assert special["<|user|>"] and special["<|end_of_transcription|>"]
    assert not special["<think>"] and not special["<tool_call>"] and not special["<|code_prefix|>"]
    assert tokenizer.encode("347").tokens == ["3", "4", "7"]
    for text in ("Once upon a time.", "naïve 😀 \r\n\t x", "a<|user|>b"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_loss_weights(tokenizer):
    encoder = stream.Encoder(tokenizer)
    text = "[gMASK]<sop><|user|>Hi<|assistant|><think>a</think>b<|user|>"
    (ids, w), = encoder([text])
    tokens = [tokenizer.id_to_token(int(i)) for i in ids]
    full = [t for t, x in zip(tokens, w) if x == 255]
    assert full == ["a", "</think>", "b", "<|user|>"]
    assert w[tokens.index("<think>")] == 0 and w[0] == 0
    assert w[tokens.index("Hi")] == round(255 * stream.PROMPT_WEIGHT)


def test_packing_keeps_documents_whole(tokenizer):
    block = stream.block(stream.Encoder(tokenizer), 7, 256, 4)
    again = stream.block(stream.Encoder(tokenizer), 7, 256, 4)
    assert all(np.array_equal(block[k], again[k]) for k in block)
    assert block["ids"].shape == (4, 256) and (block["doc"] >= 0).mean() > 0.85
    for row in range(4):
        for d in range(block["doc"][row].max() + 1):
            at = np.flatnonzero(block["doc"][row] == d)
            assert np.array_equal(block["pos"][row, at], np.arange(len(at)))
            assert np.array_equal(at, np.arange(at[0], at[-1] + 1))


def test_stories_use_the_known_vocabulary_and_are_clean():
    rng = random.Random(8)
    for _ in range(50):
        text = story.make_text(rng)
        ok, why = evalset.clean_story("", text, 100)
        assert ok, (why, text)
    assert not evalset.clean_story("", "He xyzzed the house. " * 3, 100)[0]
    assert not evalset.clean_story("", "The little fox lived in a hut. " * 2, 100)[0]
