"""Measures glm5-tiny on held-out items and prints the table of figures.

  python tools/tiny/eval.py --url http://127.0.0.1:8000        any OpenAI-compatible server
  python tools/tiny/eval.py --transformers models/glm5-tiny    Hugging Face class, dequantised
  python tools/tiny/eval.py --torch models/glm5-tiny           training model, dequantised (fast on a GPU)

Exit status 0 when every figure with a goal reaches it, 1 otherwise.
"""
import argparse
import json
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

import backends
import evalset

COUNTS = {"arith": 400, "three_plus_five": 1, "recall_1500": 200, "recall_1500_off": 100,
          "recall_short": 100, "tool": 300, "tool_result": 100, "json": 300, "chat": 100, "story": 40}


def run(backend, tokenizer, counts, seed, show=0, log=print):
    """→ {metric: (right, total)}; prints up to `show` failures of each skill."""
    results = {}
    for skill, n in counts.items():
        if not n:
            continue
        items = evalset.build(skill, n, seed, tokenizer)
        start, shown = time.time(), 0
        for (item, _), answer in zip(items, backend.answer(items)):
            marks = evalset.score(skill, item, *answer)
            for metric, ok in marks.items():
                right, total = results.get(metric, (0, 0))
                results[metric] = (right + ok, total + 1)
            if not all(marks.values()) and shown < show:
                shown += 1
                want = item.check.get("equals") or item.check.get("json") or item.check.get("calls")
                why = evalset.clean_story(item.user, answer[1], answer[3])[1] if skill == "story" else ""
                log(f"  {skill}: {item.user[-160:]!r}\n    wanted {want!r}\n    got    {answer!r} {why}")
        log(f"{skill}: {results[skill][0]}/{results[skill][1]} in {time.time() - start:.1f} s")
    return results


def torch_backend(folder, tokenizer):
    import torch

    import checkpoint
    from model import Tiny
    model = Tiny(json.loads((Path(folder) / "config.json").read_text()))
    checkpoint.from_names(model, checkpoint.load_dequantised(folder))
    return backends.TinyBackend(model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="server, with or without /v1")
    where.add_argument("--transformers", metavar="FOLDER")
    where.add_argument("--torch", metavar="FOLDER")
    p.add_argument("--model", help="model name at the server (default: its first)")
    p.add_argument("--parallel", type=int, default=4, help="requests in flight (server)")
    p.add_argument("--share", type=float, default=1.0, help="part of the items, e.g. 0.1")
    p.add_argument("--skills", help="comma-separated, default all: " + ",".join(COUNTS))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--show", type=int, default=0, metavar="N", help="print N failures of each skill")
    p.add_argument("--tokenizer", default=str(Path(__file__).parents[2] / "models/glm5-tiny/tokenizer.json"))
    p.add_argument("--json", metavar="FILE", help="write the figures there")
    a = p.parse_args()
    tokenizer = Tokenizer.from_file(a.tokenizer)
    skills = a.skills.split(",") if a.skills else list(COUNTS)
    unknown = set(skills) - set(COUNTS)
    if unknown:
        p.error(f"unknown skill {sorted(unknown)[0]}, known are {', '.join(COUNTS)}")
    counts = {s: max(1, round(COUNTS[s] * a.share)) for s in skills}
    if a.url:
        backend = backends.ServerBackend(a.url, a.model, a.parallel)
    elif a.transformers:
        backend = backends.HfBackend(a.transformers, tokenizer)
    else:
        backend = torch_backend(a.torch, tokenizer)
    results = run(backend, tokenizer, counts, a.seed, a.show)
    print(evalset.table(results))
    if a.json:
        Path(a.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0 if evalset.passed(results) else 1


if __name__ == "__main__":
    sys.exit(main())
