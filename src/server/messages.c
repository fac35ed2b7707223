/* Reading of chat messages. Called by openai_chat.c and by the fuzz target. */
#include "server/messages.h"

#include <stdio.h>
#include <string.h>

#include "text/chat.h"
#include "text/tool_choice.h"

#define NO_MEMORY(e) nbi_api_no_memory(e, "the messages of this request")

/* ---------------------------------------------------------------- messages */

/* The place that a sentence of the text room is about: "messages[2].content" in
 * "messages[2].content is ...". */
static const char *place_of(char out[NBI_PARAM_MAX], const char *sentence)
{
    const char *at = strstr(sentence, "messages");
    size_t n = at ? strcspn(at, " :") : 0;
    if (n >= NBI_PARAM_MAX) n = NBI_PARAM_MAX - 1;
    if (!n) return "messages";
    memcpy(out, at, n);
    out[n] = '\0';
    return out;
}

/* A turn of a user without text is a mistake of the client; an assistant's may be all tool calls.
 */
static nb_status check_content(const json_t *message, size_t i, nbi_api_error *e)
{
    const char *role = json_string_value(json_object_get(message, "role"));
    char param[NBI_PARAM_MAX];
    if (!role || nbi_field(message, "content")) return NB_OK;
    if (strcmp(role, "user") != 0 && strcmp(role, "system") != 0 &&
        strcmp(role, "developer") != 0) {
        return NB_OK;
    }
    snprintf(param, sizeof param, "messages[%zu].content", i);
    return nbi_api_field(e, param, "is missing");
}

/* The body belongs to the request alone: its messages are rewritten in place. */
static nb_status read_messages(json_t **out, const json_t *body, nbi_api_error *e)
{
    json_t *messages = NULL;
    const json_t *message;
    size_t i;
    char param[NBI_PARAM_MAX];
    nb_error err = {0};
    NB_TRY(nbi_field_array(&messages, body, "", "messages", e));
    if (!messages) return nbi_api_field(e, "messages", "is missing");
    if (json_array_size(messages) == 0) return nbi_api_field(e, "messages", "is empty");
    if (json_array_size(messages) > NBI_MESSAGES_MAX) {
        return nbi_api_field(e, "messages", "%zu messages, at most %d", json_array_size(messages),
                             NBI_MESSAGES_MAX);
    }
    json_array_foreach(messages, i, message) NB_TRY(check_content(message, i, e));
    nb_status status = nbi_chat_normalise(messages, &err);
    if (status != NB_OK) return nbi_api_from(e, status, &err, place_of(param, err.text));
    *out = json_incref(messages);
    return NB_OK;
}

/* ---------------------------------------------------------------- tools and template arguments */

static nb_status check_tool(const json_t *tool, size_t i, nbi_api_error *e)
{
    char param[NBI_PARAM_MAX], prefix[NBI_PARAM_MAX];
    json_t *function = NULL, *parameters = NULL;
    const char *name = NULL, *description = NULL, *type = "function";
    snprintf(param, sizeof param, "tools[%zu]", i);
    snprintf(prefix, sizeof prefix, "tools[%zu].", i);
    if (!json_is_object(tool)) {
        return nbi_api_field(e, param, "expected an object, found %s", nbi_json_kind(tool));
    }
    NB_TRY(nbi_field_str(&type, tool, prefix, "type", e));
    if (strcmp(type, "function") != 0) {
        snprintf(param, sizeof param, "tools[%zu].type", i);
        return nbi_api_field(e, param, "\"%.64s\" is not supported, expected \"function\"", type);
    }
    NB_TRY(nbi_field_object(&function, tool, prefix, "function", e));
    snprintf(param, sizeof param, "tools[%zu].function", i);
    if (!function) return nbi_api_field(e, param, "is missing");
    snprintf(prefix, sizeof prefix, "tools[%zu].function.", i);
    NB_TRY(nbi_field_str(&name, function, prefix, "name", e));
    if (!name || !name[0]) return nbi_api_field(e, param, "the function has no \"name\"");
    NB_TRY(nbi_field_str(&description, function, prefix, "description", e));
    return nbi_field_object(&parameters, function, prefix, "parameters", e);
}

/* The template sees the tools unless tool_choice is "none". */
static nb_status read_tools(json_t **out, const json_t *body, nbi_api_error *e)
{
    json_t *tools = NULL;
    const json_t *tool;
    nbi_tool_choice choice;
    nb_error err = {0};
    char field[96];
    size_t i;
    NB_TRY(nbi_field_array(&tools, body, "", "tools", e));
    json_array_foreach(tools, i, tool) NB_TRY(check_tool(tool, i, e));
    nb_status status = nbi_tool_choice_read(&choice, body, field, &err);
    if (status != NB_OK) return nbi_api_from(e, status, &err, field);
    if (choice.mode != NBI_TOOL_CHOICE_NONE) *out = json_incref(choice.tools);
    return NB_OK;
}

/* {"type": "enabled" | "disabled"}, the switch of the vendor's own service. */
static nb_status read_thinking(json_t *kwargs, const json_t *body, nbi_api_error *e)
{
    json_t *thinking = NULL;
    const char *type = NULL;
    NB_TRY(nbi_field_object(&thinking, body, "", "thinking", e));
    if (!thinking) return NB_OK;
    NB_TRY(nbi_field_str(&type, thinking, "thinking.", "type", e));
    if (!type) return NB_OK;
    bool on = strcmp(type, "enabled") == 0;
    if (!on && strcmp(type, "disabled") != 0) {
        return nbi_api_field(e, "thinking.type",
                             "\"%.64s\" is unknown, expected enabled or disabled", type);
    }
    return json_object_set_new(kwargs, "enable_thinking", json_boolean(on)) == 0 ? NB_OK
                                                                                 : NO_MEMORY(e);
}

