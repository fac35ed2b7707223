"""nibble roofline from the outside: JSON, text, picture, refusals."""

import json
import re
import subprocess
import xml.etree.ElementTree

import pytest


@pytest.fixture
def roofline(nibble_bin):
    def run(*arguments, code=0):
        done = subprocess.run([nibble_bin, "roofline", *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        return done

    return run


def test_json_of_eight_ranks(roofline):
    out = json.loads(roofline("--like", "glm-5", "--weights", "nvfp4-mlp", "--tp", "8", "--device", "rtx-pro-6000",
                              "--bandwidth", "1.79e12", "--json").stdout)
    # The link of the device counts: 157 reductions of 12 kB, at 64 GB/s.
    collectives = next(c for c in out["components"] if c["component"] == "collectives")
    assert out["floor_ms"] - collectives["floor_ms"] == pytest.approx(3.19, abs=0.005)
    assert collectives["floor_ms"] == pytest.approx(157 * 12288 * 2 * 7 / 8 / 64e9 * 1e3, rel=1e-3)
    assert out["tokens_per_s"] == pytest.approx(1e3 / out["floor_ms"])
    assert out["bytes_per_step"] == pytest.approx(
        sum(c["bytes"] for c in out["components"] if c["component"] != "collectives"))
    assert out["memory_per_gpu"]["weights"] < out["memory_per_gpu"]["device"]


def test_stored_bytes_of_a_checkpoint(roofline, repo, nibble_bin):
    model = str(repo / "models" / "glm5-tiny")
    out = json.loads(roofline("--model", model, "--bandwidth", "1e10", "--mtp", "--json").stdout)
    inspected = json.loads(subprocess.run([nibble_bin, "inspect", "--model", model, "--json"], check=True,
                                          capture_output=True, text=True).stdout)
    stored = sum(c["bytes"] for c in inspected["components"])
    assert out["memory_per_gpu"]["weights"] == pytest.approx(stored, rel=1e-9)
    assert out["parameters"] == sum(c["weights"] for c in inspected["components"])


def stored_bytes(model, part, layers):
    """Of the matrices of a part of the layers, with their block scales, as the headers of the files say."""
    total = 0
    for path in model.glob("*.safetensors"):
        with path.open("rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        for name, tensor in header.items():
            layer = re.match(rf"model\.layers\.(\d+)\.{part}\.\w+_proj\.(weight|weight_scale)$", name)
            if layer and int(layer[1]) < layers:
                total += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    return total


def test_layers_of_other_kinds(roofline, repo):
    """Every module counts as it is stored: here the MTP layer is BF16, which a step does not read, and the others are NVFP4."""
    model = repo / "tests" / "golden" / "data" / "glm5-nvfp4-mlp"
    config = json.loads((model / "config.json").read_text())
    layers, experts, chosen = config["num_hidden_layers"], config["n_routed_experts"], config["num_experts_per_tok"]
    out = json.loads(roofline("--model", str(model), "--bandwidth", "1e10", "--json").stdout)
    read = {c["component"]: c["bytes"] for c in out["components"]}
    assert read["routed experts"] == stored_bytes(model, r"mlp\.experts\.\d+", layers) * chosen / experts
    assert read["shared experts"] == stored_bytes(model, r"mlp\.shared_experts", layers)
    assert read["dense MLPs"] == stored_bytes(model, "mlp", layers)
    assert stored_bytes(model, r"mlp\.shared_experts", layers + 1) > 2 * read["shared experts"]
    with_mtp = json.loads(roofline("--model", str(model), "--bandwidth", "1e10", "--mtp", "--json").stdout)
    assert with_mtp["bytes_per_step"] == out["bytes_per_step"]
    assert with_mtp["memory_per_gpu"]["weights"] > out["memory_per_gpu"]["weights"]


def test_cache_types(roofline):
    def cache(*options):
        out = json.loads(roofline("--like", "glm-5.2", "--bandwidth", "1e12", *options, "--json").stdout)
        return out["kv_cache_dtype"], out["memory_per_gpu"]["cache_per_token"], out["context"]

    assert cache() == ("bf16", 78 * 1152 + 21 * 256, None)
    assert cache("--kv-cache-dtype", "f32", "--context", "5") == ("f32", 78 * 2304 + 21 * 512, 5)
    assert cache("--kv-cache-dtype", "fp8") == ("fp8_e4m3", 78 * 656 + 21 * 132, None)


def test_text_and_picture(roofline, tmp_path):
    picture = tmp_path / "roofs.svg"
    text = roofline("--like", "glm-5.2", "--tp", "8", "--ep", "8", "--device", "b200", "--batch", "16", "--context",
                    "32768", "--plot", str(picture)).stdout
    assert "floor" in text and "tokens/s" in text and "busiest group" in text
    texts = [e.text for e in xml.etree.ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert any(t.split(", ")[0] == "attention" for t in texts) and any(t.startswith("routed experts, ") for t in texts)


def test_devices_have_sources(roofline):
    lines = roofline("--list-devices").stdout.splitlines()
    assert len(lines) > 10 and all("sheet" in line or "paper" in line or "brief" in line for line in lines[1:])


@pytest.mark.parametrize("arguments, says", [
    (["--device", "h200"], "--model and --like"),
    (["--like", "glm-5"], "no bandwidth"),
    (["--like", "glm-9", "--device", "h200"], "glm-9"),
    (["--like", "glm-5", "--device", "h300"], "rtx-pro-6000"),
    (["--like", "glm-5", "--device", "h200", "--weights", "int3"], "nvfp4-mlp"),
    (["--like", "glm-5", "--device", "h200", "--tp", "3"], "64 heads"),
    (["--model", "/nowhere", "--device", "h200"], "/nowhere"),
    (["--like", "glm-5", "--device", "h200", "--kv-cache-dtype", "nvfp4"], "use fp8_e4m3"),
    (["--like", "glm-5", "--device", "h200", "--kv-cache-dtype", "q4_0"], "expected auto, bf16"),
])
def test_refusals(roofline, arguments, says):
    assert says in roofline(*arguments, code=1).stderr
