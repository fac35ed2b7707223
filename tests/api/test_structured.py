"""Structured output through the official clients: whatever is sampled, also hot, parses and validates."""

import concurrent.futures
import json
import re
import shutil
import time
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
from api_server import stream
from test_disconnect import begin
from test_guards import wait_log

THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}
HOT = {"temperature": 1.5, "top_p": 1.0}


def obj(properties, required=None, **more):
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required,
            "additionalProperties": False, **more}


# Bounded, so that a hot model comes to an end.
TEXT = {"type": "string", "maxLength": 6}
SCHEMAS = {
    "answer": obj({"answer": {"type": "integer", "minimum": -999, "maximum": 999}}),
    "person": obj({"name": TEXT, "tags": {"type": "array", "items": {"enum": ["a", "b", "ccc"]}, "minItems": 1, "maxItems": 3},
                   "kind": {"enum": ["cat", "dog", None]}, "ok": {"type": "boolean"}}),
    "union": {"anyOf": [obj({"type": {"const": "x"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}}),
                        obj({"type": {"const": "y"}, "s": {"type": "string", "pattern": "^[A-Z]{2}-\\d{2}$"}})]},
    "ref": {"$defs": {"p": obj({"x": {"type": "integer", "minimum": 0, "maximum": 99}})},
            **obj({"a": {"$ref": "#/$defs/p"}, "b": {"type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2}})},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "any_of_types": {"type": ["boolean", "null"]},
}
FORMATS = {name: {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}
           for name, schema in SCHEMAS.items()}


def ask(client, model, text="Give me something.", extra=None, thinking=False, **kwargs):
    extra = {**({} if thinking else THINKING_OFF), **(extra or {})}
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}],
                                          **{"max_tokens": 400, **HOT, **kwargs}, extra_body=extra)


def check(choice, schema):
    assert choice.finish_reason == "stop", choice
    jsonschema.Draft202012Validator(schema).validate(json.loads(choice.message.content))


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_hold_when_hot(client, model, name):
    """Many answers at once, all valid."""
    reply = ask(client, model, response_format=FORMATS[name], n=4, seed=5)
    for choice in reply.choices:
        check(choice, SCHEMAS[name])
    assert reply.choices[0].message.tool_calls is None


def test_json_object(client, model):
    """Cut answers are beginnings of JSON; whole ones are objects."""
    reply = ask(client, model, response_format={"type": "json_object"}, n=4, max_tokens=100, seed=1)
    for choice in reply.choices:
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
    reply = ask(client, model, response_format={"type": "json_object"}, temperature=0, extra={"logit_bias": {}})
    assert reply.choices[0].message.content.startswith("{")


class Step(pydantic.BaseModel):
    kind: Literal["add", "sub"]
    value: int = pydantic.Field(ge=0, le=99)


class Plan(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(min_length=1, max_length=2)
    final: bool


@pytest.mark.parametrize("thinking", [False, True])
def test_parse(client, model, thinking):
    """The client's own way from a class to an instance; both spellings."""
    extra = None if thinking else THINKING_OFF
    for completions in (client.chat.completions, client.beta.chat.completions):
        reply = completions.parse(model=model, messages=[{"role": "user", "content": "What is 3+5?"}], response_format=Plan,
                                  max_tokens=1500, temperature=1.0, seed=3, extra_body=extra)
        choice = reply.choices[0]
        assert isinstance(choice.message.parsed, Plan)
        assert bool(choice.message.model_extra["reasoning_content"]) == thinking


def test_stream_parse(client, model):
    with client.chat.completions.stream(model=model, messages=[{"role": "user", "content": "Plan."}], response_format=Plan,
                                        max_tokens=400, extra_body=THINKING_OFF, **HOT) as events:
        pieces = [e.delta for e in events if e.type == "content.delta"]
        final = events.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Plan)
    assert "".join(pieces) == final.choices[0].message.content and len(pieces) > 1


def test_stream_is_the_same_text(client, model):
    kwargs = {"response_format": FORMATS["person"], "seed": 11}
    whole = ask(client, model, **kwargs).choices[0]
    chunks = list(ask(client, model, stream=True, **kwargs))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"


@pytest.mark.parametrize("extra, full", [
    ({"regex": "[a-c]{2,5}-\\d{3}"}, "[a-c]{2,5}-[0-9]{3}"),
    ({"guided_regex": "(yes|no)( maybe){0,2}"}, "(yes|no)( maybe){0,2}"),
    ({"structured_outputs": {"regex": "x{3,9}y"}}, "x{3,9}y"),
    ({"guided_choice": ["positive", "negative", "neu|tral"]}, "positive|negative|neu\\|tral"),
    ({"structured_outputs": {"choice": ["a", "ab", "abc"]}}, "a|ab|abc"),
    ({"ebnf": 'root ::= item ("," item){1,3}\nitem ::= "<" [a-z]{1,3} ">" | [0-9]{1,2}'}, "(<[a-z]{1,3}>|[0-9]{1,2})(,(<[a-z]{1,3}>|[0-9]{1,2})){1,3}"),
    ({"guided_grammar": 'start: "SELECT " NAME\nNAME: /[a-z]{1,6}/'}, "SELECT [a-z]{1,6}"),
    ({"structured_outputs": {"grammar": 'root ::= "q" [0-9]{4}'}}, "q[0-9]{4}"),
])
def test_expressions_choices_grammars(client, model, extra, full):
    for choice in ask(client, model, extra=extra, n=6, seed=2).choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(full, choice.message.content), choice.message.content


@pytest.mark.parametrize("extra", [
    {"structured_outputs": {"json": SCHEMAS["answer"], "disable_any_whitespace": True}},
    {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
    {"structured_outputs": {"disable_any_whitespace": True}, "response_format": FORMATS["answer"]},
])
def test_no_white_space(client, model, extra):
    """However hot, also of an answer that is cut: none outside of strings."""
    for seed in range(4):
        choice = ask(client, model, extra=extra, temperature=1.5, seed=seed, max_tokens=200).choices[0]
        text = choice.message.content
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)
        outside = re.sub(r'"(?:[^"\\]|\\.)*("|\\?$)', "", text, flags=re.S)
        assert text.startswith("{") and not re.search(r"\s", outside), text
    same = ask(client, model, extra={"structured_outputs": {"regex": "a b", "disable_any_whitespace": True}}, max_tokens=8)
    assert same.choices[0].message.content == "a b"


def space(text):
    """White space outside of strings, piece by piece."""
    return re.findall(r"\s+", re.sub(r'"(?:[^"\\]|\\.)*("|\\?$)', '""', text, flags=re.S))


@pytest.mark.parametrize("pattern, full", [("[ \\n]?", "[ \n]"), ("\\s{0,2}", "\\s{1,2}"), (" *", " {1,32}"), ("", "x"), ("[\\t\n]*", "[\t\n]{1,32}")])
@pytest.mark.parametrize("older", [False, True])
def test_white_space_patterns(client, model, pattern, full, older):
    """However hot, also of an answer that is cut; some have white space where it is possible."""
    asked = {"structured_outputs": {"json_object": True, **({} if older else {"whitespace_pattern": pattern})}}
    if older:
        asked["guided_whitespace_pattern"] = pattern
    bias = {str(i): 30 for i in (10, 13, 32, 198, 201, 220)}
    found = []
    for seed in range(2):
        text = ask(client, model, extra=asked, temperature=2.0, seed=seed, max_tokens=40, logit_bias=bias).choices[0].message.content
        assert text.startswith("{"), text
        found += space(text)
    assert all(re.fullmatch(full, piece) for piece in found), found


def test_no_additional_properties(client, model):
    """Only objects that name properties and say nothing else are closed."""
    inner = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    closed = {"type": "object", "properties": {"properties": inner}, "required": ["properties"]}
    opened = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": {"type": "boolean"}}
    for schema in (closed, json.dumps(closed)):
        extra = {"structured_outputs": {"json": schema, "disable_additional_properties": True}}
        for choice in ask(client, model, seed=1, n=4, extra=extra).choices:
            check(choice, closed)
            assert set(json.loads(choice.message.content)["properties"]) == {"b"}
    texts = [choice.message.content for choice in ask(client, model, seed=1, n=8, max_tokens=30, extra={
        "structured_outputs": {"json": opened, "disable_additional_properties": True}}).choices]
    assert any(re.match(r'\{\s*"a"\s*:\s*(true|false)\s*,', text) for text in texts), texts


@pytest.mark.parametrize("extra", [
    {"json_schema": json.dumps(SCHEMAS["answer"])}, {"json_schema": SCHEMAS["answer"]}, {"guided_json": SCHEMAS["answer"]},
    {"guided_json": json.dumps(SCHEMAS["answer"])}, {"structured_outputs": {"json": SCHEMAS["answer"]}},
])
def test_schema_spellings(client, model, extra):
    check(ask(client, model, extra=extra, seed=4).choices[0], SCHEMAS["answer"])


@pytest.mark.parametrize("extra", [{"guided_json_object": True}, {"structured_outputs": {"json_object": True}}])
def test_object_spellings(client, model, extra):
    assert ask(client, model, extra=extra, seed=4, max_tokens=5).choices[0].message.content.startswith("{")


def test_nothing_asked(client, model):
    """What asks for nothing changes nothing."""
    plain = ask(client, model, temperature=0, max_tokens=12).choices[0].message.content
    for extra in ({"structured_outputs": {}}, {"guided_json": None, "regex": None}, {"structured_outputs": {"json_object": False}}):
        assert ask(client, model, temperature=0, max_tokens=12, extra=extra).choices[0].message.content == plain
    assert ask(client, model, temperature=0, max_tokens=12, response_format={"type": "text"}).choices[0].message.content == plain


def test_completions(server, client, model):
    """/v1/completions, several prompts, several answers."""
    reply = client.completions.create(model=model, prompt=["One: ", "Two: "], n=2, max_tokens=200, seed=1, **HOT,
                                      extra_body={"response_format": FORMATS["union"]})
    assert len(reply.choices) == 4
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), SCHEMAS["union"])
    events = stream(server, "/v1/completions", {"model": model, "prompt": "x", "max_tokens": 60, "regex": "[ab]{3}"})
    assert events[-1] == "[DONE]"
    assert re.fullmatch("[ab]{3}", "".join(e["choices"][0]["text"] for e in events[:-1]))


