"""/start_profile and /stop_profile in SGLang's and vLLM's forms: the trace as the reply or as a file, tables that add up."""

import json
import re
import subprocess
import time

import httpx
import pytest
from api_server import stream

GAPS = ["launch gaps", "host gaps"]
PROMPT = "Once upon a time there was a"


@pytest.fixture(scope="module")
def quiet(serve):
    """Nobody else's steps in the profiles."""
    server = serve("--memory-bandwidth", "1e9", "--timing-interval", "0", "--disable-radix-cache")
    yield server
    assert server.stop() == 0
    assert not re.search(r"Sanitizer|runtime error", server.log), server.log


def generate(server, tokens):
    reply = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True})
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == tokens


def start(server, **fields):
    reply = server.post("/start_profile", fields)
    assert reply.status_code == 200 and "Start profiling" in reply.text, reply.text
    return reply


def stop(server):
    reply = server.post("/stop_profile", {})
    assert reply.status_code == 200, reply.text
    return reply.json()


def code_of(reply):
    assert reply.status_code == 400
    return reply.json()["error"]["code"]


def check_tables(breakdown):
    for b in breakdown:
        assert sum(c["ms"] for c in b["components"]) == pytest.approx(b["step"]["ms"], rel=0.03)
        assert [c["component"] for c in b["components"]][-2:] == GAPS
        assert b["read_bandwidth"] == 1e9 and len(b["slowest"]) == 5 and all(s["reason"] for s in b["slowest"])
        assert b["step"]["floor_ms"] == pytest.approx(1e3 * b["step"]["bytes"] / 1e9, rel=1e-4)


def check_trace(trace):
    """Metadata and complete events of the Trace Event Format; returns the steps."""
    for e in trace["traceEvents"]:
        assert e["ph"] in "MX" and isinstance(e["name"], str) and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        if e["ph"] == "X":
            assert e["ts"] >= 0 and e["dur"] >= 0 and e["cat"]
    steps = [e for e in trace["traceEvents"] if e.get("cat") == "step"]
    ops = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "step"]
    for e in ops:
        step = steps[e["args"]["step"]]
        assert step["ts"] - 0.002 <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] + 0.002
    return steps


def test_the_reply_is_the_trace(quiet):
    """vLLM's form: no body, both ways. One step reads the prompt, each further token is a step."""
    assert httpx.post(quiet.url + "/start_profile").status_code == 200
    generate(quiet, 6)
    reply = httpx.post(quiet.url + "/stop_profile")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("application/json")
    trace = reply.json()
    assert {b["stage"]: b["steps"] for b in trace["breakdown"]} == {"decode": 5, "prefill": 1}
    check_tables(trace["breakdown"])
    steps = check_trace(trace)
    assert len(steps) == 6 and steps[0]["args"]["rows"] > 1 and [s["args"]["rows"] for s in steps[1:]] == [1] * 5
    names = {e["name"] for e in trace["traceEvents"]}
    assert {"sample", "lm_head", "experts"} <= names
    assert trace["otherData"]["model"] == quiet.get("/v1/models").json()["data"][0]["id"]


def test_states(quiet):
    assert code_of(quiet.post("/stop_profile", {})) == "no_profile"
    start(quiet)
    assert code_of(quiet.post("/start_profile", {})) == "profile_running"
    trace = stop(quiet)
    assert trace["breakdown"] == [] and check_trace(trace) == []
    assert code_of(quiet.get("/stop_profile")) == "no_profile"


def test_steps_are_counted(quiet):
    """SGLang's num_steps and vLLM's max_iterations end it; delay_iterations and start_step leave steps out."""
    start(quiet, num_steps=3)
    generate(quiet, 6)
    trace = stop(quiet)
    assert sum(b["steps"] for b in trace["breakdown"]) == 3 and check_trace(trace)[0]["args"]["rows"] > 1
    start(quiet, max_iterations=2, delay_iterations=2, activities=["CPU", "GPU"], with_stack=True, record_shapes=False)
    generate(quiet, 6)
    trace = stop(quiet)
    assert [(b["stage"], b["steps"]) for b in trace["breakdown"]] == [("decode", 2)]
    done = int(re.search(r"^nibble:step_time_seconds_count\S* (\d+)$", quiet.get("/metrics").text, re.M)[1])
    start(quiet, start_step=done + 4)
    generate(quiet, 6)
    assert [(b["stage"], b["steps"]) for b in stop(quiet)["breakdown"]] == [("decode", 2)]


def test_both_stages(quiet):
    """Until both have their steps: the second prompt's."""
    start(quiet, num_steps=2, profile_by_stage=True)
    for _ in range(3):
        generate(quiet, 3)
    steps = {b["stage"]: b["steps"] for b in stop(quiet)["breakdown"]}
    assert steps == {"decode": 2, "prefill": 2}


def test_a_profile_that_is_over_makes_room(quiet):
    start(quiet, num_steps=1)
    generate(quiet, 2)
    start(quiet)
    assert stop(quiet)["breakdown"] == []