/* From the general to the particular: what comes later wins. */
static nb_status read_kwargs(json_t *kwargs, const json_t *body, nbi_api_error *e)
{
    json_t *given = NULL;
    const char *effort = NULL;
    bool thinking = true;
    NB_TRY(nbi_field_str(&effort, body, "", "reasoning_effort", e));
    if (effort && json_object_set_new(kwargs, "reasoning_effort", json_string(effort)) != 0) {
        return NO_MEMORY(e);
    }
    if (effort && strcmp(effort, "none") == 0 &&
        json_object_set_new(kwargs, "enable_thinking", json_false()) != 0) {
        return NO_MEMORY(e);
    }
    NB_TRY(read_thinking(kwargs, body, e));
    NB_TRY(nbi_field_bool(&thinking, body, "", "enable_thinking", e));
    if (nbi_field(body, "enable_thinking") &&
        json_object_set_new(kwargs, "enable_thinking", json_boolean(thinking)) != 0) {
        return NO_MEMORY(e);
    }
    NB_TRY(nbi_field_object(&given, body, "", "chat_template_kwargs", e));
    if (!given) return NB_OK;
    NB_TRY(nbi_field_bool(&thinking, given, "chat_template_kwargs.", "enable_thinking", e));
    return json_object_update(kwargs, given) == 0 ? NB_OK : NO_MEMORY(e);
}

/* vLLM's: what the template shows beside the messages. */
static nb_status read_documents(json_t **out, const json_t *body, nbi_api_error *e)
{
    json_t *documents = NULL;
    const json_t *document;
    size_t i;
    NB_TRY(nbi_field_array(&documents, body, "", "documents", e));
    json_array_foreach(documents, i, document)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "documents[%zu]", i);
        if (json_is_object(document)) continue;
        return nbi_api_field(e, param, "expected an object, found %s", nbi_json_kind(document));
    }
    if (json_array_size(documents)) *out = json_incref(documents);
    return NB_OK;
}

static nb_status read_template(json_t **out, const json_t *body, nbi_api_error *e)
{
    const char *text = NULL;
    NB_TRY(nbi_field_str(&text, body, "", "chat_template", e));
    if (!text) return NB_OK;
    size_t n = strlen(text);
    if (n == 0 || n > NBI_CHAT_TEMPLATE_MAX) {
        return nbi_api_field(e, "chat_template", "has %zu bytes, expected 1 to %d", n,
                             NBI_CHAT_TEMPLATE_MAX);
    }
    *out = json_incref(json_object_get(body, "chat_template"));
    return NB_OK;
}

/* Fields of chat requests whose effect is not built; ignoring them would change the answer. */
static nb_status refuse_unsupported(const json_t *body, nbi_api_error *e)
{
    static const char *const values[] = {"functions", "function_call", "audio"};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        if (nbi_field(body, values[i])) {
            return nbi_api_field(e, values[i], "not supported by this server");
        }
    }
    return NB_OK;
}

/* continue_final_message: the answer goes on with the last message, which no generation prompt may
 * follow. */
static nb_status read_ending(bool *generate, bool *go_on, const json_t *body,
                             const json_t *messages, nbi_api_error *e)
{
    bool special = false; /* templates write what they need; no token is added */
    NB_TRY(nbi_field_bool(generate, body, "", "add_generation_prompt", e));
    NB_TRY(nbi_field_bool(go_on, body, "", "continue_final_message", e));
    NB_TRY(nbi_field_bool(&special, body, "", "add_special_tokens", e));
    if (!*go_on) return NB_OK;
    if (*generate && nbi_field(body, "add_generation_prompt")) {
        return nbi_api_field(e, "continue_final_message",
                             "not allowed together with \"add_generation_prompt\"");
    }
    *generate = false;
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const char *role = json_string_value(json_object_get(last, "role"));
    if (strcmp(role ? role : "", "assistant") == 0 && !json_object_get(last, "tool_calls")) {
        return NB_OK;
    }
    return nbi_api_field(e, "continue_final_message",
                         "the last message is no text of the assistant");
}

nb_status nbi_chat_request_read(json_t **out, const json_t *body, nbi_api_error *e)
{
    nb_status status;
    json_t *messages = NULL, *tools = NULL, *kwargs = json_object(), *request = NULL;
    json_t *documents = NULL, *tmpl = NULL;
    bool generate = true, go_on = false;
    if (!kwargs) return NO_MEMORY(e);
    NB_TRY_OR(status, read_messages(&messages, body, e), done);
    NB_TRY_OR(status, read_tools(&tools, body, e), done);
    NB_TRY_OR(status, read_kwargs(kwargs, body, e), done);
    NB_TRY_OR(status, read_ending(&generate, &go_on, body, messages, e), done);
    NB_TRY_OR(status, read_documents(&documents, body, e), done);
    NB_TRY_OR(status, read_template(&tmpl, body, e), done);
    NB_TRY_OR(status, refuse_unsupported(body, e), done);
    request = json_pack("{sO, sO?, sO?, sO?, sO, sb, sb}", "messages", messages, "tools", tools,
                        "documents", documents, "chat_template", tmpl, "chat_template_kwargs",
                        kwargs, "add_generation_prompt", generate, "continue_final_message", go_on);
    if (!request) status = NO_MEMORY(e);
done:
    json_decref(messages);
    json_decref(tools);
    json_decref(documents);
    json_decref(tmpl);
    json_decref(kwargs);
    if (status == NB_OK) *out = request;
    return status;
}
