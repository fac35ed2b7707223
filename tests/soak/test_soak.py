"""What must hold for days, in short: many streams at once give the tokens they give alone; whoever leaves, at whatever point, leaves
nothing behind; memory is flat. The long form is `make soak`: 10,000 requests and 500 streams at once.
"""

import asyncio
import hashlib
import json
import random
import time

import pytest

WORDS = "the a river stone light seven green house walks under bright small never time and story city night seed what is 3+5".split()


@pytest.fixture(scope="module")
def sizes(request, sanitized):
    """(requests, streams at once)"""
    if request.config.getoption("--long"):
        return 10000, 500
    return (120, 24) if sanitized else (300, 60)


@pytest.fixture(scope="module")
def server(serve, sizes):
    server = serve("--max-running-requests", "64", "--context-length", "512")
    yield server
    assert server.stop() == 0, server.log


def resident(server):
    """KiB that are no file's."""
    with open(f"/proc/{server.process.pid}/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssAnon"))


def body_of(rng, i, stream=None):
    prompt = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 60)))
    return {"prompt": f"{i} {prompt}", "max_tokens": rng.randrange(1, 12), "ignore_eos": True, "seed": i, "temperature": rng.choice([0, 1]),
            "stream": rng.random() < 0.5 if stream is None else stream}


def head_of(data, path="/v1/completions"):
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()


def answer_of(raw, stream):
    """The text of a whole reply."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), raw[:500]
    if b"transfer-encoding: chunked" in head.lower():
        body, at = b"", 0
        while True:
            end = rest.index(b"\r\n", at)
            n = int(rest[at:end], 16)
            if n == 0:
                break
            body += rest[end + 2:end + 2 + n]
            at = end + 4 + n
        rest = body
    if not stream:
        return json.loads(rest)["choices"][0]["text"]
    lines = [line[6:] for line in rest.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", raw[-300:]
    return "".join(c["text"] for line in lines[:-1] for c in json.loads(line)["choices"])


async def ask(server, body):
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(head_of(data) + data)
        await writer.drain()
        raw = await asyncio.wait_for(reader.read(), 600)
    finally:
        writer.close()
    return answer_of(raw, body["stream"])


async def cut(server, body, rng):
    """Leaves within the header, the body, before the answer or in it; politely or by a reset."""
    data = json.dumps(body).encode()
    whole = head_of(data) + data
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(whole[:rng.randrange(1, len(whole))] if rng.random() < 0.4 else whole)
    await writer.drain()
    if rng.random() < 0.5:
        await asyncio.sleep(rng.random() * 0.3)
    else:
        try:
            await asyncio.wait_for(reader.read(rng.randrange(1, 3000)), rng.random() * 2)
        except (asyncio.TimeoutError, ConnectionError):
            pass
    if rng.random() < 0.5:
        writer.transport.abort()
    writer.close()


def digest(texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def settle(server):
    """Seconds until nothing is left of what was asked, and the KV tokens then in use."""
    seconds = server.wait_idle(30)
    return seconds, server.get("/health").json()["kv_tokens_used"]


def test_streams_at_once(server, sizes):
    """Each gets the tokens it gets alone."""
    rng = random.Random(3)
    n = sizes[1]
    bodies = [body_of(rng, i, stream=True) for i in range(n)]

    async def alone():
        return [await ask(server, b) for b in bodies]

    async def together():
        return await asyncio.gather(*(ask(server, b) for b in bodies))

    begin = time.monotonic()
    one = asyncio.run(alone())
    middle = time.monotonic()
    all_at_once = asyncio.run(together())
    print(f"\n{n} streams: alone {middle - begin:.1f} s, at once {time.monotonic() - middle:.1f} s, sha256 {digest(one)[:16]}")
    wrong = [i for i in range(n) if one[i] != all_at_once[i]]
    assert not wrong, (wrong, [(one[i], all_at_once[i]) for i in wrong[:3]])
    assert digest(one) == digest(all_at_once)
    assert settle(server)[1] == 0


def test_a_third_is_cut(server, sizes):
    """No page stays, the next request is served at once, memory is flat."""
    rng = random.Random(5)
    n, width = sizes[0], 32
    probe = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "stream": False}
    right = asyncio.run(ask(server, probe))
    counts = {"whole": 0, "cut": 0}
    memory = []

    async def run(first, end):
        queue = list(range(first, end))

        async def worker():
            while queue:
                i = queue.pop()
                body = body_of(rng, i)
                if rng.random() < 1 / 3:
                    await cut(server, body, rng)
                    counts["cut"] += 1
                else:
                    await ask(server, body)
                    counts["whole"] += 1

        await asyncio.gather(*(worker() for _ in range(width)))

    begin = time.monotonic()
    parts = 10
    slowest = 0.0
    for part in range(parts):
        asyncio.run(run(part * n // parts, (part + 1) * n // parts))
        seconds, tokens = settle(server)
        assert tokens == 0, f"{tokens} KV tokens are still held after part {part}"
        t = time.monotonic()
        assert asyncio.run(ask(server, probe)) == right
        slowest = max(slowest, seconds, time.monotonic() - t)
        memory.append(resident(server))
    print(f"\n{counts}, {time.monotonic() - begin:.1f} s, idle or answered within {slowest:.3f} s, RssAnon KiB {memory}")
    assert counts["cut"] > n / 5
    assert slowest < 5
    growth = memory[-1] - memory[parts // 2]
    assert growth < 8192 + memory[0] // 50, f"RssAnon in KiB: {memory}"
