"""The tables of docs/api.md: every field that they name is taken, checked, ignored or refused as they say."""

import re

import pytest
from test_errors import error_of

ASK = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
PATHS = {"/v1/completions": {"prompt": "x", "max_tokens": 1}, "/v1/chat/completions": {"messages": ASK, "max_tokens": 1}}
TEXT, CHAT = PATHS

# One value that is taken, by path where they differ. None: not a field of that path, so ignored there.
TAKEN = {
    "model": None, "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "allowed_token_ids": [5, 6],
    "bad_words": ["x"], "thinking_token_budget": -1, "seed": 3, "n": 2, "best_of": {TEXT: 2, CHAT: 1}, "use_beam_search": True,
    "stop": "x", "stop_token_ids": [5], "stop_regex": "x",
    "repetition_detection": {"max_pattern_size": 3, "min_count": 4}, "ignore_eos": True, "disable_oea": True, "skip_special_tokens": False,
    "logprobs": {TEXT: 2, CHAT: True}, "top_logprobs": {TEXT: 2, CHAT: 0}, "logprob_token_ids": [5], "return_token_ids": True,
    "return_prompt_token_ids": True, "return_tokens_as_token_ids": True, "return_meta_info": True, "return_prompt_text": True,
    "input_ids": {TEXT: 5, CHAT: [5, 6]}, "truncation_side": "right", "prompt_logprobs": 1, "echo": True,
    "truncate_prompt_tokens": 5, "stream": True, "stream_options": None, "stream_interval": 2, "priority": 1, "rid": "a",
    "response_format": {"type": "text"}, "messages": {TEXT: 5, CHAT: ASK}, "tools": {TEXT: 5, CHAT: TOOLS},
    "tool_choice": {TEXT: 5, CHAT: "none"}, "parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": False},
    "enable_thinking": False, "thinking": {"type": "disabled"}, "reasoning_effort": "low", "separate_reasoning": False, "stream_reasoning": {TEXT: 5, CHAT: False},
    "cache_salt": ["x"], "extra_key": "x",
    "add_generation_prompt": False, "continue_final_message": False,
}
# Need a library, a template or a flag; other files test them.
ELSEWHERE = {"json_schema", "regex", "ebnf", "structural_tag", "guided_*", "structured_outputs", "documents", "chat_template"}
WRONG = {"metadata": "x", "store": "x", "spaces_between_special_tokens": "x", "add_special_tokens": "x"}
RIGHT = {"metadata": {"a": "b"}, "store": True, "spaces_between_special_tokens": True, "add_special_tokens": True}
REFUSED = {"suffix": "x", "return_entropy": True, "logits_processors": ["x"], "functions": [{"name": "f"}],
           "return_hidden_states": True, "return_routed_experts": True}
NOTHING = {"suffix": "", "return_entropy": False, "prompt_embeds": [], "logits_processors": [], "return_hidden_states": False, "return_routed_experts": False}

# What SGLang and vLLM take.
PEERS = """model messages prompt max_tokens max_completion_tokens temperature top_p top_k min_p frequency_penalty presence_penalty
repetition_penalty n best_of echo suffix stop stop_token_ids stop_regex no_stop_trim include_stop_str_in_output ignore_eos min_tokens seed
logit_bias allowed_token_ids bad_words logprobs top_logprobs prompt_logprobs logprob_token_ids response_format structural_tag
structured_outputs regex ebnf json_schema tools tool_choice parallel_tool_calls stream stream_options include_usage continuous_usage_stats
chat_template_kwargs chat_template add_generation_prompt continue_final_message documents separate_reasoning stream_reasoning
reasoning_effort include_reasoning thinking_token_budget skip_special_tokens spaces_between_special_tokens cache_salt extra_key priority rid
routed_dp_rank session_id bootstrap_host bootstrap_port bootstrap_room request_id kv_transfer_params lora_path input_ids
custom_logit_processor custom_params return_hidden_states return_routed_experts return_cached_tokens_details return_prompt_token_ids
return_meta_info stream_interval return_token_ids return_tokens_as_token_ids return_prompt_text truncate_prompt_tokens truncation_side use_beam_search length_penalty
vllm_xargs repetition_detection user prompt_embeds return_entropy""".split()


def rows(repo):
    """[(fields, the rest of the row)] of the two tables."""
    text = (repo / "docs" / "api.md").read_text().split("## Fields of OpenAI's chat and completions")[1].split("\n## ")[0]
    cells = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([\w*]+)`", first), second.strip()) for first, second in cells]


@pytest.fixture(scope="module")
def table(repo):
    found = rows(repo)
    kinds = {"no effect, and have the right type": "typed", "ignored": "ignored", "refused unless they ask for nothing": "refused"}
    return {field: kinds.get(rest, "taken") for fields, rest in found for field in fields}


def post(server, path, **fields):
    return server.post(path, {**PATHS[path], **fields})


def test_every_field_of_the_peers_is_named(repo):
    named = set(re.findall(r"`(\w+)`", (repo / "docs" / "api.md").read_text()))
    assert set(PEERS) - named == set()


@pytest.mark.parametrize("path", PATHS)
def test_taken(server, table, path):
    for field in (f for f, kind in table.items() if kind == "taken" and f not in ELSEWHERE):
        assert field in TAKEN, f"no value for {field} in this test"
        value = TAKEN[field]
        value = value[path] if isinstance(value, dict) and path in value else value
        reply = post(server, path, **{field: value})
        assert reply.status_code == 200, (field, reply.text)


@pytest.mark.parametrize("path", PATHS)
def test_other_fields(server, table, path):
    seen = {"typed": 0, "ignored": 0, "refused": 0}
    for field, kind in table.items():
        if kind == "typed":
            assert post(server, path, **{field: RIGHT.get(field, "x")}).status_code == 200, field
            error_of(post(server, path, **{field: WRONG.get(field, 5)}), param=field)
        elif kind == "ignored":
            for value in ("x", 5, True, {"a": [1]}, [1]):
                assert post(server, path, **{field: value}).status_code == 200, field
        elif kind == "refused":
            if path == TEXT and field in ("functions", "function_call", "audio"):
                continue
            if path == CHAT and field == "suffix":
                continue
            error = error_of(post(server, path, **{field: REFUSED.get(field, "x")}), param=field)
            assert "not supported by this server" in error["message"]
            assert post(server, path, **{field: NOTHING.get(field)}).status_code == 200, field
        seen[kind] = seen.get(kind, 0) + 1
    assert all(seen.values()), seen
