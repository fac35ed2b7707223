/* Messages API in, chat body out (anthropic.h). Called by anthropic.c and the fuzz target. Pure. */
#include "server/anthropic.h"

#include <stdio.h>
#include <string.h>

#include "server/messages.h"
#include "text/tool_schema.h"

#define BUDGET_MIN 1024

/* One message being taken apart. */
typedef struct turn {
    json_t *messages; /* what is built; borrowed */
    nbi_buf text, thinking;
    bool has_text, has_thinking;
    json_t *calls;
} turn;

static nb_status no_memory(nbi_api_error *e)
{
    return nbi_api_no_memory(e, "the messages of this request");
}

static nb_status refuse_type(nbi_api_error *e, const char *place, const char *type,
                             const char *expected)
{
    char param[NBI_PARAM_MAX];
    snprintf(param, sizeof param, "%.100s.type", place);
    if (!type) return nbi_api_field(e, param, "is missing, expected %s", expected);
    return nbi_api_field(e, param, "\"%.64s\" is not supported, expected %s", type, expected);
}

/* Block `place` has to be an object with a type; *type is borrowed. */
static nb_status block_type(const char **type, const json_t *block, const char *place,
                            nbi_api_error *e)
{
    if (!json_is_object(block)) {
        return nbi_api_field(e, place, "expected an object, found %s", nbi_json_kind(block));
    }
    return nbi_field_need_str(type, block, place, "type", e);
}

/* ---------------------------------------------------------------- text */

static nb_status add_text(nbi_buf *out, bool *has, const char *separator, const json_t *text,
                          nbi_api_error *e)
{
    nb_status status = *has ? nbi_buf_add(out, separator, strlen(separator)) : NB_OK;
    *has = true;
    if (status == NB_OK) {
        status = nbi_buf_add(out, json_string_value(text), json_string_length(text));
    }
    return status == NB_OK ? NB_OK : no_memory(e);
}

