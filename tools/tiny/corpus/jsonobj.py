"""JSON objects on request: fields given in words, answered as one JSON object."""
import json

from . import words
from .item import Item


def _field(rng, used):
    kinds = ["name", "age", "city", "colour", "animal", "price", "count", "active", "tags", "id",
             "email", "job", "hobbies", "title", "year", "country", "size", "invented", "score"]
    while True:
        kind = rng.choice(kinds)
        key = kind if kind != "invented" else words.invented(rng, 2)
        if kind == "colour" and rng.random() < 0.5:
            key = "color"
        if key not in used:
            used.add(key)
            return key, _value(rng, kind)


def _value(rng, kind):
    pick = rng.choice
    if kind == "name":
        return words.name(rng) + (" " + pick(words.LAST_NAMES) if rng.random() < 0.3 else "")
    if kind in ("age", "count", "id"):
        return words.number(rng, rng.choice((1, 2, 2)) if kind == "age" else None)
    if kind == "year":
        return rng.randrange(1900, 2031)
    if kind == "score":
        return round(rng.uniform(0, 10), 1)
    if kind == "price":
        return round(rng.uniform(0.5, 99), 2) if rng.random() < 0.6 else words.number(rng)
    if kind == "active":
        return rng.random() < 0.5
    if kind == "tags":
        return rng.sample(words.ADJECTIVES, rng.choice((1, 2, 3)))
    if kind == "hobbies":
        return rng.sample(words.HOBBIES, rng.choice((1, 2, 3)))
    if kind == "email":
        return f"{words.name(rng).lower()}@{words.invented(rng, 2)}.com"
    if kind == "title":
        return f"The {pick(words.ADJECTIVES)} {pick(words.ANIMALS)}"
    if kind == "size":
        return pick(("small", "medium", "large"))
    if kind == "invented":
        return pick((words.invented(rng), words.number(rng), rng.random() < 0.5))
    return pick({"city": words.CITIES, "colour": words.COLOURS, "animal": words.ANIMALS,
                 "job": words.JOBS, "country": words.COUNTRIES}[kind])


def _say(value, rng, quote):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "the list " + words.join_list(value) if rng.random() < 0.5 else json.dumps(value)
    if isinstance(value, str) and quote:
        return f'"{value}"'
    return str(value)


_ASK = ["Give me a JSON object with {f}.", "Write a JSON object with {f}.",
        "Return JSON with {f}.", "Make a JSON object that has {f}.", "Answer in JSON: {f}.",
        "Please write this as JSON: {f}.", "Create a JSON object with {f}.",
        "I need a JSON object with {f}.", "JSON please: {f}."]
_SYSTEM = [None, None, None, None, "Answer with JSON only.", "You answer only with a JSON object.",
           "Reply in valid JSON."]


def _fields_text(rng, obj, nested_key):
    quote, style = rng.random() < 0.3, rng.choice(("is", "colon", "plain", "equals"))
    glue = {"is": "{k} is {v}", "colon": "{k}: {v}", "plain": "{k} {v}", "equals": "{k} = {v}"}
    parts = []
    for k, v in obj.items():
        if k == nested_key:
            inner = words.join_list(f"{a} {_say(b, rng, quote)}" for a, b in v.items())
            parts.append(f"an object {k} with {inner}")
        else:
            parts.append(glue[style].format(k=k, v=_say(v, rng, quote)))
    return ", ".join(parts) if style == "colon" else words.join_list(parts)


def make(rng):
    used, obj, nested_key = set(), {}, None
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5))):
        k, v = _field(rng, used)
        obj[k] = v
    if rng.random() < 0.15:
        nested_key = rng.choice(("owner", "address", "info", "details"))
        inner = set()
        obj[nested_key] = dict(_field(rng, inner) for _ in range(rng.choice((1, 2))))
        obj[nested_key] = {k: v for k, v in obj[nested_key].items() if not isinstance(v, list)} \
            or {"id": words.number(rng)}
    user = rng.choice(_ASK).format(f=_fields_text(rng, obj, nested_key))
    text = json.dumps(obj, ensure_ascii=False)
    count = "one field" if len(obj) == 1 else f"{len(obj)} fields"
    reasoning = f"The object has {count}: {words.join_list(obj)}."
    return Item("json", "json:" + text, user, text, reasoning=reasoning,
                system=rng.choice(_SYSTEM), check={"json": obj})
