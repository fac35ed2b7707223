/* The one form of chat messages that templates see (see chat.h). */
#include <string.h>

#include "base/json.h"
#include "text/chat.h"

#define PLACE_MAX 96

static nb_status no_memory(nb_error *err)
{
    return nbi_fail(err, NB_NO_MEMORY, "out of memory for chat messages");
}

static nb_status set_new(json_t *obj, const char *key, json_t *value, nb_error *err)
{
    return value && json_object_set_new(obj, key, value) == 0 ? NB_OK : no_memory(err);
}

static nb_status normalise_role(json_t *message, const char *place, nb_error *err)
{
    static const char *const known[] = {"system", "user", "assistant", "tool"};
    const char *role = json_string_value(json_object_get(message, "role"));
    if (!role) return nbi_fail(err, NB_INVALID, "%s.role is missing or not a string", place);
    if (strcmp(role, "developer") == 0) return set_new(message, "role", json_string("system"), err);
    if (strcmp(role, "function") == 0) return set_new(message, "role", json_string("tool"), err);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(role, known[i]) == 0) return NB_OK;
    return nbi_fail(
        err, NB_INVALID,
        "%s.role is \"%.32s\", expected system, developer, user, assistant, tool or function",
        place, role);
}

static nb_status add_part(nbi_buf *text, const json_t *part, size_t index, const char *place,
                          nb_error *err)
{
    const json_t *string = part;
    bool refusal = false; /* as OpenAI's API has those of the assistant */
    if (json_is_object(part)) {
        const char *type = json_string_value(json_object_get(part, "type"));
        if (!type)
            return nbi_fail(err, NB_INVALID, "%s.content[%zu].type is missing or not a string",
                            place, index);
        refusal = strcmp(type, "refusal") == 0;
        if (!refusal && strcmp(type, "text") != 0 && strcmp(type, "input_text") != 0 &&
            strcmp(type, "output_text") != 0)
            return nbi_fail(err, NB_INVALID,
                            "%s.content[%zu].type is \"%.32s\"; this model reads text only", place,
                            index, type);
        string = json_object_get(part, refusal ? "refusal" : "text");
    }
    if (!json_is_string(string))
        return nbi_fail(err, NB_INVALID, "%s.content[%zu].%s is missing or not a string", place,
                        index, refusal ? "refusal" : "text");
    return nbi_buf_add(text, json_string_value(string), json_string_length(string)) == NB_OK
               ? NB_OK
               : no_memory(err);
}

static nb_status normalise_content(json_t *message, const char *place, nb_error *err)
{
    const json_t *content = json_object_get(message, "content");
    if (json_is_string(content)) return NB_OK;
    if (!content || json_is_null(content)) return set_new(message, "content", json_string(""), err);
    if (!json_is_array(content))
        return nbi_fail(err, NB_INVALID, "%s.content is neither a string, a list of parts nor null",
                        place);
    nbi_buf text = {0};
    nb_status st = NB_OK;
    for (size_t i = 0; i < json_array_size(content) && st == NB_OK; i++)
        st = add_part(&text, json_array_get(content, i), i, place, err);
    if (st == NB_OK)
        st = set_new(message, "content", json_stringn_nocheck(text.data ? text.data : "", text.len),
                     err);
    nbi_buf_free(&text);
    return st;
}

static nb_status normalise_reasoning(json_t *message, const char *place, nb_error *err)
{
    json_t *reasoning = json_object_get(message, "reasoning");
    const json_t *content = json_object_get(message, "reasoning_content");
    if (reasoning && (!content || json_is_null(content)) &&
        json_object_set(message, "reasoning_content", reasoning) != 0)
        return no_memory(err);
    if (reasoning) (void)json_object_del(message, "reasoning");
    content = json_object_get(message, "reasoning_content");
    if (json_is_null(content)) /* false for NULL */
        (void)json_object_del(message, "reasoning_content");
    else if (content && !json_is_string(content))
        return nbi_fail(err, NB_INVALID, "%s.reasoning_content is neither a string nor null",
                        place);
    return NB_OK;
}

static nb_status normalise_call(json_t *call, const char *place, nb_error *err)
{
    json_t *function = json_object_get(call, "function");
    if (!json_is_object(function))
        return nbi_fail(err, NB_INVALID, "%s.function is missing or not an object", place);
    if (!json_is_string(json_object_get(function, "name")))
        return nbi_fail(err, NB_INVALID, "%s.function.name is missing or not a string", place);
    const json_t *arguments = json_object_get(function, "arguments");
    if (json_is_object(arguments)) return NB_OK;
    if (!arguments || json_is_null(arguments) ||
        (json_is_string(arguments) && json_string_length(arguments) == 0))
        return set_new(function, "arguments", json_object(), err);
    if (!json_is_string(arguments))
        return nbi_fail(err, NB_INVALID, "%s.function.arguments is neither a string nor an object",
                        place);
    char name[PLACE_MAX + 32];
    json_t *parsed = NULL;
    snprintf(name, sizeof name, "%s.function.arguments", place);
    nb_status st = nbi_json_parse_mended(&parsed, json_string_value(arguments),
                                         json_string_length(arguments), name, err);
    if (st == NB_NO_MEMORY) return st;
    if (st != NB_OK) return nbi_fail_prefix(err, NB_INVALID, "not a JSON object");
    if (!json_is_object(parsed)) {
        json_decref(parsed);
        return nbi_fail(err, NB_INVALID, "%s is JSON, but not an object", name);
    }
    return set_new(function, "arguments", parsed, err);
}

static nb_status normalise_calls(json_t *message, const char *place, nb_error *err)
{
    json_t *calls = json_object_get(message, "tool_calls");
    if (!calls) return NB_OK;
    if (json_is_null(calls) || (json_is_array(calls) && json_array_size(calls) == 0)) {
        (void)json_object_del(message, "tool_calls");
        return NB_OK;
    }
    if (!json_is_array(calls))
        return nbi_fail(err, NB_INVALID, "%s.tool_calls is not a list", place);
    for (size_t i = 0; i < json_array_size(calls); i++) {
        char inner[PLACE_MAX];
        snprintf(inner, sizeof inner, "%s.tool_calls[%zu]", place, i);
        NB_TRY(normalise_call(json_array_get(calls, i), inner, err));
    }
    return NB_OK;
}

nb_status nbi_chat_normalise(json_t *messages, nb_error *err)
{
    if (!json_is_array(messages) || json_array_size(messages) == 0)
        return nbi_fail(err, NB_INVALID, "messages is missing, not a list, or empty");
    for (size_t i = 0; i < json_array_size(messages); i++) {
        json_t *message = json_array_get(messages, i);
        char place[48];
        snprintf(place, sizeof place, "messages[%zu]", i);
        if (!json_is_object(message))
            return nbi_fail(err, NB_INVALID, "%s is not an object", place);
        NB_TRY(normalise_role(message, place, err));
        NB_TRY(normalise_content(message, place, err));
        NB_TRY(normalise_reasoning(message, place, err));
        NB_TRY(normalise_calls(message, place, err));
    }
    return NB_OK;
}
