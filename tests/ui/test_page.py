"""The page in a browser against the real server: a chat, a stop, a reload during a stream, charts under load, hostile output, keys."""

import json
import re

import httpx
import pytest
from api_server import free_port
from playwright.sync_api import expect
from tool_cases import CASES, CHAT_TOOLS

LONG = {"ignore_eos": True, "max_tokens": 6000}  # seconds of tokens, to be stopped

HOSTILE = """<img src=x onerror="window.hit=1;alert(1)"><script>window.hit=2</script><svg onload="window.hit=3"></svg>
[x](javascript:window.hit=4) <a href="javascript:window.hit=5">y</a> <style>*{display:none}</style> </pre></code></article>
```html"><b>
<iframe srcdoc="<script>parent.hit=6</script>"></iframe>
```
&lt;b&gt; {{7*7}} ${window.hit=8} \u202e \U0001f600 </script><plaintext>"""


def post(server, body):
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()["choices"][0]


# ---------------------------------------------------------------- chat


def test_chat(tab, server, shots):
    """What is shown is what the API says, the thinking folded; the second request has the first answer in it."""
    one = tab().open()
    one.set(temperature=0)
    answer = one.ask("What is 17+25?")
    message = post(server, {"messages": [{"role": "user", "content": "What is 17+25?"}], "temperature": 0})["message"]
    expect(answer.locator(".body")).to_have_text(message["content"].strip())
    reasoning = answer.locator("details.reasoning")
    expect(reasoning.locator("p")).to_be_hidden()
    reasoning.locator("summary").click()
    expect(reasoning.locator("p")).to_have_text(message["reasoning_content"].strip())
    expect(answer.locator(".note")).to_contain_text("tokens")
    with one.page.expect_request("**/v1/chat/completions") as sent:
        one.ask("And 3 more?")
    assert [m["role"] for m in sent.value.post_data_json["messages"]] == ["user", "assistant", "user"]
    assert sent.value.post_data_json["messages"][1]["content"] == message["content"]
    assert sent.value.post_data_json["temperature"] == 0
    one.page.screenshot(path=shots / "chat.png")


def test_streams(tab):
    """The first words are there while the server still writes, what is selected and focused stays so; the button is the one that stops."""
    one = tab().open()
    one.change_body(**LONG)
    answer = one.ask("Tell me a story.", wait="Answering")
    expect(answer).to_have_attribute("aria-busy", "true")
    answer.locator("summary").focus()
    body = answer.locator(".body p")
    expect(body).to_contain_text(" ")
    body.evaluate("(node) => getSelection().setBaseAndExtent(node.firstChild, 0, node.firstChild, 3)")
    early = body.inner_text()
    expect(body).not_to_have_text(early)
    assert one.page.evaluate("getSelection().toString()") == early[:3]
    expect(answer.locator("summary")).to_be_focused()
    expect(one.page.locator("#send")).to_be_hidden()
    one.page.locator("#stop").click()
    expect(one.page.locator("#chat-state")).to_have_text("Stopped")


def test_stop(tab, server):
    one = tab().open()
    one.change_body(**LONG)
    aborted = sum(ended_by_client(server))
    answer = one.ask("Tell me a story.", wait="Answering")
    one.page.keyboard.press("Escape")
    expect(answer.locator(".note")).to_have_text("stopped")
    server.wait_idle(10)
    assert sum(ended_by_client(server)) == aborted + 1
    one.page.unroute("**/v1/chat/completions")
    one.ask("What is 3+5?")


def ended_by_client(server):
    for line in httpx.get(server.url + "/metrics").text.splitlines():
        if line.startswith("nibble:num_aborted_requests_total"):
            yield int(float(line.split()[-1]))


def test_reload_during_a_stream(tab, server):
    """The server stops; what was there comes back with the page, and the conversation goes on."""
    one = tab().open()
    one.change_body(**LONG)
    one.ask("Tell me a story.", wait="Answering")
    expect(one.page.locator("article.assistant")).to_contain_text("a")
    one.page.reload()
    server.wait_idle(10)
    expect(one.page.locator("#state")).to_have_text("ready")
    expect(one.page.locator("article.user")).to_have_text("Tell me a story.")
    expect(one.page.locator("article.assistant .note")).to_have_text("stopped")
    one.page.unroute("**/v1/chat/completions")
    one.ask("What is 3+5?")
    expect(one.page.locator("article")).to_have_count(4)