# ---------------------------------------------------------------- structural tags


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def fits(schema):
    return {"type": "json_schema", "json_schema": schema}


STRUCTURES = {"type": "structural_tag", "triggers": ["<f"],
              "structures": [{"begin": "<f=answer>", "schema": SCHEMAS["answer"], "end": "</f>"},
                             {"begin": "<f=list>", "schema": SCHEMAS["list"], "end": "</f>"}]}
TAGS = [tag("<f=answer>", fits(SCHEMAS["answer"]), "</f>"), tag("<f=word>", {"type": "regex", "pattern": "[a-z/]{1,4}"}, "</f>")]
TAGGED = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, "at_least_one": True}}
SEPARATED = {"type": "structural_tag", "format": {"type": "tags_with_separator", "separator": "; ", "tags": TAGS, "at_least_one": True}}
ONE = {"type": "structural_tag", "format": {**TAGGED["format"], "stop_after_first": True}}


def tags_of(text):
    """Every tag in free text holds what it should; their number."""
    pieces = re.findall(r"<f=(\w+)>(.*?)</f>", text, flags=re.S)
    for name, content in pieces:
        if name == "word":
            assert re.fullmatch("[a-z/]{1,4}", content), text
        else:
            jsonschema.validate(json.loads(content), SCHEMAS[name])
    return len(pieces)


