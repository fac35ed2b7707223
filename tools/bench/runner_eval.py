"""The embedded model's figures (tools/tiny/eval.py) with every MoE runner of a device and every kind of KV cache, in one table.

The runners are those that `nibble check` calls supported. Exit status 1 when a figure misses its goal or a server does not come up.

  python tools/bench/runner_eval.py --nibble build/cuda/nibble             all of it
  python tools/bench/runner_eval.py --nibble build/cuda/nibble --list      the runners alone
"""
import argparse
import json
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools/tiny"), str(ROOT / "tools/bench")]
import evalset  # noqa: E402
from agreement import Server  # noqa: E402

GOAL_MISSED = 1


def runners(nibble, device):
    """"auto" and the names of the runners that the program supports on this device."""
    done = subprocess.run([nibble, "check", "--device", device, "--moe-runner-backend", "all", "--json"], stdout=subprocess.PIPE, check=True)
    results = [r for r in json.loads(done.stdout)["results"] if r["kind"] == "runner" and r["supported"]]
    return ["auto", *dict.fromkeys(r["path"] for r in results)]


def figures(a, runner, kind):
    """{metric: [right, total]} of one server; None when it fails. The client is a process of its own: many share no interpreter."""
    log = a.out / f"eval-{runner}-{kind}.log"
    file = log.with_suffix(".json")
    with log.open("w") as out:
        try:
            server = Server(a.nibble, a.device, ["--moe-runner-backend", runner, "--kv-cache-dtype", kind, "--log-level", "warn"])
        except SystemExit as e:
            print(e, file=out)
            return None
        try:
            done = subprocess.run([sys.executable, str(ROOT / "tools/tiny/eval.py"), "--url", server.url, "--parallel", str(a.parallel),
                                   "--share", str(a.share), "--show", "2", "--json", str(file),
                                   *(["--skills", a.skills] if a.skills else [])], stdout=out, stderr=subprocess.STDOUT)
        finally:
            server.close()
    return json.loads(file.read_text()) if done.returncode in (0, GOAL_MISSED) and file.exists() else None


def table(columns):
    """columns {(runner, kind): figures or None} → text: a row for each skill, a column for each server, "*" behind a goal that is missed."""
    metrics = list(dict.fromkeys(m for f in columns.values() for m in f or ()))
    head = ["skill", "of", "goal", *(f"{r} {k}" for r, k in columns)]
    rows = [head]
    for m in metrics:
        goal = evalset.GOALS.get(m)
        total = next(f[m][1] for f in columns.values() if f and m in f)
        row = [m, str(total), f"{goal:.0%}" if goal else ""]
        for f in columns.values():
            right = f[m][0] if f and m in f else None
            row.append("-" if right is None else f"{right}{'*' if goal and right < goal * total else ''}")
        rows.append(row)
    widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths))) for r in rows)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nibble", default=str(ROOT / "build/cuda/nibble"))
    p.add_argument("--device", default="cuda")
    p.add_argument("--runners", help="comma-separated (default: auto and all that check supports)")
    p.add_argument("--kv", default="bf16,fp8_e4m3", help="comma-separated kinds of KV cache")
    p.add_argument("--share", type=float, default=1.0, help="part of the items")
    p.add_argument("--skills", help="as of eval.py")
    p.add_argument("--parallel", type=int, default=16, help="requests in flight at each server (default 16)")
    p.add_argument("--together", type=int, default=4, help="servers at once (default 4)")
    p.add_argument("--out", type=pathlib.Path, default=ROOT / "build/eval", help="folder of logs and figures")
    p.add_argument("--list", action="store_true", help="print the runners and end")
    a = p.parse_args()
    names = a.runners.split(",") if a.runners else runners(a.nibble, a.device)
    if a.list:
        print(*names, sep="\n")
        return 0
    a.out.mkdir(parents=True, exist_ok=True)
    pairs = [(r, k) for k in a.kv.split(",") for r in names]
    with ThreadPoolExecutor(a.together) as pool:
        columns = dict(zip(pairs, pool.map(lambda pair: figures(a, *pair), pairs)))
    print(table(columns))
    failed = [f"{r} {k}" for (r, k), f in columns.items() if not f]
    if failed:
        print(f"no figures of {', '.join(failed)}: see {a.out}")
    return 0 if not failed and all(evalset.passed(f) for f in columns.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
