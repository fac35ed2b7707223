#!/usr/bin/env python3
"""What a request costs the server beyond the engine's own work: one kept connection, completions of one token.

    tools/bench/request_cost.py --build build/release [--threads 1] [--requests 3000] [--prompt TEXT]

Compiles tools/bench/request_cost.c against libnibble.so of the build and starts `nibble serve`. The same greedy completion of a short
prompt then goes by turns of twenty through the server (raw socket, not streamed), through an engine that the caller steps, and
through an engine that steps in a thread of its own: medians of each, and of the differences of requests in the same place of a turn,
in microseconds. `over_engine_thread` is what HTTP and JSON cost; `over_engine`, less an engine that pays for no thread at all, has the
two hand-overs to and from the engine's thread in it too. Whatever else is given goes to `nibble serve`.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from stream_cost import ROOT, Server  # noqa: E402


def compiled(build, folder):
    """The client's program, linked with the library that the build made."""
    build, program = pathlib.Path(build).resolve(), pathlib.Path(folder) / "request_cost"
    subprocess.run(["cc", "-std=gnu11", "-O2", "-o", program, pathlib.Path(__file__).with_suffix(".c"), f"-I{ROOT / 'include'}",
                    f"-L{build}", f"-Wl,-rpath,{build}", "-lnibble"], check=True)
    return program


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build" / "release")
    parser.add_argument("--model", default=ROOT / "models" / "glm5-tiny")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of server and engines")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--prompt", default="The capital of France is")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(args.build, folder)
        server = Server(args, options)
        try:
            done = subprocess.run([program, str(server.port), args.model, str(args.threads), str(args.requests), args.prompt],
                                  check=True, capture_output=True, text=True)
        finally:
            server.stop()
    rows = [[int(ns) / 1e3 for ns in line.split()] for line in done.stdout.splitlines()]

    def figures(values):
        low, middle, high = statistics.quantiles(values, n=20)[0], statistics.median(values), statistics.quantiles(values, n=20)[18]
        return {"median": round(middle, 1), "p5": round(low, 1), "p95": round(high, 1)}

    print(json.dumps({"requests": len(rows), "threads": args.threads,
                      "server_us": figures([r[0] for r in rows]),
                      "engine_us": figures([r[1] for r in rows]),
                      "engine_thread_us": figures([r[2] for r in rows]),
                      "http_us": figures([r[3] for r in rows]),
                      "over_engine_us": figures([r[0] - r[1] for r in rows]),
                      "over_engine_thread_us": figures([r[0] - r[2] for r in rows])}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
