"""The web page as HTTP sees it: files, headers, keys, --no-ui, the tail of the log. What a browser makes of it: tests/ui."""

import json
import re
import time

import pytest
from conftest import ROOT
from test_errors import error_of

PAGE = ROOT / "src" / "server" / "page"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
FILES = sorted(path.name for path in PAGE.iterdir())


def path_of(name):
    return "/" if name == "index.html" else f"/ui/{name}"


@pytest.mark.parametrize("name", FILES)
def test_files(server, name):
    reply = server.get(path_of(name))
    assert reply.status_code == 200
    assert reply.content == (PAGE / name).read_bytes()
    assert reply.headers["content-type"] == f"{TYPES[name.split('.')[-1]]}; charset=utf-8"


@pytest.mark.parametrize("path", ["/", "/ui/page.js", "/ui/page.css", "/ui/log", "/ui/nothing"])
def test_headers(server, path):
    headers = server.get(path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_no_inline_code():
    """The policy forbids it; and no script names what makes markup or code of a text."""
    html = (PAGE / "index.html").read_text()
    assert re.findall(r"<script[^>]*>(?!</script>)|\son\w+=|\sstyle=|<style", html) == []
    assert re.findall(r"""(?:src|href)=["'](?:https?:)?//""", html) == []
    for path in PAGE.glob("*.js"):
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\b|Function\(", path.read_text())
        assert found == [], path.name


def test_unknown(server):
    for path in ("/ui/nothing", "/ui/", "/ui", "/ui/../page.js", "/ui/page.js/"):
        assert error_of(server.get(path), 404)["code"] == "unknown_url"
    error_of(server.post("/", {}), 405)


def test_key(serve):
    server = serve("--api-key", "secret")
    for name in FILES:
        assert server.get(path_of(name)).status_code == 200
    for path in ("/ui/log", "/server_info"):
        error_of(server.get(path), 401)
        assert server.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert "secret" not in server.get("/ui/log", headers={"Authorization": "Bearer secret"}).text
    server.stop()


def test_no_ui(serve):
    server = serve("--no-ui")
    for path in [*map(path_of, FILES), "/ui/log"]:
        assert error_of(server.get(path), 404)["code"] == "unknown_url"
    assert server.get("/server_info").json()["flags"]["no_ui"] is True
    server.stop()


def test_log(serve):
    """The lines that went to stderr, in order, with the times they were written; no content, no debug lines."""
    begin = time.time()
    server = serve("--log-level", "debug")
    text = "zanzibar quagga 4711"
    assert server.post("/v1/completions", {"prompt": text, "max_tokens": 2}).status_code == 200
    assert server.get(f"/{text.replace(' ', '-')}").status_code == 404
    lines = server.get("/ui/log").json()["lines"]
    assert [line["n"] for line in lines] == list(range(len(lines)))
    assert all(begin - 1 < line["time"] < time.time() + 1 for line in lines)
    server.stop()
    heads = {"info": "", "warning": "warning: ", "error": "error: "}
    assert [heads[line["level"]] + line["text"] for line in lines] == [line for line in server.lines if not line.startswith("debug: ")][:len(lines)]
    assert any(line["text"].startswith("ready after") for line in lines)
    assert "zanzibar" not in json.dumps(lines)


def test_server_info(server):
    """The memory plan as the log has it, and the checks of the start: each below its bound, one runner in use."""
    info = server.get("/server_info").json()
    plan = dict(re.findall(r"memory: (.+?) +([0-9.]+) MB", server.log))
    names = {"weights": "weight_bytes", "workspace": "workspace_bytes", "KV pages": "kv_bytes", "prefix tree": "prefix_tree_bytes",
             "batches": "batch_bytes", "requests": "request_bytes"}
    assert {name: f"{info['memory'][key] / 1e6:.1f}" for name, key in names.items()} == {name: plan[name] for name in names}
    assert f"of {info['memory']['available_bytes'] / 1e6:.1f} MB available" in server.log
    checks = info["checks"]
    assert {check["kind"] for check in checks} == {"linear", "mlp", "attention", "runner"}
    for check in checks:
        assert check["supported"] is (check["why"] == "")
        if check["chosen"]:
            assert 0 <= check["error"] <= check["bound"]
    runners = {check["path"]: check for check in checks if check["kind"] == "runner"}
    assert [name for name, check in runners.items() if check["chosen"]] == [info["moe_runner_backend"]]
    assert {"reference", "cpu", "cuda_gemv"} <= set(runners)
    assert runners["reference"]["supported"] and runners["reference"]["error"] is None


def test_skip_check(serve):
    server = serve("--skip-check")
    assert server.get("/server_info").json()["checks"] == []
    server.stop()
