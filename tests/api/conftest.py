"""Starts the real server and talks to it with the real client.

The model is the embedded one where it is there; else a small checkpoint with random weights, the embedded model's tokenizer
and chat template. Only tests that ask for `trained` depend on what the model has learnt.
"""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from api_server import Server  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]

SYNTH = """vocab_size=4096 hidden_size=128 intermediate_size=256 moe_intermediate_size=64 num_attention_heads=4
num_key_value_heads=4 q_lora_rank=64 index_n_heads=4 index_topk=128 max_position_embeddings=4096 pad_token_id=4060
eos_token_id=[4060,4067,4069]""".split()


def pytest_configure(config):
    config.addinivalue_line("markers", "runners: among the tests that scripts/gpu-test repeats for every runner and kind of KV cache")
    config.addinivalue_line("markers", "cpu_only(why): skipped when --serve-options names a GPU")


def pytest_collection_modifyitems(config, items):
    if "cuda" not in config.getoption("--serve-options"):
        return
    for item in items:
        for mark in item.iter_markers("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=f"on a CPU only: {mark.args[0]}"))


@pytest.fixture(scope="session")
def sanitized(nibble_bin):
    """The build runs several times slower than a normal one."""
    return nibble_bin.parent.name in ("asan", "tsan", "debug")


@pytest.fixture(scope="session")
def model_dir(nibble_bin, tmp_path_factory):
    embedded = ROOT / "models" / "glm5-tiny"
    if (embedded / "config.json").exists():
        return embedded
    folder = tmp_path_factory.mktemp("model") / "random"
    sets = [word for item in SYNTH for word in ("--set", item)]
    subprocess.run([nibble_bin, "synth", "--like", "glm-5.2", "--layers", "4", "--experts", "8", *sets, "--out", folder,
                    "--tokenizer", embedded], check=True, capture_output=True)
    shutil.copy(ROOT / "tools" / "tiny" / "chat_template.jinja", folder)
    return folder


@pytest.fixture(scope="session")
def trained(model_dir):
    """Skips where only random weights are there: they call no function."""
    if model_dir != ROOT / "models" / "glm5-tiny":
        pytest.skip("needs the embedded model")


@pytest.fixture(scope="session")
def serve(nibble_bin, model_dir, request):
    """Starts servers that end with the session at the latest: serve(*options)."""
    servers = []
    ranks = request.config.getoption("--ranks")
    everywhere = shlex.split(request.config.getoption("--serve-options"))

    def start(*options, model=model_dir, **kwargs):
        options = (*everywhere, *options)
        if ranks > 1 and "--tp-size" not in options:
            options = ("--tp-size", str(ranks), *options)
        servers.append(Server(nibble_bin, model, *options, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="session")
def server(serve):
    """The server that most tests share. It must survive all of them, with clean sanitizers."""
    server = serve("--log-level", "debug")
    yield server
    assert server.process.poll() is None, f"the server is gone:\n{server.log}"
    assert server.stop() == 0, server.log
    assert not re.search(r"Sanitizer|runtime error", server.log), server.log


@pytest.fixture(scope="session")
def client(server):
    return server.client()


@pytest.fixture
async def aclient(server):
    async with server.async_client() as client:
        yield client


@pytest.fixture(scope="session")
def model(client):
    """The id of the served model."""
    return client.models.list().data[0].id


@pytest.fixture(scope="session")
def limit(client):
    """Tokens that a request may hold."""
    return client.models.list().data[0].model_extra["max_model_len"]
