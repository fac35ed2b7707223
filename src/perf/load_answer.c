/* Reads answers as SGLang, vLLM, llama.cpp and OpenAI write them. */
#include "perf/load_answer.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"

enum {
    MAX_BODY = 64 << 20,    /* bytes of an event or of a whole answer */
    MAX_ERROR_BODY = 65536, /* bytes kept of an answer that is none */
};

const char *nbi_load_failure_name(nbi_load_failure kind)
{
#define NAME(name, text) text,
    static const char *const names[] = {NBI_LOAD_FAILURES(NAME)};
#undef NAME
    return kind < NBI_LOAD_FAILURE_COUNT ? names[kind] : "?";
}

static void fail(nbi_load_answer *a, nbi_load_failure kind, const char *fmt, ...) NBI_PRINTF(3, 4);

/* The first failure counts. The sentence is one line of valid UTF-8. */
static void fail(nbi_load_answer *a, nbi_load_failure kind, const char *fmt, ...)
{
    if (a->failure) return;
    a->failure = kind;
    va_list args;
    va_start(args, fmt);
    vsnprintf(a->why, sizeof a->why, fmt, args);
    va_end(args);
    size_t n = strlen(a->why);
    for (size_t i = 0; i < n;) {
        uint32_t code;
        size_t taken = nbi_utf8_next(a->why + i, n - i, &code);
        if (code == NBI_UTF8_BAD || code < ' ') memset(a->why + i, ' ', taken);
        i += taken;
    }
}

/* ---- JSON */

/* What an error body says, in any of the usual shapes; NULL: nothing of that kind. */
static const char *error_message(const json_t *root)
{
    const json_t *error = json_object_get(root, "error");
    if (json_is_string(error)) return json_string_value(error);
    const json_t *holder = json_is_object(error) ? error : root;
    const char *message = json_string_value(json_object_get(holder, "message"));
    return message ? message : json_string_value(json_object_get(root, "detail"));
}

static uint32_t count_of(const json_t *obj, const char *key)
{
    json_int_t v = json_integer_value(json_object_get(obj, key));
    return v < 0 ? 0 : v > UINT32_MAX ? UINT32_MAX : (uint32_t)v;
}

static void read_usage(nbi_load_answer *a, const json_t *usage)
{
    if (!json_is_object(usage) || !json_is_integer(json_object_get(usage, "completion_tokens")))
        return;
    a->has_usage = true;
    a->input_tokens = count_of(usage, "prompt_tokens");
    a->output_tokens = count_of(usage, "completion_tokens");
    a->reasoning_tokens =
        count_of(json_object_get(usage, "completion_tokens_details"), "reasoning_tokens");
    if (!a->reasoning_tokens) a->reasoning_tokens = count_of(usage, "reasoning_tokens");
    a->cached_tokens = count_of(json_object_get(usage, "prompt_tokens_details"), "cached_tokens");
}

static bool has_output(const json_t *choice)
{
    static const char *const keys[] = {"content", "reasoning_content", "reasoning", "refusal",
                                       "tool_calls"};
    if (json_string_length(json_object_get(choice, "text"))) return true;
    const json_t *delta = json_object_get(choice, "delta");
    if (!delta) delta = json_object_get(choice, "message");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const json_t *v = json_object_get(delta, keys[i]);
        if (json_string_length(v) || json_array_size(v)) return true;
    }
    return false;
}

static void add_chunk(nbi_load_answer *a, uint64_t now)
{
    if (a->n_chunks++ == 0) {
        a->first_ns = a->last_ns = now;
        return;
    }
    if (a->n_gaps == a->gaps_cap) {
        uint32_t cap = a->gaps_cap ? a->gaps_cap * 2 : 64;
        float *more = nbi_realloc(a->gaps, cap * sizeof *more);
        if (!more) {
            fail(a, NBI_LOAD_OTHER, "out of memory for the times of %u chunks", a->n_chunks);
            return;
        }
        a->gaps = more;
        a->gaps_cap = cap;
    }
    a->gaps[a->n_gaps++] = (float)((double)(now - a->last_ns) * 1e-9);
    a->n_together += now == a->last_ns;
    a->last_ns = now;
}

/* One event or the whole body. */
static void read_json(nbi_load_answer *a, const char *text, size_t n, uint64_t now)
{
    json_t *root;
    nb_error err;
    if (nbi_json_parse(&root, text, n, a->sse ? "an event" : "the answer", &err) != NB_OK) {
        fail(a, NBI_LOAD_MALFORMED, "%s", err.text);
        return;
    }
    const json_t *error = json_object_get(root, "error"), *choices;
    choices = json_object_get(root, "choices");
    if ((error && !json_is_null(error)) ||
        (!choices && !strcmp("error", json_is_string(json_object_get(root, "object"))
                                          ? json_string_value(json_object_get(root, "object"))
                                          : ""))) {
        const char *message = error_message(root);
        fail(a, NBI_LOAD_SERVER, "%s", message ? message : "an error without a message");
    } else if (!json_is_object(root) || (!choices && !json_object_get(root, "usage"))) {
        fail(a, NBI_LOAD_MALFORMED, "%s without choices: %.80s", a->sse ? "an event" : "the answer",
             text);
    }
    bool output = false;
    size_t i;
    const json_t *choice;
    json_array_foreach(choices, i, choice)
    {
        output |= has_output(choice);
        a->finished |= json_is_string(json_object_get(choice, "finish_reason"));
    }
    if (a->sse && json_array_size(choices)) a->end_ns = now;
    if (output && a->sse) add_chunk(a, now);
    if (output && !a->sse) a->n_chunks = 1;
    read_usage(a, json_object_get(root, "usage"));
    json_decref(root);
}

