"""Tool calls: functions declared in the prompt, called in the GLM 4.7/5 form, results used.

Half of the functions come from a catalogue of plausible ones, half are composed (verb, noun,
parameters), so that the model must read the declaration instead of knowing the function.
"""
import json

from . import words
from .item import Item


def _p(kind, say, make):
    return {"kind": kind, "say": say, "make": make}


# parameter name: (JSON type, how a request states it, value maker)
_PARAMS = {
    "city": _p("string", "in {v}", lambda r: words.place(r, 0.3)),
    "name": _p("string", "for {v}", lambda r: words.name(r, 0.3)),
    "colour": _p("string", "in the colour {v}", lambda r: r.choice(words.COLOURS)),
    "count": _p("integer", "{v} times", lambda r: r.randrange(1, 100)),
    "day": _p("string", "on {v}", lambda r: r.choice(words.DAYS)),
    "room": _p("string", "in the {v}", lambda r: r.choice(("kitchen", "garden", "hall", "office",
                                                          "bedroom", "bathroom", "cellar"))),
    "minutes": _p("integer", "after {v} minutes", lambda r: r.randrange(1, 120)),
    "amount": _p("number", "with the amount {v}", lambda r: r.choice((r.randrange(1, 500),
                                                        round(r.uniform(0.5, 99), 1)))),
    "to": _p("string", "to {v}", lambda r: words.name(r, 0.4)),
    "from": _p("string", "from {v}", lambda r: words.place(r, 0.3)),
    "level": _p("integer", "at level {v}", lambda r: r.randrange(0, 11)),
    "loud": _p("boolean", "with loud set to {v}", lambda r: r.random() < 0.5),
    "urgent": _p("boolean", "with urgent set to {v}", lambda r: r.random() < 0.5),
    "unit": _p("string", "in unit {v}", lambda r: r.choice(("celsius", "fahrenheit", "metre",
                                                           "mile", "gram", "litre"))),
    "id": _p("integer", "with id {v}", lambda r: words.number(r)),
    "code": _p("string", "with code {v}", lambda r: words.invented(r)),
    "size": _p("string", "of size {v}", lambda r: r.choice(("small", "medium", "large"))),
    "tags": _p("array", "with the tags {v}", lambda r: r.sample(words.ADJECTIVES, r.choice((1, 2)))),
    "limit": _p("integer", "with a limit of {v}", lambda r: r.randrange(1, 50)),
    "month": _p("string", "in {v}", lambda r: r.choice(words.MONTHS)),
}
# name: (description, request forms with {param} for required ones, required, optional, result)
_CATALOGUE = {
    "get_weather": ("Get the weather of a city.",
                    ["What is the weather in {city}?", "How is the weather in {city}?",
                     "Tell me the weather in {city}.", "Weather in {city}, please."],
                    ["city"], ["day", "unit"]),
    "get_time": ("Get the time in a city.",
                 ["What time is it in {city}?", "Tell me the time in {city}."], ["city"], []),
    "send_message": ("Send a message to a person.",
                     ["Send {to} the message: {text}", "Tell {to}: {text}"],
                     ["to", "text"], ["urgent"]),
    "set_timer": ("Set a timer in minutes.",
                  ["Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.",
                   "Start a timer of {minutes} minutes."], ["minutes"], ["loud"]),
    "add": ("Add two numbers.", ["Use the tool to add {a} and {b}.", "Add {a} and {b} with the tool."],
            ["a", "b"], []),
    "search": ("Search for a text.", ["Search for {query}.", "Look up {query}.", "Find {query}."],
               ["query"], ["limit"]),
    "turn_on_light": ("Turn on the light in a room.",
                      ["Turn on the light in the {room}.", "Light on in the {room}, please."],
                      ["room"], ["level", "colour"]),
    "book_train": ("Book a train ticket.",
                   ["Book a train from {from} to {city}.", "I need a train ticket from {from} to {city}."],
                   ["from", "city"], ["day"]),
    "play_song": ("Play a song.", ["Play the song {title}.", "I want to hear {title}."],
                  ["title"], ["loud"]),
    "list_files": ("List all files.", ["List my files.", "Which files do I have?", "Show all files."],
                   [], []),
    "get_date": ("Get the date of today.", ["What is the date today?", "Which day is it today?"],
                 [], []),
    "delete_file": ("Delete a file.", ["Delete the file {path}.", "Remove {path}."], ["path"], []),
    "create_user": ("Create a user.", ["Create a user called {name} who is {age} years old.",
                                       "Add the user {name}, age {age}."], ["name", "age"], ["tags"]),
}
_EXTRA = {
    "text": ("string", lambda r: r.choice((
        f"I am in {words.place(r)}", f"please bring the {r.choice(words.OBJECTS)}",
        f"see you on {r.choice(words.DAYS)}", f"the {r.choice(words.ANIMALS)} is {r.choice(words.ADJECTIVES)}",
        f"call {words.name(r)} back"))),
    "a": ("number", words.number), "b": ("number", words.number),
    "query": ("string", lambda r: f"{r.choice(words.ADJECTIVES)} {r.choice(words.ANIMALS)}"
              if r.random() < 0.6 else words.invented(r)),
    "title": ("string", lambda r: f"The {r.choice(words.ADJECTIVES)} {r.choice(words.OBJECTS)}".title()),
    "path": ("string", lambda r: f"{words.invented(r, 2)}.{r.choice(('txt', 'md', 'json', 'png'))}"),
    "age": ("integer", lambda r: r.randrange(1, 100)),
}
_PLEASE = ["{s}", "{s}", "{s}", "Please do this: {s}", "{s} Thank you.", "Hello! {s}"]


