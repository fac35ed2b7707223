"""nibble bench --breakdown and --trace: rows that add up to the step, and a trace that viewers open."""

import json
import subprocess

import pytest

ROOFLINE = ["attention", "indexer", "router", "routed experts", "shared experts", "dense MLPs", "output head", "embedding",
            "norms and biases", "cache read", "cache write", "collectives"]
GAPS = ["launch gaps", "host gaps"]


@pytest.fixture(scope="module")
def bench(nibble_bin, repo):
    def run(*options, code=0):
        done = subprocess.run([nibble_bin, "bench", *options], cwd=repo, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def measured(bench, tmp_path_factory):
    """Figures and trace of one run: four timed steps."""
    path = tmp_path_factory.mktemp("breakdown") / "trace.json"
    out = bench("decode", "--model", "models/glm5-tiny", "--tokens", "4", "--repeat", "1", "--context", "16", "--trace", str(path),
                "--json").stdout
    return json.loads(out), json.loads(path.read_text())


def test_rows_add_up_to_the_step(measured):
    figures, _ = measured
    b = figures["breakdown"]
    assert b["stage"] == "decode" and b["steps"] == 4 and b["tokens_per_step"] == 1
    assert figures["timed_ms_per_token"] > 0 and b["read_bandwidth"] > 0
    step = b["step"]
    assert sum(c["ms"] for c in b["components"]) == pytest.approx(step["ms"], rel=0.03)
    assert sum(c["share_of_step"] for c in b["components"]) == pytest.approx(1, abs=0.03)
    assert sum(c["bytes"] for c in b["components"]) == pytest.approx(step["bytes"], rel=1e-6)
    assert sum(c["calls"] for c in b["components"]) == pytest.approx(step["calls"])
    names = [c["component"] for c in b["components"]]
    assert names[-2:] == GAPS and set(names[:-2]) <= set(ROOFLINE) and {"attention", "routed experts", "cache read"} <= set(names)
    for c in b["components"]:
        ops = [o for o in b["operators"] if o["component"] == c["component"]]
        if c["component"] not in GAPS:
            assert sum(o["ms"] for o in ops) == pytest.approx(c["ms"], rel=1e-6, abs=1e-9)
        assert c["floor_ms"] == pytest.approx(1e3 * c["bytes"] / b["read_bandwidth"], rel=1e-4, abs=1e-9)


def test_bytes_are_those_of_the_roofline(measured, nibble_bin, repo):
    """One stream chooses top_k distinct experts; the indexer keeps more positions than there are, and reads its key's matrix alone."""
    figures, _ = measured
    done = subprocess.run([nibble_bin, "roofline", "--model", repo / "models" / "glm5-tiny", "--bandwidth", "1e9", "--context", "17",
                           "--json"], capture_output=True, text=True, check=True, timeout=60)
    roof = {c["component"]: c["bytes"] for c in json.loads(done.stdout)["components"]}
    ours = {c["component"]: c["bytes"] for c in figures["breakdown"]["components"]}
    for name in ("indexer", "router", "routed experts", "shared experts", "dense MLPs", "output head", "embedding"):
        assert ours[name] == pytest.approx(roof[name], rel=1e-6), name


def test_slowest_have_reasons(measured):
    slowest = measured[0]["breakdown"]["slowest"]
    assert len(slowest) == 5 and all(len(s["reason"]) > 10 for s in slowest)
    assert [s["lost_ms"] for s in slowest] == sorted((s["lost_ms"] for s in slowest), reverse=True)


def test_trace_is_in_the_trace_event_format(measured):
    """What Perfetto's JSON importer wants of metadata ("M") and complete events ("X")."""
    figures, trace = measured
    assert trace["otherData"]["events_overwritten"] == "0" and trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    for e in events:
        assert isinstance(e["name"], str) and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        assert e["ph"] in "MX"
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "thread_name") and e["args"]["name"]
        else:
            assert e["ts"] >= 0 and e["dur"] >= 0 and e["cat"] and "step" in e["args"]
    steps = [e for e in events if e.get("cat") == "step"]
    ops = [e for e in events if e["ph"] == "X" and e not in steps]
    assert len(steps) == 4 and [s["args"]["step"] for s in steps] == [0, 1, 2, 3]
    assert len(ops) == pytest.approx(4 * figures["breakdown"]["step"]["calls"])
    last = 0
    for e in ops:  # one after another, each inside its step
        step = steps[e["args"]["step"]]
        assert e["ts"] >= last - 0.002
        assert step["ts"] - 0.002 <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] + 0.002
        last = e["ts"] + e["dur"]
    assert {"model.layers.0.self_attn.o_proj", "lm_head"} <= {e["name"] for e in ops}


def test_text_and_prefill(bench):
    out = bench("prefill", "--model", "models/glm5-tiny", "--tokens", "32", "--repeat", "1", "--breakdown").stdout
    assert "launch gaps" in out and "rows add up to" in out and "most time above the floor" in out
    assert "of 1 timed steps" not in out and "over 1 timed steps" in out


def test_trace_that_cannot_be_written(bench, tmp_path):
    done = bench("decode", "--model", "models/glm5-tiny", "--tokens", "1", "--repeat", "1", "--trace", str(tmp_path / "no" / "t.json"),
                 code=1)
    assert "t.json" in done.stderr