@pytest.mark.parametrize("extra", [
    {"response_format": ONE}, {"structural_tag": ONE}, {"structural_tag": json.dumps(ONE)}, {"structured_outputs": {"structural_tag": ONE}},
    {"structured_outputs": {"structural_tag": json.dumps({"format": ONE["format"]})}},
])
def test_structural_tag_spellings(client, model, extra):
    for choice in ask(client, model, extra=extra, n=4, seed=1).choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(r"<f=(\w+)>(.*?)</f>", choice.message.content, flags=re.S) and tags_of(choice.message.content) == 1


def test_structural_tags_in_free_text(client, model):
    """Where the model writes an e it is in a tag, and what is between the tags is its own."""
    form = {"type": "structural_tag", "triggers": ["e"],
            "structures": [{**s, "begin": "e" + s["begin"]} for s in STRUCTURES["structures"]]}
    found, free = 0, ""
    for choice in ask(client, model, response_format=form, max_tokens=150, seed=1, n=12).choices:
        text = choice.message.content
        whole = text[:text.rfind("</f>") + 4] if "</f>" in text else ""
        found += tags_of(whole)
        rest = re.sub("e<f=.*?</f>", "", whole, flags=re.S)
        assert "e" not in rest
        free += rest
    assert found > 1 and free


