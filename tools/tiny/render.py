"""Renders chat_template.jinja exactly as transformers does, without needing transformers.

Callers: stream.py (training text), eval.py, tests. The training text is what this returns, so
serving the same messages gives the same tokens.
"""
import functools
import json
from pathlib import Path

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def _raise(message):
    raise TemplateError(message)


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


@functools.cache
def _template():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    return env.from_string(TEMPLATE.read_text())


def render(messages, tools=None, add_generation_prompt=True, **kwargs):
    return _template().render(messages=messages, tools=tools,
                              add_generation_prompt=add_generation_prompt, **kwargs)
