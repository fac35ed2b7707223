/* The corpus of the tool-call parsers (see tool_corpus.h). Markup as the models' chat templates
 * write it; faults as reported in public issues of serving engines. */
#include "tool_corpus.h"

#define GLM       NBI_TOOL_FORM_GLM
#define HERMES    NBI_TOOL_FORM_HERMES
#define DS        NBI_TOOL_FORM_DEEPSEEK
#define DSML      NBI_TOOL_FORM_DSML
#define JSON      NBI_TOOL_FORM_JSON

#define CALLS     "<｜tool▁calls▁begin｜>"
#define CALL      "<｜tool▁call▁begin｜>"
#define SEP       "<｜tool▁sep｜>"
#define END       "<｜tool▁call▁end｜>"
#define ENDS      "<｜tool▁calls▁end｜>"

#define FUNCS     "<｜DSML｜function_calls>\n"
#define END_FUNCS "</｜DSML｜function_calls>"
#define INVOKE    "<｜DSML｜invoke name="
#define END_INV   "</｜DSML｜invoke>\n"
#define PARAM     "<｜DSML｜parameter name="
#define END_PAR   "</｜DSML｜parameter>\n"

#define KV(k, v)  "<arg_key>" k "</arg_key><arg_value>" v "</arg_value>"
#define KVN(k, v) "<arg_key>" k "</arg_key>\n<arg_value>" v "</arg_value>\n"

