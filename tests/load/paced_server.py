"""An OpenAI-shaped HTTP server that answers by a script: what it sends, in which pieces, at which times.

It is the other side of a load client under test: its times are known, and it records when it really sent. It generates
nothing; the answers' sizes are the script's.
"""

import asyncio
import dataclasses
import json
import threading
import time


@dataclasses.dataclass
class Answer:
    """What a request gets. Times are seconds from the moment its body was complete."""

    pieces: list = dataclasses.field(default_factory=list)  # (time, bytes): a piece is one write
    status: int = 200
    content_type: str = "text/event-stream"
    cut: bool = False   # the connection is reset after the last piece
    hang: bool = False  # nothing more comes, the connection stays


@dataclasses.dataclass
class Seen:
    """One request as the server saw it; times of time.monotonic()."""

    path: str
    headers: dict
    body: dict
    begin: float
    sent: list = dataclasses.field(default_factory=list)  # when each piece was written


def event(**members):
    return b"data: " + json.dumps(members).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage(prompt, completion, **more):
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **more}


def text_stream(first, gap, n, chat=False, tokens_per_chunk=1, prompt_tokens=7, with_usage=True, key="content"):
    """n chunks, the first after `first` seconds, then one every `gap`; the end comes with the last."""
    def choice(text, finish=None):
        inner = {"delta": {key: text} if text else {}} if chat else {"text": text}
        return {"index": 0, **inner, "finish_reason": finish}

    head = {"id": "x", "object": "chat.completion.chunk" if chat else "text_completion", "created": 1, "model": "paced"}
    pieces = []
    if chat:
        pieces.append((0, event(**head, choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])))
    pieces += [(first + i * gap, event(**head, choices=[choice(" x" * tokens_per_chunk)])) for i in range(n)]
    end = event(**head, choices=[choice("", "length")])
    if with_usage:
        end += event(**head, choices=[], usage=usage(prompt_tokens, n * tokens_per_chunk))
    at, last = pieces.pop() if n else (first, b"")
    return Answer(pieces + [(at, last + end + DONE)])


class PacedServer:
    """answer(body, number) gives the Answer to the number-th request. Runs in a thread; used with `with`."""

    def __init__(self, answer, models=("paced",), models_status=200, delay_ready=0):
        self.answer, self.models, self.models_status = answer, models, models_status
        self.requests = []
        self.connections = self.running = self.peak = 0
        self.ready_at = time.monotonic() + delay_ready
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *exc):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def _run(self):
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096))
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader, writer):
        first = await reader.readexactly(1)
        if first == b"\x16":  # somebody speaks TLS
            return False
        head = (first + await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        begin = time.monotonic()
        if method == "GET" or not path.endswith("completions"):
            await self._other(writer, path, begin)
            return True
        seen = Seen(path, headers, json.loads(raw), begin)
        self.requests.append(seen)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self._play(writer, seen, self.answer(seen.body, len(self.requests) - 1))
        finally:
            self.running -= 1

    async def _other(self, writer, path, now):
        status, body = 404, b'{"error":{"message":"no such route"}}'
        if path == "/v1/models":
            status = self.models_status if now >= self.ready_at else 503
            if status == 200:
                body = json.dumps({"object": "list", "data": [{"id": m, "object": "model"} for m in self.models]}).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def _play(self, writer, seen, answer):
        writer.write(f"HTTP/1.1 {answer.status} X\r\nContent-Type: {answer.content_type}\r\n"
                     "Transfer-Encoding: chunked\r\n\r\n".encode())
        for at, data in answer.pieces:
            wait = seen.begin + at - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            seen.sent.append(time.monotonic())
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        if answer.hang:
            await asyncio.sleep(3600)
        if answer.cut:
            writer.transport.abort()
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