def test_regenerate_and_new(tab):
    one = tab().open()
    one.set(seed=7, max_tokens=60)
    first = one.ask("Tell me a story.").inner_text()
    one.set(seed=8)
    one.page.locator("#again").click()
    expect(one.page.locator("article.assistant")).not_to_have_text(first)
    expect(one.page.locator("#chat-state")).to_have_text("Answer complete")
    expect(one.page.locator("article")).to_have_count(2)
    one.page.locator("#new").click()
    expect(one.page.locator("article")).to_have_count(0)
    one.page.reload()
    expect(one.page.locator("article")).to_have_count(0)


def test_refused(tab):
    """The server's sentence is shown where the answer would be."""
    one = tab().open()
    one.set(top_p=0)
    answer = one.ask("Hello", wait="Failed")
    expect(answer.get_by_role("alert")).to_contain_text("top_p")
    one.set(top_p="", tools="[{")
    answer = one.ask("Hello", wait="Failed")
    expect(answer.get_by_role("alert")).to_contain_text("not JSON")
    assert [error for error in one.errors if "400" not in error] == []
    one.errors.clear()


def test_tool_calls(tab, model_dir, shots):
    """A call is shown, its result is asked for and goes back to the model."""
    if not (model_dir / "README.md").exists():
        pytest.skip("needs the embedded model")
    question, [(name, arguments)] = CASES[0]
    one = tab().open()
    one.set(temperature=0, tools=json.dumps(CHAT_TOOLS))
    answer = one.ask(question)
    expect(answer.locator(".call p")).to_have_text(f"Calls {name}")
    assert json.loads(answer.locator(".call pre").inner_text()) == arguments
    one.page.get_by_label(f"Result of {name}").fill('{"weather": "sunny", "degrees": 21}')
    one.page.screenshot(path=shots / "tools.png")
    with one.page.expect_request("**/v1/chat/completions") as sent:
        one.page.get_by_role("button", name="Send results").click()
    messages = sent.value.post_data_json["messages"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == name
    assert messages[2]["role"] == "tool" and messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    expect(one.page.locator("#chat-state")).to_have_text("Answer complete")
    expect(one.page.locator("article.tool")).to_have_count(1)


# ---------------------------------------------------------------- live and server


def test_charts_under_load(tab, server, shots):
    """Load moves the lines: tokens per second, running, KV use, percentiles; gauge and bars of the floor; behind it they fall again."""
    one = tab().open("/#live")
    figures = one.page.locator("#charts figure")
    tokens, requests, kv, ttft, between = (figures.filter(has_text=title).first for title in (
        "Tokens per second", "Requests", "KV cache", "Time to first token", "Between tokens"))
    expect(requests.locator("dd.line0")).to_have_text("0")
    still = tokens.locator("path.line0").last.get_attribute("d")
    body = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, "n": 4, "stream": True}
    load = httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60)
    load.__enter__()
    expect(requests.locator("dd.line0")).to_have_text("4")
    expect(tokens.locator("dd.line0")).to_have_text(re.compile(r"^[1-9][0-9,]*$"))
    expect(kv.locator("dd.line0")).to_have_text(re.compile(r"^[0-9.]*[1-9]"))
    for chart in (ttft, between):
        expect(chart.locator("dd.line0")).to_have_text(re.compile(r"^[0-9.]+ (µs|ms|s)$"))
    expect(between.get_by_role("img")).to_have_attribute("aria-label", re.compile(r"^Between tokens: p50 .*s, p95 .*s, p99 .*s$"))
    assert tokens.locator("path.line0").last.get_attribute("d") != still
    expect(figures.filter(has_text="Share of the floor").locator(".big")).to_have_text(re.compile(r"^[0-9.]+ %$"))
    expect(figures.filter(has_text="by component")).to_contain_text("routed experts")
    one.page.screenshot(path=shots / "live.png")
    load.__exit__(None, None, None)
    expect(requests.locator("dd.line0")).to_have_text("0")


