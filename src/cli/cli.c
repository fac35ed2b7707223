/* Options, messages and progress of the subcommands. */
#include "cli/cli.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

#define OPTIONS_MAX 128u /* of a command */

/* ---- numbers */

/* The factor of a suffix; 0 for an unknown one. */
static double factor_of(const char *s)
{
    static const char letters[] = "KMGT";
    if (!*s) return 1;
    const char *at = strchr(letters, *s >= 'a' && *s <= 'z' ? *s - 'a' + 'A' : *s);
    bool binary = s[1] == 'i';
    if (!at || s[1 + binary]) return 0;
    double factor = 1;
    for (const char *p = letters; p <= at; p++) factor *= binary ? 1024 : 1000;
    return factor;
}

nb_status nbi_cli_number(uint64_t *out, const char *text, nb_error *err)
{
    char *end;
    errno = 0;
    if (*text < '0' || *text > '9')
        return nbi_fail(err, NB_INVALID, "\"%s\" is not a number", text);
    uint64_t whole = strtoull(text, &end, 10);
    double factor = factor_of(end);
    if (errno) return nbi_fail(err, NB_TOO_LARGE, "\"%s\" is too large", text);
    if (*end == 0) {
        *out = whole;
        return NB_OK;
    }
    double v = (double)whole;
    if (*end == '.') {
        v = strtod(text, &end);
        factor = *end ? factor_of(end) : 0;
    }
    if (factor == 0)
        return nbi_fail(err, NB_INVALID,
                        "\"%s\" is not a number (suffixes: K, M, G, T, Ki, Mi, Gi, Ti)", text);
    if (v * factor >= 0x1p64) return nbi_fail(err, NB_TOO_LARGE, "\"%s\" is too large", text);
    *out = (uint64_t)(v * factor + 0.5);
    return NB_OK;
}

/* The same, with an optional B at the end. */
static nb_status parse_bytes(uint64_t *out, const char *text, nb_error *err)
{
    char copy[32];
    size_t n = strlen(text);
    if (n > 1 && (text[n - 1] == 'B' || text[n - 1] == 'b') && n < sizeof copy) {
        memcpy(copy, text, n - 1);
        copy[n - 1] = 0;
        return nbi_cli_number(out, copy, err);
    }
    return nbi_cli_number(out, text, err);
}

/* ---- help */

/* Lines of `text` behind `indent` spaces; the first continues the current line. */
static void print_indented(const char *text, int indent)
{
    for (const char *line = text; line;) {
        const char *end = strchr(line, '\n');
        int n = end ? (int)(end - line) : (int)strlen(line);
        printf("%*s%.*s\n", line == text ? 0 : indent, "", n, line);
        line = end ? end + 1 : NULL;
    }
}

static void print_help(const nbi_command *c, const nbi_opt *options)
{
    printf("Usage: nibble %s %s\n\n%s\n", c->name, c->usage, c->summary);
    if (c->text) printf("\n%s\n", c->text);
    printf("\nOptions:\n");
    for (const nbi_opt *o = options; o->name; o++) {
        char head[64];
        snprintf(head, sizeof head, "--%s%s%s", o->name, o->value ? " " : "",
                 o->value ? o->value : "");
        printf("  %-24s", head);
        if (strlen(head) > 23) printf("\n%*s", 26, "");
        print_indented(o->help, 26);
    }
    printf("  %-24s%s\n", "--help", "this text");
}

/* ---- parsing */

static nb_status store(const nbi_opt *o, const char *value, nb_error *err)
{
    uint64_t wide;
    char *end;
    switch (o->kind) {
    case NBI_OPT_FLAG: *(bool *)o->out = true; return NB_OK;
    case NBI_OPT_STRING: *(const char **)o->out = value; return NB_OK;
    case NBI_OPT_LIST: {
        nbi_opt_list *list = o->out;
        const char **more = nbi_realloc(list->items, (list->n + 1) * sizeof *more);
        if (!more) return nbi_fail(err, NB_NO_MEMORY, "out of memory");
        list->items = more;
        more[list->n++] = value;
        return NB_OK;
    }
    case NBI_OPT_U32:
        NB_TRY(nbi_cli_number(&wide, value, err));
        if (wide > UINT32_MAX) return nbi_fail(err, NB_TOO_LARGE, "\"%s\" is too large", value);
        *(uint32_t *)o->out = (uint32_t)wide;
        return NB_OK;
    case NBI_OPT_U64: return nbi_cli_number(o->out, value, err);
    case NBI_OPT_BYTES: return parse_bytes(o->out, value, err);
    case NBI_OPT_F64:
        errno = 0;
        *(double *)o->out = strtod(value, &end);
        return errno || end == value || *end
                   ? nbi_fail(err, NB_INVALID, "\"%s\" is not a number", value)
                   : NB_OK;
    }
    return NB_INTERNAL;
}

void nbi_opt_list_free(nbi_opt_list *list)
{
    nbi_free(list->items);
    *list = (nbi_opt_list){0};
}

/* The option of "name" or "name=value"; *value is set for the second. */
static const nbi_opt *find_option(const nbi_opt *options, const char *text, const char **value)
{
    size_t n = strcspn(text, "=");
    *value = text[n] ? text + n + 1 : NULL;
    for (const nbi_opt *o = options; o->name; o++)
        if (strlen(o->name) == n && !strncmp(o->name, text, n)) return o;
    return NULL;
}

