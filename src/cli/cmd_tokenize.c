/* nibble tokenize: text to ids and back, and chat requests to prompts, with a model's tokenizer and
 * template alone. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/json.h"
#include "cli/cli.h"
#include "text/chat.h"

#define INPUT_MAX     ((size_t)1 << 30)
#define BENCH_REPEATS 5

static const nbi_command command = {
    .name = "tokenize",
    .summary = "Text to token ids and back, with a model's tokenizer.",
    .usage = "--model DIR [--text TEXT] [--decode | --chat | --bench] [OPTIONS]",
    .text =
        "Reads TEXT, or standard input to its end, and prints the ids on one line. With --decode "
        "the input is\nids, separated by white space or as a JSON list, and the text is printed. "
        "With --chat it is a JSON\nobject with messages (and tools, add_generation_prompt, "
        "chat_template_kwargs): the prompt that the\nmodel's chat template makes of it is printed, "
        "or its ids with --json. No token is ever added.\n\n"
        "With --lines every line of the input is a JSON value of its own (a string, a list of ids, "
        "a request)\nand gives one line of JSON; a line that fails gives {\"error\": ...} and the "
        "rest goes on.\n\n"
        "With --bench the input is encoded five times by one thread, and the speed is printed.\n\n"
        "Example: nibble tokenize --model DIR --text 'Once upon a time'\n"
        "         nibble tokenize --model DIR --text '9707 11 1879' --decode",
};

typedef struct tokenize {
    const char *model, *text;
    bool decode, chat, bench, json, no_special, lines;
    nbi_tokenizer *tokenizer;
    nbi_template *tmpl;
    nbi_buf input, out;
} tokenize;

static nb_status no_memory(nb_error *err)
{
    return nbi_fail(err, NB_NO_MEMORY, "out of memory");
}

/* ---------------------------------------------------------------- output */

static nb_status add_ids(nbi_buf *out, const nbi_ids *ids, bool json)
{
    if (json) NB_TRY(nbi_buf_addf(out, "["));
    for (size_t i = 0; i < ids->len; i++)
        NB_TRY(nbi_buf_addf(out, "%s%d", !i ? "" : json ? ", " : " ", ids->data[i]));
    return json ? nbi_buf_addf(out, "]") : NB_OK;
}

/* {"ids": [...], "tokens": [...]}: tokens as text, broken characters as U+FFFD. */
static nb_status add_encoded(const tokenize *t, nbi_buf *out, const nbi_ids *ids)
{
    NB_TRY(nbi_buf_addf(out, "\"ids\": "));
    NB_TRY(add_ids(out, ids, true));
    if (t->lines) return NB_OK;
    NB_TRY(nbi_buf_addf(out, ", \"tokens\": ["));
    for (size_t i = 0; i < ids->len; i++) {
        size_t n = 0;
        const char *bytes = nbi_token_bytes(t->tokenizer, ids->data[i], &n);
        if (i) NB_TRY(nbi_buf_addf(out, ", "));
        NB_TRY(nbi_json_quote(out, bytes ? bytes : "", n));
    }
    return nbi_buf_addf(out, "]");
}

/* ---------------------------------------------------------------- one input */

static nb_status encode_one(tokenize *t, const char *text, size_t n, nb_error *err)
{
    nbi_ids ids = {0};
    nb_status st = nbi_tokenizer_encode(t->tokenizer, text, n, !t->no_special, &ids, err);
    if (st == NB_OK) {
        nb_status put = t->json ? nbi_buf_addf(&t->out, "{") : NB_OK;
        if (put == NB_OK)
            put = t->json ? add_encoded(t, &t->out, &ids) : add_ids(&t->out, &ids, false);
        if (put == NB_OK) put = nbi_buf_addf(&t->out, t->json ? "}\n" : "\n");
        if (put != NB_OK) st = no_memory(err);
    }
    nbi_ids_free(&ids);
    return st;
}

static nb_status decode_one(tokenize *t, const nbi_ids *ids, nb_error *err)
{
    char *text = NULL;
    size_t n = 0;
    NB_TRY(nbi_tokenizer_decode(t->tokenizer, ids->data, ids->len, t->no_special, &text, &n, err));
    nb_status st = NB_OK;
    if (t->json) {
        st = nbi_buf_addf(&t->out, "{\"text\": ");
        if (st == NB_OK) st = nbi_json_quote(&t->out, text, n);
        if (st == NB_OK) st = nbi_buf_addf(&t->out, "}\n");
    } else {
        st = nbi_buf_add(&t->out, text, n);
    }
    nbi_free(text);
    return st == NB_OK ? NB_OK : no_memory(err);
}

