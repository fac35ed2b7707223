"""stop_regex: where an answer ends, over token boundaries, streamed or whole, on every API."""

import re

import pytest
from api_server import stream
from test_native import PROMPT, completion, generate
from test_token_limits import ASK, chat, drafting, ids_of  # noqa: F401

SAMPLED = {"temperature": 1.1, "sampling_seed": 11, "max_new_tokens": 60, "ignore_eos": True}


def cut(pattern, text):
    """The text before the match that is complete first, and the text with it."""
    for end in range(1, len(text) + 1):
        match = re.search(pattern, text[:end])
        if match:
            return text[:match.start()], text[:end]
    return text, text


@pytest.fixture(scope="module")
def plain(server):
    return generate(server, text=PROMPT, sampling_params=SAMPLED)


def patterns_of(server, plain):
    """Expressions over the seams of tokens, and some that are never found."""
    ids = plain["output_ids"]
    parts = [server.post("/detokenize", {"tokens": [i]}).json()["text"] for i in ids]
    found = []
    for at in (9, 20, 33):
        seam = parts[at - 1][-2:] + parts[at][:2]
        if "\ufffd" not in seam:
            found.append(re.escape(seam).replace("\\ ", " "))
            found.append("[^\\n]" + re.escape(seam[1:]).replace("\\ ", " "))
    return [*found, "[aeiou]{2}", "(th|an)e?", "zqzq+", "\\w+ \\w+ \\w+ x{9}"]


def test_native(server, drafting, plain):  # noqa: F811
    text = plain["text"]
    patterns = patterns_of(server, plain)
    assert len(patterns) > 5
    for pattern in patterns:
        before, within = cut(pattern, text)
        for at in (server, drafting):
            answer = generate(at, text=PROMPT, sampling_params={**SAMPLED, "stop_regex": pattern})
            assert answer["text"] == before, pattern
            reason = answer["meta_info"]["finish_reason"]
            assert reason == ({"type": "stop", "matched": pattern} if before != text else {"type": "length", "length": 60})
            kept = generate(at, text=PROMPT, sampling_params={**SAMPLED, "stop_regex": [pattern], "no_stop_trim": True})
            assert kept["text"] == within, pattern


def test_streamed(server, plain):
    for pattern in patterns_of(server, plain):
        events = stream(server, "/generate", {"text": PROMPT, "sampling_params": {**SAMPLED, "stop_regex": pattern}, "incremental": True})
        assert "".join(e["text"] for e in events[:-1]) == cut(pattern, plain["text"])[0], pattern


def test_completions(server):
    text = completion(server, max_tokens=40)["choices"][0]["text"]
    pattern = re.escape(text[5:8]).replace("\\ ", " ")
    choice = completion(server, max_tokens=40, stop_regex=pattern)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"], choice["stop_reason"]) == (cut(pattern, text)[0], "stop", pattern, pattern)
    both = completion(server, max_tokens=40, stop_regex=["zqz", pattern], stop=[text[2:5]], include_stop_str_in_output=True)["choices"][0]
    assert both["matched_stop"] == text[2:5] and both["text"] == text[:text.index(text[2:5]) + 3]
    for nothing in ("", [], None):
        assert completion(server, max_tokens=40, stop_regex=nothing)["choices"][0]["text"] == text


def test_min_tokens(server):
    """Nothing is found before so many tokens."""
    choice = completion(server, max_tokens=10, min_tokens=6, stop_regex="[\\s\\S]", logprobs=0)["choices"][0]
    assert choice["finish_reason"] == "stop" and len(choice["logprobs"]["tokens"]) == 6


def test_chat(server, trained):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    said = chat(server, **off)["message"]["content"]
    answer = chat(server, **off, stop_regex="\\d")
    assert re.search("\\d", said) and answer["message"]["content"] == cut("\\d", said)[0] and answer["matched_stop"] == "\\d"
    reply = server.post("/v1/messages", {"messages": ASK, "max_tokens": 24, "temperature": 0, "thinking": {"type": "disabled"}, "stop_regex": "\\d"}).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "\\d")
