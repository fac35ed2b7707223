/* One call from a chat request to prompt ids (see chat.h). */
#include <string.h>

#include "base/json.h"
#include "text/chat.h"
#include "text/chat_guard.h"

static nb_status no_memory(nb_error *err)
{
    return nbi_fail(err, NB_NO_MEMORY, "out of memory for a chat prompt");
}

void nbi_chat_prompt_free(nbi_chat_prompt *prompt)
{
    nbi_buf_free(&prompt->text);
    nbi_ids_free(&prompt->ids);
    memset(prompt, 0, sizeof *prompt);
}

/* A new object with the template's variables, messages in normal form. */
static nb_status make_context(json_t **out, const json_t *request, nb_error *err)
{
    static const char *const optional[] = {"tools", "documents"};
    const json_t *given = json_object_get(request, "messages");
    json_t *context = json_object(), *messages = json_deep_copy(given);
    const json_t *kwargs = json_object_get(request, "chat_template_kwargs");
    const json_t *prompt = json_object_get(request, "add_generation_prompt");
    bool copied = context && (messages || !given);
    nb_status st = copied ? nbi_chat_normalise(messages, err) : no_memory(err);
    if (st == NB_OK && kwargs && !json_is_null(kwargs) && !json_is_object(kwargs))
        st = nbi_fail(err, NB_INVALID, "chat_template_kwargs is not an object");
    if (st == NB_OK && prompt && !json_is_null(prompt) && !json_is_boolean(prompt))
        st = nbi_fail(err, NB_INVALID, "add_generation_prompt is not a boolean");
    bool ok = st == NB_OK && json_object_set(context, "messages", messages) == 0;
    for (size_t i = 0; ok && i < sizeof optional / sizeof *optional; i++) {
        json_t *value = json_object_get(request, optional[i]);
        bool empty = !value || (json_is_array(value) && json_array_size(value) == 0);
        ok = json_object_set_new(context, optional[i], empty ? json_null() : json_incref(value)) ==
             0;
    }
    ok = ok && json_object_set_new(context, "add_generation_prompt",
                                   json_boolean(!json_is_false(prompt))) == 0;
    if (ok && json_is_object(kwargs))
        ok = json_object_update(context, (json_t *)(uintptr_t)kwargs) == 0;
    if (st == NB_OK && !ok) st = no_memory(err);
    json_decref(messages);
    if (st == NB_OK)
        *out = context;
    else
        json_decref(context);
    return st;
}

static nb_status render(nbi_buf *out, const nbi_template *tmpl, const json_t *context,
                        nb_error *err)
{
    char *text = nbi_json_dumps(context);
    if (!text) return no_memory(err);
    nb_status st = nbi_template_render(tmpl, text, strlen(text), out, err);
    nbi_free(text);
    return st == NB_TOO_LARGE ? NB_INVALID : st;
}

/* [*begin, *end) of s without the white space around. */
static void trim(const char *s, size_t *begin, size_t *end)
{
    static const char space[] = " \t\r\n";
    while (*begin < *end && memchr(space, s[*begin], sizeof space - 1)) ++*begin;
    while (*begin < *end && memchr(space, s[*end - 1], sizeof space - 1)) --*end;
}

/* Where the last occurrence of word[0, n) in text ends; 0 when there is none. */
static size_t last_end(const nbi_buf *text, const char *word, size_t n)
{
    for (size_t at = n && text->len >= n ? text->len - n + 1 : 0; at-- > 0;) {
        if (memcmp(text->data + at, word, n) == 0) return at + n;
    }
    return 0;
}

/* Ends the rendered prompt behind the content of the last message. Templates may take thinking out
 * of it and white space from its ends. */