@pytest.mark.parametrize("body, param", [
    ({"num_steps": "3"}, "num_steps"), ({"num_steps": -1}, "num_steps"), ({"start_step": 1.5}, "start_step"),
    ({"delay_iterations": []}, "delay_iterations"), ({"profile_by_stage": 1}, "profile_by_stage"), ({"activities": ["MEM"]}, "activities"),
    ({"activities": "CPU"}, "activities"), ({"with_stack": "yes"}, "with_stack"), ({"output_dir": "/tmp"}, "output_dir"),
    ({"output_dir": 5}, "output_dir"), ({"profile_prefix": "../x"}, "profile_prefix"), ({"profile_prefix": "x" * 65}, "profile_prefix"),
])
def test_refused(quiet, body, param):
    reply = quiet.post("/start_profile", body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert code_of(quiet.post("/stop_profile", {})) == "no_profile"


def test_answers_stay_the_same(quiet):
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1, "seed": 5}
    plain = quiet.post("/v1/completions", body).json()["choices"][0]
    start(quiet)
    timed = [quiet.post("/v1/completions", body).json()["choices"][0], stream(quiet, "/v1/completions", {**body, "stream": True})]
    stop(quiet)
    assert timed[0] == plain
    assert "".join(e["choices"][0]["text"] for e in timed[1] if isinstance(e, dict) and e.get("choices")) == plain["text"]


def test_files(serve, tmp_path):
    """--profile-dir: written at /stop_profile, or when the steps are over; nowhere else."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    server = serve("--profile-dir", str(folder), "--memory-bandwidth", "1e9", "--api-key", "k3y")
    key = {"Authorization": "Bearer k3y"}
    for path in ("/start_profile", "/stop_profile"):
        for method in ("GET", "POST"):
            assert httpx.request(method, server.url + path).status_code == 401

    def post(path, body):
        return httpx.post(server.url + path, json=body, headers=key, timeout=60)

    assert post("/start_profile", {"output_dir": str(tmp_path)}).json()["error"]["param"] == "output_dir"
    assert post("/start_profile", {"output_dir": str(folder), "profile_prefix": "mine"}).status_code == 200
    assert post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}).status_code == 200
    said = post("/stop_profile", {}).json()
    files = list(folder.iterdir())
    assert [str(f) for f in files] == [said["path"]] and re.fullmatch(r"mine-\d{8}-\d{6}-1\.trace\.json", files[0].name)
    trace = json.loads(files[0].read_text())
    assert trace["breakdown"] == said["breakdown"] and len(check_trace(trace)) == 4
    check_tables(said["breakdown"])
    assert post("/start_profile", {"num_steps": 2}).status_code == 200
    assert post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}).status_code == 200
    end = time.monotonic() + 20
    while len(list(folder.glob("*-2.trace.json"))) < 1 and time.monotonic() < end:
        time.sleep(0.1)
    second, = folder.glob("*-2.trace.json")
    assert len(check_trace(json.loads(second.read_text()))) == 2
    reply = post("/stop_profile", {})
    assert code_of(reply) == "no_profile" and str(second) in reply.json()["error"]["message"]
    assert server.stop() == 0


def test_folder_must_be_there(nibble_bin, model_dir, tmp_path):
    done = subprocess.run([nibble_bin, "serve", "--model", model_dir, "--port", "0", "--profile-dir", tmp_path / "none"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 1 and "--profile-dir" in done.stderr


# ---------------------------------------------------------------- /metrics

def values(server):
    """{name or (name, component): value} of what /metrics says of steps."""
    found = {}
    for name, labels, value in re.findall(r"^nibble:(\w+)\{([^}]*)\} (\S+)$", server.get("/metrics").text, re.M):
        component = re.search(r'component="([^"]+)"', labels)
        found[(name, component[1]) if component else name] = float(value)
    return found


def test_share_of_floor(quiet):
    before = values(quiet)
    generate(quiet, 31)
    deadline = time.monotonic() + 20
    while True:  # rates are taken once a second
        now = values(quiet)
        if now["decode_steps_total"] - before["decode_steps_total"] == 30 and now["decode_share_of_floor"] > 0 or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert now["decode_steps_total"] - before["decode_steps_total"] == 30
    assert now["read_bandwidth_bytes_per_second"] == 1e9
    read = now["decode_step_bytes_total"] - before["decode_step_bytes_total"]
    assert 30 * 1e6 < read < 30 * 1e9 and now["decode_step_seconds_total"] > before["decode_step_seconds_total"]
    assert now["decode_share_of_floor"] == pytest.approx(now["achieved_bandwidth_bytes_per_second"] / 1e9, rel=1e-6)


def test_components_in_metrics(serve):
    """Every second step is timed; components add up to them."""
    server = serve("--timing-interval", "2", "--memory-bandwidth", "2e9")
    generate(server, 9)
    server.wait_idle(10)
    now = values(server)
    assert now["timed_steps_total"] == 4  # of nine
    seconds = {k[1]: v for k, v in now.items() if k[0] == "step_component_seconds_total"}
    assert sum(seconds.values()) == pytest.approx(now["timed_step_seconds_total"], rel=0.03) and seconds["attention"] > 0
    assert now["read_bandwidth_bytes_per_second"] == 2e9
    server.stop()