def test_structural_tag_streams(client, model):
    kwargs = {"extra": {"structural_tag": TAGGED}, "seed": 3, "max_tokens": 80}
    whole = ask(client, model, **kwargs).choices[0]
    text = "".join(c.choices[0].delta.content or "" for c in ask(client, model, stream=True, **kwargs))
    assert text == whole.message.content and text.startswith("<f=") and tags_of(text)


def test_structural_tag_behind_thinking(client, model):
    choice = ask(client, model, "What is 3+5?", thinking=True, extra={"structural_tag": SEPARATED}, max_tokens=1500, temperature=0.8, seed=1).choices[0]
    assert choice.message.model_extra["reasoning_content"] and choice.finish_reason == "stop"
    assert re.fullmatch("(<f=.*?</f>)(; <f=.*?</f>)*", choice.message.content, flags=re.S) and tags_of(choice.message.content)


def test_structural_tag_of_added_tokens(server, client, model):
    """The model's own token for a call: behind it the schema; with tools the calls are read from the tags."""
    call = tag('<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>', fits({"type": "integer", "minimum": 0, "maximum": 9}), "</arg_value>\n</tool_call>")
    form = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [call], "at_least_one": True,
                                                 "stop_after_first": True}}
    called = ask(client, model, "Add 3.", extra={"structural_tag": form}, seed=1, tools=TOOLS, logprobs=True).choices[0]
    assert called.logprobs.content[0].token == "<tool_call>"
    assert called.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(called.message.tool_calls[0].function.arguments), TOOLS[0]["function"]["parameters"])
    reply = server.post("/generate", {"text": "Add", "sampling_params": {"structural_tag": json.dumps(form), "max_new_tokens": 60}})
    assert reply.status_code == 200 and reply.json()["text"].startswith("<tool_call>add\n<arg_key>a</arg_key>")


# ---------------------------------------------------------------- thinking, ends, limits


def test_thinking_is_free(client, model):
    """C48: the schema binds the content alone."""
    for seed in range(4):
        message = ask(client, model, "What is 3+5?", thinking=True, response_format=FORMATS["answer"], max_tokens=2000,
                      temperature=0.8, seed=seed).choices[0].message
        jsonschema.validate(json.loads(message.content), SCHEMAS["answer"])
        assert message.model_extra["reasoning_content"]
        assert not message.model_extra["reasoning_content"].startswith("{")


