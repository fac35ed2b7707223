/* Python source of the rendering environment, run once inside the embedded interpreter. Callers:
 * template_python.c.
 *
 * The environment mirrors transformers.utils.chat_template_utils: same flags, extensions, filters
 * and globals. */
#pragma once

/* The folder of the distribution's Python packages: `site`, which would find it, costs a third of
 * the start time. */
#define NBI_PYTHON_ENV                                                                             \
    "import sys\n"                                                                                 \
    "sys.path.append('/usr/lib/python3/dist-packages')\n"                                          \
    "try:\n"                                                                                       \
    "    import jinja2.sandbox\n"                                                                  \
    "except ImportError:\n"                                                                        \
    "    import site\n"                                                                            \
    "    site.main()\n"                                                                            \
    "    import jinja2.sandbox\n"                                                                  \
    "import datetime\n"                                                                            \
    "import json\n"                                                                                \
    "from jinja2 import nodes\n"                                                                   \
    "from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError\n"            \
    "from jinja2.ext import Extension, loopcontrols\n"                                             \
    "\n"                                                                                           \
    "class Generation(Extension):\n"                                                               \
    "    tags = {'generation'}\n"                                                                  \
    "    def parse(self, parser):\n"                                                               \
    "        lineno = next(parser.stream).lineno\n"                                                \
    "        body = parser.parse_statements(['name:endgeneration'], drop_needle=True)\n"           \
    "        return nodes.CallBlock(self.call_method('_body'), [], [], body).set_lineno(lineno)\n" \
    "    def _body(self, caller):\n"                                                               \
    "        return caller()\n"                                                                    \
    "\n"                                                                                           \
    "class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):\n"                               \
    "    intercepted_binops = frozenset(['**'])\n"                                                 \
    "    def call_binop(self, context, operator, left, right):\n"                                  \
    "        if not (-1000000 <= left <= 1000000 and -64 <= right <= 64):\n"                       \
    "            raise SecurityError('power beyond the limits of the sandbox')\n"                  \
    "        return super().call_binop(context, operator, left, right)\n"                          \
    "\n"                                                                                           \
    "def raise_exception(message):\n"                                                              \
    "    raise TemplateError(message)\n"                                                           \
    "\n"                                                                                           \
    "def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):\n"          \
    "    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent,\n"                         \
    "                      separators=separators, sort_keys=sort_keys)\n"                          \
    "\n"                                                                                           \
    "def strftime_now(format):\n"                                                                  \
    "    return datetime.datetime.now().strftime(format)\n"                                        \
    "\n"                                                                                           \
    "environment = Sandbox(trim_blocks=True, lstrip_blocks=True,\n"                                \
    "                      extensions=[Generation, loopcontrols])\n"                               \
    "environment.filters['tojson'] = tojson\n"                                                     \
    "environment.globals['raise_exception'] = raise_exception\n"                                   \
    "environment.globals['strftime_now'] = strftime_now\n"                                         \
    "compiled = {}\n"                                                                              \
    "\n"                                                                                           \
    "def prepare(key, source, variables):\n"                                                       \
    "    if key not in compiled:\n"                                                                \
    "        try:\n"                                                                               \
    "            template = environment.from_string(source.decode('utf-8'))\n"                     \
    "        except TemplateSyntaxError as e:\n"                                                   \
    "            raise TemplateError('line %d: %s' % (e.lineno, e.message))\n"                     \
    "        compiled[key] = (template, json.loads(variables))\n"                                  \
    "    return compiled[key]\n"                                                                   \
    "\n"                                                                                           \
    "def render(key, source, variables, context):\n"                                               \
    "    template, values = prepare(key, source, variables)\n"                                     \
    "    return template.render({**values, **json.loads(context)}).encode('utf-8', 'replace')\n"   \
    "\n"                                                                                           \
    "def forget(key):\n"                                                                           \
    "    compiled.pop(key, None)\n"                                                                \
    "\n"                                                                                           \
    "def describe(error):\n"                                                                       \
    "    text = str(error)\n"                                                                      \
    "    if type(error) is not TemplateError:\n"                                                   \
    "        text = type(error).__name__ + ': ' + text\n"                                          \
    "    return text.encode('utf-8', 'replace')\n"