/* One "--..." argument; *i moves over a value of its own. Returns -1 or an exit status. */
static int take_option(const nbi_command *c, const nbi_opt *options, int argc, char **argv, int *i,
                       bool seen[OPTIONS_MAX])
{
    const char *value;
    const nbi_opt *o = find_option(options, argv[*i] + 2, &value);
    nb_error err;
    if (!o) return nbi_cli_usage(c, "unknown option %s", argv[*i]);
    if (o->kind == NBI_OPT_FLAG && value) return nbi_cli_usage(c, "--%s takes no value", o->name);
    if (o->kind != NBI_OPT_FLAG && !value) {
        if (*i + 1 >= argc) return nbi_cli_usage(c, "--%s needs a value (%s)", o->name, o->value);
        value = argv[++*i];
    }
    size_t index = (size_t)(o - options);
    if (seen[index] && o->kind != NBI_OPT_LIST)
        return nbi_cli_usage(c, "--%s is given twice", o->name);
    seen[index] = true;
    if (store(o, value, &err) != NB_OK) return nbi_cli_usage(c, "--%s: %s", o->name, err.text);
    return -1;
}

int nbi_cli_parse(const nbi_command *c, const nbi_opt *options, int argc, char **argv,
                  int *n_operands)
{
    bool seen[OPTIONS_MAX] = {false}, only_operands = false;
    int operands = 0;
    for (size_t k = 0; options[k].name; k++) NB_ASSERT(k < OPTIONS_MAX);
    for (int i = 1; i < argc; i++) {
        if (!only_operands && (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))) {
            print_help(c, options);
            return NBI_EXIT_OK;
        }
    }
    for (int i = 1; i < argc; i++) {
        if (!only_operands && !strcmp(argv[i], "--")) {
            only_operands = true;
        } else if (!only_operands && !strncmp(argv[i], "--", 2)) {
            int status = take_option(c, options, argc, argv, &i, seen);
            if (status >= 0) return status;
        } else if (!only_operands && argv[i][0] == '-' && argv[i][1]) {
            return nbi_cli_usage(c, "unknown option %s", argv[i]);
        } else if (!c->operands) {
            return nbi_cli_usage(c, "unexpected argument \"%s\"", argv[i]);
        } else {
            argv[1 + operands++] = argv[i];
        }
    }
    for (size_t k = 0; options[k].name; k++)
        if (options[k].required && !seen[k])
            return nbi_cli_usage(c, "--%s %s is required", options[k].name, options[k].value);
    if (n_operands) *n_operands = operands;
    return -1;
}

/* ---- messages */

int nbi_cli_fail(const nbi_command *command, const nb_error *err)
{
    fflush(stdout);
    fprintf(stderr, "nibble %s: %s\n", command->name, err->text);
    return NBI_EXIT_FAILED;
}

int nbi_cli_usage(const nbi_command *command, const char *fmt, ...)
{
    va_list args;
    fflush(stdout);
    fprintf(stderr, "nibble %s: ", command->name);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fprintf(stderr, "\nTry: nibble %s --help\n", command->name);
    return NBI_EXIT_USAGE;
}

static void log_line(void *user, nb_log_level level, const char *line)
{
    static const char *const heads[NB_LOG_COUNT] = {"error: ", "warning: ", "", "debug: "};
    const uint32_t *rank = user;
    char number[24] = "";
    if (rank) snprintf(number, sizeof number, "rank %u: ", *rank);
    fprintf(stderr, "%s%s%s\n", number, level < NB_LOG_COUNT ? heads[level] : "", line);
}

void nbi_cli_log_follow(uint32_t rank)
{
    static uint32_t number;
    number = rank;
    nb_log_set_sink(log_line, &number, nbi_log_wants(NB_LOG_DEBUG) ? NB_LOG_DEBUG : NB_LOG_WARN);
}

void nbi_cli_log_start(nb_log_level max_level)
{
    nb_log_set_sink(log_line, NULL, max_level);
}

const char *nbi_cli_bytes(char out[24], uint64_t bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
    double v = (double)bytes;
    size_t u = 0;
    while (v >= 1000 && u < 5) {
        v /= 1000;
        u++;
    }
    snprintf(out, 24, u ? "%.2f %s" : "%.0f %s", v, units[u]);
    return out;
}

void nbi_cli_show_progress(void *user, uint64_t done, uint64_t total)
{
    enum { WIDTH = 30 };
    nbi_cli_progress *p = user;
    uint64_t now = nbi_now_ns();
    if (!isatty(STDERR_FILENO) || total == 0) return;
    if (!p->started_ns) p->started_ns = now;
    if (done < total && now - p->shown_ns < 100000000u) return;
    p->shown_ns = now;
    double share = (double)done / (double)total, seconds = (double)(now - p->started_ns) * 1e-9;
    char bar[WIDTH + 1], a[24], b[24], rate[24];
    for (int i = 0; i < WIDTH; i++) bar[i] = i < (int)(share * WIDTH) ? '#' : '.';
    bar[WIDTH] = 0;
    fprintf(stderr, "\r%s [%s] %3.0f %%  %s of %s  %s/s  %.0f s ", p->label, bar, share * 100,
            nbi_cli_bytes(a, done), nbi_cli_bytes(b, total),
            nbi_cli_bytes(rate, seconds > 0.2 ? (uint64_t)((double)done / seconds) : 0), seconds);
    if (done >= total) fputc('\n', stderr);
}