def test_floor(tab, server):
    """Gauge and bars have what /metrics says of the floor: shares of steps in between, the floor of each component."""
    one = tab()
    looks = []

    def metrics(route):
        n = len(looks)
        looks.append(n)
        lines = ["decode_share_of_floor 0.42", "achieved_bandwidth_bytes_per_second 1.68e10", "read_bandwidth_bytes_per_second 4e10", f"timed_steps_total {10 * n}"]
        for name, ms, share in (("routed experts", 3, 0.5), ("attention", 1, 0.25)):
            lines += [f'step_component_seconds_total{{component="{name}"}} {5 + 10 * n * ms / 1000}',
                      f'step_component_bytes_total{{component="{name}"}} {7 + 10 * n * ms / 1000 * share * 4e10}']
        ours = re.compile("^nibble:(decode_share|achieved_band|read_band|timed_steps|step_component)")
        real = [line for line in server.get("/metrics").text.splitlines() if not ours.match(line)]
        route.fulfill(body="\n".join(real + ["nibble:" + line for line in lines]) + "\n")

    one.page.route("**/metrics", metrics)
    one.open("/#live")
    gauge, parts = one.page.locator("figure.gauge"), one.page.locator("figure.whole")
    expect(gauge.locator(".big")).to_have_text("42 %")
    expect(gauge).to_contain_text("16.8 GB/s of the 40 GB/s")
    expect(gauge.get_by_role("img")).to_have_attribute("aria-label", "Share of the floor: 42 %")
    expect(gauge.locator("path.value")).to_have_attribute("stroke-dasharray", "42 200")
    expect(parts.locator("li .name")).to_have_text(["routed experts", "attention"])
    expect(parts.locator("li .amount")).to_have_text(["3 ms, 75 %", "1 ms, 25 %"])
    widths = parts.locator("li .full").evaluate_all("(nodes) => nodes.map((node) => parseFloat(node.style.width))")
    assert widths == [pytest.approx(50), pytest.approx(25)]


def test_percentiles(tab):
    """Of the differences of two histograms, linear within a bucket; null where nothing came, the last bound where there is none above."""
    one = tab().open()
    counts = {"before": [5, 5, 5, 5], "after": [5, 15, 25, 25], "above": [5, 5, 5, 9]}
    result = one.page.evaluate("""async (counts) => {
        const { parse, quantile } = await import("/ui/live.js");
        const buckets = (name) => counts[name].map((n, i) => ({ le: [0.1, 0.2, 0.4, Infinity][i], n }));
        const of = (name, q) => quantile(buckets("before"), buckets(name), q);
        const read = parse('# HELP x\\nnibble:a_bucket{m="\\\\"}{",le="+Inf"} 4\\nnibble:b 1e-3\\nprocess_x 1\\nnibble:a_bucket{le="1"} 2\\n');
        return [of("after", 0.25), of("after", 0.5), of("after", 0.75), of("after", 1), of("before", 0.5), of("above", 0.5),
                read.get("a_bucket").map(({ labels, value }) => [labels.le, value]), read.get("b")[0].value, read.size];
    }""", counts)
    assert result[:6] == [pytest.approx(0.15), pytest.approx(0.2), pytest.approx(0.3), pytest.approx(0.4), None, 0.4]
    assert result[6:] == [[["+Inf", 4], ["1", 2]], 0.001, 2]


def test_server_part(tab, server, shots):
    """The tables have what /server_info and /ui/log say."""
    one = tab().open("/#server")
    info = server.get("/server_info").json()
    part = one.page.locator("#server")
    expect(part.locator("#facts")).to_contain_text(info["device"])
    rows = {(check["kind"], check["path"]) for check in info["checks"]}
    expect(part.locator("#checks tbody tr")).to_have_count(len(rows))
    expect(part.locator("#checks tr").filter(has_text="runner: cuda_gemv")).to_contain_text("not here")
    expect(part.locator("#checks tr").filter(has_text="runner: reference")).to_contain_text("can be used")
    expect(part.locator("#memory")).to_contain_text("KV pages")
    expect(part.locator("#log")).to_contain_text("ready after")
    expect(part.locator("#log p")).to_have_count(len(server.get("/ui/log").json()["lines"]))
    part.get_by_text("Flags").click()
    expect(part.locator("#flags")).to_contain_text("--max-body-bytes")
    one.page.screenshot(path=shots / "server.png")


