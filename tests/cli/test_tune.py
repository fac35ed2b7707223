"""nibble tune: what it measures and writes, and what the other commands make of its file."""

import json
import os
import subprocess

import pytest
from server_fixtures import model_dir, sanitized, serve  # noqa: F401 - fixtures


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def nibble(nibble_bin, repo, home):
    def run(command, *options, **env):
        env = {**os.environ, "XDG_CACHE_HOME": str(home / "cache"), **env}
        return subprocess.run([nibble_bin, command, *options], cwd=repo, capture_output=True, text=True, timeout=120, env=env)

    return run


@pytest.fixture(scope="module")
def tuned(nibble):
    done = nibble("tune", "--device", "cpu", "--threads", "1", "--rows", "4", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def doctored(tuned, tmp_path):
    """The path of a copy with other members."""
    def make(**members):
        text = {**{k: v for k, v in tuned.items() if k != "file"}, **members}
        path = tmp_path / "tune.json"
        path.write_text(json.dumps(text))
        return path

    return make


@pytest.fixture
def score(nibble, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text("[5, 9, 2, 40, 77]")

    def run(*options, **env):
        done = nibble("score", "--model", "models/glm5-tiny", "--threads", "1", "--token-ids", str(ids), "--json", *options, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    return run


def test_what_it_writes(tuned, home):
    path = tuned.pop("file")
    assert path.startswith(str(home / "cache" / "nibble" / "tune-"))
    with open(path) as f:
        assert json.load(f) == tuned
    tuned["file"] = path
    assert tuned["format"] == "nibble tune" and tuned["version"] == 1 and tuned["build"].count("+") == 1
    assert tuned["device"].startswith("cpu (") and tuned["shape"]["experts"] == 16 and tuned["shape"]["gate_up"] == "nvfp4"
    assert [b["rows"] for b in tuned["buckets"]] == [1, 2, None]
    assert tuned["buckets"][0]["us"].keys() == {"cpu", "reference"}
    for bucket in tuned["buckets"]:
        assert bucket["us"][bucket["runner"]] > 0
    assert len({b["runner"] for b in tuned["buckets"]}) == 1  # others of this device give other bits
    assert os.listdir(home / "cache" / "nibble") == [os.path.basename(path)]  # nothing half written


def test_others_use_it(score, doctored):
    """Only a file that says so makes a command take `reference`."""
    reference = doctored(numerics="reference", buckets=[{"rows": None, "runner": "reference", "us": {}}])
    got, log = score("--tune-file", str(reference))
    assert got["runner"] == "reference" and not log
    named, _ = score("--moe-runner-backend", "reference", "--tune-file", "none")
    assert named == got
    assert score("--moe-runner-backend", "cpu", "--tune-file", str(reference))[0]["runner"] == "cpu"
    assert score("--tune-file", "none")[0]["runner"] == "cpu"


def test_the_default_place(tuned, score, home, nibble):
    got, log = score()
    assert got["runner"] == tuned["buckets"][0]["runner"] and not log
    with open(tuned["file"], "a") as f:
        f.write("}")
    got, log = score()
    assert got["runner"] == "cpu" and log.count("\n") == 1 and tuned["file"] in log
    got, log = score(XDG_CACHE_HOME="", HOME=str(home / "nobody"))
    assert got["runner"] == "cpu" and not log
    assert json.loads(nibble("tune", "--device", "cpu", "--threads", "1", "--rows", "1", "--json").stdout)["file"] == tuned["file"]
    assert not score()[1]  # whole again


@pytest.mark.parametrize("members, says", [
    ({"build": "0.0.1+00"}, "build"), ({"version": 2}, "version"), ({"driver": "other"}, "driver"), ({"format": 3}, "format"),
    ({"shape": {"hidden": 384}}, "inter"), ({"buckets": []}, "buckets"),
    ({"buckets": [{"rows": 2, "runner": "cpu"}, {"rows": None, "runner": "reference"}]}, "other bits"),
    ({"buckets": [{"rows": None, "runner": "cuda_stream"}]}, "cannot run"),
])
def test_a_file_that_does_not_fit(score, doctored, members, says):
    got, log = score("--tune-file", str(doctored(**members)))
    assert got["runner"] == "cpu"
    assert log.count("\n") == 1 and "by rule" in log and says in log, log


def test_the_server_shows_its_choices(serve, doctored):
    path = doctored(numerics="reference", buckets=[{"rows": 1, "runner": "reference"}, {"rows": None, "runner": "reference"}])
    server = serve("--tune-file", str(path), "--threads", "1")
    info = server.get("/server_info").json()
    assert info["moe_runner_backend"] == "reference" and info["moe_runner_source"] == "tuned"
    assert info["moe_runner_choices"] == [{"max_rows": None, "runner": "reference"}]
    assert info["flags"]["tune_file"] == str(path)
    assert "MoE runners (tuned): reference" in server.log


def test_the_rule(serve):
    server = serve("--tune-file", "none")
    info = server.get("/server_info").json()
    assert info["moe_runner_source"] == "rule" and info["moe_runner_choices"] == [{"max_rows": None, "runner": "cpu"}]
    assert "MoE runners (rule): cpu" in server.log


@pytest.mark.parametrize("options, status, says", [
    (("--rows", "0"), 2, "--rows"), (("--rows", "513"), 2, "--rows"), (("--tune-file", "none"), 2, "--tune-file"),
    (("--activations", "w5"), 2, "w5"), (("--tune-file", "/nowhere/at/all.json", "--rows", "1"), 1, "/nowhere/at/all.json"),
])
def test_refusals(nibble, options, status, says):
    done = nibble("tune", "--device", "cpu", "--threads", "1", *options)
    assert done.returncode == status and says in done.stderr, done.stderr


def test_a_model_without_experts(nibble, tmp_path):
    made = nibble("synth", "--like", "glm-5", "--layers", "1", "--set", "first_k_dense_replace=1", "--set", "vocab_size=256",
                  "--set", "hidden_size=64", "--set", "intermediate_size=64", "--out", str(tmp_path / "dense"))
    if made.returncode:
        pytest.fail(made.stderr)
    done = nibble("tune", "--device", "cpu", "--model", str(tmp_path / "dense"))
    assert done.returncode == 1 and "no experts" in done.stderr
