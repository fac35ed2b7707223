"""The fuzz targets' corpus of request bodies, mutated, for a server. Imported by test_openapi.py."""

import http.client
import json
import pathlib

CORPUS = pathlib.Path(__file__).resolve().parents[1] / "fuzz" / "corpus" / "fuzz_request"
# what the first byte of a corpus file means, as in fuzz_request.c
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/generate",
         "/tokenize", "/detokenize"]
ODD = [None, True, False, 0, -1, 1, 1.5, -1e308, 2**31, 2**63, 2**64, "", "x", "\x01", "\ud83d", "<|user|>", "</think>", "�" * 40, [], {}, [[]],
       [None], {"": None}, [1, "x", {}], {"type": "object"}, "a" * 3000]
BYTES = [b"\x00", b"\xff", b"\xc3", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\\ud800", b"1e999", b"-", b"null", b"\n"]


def load():
    """[(path, body)] of the corpus."""
    found = []
    for file in sorted(CORPUS.iterdir()):
        data = file.read_bytes()
        if data:
            found.append((PATHS[(data[0] - ord("0")) % 256 % len(PATHS)], data[1:]))
    assert len(found) > 15
    return found


def _places(value, out):
    """Every (container, key) below a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        out.append((value, key))
        _places(inner, out)
    return out


def _change_values(random, body):
    """Values of the JSON replaced, moved, removed, renamed."""
    root = json.loads(body)
    for _ in range(random.randint(1, 3)):
        places = _places(root, [])
        if not places:
            break
        holder, key = random.choice(places)
        action = random.randrange(5)
        if action < 3:
            other, name = random.choice(places)
            holder[key] = random.choice(ODD) if action else json.loads(json.dumps(other[name]))
        elif action == 3:
            del holder[key]
        elif isinstance(holder, dict):
            holder[random.choice(["", "x", "stop", "n", "stream", "prompt", "messages", "tools", "text"])] = holder.pop(key)
    return json.dumps(root).encode()


def _change_bytes(random, body, other):
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(body))
        to = min(len(body), at + random.randint(0, 12))
        action = random.randrange(5)
        if action == 0:
            body = body[:at] + random.choice(BYTES) + body[at:]
        elif action == 1:
            body = body[:at] + body[to:]
        elif action == 2:
            body = body[:at] + bytes([random.randrange(256)]) + body[at + 1:]
        elif action == 3:
            body = body[:to] + body[at:]
        else:
            body = body[:at] + other[random.randint(0, len(other)):]
    return body


def mutations(random, n):
    """n pairs (path, body), three quarters of them still JSON."""
    corpus = load()
    for _ in range(n):
        path, body = random.choice(corpus)
        try:
            changed = _change_values(random, body) if random.randrange(4) else None
        except (ValueError, RecursionError):  # no JSON, or deeper than Python goes
            changed = None
        if changed is None:
            changed = _change_bytes(random, body, random.choice(corpus)[1])
        yield (path if random.randrange(10) else random.choice(PATHS)), changed


def send_all(port, pairs):
    """Sends the bodies over kept connections; {status: count}. A status that must not be is an AssertionError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    counts = {}
    for path, body in pairs:
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            data = reply.read()
        except (http.client.HTTPException, OSError) as error:
            raise AssertionError(f"{path} {body!r}: no reply, {error!r}") from error
        counts[reply.status] = counts.get(reply.status, 0) + 1
        assert reply.status == 200 or 400 <= reply.status < 500, (reply.status, path, body, data)
        if reply.status >= 400:
            message = json.loads(data)["error"]["message"]
            assert message, (path, body)
    connection.close()
    return counts