def test_server_goes_and_comes(tab, serve, model_dir):
    port = free_port()
    first = serve(port=port)
    one = tab(first.url).open()
    first.stop()
    expect(one.page.locator("#state")).to_have_text("unreachable")
    one.ask("Hello", wait="Failed")
    expect(one.page.get_by_role("alert")).to_have_text("the server cannot be reached")
    second = serve("--served-model-name", "another", port=port)
    expect(one.page.locator("#model")).to_have_text("another")
    one.ask("What is 3+5?")
    one.context.close()
    second.stop()
    assert [error for error in one.errors if "ERR_" not in error and "503" not in error] == []
    one.errors.clear()


def test_while_loading(tab, server):
    """The state says how far it is; when it is ready the page goes on by itself."""
    one = tab()
    one.page.route("**/metrics", lambda route: route.fulfill(body='nibble:server_state{state="loading"} 1\n'))
    one.page.route("**/health", lambda route: route.fulfill(status=503, json={"status": "loading", "state": "loading", "progress": 0.431}))
    one.open(ready=False)
    expect(one.page.locator("#state")).to_have_text("loading 43 %")
    expect(one.page.locator("#model")).to_be_empty()
    one.page.unroute("**/metrics")
    expect(one.page.locator("#state")).to_have_text("ready")
    expect(one.page.locator("#model")).not_to_be_empty()
    assert [error for error in one.errors if "503" not in error] == []
    one.errors.clear()


# ---------------------------------------------------------------- hostile texts


def harmless(one):
    """Nothing of a text became an element or ran."""
    inside = "#messages :is(img, script, svg, a, style, iframe, b, plaintext), #server :is(img, script, iframe, b)"
    expect(one.page.locator(inside)).to_have_count(0)
    assert one.page.evaluate("window.hit") is None
    assert one.dialogs == []
    origin = one.url + "/"
    assert [url for url in one.requests if not url.startswith((origin, "data:"))] == []


def test_hostile_answer_of_the_server(tab):
    """The real server sends the text as the answer: it continues a message and echoes it."""
    one = tab().open()
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": HOSTILE.strip()}]
    one.change_body(messages=messages, continue_final_message=True, add_generation_prompt=False, echo=True, max_tokens=1,
                    chat_template_kwargs={"enable_thinking": False})
    answer = one.ask(HOSTILE)
    expect(answer).to_contain_text("window.hit=1;alert(1)")
    expect(answer.locator("pre")).to_contain_text("<iframe srcdoc=")
    expect(one.page.locator("article.user")).to_contain_text("<script>window.hit=2</script>")
    harmless(one)
    one.page.reload()
    expect(one.page.locator("article.assistant")).to_contain_text("window.hit=1;alert(1)")
    harmless(one)


def event(**delta):
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) + "\n\n"


def test_hostile_stream(tab):
    """Thinking, content, names and arguments of calls, ids, the error: each is hostile."""
    one = tab().open()
    call = {"index": 0, "id": HOSTILE, "function": {"name": HOSTILE, "arguments": HOSTILE}}
    stream = event(reasoning_content=HOSTILE) + event(content=HOSTILE) + event(tool_calls=[call])
    end = "data: " + json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": HOSTILE}]}) + "\n\ndata: [DONE]\n\n"
    bodies = iter([stream + end, stream + "data: " + json.dumps({"error": {"message": HOSTILE}}) + "\n\n"])
    one.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=next(bodies)))
    answer = one.ask("x")
    expect(answer.locator(".call code")).to_contain_text("<script>window.hit=2</script>")
    answer.locator("summary").click()
    expect(answer.locator("details p")).to_contain_text("<img src=x")
    harmless(one)
    answer = one.ask("x", wait="Failed")
    expect(answer.get_by_role("alert")).to_contain_text("<img src=x")
    harmless(one)