const char tool_corpus_tools[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"weather\",\"parameters\":{\"type\":"
    "\"object\","
    "\"properties\":{\"city\":{\"type\":\"string\"},\"days\":{\"type\":\"integer\"}}}}},"
    "{\"type\":\"function\",\"function\":{\"name\":\"lookup\",\"parameters\":{\"type\":\"object\","
    "\"$defs\":{\"Opt\":{\"type\":\"object\",\"properties\":{}},\"Loop\":{\"$ref\":\"#/$defs/"
    "Loop\"}},"
    "\"properties\":{\"limit\":{\"type\":\"integer\"},\"deep\":{\"type\":\"boolean\"},"
    "\"tags\":{\"type\":\"array\"},\"q\":{\"type\":\"string\"},\"f\":{\"type\":\"number\"},"
    "\"opt\":{\"$ref\":\"#/$defs/Opt\"},\"loop\":{\"$ref\":\"#/$defs/Loop\"},"
    "\"nick\":{\"type\":[\"string\",\"null\"]},"
    "\"mix\":{\"anyOf\":[{\"type\":\"string\"},{\"type\":\"array\"},{\"type\":\"integer\"}]},"
    "\"level\":{\"enum\":[1,2,3]},\"shape\":{\"properties\":{\"w\":{}}},\"list\":{\"items\":{}},"
    "\"maybe\":{\"oneOf\":[{\"type\":\"integer\"},{\"type\":\"null\"}]},"
    "\"all\":{\"allOf\":[{\"description\":\"x\"},{\"type\":[\"integer\",\"string\"]},"
    "{\"type\":\"number\"}]}}}}},"
    "{\"name\":\"now\",\"input_schema\":{\"type\":\"object\",\"properties\":{}}}]";

const tool_case tool_corpus[] = {
    /* no calls */
    {GLM, false, "", ""},
    {GLM, false, "Hello, wörld 🙂.\n\n", "Hello, wörld 🙂.\n\n"},
    {GLM, false, "a < b and <b>bold</b> <tool", "a < b and <b>bold</b> <tool"},
    {GLM, true, "half a tag <tool_cal", "half a tag <tool_cal"},
    {NBI_TOOL_FORM_NONE, false, "<tool_call>now</tool_call> x ", "<tool_call>now</tool_call> x "},

    /* GLM 4.7, 5.x */
    {GLM, false, "<tool_call>weather" KV("city", "Lund") KV("days", "2") "</tool_call>",
     " [weather {\"city\":\"Lund\",\"days\":2}]"},
    {GLM, false, "Let me see.\n\n<tool_call>now</tool_call>\n", "Let me see. [now {}]"},
    {GLM, false,
     "<tool_call>now</tool_call><tool_call>weather" KV("city",
                                                       "Å, \"q\" \\ 北京\n\t") "</tool_call>",
     " [now {}] [weather {\"city\":\"Å, \\\"q\\\" \\\\ 北京\\n\\t\"}]"},
    {GLM, false,
     "<tool_call>lookup" KV("q", "a") "</tool_call><tool_call>lookup" KV(
         "q", "b") "</tool_call><tool_call>lookup" KV("q", "c") "</tool_call>",
     " [lookup {\"q\":\"a\"}] [lookup {\"q\":\"b\"}] [lookup {\"q\":\"c\"}]"},
    {GLM, false,
     "<tool_call>lookup" KV("limit", "10") KV("deep", "true") KV("tags", "[]")
         KV("q", "10") "</tool_call>",
     " [lookup {\"limit\":10,\"deep\":true,\"tags\":[],\"q\":\"10\"}]"},
    {GLM, false,
     "<tool_call>lookup" KV("q", "") KV("opt", "{\"a\": {\"b\": [1, 2]}}") "</tool_call>",
     " [lookup {\"q\":\"\",\"opt\":{\"a\":{\"b\":[1,2]}}}]"},
    {GLM, false, "<tool_call>lookup" KV("q", "  keep  space \n") KV("limit", " 7 ") "</tool_call>",
     " [lookup {\"q\":\"  keep  space \\n\",\"limit\":7}]"},
    {GLM, false,
     "<tool_call>lookup" KV("q", "say </tool_call> and <arg_value> twice") "</tool_call>",
     " [lookup {\"q\":\"say </tool_call> and <arg_value> twice\"}]"},
    {GLM, false, "one<tool_call>now</tool_call>two<tool_call>now</tool_call>three",
     "onetwothree [now {}] [now {}]"},

    /* GLM 4.5, 4.6 */
    {GLM, false, "Sure.\n<tool_call>weather\n" KVN("city", "Lund") KVN("days", "2") "</tool_call>",
     "Sure. [weather {\"city\":\"Lund\",\"days\":2}]"},
    {GLM, false,
     "\n<tool_call>now\n</tool_call>\n<tool_call>weather\n" KVN("city", "東京") "</tool_call>",
     " [now {}] [weather {\"city\":\"東京\"}]"},
    {GLM, false, "<tool_call>weather\\n" KV("city", "x") "</tool_call>",
     " [weather {\"city\":\"x\"}]"},

    /* types */
    {GLM, false,
     "<tool_call>lookup" KV("limit", "ten") KV("deep", "True") KV("f", "2.50") "</tool_call>",
     " [lookup {\"limit\":\"ten\",\"deep\":true,\"f\":2.50}]"},
    {GLM, false,
     "<tool_call>lookup" KV("limit", "\"12\"") KV("deep", "null") KV("f", "1e999") "</tool_call>",
     " [lookup {\"limit\":12,\"deep\":null,\"f\":\"1e999\"}]"},
    {GLM, false,
     "<tool_call>lookup" KV("tags", "['a', \"b'c\", None,]")
         KV("limit", "{\"a\":1}") "</tool_call>",
     " [lookup {\"tags\":[\"a\",\"b'c\",null],\"limit\":\"{\\\"a\\\":1}\"}]"},
    {GLM, false,
     "<tool_call>lookup" KV("nick", "null") KV("mix", "12") KV("level", "2") "</tool_call>",
     " [lookup {\"nick\":null,\"mix\":\"12\",\"level\":2}]"},
    {GLM, false,
     "<tool_call>lookup" KV("nick", "nullify") KV("mix", "[1, \"x\"]")
         KV("level", "x") "</tool_call>",
     " [lookup {\"nick\":\"nullify\",\"mix\":[1,\"x\"],\"level\":\"x\"}]"},
    {GLM, false,
     "<tool_call>lookup" KV("nick", "nu") KV("mix", "[broken") KV("shape", "{}") "</tool_call>",
     " [lookup {\"nick\":\"nu\",\"mix\":\"[broken\",\"shape\":{}}]"},
    {GLM, false,
     "<tool_call>lookup" KV("list", "[[]]") KV("maybe", "5") KV("all", "5")
         KV("loop", "5") "</tool_call>",
     " [lookup {\"list\":[[]],\"maybe\":5,\"all\":5,\"loop\":5}]"},
    {GLM, false,
     "<tool_call>lookup" KV("new", "5") KV("words", "tell me") KV("json", "{\"a\": 1}")
         KV("odd", "{a: 1}") KV("quoted", "\"s\"") "</tool_call>",
     " [lookup {\"new\":5,\"words\":\"tell me\",\"json\":{\"a\":1},\"odd\":\"{a: 1}\","
     "\"quoted\":\"s\"}]"},
    {GLM, false,
     "<tool_call>lookup" KV("tags", "[\"\\ud83d\\ude42 \\ud83d x \\d\"]")
         KV("limit", "123456789012345678901234567890") "</tool_call>",
     " [lookup {\"tags\":[\"🙂 \xef\xbf\xbd x "
     "\\\\d\"],\"limit\":123456789012345678901234567890}]"},
    {GLM, false, "<tool_call>lookup" KV("opt", "{\"a\":1,\"a\":2}") "</tool_call>",
     " [lookup {\"opt\":\"{\\\"a\\\":1,\\\"a\\\":2}\"}]"},

    /* names */
    {GLM, false, "<tool_call>other_fn" KV("x", "1") "</tool_call>", " [other_fn {\"x\":1}]"},
    {GLM, false, "The <tool_call> tag starts\na call.", "The <tool_call> tag starts\na call."},
    {GLM, false, "<tool_call></tool_call>", "<tool_call></tool_call>"},
    {GLM, false, "<tool_call>two words" KV("a", "b") "</tool_call>",
     "<tool_call>two words" KV("a", "b") "</tool_call>"},
    {GLM, false, "<tool_call>{\"name\": \"now\"}</tool_call>",
     "<tool_call>{\"name\": \"now\"}</tool_call>"},
    {GLM, false, "<tool_call><tool_call>now</tool_call>", "<tool_call> [now {}]"},
    {GLM, false, "<tool_call>\nfoo\nbar", "<tool_call>\nfoo\nbar"},

    /* GLM markup that is broken */
    {GLM, false, "a </tool_call> b </arg_value>", "a </tool_call> b </arg_value>"},
    {GLM, false, "<tool_call>weather\ncity</arg_key>\n<arg_value>Lund</arg_value>\n</tool_call>",
     " [weather {\"city\":\"Lund\"}]"},
    {GLM, false, "<tool_call>weather<arg_key>city<arg_value>Lund</arg_value></tool_call>",
     " [weather {\"city\":\"Lund\"}]"},
    {GLM, false, "<tool_call>weather<arg_key>city</arg_key>Lund</arg_value></tool_call>",
     "<arg_key>city</arg_key>Lund</arg_value> [weather {}]"},
    {GLM, false,
     "<tool_call>weather\n<arg_value>Lund</arg_value>\n" KVN("days", "3") "</tool_call>",
     "<arg_value>Lund</arg_value>\n [weather {\"days\":3}]"},
    {GLM, false, "<tool_call>weather" KV("city", "A") " noise " KV("days", "1") "</tool_call>",
     "noise  [weather {\"city\":\"A\",\"days\":1}]"},
    {GLM, false,
     "<tool_call>weather" KV("city", "A") KV("city", "B") KV("days", "1") "</tool_call>",
     KV("city", "B") " [weather {\"city\":\"A\",\"days\":1}]"},
    {GLM, false, "<tool_call>weather" KV("city", "A") "<tool_call>now</tool_call>",
     " [weather {\"city\":\"A\"}...] [now {}]"},
    {GLM, false, "<tool_call>weather<arg_key>city</arg_key><arg_value>Lund</tool_call>",
     " [weather {\"city\":\"Lund\"}]"},
    {GLM, false,
     "<tool_call>weather<arg_key>city</arg_key><arg_value>Lund</tool_call>\n"
     "<tool_call>now</tool_call>",
     " [weather {\"city\":\"Lund\"}] [now {}]"},
    {GLM, false, "<tool_call>weather" KV("", "A") "</tool_call>", KV("", "A") " [weather {}]"},

    /* output that ends early */
    {GLM, true, "<tool_call>weath", "<tool_call>weath"},
    {GLM, false, "<tool_call>weather<arg_key>ci", "<arg_key>ci [weather {}...]"},
    {GLM, true, "<tool_call>weather<arg_key>ci", " [weather {}...]"},
    {GLM, true, "<tool_call>weather<arg_key>city</arg_key><arg_value>Lu",
     " [weather {\"city\":\"Lu\"}...]"},
    {GLM, true, "<tool_call>weather<arg_key>city</arg_key><arg_value>Lund</arg_v",
     " [weather {\"city\":\"Lund\"}...]"},
    {GLM, true, "<tool_call>weather" KV("city", "L") "<arg_key>days</arg_key><arg_value>1",
     " [weather {\"city\":\"L\"}...]"},
    {GLM, false, "<tool_call>weather" KV("city", "L") "<arg_key>days</arg_key><arg_value>1",
     " [weather {\"city\":\"L\",\"days\":1}...]"},
    {GLM, true, "<tool_call>lookup<arg_key>opt</arg_key><arg_value>{\"a\": [1, {\"b\": \"x",
     " [lookup {\"opt\":{\"a\":[1,{\"b\":\"x\"}]}}...]"},
    {GLM, false, "<tool_call>weather" KV("city", "L"), " [weather {\"city\":\"L\"}...]"},

    /* Hermes, Qwen */
    {HERMES, false,
     "Ok.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Lund\", \"days\": 2}}\n"
     "</tool_call>",
     "Ok. [weather {\"city\":\"Lund\",\"days\":2}]"},
    {HERMES, false,
     "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": "
     "\"lookup\", \"arguments\": {\"q\": \"}{\\\"</tool_call>\", \"opt\": {\"a\": {}}}}\n"
     "</tool_call>",
     " [now {}] [lookup {\"q\":\"}{\\\"</tool_call>\",\"opt\":{\"a\":{}}}]"},
    {HERMES, false, "<tool_call>{\"name\":\"now\"}</tool_call>", " [now {}]"},
    {HERMES, false, "<tool_call>{\"name\":\"now\",\"arguments\":null}</tool_call> bye",
     " bye [now {}]"},
    {HERMES, false, "<tool_call>{\"arguments\":{\"city\":\"Å\"},\"name\":\"weather\"}</tool_call>",
     " [weather {\"city\":\"Å\"}]"},
    {HERMES, false,
     "<tool_call>{\"name\":\"weather\",\"arguments\":\"{\\\"city\\\":\\\"L\\\"}\"}</tool_call>",
     " [weather {\"city\":\"L\"}]"},
    {HERMES, false, "<tool_call>{\"id\":7,\"name\":\"now\",\"parameters\":{}}</tool_call>",
     " [now {}]"},
    {HERMES, false,
     "<tool_call>{\"name\":\"weather\",\"arguments\":{\"city\":\"L\"},\"id\":\"x\"}</tool_call>",
     " [weather {\"city\":\"L\"}]"},
    {HERMES, false,
     "<tool_call>{\"name\":\"now\"}\n{\"name\":\"weather\",\"arguments\":{}}"
     "</tool_call>",
     " [now {}] [weather {}]"},
    {HERMES, false, "<tool_call>\n{\"name\":\"now\",\"arguments\":{}}", " [now {}]"},
    {HERMES, false, "<tool_call>{\"name\":\"now\",\"arguments\":{}}}</tool_call>",
     "}</tool_call> [now {}]"},
    {HERMES, false, "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>"},
    {HERMES, false, "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>",
     "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>"},
    {HERMES, false, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>"},
    {HERMES, false,
     "<tool_call>{\"name\":\"lookup\",\"arguments\":{\"q\":\"a\nb\", \"x\": oops}}"
     "</tool_call>",
     ", \"x\": oops}}</tool_call> [lookup {\"q\":\"a\\nb\"}...]"},
    {HERMES, false, "<tool_call>{\"name\":\"lookup\",\"arguments\":{\"q\":1,\"q\":2}}</tool_call>",
     ",\"q\":2}}</tool_call> [lookup {\"q\":1}...]"},
    {HERMES, true, "<tool_call>{\"name\":\"lookup\",\"arguments\":{\"q\":\"ab\\u00",
     " [lookup {\"q\":\"ab\"}...]"},
    {HERMES, true, "<tool_call>{\"name\":\"lookup\",\"arguments\":{\"a\":[1,2",
     " [lookup {\"a\":[1]}...]"},
    {HERMES, false, "<tool_call>{\"name\":\"lookup\",\"arguments\":{\"a\":[1,2",
     " [lookup {\"a\":[1,2]}...]"},
    {HERMES, true, "<tool_call>{\"name\":\"look", "<tool_call>{\"name\":\"look"},
    {HERMES, false, "<tool_call>{'name': 'now', 'arguments': {'a': True}}</tool_call>",
     " [now {\"a\":true}]"},

    /* DeepSeek V3 and V3.1 */
    {DS, false,
     "Hi." CALLS CALL "function" SEP "weather\n```json\n{\"city\": \"Lund\"}\n```" END "\n" CALL
     "function" SEP "now\n```json\n{}\n```" END ENDS,
     "Hi. [weather {\"city\":\"Lund\"}] [now {}]"},
    {DS, false,
     CALLS CALL "weather" SEP "{\"city\": \"北京\", \"days\": 3}" END CALL "now" SEP "{}" END ENDS,
     " [weather {\"city\":\"北京\",\"days\":3}] [now {}]"},
    {DS, false, CALL "now" SEP "{}" END " tail", " tail [now {}]"},
    {DS, false, CALLS CALL "now" SEP END ENDS, " [now {}]"},
    {DS, false, CALLS "nothing" ENDS, CALLS "nothing" ENDS},
    {DS, false, CALLS CALL "now{}" END ENDS, CALLS CALL "now{}" END ENDS},
    {DS, false, "a " END " b", "a " END " b"},
    {DS, true, CALLS CALL "lookup" SEP "{\"q\": \"text ``` in",
     " [lookup {\"q\":\"text ``` in\"}...]"},
    {DS, false, CALLS CALL "lookup" SEP "{\"q\": \"x\"", " [lookup {\"q\":\"x\"}...]"},
    {DS, false, CALLS CALL "lookup" SEP "{\"q\": }" END ENDS,
     "\"q\": }" END ENDS " [lookup {}...]"},

    /* DeepSeek V3.2 */
    {DSML, false,
     "Ok.\n\n" FUNCS INVOKE "\"weather\">\n" PARAM "\"city\" string=\"true\">Lund" END_PAR PARAM
     "\"days\" string=\"false\">2" END_PAR END_INV END_FUNCS,
     "Ok. [weather {\"city\":\"Lund\",\"days\":2}]"},
    {DSML, false,
     FUNCS INVOKE "\"now\">\n" END_INV INVOKE "\"weather\">\n" PARAM
                  "\"city\" string=\"true\">5" END_PAR END_INV END_FUNCS,
     " [now {}] [weather {\"city\":\"5\"}]"},
    {DSML, false, FUNCS INVOKE "\"lookup\">{\"q\": \"a\", \"limit\": 5}" END_INV END_FUNCS,
     " [lookup {\"q\":\"a\",\"limit\":5}]"},
    {DSML, false, "<｜DSML｜tool_calls>\n" INVOKE "\"now\">\n" END_INV "</｜DSML｜tool_calls>\nEnd",
     "\nEnd [now {}]"},
    {DSML, false,
     INVOKE "\"lookup\">" PARAM "\"limit\" string=\"true\">5" END_PAR PARAM
            "\"q\" string=\"false\">\"x\"" END_PAR PARAM "\"deep\">true" END_PAR PARAM
            "\"z\" string=\"false\">{bad" END_PAR END_INV,
     " [lookup {\"limit\":\"5\",\"q\":\"x\",\"deep\":true,\"z\":\"{bad\"}]"},
    {DSML, false, FUNCS "prose" END_FUNCS, FUNCS "prose" END_FUNCS},
    {DSML, false, FUNCS INVOKE "\"now\">junk" PARAM "name>x" END_PAR END_INV END_FUNCS,
     "junk" PARAM "name>x" END_PAR " [now {}]"},
    {DSML, true, FUNCS INVOKE "\"weather\">\n" PARAM "\"city\" string=\"true\">Lu",
     " [weather {\"city\":\"Lu\"}...]"},
    {DSML, false,
     FUNCS INVOKE "\"weather\">\n" PARAM "\"city\" string=\"true\">Lund" END_INV END_FUNCS,
     " [weather {\"city\":\"Lund\"}]"},
    /* two keys that are no UTF-8 are one when written */
    {DSML, false, INVOKE "\"now\">" PARAM "\"\xa1\">1" END_PAR PARAM "\"\xa2\">2" END_PAR END_INV,
     PARAM "\"\xa2\">2" END_PAR " [now {\"\xef\xbf\xbd\":1}]"},
    {GLM, false, "<tool_call>now" KV("\xa1", "1") KV("\xef\xbf\xbd", "2") "</tool_call>",
     KV("\xef\xbf\xbd", "2") " [now {\"\xef\xbf\xbd\":1}]"},

    /* constrained output */
    {JSON, false,
     "[{\"name\": \"weather\", \"parameters\": {\"city\": \"L\"}}, {\"name\":\"now\","
     "\"parameters\":{}}]",
     " [weather {\"city\":\"L\"}] [now {}]"},
    {JSON, false, "\n {\"name\":\"now\",\"parameters\":{}} ", " [now {}]"},
    {JSON, false, "[{\"parameters\":{\"a\":[]},\"name\":\"now\"}]\n", " [now {\"a\":[]}]"},
    {JSON, false, "[]", "[]"},
    {JSON, false, "no array", "no array"},
    {JSON, true, "[{\"name\":\"weather\",\"parameters\":{\"city\":\"L",
     " [weather {\"city\":\"L\"}...]"},
    {JSON, false, "[{\"name\":\"now\",\"parameters\":{}}, {\"nom\":1}] x",
     ", {\"nom\":1}] x [now {}]"},
};
const size_t n_tool_corpus = sizeof tool_corpus / sizeof *tool_corpus;
