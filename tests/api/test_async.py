"""The asynchronous client."""

import asyncio

ASK = [{"role": "user", "content": "What is 3+5?"}]
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


async def test_models(aclient):
    assert (await aclient.models.list()).data


async def test_completion(aclient, model, client):
    reply = await aclient.completions.create(model=model, prompt="Once", max_tokens=8, **GREEDY)
    assert reply.choices[0].text == client.completions.create(model=model, prompt="Once", max_tokens=8, **GREEDY).choices[0].text


async def test_completion_stream(aclient, model):
    plain = await aclient.completions.create(model=model, prompt="Once", max_tokens=8, **GREEDY)
    text = ""
    async for chunk in await aclient.completions.create(model=model, prompt="Once", max_tokens=8, stream=True, **GREEDY):
        text += chunk.choices[0].text
    assert text == plain.choices[0].text


async def test_chat_stream(aclient, model):
    plain = await aclient.chat.completions.create(model=model, messages=ASK, max_tokens=20, **GREEDY)
    reasoning = content = ""
    async for chunk in await aclient.chat.completions.create(model=model, messages=ASK, max_tokens=20, stream=True, **GREEDY):
        delta = chunk.choices[0].delta
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        content += delta.content or ""
    message = plain.choices[0].message
    assert (reasoning, content) == (message.model_extra["reasoning_content"] or "", message.content)


async def test_many_at_once(aclient, model):
    """Different prompts together give what each gives alone."""
    prompts = [f"{i} and {i + 1} are" for i in range(12)]

    async def ask(prompt):
        return (await aclient.completions.create(model=model, prompt=prompt, max_tokens=16, **GREEDY)).choices[0].text

    alone = [await ask(p) for p in prompts]
    assert await asyncio.gather(*map(ask, prompts)) == alone


async def test_closed_stream(aclient, model, server):
    """C46 through the client's own close()."""
    stream = await aclient.completions.create(model=model, prompt="Once", max_tokens=2000, stream=True, **GREEDY)
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == 5:
            break
    await stream.close()
    await asyncio.to_thread(server.wait_idle, 2)