def test_hostile_facts(tab, server, serve):
    """What the server says of itself: a real name, and all that a false server could put into facts, metrics and log."""
    name = """<img src=x onerror="window.hit=1">"""
    real = serve("--served-model-name", name)
    one = tab(real.url).open("/#server")
    expect(one.page.locator("#model")).to_have_text(name)
    expect(one.page.locator("#log")).to_contain_text(name)
    harmless(one)
    one.context.close()
    real.stop()
    info = json.loads(server.get("/server_info").text, parse_constant=None)
    info = {key: HOSTILE if isinstance(value, str) else value for key, value in info.items()}
    info["checks"] = [{**check, "path": HOSTILE, "where": HOSTILE, "why": HOSTILE} for check in info["checks"]]
    info["flags"] = {HOSTILE: HOSTILE}
    other = tab()
    other.page.route("**/server_info", lambda route: route.fulfill(json=info))
    other.page.route("**/ui/log", lambda route: route.fulfill(json={"lines": [{"n": 0, "time": 0, "level": "warning", "text": HOSTILE}]}))
    other.page.route("**/metrics", lambda route: route.fulfill(body=server.get("/metrics").text +
                     'nibble:server_state{state="<img src=x onerror=hit=1>"} 1\nnibble:step_component_seconds_total{component="<b>x"} 1\n'))
    other.open("/#server", ready=False)
    expect(other.page.locator("#log")).to_contain_text("<img src=x")
    expect(other.page.locator("#checks")).to_contain_text("<img src=x")
    harmless(other)


def test_policy_holds(tab):
    """A script of the page that tried would be stopped by the browser."""
    one = tab().open()
    refused = one.page.evaluate("""() => {
        const refused = [];
        for (const attempt of [() => document.body.innerHTML = "<b>x</b>", () => document.write("x"),
                               () => document.createElement("script").text = "1", () => setTimeout("1")]) {
            try { attempt(); } catch (error) { refused.push(error.name); }
        }
        return refused;
    }""")
    assert refused == ["TypeError"] * 4
    one.page.evaluate("""() => { const image = new Image(); image.src = "http://127.0.0.1:9/x.png"; document.body.append(image);
                                 const style = document.createElement("style"); style.textContent = "body{opacity:0}"; document.head.append(style); }""")
    assert one.page.evaluate("getComputedStyle(document.body).opacity") == "1"
    assert all("Content Security Policy" in error or "TrustedScript" in error or "TrustedHTML" in error for error in one.errors), one.errors
    one.errors.clear()


# ---------------------------------------------------------------- key


def test_key(tab, serve):
    server = serve("--api-key", "right", key="right")
    one = tab(server.url).open(ready=False)
    dialog = one.page.locator("dialog#key")
    expect(dialog).to_be_visible()
    one.page.get_by_label("Key", exact=True).fill("fal\u0161")
    one.page.keyboard.press("Enter")
    expect(dialog).to_contain_text("printable ASCII")
    one.page.get_by_label("Key", exact=True).fill("wrong")
    one.page.keyboard.press("Enter")
    expect(dialog).to_contain_text("does not know this key")
    one.page.get_by_label("Key", exact=True).fill("right")
    one.page.keyboard.press("Enter")
    expect(one.page.locator("#model")).not_to_be_empty()
    expect(dialog).to_be_hidden()
    one.ask("What is 3+5?")
    one.page.goto(server.url + "/#server")
    expect(one.page.locator("#log")).to_contain_text("ready after")
    one.page.reload()
    expect(one.page.locator("#model")).not_to_be_empty()
    assert one.page.evaluate("sessionStorage.getItem('nibble-key')") == "right"
    assert one.page.evaluate("localStorage.length + document.cookie.length") == 0
    assert not any("right" in url for url in one.requests)
    one.context.close()
    server.stop()
    assert [error for error in one.errors if "401" not in error] == []
    one.errors.clear()
