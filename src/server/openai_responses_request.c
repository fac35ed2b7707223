/* Responses API in, chat body out (openai_responses.h). Called by openai_responses.c and the fuzz
 * target. Pure. */
#include <stdio.h>
#include <string.h>

#include "server/messages.h"
#include "server/openai_responses.h"

/* Messages being built, and the assistant's that is not complete. */
typedef struct builder {
    json_t *messages; /* borrowed */
    nbi_buf text, thinking;
    bool has_text, has_thinking;
    json_t *calls;
} builder;

static nb_status no_memory(nbi_api_error *e)
{
    return nbi_api_no_memory(e, "the input of this request");
}

static nb_status refuse_type(nbi_api_error *e, const char *place, const char *type,
                             const char *expected)
{
    char param[NBI_PARAM_MAX];
    snprintf(param, sizeof param, "%.*s.type", NBI_PARAM_MAX - 8, place);
    return nbi_api_field(e, param, "\"%.64s\" is not supported, expected %s", type, expected);
}

static nb_status add_text(nbi_buf *out, bool *has, const char *text, nbi_api_error *e)
{
    *has = true;
    return nbi_buf_add(out, text, strlen(text)) == NB_OK ? NB_OK : no_memory(e);
}

/* A string, or an array of parts of one of two types whose text is under "text" or "refusal". */
static nb_status read_text(nbi_buf *out, bool *has, const json_t *content, const char *place,
                           nbi_api_error *e)
{
    static const char *const known[] = {"input_text",     "output_text",  "text",
                                        "reasoning_text", "summary_text", "refusal"};
    const size_t n_known = sizeof known / sizeof *known;
    size_t i, k = 0;
    const json_t *part;
    if (json_is_string(content)) return add_text(out, has, json_string_value(content), e);
    if (!json_is_array(content)) {
        return nbi_api_field(e, place, "expected a string or an array of parts, found %s",
                             nbi_json_kind(content));
    }
    json_array_foreach(content, i, part)
    {
        char at[NBI_PARAM_MAX];
        const char *type, *text;
        snprintf(at, sizeof at, "%.*s[%zu]", NBI_PARAM_MAX - 24, place, i);
        if (!json_is_object(part)) {
            return nbi_api_field(e, at, "expected an object, found %s", nbi_json_kind(part));
        }
        NB_TRY(nbi_field_need_str(&type, part, at, "type", e));
        for (k = 0; k < n_known && strcmp(type, known[k]) != 0; k++) continue;
        if (k == n_known) return refuse_type(e, at, type, "text");
        const char *key = strcmp(type, "refusal") == 0 ? "refusal" : "text";
        NB_TRY(nbi_field_need_str(&text, part, at, key, e));
        NB_TRY(add_text(out, has, text, e));
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- messages */

static json_t *string_of(const nbi_buf *text)
{
    return json_stringn(text->len ? text->data : "", text->len);
}

static nb_status append(builder *b, json_t *message, nbi_api_error *e)
{
    return json_array_append_new(b->messages, message) == 0 ? NB_OK : no_memory(e);
}

/* The assistant's message is complete. */
static nb_status flush(builder *b, nbi_api_error *e)
{
    if (!b->has_text && !b->has_thinking && !b->calls) return NB_OK;
    json_t *reasoning = b->has_thinking ? string_of(&b->thinking) : NULL;
    json_t *message =
        json_pack("{s:s, s:o, s:o*, s:o*}", "role", "assistant", "content", string_of(&b->text),
                  "reasoning_content", reasoning, "tool_calls", b->calls);
    b->calls = NULL;
    b->has_text = b->has_thinking = false;
    nbi_buf_clear(&b->text);
    nbi_buf_clear(&b->thinking);
    return append(b, message, e);
}

/* A message of somebody else. */
static nb_status add_other(builder *b, const char *role, const char *call_id, const json_t *content,
                           const char *place, nbi_api_error *e)
{
    nbi_buf text = {0};
    bool has = false;
    NB_TRY(flush(b, e));
    nb_status status = read_text(&text, &has, content, place, e);
    if (status == NB_OK) {
        status = append(b,
                        json_pack("{s:s, s:o, s:s*}", "role", role, "content", string_of(&text),
                                  "tool_call_id", call_id),
                        e);
    }
    nbi_buf_free(&text);
    return status;
}

static nb_status add_message(builder *b, const json_t *item, const char *place, nbi_api_error *e)
{
    const char *role;
    char at[NBI_PARAM_MAX];
    const json_t *content = nbi_field(item, "content");
    NB_TRY(nbi_field_need_str(&role, item, place, "role", e));
    snprintf(at, sizeof at, "%.*s.content", NBI_PARAM_MAX - 16, place);
    if (!content) return nbi_api_field(e, at, "is missing");
    if (strcmp(role, "assistant") == 0) {
        if (b->has_text || b->calls) NB_TRY(flush(b, e));
        return read_text(&b->text, &b->has_text, content, at, e);
    }
    if (strcmp(role, "user") == 0 || strcmp(role, "system") == 0 ||
        strcmp(role, "developer") == 0) {
        return add_other(b, role, NULL, content, at, e);
    }
    snprintf(at, sizeof at, "%.*s.role", NBI_PARAM_MAX - 16, place);
    return nbi_api_field(
        e, at, "\"%.32s\" is unknown, expected user, assistant, system or developer", role);
}

/* The thinking itself where the client sends it back, else its summary. */
static nb_status add_reasoning(builder *b, const json_t *item, const char *place, nbi_api_error *e)
{
    char at[NBI_PARAM_MAX];
    const json_t *content = nbi_field(item, "content");
    const char *key = content && json_array_size(content) ? "content" : "summary";
    const json_t *parts = nbi_field(item, key);
    NB_TRY(flush(b, e));
    snprintf(at, sizeof at, "%.*s.%s", NBI_PARAM_MAX - 16, place, key);
    if (!parts || (json_is_array(parts) && !json_array_size(parts))) return NB_OK;
    return read_text(&b->thinking, &b->has_thinking, parts, at, e);
}

static nb_status add_call(builder *b, const json_t *item, const char *place, nbi_api_error *e)
{
    const char *id, *name, *text;
    char at[NBI_PARAM_MAX];
    json_t *arguments = NULL;
    nb_error err = {0};
    NB_TRY(nbi_field_need_str(&id, item, place, "call_id", e));
    NB_TRY(nbi_field_need_str(&name, item, place, "name", e));
    NB_TRY(nbi_field_need_str(&text, item, place, "arguments", e));
    snprintf(at, sizeof at, "%.*s.arguments", NBI_PARAM_MAX - 16, place);
    if (text[0]) {
        nb_status status = nbi_json_parse_mended(&arguments, text, strlen(text), at, &err);
        if (status != NB_OK) return nbi_api_from(e, status, &err, at);
    } else {
        arguments = json_object();
    }
    if (arguments && !json_is_object(arguments)) {
        nbi_api_field(e, at, "expected a JSON object, found %s", nbi_json_kind(arguments));
        json_decref(arguments);
        return NB_INVALID;
    }
    json_t *call = json_pack("{s:s, s:s, s:{s:s, s:o}}", "id", id, "type", "function", "function",
                             "name", name, "arguments", arguments);
    if (!b->calls) b->calls = json_array();
    if (!b->calls || json_array_append_new(b->calls, call) != 0) return no_memory(e);
    return NB_OK;
}

static nb_status add_output(builder *b, const json_t *item, const char *place, nbi_api_error *e)
{
    const char *id;
    char at[NBI_PARAM_MAX];
    const json_t *output = nbi_field(item, "output");
    NB_TRY(nbi_field_need_str(&id, item, place, "call_id", e));
    snprintf(at, sizeof at, "%.*s.output", NBI_PARAM_MAX - 16, place);
    if (!output) return nbi_api_field(e, at, "is missing");
    return add_other(b, "tool", id, output, at, e);
}

static nb_status add_item(builder *b, const json_t *item, size_t i, nbi_api_error *e)
{
    const char *type = NULL;
    char place[NBI_PARAM_MAX], prefix[NBI_PARAM_MAX];
    snprintf(place, sizeof place, "input[%zu]", i);
    snprintf(prefix, sizeof prefix, "input[%zu].", i);
    if (!json_is_object(item)) {
        return nbi_api_field(e, place, "expected an object, found %s", nbi_json_kind(item));
    }
    NB_TRY(nbi_field_str(&type, item, prefix, "type", e));
    if (!type || strcmp(type, "message") == 0) return add_message(b, item, place, e);
    if (strcmp(type, "reasoning") == 0) return add_reasoning(b, item, place, e);
    if (strcmp(type, "function_call") == 0) return add_call(b, item, place, e);
    if (strcmp(type, "function_call_output") == 0) return add_output(b, item, place, e);
    return refuse_type(e, place, type, "message, reasoning, function_call or function_call_output");
}

static nb_status read_items(builder *b, const json_t *body, nbi_api_error *e)
{
    const json_t *input = nbi_field(body, "input"), *item;
    const json_t *instructions = nbi_field(body, "instructions");
    size_t i;
    if (!input) return nbi_api_field(e, "input", "is missing");
    if (instructions) {
        if (!json_is_string(instructions)) {
            return nbi_api_field(e, "instructions", "expected a string, found %s",
                                 nbi_json_kind(instructions));
        }
        NB_TRY(add_other(b, "system", NULL, instructions, "instructions", e));
    }
    if (json_is_string(input)) return add_other(b, "user", NULL, input, "input", e);
    if (!json_is_array(input)) {
        return nbi_api_field(e, "input", "expected a string or an array of items, found %s",
                             nbi_json_kind(input));
    }
    if (!json_array_size(input)) return nbi_api_field(e, "input", "is empty");
    if (json_array_size(input) > NBI_MESSAGES_MAX - 1) {
        return nbi_api_field(e, "input", "%zu items, at most %d", json_array_size(input),
                             NBI_MESSAGES_MAX - 1);
    }
    json_array_foreach(input, i, item) NB_TRY(add_item(b, item, i, e));
    return flush(b, e);
}

/* ---------------------------------------------------------------- tools */

static nb_status add_tool(json_t *out, const json_t *tool, size_t i, nbi_api_error *e)
{
    char place[NBI_PARAM_MAX], prefix[NBI_PARAM_MAX];
    const char *type, *name, *description = NULL;
    json_t *parameters = NULL;
    snprintf(place, sizeof place, "tools[%zu]", i);
    snprintf(prefix, sizeof prefix, "tools[%zu].", i);
    if (!json_is_object(tool)) {
        return nbi_api_field(e, place, "expected an object, found %s", nbi_json_kind(tool));
    }
    NB_TRY(nbi_field_need_str(&type, tool, place, "type", e));
    if (strncmp(type, "web_search", strlen("web_search")) == 0) return NB_OK;
    if (strcmp(type, "function") != 0) return refuse_type(e, place, type, "\"function\"");
    NB_TRY(nbi_field_need_str(&name, tool, place, "name", e));
    NB_TRY(nbi_field_str(&description, tool, prefix, "description", e));
    NB_TRY(nbi_field_object(&parameters, tool, prefix, "parameters", e));
    json_t *made = json_pack("{s:s, s:{s:s, s:s*, s:O*}}", "type", "function", "function", "name",
                             name, "description", description, "parameters", parameters);
    return json_array_append_new(out, made) == 0 ? NB_OK : no_memory(e);
}

static nb_status read_tools(json_t *chat, const json_t *body, nbi_api_error *e)
{
    json_t *tools = NULL, *choice = nbi_field(body, "tool_choice"), *made;
    const json_t *tool;
    const char *type;
    bool parallel = true;
    size_t i;
    NB_TRY(nbi_field_array(&tools, body, "", "tools", e));
    NB_TRY(nbi_field_bool(&parallel, body, "", "parallel_tool_calls", e));
    made = json_array();
    if (!made || json_object_set_new(chat, "tools", made) != 0) return no_memory(e);
    json_array_foreach(tools, i, tool) NB_TRY(add_tool(made, tool, i, e));
    if (json_is_object(choice)) {
        NB_TRY(nbi_field_need_str(&type, choice, "tool_choice", "type", e));
        if (strcmp(type, "function") != 0) {
            return refuse_type(e, "tool_choice", type, "\"function\"");
        }
    }
    if (choice && json_object_set(chat, "tool_choice", choice) != 0) return no_memory(e);
    return json_object_set_new(chat, "parallel_tool_calls", json_boolean(parallel)) == 0
               ? NB_OK
               : no_memory(e);
}

/* ---------------------------------------------------------------- the rest */

/* Effort "none" means no thinking; the other words go to the template. */
static nb_status read_reasoning(json_t *chat, const json_t *body, nbi_api_error *e)
{
    json_t *reasoning = NULL, *kwargs = nbi_field(body, "chat_template_kwargs");
    const char *effort = NULL;
    NB_TRY(nbi_field_object(&reasoning, body, "", "reasoning", e));
    if (reasoning) NB_TRY(nbi_field_str(&effort, reasoning, "reasoning.", "effort", e));
    if (effort && strcmp(effort, "none") == 0 &&
        json_object_set_new(chat, "enable_thinking", json_false()) != 0) {
        return no_memory(e);
    }
    if (effort && json_object_set_new(chat, "reasoning_effort", json_string(effort)) != 0) {
        return no_memory(e);
    }
    if (kwargs && json_object_set(chat, "chat_template_kwargs", kwargs) != 0) return no_memory(e);
    return NB_OK;
}

/* Its format is the constraint's (structured.h). */
static nb_status check_text(const json_t *body, nbi_api_error *e)
{
    json_t *text = NULL;
    return nbi_field_object(&text, body, "", "text", e);
}

/* What needs responses that are kept, or prompts that are. */
static nb_status refuse_stored(const json_t *body, nbi_api_error *e)
{
    static const char *const stored[] = {"previous_response_id", "conversation", "prompt"};
    bool background = false;
    for (size_t i = 0; i < sizeof stored / sizeof *stored; i++) {
        if (!nbi_field(body, stored[i])) continue;
        return nbi_api_field(e, stored[i],
                             "this server stores nothing between requests; send the whole "
                             "conversation as input");
    }
    NB_TRY(nbi_field_bool(&background, body, "", "background", e));
    if (!background) return NB_OK;
    return nbi_api_field(e, "background", "this server stores nothing between requests");
}

nb_status nbi_responses_chat(json_t **out, const json_t *body, nbi_api_error *e)
{
    json_t *chat = json_object(), *messages = json_array();
    builder b = {.messages = messages};
    nb_status status = NB_OK;
    if (!chat) {
        json_decref(messages);
        return no_memory(e);
    }
    if (json_object_set_new(chat, "messages", messages) != 0) {
        json_decref(chat);
        return no_memory(e);
    }
    NB_TRY_OR(status, refuse_stored(body, e), done);
    NB_TRY_OR(status, read_items(&b, body, e), done);
    NB_TRY_OR(status, read_tools(chat, body, e), done);
    NB_TRY_OR(status, read_reasoning(chat, body, e), done);
    NB_TRY_OR(status, check_text(body, e), done);
done:
    nbi_buf_free(&b.text);
    nbi_buf_free(&b.thinking);
    json_decref(b.calls);
    if (status == NB_OK) {
        *out = chat;
    } else {
        json_decref(chat);
    }
    return status;
}