static nb_status chat_one(tokenize *t, const json_t *request, nb_error *err)
{
    nbi_chat_prompt prompt = {0};
    nbi_chat_options options = {.reasoning = NBI_REASONING_GLM45,
                                .parse_special_in_content = json_is_true(
                                    json_object_get(request, "parse_special_in_content"))};
    NB_TRY(nbi_chat_encode(&prompt, t->tmpl, t->tokenizer, request, &options, err));
    nb_status st = NB_OK;
    if (t->json) {
        st = nbi_buf_addf(&t->out, "{\"text\": ");
        if (st == NB_OK) st = nbi_json_quote(&t->out, prompt.text.data, prompt.text.len);
        if (st == NB_OK)
            st = nbi_buf_addf(&t->out, ", \"thinking_open\": %s, ",
                              prompt.thinking_open ? "true" : "false");
        if (st == NB_OK) st = add_encoded(t, &t->out, &prompt.ids);
        if (st == NB_OK) st = nbi_buf_addf(&t->out, "}\n");
    } else {
        st = nbi_buf_add(&t->out, prompt.text.data, prompt.text.len);
    }
    nbi_chat_prompt_free(&prompt);
    return st == NB_OK ? NB_OK : no_memory(err);
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Encodes the input BENCH_REPEATS times and prints 10^6 bytes per second of CPU time. */
static nb_status bench(tokenize *t, nb_error *err)
{
    double rate[BENCH_REPEATS] = {0};
    nbi_ids ids = {0};
    nb_status st = NB_OK;
    if (t->input.len == 0) return nbi_fail(err, NB_INVALID, "--bench needs text, found none");
    for (int i = 0; i < BENCH_REPEATS && st == NB_OK; i++) {
        double begin = cpu_seconds();
        ids.len = 0;
        st = nbi_tokenizer_encode(t->tokenizer, t->input.data, t->input.len, !t->no_special, &ids,
                                  err);
        double r = 1e-6 * (double)t->input.len / (cpu_seconds() - begin);
        int at = i;
        for (; at > 0 && rate[at - 1] > r; at--) rate[at] = rate[at - 1];
        rate[at] = r;
    }
    nb_status put = NB_OK;
    if (st == NB_OK && t->json)
        put = nbi_buf_addf(&t->out,
                           "{\"bytes\": %zu, \"tokens\": %zu, \"mb_per_s\": %.4g, "
                           "\"mb_per_s_min\": %.4g, \"mb_per_s_max\": %.4g}\n",
                           t->input.len, ids.len, rate[BENCH_REPEATS / 2], rate[0],
                           rate[BENCH_REPEATS - 1]);
    else if (st == NB_OK)
        put = nbi_buf_addf(&t->out, "%zu bytes, %zu tokens, %.4g MB/s on one core (%.4g to %.4g)\n",
                           t->input.len, ids.len, rate[BENCH_REPEATS / 2], rate[0],
                           rate[BENCH_REPEATS - 1]);
    if (put != NB_OK) st = no_memory(err);
    nbi_ids_free(&ids);
    return st;
}

/* ---------------------------------------------------------------- input forms */

static nb_status ids_from_json(nbi_ids *ids, const json_t *list, nb_error *err)
{
    if (!json_is_array(list)) return nbi_fail(err, NB_INVALID, "expected a JSON list of ids");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *id = json_array_get(list, i);
        json_int_t value = json_integer_value(id);
        if (!json_is_integer(id) || value < 0 || value > INT32_MAX)
            return nbi_fail(err, NB_INVALID, "entry %zu of the list is not a token id", i);
        if (nbi_ids_add(ids, (int32_t)value) != NB_OK) return no_memory(err);
    }
    return NB_OK;
}

static nb_status ids_from_words(nbi_ids *ids, const char *text, nb_error *err)
{
    for (const char *p = text + strspn(text, " \t\r\n"); *p; p += strspn(p, " \t\r\n")) {
        char *end;
        errno = 0;
        long long id = strtoll(p, &end, 10);
        if (end == p || errno || id < 0 || id > INT32_MAX || (*end && !strchr(" \t\r\n", *end)))
            return nbi_fail(err, NB_INVALID, "\"%.32s\" is not a token id", p);
        if (nbi_ids_add(ids, (int32_t)id) != NB_OK) return no_memory(err);
        p = end;
    }
    return NB_OK;
}

/* One JSON value: what --lines has on each line, and --chat as a whole. */
static nb_status run_value(tokenize *t, const char *text, size_t n, nb_error *err)
{
    json_t *value = NULL;
    nbi_ids ids = {0};
    NB_TRY(nbi_json_parse(&value, text, n, "input", err));
    nb_status st;
    if (t->chat) {
        st = json_is_object(value) ? chat_one(t, value, err)
                                   : nbi_fail(err, NB_INVALID, "expected a JSON object");
    } else if (t->decode) {
        st = ids_from_json(&ids, value, err);
        if (st == NB_OK) st = decode_one(t, &ids, err);
    } else {
        st = json_is_string(value)
                 ? encode_one(t, json_string_value(value), json_string_length(value), err)
                 : nbi_fail(err, NB_INVALID, "expected a JSON string");
    }
    nbi_ids_free(&ids);
    json_decref(value);
    return st;
}