static nb_status cut_behind_final(nbi_buf *rendered, const json_t *context, nb_error *err)
{
    const json_t *messages = json_object_get(context, "messages");
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const char *content = json_string_value(json_object_get(last, "content"));
    size_t n = content ? strlen(content) : 0, begin = 0, end = n;
    const char *behind_thinking = NULL;
    for (const char *at = content; at && (at = strstr(at, "</think>")); behind_thinking = at)
        at += 8;
    if (content) trim(content, &begin, &end);
    size_t cut = n ? last_end(rendered, content + begin, end - begin) : 0;
    if (!cut && behind_thinking) {
        begin = (size_t)(behind_thinking - content);
        end = n;
        trim(content, &begin, &end);
        cut = last_end(rendered, content + begin, end - begin);
    }
    if (!cut) {
        return nbi_fail(err, NB_INVALID,
                        "messages[%zu].content is empty or not shown by the chat template, so that "
                        "continue_final_message cannot go on with it",
                        json_array_size(messages) - 1);
    }
    /* white space at the end stays where the template has kept it */
    size_t kept = n - end;
    if (rendered->len - cut >= kept && memcmp(rendered->data + cut, content + end, kept) == 0) {
        cut += kept;
    }
    rendered->len = cut;
    rendered->data[cut] = '\0';
    return NB_OK;
}

/* Replaces messages and tools of the context by guarded copies. */
static nb_status guard_context(nbi_guard *guard, json_t *context, nb_error *err)
{
    static const char *const members[] = {"messages", "tools", "documents"};
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        json_t *value = json_object_get(context, members[i]);
        json_t *copy = value ? nbi_guard_apply(guard, value, false) : NULL;
        if (value && (!copy || json_object_set_new(context, members[i], copy) != 0))
            return no_memory(err);
    }
    return NB_OK;
}

static nb_status encode_guarded(nbi_chat_prompt *prompt, const nbi_template *tmpl,
                                const nbi_tokenizer *tokenizer, json_t *context,
                                const nbi_chat_options *options, nb_error *err)
{
    nbi_guard guard;
    nbi_buf rendered = {.max = NBI_TEMPLATE_OUTPUT_BYTES};
    nbi_ranges ranges = {0};
    bool tools = json_array_size(json_object_get(context, "tools")) > 0;
    char *plain = nbi_json_dumps(context);
    if (!plain) return no_memory(err);
    nb_status st = nbi_guard_init(&guard, tokenizer, plain, strlen(plain),
                                  nbi_template_source(tmpl, tools), err);
    nbi_free(plain);
    if (st != NB_OK) return st;
    st = guard_context(&guard, context, err);
    if (st == NB_OK) st = render(&rendered, tmpl, context, err);
    if (st == NB_OK && options->continue_final) st = cut_behind_final(&rendered, context, err);
    if (st == NB_OK) {
        prompt->thinking_open =
            nbi_reasoning_prompt_open(options->reasoning, rendered.data, rendered.len);
        if (nbi_guard_undo(&guard, &rendered, &prompt->text, &ranges) != NB_OK) st = no_memory(err);
    }
    if (st == NB_OK)
        st = nbi_tokenizer_encode_guarded(tokenizer, prompt->text.data, prompt->text.len,
                                          ranges.data, ranges.n, &prompt->ids, err);
    nbi_free(ranges.data);
    nbi_buf_free(&rendered);
    nbi_guard_deinit(&guard);
    return st;
}

static nb_status encode_plain(nbi_chat_prompt *prompt, const nbi_template *tmpl,
                              const nbi_tokenizer *tokenizer, const json_t *context,
                              const nbi_chat_options *options, nb_error *err)
{
    NB_TRY(render(&prompt->text, tmpl, context, err));
    if (options->continue_final) NB_TRY(cut_behind_final(&prompt->text, context, err));
    prompt->thinking_open =
        nbi_reasoning_prompt_open(options->reasoning, prompt->text.data, prompt->text.len);
    return nbi_tokenizer_encode(tokenizer, prompt->text.data, prompt->text.len, true, &prompt->ids,
                                err);
}

nb_status nbi_chat_encode(nbi_chat_prompt *prompt, const nbi_template *tmpl,
                          const nbi_tokenizer *tokenizer, const json_t *request,
                          const nbi_chat_options *options, nb_error *err)
{
    json_t *context = NULL;
    nbi_chat_prompt result = {.ids.max = options->max_ids};
    NB_TRY(make_context(&context, request, err));
    nb_status st = options->parse_special_in_content
                       ? encode_plain(&result, tmpl, tokenizer, context, options, err)
                       : encode_guarded(&result, tmpl, tokenizer, context, options, err);
    json_decref(context);
    if (st == NB_OK) {
        nbi_chat_prompt_free(prompt);
        *prompt = result;
    } else {
        nbi_chat_prompt_free(&result);
    }
    return st;
}
