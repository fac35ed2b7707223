"""Three ways to answer evaluation items: the training model, transformers, an OpenAI server.

Each has answer(items) → list of (reasoning, content, calls, n_tokens) for [(item, thinking)].
"""
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor

import evalset

MAX_NEW = 400


class TokenBackend:
    """Shared by the two that take token ids: render, encode, generate, parse."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.stops = [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]

    def answer(self, items):
        prompts = [self.tokenizer.encode(evalset.prompt_text(i, t)).ids for i, t in items]
        out = []
        for (item, thinking), ids in zip(items, self.generate(prompts)):
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            if item.skill == "story_raw":
                out.append((None, text, [], len(ids)))
            else:
                out.append((*evalset.parse(text, thinking, item.tools), len(ids)))
        return out


class TinyBackend(TokenBackend):
    """The training model (model.py), greedy, in batches of similar length."""

    def __init__(self, model, tokenizer, batch_tokens=80_000):
        super().__init__(tokenizer)
        self.model, self.batch_tokens = model, batch_tokens

    def generate(self, prompts):
        from model import generate
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        out, start = [None] * len(prompts), 0
        while start < len(order):
            end = start
            while end < len(order) and (end - start + 1) * len(prompts[order[end]]) <= self.batch_tokens:
                end += 1
            rows = order[start:max(end, start + 1)]
            for i, ids in zip(rows, generate(self.model, [prompts[i] for i in rows], MAX_NEW, self.stops)):
                out[i] = ids
            start += len(rows)
        return out


class HfBackend(TokenBackend):
    """transformers' own class in float32 on the dequantised checkpoint, one prompt at a time."""

    def __init__(self, folder, tokenizer, device="cpu"):
        super().__init__(tokenizer)
        self.model = load_transformers(folder).to(device)

    def generate(self, prompts):
        import torch
        out = []
        for ids in prompts:
            x = torch.tensor([ids], device=self.model.device)
            with torch.no_grad():
                y = self.model.generate(x, attention_mask=torch.ones_like(x), do_sample=False, top_p=None,
                                        temperature=None, max_new_tokens=MAX_NEW, eos_token_id=self.stops,
                                        pad_token_id=self.stops[0])
            new = y[0, len(ids):].tolist()
            out.append(new[:-1] if new and new[-1] in self.stops else new)
        return out


def load_transformers(folder):
    """AutoModelForCausalLM in float32 from a checkpoint folder, NVFP4 weights dequantised first."""
    from pathlib import Path

    import torch
    from transformers import AutoModelForCausalLM

    import checkpoint
    with tempfile.TemporaryDirectory() as tmp:
        checkpoint.save_sharded(checkpoint.load_dequantised(folder), tmp)
        config = json.loads((Path(folder) / "config.json").read_text())
        config.pop("quantization_config", None)
        config["dtype"] = "float32"
        (Path(tmp) / "config.json").write_text(json.dumps(config))
        return AutoModelForCausalLM.from_pretrained(tmp, dtype=torch.float32).eval()


class ServerBackend:
    """Any OpenAI-compatible server, through the official client."""

    def __init__(self, url, model=None, parallel=4):
        from openai import OpenAI
        self.client = OpenAI(base_url=url.rstrip("/") + ("" if url.rstrip("/").endswith("/v1") else "/v1"),
                             api_key="none", timeout=600)
        self.model = model or self.client.models.list().data[0].id
        self.parallel = parallel

    def answer(self, items):
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(self._one, items))

    def _one(self, pair):
        from corpus import stream
        item, thinking = pair
        if item.skill == "story_raw":
            r = self.client.completions.create(model=self.model, prompt=item.user, temperature=0,
                                               max_tokens=MAX_NEW)
            return None, r.choices[0].text, [], r.usage.completion_tokens
        messages = [_as_api(m) for m in stream.messages_of(item, thinking, answered=False)]
        r = self.client.chat.completions.create(
            model=self.model, messages=messages, temperature=0, max_tokens=MAX_NEW,
            **({"tools": item.tools} if item.tools else {}),
            extra_body={"chat_template_kwargs": {"enable_thinking": thinking}})
        m = r.choices[0].message
        calls = [{"name": c.function.name, "arguments": _loads(c.function.arguments)}
                 for c in m.tool_calls or []]
        content = m.content
        if item.tools and not calls and "<tool_call>" in (content or ""):
            # A server without a tool parser leaves the call in the text.
            _, content, calls = evalset.parse(content, False, item.tools)
        return getattr(m, "reasoning_content", None), content, calls, r.usage.completion_tokens


def _loads(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def _as_api(message):
    """Tool calls as the API wants them: an id, and arguments as a JSON string."""
    if message["role"] == "tool":
        return message | {"tool_call_id": "call_0"}
    if "tool_calls" not in message:
        return message
    calls = [{"id": f"call_{i}", "type": "function",
              "function": c["function"] | {"arguments": json.dumps(c["function"]["arguments"])}}
             for i, c in enumerate(message["tool_calls"])]
    return message | {"tool_calls": calls}
