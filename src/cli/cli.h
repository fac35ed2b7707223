/* What the subcommands share: options, help, error lines, progress.
 *
 * A subcommand is `int nbi_cmd_xxx(int argc, char **argv)` in cmd_xxx.c: argv[0] is its name; it
 * returns the exit status: 0, 1 for a failure, 2 for wrong usage. It is declared here and has a row
 * in main.c. Results go to stdout, everything else to stderr. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { NBI_EXIT_OK = 0, NBI_EXIT_FAILED = 1, NBI_EXIT_USAGE = 2 };

/* ---- options: "--name VALUE", "--name=VALUE", "--flag" */

typedef enum nbi_opt_kind {
    NBI_OPT_FLAG,   /* bool */
    NBI_OPT_STRING, /* const char *; points into argv */
    NBI_OPT_LIST,   /* nbi_opt_list; may be given several times */
    NBI_OPT_U32,    /* uint32_t; K, M, G multiply by 1000, Ki, Mi, Gi by 1024 */
    NBI_OPT_U64,    /* uint64_t; the same */
    NBI_OPT_BYTES,  /* uint64_t; the same, an ending B is allowed */
    NBI_OPT_F64,    /* double */
} nbi_opt_kind;

typedef struct nbi_opt_list {
    const char **items; /* [n] into argv; freed by nbi_opt_list_free() */
    size_t n;
} nbi_opt_list;

void nbi_opt_list_free(nbi_opt_list *list);

typedef struct nbi_opt {
    const char *name; /* "model", without dashes; NULL ends the table */
    nbi_opt_kind kind;
    void *out; /* of the kind's type; keeps its value (the default) when the option is not given */
    const char *value; /* what help calls the value, e.g. "DIR"; NULL for flags */
    const char *help;  /* one or more lines ('\n'); says the default */
    bool required;
} nbi_opt;

typedef struct nbi_command {
    const char *name;    /* "inspect" */
    const char *summary; /* one line, for `nibble --help` */
    const char *usage;   /* behind the name, e.g. "--model DIR [--json]" */
    const char *text; /* paragraphs for `nibble CMD --help`, without a final newline; may be NULL */
    const char *operands; /* what positional arguments are; NULL: none are taken */
} nbi_command;

/* Parses argv[1..]. Returns -1 to go on, else the exit status (help was printed, or the sentence
 * what is wrong). Positional arguments are moved to the front of argv[1..] and counted in
 * *n_operands when the command takes any. */
int nbi_cli_parse(const nbi_command *command, const nbi_opt *options, int argc, char **argv,
                  int *n_operands);

/* Appends a JSON object of the options as they stand, "max_body_bytes" for "max-body-bytes"; keys
 * ("api-key", "ssl-keyfile") are left out. */
nb_status nbi_cli_options_json(const nbi_opt *options, nbi_buf *out);

/* "5G", "1.5Mi", "4096". Decimal fractions need a suffix. NB_INVALID, NB_TOO_LARGE. */
nb_status nbi_cli_number(uint64_t *out, const char *text, nb_error *err);

/* ---- messages */

/* Prints "nibble CMD: sentence" to stderr; returns NBI_EXIT_FAILED. */
int nbi_cli_fail(const nbi_command *command, const nb_error *err);

/* A wrong combination of options: the sentence and a pointer to --help; returns NBI_EXIT_USAGE. */
int nbi_cli_usage(const nbi_command *command, const char *fmt, ...) NBI_PRINTF(2, 3);

/* Log lines to stderr, with the level in front of warnings and errors. */
void nbi_cli_log_start(nb_log_level max_level);
/* Lines from here on are those of a rank that follows: with its number, and only warnings unless
 * debug lines are asked for. */
void nbi_cli_log_follow(uint32_t rank);

/* "4.52 GB" (powers of 1000). */
const char *nbi_cli_bytes(char out[24], uint64_t bytes);

/* An nb_progress: a bar on stderr when that is a terminal, else nothing. user: an nbi_cli_progress,
 * zeroed but for `label`. */
typedef struct nbi_cli_progress {
    const char *label;
    uint64_t started_ns, shown_ns;
} nbi_cli_progress;
void nbi_cli_show_progress(void *user, uint64_t done, uint64_t total);

/* ---- subcommands (main.c has the table) */

int nbi_cmd_bench(int argc, char **argv);
int nbi_cmd_bench_serve(int argc, char **argv); /* of nbi_cmd_bench() */
int nbi_cmd_chat(int argc, char **argv);
int nbi_cmd_check(int argc, char **argv);
int nbi_cmd_doctor(int argc, char **argv);
int nbi_cmd_inspect(int argc, char **argv);
int nbi_cmd_quantize(int argc, char **argv);
int nbi_cmd_report(int argc, char **argv);
int nbi_cmd_roofline(int argc, char **argv);
int nbi_cmd_serve(int argc, char **argv);
int nbi_cmd_score(int argc, char **argv);
int nbi_cmd_synth(int argc, char **argv);
int nbi_cmd_tune(int argc, char **argv);
int nbi_cmd_tokenize(int argc, char **argv);

#ifdef __cplusplus
}
#endif