def test_thinking_streamed(client, model):
    content = reasoning = ""
    for chunk in ask(client, model, "What is 3+5?", thinking=True, extra={"guided_choice": ["8", "9"]}, temperature=0,
                     max_tokens=600, stream=True):
        content += chunk.choices[0].delta.content or ""
        reasoning += (chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or ""
    assert content in ("8", "9") and reasoning


def test_thinking_off_begins_at_once(client, model):
    message = ask(client, model, extra={"regex": "abc"}).choices[0].message
    assert message.content == "abc" and message.model_extra["reasoning_content"] is None


def test_cut_by_the_limit(client, model):
    choice = ask(client, model, response_format=FORMATS["person"], max_tokens=4).choices[0]
    assert choice.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.content)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=model, messages=[{"role": "user", "content": "x"}], response_format=Plan, max_tokens=4,
                                      extra_body=THINKING_OFF)


def test_only_the_end_behind_the_end(client, model):
    """Neither min_tokens nor ignore_eos brings text behind a complete answer, and logit_bias breaks no schema."""
    choice = ask(client, model, extra={"regex": "abc", "min_tokens": 30}, max_tokens=60).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("abc", "stop")
    choice = ask(client, model, extra={"regex": "abc", "ignore_eos": True}, max_tokens=20).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("abc", "length")
    bias = {str(i): 100 for i in range(40, 60)}
    check(ask(client, model, response_format=FORMATS["answer"], logit_bias=bias).choices[0], SCHEMAS["answer"])


def test_logprobs(client, model):
    """Log-probabilities are the model's own, tokens the constrained ones."""
    reply = ask(client, model, extra={"regex": "[ab]{4}"}, logprobs=True, top_logprobs=3)
    entries = reply.choices[0].logprobs.content
    assert "".join(e.token for e in entries).startswith(reply.choices[0].message.content)
    assert len(entries) == reply.usage.completion_tokens
    assert all(e.logprob <= 0 for e in entries)


# ---------------------------------------------------------------- with tools


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": obj({"a": {"type": "integer", "maximum": 9, "minimum": 0}})}}]


def test_tools_and_format(client, model):
    """A call or the format: each answer is one of both."""
    for choice in ask(client, model, "Add 3.", tools=TOOLS, response_format=FORMATS["answer"], n=8, seed=1, temperature=1.0).choices:
        if choice.message.tool_calls:
            assert choice.finish_reason in ("tool_calls", "length")
        elif choice.finish_reason == "stop" and choice.message.content.startswith("{"):
            check(choice, SCHEMAS["answer"])
    for choice in ask(client, model, "Add 3.", tools=TOOLS, tool_choice="none", response_format=FORMATS["answer"], n=4).choices:
        check(choice, SCHEMAS["answer"])


def test_forced_calls_and_format(client, model):
    """Calls that have to come have no content for the format; an expression contradicts them."""
    choice = ask(client, model, "Add 3.", tools=TOOLS, tool_choice="required", response_format=FORMATS["answer"],
                 parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), TOOLS[0]["function"]["parameters"])
    with pytest.raises(openai.BadRequestError) as e:
        ask(client, model, tools=TOOLS, tool_choice="required", extra={"regex": "a"})
    assert e.value.param == "regex" and "tool_choice" in e.value.message


# ---------------------------------------------------------------- speculative decoding


@pytest.fixture(scope="module")
def drafting(serve, trained):
    server = serve("--speculative-algorithm", "mtp", "--speculative-num-steps", "3")
    yield server.client()
    assert server.stop() == 0, server.log