/* A string, or an array of text blocks. */
static nb_status read_text(nbi_buf *out, bool *has, const json_t *content, const char *place,
                           nbi_api_error *e)
{
    size_t i;
    const json_t *block;
    if (json_is_string(content)) return add_text(out, has, "\n", content, e);
    if (!json_is_array(content)) {
        return nbi_api_field(e, place, "expected a string or an array of blocks, found %s",
                             nbi_json_kind(content));
    }
    json_array_foreach(content, i, block)
    {
        char at[NBI_PARAM_MAX];
        const char *type = "", *text = NULL;
        snprintf(at, sizeof at, "%.100s[%zu]", place, i);
        NB_TRY(block_type(&type, block, at, e));
        if (strcmp(type, "text") != 0) return refuse_type(e, at, type, "\"text\"");
        NB_TRY(nbi_field_need_str(&text, block, at, "text", e));
        NB_TRY(add_text(out, has, "\n", json_object_get(block, "text"), e));
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- turns */

static nb_status append(turn *t, json_t *message, nbi_api_error *e)
{
    return json_array_append_new(t->messages, message) == 0 ? NB_OK : no_memory(e);
}

static json_t *string_of(const nbi_buf *text)
{
    return json_stringn(text->len ? text->data : "", text->len);
}

static nb_status flush_text(turn *t, const char *role, nbi_api_error *e)
{
    if (!t->has_text) return NB_OK;
    json_t *message = json_pack("{s:s, s:o}", "role", role, "content", string_of(&t->text));
    nbi_buf_clear(&t->text);
    t->has_text = false;
    return append(t, message, e);
}

static nb_status add_tool_result(turn *t, const json_t *block, const char *place, nbi_api_error *e)
{
    const char *id;
    const json_t *content = nbi_field(block, "content");
    char at[NBI_PARAM_MAX];
    nbi_buf text = {0};
    bool has = false;
    NB_TRY(nbi_field_need_str(&id, block, place, "tool_use_id", e));
    NB_TRY(flush_text(t, "user", e));
    snprintf(at, sizeof at, "%.100s.content", place);
    nb_status status = content ? read_text(&text, &has, content, at, e) : NB_OK;
    if (status == NB_OK) {
        status = append(t,
                        json_pack("{s:s, s:s, s:o}", "role", "tool", "tool_call_id", id, "content",
                                  string_of(&text)),
                        e);
    }
    nbi_buf_free(&text);
    return status;
}

static nb_status add_user_block(turn *t, const json_t *block, const char *place, nbi_api_error *e)
{
    const char *type = "", *text;
    NB_TRY(block_type(&type, block, place, e));
    if (strcmp(type, "tool_result") == 0) return add_tool_result(t, block, place, e);
    if (strcmp(type, "text") != 0) return refuse_type(e, place, type, "text or tool_result");
    NB_TRY(nbi_field_need_str(&text, block, place, "text", e));
    return add_text(&t->text, &t->has_text, "\n", json_object_get(block, "text"), e);
}

static nb_status add_tool_use(turn *t, const json_t *block, const char *place, nbi_api_error *e)
{
    const char *id, *name;
    char prefix[NBI_PARAM_MAX];
    json_t *input = NULL;
    NB_TRY(nbi_field_need_str(&id, block, place, "id", e));
    NB_TRY(nbi_field_need_str(&name, block, place, "name", e));
    snprintf(prefix, sizeof prefix, "%.100s.", place);
    NB_TRY(nbi_field_object(&input, block, prefix, "input", e));
    json_t *arguments = input ? json_incref(input) : json_object();
    json_t *call = json_pack("{s:s, s:s, s:{s:s, s:o}}", "id", id, "type", "function", "function",
                             "name", name, "arguments", arguments);
    if (!t->calls) t->calls = json_array();
    if (!t->calls || json_array_append_new(t->calls, call) != 0) return no_memory(e);
    return NB_OK;
}

static nb_status add_assistant_block(turn *t, const json_t *block, const char *place,
                                     nbi_api_error *e)
{
    const char *type = "", *text;
    NB_TRY(block_type(&type, block, place, e));
    if (strcmp(type, "tool_use") == 0) return add_tool_use(t, block, place, e);
    if (strcmp(type, "redacted_thinking") == 0) return NB_OK;
    if (strcmp(type, "thinking") == 0) {
        NB_TRY(nbi_field_need_str(&text, block, place, "thinking", e));
        return add_text(&t->thinking, &t->has_thinking, "", json_object_get(block, "thinking"), e);
    }
    if (strcmp(type, "text") != 0) {
        return refuse_type(e, place, type, "text, thinking, redacted_thinking or tool_use");
    }
    NB_TRY(nbi_field_need_str(&text, block, place, "text", e));
    return add_text(&t->text, &t->has_text, "", json_object_get(block, "text"), e);
}

static nb_status flush_assistant(turn *t, nbi_api_error *e)
{
    json_t *reasoning = t->has_thinking ? string_of(&t->thinking) : NULL;
    json_t *message =
        json_pack("{s:s, s:o, s:o*, s:O*}", "role", "assistant", "content", string_of(&t->text),
                  "reasoning_content", reasoning, "tool_calls", t->calls);
    return append(t, message, e);
}

/* ---------------------------------------------------------------- messages */

static nb_status read_blocks(turn *t, const char *role, const json_t *content, const char *place,
                             nbi_api_error *e)
{
    size_t i;
    const json_t *block;
    bool assistant = strcmp(role, "assistant") == 0;
    if (!json_is_array(content)) {
        return nbi_api_field(e, place, "expected a string or an array of blocks, found %s",
                             nbi_json_kind(content));
    }
    json_array_foreach(content, i, block)
    {
        char at[NBI_PARAM_MAX];
        snprintf(at, sizeof at, "%.100s[%zu]", place, i);
        NB_TRY(assistant ? add_assistant_block(t, block, at, e) : add_user_block(t, block, at, e));
    }
    return NB_OK;
}

static nb_status read_turn(turn *t, const json_t *message, size_t i, nbi_api_error *e)
{
    const char *role;
    char place[NBI_PARAM_MAX], at[NBI_PARAM_MAX + 16];
    snprintf(place, sizeof place, "messages[%zu]", i);
    if (!json_is_object(message)) {
        return nbi_api_field(e, place, "expected an object, found %s", nbi_json_kind(message));
    }
    NB_TRY(nbi_field_need_str(&role, message, place, "role", e));
    bool assistant = strcmp(role, "assistant") == 0;
    if (!assistant && strcmp(role, "user") != 0 && strcmp(role, "system") != 0) {
        snprintf(at, sizeof at, "%.100s.role", place);
        return nbi_api_field(e, at, "\"%.32s\" is unknown, expected user or assistant", role);
    }
    const json_t *content = nbi_field(message, "content");
    snprintf(at, sizeof at, "%.100s.content", place);
    if (!content) return nbi_api_field(e, at, "is missing");
    if (json_is_string(content)) {
        NB_TRY(add_text(&t->text, &t->has_text, "", content, e));
    } else {
        NB_TRY(read_blocks(t, role, content, at, e));
        if (json_array_size(content) == 0) return nbi_api_field(e, at, "is empty");
    }
    return assistant ? flush_assistant(t, e) : flush_text(t, role, e);
}

static nb_status read_system(json_t *out, const json_t *body, nbi_api_error *e)
{
    const json_t *system = nbi_field(body, "system");
    turn t = {.messages = out};
    if (!system) return NB_OK;
    nb_status status = read_text(&t.text, &t.has_text, system, "system", e);
    if (status == NB_OK) status = flush_text(&t, "system", e);
    nbi_buf_free(&t.text);
    return status;
}

/* A last message of the assistant is the beginning of the answer. */
static nb_status read_ending(json_t *chat, const json_t *messages, nbi_api_error *e)
{
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const char *role = json_string_value(json_object_get(last, "role"));
    if (!role || strcmp(role, "assistant") != 0) return NB_OK;
    if (json_object_get(last, "tool_calls") ||
        !json_string_length(json_object_get(last, "content"))) {
        return nbi_api_field(e, "messages",
                             "the last one is the assistant's and does not end with text that the "
                             "answer could go on with");
    }
    return json_object_set_new(chat, "continue_final_message", json_true()) == 0 ? NB_OK
                                                                                 : no_memory(e);
}

static nb_status read_messages(json_t *out, const json_t *body, nbi_api_error *e)
{
    json_t *messages = NULL;
    const json_t *message;
    size_t i;
    nb_status status = NB_OK;
    NB_TRY(nbi_field_array(&messages, body, "", "messages", e));
    if (!messages) return nbi_api_field(e, "messages", "is missing");
    size_t n = json_array_size(messages);
    if (!n) return nbi_api_field(e, "messages", "is empty");
    if (n > NBI_MESSAGES_MAX) {
        return nbi_api_field(e, "messages", "%zu messages, at most %d", n, NBI_MESSAGES_MAX);
    }
    json_array_foreach(messages, i, message)
    {
        turn t = {.messages = out};
        status = read_turn(&t, message, i, e);
        nbi_buf_free(&t.text);
        nbi_buf_free(&t.thinking);
        json_decref(t.calls);
        NB_TRY(status);
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- tools */

static nb_status add_tool(json_t *out, const json_t *tool, size_t i, nbi_api_error *e)
{
    char place[NBI_PARAM_MAX], prefix[NBI_PARAM_MAX + 8];
    const char *type = "custom", *name, *description = NULL;
    json_t *schema = NULL;
    snprintf(place, sizeof place, "tools[%zu]", i);
    snprintf(prefix, sizeof prefix, "%.100s.", place);
    if (!json_is_object(tool)) {
        return nbi_api_field(e, place, "expected an object, found %s", nbi_json_kind(tool));
    }
    NB_TRY(nbi_field_str(&type, tool, prefix, "type", e));
    if (strcmp(type, "custom") != 0) return refuse_type(e, place, type, "\"custom\"");
    NB_TRY(nbi_field_need_str(&name, tool, place, "name", e));
    NB_TRY(nbi_field_str(&description, tool, prefix, "description", e));
    NB_TRY(nbi_field_object(&schema, tool, prefix, "input_schema", e));
    json_t *made = json_pack("{s:s, s:{s:s, s:s*, s:O*}}", "type", "function", "function", "name",
                             name, "description", description, "parameters", schema);
    return json_array_append_new(out, made) == 0 ? NB_OK : no_memory(e);
}

static nb_status read_tools(json_t *chat, const json_t *body, nbi_api_error *e)
{
    json_t *tools = NULL, *made;
    const json_t *tool;
    size_t i;
    NB_TRY(nbi_field_array(&tools, body, "", "tools", e));
    if (!tools) return NB_OK;
    made = json_array();
    if (!made || json_object_set_new(chat, "tools", made) != 0) return no_memory(e);
    json_array_foreach(tools, i, tool) NB_TRY(add_tool(made, tool, i, e));
    return NB_OK;
}

static nb_status read_tool_choice(json_t *chat, const json_t *body, nbi_api_error *e)
{
    json_t *choice = NULL, *made = NULL;
    const char *type, *name = NULL;
    bool single = false;
    NB_TRY(nbi_field_object(&choice, body, "", "tool_choice", e));
    if (!choice) return NB_OK;
    NB_TRY(nbi_field_need_str(&type, choice, "tool_choice", "type", e));
    NB_TRY(nbi_field_bool(&single, choice, "tool_choice.", "disable_parallel_tool_use", e));
    if (strcmp(type, "auto") == 0 || strcmp(type, "none") == 0) {
        made = json_string(type);
    } else if (strcmp(type, "any") == 0) {
        made = json_string("required");
    } else if (strcmp(type, "tool") == 0) {
        NB_TRY(nbi_field_need_str(&name, choice, "tool_choice", "name", e));
        if (!nbi_tool_find(json_object_get(chat, "tools"), name, strlen(name))) {
            return nbi_api_field(e, "tool_choice.name", "\"%.64s\" is not one of the tools", name);
        }
        made = json_pack("{s:s, s:{s:s}}", "type", "function", "function", "name", name);
    } else {
        return refuse_type(e, "tool_choice", type, "auto, any, tool or none");
    }
    if (json_object_set_new(chat, "tool_choice", made) != 0 ||
        json_object_set_new(chat, "parallel_tool_calls", json_boolean(!single)) != 0) {
        return no_memory(e);
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- thinking */

static nb_status check_budget(const json_t *thinking, const json_t *body, nbi_api_error *e)
{
    int64_t budget = 0, max_tokens = INT64_MAX;
    NB_TRY(
        nbi_field_int(&budget, thinking, "thinking.", "budget_tokens", BUDGET_MIN, UINT32_MAX, e));
    if (!budget) return nbi_api_field(e, "thinking.budget_tokens", "is missing");
    NB_TRY(nbi_field_int(&max_tokens, body, "", "max_tokens", 1, UINT32_MAX, e));
    if (budget < max_tokens) return NB_OK;
    return nbi_api_field(e, "thinking.budget_tokens", "%lld is not less than max_tokens, %lld",
                         (long long)budget, (long long)max_tokens);
}

static nb_status read_thinking(json_t *chat, const json_t *body, nbi_api_error *e)
{
    json_t *thinking = NULL;
    const char *type;
    NB_TRY(nbi_field_object(&thinking, body, "", "thinking", e));
    if (!thinking) return NB_OK;
    NB_TRY(nbi_field_need_str(&type, thinking, "thinking", "type", e));
    if (strcmp(type, "enabled") == 0) {
        NB_TRY(check_budget(thinking, body, e));
    } else if (strcmp(type, "adaptive") != 0 && strcmp(type, "disabled") != 0) {
        return refuse_type(e, "thinking", type, "enabled, adaptive or disabled");
    }
    bool off = strcmp(type, "disabled") == 0;
    return json_object_set_new(chat, "enable_thinking", json_boolean(!off)) == 0 ? NB_OK
                                                                                 : no_memory(e);
}

static nb_status read_output_config(json_t *chat, const json_t *body, nbi_api_error *e)
{
    json_t *config = NULL;
    const char *effort = NULL;
    NB_TRY(nbi_field_object(&config, body, "", "output_config", e));
    if (!config) return NB_OK;
    NB_TRY(nbi_field_str(&effort, config, "output_config.", "effort", e));
    if (!effort) return NB_OK;
    return json_object_set_new(chat, "reasoning_effort", json_string(effort)) == 0 ? NB_OK
                                                                                   : no_memory(e);
}

/* Not Anthropic's, but how everything else here is told what the template should get. */
static nb_status pass_kwargs(json_t *chat, const json_t *body, nbi_api_error *e)
{
    json_t *kwargs = nbi_field(body, "chat_template_kwargs");
    if (!kwargs) return NB_OK;
    return json_object_set(chat, "chat_template_kwargs", kwargs) == 0 ? NB_OK : no_memory(e);
}

nb_status nbi_anthropic_chat(json_t **out, const json_t *body, nbi_api_error *e)
{
    nb_status status = NB_OK;
    json_t *chat = json_object(), *messages = json_array();
    if (!chat) {
        json_decref(messages);
        return no_memory(e);
    }
    if (json_object_set_new(chat, "messages", messages) != 0) {
        json_decref(chat);
        return no_memory(e);
    }
    NB_TRY_OR(status, read_system(messages, body, e), fail);
    NB_TRY_OR(status, read_messages(messages, body, e), fail);
    NB_TRY_OR(status, read_ending(chat, messages, e), fail);
    NB_TRY_OR(status, read_tools(chat, body, e), fail);
    NB_TRY_OR(status, read_tool_choice(chat, body, e), fail);
    NB_TRY_OR(status, read_thinking(chat, body, e), fail);
    NB_TRY_OR(status, read_output_config(chat, body, e), fail);
    NB_TRY_OR(status, pass_kwargs(chat, body, e), fail);
    *out = chat;
    return NB_OK;
fail:
    json_decref(chat);
    return status;
}
