"""What the embedded model is asked where a test needs tool calls. Imported by the tests.

Requests are worded as in the model's training text (tools/tiny/corpus/toolcall.py), so that it calls what is declared.
"""

# name, description, properties, required
FUNCTIONS = [
    ("get_weather", "Get the weather of a city.", {"city": {"type": "string"}, "day": {"type": "string"}}, ["city"]),
    ("set_timer", "Set a timer in minutes.", {"minutes": {"type": "integer"}, "loud": {"type": "boolean"}}, ["minutes"]),
    ("list_files", "List all files.", {}, []),
]
SCHEMAS = {name: {"type": "object", "properties": properties, "required": required}
           for name, _, properties, required in FUNCTIONS}

CHAT_TOOLS = [{"type": "function", "function": {"name": n, "description": d, "parameters": SCHEMAS[n]}} for n, d, _, _ in FUNCTIONS]
RESPONSES_TOOLS = [{"type": "function", "name": n, "description": d, "parameters": SCHEMAS[n], "strict": False}
                   for n, d, _, _ in FUNCTIONS]
ANTHROPIC_TOOLS = [{"name": n, "description": d, "input_schema": SCHEMAS[n]} for n, d, _, _ in FUNCTIONS]

# what is asked, the calls that answer it
CASES = [
    ("What is the weather in Paris?", [("get_weather", {"city": "Paris"})]),
    ("Set a timer for 12 minutes with loud set to true.", [("set_timer", {"minutes": 12, "loud": True})]),
    ("List my files.", [("list_files", {})]),
    ("What is the weather in Paris? What is the weather in Rome?",
     [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]),
]
NO_CALL = ("What is 3+5?", "8")

# Functions whose calls end soon even where the model would not call them: for calls that a grammar forces.
_PICK = {"pick_colour": {"colour": {"enum": ["red", "green", "blue"]}}, "pick_size": {"size": {"type": "integer", "minimum": 0, "maximum": 9}}}
FORCED_SCHEMAS = {name: {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
                  for name, properties in _PICK.items()}