@pytest.mark.parametrize("name", ["answer", "person"])
@pytest.mark.parametrize("thinking", [False, True])
def test_drafts_change_nothing(client, drafting, model, name, thinking):
    """Token for token the same with and without drafts, cold and hot."""
    for seed, temperature in enumerate([0, 1.5]):
        kwargs = {"response_format": FORMATS[name], "seed": seed, "temperature": temperature, "thinking": thinking,
                  "max_tokens": 70, "logprobs": True}
        plain, drafted = ask(client, model, "What is 3+5?", **kwargs), ask(drafting, model, "What is 3+5?", **kwargs)
        assert drafted.choices[0].message == plain.choices[0].message
        assert [t.token for t in drafted.choices[0].logprobs.content] == [t.token for t in plain.choices[0].logprobs.content]
        assert drafted.choices[0].finish_reason == plain.choices[0].finish_reason
        assert drafted.usage.completion_tokens == plain.usage.completion_tokens


@pytest.mark.parametrize("extra", [{"regex": "([a-f]{3} ?){4}"}, {"ebnf": 'root ::= "(" root ")" | [a-z]{2,4}'}, {"regex": "a{40}b"},
                                   {"structural_tag": TAGGED}, {"structural_tag": SEPARATED}])
def test_drafts_of_other_grammars(client, drafting, model, extra):
    for seed in range(3):
        kwargs = {"extra": extra, "seed": seed, "max_tokens": 80, "n": 2}
        assert [c.message.content for c in ask(drafting, model, **kwargs).choices] == \
               [c.message.content for c in ask(client, model, **kwargs).choices]


# ---------------------------------------------------------------- many at once


def test_many_different_schemas_at_once(client, model):
    def one(i):
        schema = obj({f"key{i}": {"type": "integer", "minimum": i, "maximum": i + 5}})
        reply = ask(client, model, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, seed=i)
        check(reply.choices[0], schema)

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(48)))


def hostile(i):
    """Sources that take the compiler to its bounds; each is different."""
    defs = {"d0": {"type": "string"}}
    for k in range(1, 40):
        ref = {"$ref": f"#/$defs/d{k - 1}"}
        defs[f"d{k}"] = {"allOf": [{"anyOf": [ref, {"type": "integer"}]}, {"anyOf": [ref, {"type": "null"}]}]}
    deep = {}
    for _ in range(90):
        deep = {"type": "array", "items": deep}
    return [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$defs": defs, "$ref": "#/$defs/d39"}}}},
        {"regex": "(a|b)*a(a|b){%d}" % (14 + i)}, {"regex": "((a{1000}){1000}){%d}" % (1000 + i)},
        {"guided_json": {"enum": [f"{i}-{k * 7919}" for k in range(8000)]}}, {"guided_json": deep},
        {"guided_json": {"type": "array", "minItems": 1000000000 + i}}, {"guided_json": {"type": "string", "minLength": 10**9}},
        {"ebnf": f'root ::= "x"{{1,{10**9 + i}}}'},
        {"ebnf": "root ::= a30\na0 ::= \"x\" root?\n" + "".join(f"a{k + 1} ::= a{k} a{k}\n" for k in range(30))},
        {"guided_json": {"anyOf": [obj({f"k{k}": TEXT, "z": TEXT}) for k in range(1500)]}},
    ]


def test_hostile_sources_do_not_stop_others(client, model, sanitized):
    """While they are compiled a plain stream goes on; each gets an answer or a 400 in bounded time; the server lives."""
    gaps, done = [], False

    def streaming():
        last = time.monotonic()
        while not done:
            for _ in ask(client, model, stream=True, temperature=0.7, max_tokens=40, extra={"ignore_eos": True}):
                now = time.monotonic()
                gaps.append(now - last)
                last = now

    def one(extra):
        begin = time.monotonic()
        try:
            ask(client, model, extra=extra, max_tokens=3)
        except openai.BadRequestError as e:
            assert e.param, e.message
        except openai.InternalServerError as e:
            assert e.status_code == 503 and "try again" in e.message
        return time.monotonic() - begin

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        plain = pool.submit(streaming)
        times = list(pool.map(one, [extra for i in range(3) for extra in hostile(i)]))
        done = True
        plain.result()
    assert max(times) < (200 if sanitized else 40), times
    assert len(gaps) > 5 and max(gaps) < (60 if sanitized else 3), max(gaps)
    check(ask(client, model, response_format=FORMATS["answer"]).choices[0], SCHEMAS["answer"])


