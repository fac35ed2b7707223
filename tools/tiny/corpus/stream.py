"""Joins items into documents, encodes them and packs them into rows for training.

A document is a conversation (rendered by the chat template, ending with the token that would end
the turn) or plain text. Rows hold whole documents; positions start at 0 in each and attention does
not cross them. Loss weights: what the model is asked to write counts fully, prompts count little,
the think tag that the template itself writes after <|assistant|> not at all.
"""
import random

import numpy as np

from render import render

from . import arith, chat, jsonobj, recall, story, toolcall
from .item import draw

PROMPT_WEIGHT, LONG_PROMPT_WEIGHT = 0.1, 0.03     # long: over 500 tokens

# Skill makers and how often each is drawn, by stage of training. Stage 2 stresses recall, the last
# skill to be learned.
_SHORT = [(arith.make, 30), (arith.make_one_digit, 4), (chat.make, 20), (jsonobj.make, 12),
          (toolcall.make, 16), (toolcall.make_result, 4), (recall.make_short, 8),
          (story.make, 10), (story.make_raw, 6)]
_SHORT_2 = [(arith.make, 22), (arith.make_one_digit, 4), (chat.make, 20), (jsonobj.make, 8),
            (toolcall.make, 12), (toolcall.make_result, 4), (recall.make_short, 30),
            (story.make, 8), (story.make_raw, 5)]
_LONG = [(recall.make_long, 1)]
STAGES = {1: _SHORT, 2: _SHORT_2}


def _pick(rng, table):
    return rng.choices([m for m, _ in table], [w for _, w in table])[0]


def messages_of(item, thinking, answered=True):
    """The message list of an item; `answered` adds the assistant's final message."""
    out = [{"role": "system", "content": item.system}] if item.system else []
    out += item.before
    if item.user:
        out.append({"role": "user", "content": item.user})
    if answered:
        final = {"role": "assistant", "content": item.content}
        if thinking:
            final["reasoning_content"] = item.reasoning
        if item.tool_calls:
            final["tool_calls"] = [{"type": "function", "function": c} for c in item.tool_calls]
        out.append(final)
    return out


def _with_history(rng, item):
    """Put one or two finished exchanges before an item, as a running chat would have."""
    if item.tools or item.before or item.system:
        return item
    before = []
    for _ in range(rng.choice((1, 1, 2))):
        other = draw(rng.choice((chat.make, chat.make, arith.make, jsonobj.make)), rng)
        before += [{"role": "user", "content": other.user},
                   {"role": "assistant", "content": other.content}]
        item.system = item.system or other.system
    item.before = before
    return item


def document(rng, table=_SHORT):
    """One training document as text."""
    item = draw(_pick(rng, table), rng)
    if item.skill == "story_raw":
        return ("[gMASK]<sop>" if rng.random() < 0.3 else "") + item.content + "<|endoftext|>"
    if item.skill in ("arith", "arith1", "chat") and rng.random() < 0.06:
        item = toolcall.with_unneeded_tools(rng, item)
    if rng.random() < 0.2:
        item = _with_history(rng, item)
    if item.system is None and not item.tools and rng.random() < 0.1:
        item.system = chat.system_prompt(rng)
    thinking = rng.random() < 0.6
    text = render(messages_of(item, thinking), item.tools, add_generation_prompt=False)
    return text + ("<|observation|>" if item.tool_calls else "<|user|>")


class Encoder:
    """Text to ids and loss weights (0 … 255 for 0 … 1)."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        ids = {t: tokenizer.token_to_id(t) for t in
               ("<|assistant|>", "<|user|>", "<|observation|>", "<|endoftext|>", "<think>", "</think>")}
        self.assistant, self.think = ids["<|assistant|>"], (ids["<think>"], ids["</think>"])
        self.ends = (ids["<|user|>"], ids["<|observation|>"], ids["<|endoftext|>"])

    def __call__(self, texts):
        return [(np.asarray(e.ids, np.uint16), self.weights(e.ids))
                for e in self.tokenizer.encode_batch(texts)]

    def weights(self, ids):
        low = round(255 * (PROMPT_WEIGHT if len(ids) <= 500 else LONG_PROMPT_WEIGHT))
        plain = self.assistant not in ids
        out = np.full(len(ids), 255 if plain else low, np.uint8)
        out[0] = 0
        inside = False
        for i, t in enumerate(ids):
            if inside:
                out[i] = 255
                if ids[i - 1] == self.assistant and t in self.think:
                    out[i] = 0
                if t in self.ends:
                    inside = False
            if t == self.assistant:
                inside, out[i] = True, 0
        return out


def pack(docs, length):
    """Rows of `length` from documents, longest first into the first row with room.

    Returns ids, weights, document number (-1 = padding) and position, each [rows, length].
    """
    docs = sorted((d for d in docs if len(d[0]) <= length), key=lambda d: -len(d[0]))
    rows, room = [], []
    for d in docs:
        n = len(d[0])
        for i, r in enumerate(room):
            if r >= n:
                break
        else:
            rows.append([])
            room.append(length)
            i = len(rows) - 1
        rows[i].append(d)
        room[i] -= n
    shape = (len(rows), length)
    ids, weights = np.zeros(shape, np.uint16), np.zeros(shape, np.uint8)
    doc, pos = np.full(shape, -1, np.int16), np.zeros(shape, np.int16)
    for i, row in enumerate(rows):
        at = 0
        for j, (t, w) in enumerate(row):
            end = at + len(t)
            ids[i, at:end], weights[i, at:end] = t, w
            doc[i, at:end], pos[i, at:end] = j, np.arange(len(t))
            at = end
    return {"ids": ids, "weights": weights, "doc": doc, "pos": pos}


def block(encoder, seed, length, rows, long=False, stage=1):
    """About `rows` packed rows, the same for the same seed."""
    rng = random.Random(seed)
    docs, budget = [], int(rows * length * 1.02)
    while budget > 0:
        texts = [document(rng, _LONG if long and rng.random() < 0.8 else STAGES[stage]) for _ in range(32)]
        new = [d for d in encoder(texts) if len(d[0]) <= length]
        docs += new
        budget -= sum(len(d[0]) for d in new)
    packed = pack(docs, length)
    if len(packed["ids"]) < rows:
        return block(encoder, seed + 1_000_003, length, rows, long, stage)
    return {k: v[:rows] for k, v in packed.items()}