static nb_status run_whole(tokenize *t, nb_error *err)
{
    nbi_ids ids = {0};
    const char *text = t->input.data ? t->input.data : "";
    if (!t->decode && !t->chat) return encode_one(t, text, t->input.len, err);
    if (t->chat || text[strspn(text, " \t\r\n")] == '[')
        return run_value(t, text, t->input.len, err);
    nb_status st = ids_from_words(&ids, text, err);
    if (st == NB_OK) st = decode_one(t, &ids, err);
    nbi_ids_free(&ids);
    return st;
}

static nb_status write_out(tokenize *t, nb_error *err)
{
    bool ok = fwrite(t->out.data, 1, t->out.len, stdout) == t->out.len;
    nbi_buf_clear(&t->out);
    return ok ? NB_OK : nbi_fail(err, NB_IO, "cannot write the result: %s", strerror(errno));
}

static nb_status run_lines(tokenize *t, nb_error *err)
{
    const char *p = t->input.data, *end = p + t->input.len;
    while (p < end) {
        const char *newline = memchr(p, '\n', (size_t)(end - p)), *stop = newline ? newline : end;
        nb_error line_error;
        if (stop > p && run_value(t, p, (size_t)(stop - p), &line_error) != NB_OK) {
            nb_status st = nbi_buf_addf(&t->out, "{\"error\": ");
            if (st == NB_OK) st = nbi_json_quote(&t->out, line_error.text, strlen(line_error.text));
            if (st == NB_OK) st = nbi_buf_addf(&t->out, "}\n");
            if (st != NB_OK) return no_memory(err);
        }
        if (t->out.len) NB_TRY(write_out(t, err));
        p = stop + 1;
    }
    return NB_OK;
}

static nb_status read_input(tokenize *t, nb_error *err)
{
    char chunk[65536];
    size_t n;
    t->input.max = INPUT_MAX;
    if (t->text)
        return nbi_buf_add(&t->input, t->text, strlen(t->text)) == NB_OK ? NB_OK : no_memory(err);
    while ((n = fread(chunk, 1, sizeof chunk, stdin)) > 0) {
        nb_status st = nbi_buf_add(&t->input, chunk, n);
        if (st != NB_OK)
            return nbi_fail(err, st, "standard input: %s (at most %zu bytes are read)",
                            nb_status_text(st), INPUT_MAX);
    }
    return ferror(stdin) ? nbi_fail(err, NB_IO, "standard input: %s", strerror(errno)) : NB_OK;
}

static nb_status run(tokenize *t, nb_error *err)
{
    NB_TRY(nbi_tokenizer_open(&t->tokenizer, t->model, err));
    if (t->chat) NB_TRY(nbi_template_open(&t->tmpl, t->model, err));
    NB_TRY(read_input(t, err));
    if (t->lines) return t->input.len ? run_lines(t, err) : NB_OK;
    NB_TRY(t->bench ? bench(t, err) : run_whole(t, err));
    return write_out(t, err);
}

int nbi_cmd_tokenize(int argc, char **argv)
{
    tokenize t = {0};
    const nbi_opt options[] = {
        {"model", NBI_OPT_STRING, &t.model, "DIR", "folder with tokenizer.json", true},
        {"text", NBI_OPT_STRING, &t.text, "TEXT", "the input (default: standard input)", false},
        {"decode", NBI_OPT_FLAG, &t.decode, NULL, "ids to text", false},
        {"chat", NBI_OPT_FLAG, &t.chat, NULL, "chat request to prompt, through the chat template",
         false},
        {"bench", NBI_OPT_FLAG, &t.bench, NULL, "speed of encoding the input", false},
        {"json", NBI_OPT_FLAG, &t.json, NULL, "one JSON object on stdout", false},
        {"lines", NBI_OPT_FLAG, &t.lines, NULL,
         "one JSON value per line in, one JSON object per line out", false},
        {"no-special", NBI_OPT_FLAG, &t.no_special, NULL,
         "encoding: added tokens in the text are plain text;\ndecoding: special tokens give no "
         "text",
         false},
        {0},
    };
    int status = nbi_cli_parse(&command, options, argc, argv, NULL);
    if (status < 0 && t.decode + t.chat + t.bench > 1)
        status = nbi_cli_usage(&command, "give one of --decode, --chat and --bench");
    if (status < 0 && t.bench && t.lines)
        status = nbi_cli_usage(&command, "--bench takes the input as a whole, not --lines");
    if (status >= 0) return status;
    t.json = t.json || t.lines;
    nb_error err;
    nbi_cli_log_start(NB_LOG_WARN);
    nb_status st = run(&t, &err);
    nbi_buf_free(&t.input);
    nbi_buf_free(&t.out);
    nbi_template_close(&t.tmpl);
    nbi_tokenizer_close(&t.tokenizer);
    return st == NB_OK ? NBI_EXIT_OK : nbi_cli_fail(&command, &err);
}