def test_kept_grammars_cost_nothing(client, model):
    """A source that was compiled, or refused, is answered from what is kept."""
    slow = {"enum": [f"word number {k * 7919}" for k in range(6000)]}

    def timed():
        begin = time.monotonic()
        try:
            ask(client, model, extra={"guided_json": slow}, max_tokens=1)
        except openai.BadRequestError:
            pass
        return time.monotonic() - begin

    first, second = timed(), min(timed() for _ in range(3))
    assert second < max(first, 0.2), (first, second)


def test_client_leaves_while_its_grammar_is_compiled(server, client, model):
    for i in range(6):
        asked = {"messages": [{"role": "user", "content": "Give me something."}], "max_tokens": 3, "regex": "(a|b)*a(a|b){%d}" % (30 + i)}
        begin(server, asked, "/v1/chat/completions").close()
    assert server.wait_idle(30) < 30
    check(ask(client, model, response_format=FORMATS["answer"]).choices[0], SCHEMAS["answer"])


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("extra, param, words", [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {}}, "response_format.type", "missing"),
    ({"response_format": {"type": 4}}, "response_format.type", "string"),
    ({"response_format": "json"}, "response_format", "object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}}, "response_format.json_schema.name", "string"),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": "yes", "schema": {}}}}, "response_format.json_schema.strict",
     "boolean"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}, "response_format.json_schema.schema", "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "response_format.json_schema.schema", "foo"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}},
     "response_format.json_schema.schema", "uniqueItems"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "\"format\" is missing"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "exclude_token"}}}, "response_format", "exclude_token"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}}, "response_format", "not"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "structural_tag"),
    ({"regex": "(a"}, "regex", "unclosed"), ({"regex": 4}, "regex", "string"), ({"regex": ""}, "regex", "empty"),
    ({"regex": "(?=a)b"}, "regex", "look"),
    ({"guided_json": 4}, "guided_json", "schema"), ({"guided_json": "{"}, "guided_json", "schema"),
    ({"guided_json": {"not": {}}}, "guided_json", "not"), ({"guided_choice": []}, "guided_choice", "empty"),
    ({"guided_choice": "a"}, "guided_choice", "array"), ({"guided_choice": ["a", 3]}, "guided_choice", "entry 1"),
    ({"ebnf": "root ::="}, "ebnf", ""), ({"guided_grammar": "nonsense"}, "guided_grammar", "line 1"),
    ({"structural_tag": {}}, "structural_tag", "missing"), ({"structural_tag": "{"}, "structural_tag", "the structural tag"),
    ({"structural_tag": 5}, "structural_tag", "string"),
    ({"structured_outputs": {"structural_tag": {"structures": [], "triggers": ["a"]}}}, "structured_outputs.structural_tag", "structures"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "may be absent"),
    ({"guided_whitespace_pattern": "[ a]*"}, "guided_whitespace_pattern", "may be absent"),
    ({"guided_whitespace_pattern": 5}, "guided_whitespace_pattern", "string"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"whitespace_pattern": "( |\n)*"}}, "structured_outputs.whitespace_pattern", "may be absent"),
    ({"structured_outputs": {"whitespace_pattern": " ?"}, "guided_whitespace_pattern": ""}, "structured_outputs.whitespace_pattern", "combined"),
    ({"structured_outputs": {"whitespace_pattern": " ?", "disable_any_whitespace": True}}, "structured_outputs.whitespace_pattern", "combined"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": 1}}, "structured_outputs.disable_additional_properties", "boolean"),
    ({"structured_outputs": "json"}, "structured_outputs", "object"),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": 1}}, "structured_outputs.disable_any_whitespace", "boolean"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "regex"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "response_format"),
    ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "structured_outputs.choice", "structured_outputs.json"),
])
@pytest.mark.parametrize("streaming", [False, True])
def test_refusals_name_the_field(server, model, extra, param, words, streaming):
    """Before the first event of a stream, too: the status is 400."""
    reply = server.post("/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4,
                                                 "stream": streaming, **extra})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and error["message"].startswith(param + ":"), error
    assert words in error["message"], error


