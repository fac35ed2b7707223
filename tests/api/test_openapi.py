"""/openapi.json describes the server: every route, and what schemathesis makes of the description gets 2xx or 4xx as described.

Short by default (about 1,500 requests). With NIBBLE_SOAK=N about N requests are sent, most of them mutated bodies of the fuzz corpus:
    NIBBLE_SOAK=100000 .venv/bin/python -m pytest --build build/asan tests/api/test_openapi.py
"""

import concurrent.futures
import json
import os
import random
import re
import shutil
import subprocess

import hypothesis
import pytest
import schemathesis
from body_replay import mutations, send_all
from conftest import ROOT
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

SOAK = int(os.environ.get("NIBBLE_SOAK", "0"))
EXAMPLES = max(24, SOAK // 1000)  # per operation and kind of data
CLIENTS = 12 if SOAK else 4
REPLAYED = max(600, SOAK)
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
pytestmark = pytest.mark.timeout(60 + SOAK // 10)


SYNTH = """vocab_size=4096 hidden_size=64 intermediate_size=64 moe_intermediate_size=32 num_attention_heads=2 num_key_value_heads=2
q_lora_rank=32 index_n_heads=2 index_topk=32 max_position_embeddings=512 pad_token_id=4060 eos_token_id=[4060,4067,4069]""".split()


@pytest.fixture(scope="module")
def quick_model(nibble_bin, model_dir, tmp_path_factory):
    """Two small layers with random weights and the usual tokenizer: in the long form the requests matter, not the answers."""
    if not SOAK:
        return model_dir
    folder = tmp_path_factory.mktemp("quick") / "random"
    sets = [word for item in SYNTH for word in ("--set", item)]
    subprocess.run([nibble_bin, "synth", "--like", "glm-5.2", "--layers", "2", "--experts", "4", *sets, "--out", folder, "--tokenizer", model_dir], check=True)
    shutil.copy(model_dir / "chat_template.jinja", folder)
    return folder


@pytest.fixture(scope="module")
def small(serve, quick_model):
    """Answers are short, because the context is."""
    server = serve("--context-length", "32" if SOAK else "64", "--max-running-requests", "64", "--max-total-tokens", "8192",
                   "--served-model-name", "m", "--served-model-name", "other", model=quick_model)
    yield server
    assert server.process.poll() is None, f"the server is gone:\n{server.log}"
    assert server.stop() == 0, server.log
    assert not re.search(r"Sanitizer|runtime error", server.log), server.log


@pytest.fixture(scope="module")
def document(small):
    reply = small.get("/openapi.json")
    assert reply.status_code == 200
    return reply.json()


def operations():
    """("METHOD /path", kind of data) from the source of the document, so that each is a test."""
    paths = json.loads((ROOT / "src" / "server" / "openapi.json").read_text())["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            name = f"{method.upper()} {path}"
            yield pytest.param(name, GenerationMode.POSITIVE, id=f"{name}-valid")
            if "requestBody" in operation:
                yield pytest.param(name, GenerationMode.NEGATIVE, id=f"{name}-invalid")


def test_every_route_is_described(document):
    source = (ROOT / "src" / "server" / "http.c").read_text()
    table = source[source.index("nbi_route routes[]"):]
    routes = set(re.findall(r'\.path = "([^"]+)"', table[:table.index("};")]))
    described = {re.sub(r"\{.*", "", path) for path in document["paths"]}
    assert routes == described


def test_version(small, document):
    assert document["info"]["version"] == small.get("/version").json()["version"]


def test_references(document):
    """Each $ref leads somewhere and each component is used."""
    def walk(value):
        if isinstance(value, dict):
            if "$ref" in value:
                yield value["$ref"]
            for inner in value.values():
                yield from walk(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from walk(inner)

    used = set(walk(document))
    there = {f"#/components/{kind}/{name}" for kind in ("schemas", "responses") for name in document["components"][kind]}
    assert used <= there
    assert {name for name in there - used if "/schemas/" in name} == set()


def shorten(case):
    """Few answers of few tokens: the point is the request."""
    body = case.body
    if not isinstance(body, dict):
        return
    for key in ("n", "best_of"):
        for holder in (body, body.get("sampling_params")):
            if isinstance(holder, dict) and isinstance(holder.get(key), int) and holder[key] > 4:
                holder[key] = 4


# What breaks the description is not always refused: some fields are read more leniently than it says, as the peers read them. The
# refusals that count have tests of their own (test_errors.py).
@pytest.mark.parametrize("operation,mode", list(operations()))
def test_generated(small, document, operation, mode):
    method, path = operation.split()
    schema = schemathesis.openapi.from_dict(document)
    operation = schema[path][method]
    examples = EXAMPLES if operation.body or operation.path_parameters else 2

    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=not SOAK, database=None, phases=[hypothesis.Phase.generate],
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case):
        shorten(case)
        reply = case.call(base_url=small.url, timeout=120)
        case.validate_response(reply, checks=CHECKS)

    run()


def test_mutated_corpus(small):
    seed = random.randrange(2**32) if SOAK else 1
    print(f"seed {seed}, {REPLAYED} bodies")
    share = REPLAYED // CLIENTS
    counts = {}
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        for part in pool.map(lambda i: send_all(small.port, mutations(random.Random(seed + i), share)), range(CLIENTS)):
            counts = {status: counts.get(status, 0) + part.get(status, 0) for status in {*counts, *part}}
    print(counts)
    assert sum(counts.values()) == share * CLIENTS and counts.get(200, 0) > REPLAYED // 200
    small.wait_idle(5)
