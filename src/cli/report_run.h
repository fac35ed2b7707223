/* Other subcommands of this program as processes of their own, and a server for a while. */
#pragma once

#include <sys/types.h>

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_REPORT_WORDS 40u

/* Arguments behind the program's name. */
typedef struct nbi_report_words {
    const char *items[NBI_REPORT_WORDS + 2];
    uint32_t n;
} nbi_report_words;

/* Appends n words; aborts beyond the maximum. */
void nbi_report_add_words(nbi_report_words *w, const char *const *words, size_t n);
#define nbi_report_add(w, ...)                                    \
    nbi_report_add_words((w), (const char *const[]){__VA_ARGS__}, \
                         sizeof((const char *const[]){__VA_ARGS__}) / sizeof(const char *))

/* Runs the program with these words and reads the JSON object that it prints. The exit status may
 * be up to `max_status`; what it says on standard error goes to ours. */
nb_status nbi_report_json(json_t **out, const nbi_report_words *w, int max_status, nb_error *err);

typedef struct nbi_report_server {
    pid_t pid; /* 0: none runs */
    char url[128];
} nbi_report_server;

/* Starts a server with these words, its log in the file `log`, and waits until it is ready. */
nb_status nbi_report_serve(nbi_report_server *out, const nbi_report_words *w, const char *log,
                           nb_error *err);
/* SIGTERM, and waits. Nothing when none runs. */
void nbi_report_serve_end(nbi_report_server *server);

#ifdef __cplusplus
}
#endif