# ---------------------------------------------------------------- the other surfaces


def test_responses(client, model):
    reply = client.responses.parse(model=model, input="What is 3+5?", text_format=Plan, reasoning={"effort": "none"},
                                   max_output_tokens=400, temperature=1.5)
    assert isinstance(reply.output_parsed, Plan)
    assert reply.text.format.type == "json_schema" and reply.status == "completed"
    with client.responses.stream(model=model, input="Plan.", text_format=Plan, reasoning={"effort": "none"}, max_output_tokens=400) as events:
        for _ in events:
            pass
        assert isinstance(events.get_final_response().output_parsed, Plan)
    reply = client.responses.create(model=model, input="x", text={"format": {"type": "json_object"}}, reasoning={"effort": "none"},
                                    max_output_tokens=5)
    assert reply.output_text.startswith("{")
    for format, param in (({"type": "json_schema", "name": "x"}, "text.format.schema"), ({"type": "xml"}, "text.format.type"),
                          ({"type": "json_schema", "name": "x", "schema": {"not": {}}}, "text.format.schema")):
        with pytest.raises(openai.BadRequestError) as e:
            client.responses.create(model=model, input="x", text={"format": format}, reasoning={"effort": "none"})
        assert e.value.param == param


def test_messages(server, model):
    import anthropic
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    kwargs = {"model": model, "max_tokens": 400, "messages": [{"role": "user", "content": "What is 3+5?"}],
              "thinking": {"type": "disabled"}, "extra_body": {"temperature": 1.0}}
    reply = client.messages.create(output_config={"format": {"type": "json_schema", "schema": SCHEMAS["person"]}}, **kwargs)
    jsonschema.validate(json.loads(reply.content[0].text), SCHEMAS["person"])
    with pytest.raises(anthropic.BadRequestError) as e:
        client.messages.create(output_config={"format": {"type": "json_schema"}}, **kwargs)
    assert "output_config.format.schema" in str(e.value)


# ---------------------------------------------------------------- without the library


def refused(server, words):
    reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3,
                                                 "response_format": {"type": "json_object"}})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "response_format"
    assert words in reply.json()["error"]["message"], reply.text
    assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}).status_code == 200


def test_not_installed(nibble_bin, model_dir, tmp_path):
    """Outside of the source tree nothing is found: a 400 says what to install; asked for by name, the server does not start."""
    from api_server import Server
    (tmp_path / "bin").mkdir()
    binary = shutil.copy(nibble_bin, tmp_path / "bin" / "nibble")
    server = Server(binary, model_dir)
    try:
        refused(server, "scripts/setup grammar")
    finally:
        assert server.stop() == 0
    with pytest.raises(AssertionError, match="(?s)the server ended.*--grammar-backend llguidance.*scripts/setup grammar"):
        Server(binary, model_dir, "--grammar-backend", "llguidance").stop()


def test_backend_flag(serve):
    server = serve("--grammar-backend", "none")
    refused(server, "--grammar-backend none")
    assert server.stop() == 0
    server = serve("--grammar-backend", "xgrammar")
    wait_log(server, "--grammar-backend xgrammar: llguidance")
    assert server.stop() == 0
    server = serve("--grammar-backend", "llguidance")
    assert server.stop() == 0
    with pytest.raises(AssertionError, match="unknown, expected auto, llguidance, none"):
        serve("--grammar-backend", "best")