/* ---- server-sent events */

static void end_event(nbi_load_answer *a, uint64_t now)
{
    nbi_buf *body = &a->body;
    if (!body->len) return;
    if (!strcmp(body->data, "[DONE]"))
        a->done = true;
    else
        read_json(a, body->data, body->len, now);
    nbi_buf_clear(body);
}

static nb_status take_line(nbi_load_answer *a, const char *line, size_t n, uint64_t now)
{
    if (n && line[n - 1] == '\r') n--;
    if (!n) {
        end_event(a, now);
        return NB_OK;
    }
    /* Comments (pings), "event:", "id:" and "retry:" carry no output. */
    if (n < 5 || memcmp(line, "data:", 5) != 0) return NB_OK;
    size_t skip = n > 5 && line[5] == ' ' ? 6 : 5;
    if (a->body.len) NB_TRY(nbi_buf_add(&a->body, "\n", 1));
    return nbi_buf_add(&a->body, line + skip, n - skip);
}

static nb_status feed_events(nbi_load_answer *a, const char *data, size_t n, uint64_t now)
{
    while (n && !a->failure) {
        const char *end = memchr(data, '\n', n);
        if (!end) return nbi_buf_add(&a->line, data, n);
        size_t len = (size_t)(end - data);
        if (a->line.len) {
            NB_TRY(nbi_buf_add(&a->line, data, len));
            NB_TRY(take_line(a, a->line.data, a->line.len, now));
            nbi_buf_clear(&a->line);
        } else {
            NB_TRY(take_line(a, data, len, now));
        }
        data += len + 1;
        n -= len + 1;
    }
    return NB_OK;
}

/* ---- the whole */

bool nbi_load_answer_feed(nbi_load_answer *a, const char *data, size_t n, uint64_t now)
{
    a->line.max = a->body.max = MAX_BODY;
    nb_status status = NB_OK;
    if (a->http != 200) {
        size_t room = a->body.len < MAX_ERROR_BODY ? MAX_ERROR_BODY - a->body.len : 0;
        status = nbi_buf_add(&a->body, data, n < room ? n : room);
    } else if (a->sse) {
        status = feed_events(a, data, n, now);
    } else {
        status = nbi_buf_add(&a->body, data, n);
        a->end_ns = now;
    }
    if (status == NB_TOO_LARGE)
        fail(a, NBI_LOAD_MALFORMED, "more than %d MiB without an end", MAX_BODY >> 20);
    else if (status != NB_OK)
        fail(a, NBI_LOAD_OTHER, "out of memory for the answer");
    return !a->failure;
}

static void end_refused(nbi_load_answer *a)
{
    json_t *root = NULL;
    const char *message = NULL;
    if (a->body.len && nbi_json_parse(&root, a->body.data, a->body.len, "body", NULL) == NB_OK)
        message = error_message(root);
    if (!message) message = a->body.len ? a->body.data : "(no body)";
    fail(a, NBI_LOAD_HTTP, "%.180s", message);
    json_decref(root);
}

void nbi_load_answer_end(nbi_load_answer *a, nbi_load_failure failure, const char *why,
                         uint64_t now)
{
    if (failure) {
        fail(a, failure, "%s", why);
    } else if (a->http != 200) {
        end_refused(a);
    } else if (a->sse) {
        /* The last line may lack its end. */
        if (a->line.len && take_line(a, a->line.data, a->line.len, now) != NB_OK)
            fail(a, NBI_LOAD_OTHER, "out of memory for the answer");
        end_event(a, now);
        if (!a->done && !a->finished)
            fail(a, NBI_LOAD_CUT,
                 "the stream ended after %u chunks without finish_reason and [DONE]", a->n_chunks);
    } else if (!a->body.len) {
        fail(a, NBI_LOAD_MALFORMED, "an empty body");
    } else if (a->raw) {
        return;
    } else {
        read_json(a, a->body.data, a->body.len, now);
    }
    if (!a->end_ns) a->end_ns = now;
    if (!a->has_usage) a->output_tokens = a->n_chunks;
    nbi_buf_free(&a->line);
    nbi_buf_free(&a->body);
}

nb_status nbi_load_answer_fail(const nbi_load_answer *a, const char *what, nb_error *err)
{
    char status[16] = "";
    if (a->failure == NBI_LOAD_HTTP) snprintf(status, sizeof status, " %u", a->http);
    return nbi_fail(err, NB_IO, "%s failed: %s%s: %s", what, nbi_load_failure_name(a->failure),
                    status, a->why);
}

void nbi_load_answer_free(nbi_load_answer *a)
{
    nbi_buf_free(&a->line);
    nbi_buf_free(&a->body);
    nbi_free(a->gaps);
    *a = (nbi_load_answer){0};
}
