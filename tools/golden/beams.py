#!/usr/bin/env python3
"""Makes tests/golden/beams.json: answers of Hugging Face's beam search on checkpoints of tests/golden/data.

    python tools/golden/beams.py [--out tests/golden/beams.json]

vLLM's search, which nibble follows, and `generate(num_beams=...)` differ: the former counts the prompt into the length of an
answer, and lets a beam end that is not among the best of its step. They agree on answers that all have the same length (no end), and
with length_penalty 0 where no such end is among the best. Prompts are tried in order until they do, and until no choice is near a tie;
what is recorded is what `generate` gave. Versions: tools/golden/requirements.txt.
"""

import argparse
import json
import pathlib

import numpy as np
import reference
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIN_GAP = 1e-3  # between the log-probabilities of what is kept and what is not
MIN_TIE = 3e-5  # of routers and indexers on the way, as in make.py
TRIES = 200
CASES = ("qwen3-bf16", "lite-bf16", "v32-bf16")
SHAPES = (  # tokens of the prompt, beams, tokens of the answer, do answers end
    (5, 3, 12, False), (70, 4, 10, False), (20, 2, 16, False), (7, 3, 10, True))


def vllm(model, prompt, width, max_tokens, ends):
    """([(sum, ids)] best first, smallest gap), length_penalty 0."""
    live, done, gap = [(0.0, list(prompt))], [], np.inf
    for _ in range(max_tokens):
        logits = model(input_ids=torch.tensor([ids for _, ids in live]), use_cache=False).logits[:, -1]
        scores = torch.log_softmax(logits.double(), -1)
        following = []
        for (total, ids), row in zip(live, scores):
            for value, token in zip(*(t.tolist() for t in row.topk(2 * width))):
                (done if token in ends else following).append((total + value, ids + [token]))
        following.sort(key=lambda beam: -beam[0])
        gap = min(gap, following[width - 1][0] - following[width][0])
        live = following[:width]
    done = sorted(done + live, key=lambda beam: -beam[0])
    gaps = [a[0] - b[0] for a, b in zip(done[:width], done[1:width + 1])]
    return [(total, ids[len(prompt):]) for total, ids in done[:width]], min([gap, *gaps])


def hugging_face(model, prompt, width, max_tokens, ends):
    out = model.generate(input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                         num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=max_tokens,
                         length_penalty=0.0, early_stopping="never", eos_token_id=sorted(ends) or None, pad_token_id=0,
                         return_dict_in_generate=True, output_scores=True)
    answers = []
    for ids, score in zip(out.sequences.tolist(), out.sequences_scores.tolist()):
        ids = ids[len(prompt):]
        end = next((i for i, token in enumerate(ids) if token in ends), len(ids) - 1)
        answers.append((score, ids[:end + 1]))
    return answers


def nearest_tie(model, prompt, answers):
    nearest = np.inf
    for _, answer in answers:
        gaps = reference.Gaps(model)
        with gaps.record(len(prompt) + len(answer)):
            reference.logits(model, prompt + answer)
        nearest = min(nearest, gaps.indexer.min(), gaps.router.min())
    return nearest


def record(model, case, shape, ends, seed):
    n, width, max_tokens, _ = shape
    for attempt in range(TRIES):
        prompt = np.random.default_rng([seed, attempt]).integers(3, 119, n).tolist()
        want, gap = vllm(model, prompt, width, max_tokens, ends)
        if gap < MIN_GAP:
            continue
        got = hugging_face(model, prompt, width, max_tokens, ends)
        if [ids for _, ids in got] != [ids for _, ids in want] or nearest_tie(model, prompt, got) < MIN_TIE:
            continue
        if ends and not (any(ids[-1] in ends for _, ids in got) and len(got[0][1]) < max_tokens):
            continue  # one that nobody ends shows nothing
        return {"case": case, "prompt": prompt, "width": width, "max_tokens": max_tokens, "ignore_eos": not ends, "tries": attempt + 1,
                "answers": [{"ids": ids, "sum": round(score, 5)} for score, ids in got]}
    raise SystemExit(f"{case} {shape}: no prompt in {TRIES}")


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=ROOT / "tests" / "golden" / "beams.json")
    args = parser.parse_args()
    searches = []
    for c, case in enumerate(CASES):
        folder = ROOT / "tests" / "golden" / "data" / case
        model, _ = reference.load(folder)
        eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
        eos = set(eos if isinstance(eos, list) else [eos])
        for s, shape in enumerate(SHAPES):
            searches.append(record(model, case, shape, eos if shape[3] else set(), 100 * c + s))
            print(case, shape, searches[-1]["tries"], flush=True)
    lines = ",\n".join(json.dumps(s) for s in searches)
    pathlib.Path(args.out).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