def _type_and_value(rng, param):
    if param in _EXTRA:
        kind, make = _EXTRA[param]
        return kind, make(rng)
    return _PARAMS[param]["kind"], _PARAMS[param]["make"](rng)


def _type_of(param):
    return _EXTRA[param][0] if param in _EXTRA else _PARAMS[param]["kind"]


def _schema(rng, params, required):
    props = {}
    for p in params:
        props[p] = {"type": _type_of(p)}
        if props[p]["type"] == "array":
            props[p]["items"] = {"type": "string"}
        if rng.random() < 0.3:
            props[p]["description"] = f"The {p}."
    return {"type": "object", "properties": props, "required": list(required)}


def _declare(name, description, schema):
    return {"type": "function", "function": {"name": name, "description": description,
                                             "parameters": schema}}


def spoken(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return words.join_list(value)
    return str(value)


def _catalogue_function(rng):
    name = rng.choice(list(_CATALOGUE))
    text, forms, required, optional = _CATALOGUE[name]
    return {"name": name, "description": text, "forms": forms, "required": required,
            "optional": optional}


def _composed_function(rng):
    noun = rng.choice(words.OBJECTS + words.ANIMALS) if rng.random() < 0.7 else words.invented(rng, 2)
    verb = rng.choice(words.VERBS)
    name = f"{verb}_{noun}" if rng.random() < 0.8 else f"{verb}{noun.capitalize()}"
    params = rng.sample(list(_PARAMS), rng.choice((0, 1, 1, 2, 2, 3)))
    clash = {"city": "from", "month": "day", "room": "city"}
    params = [p for p in params if clash.get(p) not in params]
    n_required = rng.randint(min(1, len(params)), len(params))
    form = f"{verb.capitalize()} the {noun}" + "".join(f" {{+{p}}}" for p in params[:n_required])
    return {"name": name, "description": f"{verb.capitalize()} the {noun}.", "forms": [form + "."],
            "required": params[:n_required], "optional": params[n_required:]}


def _function(rng):
    return _catalogue_function(rng) if rng.random() < 0.5 else _composed_function(rng)


def _functions(rng):
    out = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        f = _function(rng)
        out.setdefault(f["name"], f)
    return list(out.values())


def _fill(rng, f):
    """A request for function f in words, and the arguments that it must lead to."""
    args, text = {}, rng.choice(f["forms"])
    for p in f["required"]:
        args[p] = _type_and_value(rng, p)[1]
        said = spoken(args[p])
        if "{+" + p + "}" in text:
            text = text.replace("{+" + p + "}", _PARAMS[p]["say"].format(v=said))
        else:
            text = text.replace("{" + p + "}", said)
    for p in f["optional"]:
        if rng.random() < 0.4 and text[-1] in ".?":
            args[p] = _type_and_value(rng, p)[1]
            text = text[:-1] + " " + _PARAMS[p]["say"].format(v=spoken(args[p])) + text[-1]
    return text, args


def declarations(rng, functions):
    return [_declare(f["name"], f["description"],
                     _schema(rng, f["required"] + f["optional"], f["required"]))
            for f in functions]


def make(rng):
    functions = _functions(rng)
    f = rng.choice(functions)
    text, args = _fill(rng, f)
    calls = [{"name": f["name"], "arguments": args}]
    if rng.random() < 0.08 and f["required"]:          # the same function twice
        other, args2 = _fill(rng, f)
        if args2 != args:
            text, calls = f"{text} {other}", calls + [{"name": f["name"], "arguments": args2}]
    reasoning = f"I call {f['name']}." if len(calls) == 1 else f"I call {f['name']} two times."
    return Item("tool", "tool:" + json.dumps(calls), rng.choice(_PLEASE).format(s=text), "",
                reasoning=reasoning, tools=declarations(rng, functions), tool_calls=calls,
                system=rng.choice((None, None, None, "You are a helpful assistant.",
                                   "Use the tools when they help.")),
                check={"calls": calls})


def make_result(rng):
    """The turn after a call: a tool message is there, the answer states what it says."""
    item = make(rng)
    while len(item.tool_calls) > 1:
        item = make(rng)
    kind = rng.choice(("value", "object", "ok", "error"))
    noun, value = rng.choice(words.ADJECTIVES), rng.choice((words.number(rng), words.invented(rng)))
    result, answer = {
        "value": (str(value), f"The result is {value}."),
        "object": (json.dumps({"state": noun, "value": value}),
                   f"The state is {noun} and the value is {value}."),
        "ok": ("ok", "Done."),
        "error": (json.dumps({"error": f"no {noun}"}), f"That did not work: no {noun}."),
    }[kind]
    before = [{"role": "user", "content": item.user},
              {"role": "assistant", "content": "", "tool_calls": [
                  {"type": "function", "function": c} for c in item.tool_calls]},
              {"role": "tool", "content": result}]
    return Item("tool_result", item.key + ":" + result, "", answer,
                reasoning="The tool has answered.", system=item.system, tools=item.tools,
                before=before, check={"equals": answer})


def with_unneeded_tools(rng, item):
    """Declare tools beside a request that needs none."""
    item.tools = declarations(rng, _functions(rng))
    item.reasoning = ("No tool is needed. " + item.reasoning).strip()
    return item
