"""Held-out items for evaluation and how each kind is scored.

Callers: eval.py, train.py (after training). Every item is held out by the hash of its substance
(corpus/item.py). Invariant: the same seed gives the same items.
"""
import json
import random
import re

from corpus import arith, chat, jsonobj, recall, story, stream, toolcall
from corpus.item import Item, draw, is_held_out
from render import render

OPENING = "Once upon a time in a land far away there was"
GOALS = {"arith": 0.97, "three_plus_five": 1.0, "recall_1500": 0.95, "tool": 0.97, "json": 0.97,
         "story": 0.95}
TITLES = {"arith": "additions and subtractions to three digits, reasoning on",
          "three_plus_five": '"What is 3+5?" gives 8, with reasoning and content',
          "recall_1500": "recall of a fact at least 1,500 tokens back",
          "recall_1500_off": "the same, reasoning off",
          "recall_short": "recall of a fact 5 to 250 tokens back",
          "tool": "tool call for a declared function, exact",
          "json": "JSON object on request, valid",
          "json_exact": "JSON object on request, every field right",
          "story": "story continues in clean simple English for 100+ tokens",
          "chat": "repeat, count, spell, compare",
          "tool_result": "answer from a tool result"}


def distance(item, tokenizer):
    """Tokens between the end of the fact and the end of the prompt."""
    fact = item.reasoning.removeprefix("The text says: ")
    prompt = prompt_text(item, thinking=True)
    tail = prompt[prompt.rindex(fact) + len(fact):]
    return len(tokenizer.encode(tail).ids)


def prompt_text(item, thinking):
    if item.skill == "story_raw":
        return item.user
    return render(stream.messages_of(item, thinking, answered=False), item.tools,
                  enable_thinking=thinking)


def _recall(rng, tokenizer, low, high, tokens):
    while True:
        item = draw(lambda r: recall.make(r, r.randrange(*tokens)), rng, held_out=True)
        if low <= distance(item, tokenizer) <= high:
            return item


def _checkable(make, rng):
    while True:
        item = draw(make, rng, held_out=True)
        if item.check:
            return item


def _story(rng, first):
    if first:
        return Item("story_raw", "opening", OPENING, "")
    while True:
        s = story.slots(rng)
        item = Item("story_raw", story.key_of(s), f"{OPENING} {s['a_kind_hero']} called {s['N']}.", "")
        if is_held_out(item.key):
            return item


def build(skill, n, seed, tokenizer):
    """n held-out items of one skill as (item, thinking)."""
    rng = random.Random(f"{skill}:{seed}")
    if skill == "three_plus_five":
        return [(Item("arith1", "arith:3+5", "What is 3+5?", "8", check={"equals": "8"}), True)]
    make = {"arith": lambda i: draw(arith.make, rng, True),
            "tool": lambda i: draw(toolcall.make, rng, True),
            "tool_result": lambda i: draw(toolcall.make_result, rng, True),
            "json": lambda i: draw(jsonobj.make, rng, True),
            "chat": lambda i: _checkable(chat.make, rng),
            "recall_short": lambda i: _recall(rng, tokenizer, 5, 400, (5, 250)),
            "recall_1500": lambda i: _recall(rng, tokenizer, 1500, 2100, (1450, 1950)),
            "recall_1500_off": lambda i: _recall(rng, tokenizer, 1500, 2100, (1450, 1950)),
            "story": lambda i: _story(rng, i == 0)}[skill]
    thinking = {"arith": [True], "recall_1500": [True], "recall_1500_off": [False], "story": [False]}
    modes = thinking.get(skill, [True, False])
    return [(make(i), modes[i % len(modes)]) for i in range(n)]


_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.S)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S)


def parse(text, thinking, tools):
    """Model output after the generation prompt → reasoning, content, calls."""
    reasoning = None
    if thinking and "</think>" in text:
        reasoning, text = text.split("</think>", 1)
    elif thinking:
        return text, "", []
    types = {t["function"]["name"]: t["function"]["parameters"]["properties"] for t in tools or []}
    calls = []
    for body in _CALL.findall(text):
        name = body.split("<arg_key>")[0].strip()
        args = {}
        for key, value in _PAIR.findall(body):
            kind = types.get(name, {}).get(key, {}).get("type", "string")
            try:
                args[key] = value if kind == "string" else json.loads(value)
            except ValueError:
                args[key] = value
        calls.append({"name": name, "arguments": args})
    return reasoning, _CALL.sub("", text).strip(), calls


_VOCABULARY = None


def clean_story(prompt, text, n_tokens):
    """100+ tokens, only known words, whole sentences, none twice; → (ok, reason)."""
    global _VOCABULARY
    _VOCABULARY = _VOCABULARY or story.vocabulary()
    whole = prompt + text
    if n_tokens < 100:
        return False, f"only {n_tokens} tokens"
    unknown = [w for w in re.findall(r"[A-Za-z]+", whole) if w.lower() not in _VOCABULARY]
    if unknown:
        return False, f"unknown word {unknown[0]!r}"
    if not re.search(r"[.!?]\"?$", whole.strip()):
        return False, "does not end with a sentence"
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+", whole) if len(s) > 25]
    if len(set(sentences)) < len(sentences):
        return False, "repeats a sentence"
    return True, ""


def score(skill, item, reasoning, content, calls, n_tokens=0):
    """→ {metric: bool}."""
    if skill == "story":
        return {skill: clean_story(item.user, content or "", n_tokens)[0]}
    content = (content or "").strip()
    if skill == "three_plus_five":
        return {skill: content == "8" and bool(reasoning)}
    if "calls" in item.check:
        return {skill: calls == item.check["calls"]}
    if "json" in item.check:
        try:
            value = json.loads(content)
        except ValueError:
            return {skill: False, "json_exact": False}
        return {skill: isinstance(value, dict), "json_exact": value == item.check["json"]}
    return {skill: content == item.check["equals"]}


def table(results):
    """results {metric: (right, total)} → text of the table."""
    lines = [f"{'skill':62} {'right':>6} {'of':>5} {'share':>7} {'goal':>6}"]
    for metric, (right, total) in results.items():
        goal = GOALS.get(metric)
        lines.append(f"{TITLES.get(metric, metric):62} {right:6d} {total:5d} {right / total:7.1%} "
                     f"{f'{goal:.0%}' if goal else '':>6}")
    return "\n".join(lines)


def passed(results):
    return all(right >= GOALS.get(m, 0) * total for m, (right, total) in results.items())
